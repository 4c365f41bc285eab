"""Running a compiled package."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from polyport.errors import ArtifactError, ExportError, InputError
from polyport.pipeline import RunRequest
from polyport_aoti.package import Package, compiled_for


class PackageRunner:
    """Executes one package.

    PyTorch unpacks it into a temporary folder, which goes when the runner does. Calls from several threads are safe: each
    takes one of the package's instances, and waits for one if all are taken.

    Args:
        package: The package.
        request: Device and options: `instances`, how many calls may run at once (1; they share the weights).

    Raises:
        InputError: The device is another one than the package was compiled for.
        ArtifactError: PyTorch can't load the package.
    """

    def __init__(self, package: Package, request: RunRequest) -> None:
        options = request.take(instances=1)
        compiled = compiled_for(package.path)["device"] or "cpu"
        device = _device(request.device or compiled)
        if device.type != compiled:
            raise InputError(
                f"This export was compiled for {compiled!r} and can't run on {str(device)!r}. Export it again from a model "
                "on that device.",
                stage="run",
                backend="aoti",
            )
        from torch._inductor.package import load_package

        try:
            model = load_package(
                str(package.path),
                num_runners=options["instances"],
                device_index=-1 if device.index is None else device.index,
            )
        except Exception as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise ArtifactError(
                f"{package.path} can't be loaded by torch {torch.__version__}: {reason}",
                stage="run",
                backend="aoti",
            ) from error
        self.device = str(device)
        self._model = model.loader

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run the graph once (see `polyport.pipeline.Runner`)."""
        try:
            outputs: list[torch.Tensor] = self._model.run(list(inputs))
        except RuntimeError as error:
            reason = next(iter(str(error).strip().splitlines()), "no reason given")
            raise ExportError(f"The compiled model failed: {reason}", stage="run", backend="aoti") from error
        return outputs


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(
            f"The device {name!r} is not available to PyTorch here: {reason}", stage="run"
        ) from error
    return device
