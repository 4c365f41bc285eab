"""FX graph to ONNX nodes: each node through our own table, or else through torchlib."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch

from polyport_dynamo.lowering.facts import symbolic
from polyport_onnx import ops, torch_internals
from polyport_onnx.context import Context
from polyport_onnx.emit import Emitter
from polyport_onnx.naming import AxisNames
from polyport_onnx.promotion import operand_dtype

Node = torch.fx.Node
#: Domain of the functions made from the bodies of loops and branches; they are inlined before the model is returned.
_BODIES = "polyport.bodies"


class UnsupportedOperator(RuntimeError):
    """The program calls operators that cannot be expressed in ONNX; the message lists them."""


class Translator:
    """Translates the graphs of one program.

    Args:
        opset_version: of the default domain.
        names: of dimensions.
    """

    def __init__(self, opset_version: int, names: AxisNames) -> None:
        self.torchlib = torch_internals.Torchlib(opset_version)
        self.opset_version = opset_version
        self.names = names

    def known(self, node: Node) -> bool:
        """Whether a `call_function` node has a translation."""
        if node.target is operator.getitem or isinstance(node.target, torch._ops.HigherOrderOperator):
            return True
        if _is_complex(node):
            return self.torchlib.find(node.target, is_complex=_takes_complex(node)) is not None
        return self.translates(node.target)

    def translates(self, target: Any) -> bool:
        """Whether an operator has a translation, for real inputs at least."""
        return ops.find(target) is not None or self.torchlib.find(target) is not None

    def check(self, graph: torch.fx.Graph) -> None:
        """Raise `UnsupportedOperator` with all operators that have no translation."""
        calls = [node for node in graph.nodes if node.op == "call_function"]
        missing = sorted({str(node.target) for node in calls if not self.known(node)})
        if missing:
            raise UnsupportedOperator(
                f"no ONNX translation at opset {self.opset_version} for: {', '.join(missing)}"
            )

    def run(self, graph: torch.fx.Graph, context: Context, modules: Mapping[str, Any]) -> None:
        """Translate all nodes but placeholders and the output.

        Args:
            graph: functional and without dead nodes; its placeholders must have values in the context already.
            context: receives the values.
            modules: what `get_attr` nodes refer to: tensors and graph modules.
        """
        for node in graph.nodes:
            if node.op == "get_attr":
                context.values[node] = self._attribute(node, context, modules[node.target])
            elif node.op == "call_function":
                context.emit.scope = _module_path(node)
                try:
                    self._call(node, context)
                except Exception as error:
                    error.add_note(f"while translating {node.format_node()}")
                    raise

    def _call(self, node: Node, c: Context) -> None:
        fake = node.meta.get("val")
        if node.target is operator.getitem and not isinstance(c.values[node.args[0]], ir.Value):  # type: ignore[index]
            c.values[node] = c.values[node.args[0]][node.args[1]]  # type: ignore[index]
            return
        is_size = isinstance(fake, (int, torch.SymInt)) and not isinstance(fake, bool)
        if is_size and c.expression(symbolic(fake)) is not None:
            return  # An equal size is there already, or can be read from an input.
        made: Any = NotImplemented
        translate = None if _is_complex(node) else ops.find(node.target)
        if translate is not None:
            made = translate(c, node, *node.args, **node.kwargs)
        if made is NotImplemented:
            made = self._torchlib(node, c)
            if is_size:
                made = c.emit.op("Reshape", c.emit.cast(made, ir.DataType.INT64), c.emit.ints(1))
        if is_size:
            c.remember(symbolic(fake), made)
            return
        c.values[node] = made
        if isinstance(made, ir.Value):
            self._describe(c, made, fake, node.name)
        else:
            for index, (value, part) in enumerate(zip(made, fake or (), strict=False)):
                self._describe(c, value, part, f"{node.name}_{index}")

    @staticmethod
    def _describe(c: Context, value: ir.Value, fake: Any, name: str) -> None:
        if value.name is None:  # Otherwise the node passed on a value that it was given.
            value.name = name
            c.set_type(value, fake)

    def _torchlib(self, node: Node, c: Context) -> Any:
        function = self.torchlib.find(node.target, is_complex=_takes_complex(node))
        if function is None:
            raise UnsupportedOperator(f"no ONNX translation for this use of {node.target}")
        wanted = None if _is_complex(node) else operand_dtype(node)
        args = [_argument(c, arg, wanted) for arg in node.args]
        kwargs = {name: _argument(c, arg, wanted) for name, arg in node.kwargs.items()}
        if "dtype" in kwargs and kwargs["dtype"] is None:
            kwargs["dtype"] = -1
        made, nodes, functions = torch_internals.record(
            function, args, kwargs, c.emit.opset, c.emit.torchlib_constants
        )
        for new in nodes:
            c.emit.append(new)
        c.emit.functions.update(functions)
        return made

    def _attribute(self, node: Node, c: Context, found: Any) -> Any:
        """A tensor becomes a constant, the body of a loop or branch a function."""
        if isinstance(found, torch.Tensor):
            value = torch_internals.new_value(c.emit.opset, node.name)
            value.const_value = ir.tensor_adapters.TorchTensor(found, name=node.name)
            c.set_type(value, found)
            c.emit.initializers.append(value)
            return value
        emit = Emitter(self.opset_version, inline_constants=True)
        body = Context(emit, self.names)
        inputs = []
        for placeholder in found.graph.find_nodes(op="placeholder"):
            value = body.values[placeholder] = torch_internals.new_value(emit.opset, placeholder.name)
            body.set_type(value, placeholder.meta.get("val"))
            inputs.append(value)
        self.check(found.graph)
        self.run(found.graph, body, dict(found.named_children()) | dict(found.named_buffers()))
        results = found.graph.output_node().args[0]
        results = results if isinstance(results, Sequence) else [results]
        outputs = [emit.op("Identity", body.tensor(result)) for result in results]
        for position, (value, result) in enumerate(zip(outputs, results, strict=True)):
            body.set_type(value, result.meta.get("val") if isinstance(result, torch.fx.Node) else result)
            value.name = f"{node.target}_result_{position}"
        graph = ir.Graph(
            inputs, outputs, nodes=emit.nodes, opset_imports={"": self.opset_version}, name=str(node.target)
        )
        function = ir.Function(_BODIES, f"{node.target}_{id(found):x}", graph=graph, attributes=())
        c.emit.functions.update(emit.functions)
        c.emit.functions[function.identifier()] = function
        return function


def _argument(c: Context, arg: Any, wanted: torch.dtype | None) -> Any:
    """An argument as torchlib functions expect it."""
    if isinstance(arg, torch.fx.Node):
        held = c.values.get(arg)
        if held is not None and not isinstance(held, ir.Value):
            return held
        fake = arg.meta.get("val")
        convert = wanted is not None and isinstance(fake, (torch.Tensor, torch.SymInt, torch.SymFloat))
        # Sizes among the arguments (of `clamp`, say) are numbers to be promoted; indices are not tensors to begin with.
        return c.tensor(arg, wanted if convert else None)
    if isinstance(arg, (list, tuple)):
        return [_argument(c, element, wanted) for element in arg]
    if isinstance(arg, (torch.device, torch.memory_format, torch.layout)):
        return str(arg)
    return torch_internals.onnx_dtype(arg) if isinstance(arg, torch.dtype) else arg


def _takes_complex(node: Node) -> bool:
    return any(
        isinstance(value := source.meta.get("val"), torch.Tensor) and value.dtype.is_complex
        for source in node.all_input_nodes
    )


def _is_complex(node: Node) -> bool:
    value = node.meta.get("val")
    return (isinstance(value, torch.Tensor) and value.dtype.is_complex) or _takes_complex(node)


def _module_path(node: Node) -> str:
    """The part of the model that a node comes from, for the names of ONNX nodes."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = next(reversed(stack.values()))[0]
    return str(path)
