"""Which backends and extensions are installed, read from distribution metadata before anything is imported."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Any

import attrs
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

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
        requires: The distribution's requirements (PEP 508).
    """

    name: str
    distribution: str
    version: str
    entry_point: EntryPoint
    requires: tuple[str, ...] = ()


def installed(group: str = BACKENDS) -> list[InstalledPlugin]:
    """Every installed plugin of a group, sorted by name."""
    found = []
    for distribution in importlib.metadata.distributions():
        points = [point for point in distribution.entry_points if point.group == group]
        # what an interrupted uninstall leaves behind has no name
        metadata: Any = distribution.metadata
        if points and (name := metadata["Name"] if metadata else None):
            requires = tuple(distribution.requires or ())
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
    """Check what the plugin's distribution requires, without its extras, against what is installed.

    Raises:
        IncompatibleVersion: Names every requirement that does not hold.
    """
    try:
        needed = [
            requirement
            for requirement in map(Requirement, plugin.requires)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        ]
    except InvalidRequirement as error:
        raise IncompatibleVersion(
            f"{plugin.distribution} {plugin.version} states its requirements wrongly: {error}",
            backend=plugin.name,
        ) from error
    if problems := version_problems((requirement.name, str(requirement.specifier)) for requirement in needed):
        raise IncompatibleVersion(
            f"{plugin.distribution} {plugin.version} can't be used: {'; '.join(problems)}.",
            backend=plugin.name,
        )


def version_problems(wanted: Mapping[str, str] | Iterable[tuple[str, str]]) -> list[str]:
    """One sentence for each distribution that is not installed in the range asked for.

    Args:
        wanted: Distribution names with PEP 440 ranges. Release candidates and local builds count as their release.
    """
    problems = []
    for name, versions in wanted.items() if isinstance(wanted, Mapping) else wanted:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            problems.append(f"{name}{versions} is not installed")
            continue
        try:
            fits = Version(Version(version).base_version) in SpecifierSet(versions)
        except (InvalidVersion, InvalidSpecifier) as error:
            problems.append(f"{name}{versions} can't be compared with {version} ({error})")
            continue
        if not fits:
            problems.append(f"{name}{versions} is needed, {version} is installed")
    return problems
