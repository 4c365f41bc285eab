"""Tensors whose content a runtime keeps.

A runtime that keeps a cache inside itself (OpenVINO in variables, ExecuTorch in buffers of the program) has nothing to return
after a step. It returns these in place of the cache's tensors: they have its shapes, and are handed back at the next step, when
the runtime sees that it still holds the content. Rows are reordered without reading, as beam search does at every token.
Whatever else is computed with one reads the content first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from polyport.errors import InputError

aten = torch.ops.aten


class Keeper(Protocol):
    """What keeps the contents of some tensors, as they were after one step."""

    #: The runner that made it: only that one can take its tensors back.
    runner: Any

    def read(self, key: Any) -> torch.Tensor:
        """A copy of one of the contents.

        Raises:
            InputError: A later step has overwritten it.
        """
        ...


class HeldTensor(torch.Tensor):
    """A tensor whose content a runtime keeps.

    Args:
        keeper: What keeps it.
        key: Which of the keeper's contents it is.
        shape: Its shape.
        dtype: Its dtype.
        rows: Indices along the first axis: what it holds is the content in this order; None for the content as it is.
    """

    # a cache has many of these, and all are new after each step
    __slots__ = ("keeper", "key", "rows")
    keeper: Keeper
    key: Any
    rows: torch.Tensor | None

    @staticmethod
    def __new__(
        cls,
        keeper: Keeper,
        key: Any,
        shape: Sequence[int],
        dtype: torch.dtype,
        rows: torch.Tensor | None = None,
    ) -> HeldTensor:
        """A tensor without memory."""
        made: HeldTensor = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype)
        made.keeper, made.key, made.rows = keeper, key, rows
        return made

    # functions are not looked at, only what they come to: shapes and dtypes are answered without asking Python
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub has no defaults
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func._schema.is_mutable and isinstance(args[0], HeldTensor):
            raise InputError(
                f"A runtime keeps the content of this tensor, so {func} can't write to it. Copy it first: tensor.clone().",
                stage="run",
            )
        rule = _LAZY.get(func)
        if rule is not None and (made := rule(*args, **kwargs)) is not None:
            return made
        return func(*pytree.tree_map(plain_tensor, args), **pytree.tree_map(plain_tensor, kwargs))

    def read(self) -> torch.Tensor:
        """The content, as an ordinary tensor of its own.

        Raises:
            InputError: The runtime holds it no longer.
        """
        content = self.keeper.read(self.key)
        return content if self.rows is None else content.index_select(0, self.rows)

    def reordered(self, rows: torch.Tensor) -> HeldTensor:
        """The same content with its rows in another order.

        Args:
            rows: Indices along the first axis.
        """
        order = rows if self.rows is None else self.rows.index_select(0, rows)
        shape = (len(rows), *self.shape[1:])
        return HeldTensor(self.keeper, self.key, shape, self.dtype, order)

    # ── what an ordinary tensor does outside of its operators ───────────────────────────────────────────────────────

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.read())

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.read()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.read().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.read().__array__(*args, **kwargs)  # type: ignore[no-untyped-call]

    def __dlpack__(self, **options: Any) -> Any:
        return self.read().__dlpack__(**options)

    def numpy(self, *, force: bool = False) -> Any:
        """See `torch.Tensor.numpy`."""
        return self.read().numpy(force=force)

    def tolist(self) -> Any:
        """See `torch.Tensor.tolist`."""
        return self.read().tolist()


def left_by(runner: Any, tensors: Sequence[Any]) -> tuple[Any, torch.Tensor | None] | None:
    """What keeps some tensors and the order of their rows, where they are, in order, all that one step of a runner has left.

    Args:
        runner: The runner.
        tensors: Inputs of a call.

    Returns:
        Their keeper, and the rows (see `HeldTensor`); None where they are of another origin, or not of one step and order.
    """
    first = tensors[0]
    if not isinstance(first, HeldTensor) or first.keeper.runner is not runner:
        return None
    keeper, rows = first.keeper, first.rows
    for key, one in enumerate(tensors):
        if not isinstance(one, HeldTensor) or one.keeper is not keeper or one.key != key:
            return None
        if one.rows is not rows and (one.rows is None or rows is None or not torch.equal(one.rows, rows)):
            return None
    return keeper, rows


def plain_tensor(value: Any) -> Any:
    """The content of a held tensor; anything else as it is."""
    return value.read() if isinstance(value, HeldTensor) else value


def _select(tensor: Any, dim: int, rows: torch.Tensor) -> HeldTensor | None:
    return tensor.reordered(rows) if isinstance(tensor, HeldTensor) and dim in (0, -tensor.dim()) else None


def _index(tensor: Any, indices: Sequence[Any]) -> HeldTensor | None:
    rows = indices[0] if len(indices) == 1 else None
    if not isinstance(tensor, HeldTensor) or not isinstance(rows, torch.Tensor):
        return None
    return tensor.reordered(rows) if rows.dim() == 1 and rows.dtype == torch.int64 else None


def _same(tensor: Any) -> HeldTensor | None:
    if not isinstance(tensor, HeldTensor):
        return None
    return HeldTensor(tensor.keeper, tensor.key, tensor.shape, tensor.dtype, tensor.rows)


#: Operators that need no content, with what they return; None where they do need it.
_LAZY: dict[Any, Callable[..., HeldTensor | None]] = {
    aten.index_select.default: _select,
    aten.index.Tensor: _index,
    aten.detach.default: _same,
    aten.alias.default: _same,
}
