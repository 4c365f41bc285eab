"""One plugin manager per format, and the only code that calls hooks.

A session imports the entry point of one format (and of the formats it builds on), checks versions, registers core's
defaults first and the backend last, so that pluggy asks the backend first. It is thrown away as a whole when anything about
it is wrong; there is no global manager.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pluggy

from polyport import discovery, hookspecs
from polyport.config import ExportConfig
from polyport.errors import BackendContractError, BackendLoadError, IncompatibleVersion
from polyport.hookspecs import PatchStage, QuantizeStage
from polyport.manifest import is_plain_name
from polyport.markers import PROJECT_NAME
from polyport.metadata import ExportMetadata
from polyport.patching import GraphFix, Patch
from polyport.pipeline import (
    BackendInfo,
    CapturedCall,
    ExportedComponent,
    Runner,
    RunRequest,
    TracedProgram,
    checked_runner,
)

_T = TypeVar("_T")

#: Hooks that some plugin of a session must implement for its backend to be one.
_REQUIRED = (
    "polyport_backend",
    "polyport_trace",
    "polyport_lower",
    "polyport_save",
    "polyport_load",
    "polyport_run",
)


class Session:
    """The hooks of one format, behind typed methods.

    Args:
        name: The format.
        extra: More plugins (objects or modules with hook implementations) for this session alone.

    Raises:
        BackendNotInstalled, BackendConflict, BackendLoadError, IncompatibleVersion: See `polyport.discovery`.
        BackendContractError: The plugin's hooks don't fit the specifications.
    """

    def __init__(self, name: str, extra: Sequence[Any] = ()) -> None:
        from polyport import defaults

        self.format = name
        self._manager = pluggy.PluginManager(PROJECT_NAME)
        self._manager.add_hookspecs(hookspecs)
        self._manager.register(defaults, "polyport")
        for plugin in discovery.installed(discovery.EXTENSIONS):
            who = f"{plugin.distribution} {plugin.version}"
            self._register(discovery.load(plugin), f"{plugin.name} of {who}", who)
        self.plugin = discovery.find_backend(name)
        self.backend = self._add_backend(self.plugin, seen=())
        for index, plugin_object in enumerate(extra):
            self._register(plugin_object, f"extra-{index}", "the caller")
        missing = [hook for hook in _REQUIRED if not getattr(self._manager.hook, hook).get_hookimpls()]
        if missing:
            raise BackendContractError(
                f"The backend {name!r} of {self.plugin.distribution} implements no {', '.join(missing)}.",
                backend=name,
            )

    def _add_backend(self, plugin: discovery.InstalledPlugin, seen: tuple[str, ...]) -> BackendInfo:
        """Register a backend after the ones it builds on; returns its description."""
        if plugin.name in seen:
            raise BackendContractError(
                f"The backends {' -> '.join((*seen, plugin.name))} build on each other in a circle.",
                backend=self.format,
            )
        loaded = discovery.load(plugin)
        if self._manager.get_plugin(plugin.name) is loaded:  # two backends build on this one
            return _describe(loaded, plugin.name, plugin.distribution)
        who = f"{plugin.distribution} {plugin.version}"
        info = _describe(loaded, plugin.name, who)
        problems = discovery.version_problems(dict(info.packages))
        if problems:
            raise IncompatibleVersion(f"{who} can't be used: {'; '.join(problems)}.", backend=plugin.name)
        for base in info.builds_on:
            self._add_backend(discovery.find_backend(base), (*seen, plugin.name))
        self._register(loaded, plugin.name, who)
        return info

    def _register(self, plugin: Any, name: str, who: str) -> None:
        try:
            self._manager.register(plugin, name)
            self._manager.check_pending()
        except (pluggy.PluginValidationError, ValueError) as error:
            raise BackendContractError(
                f"The hooks of {who} don't fit: {error}", backend=self.format
            ) from error

    def config(self, config: ExportConfig | Mapping[str, Any] | None) -> ExportConfig:
        """A config of the format: the one given, one made from a dict of its options, or the default one."""
        if config is None:
            return self.backend.config_class()
        return self.backend.config_class.from_dict(config) if isinstance(config, Mapping) else config

    # ── the hooks, in pipeline order ────────────────────────────────────────────────────────────────────────────────

    def capture(
        self,
        model: Any,
        inputs: Mapping[str, Any],
        config: ExportConfig,
        pinned: frozenset[str] = frozenset(),
    ) -> CapturedCall:
        """See `polyport_capture`."""
        call = self._manager.hook.polyport_capture(model=model, inputs=inputs, config=config, pinned=pinned)
        return self._checked(call, CapturedCall, "polyport_capture")

    def patches(self, stage: PatchStage, config: ExportConfig) -> list[Patch | GraphFix]:
        """See `polyport_patch`: the patches of all plugins, base first, each id once."""
        collected: dict[str, Patch | GraphFix] = {}
        for contribution in reversed(self._manager.hook.polyport_patch(stage=stage, config=config)):
            if not isinstance(contribution, Sequence):
                raise self._broken("polyport_patch", contribution)
            for patch in contribution:
                if not isinstance(patch, (Patch, GraphFix)):
                    raise self._broken("polyport_patch", patch)
                collected[patch.id] = patch
        return list(collected.values())

    def trace(self, call: CapturedCall, config: ExportConfig) -> TracedProgram:
        """See `polyport_trace`."""
        traced = self._manager.hook.polyport_trace(call=call, config=config)
        return self._checked(traced, TracedProgram, "polyport_trace")

    def lower(self, traced: TracedProgram, config: ExportConfig) -> ExportedComponent:
        """See `polyport_lower`."""
        component = self._manager.hook.polyport_lower(traced=traced, config=config)
        return self._checked(component, ExportedComponent, "polyport_lower")

    def quantize(self, target: Any, config: ExportConfig, stage: QuantizeStage) -> Any:
        """See `polyport_quantize`."""
        if config.quantizer is None:
            return target
        quantized = self._manager.hook.polyport_quantize(target=target, config=config, stage=stage)
        return self._checked(quantized, type(target), "polyport_quantize")

    def save(
        self, components: Mapping[str, ExportedComponent], directory: Path
    ) -> dict[str, tuple[str, ...]]:
        """See `polyport_save`."""
        files = self._manager.hook.polyport_save(components=components, directory=directory)
        if not isinstance(files, Mapping):
            raise self._broken("polyport_save", files)
        if set(files) != set(components) or not all(files.values()):
            raise BackendContractError(
                f"polyport_save of {self.format!r} wrote {sorted(files)}, not a file for each of {sorted(components)}.",
                stage="save",
                backend=self.format,
            )
        for names in files.values():
            if isinstance(names, str) or not all(
                is_plain_name(name) and (directory / name).is_file() for name in names
            ):
                raise BackendContractError(
                    f"polyport_save of {self.format!r} names {names!r}, which are not files that it wrote.",
                    stage="save",
                    backend=self.format,
                )
        return {name: tuple(names) for name, names in files.items()}

    def load(self, name: str, files: Sequence[Path], metadata: ExportMetadata, trust: bool) -> Any:
        """See `polyport_load`."""
        program = self._manager.hook.polyport_load(name=name, files=files, metadata=metadata, trust=trust)
        return self._checked(program, object, "polyport_load")

    def run(self, component: ExportedComponent, request: RunRequest) -> Runner:
        """See `polyport_run`."""
        return checked_runner(
            self._manager.hook.polyport_run(component=component, request=request), self.format
        )

    def describe(self, component: ExportedComponent) -> dict[str, Any]:
        """See `polyport_describe`; empty where the backend says nothing."""
        return dict(self._manager.hook.polyport_describe(component=component) or {})

    def exporter(self) -> type:
        """The backend's exporter class.

        Raises:
            BackendContractError: Its package lacks the class that it names.
        """
        return _exported_class(self.plugin, self.backend.exporter)

    def hooks(self) -> tuple[str, ...]:
        """Names of the hooks that the backend itself implements, in pipeline order."""
        plugin = self._manager.get_plugin(self.format)
        callers = self._manager.get_hookcallers(plugin) or []
        mine = {caller.name for caller in callers}
        return tuple(name for name in vars(hookspecs) if name in mine)

    def _checked(self, value: Any, kind: type[_T], hook: str) -> _T:
        """`value` if it is what the hook's specification says."""
        if value is None or not isinstance(value, kind):
            raise self._broken(hook, value)
        return value

    def _broken(self, hook: str, value: Any) -> BackendContractError:
        return BackendContractError(
            f"{hook} of the backend {self.format!r} returned {type(value).__name__}, which its specification "
            "doesn't allow.",
            backend=self.format,
        )


def _describe(plugin: Any, name: str, who: str) -> BackendInfo:
    """The plugin's own description of itself, asked directly: the ones it builds on describe themselves too."""
    describe = getattr(plugin, "polyport_backend", None)
    try:
        info = describe() if callable(describe) else None
    except Exception as error:
        raise BackendContractError(f"{who}: polyport_backend() failed: {error}", backend=name) from error
    if not isinstance(info, BackendInfo):
        raise BackendContractError(f"{who}: polyport_backend() returns no BackendInfo.", backend=name)
    if not (isinstance(info.config_class, type) and issubclass(info.config_class, ExportConfig)):
        raise BackendContractError(
            f"{who}: config_class is no ExportConfig, but {info.config_class!r}.", backend=name
        )
    if info.format != name or info.config_class.export_format != name:
        raise BackendContractError(
            f"{who}: the entry point is named {name!r}, polyport_backend says {info.format!r} and its config "
            f"{info.config_class.export_format!r}. The three must agree.",
            backend=name,
        )
    return info


def backend_class(name: str) -> type | None:
    """The exporter or config class of that name among the installed backends, None where there is none."""
    for plugin in discovery.installed():
        try:
            info = _describe(discovery.load(plugin), plugin.name, plugin.distribution)
        except (IncompatibleVersion, BackendLoadError, BackendContractError):
            continue  # a broken plugin must not hide the others; asking for its format says what is wrong with it
        if name in (info.exporter, info.config_class.__name__):
            return _exported_class(plugin, name)
    return None


def _exported_class(plugin: discovery.InstalledPlugin, name: str) -> type:
    """A class of a plugin's, from the package that its entry point lies in or one above it."""
    module = plugin.entry_point.module
    while module:
        found = getattr(importlib.import_module(module), name, None)
        if isinstance(found, type):
            return found
        module = module.rpartition(".")[0]
    raise BackendContractError(
        f"{plugin.distribution} {plugin.version} names the class {name!r}, which its package doesn't have.",
        backend=plugin.name,
    )
