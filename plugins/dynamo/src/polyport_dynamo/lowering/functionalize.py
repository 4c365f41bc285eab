"""In-place operators rewritten as pure ones, in the graph itself.

torch does this by running the whole program again over fake tensors (`ExportedProgram.run_decompositions`). Most
programs have a handful of in-place operators or none; following the few values they change takes milliseconds.
Whatever is not provably right is refused with `NotLocal`, and the caller takes torch's way.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from polyport_dynamo.lowering import internals

Node = torch.fx.Node
aten = torch.ops.aten


class NotLocal(Exception):
    """The graph cannot be rewritten locally; the reason is the message."""


#: Views through which a change can be followed back: name of the overload to how the base is rebuilt.
_SCATTERS = {aten.slice.Tensor: aten.slice_scatter.default, aten.select.int: aten.select_scatter.default}
_RESHAPES = frozenset({
    aten.view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.default, aten.squeeze.dims,
    aten.flatten.using_ints, aten.unflatten.int, aten._unsafe_view.default,
})  # fmt: skip
_SAME = frozenset({aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten.contiguous.default,
                   aten.to.dtype, aten.to.device, aten.to.dtype_layout})  # fmt: skip


def functionalize(graph: torch.fx.Graph) -> dict[Node, Node]:
    """Replace in-place operators in `graph`.

    Args:
        graph: changed in place; of a copy of the program.

    Returns:
        For each placeholder whose tensor the program changes, the node that has its final content.

    Raises:
        NotLocal: a change cannot be followed safely. The graph is then half rewritten and of no use.
    """
    if not any(_writes(node) for node in graph.nodes):
        return {}
    return _Rewriter(graph).run()


class _Rewriter:
    def __init__(self, graph: torch.fx.Graph) -> None:
        self.graph = graph
        self.base: dict[Node, Node] = {}  # view -> what it is a view of
        self.family: dict[Node, list[Node]] = {}  # root -> its views, in order
        self.current: dict[Node, Node] = {}  # node -> the node with its present content
        self.stale: set[Node] = set()

    def run(self) -> dict[Node, Node]:
        for node in list(self.graph.nodes):
            if node.op == "output" or node.op == "call_function":
                with self.graph.inserting_before(node):
                    node.args = torch.fx.map_arg(node.args, self.now)
                    node.kwargs = torch.fx.map_arg(node.kwargs, self.now)
            if node.op != "call_function":
                continue
            if _writes(node):
                with self.graph.inserting_before(node):
                    self.write(node)
            else:
                self.note_view(node)
        return {
            root: self.current[root]
            for root in self.family
            if root.op == "placeholder" and root in self.current
        }

    def now(self, node: Node) -> Node:
        """The node with the present content of `node`; a view whose base has changed is taken again."""
        origin = self.origin(node)
        if origin in self.stale:
            self.stale.discard(origin)
            fresh = self.graph.node_copy(origin, self.now)
            fresh.meta = dict(origin.meta)
            self.current[origin] = fresh
            self.origins[fresh] = origin
        return self.current.get(origin, node)

    @property
    def origins(self) -> dict[Node, Node]:
        return self.__dict__.setdefault("_origins", {})  # type: ignore[no-any-return]

    def origin(self, node: Node) -> Node:
        return self.origins.get(node, node)

    def note_view(self, node: Node) -> None:
        source = _viewed(node)
        if source is None:
            return
        source = self.origin(source)
        self.base[node] = source
        self.family.setdefault(self.root(source), []).append(node)

    def root(self, node: Node) -> Node:
        while node in self.base:
            node = self.base[node]
        return node

    def write(self, node: Node) -> None:
        """Replace one in-place operator by its pure form and pass the change on to what shares its memory."""
        target = self.origin(node.args[0])  # type: ignore[arg-type]
        pure = _pure_form(node)
        new = self.graph.call_function(pure[0], pure[1], dict(node.kwargs))
        new.meta = dict(node.meta)
        root = self.root(target)
        self.family.setdefault(root, [])
        self.set_current(target, new)
        changed = {target}
        child = target
        while child in self.base:
            parent = self.base[child]
            self.set_current(parent, self.written_back(child, parent))
            changed.add(parent)
            child = parent
        self.stale.update(view for view in self.family[root] if view not in changed)
        node.replace_all_uses_with(self.current[target])
        self.graph.erase_node(node)

    def set_current(self, origin: Node, new: Node) -> None:
        self.current[origin] = new
        self.origins[new] = origin
        self.stale.discard(origin)

    def written_back(self, child: Node, parent: Node) -> Node:
        """The content of `parent` once its view `child` has changed."""
        content = self.current[child]
        before = self.current.get(parent, parent)
        view, rest = child.target, torch.fx.map_arg(tuple(child.args[1:]), self.now)
        if view in _SCATTERS:
            keywords = torch.fx.map_arg(dict(child.kwargs), self.now)
            new = self.graph.call_function(_SCATTERS[view], (before, content, *rest), keywords)
        elif view in _RESHAPES:
            new = self.graph.call_function(aten.view_as.default, (content, before))
        elif view in _SAME:
            new = self.graph.call_function(aten.alias.default, (content,))
        elif view is aten.transpose.int:
            new = self.graph.call_function(view, (content, *rest))
        elif view is aten.permute.default:
            order: list[Any] = list(rest[0])  # type: ignore[arg-type]
            inverse = sorted(range(len(order)), key=lambda axis: order[axis] % len(order))
            new = self.graph.call_function(view, (content, inverse))
        else:
            raise NotLocal(f"{view} is changed in place through a view")
        new.meta = dict(parent.meta)
        return new


def _schema(node: Node) -> torch.FunctionSchema | None:
    return node.target._schema if isinstance(node.target, torch._ops.OpOverload) else None


def _writes(node: Node) -> bool:
    schema = _schema(node)
    return schema is not None and schema.is_mutable


def _viewed(node: Node) -> Node | None:
    """What a node's result may share memory with, or None."""
    schema = _schema(node)
    if node.target is operator.getitem:
        return node.args[0] if isinstance(node.args[0], torch.fx.Node) else None
    if schema is None:
        return None
    aliased = [
        i
        for i, arg in enumerate(schema.arguments)
        if arg.alias_info is not None and not arg.alias_info.is_write
    ]
    if not aliased:
        return None
    source = node.args[0]
    if aliased != [0] or not isinstance(source, torch.fx.Node):
        raise NotLocal(f"{node.target} is a view of something other than its first argument")
    return source if _gives_view(source, node) else None


def share_memory(source: Node, view: Node) -> bool:
    """Whether `reshape`, `to` and their kind really gave a view: only then does a later change reach the source."""
    left, right = source.meta.get("val"), view.meta.get("val")
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return _same_storage(left, right)
    return True  # Several results, as from `split`: they are views.


def _same_storage(left: torch.Tensor, right: Any) -> bool:
    return isinstance(right, torch.Tensor) and left.untyped_storage()._cdata == right.untyped_storage()._cdata


def _gives_view(source: Node, node: Node) -> bool:
    """Whether an operator that may give a view of its first argument did.

    In a program that was read from a file every recorded tensor has memory of its own, so the operator is asked again.
    """
    if share_memory(source, node) or not internals.is_composite(node.target):
        return True
    left, right = source.meta["val"], node.meta["val"]
    if left.dtype != right.dtype:
        return False
    try:
        return _same_storage(left, internals.run_fake(node))
    except Exception as error:
        raise NotLocal(f"whether {node.format_node()} is a view: {error}") from error


def _pure_form(node: Node) -> tuple[Any, tuple[Any, ...]]:
    """The operator that computes what an in-place one would write, with its positional arguments."""
    schema = node.target._schema  # type: ignore[union-attr]
    written = [
        i for i, arg in enumerate(schema.arguments) if arg.alias_info is not None and arg.alias_info.is_write
    ]
    namespace, _, name = schema.name.partition("::")
    if namespace != "aten" or written != [0] or len(schema.returns) > 1 or not node.args:
        raise NotLocal(f"{node.target} changes something other than its first argument alone")
    special = {
        "copy_": "copy",
        "fill_": "fill",
        "zero_": "zeros_like",
        "detach_": "detach",
        "__ior__": "__or__",
    }
    pure = special.get(name) or (f"__{name[3:]}" if name.startswith("__i") else name.removesuffix("_"))
    packet = getattr(aten, pure, None)
    overload = getattr(packet, schema.overload_name or "default", None)
    if pure == name or overload is None:
        raise NotLocal(f"{node.target} has no form that leaves its argument alone")
    return overload, node.args
