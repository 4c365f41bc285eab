"""Build every distribution as a release would be built, and check what came out.

    python tools/check_distributions.py FOLDER...

For each folder: an sdist, and from that sdist (not from the source tree) a wheel. The wheel must hold exactly the
package's files, the licence, the type marker and valid entry points. Needs `build` and `hatchling`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from importlib.metadata import PathDistribution
from pathlib import Path


def build(folder: Path, out: Path) -> tuple[Path, Path]:
    """Return the sdist and the wheel built from `folder`, both below `out`."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (sdist,) = out.glob("*.tar.gz")
    (wheel,) = out.glob("*.whl")
    return sdist, wheel


def source_files(folder: Path) -> set[str]:
    """Return the files that the wheel of `folder` must hold, as paths inside the wheel."""
    source = folder / "src"
    return {
        path.relative_to(source).as_posix()
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def problems(folder: Path, wheel: Path) -> Iterator[str]:
    """Yield what is wrong with `wheel`, built from `folder`, one sentence each."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
        distribution = PathDistribution(zipfile.Path(archive, f"{info}/"))
        shipped = {name for name in names if not name.startswith(f"{info}/")}
        expected = source_files(folder)

        for name in sorted(expected - shipped):
            yield f"{name} is in the source but not in the wheel"
        for name in sorted(shipped - expected):
            yield f"{name} is in the wheel but not in the source"
        if len({name.split("/")[0] for name in shipped}) != 1:
            yield "the wheel installs more than one top-level package"
        if not any(name.endswith("/py.typed") for name in shipped):
            yield "py.typed is missing: type checkers would ignore the annotations"
        if f"{info}/licenses/LICENSE" not in names:
            yield "the licence file is missing"

        metadata = distribution.metadata
        if metadata["License-Expression"] != "Apache-2.0":
            yield "License-Expression is not Apache-2.0"
        if "Description" not in metadata:
            yield "the long description (README.md) is empty"
        for requirement in distribution.requires or []:
            if "==" in requirement.partition(";")[0]:
                yield f"the requirement {requirement!r} is a pin; a distribution states a range"
        for point in distribution.entry_points:
            module = point.module.replace(".", "/")
            if not {f"{module}.py", f"{module}/__init__.py"} & shipped:
                yield f"the entry point {point.name} = {point.value} names a module that the wheel does not hold"


def main(folders: list[str]) -> int:
    """Check each folder; return the exit code."""
    failed = False
    for folder in map(Path, folders):
        with tempfile.TemporaryDirectory() as out:
            sdist, wheel = build(folder, Path(out))
            found = list(problems(folder, wheel))
            print(f"{'FAIL' if found else 'ok  '} {sdist.name}  {wheel.name}")
            for problem in found:
                print(f"       {problem}")
            failed |= bool(found)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
