"""Recipes: ours, those of other distributions, and what is refused before any work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import polyport
from polyport import ExportedModel
from polyport.errors import ConfigError, ExportError
from polyport_dynamo import DynamoConfig
from polyport_executorch import ExecutorchConfig, ExecutorchExporter, Recipe
from polyport_executorch.delegation import REPORT
from polyport_executorch.recipes import find_recipe

Install = Callable[[str, Any], None]


@pytest.fixture
def calls(small: Any) -> Iterator[list[int]]:
    """One entry for each call of the small model."""
    found: list[int] = []
    handle = small.register_forward_hook(lambda *_: found.append(1))
    yield found
    handle.remove()


def export(model: Any, inputs: Any, backend: str, **options: Any) -> ExportedModel:
    return ExecutorchExporter().export(
        model, inputs, ExecutorchConfig(dynamic=True, backend=backend, **options)
    )


# ── ours ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_unknown_recipe(small: Any, token_ids: Any, install_recipe: Install) -> None:
    install_recipe("acme", Recipe(name="acme", partitioners=list))
    with pytest.raises(
        ConfigError, match=r"no ExecuTorch recipe 'xnpack'\. Installed recipes: acme, cuda, mlx, xnnpack\."
    ):
        export(small, token_ids(1, 5), "xnpack")


def test_unknown_recipe_before_any_work(small: Any, token_ids: Any, calls: list[int]) -> None:
    with pytest.raises(ConfigError, match="'xnpack'"):
        export(small, token_ids(1, 5), "xnpack")
    assert not calls


def test_mlx_elsewhere(small: Any, token_ids: Any, calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyport_executorch.recipes.platform.machine", lambda: "x86_64")
    with pytest.raises(ConfigError, match=r"backend='mlx' .*Apple Silicon.* x86_64\. Use backend='xnnpack'"):
        export(small, token_ids(1, 5), "mlx")
    assert not calls


def test_cuda_without_a_gpu(
    small: Any, token_ids: Any, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"backend='cuda' .*no CUDA here\. Use backend='xnnpack'"):
        export(small, token_ids(1, 5), "cuda")
    assert not calls


def test_generation_is_refused_as_early(
    tiny_llama: Any, token_ids: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    called: list[int] = []
    handle = tiny_llama.register_forward_hook(lambda *_: called.append(1))
    try:
        with pytest.raises(ConfigError, match="backend='cuda'"):
            ExecutorchExporter().export_for_generation(
                tiny_llama, token_ids(1, 5), ExecutorchConfig(dynamic=True, backend="cuda")
            )
    finally:
        handle.remove()
    assert not called


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("backend", 1),
        ("max_sizes", {"batch": 0}),
        ("max_sizes", {"batch": True}),
        ("max_sizes", [("batch", 1)]),
    ],
)
def test_options_of_a_wrong_type(option: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=option):
        ExecutorchConfig(**{option: value})
    with pytest.raises(ConfigError, match=option):
        ExecutorchConfig.from_dict({option: value})


# ── those of others ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_recipe_of_another_distribution(small: Any, token_ids: Any, install_recipe: Install) -> None:
    """Its check runs, its passes run before its partitioners, and the program is right."""
    order: list[str] = []

    def passes() -> list[Any]:
        from executorch.exir.pass_base import ExportPass

        class Seen(ExportPass):
            def call(self, graph_module: Any) -> Any:
                order.append("pass")
                return super().call(graph_module)

        return [Seen()]

    def partitioners() -> list[Any]:
        order.append("partitioners")
        return []

    install_recipe(
        "acme",
        Recipe(name="acme", check=lambda: order.append("check"), partitioners=partitioners, passes=passes),
    )
    exported = export(small, token_ids(1, 5), "acme")
    assert order[0] == "check"
    assert {"pass", "partitioners"} <= set(order)
    report = exported["model"].metadata.backend[REPORT]
    assert report["delegated"] == {}
    assert any("mm" in kernel for kernel in report["portable"])  # left, as nothing takes it
    inputs = token_ids(3, 9)
    with torch.no_grad():
        expected = small(**inputs).last_hidden_state
    torch.testing.assert_close(exported(**inputs).last_hidden_state, expected, atol=1e-5, rtol=1e-5)


def test_recipe_that_cannot_be_used_here(
    small: Any, token_ids: Any, calls: list[int], install_recipe: Install
) -> None:
    def check() -> None:
        raise ConfigError("Acme's chip is not in this machine.")

    install_recipe("acme", Recipe(name="acme", check=check, partitioners=list))
    with pytest.raises(ConfigError, match="Acme's chip"):
        export(small, token_ids(1, 5), "acme")
    assert not calls


def test_partitioner_that_fails(small: Any, token_ids: Any, install_recipe: Install) -> None:
    def partitioners() -> list[Any]:
        raise RuntimeError("the compiler of Acme is missing")

    install_recipe("acme", Recipe(name="acme", partitioners=partitioners))
    with pytest.raises(ExportError, match="RuntimeError: the compiler of Acme is missing") as caught:
        export(small, token_ids(1, 5), "acme")
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_something_that_is_no_recipe(install_recipe: Install) -> None:
    install_recipe("acme", {"name": "acme"})
    with pytest.raises(ConfigError, match="'acme' of acme-recipes is dict, not a Recipe"):
        find_recipe("acme")


def test_ours_are_not_replaced(install_recipe: Install) -> None:
    theirs = Recipe(name="xnnpack", partitioners=list)
    install_recipe("xnnpack", theirs)
    assert find_recipe("xnnpack") is not theirs


@pytest.mark.parametrize("first", ["executorch", "dynamo"])
def test_refused_before_the_other_formats(
    small: Any, token_ids: Any, calls: list[int], install_recipe: Install, first: str
) -> None:
    def check() -> None:
        raise ConfigError("Acme's chip is not in this machine.")

    install_recipe("acme", Recipe(name="acme", check=check, partitioners=list))
    configs = [
        {"export_format": "executorch", "dynamic": True, "backend": "acme"},
        {"export_format": "dynamo", "dynamic": True},
    ]
    with pytest.raises(ConfigError, match="Acme's chip"):
        polyport.export(small, token_ids(1, 5), configs if first == "executorch" else configs[::-1])
    assert not calls


@pytest.fixture
def llama_calls(tiny_llama: Any) -> Iterator[list[int]]:
    found: list[int] = []
    handle = tiny_llama.register_forward_hook(lambda *_: found.append(1))
    yield found
    handle.remove()


def test_static_caches_that_a_recipe_cannot_take(
    tiny_llama: Any, static_cache: Any, static_step: Any, install_recipe: Install, llama_calls: list[int]
) -> None:
    install_recipe("acme", Recipe(name="acme", partitioners=list, static_caches=False))
    inputs = static_step(static_cache(2), 0, 2, 3)
    refused = r"backend='acme' takes no cache of a fixed size \(StaticCache\): export with a dynamic cache"
    with pytest.raises(ConfigError, match=refused):
        export(tiny_llama, inputs, "acme")
    assert not llama_calls
    # another format may come first, and its trace be shared
    configs = [DynamoConfig(dynamic=True), ExecutorchConfig(dynamic=True, backend="acme")]
    with pytest.raises(ConfigError, match=refused):
        polyport.export(tiny_llama, inputs, configs)


def test_weights_on_another_device(
    small: Any, token_ids: Any, calls: list[int], install_recipe: Install
) -> None:
    install_recipe("acme", Recipe(name="acme", partitioners=list, device="xpu"))
    with pytest.raises(
        ConfigError, match=r"backend='acme' .* on xpu, .* has some on cpu\. .* model\.to\('xpu'\)"
    ):
        export(small, token_ids(1, 5), "acme")
    assert not calls


def test_weights_on_the_right_device(small: Any, token_ids: Any, install_recipe: Install) -> None:
    install_recipe("acme", Recipe(name="acme", partitioners=list, device="cpu"))
    assert list(export(small, token_ids(1, 5), "acme")) == ["model"]
