"""How a program is lowered for one kind of device: recipes, ours and those of other distributions."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from polyport import discovery
from polyport.errors import ConfigError
from polyport_executorch.methods import METHOD

if TYPE_CHECKING:
    from polyport_executorch.building import Builder

#: Entry points of recipes: the name is that of the recipe, the object a `Recipe`.
RECIPES = "polyport_executorch.recipes"


@attrs.frozen(kw_only=True, eq=False)
class Recipe:
    """How a program is lowered for one kind of device.

    Args:
        name: What `ExecutorchConfig.backend` says.
        check: Called before any work, when a config names the recipe. Raises `polyport.errors.ConfigError` where nothing can be
            lowered.
        partitioners: Makes the partitioners (`executorch.exir.backend.partitioner.Partitioner`), in the order in which they take
            operators.
        rewrite: Changes the functional graph of ATen operators before anything else does, through a
            `polyport_executorch.building.Builder`.
        passes: Makes passes that the edge program goes through before the partitioners see it.
        static_caches: Whether graphs may change inputs in place.
        device: Kind of torch device (`"cuda"`) that the weights must be on; None where it doesn't matter.
    """

    name: str
    check: Callable[[], None] = lambda: None
    partitioners: Callable[[], Sequence[Any]]
    rewrite: Callable[[Builder], None] = lambda _: None
    passes: Callable[[], Sequence[Any]] = tuple
    static_caches: bool = True
    device: str | None = None


def find_recipe(name: str) -> Recipe:
    """The recipe of a name.

    Raises:
        ConfigError: There is none, or nothing can be lowered with it here.
    """
    recipe = _OURS.get(name) or _brought(name)
    recipe.check()
    return recipe


def _brought(name: str) -> Recipe:
    """The recipe that another distribution brings under that name."""
    brought = {plugin.name: plugin for plugin in discovery.installed(RECIPES)}
    if name not in brought:
        known = ", ".join(sorted({*_OURS, *brought}))
        raise ConfigError(
            f"There is no ExecuTorch recipe {name!r}. Installed recipes: {known}.", backend="executorch"
        )
    recipe = discovery.load(brought[name])
    if not isinstance(recipe, Recipe):
        raise ConfigError(
            f"The recipe {name!r} of {brought[name].distribution} is {type(recipe).__name__}, not a Recipe.",
            backend="executorch",
        )
    return recipe


def check_call(name: str, model: Any, inputs: Mapping[str, Any]) -> None:
    """Refuse a call of a model that a recipe can't lower.

    Args:
        name: Name of the recipe.
        model: The model.
        inputs: Its forward kwargs.

    Raises:
        ConfigError: The recipe takes no cache of a fixed size, or takes weights on another device only.
    """
    recipe = find_recipe(name)
    # inputs that are no mapping are refused by the capture, which says what is wrong with them
    if not recipe.static_caches and isinstance(inputs, Mapping) and any(map(_is_static, inputs.values())):
        raise static_cache_refused(name)
    if recipe.device is None:
        return
    elsewhere = sorted({str(p.device) for p in model.parameters() if p.device.type != recipe.device})
    if elsewhere:
        raise ConfigError(
            f"backend={name!r} lowers weights on {recipe.device}, and the model has some on {', '.join(elsewhere)}. "
            f"Move the model and its inputs there first, as in model.to({recipe.device!r}).",
            backend="executorch",
        )


def _is_static(value: Any) -> bool:
    """Whether a value is a cache with buffers of a fixed size, or holds such a cache."""
    from transformers import EncoderDecoderCache, StaticCache

    if isinstance(value, EncoderDecoderCache):
        return _is_static(value.self_attention_cache) or _is_static(value.cross_attention_cache)
    return isinstance(value, StaticCache)


def static_cache_refused(name: str) -> ConfigError:
    """What is wrong with a cache of a fixed size where the recipe of that name takes none."""
    return ConfigError(
        f"backend={name!r} takes no cache of a fixed size (StaticCache): export with a dynamic cache.",
        backend="executorch",
    )


def _xnnpack() -> Sequence[Any]:
    from polyport_executorch.xnnpack import partitioner

    return [partitioner()]


def _for_xnnpack(builder: Builder) -> None:
    from polyport_executorch.rewrites import rewrite

    rewrite(builder)


def _on_apple_silicon() -> None:
    if sys.platform != "darwin" or platform.machine() != "arm64":
        raise ConfigError(
            f"backend='mlx' lowers for GPUs of Apple Silicon, on macOS with an ARM processor; this is {sys.platform} on "
            f"{platform.machine()}. Use backend='xnnpack' for CPUs.",
            backend="executorch",
        )


def _mlx() -> Sequence[Any]:
    from executorch.backends.mlx.partitioner import MLXPartitioner

    return [MLXPartitioner()]


def _with_cuda() -> None:
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            "backend='cuda' compiles kernels for a GPU, and PyTorch finds no CUDA here. Use backend='xnnpack' for CPUs, or a "
            "machine and a PyTorch with CUDA.",
            backend="executorch",
        )


def _cuda() -> Sequence[Any]:
    from executorch.backends.cuda.cuda_backend import CudaBackend
    from executorch.backends.cuda.cuda_partitioner import CudaPartitioner

    return [CudaPartitioner([CudaBackend.generate_method_name_compile_spec(METHOD)])]


_OURS: Mapping[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(name="xnnpack", partitioners=_xnnpack, rewrite=_for_xnnpack),
        Recipe(name="mlx", check=_on_apple_silicon, partitioners=_mlx, static_caches=False),
        Recipe(name="cuda", check=_with_cuda, partitioners=_cuda, device="cuda"),
    )
}
