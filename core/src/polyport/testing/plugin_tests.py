"""The plugin as such: is it found, does it fit the hook specifications, is it cheap to ask?"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
from typing import Any

import attrs
import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import polyport
from polyport import discovery, hookspecs
from polyport.config import ExportConfig
from polyport.errors import ConfigError
from polyport.exporter import AutoExportConfig, HfExporter
from polyport.session import Session
from polyport.testing import signatures
from polyport.testing.fresh_process import python
from polyport.testing.suite import Suite

#: What pluggy's marker leaves on a hook implementation.
_MARK = "polyport_impl"


class PluginTests(Suite):
    """Discovery, hooks, description and config."""

    def _plugin(self) -> Any:
        return discovery.load(discovery.find_backend(self.format))

    def test_entry_point_resolves(self) -> None:
        """The format is found and its session starts.

        On failure: `pip list` must show your distribution, and its `entry_points` a line `<format> = "<module>"` in the
        group `polyport.backends`. An editable install has to be repeated after the entry point changed. Missing hooks
        are named in the error.
        """
        session = Session(self.format)
        assert session.plugin.name == self.format
        assert session.hooks(), "the plugin implements no hook"

    def test_hooks_are_known_and_marked(self) -> None:
        """Everything called `polyport_*` is a hook and carries `@hookimpl`.

        On failure: a misspelt or unmarked function is never called, without any error. Names and arguments are in
        `polyport.hookspecs`.
        """
        plugin = self._plugin()
        for name in (name for name in dir(plugin) if name.startswith("polyport_")):
            value = getattr(plugin, name)
            if not callable(value) or isinstance(value, type) or _is_package(value):
                continue
            assert hasattr(hookspecs, name), f"{name} is no hook"
            assert hasattr(value, _MARK), f"{name} lacks @hookimpl, so it is never called"

    def test_hooks_fit_their_specifications(self) -> None:
        """Arguments and annotations agree with the specifications.

        On failure: copy the signature from `polyport.hookspecs`. A subclass (your own config) may take the place of an
        annotated class, and you may leave arguments out.
        """
        plugin = self._plugin()
        names = [name for name in vars(hookspecs) if hasattr(getattr(plugin, name, None), _MARK)]
        assert "polyport_backend" in names
        found = [problem for name in names for problem in signatures.problems(name, getattr(plugin, name))]
        assert not found, "\n".join(found)

    def test_plugin_is_light(self, session: Session) -> None:
        """Importing the plugin and asking for its description imports neither torch, nor transformers, nor a runtime.

        On failure: move the import named below into the function that needs it, or under `if TYPE_CHECKING:`. Listing
        backends must not cost a user the import of every runtime that is installed.
        """
        runtimes = {"torch", "transformers"}
        provided = importlib.metadata.packages_distributions()
        for package in session.backend.packages:
            wanted = canonicalize_name(package)
            runtimes |= {
                name for name, owners in provided.items() if wanted in map(canonicalize_name, owners)
            }
        point = session.plugin.entry_point
        code = (
            "import sys, json, importlib.metadata as m\n"
            "plugin = m.EntryPoint(*sys.argv[1:4]).load()\n"
            "plugin.polyport_backend()\n"
            "print(json.dumps(sorted(sys.modules)))"
        )
        printed = python(code, point.name, point.value, point.group)
        heavy = runtimes & set(json.loads(printed.strip().splitlines()[-1]))
        assert not heavy, f"{point.value} imports {', '.join(sorted(heavy))}"

    def test_description_is_consistent(self, session: Session) -> None:
        """`BackendInfo` agrees with the entry point, the config, the exporter and what is installed.

        On failure: the message names the field of `BackendInfo` to correct.
        """
        info = session.backend
        assert info.format == info.config_class.export_format == self.format, "format"
        assert info.suffix.startswith("."), "suffix"
        assert info.summary.strip(), "summary"
        assert "\n" not in info.summary, "summary"
        assert all("{file}" in name or "{stem}" in name for name in info.companions), "companions"
        assert self.format not in info.builds_on, "builds_on"
        for base in info.builds_on:
            discovery.find_backend(base)
        for name, versions in info.packages.items():
            assert ">=" in versions or "==" in versions or "~=" in versions, (
                f"packages: {name} has no lower end"
            )
            assert importlib.metadata.version(name) in SpecifierSet(versions, prereleases=True), (
                f"packages: {name}"
            )
        for name in info.tested:
            assert name in info.packages, f"tested: {name} is not among `packages`"

    def test_exporter_is_importable(self, session: Session) -> None:
        """The exporter and the config come from the plugin's package, and from `polyport`.

        On failure: export both classes in the package's `__init__.py`: a subclass of `HfExporter` with your
        `export_format`, under the name in `BackendInfo.exporter`, and your config class.
        """
        info = session.backend
        package = importlib.import_module(session.plugin.entry_point.module.partition(".")[0])
        exporter = getattr(package, info.exporter)
        assert issubclass(exporter, HfExporter)
        assert exporter.export_format == self.format
        assert getattr(package, info.config_class.__name__) is info.config_class
        assert getattr(polyport, info.exporter) is exporter
        assert getattr(polyport, info.config_class.__name__) is info.config_class

    def test_requirements_are_ranges(self, session: Session) -> None:
        """The distribution requires polyport, and every package it runs on, with a range of versions.

        On failure: add `"polyport>=X,<Y"`, and each of `BackendInfo.packages` with its lower end, to `dependencies`. The
        upper end on polyport keeps a plugin from meeting a core it was not written for.
        """
        required = {
            canonicalize_name(one.name): one.specifier
            for one in map(Requirement, importlib.metadata.requires(session.plugin.distribution) or ())
            if one.marker is None or one.marker.evaluate({"extra": ""})
        }
        core = canonicalize_name("polyport")
        assert core in required, "polyport is not required"
        operators = {one.operator for one in required[core]}
        assert operators & {">=", "~=", "=="}, "polyport needs a lower end"
        assert operators & {"<", "<=", "~=", "=="}, "polyport needs an upper end"
        for name in session.backend.packages:
            assert required.get(canonicalize_name(name)), f"{name} is required without a range, or not at all"

    def test_config_goes_to_json_and_back(self, session: Session) -> None:
        """The config is a frozen `ExportConfig` that survives a dict and JSON.

        On failure: decorate it with `@attrs.frozen(kw_only=True)` and use plain values (numbers, text, lists, dicts).
        """
        cls = session.backend.config_class
        assert issubclass(cls, ExportConfig)
        config = cls.from_dict(self.config_options)
        assert cls.from_dict(config.to_dict()) == config
        assert cls.from_json(config.to_json()) == config
        assert AutoExportConfig.from_dict(config.to_dict()) == config
        with pytest.raises(attrs.exceptions.FrozenInstanceError):
            setattr(config, "dynamic", True)  # noqa: B010  type checkers know that it is frozen

    def test_config_refuses_unknown_options(self, session: Session) -> None:
        """A misspelt option is an error that lists the valid ones.

        On failure: leave `from_dict` as `ExportConfig` has it.
        """
        with pytest.raises(ConfigError, match=r"no_such_option.*dynamic"):
            session.backend.config_class.from_dict({"no_such_option": 1})


def _is_package(value: Any) -> bool:
    """Imported helpers whose module name begins like a hook (`polyport_onnx.config.some_function`) are no hooks."""
    return isinstance(value, type(polyport))
