from __future__ import annotations

import inspect

import pytest

from polyport import errors
from polyport.errors import PolyportError

CLASSES = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if cls.__module__ == errors.__name__]


@pytest.mark.parametrize("cls", CLASSES)
def test_one_hierarchy(cls: type[PolyportError]) -> None:
    assert issubclass(cls, PolyportError)
    assert inspect.getdoc(cls)


@pytest.mark.parametrize("cls", CLASSES)
def test_errors_carry_stage_and_backend(cls: type[PolyportError]) -> None:
    error = cls("What failed.", stage="trace", backend="toy")
    assert (str(error), error.stage, error.backend) == ("What failed.", "trace", "toy")


@pytest.mark.parametrize(
    ("cls", "builtin"),
    [
        (errors.ConfigError, ValueError),
        (errors.InputError, ValueError),
        (errors.BackendNotInstalled, ImportError),
        (errors.BackendLoadError, ImportError),
    ],
)
def test_also_what_people_catch(cls: type[PolyportError], builtin: type[Exception]) -> None:
    assert issubclass(cls, builtin)
