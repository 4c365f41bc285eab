"""Every error polyport raises on purpose, split by whose fault it is.

* the user's: :class:`ExportError` (this model, these inputs or this config can't be exported),
  :class:`InputError` (a call of an export got something it can't take),
  :class:`ArtifactError` (a saved export is damaged, hostile or unreadable);
* a plugin's: :class:`BackendContractError`;
* the installation's: :class:`BackendNotInstalled`, :class:`BackendLoadError`, :class:`BackendConflict`,
  :class:`IncompatibleVersion`.

The message is one readable paragraph: what failed, where, and what to do. Where another library raised first, that
exception is chained (``raise ... from``), so nothing is lost under ``--debug``.
"""

from __future__ import annotations


class PolyportError(Exception):
    """Base of all errors that polyport raises on purpose.

    Args:
        message: One readable paragraph.
        stage: The pipeline stage that failed (``"capture"``, ``"trace"``, ``"lower"``, ``"save"``...).
        backend: The format being produced or run, when there is one.
    """

    def __init__(self, message: str, *, stage: str | None = None, backend: str | None = None) -> None:
        super().__init__(message)
        self.stage = stage
        self.backend = backend


class ExportError(PolyportError):
    """The model, the inputs or the config can't be exported as asked."""


class ConfigError(ExportError, ValueError):
    """A config holds an unknown key or an impossible value."""


class InputError(PolyportError, ValueError):
    """A call got an input that is missing, of the wrong rank, size or type."""


class VerificationError(PolyportError):
    """An export does not compute what the model computes."""


class ArtifactError(PolyportError):
    """A saved export is missing, damaged, of an unknown version, or not safe to load."""


class BackendContractError(PolyportError):
    """A plugin broke the contract of the hook specifications."""


class BackendNotInstalled(PolyportError, ImportError):
    """No installed plugin provides the format that was asked for."""


class BackendLoadError(PolyportError, ImportError):
    """A plugin is installed but can't be imported."""


class BackendConflict(PolyportError):
    """Two installed distributions claim the same format."""


class IncompatibleVersion(PolyportError):
    """An installed package is outside the range a plugin supports."""
