import gc
import json
import zipfile
from pathlib import Path

import attrs
import pytest
import torch

from polyport.config import ExportConfig
from polyport.errors import ArtifactError, ConfigError, ExportError
from polyport.metadata import ExportMetadata
from polyport.session import Session
from polyport.testing.models import EXAMPLES
from polyport_aoti import AotiConfig
from polyport_aoti.compiling import compile_program
from polyport_aoti.package import Package, load_package

HERE = ExportMetadata(packages={"torch": torch.__version__})


def package(folder: Path, **record: str) -> Path:
    """A package without a model in it."""
    path = folder / "model.pt2"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model/data/aotinductor/model/x.wrapper.so", b"")
        archive.writestr("model/data/aotinductor/model/x.wrapper_metadata.json", json.dumps(record))
    return path


def test_a_package_for_this_machine_is_loaded(tmp_path: Path) -> None:
    path = package(tmp_path, AOTI_DEVICE_KEY="cpu")
    assert load_package(path, HERE, trust=True).path == path


def test_code_for_a_processor_with_more_instructions_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: False)
    path = package(tmp_path, AOTI_MACHINE="x86_64", AOTI_CPU_ISA="AVX2 AVX512")
    with pytest.raises(ArtifactError, match=r"x86_64 with .*AVX512, which this machine lacks"):
        load_package(path, HERE, trust=True)


def test_code_for_another_torch_is_refused(tmp_path: Path) -> None:
    other = attrs.evolve(HERE, packages={"torch": "2.1.0"})
    with pytest.raises(ArtifactError, match=r"compiled against torch 2\.1\.0"):
        load_package(package(tmp_path), other, trust=True)


def test_without_trust_nothing_is_read(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="trust_remote_code=True"):
        load_package(tmp_path / "not there.pt2", HERE, trust=False)


def test_a_temporary_package_goes_with_its_object(tmp_path: Path) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    kept = Package(package(folder), str(folder))
    assert kept.copy_to(tmp_path / "copy.pt2") == "copy.pt2"
    del kept
    gc.collect()
    assert not folder.exists()
    assert (tmp_path / "copy.pt2").exists()


@pytest.fixture(scope="module")
def traced():
    example = EXAMPLES["image"]
    session = Session("dynamo")
    return session.trace(session.capture(example.build(), example.sample(), ExportConfig()), ExportConfig())


def test_missing_compiler_is_named(traced) -> None:
    from torch._inductor import config

    with config.patch({"cpp.cxx": ("no-such-compiler",)}), pytest.raises(ExportError, match="CXX"):
        compile_program(traced, AotiConfig())


def test_failing_compiler_is_an_export_error(traced, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args, **options):
        raise RuntimeError("C++ compile error\n\nin line 1")

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", fail)
    with pytest.raises(ExportError, match=r"ViTForImageClassification.*C\+\+ compile error in line 1"):
        compile_program(traced, AotiConfig())


def test_unknown_compiler_option_is_named(traced) -> None:
    with pytest.raises(ConfigError, match="no_such_option"):
        compile_program(traced, AotiConfig(inductor_configs={"no_such_option": 1}))
