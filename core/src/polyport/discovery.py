"""Which backends and extensions are installed, read from distribution metadata before anything is imported."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Any

import attrs
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from polyport.errors import BackendConflict, BackendLoadError, BackendNotInstalled, IncompatibleVersion

#: Entry points of backends; the name is the format.
BACKENDS = "polyport.backends"

#: Entry points of cross-cutting plugins, which take part in every session.
EXTENSIONS = "polyport.extensions"


@attrs.frozen
class InstalledPlugin:
    """A plugin as its distribution announces it. Nothing of it has been imported.

    Args:
        name: Name of the entry point; for a backend, its format.
        distribution: Name of the distribution that brings it.
        version: That distribution's version.
        entry_point: Where its hooks are.
        requires: The distribution's requirements without extras.
    """

    name: str
    distribution: str
    version: str
    entry_point: EntryPoint
    requires: tuple[Requirement, ...] = ()


def installed(group: str = BACKENDS) -> list[InstalledPlugin]:
    """Every installed plugin of a group, sorted by name."""
    found = []
    for distribution in importlib.metadata.distributions():
        points = [point for point in distribution.entry_points if point.group == group]
        if not points:
            continue
        requires = tuple(
            requirement
            for requirement in map(Requirement, distribution.requires or ())
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        )
        name = distribution.metadata["Name"]
        found += [
            InstalledPlugin(point.name, name, distribution.version, point, requires) for point in points
        ]
    # a distribution on sys.path twice (an editable install beside its wheel) is one distribution
    unique = {(plugin.name, canonicalize_name(plugin.distribution)): plugin for plugin in reversed(found)}
    return sorted(unique.values(), key=lambda plugin: (plugin.name, plugin.distribution))


def find_backend(name: str) -> InstalledPlugin:
    """The one installed plugin that provides a format.

    Raises:
        BackendNotInstalled: None does; the message lists the formats that are installed.
        BackendConflict: Several distributions do.
    """
    plugins = installed()
    matches = [plugin for plugin in plugins if plugin.name == name]
    if not matches:
        formats = ", ".join(sorted({plugin.name for plugin in plugins})) or "none"
        raise BackendNotInstalled(
            f"No installed plugin provides the format {name!r} (installed: {formats}). Backends are distributions of "
            f"their own, by convention named polyport-<format>: try `pip install polyport-{name}`.",
            backend=name,
        )
    if len(matches) > 1:
        who = " and ".join(f"{plugin.distribution} {plugin.version}" for plugin in matches)
        raise BackendConflict(
            f"The format {name!r} is provided by {who}. Uninstall all but one: which one would run is chance.",
            backend=name,
        )
    return matches[0]


def load(plugin: InstalledPlugin) -> Any:
    """Import a plugin, after checking that its requirements are installed in the versions it asks for.

    Raises:
        IncompatibleVersion: A requirement is missing or out of range.
        BackendLoadError: The import failed; the original error is chained.
    """
    check_requirements(plugin)
    try:
        loaded: ModuleType | Any = plugin.entry_point.load()
    except Exception as error:
        raise BackendLoadError(
            f"The plugin {plugin.name!r} of {plugin.distribution} {plugin.version} could not be imported: "
            f"{type(error).__name__}: {error}",
            backend=plugin.name,
        ) from error
    return loaded


def check_requirements(plugin: InstalledPlugin) -> None:
    """Check what the plugin's distribution requires against what is installed.

    Raises:
        IncompatibleVersion: Names every requirement that does not hold.
    """
    wanted = {requirement.name: str(requirement.specifier) for requirement in plugin.requires}
    problems = version_problems(wanted)
    if problems:
        raise IncompatibleVersion(
            f"{plugin.distribution} {plugin.version} can't be used: {'; '.join(problems)}.",
            backend=plugin.name,
        )


def version_problems(wanted: dict[str, str] | Iterable[tuple[str, str]]) -> list[str]:
    """One sentence for each distribution that is not installed in the range asked for."""
    problems = []
    for name, versions in dict(wanted).items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            problems.append(f"{name}{versions} is not installed")
            continue
        if Version(Version(version).base_version) not in SpecifierSet(versions):
            problems.append(f"{name}{versions} is needed, {version} is installed")
    return problems
