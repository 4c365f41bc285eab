"""What an export is: its components, and saving, loading and calling them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

from polyport import publish, storage
from polyport.errors import InputError
from polyport.pipeline import ExportedComponent, RunRequest
from polyport.session import Session

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig, PreTrainedConfig

    from polyport.calling import Caller
    from polyport.generation.record import GenerationRecord
    from polyport.verify import VerificationReport


class ExportedModel(Mapping[str, ExportedComponent]):
    """An exported model: callable like the model it was made from, and a mapping of its components.

    Args:
        export_format: The format of all components.
        components: Component name -> component. `export` makes one, named `"model"`.
        config: The model's config.
        generation_config: The model's generation config, where it has one.
        sample: The inputs it was exported from; what `verify` starts from.
        session: The hooks of the format; made anew when left out.
        generation: How the components make one model that generates; None for an export of one graph.
        leftovers: Tensors of the model that its own code needs between components, by name.
    """

    def __init__(
        self,
        export_format: str,
        components: Mapping[str, ExportedComponent],
        *,
        config: PreTrainedConfig | None = None,
        generation_config: GenerationConfig | None = None,
        sample: Mapping[str, Any] | None = None,
        session: Session | None = None,
        generation: GenerationRecord | None = None,
        leftovers: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.export_format = export_format
        self.components: Mapping[str, ExportedComponent] = MappingProxyType(dict(components))
        self.config = config
        self.generation_config = generation_config
        self.sample = sample
        self._session = session or Session(export_format)
        self._request = RunRequest()
        self._callers: dict[str, Caller] = {}
        self.generation = generation
        self.leftovers: Mapping[str, torch.Tensor] = MappingProxyType(dict(leftovers or {}))
        self._lock = threading.RLock()
        self._skeletons = threading.local()

    # ── a mapping of components ─────────────────────────────────────────────────────────────────────────────────────

    def __getitem__(self, name: str) -> ExportedComponent:
        return self.components[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.components)

    def __len__(self) -> int:
        return len(self.components)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.export_format!r}, components=[{', '.join(self.components)}])"

    @property
    def program(self) -> Any:
        """The backend's program.

        Raises:
            InputError: The export has several components; take one of `components`.
        """
        return self._only().program

    def _only(self) -> ExportedComponent:
        if len(self.components) != 1:
            raise InputError(
                f"This export has the components {', '.join(self.components)}: name one, as in export.components[...]."
            )
        return next(iter(self.components.values()))

    # ── running ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def device(self) -> torch.device:
        """Where it runs, or, before the first call, where it will."""
        import torch

        callers = list(self._callers.values())
        return torch.device(callers[0].runner.device if callers else self._request.device or "cpu")

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the parameters of the model it was made from."""
        from polyport.caches import find_dtype

        name = next(iter(self.components.values())).metadata.export_dtype
        return find_dtype((name or "float32").removeprefix("torch."))

    def to(self, device: str | torch.device | None, **options: Any) -> Self:
        """Choose where the export runs; runners are made anew at the next call.

        Args:
            device: `"cpu"`, `"cuda"`, `"xpu"`, a name of the runtime's own, or None for the backend's default.
            options: Options of the backend's runner (onnx: `providers`, `session_options`).

        Returns:
            The export itself.
        """
        with self._lock:
            self._request = RunRequest(device=None if device is None else str(device), options=options)
            self._callers = {}
            self._skeletons = threading.local()
        return self

    def caller(self, name: str) -> Caller:
        """The runnable form of a component, made at first use and kept.

        Raises:
            InputError: There is no such component, or the device or an option is not available.
        """
        caller = self._callers.get(name)
        if caller is not None:
            return caller
        from polyport.calling import Caller

        with self._lock:
            if name not in self._callers:
                if name not in self.components:
                    raise InputError(
                        f"This export has no component {name!r}, only {', '.join(self.components)}."
                    )
                component = self.components[name]
                storage.import_architecture(component.metadata.architecture)
                self._callers[name] = Caller(component.metadata, self._session.run(component, self._request))
            return self._callers[name]

    def __call__(self, **kwargs: Any) -> Any:
        """Run the export like the model.

        Args:
            kwargs: What the model's forward takes. Tensors, arrays and lists are accepted; integers convert to the
                traced dtype. Kwargs that were not traced are left out, with one warning.

        Returns:
            What the model returns: the same class, fields and nesting, with torch tensors.

        Raises:
            InputError: An input is missing or doesn't fit.
        """
        caller = self._callers.get("model")
        if caller is None:
            self._only()
            caller = self.caller(next(iter(self.components)))
        return caller(kwargs)

    # ── as a model of transformers ──────────────────────────────────────────────────────────────────────────────────

    def generate(self, inputs: Any = None, **kwargs: Any) -> Any:
        """Generate as the model does.

        Args:
            inputs: The prompt, as transformers' `generate` takes it first.
            kwargs: Everything that the model's own `generate` takes; `assistant_model` may be an export as well.

        Returns: What the model's `generate` returns.

        Raises:
            InputError: The export was not made for generation, or an input doesn't fit.
        """
        if self.generation is None:
            raise InputError("This export can't generate: it wasn't made with export_for_generation().")
        if isinstance(assistant := kwargs.get("assistant_model"), ExportedModel):
            kwargs["assistant_model"] = assistant.as_transformers()
        return self.as_transformers().generate(*(() if inputs is None else (inputs,)), **kwargs)

    def as_transformers(self) -> Any:
        """The export as an instance of the model's own class, for whatever takes a model for inference.

        It holds no weights: it runs the export's components. Each thread has its own.

        Returns:
            A `PreTrainedModel`.

        Raises:
            ArtifactError: The installed transformers can't build the model, or a component is missing.
        """
        from polyport.generation.skeleton import make_model

        if not hasattr(self._skeletons, "model"):
            self._skeletons.model = make_model(self)
        return self._skeletons.model

    def verify(
        self, model: Any, inputs: Mapping[str, Any] | None = None, **options: Any
    ) -> VerificationReport:
        """Compare with the original model, at the sample's sizes and at others.

        Args:
            model: The original.
            inputs: Forward kwargs; the sample of the export when left out.
            options: See `polyport.verify.verify`.

        Returns:
            The report; `report.passed` is the verdict.
        """
        from polyport.verify import verify

        return verify(self, model, inputs, **options)

    # ── saving and loading ──────────────────────────────────────────────────────────────────────────────────────────

    def save_pretrained(self, directory: str | os.PathLike[str], processor: Any = None) -> None:
        """Write the export: its programs, `export.json`, the model's configs, and the processor's files.

        The directory appears, or changes, at once: a crash leaves what was there before, or the new export. Other files
        in it stay.

        Args:
            directory: Where to write.
            processor: Tokenizer, image processor or processor to save beside it.
        """
        storage.save(self, Path(directory), self._session, processor)

    @classmethod
    def from_pretrained(
        cls,
        path_or_id: str | os.PathLike[str],
        *,
        subfolder: str = "",
        device: str | torch.device | None = None,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        local_files_only: bool = False,
        trust_remote_code: bool = False,
        **runner_options: Any,
    ) -> Self:
        """Load a saved export.

        Args:
            path_or_id: A directory, or the id of a hub repository, of which only the export's own files are fetched.
            subfolder: Folder of the export in it.
            device: See `to`.
            revision: Branch, tag or commit of the repository.
            token: Hub token; the one of the hub's login when left out.
            cache_dir: Where the hub's files are kept.
            local_files_only: Use only what was fetched before.
            trust_remote_code: Allow formats and files that hold pickled content or code.
            runner_options: See `to`.

        Raises:
            ArtifactError: There is no export, or it is damaged or unsafe.
            BackendNotInstalled: The format's plugin is missing.
        """
        found = storage.load(
            path_or_id,
            subfolder,
            trust=trust_remote_code,
            revision=revision,
            token=token,
            cache_dir=None if cache_dir is None else str(cache_dir),
            local_files_only=local_files_only,
        )
        return cls(**found).to(device, **runner_options)

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write the bare program of a one-component export, with the files it needs beside it.

        Args:
            file: Path of the program file. Its suffix is the format's.
        """
        publish.save_program(self._only(), self._session, Path(file))

    def push_to_hub(self, repo_id: str, *, subfolder: str = "", processor: Any = None, **options: Any) -> Any:
        """Save the export and upload it to a hub repository, which is created when it is missing.

        Args:
            repo_id: The repository.
            subfolder: Folder in it.
            processor: See `save_pretrained`.
            options: `token`, `revision`, `commit_message`, `private`... of `huggingface_hub`.

        Returns:
            What `huggingface_hub.HfApi.upload_folder` returns.
        """
        return publish.push(self, repo_id, subfolder, processor, options)
