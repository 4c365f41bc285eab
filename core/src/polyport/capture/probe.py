"""Asking the model which axes vary, by running it at other sizes."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch

from polyport import structure
from polyport.capture.buffers import true_lengths
from polyport.capture.configs import numbers, placeholders
from polyport.capture.groups import Layout
from polyport.capture.layout import propose
from polyport.capture.prepare import STAGE, tensor_leaves
from polyport.capture.resize import resized
from polyport.errors import ExportError, InputError

logger = logging.getLogger(__name__)


@attrs.frozen
class Found:
    """What the probe learned.

    Args:
        layout: The axes that vary, all of them tried together.
        leaves: Input tensors at the sizes to trace with.
        sizes: Group -> its size there.
        runs: How often the model was run.
    """

    layout: Layout
    leaves: Mapping[str, torch.Tensor]
    sizes: Mapping[str, int]
    runs: int


def rebuilt(kwargs: Mapping[str, Any], leaves: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The kwargs with other tensors in the places of the named leaves, in containers of their own."""
    named = structure.flatten_named(dict(kwargs))
    _, spec = structure.flatten(dict(kwargs))
    value: dict[str, Any] = structure.unflatten([leaves.get(name, leaf) for name, leaf in named], spec)
    return value


class Probe:
    """Runs the model on samples of other sizes.

    Args:
        model: The model, in evaluation mode, guarded by `untouched`.
        kwargs: The prepared sample.
    """

    def __init__(self, model: Any, kwargs: Mapping[str, Any]) -> None:
        self.model = model
        self.kwargs = kwargs
        self.leaves = tensor_leaves(kwargs)
        config = getattr(model, "config", None)
        self.special = placeholders(config)
        # a window of n keeps n - 1, a table of n positions starts at 1: neighbours are compared with, too
        self.avoid = {near for n in numbers(config) for near in (n - 1, n, n + 1)}
        self.unit = _unit(config)
        self.runs = 0

    def run(self, leaves: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """The tensors that the model returns for these inputs."""
        self.runs += 1
        given = {name: leaf.clone() for name, leaf in leaves.items()}  # static caches are written in place
        kwargs = rebuilt(self.kwargs, given)
        with torch.no_grad(), warnings.catch_warnings(), quiet(), true_lengths(kwargs):
            warnings.simplefilter("ignore")
            outputs = self.model(**kwargs)
        return [leaf for leaf in structure.flatten(outputs)[0] if isinstance(leaf, torch.Tensor)]

    def base(self) -> list[torch.Tensor]:
        """Outputs for the caller's own sample.

        Raises:
            InputError: The model does not take it.
        """
        try:
            return self.run(self.leaves)
        except Exception as error:
            raise InputError(
                f"{type(self.model).__name__} itself fails on these inputs, so there is nothing to export: "
                f"{type(error).__name__}: {error}",
                stage=STAGE,
            ) from error

    def find(self, pinned: frozenset[str] = frozenset()) -> Found:
        """The axes that vary and a sample that shows them all.

        Args:
            pinned: Names of axes that keep the sample's size.

        Raises:
            ExportError: The model takes no other batch than the sample's.
        """
        finite = all(bool(x.isfinite().all()) for x in self.base() if x.is_floating_point())
        layout = propose(self.leaves, self.special).pinned(pinned)
        trial = _Trial(self, layout, finite)
        trial.search()
        return trial.found()


class _Trial:
    """The search for a set of axes that vary together."""

    def __init__(self, probe: Probe, layout: Layout, finite: bool) -> None:
        self.probe = probe
        self.layout = layout
        self.finite = finite
        self.copies = 1
        self.sizes: dict[str, int] = {}  # of the groups that were seen to vary

    def search(self) -> None:
        groups = self.layout.groups
        lead = {name for name, group in groups.items() if group.kind == "lead"}
        sure = {
            name for name, group in groups.items() if group.sure and group.kind in ("tokens", "past", "free")
        }
        pixels = {name for name, group in groups.items() if group.kind == "pixels"}
        if "cache_length" in groups:
            self._try_alone("cache_length")  # first: more tokens need room in a static cache
        copies = self._copies()
        sizes = self._distinct(sure, {})
        images = next(self._images(pixels), {})
        if self._works({**self.sizes, **sizes, **images}, copies, images):
            self.sizes, self.copies = {**self.sizes, **sizes, **images}, copies
        else:
            if lead and self._works(self.sizes, copies):
                self.copies = copies
            elif lead and self._works(self.sizes, 2):
                self.copies = 2
            if sizes and self._works({**self.sizes, **sizes}, self.copies):
                self.sizes = {**self.sizes, **sizes}
            else:
                for name in sorted(sure):
                    self._try_alone(name)
            for images in self._images(pixels):
                if self._works({**self.sizes, **images}, self.copies):
                    self.sizes = {**self.sizes, **images}
                    break
        for name, group in groups.items():
            if not group.sure and group.kind != "fixed" and name not in self.sizes:
                self._try_alone(name)

    def found(self) -> Found:
        names = set(self.sizes)
        if self.copies > 1:
            names |= {name for name, group in self.layout.groups.items() if group.kind == "lead"}
        elif any(group.kind == "lead" for group in self.layout.groups.values()):
            raise ExportError(
                f"{type(self.probe.model).__name__} fails when its sample inputs are given twice in one batch, so no "
                "other batch than the sample's can be exported. Export with dynamic=False, or give dynamic_shapes.",
                stage=STAGE,
            )
        leaves = resized(self.probe.leaves, self.layout, self.sizes, self.copies, self.probe.special)
        sizes = {
            name: group.size * self.copies if group.kind == "lead" else self.sizes.get(name, group.size)
            for name, group in self.layout.groups.items()
        }
        logger.debug(
            "axes that vary: %s (%d runs)", {name: sizes[name] for name in sorted(names)}, self.probe.runs
        )
        return Found(self.layout.only(names), leaves, sizes, self.probe.runs)

    def _copies(self) -> int:
        """An odd number of copies, so that nothing else is likely to be of the batch's size; at least a batch of 2."""
        batch = self.layout.groups.get("batch")
        return 3 if batch is None or batch.size < 3 else 2

    def _try_alone(self, name: str) -> None:
        group = self.layout.groups[name]
        if group.kind == "free" and not self._works({**self.sizes, name: 2 * group.size}, self.copies):
            # one more of something may be lost in a division, and then looks as if it were allowed
            logger.debug("axis %s can't vary: the model fails at twice its size", name)
            return
        for size in self._candidates(2 * group.size + 64 if name == "cache_length" else group.size):
            if self._works({**self.sizes, name: size}, self.copies):
                self.sizes = {**self.sizes, name: size}
                return
        logger.debug("axis %s can't vary: the model fails at other sizes", name)

    def _distinct(self, names: set[str], taken: Mapping[str, int]) -> dict[str, int]:
        sizes = dict(taken)
        for name in sorted(names):
            sizes[name] = next(self._candidates(self.layout.groups[name].size, set(sizes.values())))
        return {name: sizes[name] for name in names}

    def _candidates(self, size: int, taken: set[int] | None = None) -> Iterator[int]:
        """Other sizes to try: the next primes that equal nothing in the config, then one below."""
        avoid = self.probe.avoid | (taken or set()) | set(self.sizes.values())
        above = [n for n in range(max(size + 1, 5), size + 200) if is_prime(n) and n not in avoid]
        below = [n for n in range(size - 1, 1, -1) if n not in avoid and is_prime(n)]
        yield from above[:1]
        yield from below[:1]
        # where a length must divide (strided convolutions, windows), a multiple of the sample's will do
        if size > 1:
            yield from (size * 2, size * 3)

    def _images(self, names: set[str]) -> Iterator[dict[str, int]]:
        """Image sizes to try: height and width different, then equal, each larger and smaller."""
        if not {"height", "width"} <= names:
            return
        height, width = (self.layout.groups[name].size for name in ("height", "width"))
        unit = self.probe.unit
        for step in dict.fromkeys((unit, 32)):
            yield self._with_patches({"height": height + step, "width": width + 2 * step})
        if height == width:
            for step in dict.fromkeys((unit, 32)):
                yield self._with_patches({"height": height + step, "width": width + step})

    def _with_patches(self, sizes: dict[str, int]) -> dict[str, int]:
        """Image sizes, and those of a mask with an entry per patch."""
        groups = self.layout.groups
        for name, pixels in (("patch_rows", "height"), ("patch_columns", "width")):
            if name in groups:
                sizes[name] = groups[name].size * sizes[pixels] // groups[pixels].size
        return sizes

    def _works(self, sizes: Mapping[str, int], copies: int, _: Any = None) -> bool:
        leaves = resized(self.probe.leaves, self.layout, sizes, copies, self.probe.special)
        try:
            outputs = self.probe.run(leaves)
        except Exception as error:  # noqa: BLE001  the model says no in many ways
            logger.debug(
                "the model fails at %s x%d: %s: %s", dict(sizes), copies, type(error).__name__, error
            )
            return False
        return not self.finite or all(bool(x.isfinite().all()) for x in outputs if x.is_floating_point())


def is_prime(n: int) -> bool:
    """Whether `n` is a prime number: a size that divides by nothing is tied to nothing."""
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))


def _unit(config: Any) -> int:
    """The step in which image sizes go: the largest patch in the config, or the stride of a usual convnet."""
    found: list[int] = []
    stack = [config.to_dict() if hasattr(config, "to_dict") else {}]
    while stack:
        for key, value in stack.pop().items():
            if isinstance(value, Mapping):
                stack.append(value)
            elif key == "patch_size":
                found.extend(
                    n for n in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(n, int)
                )
    return max(found, default=32)


class quiet:  # noqa: N801
    """Keep the model's own log lines about odd inputs to itself."""

    def __enter__(self) -> None:
        self._logger = logging.getLogger("transformers")
        self._level = self._logger.level
        self._logger.setLevel(logging.ERROR)

    def __exit__(self, *_: object) -> None:
        self._logger.setLevel(self._level)
