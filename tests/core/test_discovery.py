from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from polyport import discovery
from polyport.errors import BackendConflict, BackendLoadError, BackendNotInstalled, IncompatibleVersion

Install = Callable[..., Path]
BACKENDS = "polyport.backends"


def _plugin(
    install: Install, name: str = "toy", distribution: str = "polyport-toy", **options: object
) -> None:
    module = f"{distribution.replace('-', '_')}_plugin"
    options.setdefault("modules", {module: "value = 1"})
    install(distribution, entry_points={BACKENDS: {name: module}}, **options)


def _find(name: str = "toy") -> discovery.InstalledPlugin:
    return discovery.find_backend(name)


def test_found_without_being_imported(install: Install) -> None:
    _plugin(install, version="1.2", requires=["attrs>=20"])
    plugin = _find()
    assert (plugin.name, plugin.distribution, plugin.version, plugin.requires) == (
        "toy",
        "polyport-toy",
        "1.2",
        ("attrs>=20",),
    )
    assert "polyport_toy_plugin" not in sys.modules
    assert discovery.load(plugin).value == 1


def test_groups_are_apart(install: Install) -> None:
    install("ext", entry_points={"polyport.extensions": {"timing": "ext"}}, modules={"ext": ""})
    assert "timing" in [plugin.name for plugin in discovery.installed(discovery.EXTENSIONS)]
    assert "timing" not in [plugin.name for plugin in discovery.installed()]


def test_sorted_by_name(install: Install) -> None:
    for name in ("zebra", "ant"):
        _plugin(install, name, f"polyport-{name}")
    names = [plugin.name for plugin in discovery.installed()]
    assert names == sorted(names)


def test_not_installed_lists_what_is(install: Install) -> None:
    _plugin(install)
    with pytest.raises(BackendNotInstalled, match=r"'tofu' \(installed: .*toy.*pip install polyport-tofu"):
        _find("tofu")


def test_nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "installed", lambda group=BACKENDS: [])
    with pytest.raises(BackendNotInstalled, match=r"\(installed: none\)"):
        _find()


def test_two_distributions_of_one_format(install: Install) -> None:
    _plugin(install, distribution="polyport-toy", version="1.0")
    _plugin(install, distribution="acme-toy", version="2.0")
    with pytest.raises(BackendConflict, match=r"'toy' is provided by acme-toy 2\.0 and polyport-toy 1\.0"):
        _find()


def test_one_distribution_twice_on_the_path(install: Install) -> None:
    """An editable install beside its wheel; the first on the path is the one that Python imports."""
    _plugin(install, distribution="polyport-toy", version="1.0")
    _plugin(install, distribution="polyport_toy", version="1.1")
    assert _find().version == "1.1"


def test_import_that_fails(install: Install) -> None:
    _plugin(install, version="0.3", modules={"polyport_toy_plugin": "import a_missing_package"})
    with pytest.raises(
        BackendLoadError, match=r"'toy' of polyport-toy 0\.3 could not be imported: ModuleNot"
    ) as caught:
        discovery.load(_find())
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_entry_point_without_its_module(install: Install) -> None:
    _plugin(install, modules={})
    with pytest.raises(BackendLoadError, match=r"polyport-toy 1\.0"):
        discovery.load(_find())


def test_missing_requirement(install: Install) -> None:
    _plugin(install, requires=["a-runtime>=2", "attrs>=20"])
    with pytest.raises(
        IncompatibleVersion, match=r"polyport-toy 1\.0 can't be used: a-runtime>=2 is not installed\.$"
    ):
        discovery.load(_find())
    assert "polyport_toy_plugin" not in sys.modules


def test_every_problem_is_named(install: Install) -> None:
    install("a-runtime", version="1.9")
    _plugin(install, requires=["a-runtime>=2,<3", "b-runtime"])
    with pytest.raises(
        IncompatibleVersion, match=r"a-runtime<3,>=2 is needed, 1\.9 is installed; b-runtime is not installed"
    ):
        discovery.load(_find())


@pytest.mark.parametrize(
    ("version", "wanted", "fits"),
    [
        ("2.13.0+cpu", ">=2.12,<3", True),
        ("2.13.0+cpu", "==2.13.0", True),
        ("2.13.0+cu130", "<2.13", False),
        ("2.13.0.dev20260101", ">=2.13", True),
        ("2.13.0rc1", ">=2.13", True),
        ("2.12.1", ">=2.13", False),
        ("10.0", "<9", False),
        ("2.13.0", "", True),
    ],
)
def test_ranges(install: Install, version: str, wanted: str, fits: bool) -> None:
    install("a-runtime", version=version)
    assert (discovery.version_problems({"a-runtime": wanted}) == []) is fits


def test_requirements_of_extras_and_of_other_systems_do_not_count(install: Install) -> None:
    _plugin(install, requires=['missing-a; extra == "testing"', 'missing-b; sys_platform == "amiga"'])
    discovery.load(_find())


@pytest.mark.parametrize("requirement", ["a-runtime>=banana", "=== !", "a b c"])
def test_requirement_that_is_none(install: Install, requirement: str) -> None:
    """It breaks its own plugin, and no other."""
    install("a-runtime", version="1.0")
    _plugin(install, requires=[requirement])
    _plugin(install, "good", "polyport-good")
    discovery.load(_find("good"))
    with pytest.raises(IncompatibleVersion, match=r"polyport-toy 1\.0"):
        discovery.load(_find())


def test_version_that_is_none(install: Install) -> None:
    install("a-runtime", version="2024-q3-final!")
    assert discovery.version_problems({"a-runtime": ">=1"}) != []


def test_remains_of_an_uninstalled_distribution(install: Install) -> None:
    site = install("polyport-gone", entry_points={BACKENDS: {"gone": "gone"}})
    next(site.glob("*.dist-info/METADATA")).unlink()
    assert "gone" not in [plugin.name for plugin in discovery.installed()]
