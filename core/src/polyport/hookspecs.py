"""The hooks of polyport, in the order in which an export goes through them.

A backend is a module or object with implementations of these, found through the entry-point group `polyport.backends`
(the entry point's name is the format). Each format gets a plugin manager of its own that holds core's defaults, the
extensions (`polyport.extensions`), the backends the format builds on, and the backend itself; so an implementation never
asks which format it is called for.

All hooks are `firstresult`, where None means "not mine" and the next plugin is asked (the backend first, then what it
builds on, then core), except `polyport_patch`, which collects from all of them. A refusal is an exception with a reason, never
None. Implementations may take fewer arguments than the specification, but no defaults and no keyword-only ones: pluggy
would never pass those.

Cross-cutting stages (timing, logging, progress) are hook wrappers: `@hookimpl(wrapper=True)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from polyport.config import ExportConfig
from polyport.markers import hookspec
from polyport.metadata import ExportMetadata

if TYPE_CHECKING:
    from polyport.patching import GraphFix, Patch
    from polyport.pipeline import (
        BackendInfo,
        CapturedCall,
        ExportedComponent,
        Runner,
        RunRequest,
        TracedProgram,
    )

#: Stages at which patches may be active.
PatchStage = Literal["trace", "lower", "run"]

#: Stages at which a quantizer is asked: on the traced graph, and on the lowered program.
QuantizeStage = Literal["graph", "program"]


@hookspec(firstresult=True)
def polyport_backend() -> BackendInfo | None:
    """Describe the backend.

    Called when a session begins, before any other hook. Must be cheap: no import of the runtime.

    Returns:
        The description. Every backend implements this; None is not allowed.
    """


@hookspec(firstresult=True)
def polyport_capture(
    model: Any, inputs: Mapping[str, Any], config: ExportConfig, pinned: frozenset[str]
) -> CapturedCall | None:
    """Turn a model and sample inputs into a call that can be traced.

    Called first in an export, with the patches of stage `"trace"` active; once for formats that share a trace. Core
    implements this for every backend; a plugin overrides it to change what is traced.

    Args:
        model: The caller's model, or a part of it (a vision tower, a head), which must come back unchanged.
        inputs: Forward kwargs, which must come back unchanged.
        config: The export config.
        pinned: Names of axes that keep the sample's size although they could vary, such as the `"sequence"` of a step
            that takes one token.

    Returns:
        The captured call; None to leave it to core.

    Raises:
        ExportError: The model or the inputs can't be exported.
    """


@hookspec
def polyport_patch(stage: PatchStage, config: ExportConfig) -> Sequence[Patch | GraphFix]:
    """Contribute patches of upstream libraries, active while a stage runs, and fixes of the traced graph.

    Called once per stage. The patches of all plugins of the session are collected; only core applies them, and only
    those whose version window holds.

    Args:
        stage: The stage about to run. Graph fixes are returned for `"trace"`, and run on its result.
        config: The export config.

    Returns:
        The patches, empty where there are none.
    """
    return ()


@hookspec(firstresult=True)
def polyport_trace(call: CapturedCall, config: ExportConfig) -> TracedProgram | None:
    """Trace the call into a graph.

    Called after the call was captured, with the same patches active. The graph fixes run on what it returns.

    Args:
        call: The captured call.
        config: The export config.

    Returns:
        The traced program; None to leave it to the backend this one builds on.

    Raises:
        ExportError: The model can't be traced; the message says where and why.
    """


@hookspec(firstresult=True)
def polyport_lower(traced: TracedProgram, config: ExportConfig) -> ExportedComponent | None:
    """Lower the traced graph to the backend's program.

    Called after the graph was fixed and quantized, with the patches of stage `"lower"` active.

    Args:
        traced: The traced program. Other formats may be lowered from the same object: leave it as it is.
        config: The export config.

    Returns:
        The program with its metadata (usually `traced.metadata`, evolved); None to leave it to the backend this one
        builds on.

    Raises:
        ExportError: The graph can't be lowered; the message names the operator or the dtype.
    """


@hookspec(firstresult=True)
def polyport_quantize(target: Any, config: ExportConfig, stage: QuantizeStage) -> Any:
    """Quantize the traced graph, or the lowered program.

    Called twice in an export whose config has a `quantizer`. By default core hands over to it
    (`quantizer.quantize(target, config, stage)`).

    Args:
        target: A `TracedProgram` at stage `"graph"`, an `ExportedComponent` at stage `"program"`.
        config: The export config, whose `quantizer` is not None.
        stage: Which of the two.

    Returns:
        The quantized counterpart of `target`, or `target` itself; None to leave it to core.
    """


@hookspec(firstresult=True)
def polyport_save(
    components: Mapping[str, ExportedComponent], directory: Path
) -> Mapping[str, Sequence[str]] | None:
    """Write the programs of an export.

    Called when an export is saved. All components come at once, so that weights they share can be written once. The directory is a new, empty one:
    core moves it into place when everything is written.

    Args:
        components: Component name -> component.
        directory: Where to write.

    Returns:
        Component name -> names of the files it needs in `directory`, plain names, the program file first. A file may
        belong to several components. None to leave it to the backend this one builds on.
    """


@hookspec(firstresult=True)
def polyport_load(name: str, files: Sequence[Path], metadata: ExportMetadata, trust: bool) -> Any:
    """Read a program back.

    Called after core has checked names, sizes and hashes. Must not write beside the files (they may be read-only and
    may be symbolic links into a cache), and must not run code from them.

    Args:
        name: The component's name, as it was saved.
        files: The component's files, the program file first.
        metadata: The record of the component.
        trust: Whether the user trusts the export enough to read pickled content.

    Returns:
        The backend's program; None to leave it to the backend this one builds on.

    Raises:
        ArtifactError: A file is damaged, or needs trust that was not given.
    """


@hookspec(firstresult=True)
def polyport_run(component: ExportedComponent, request: RunRequest) -> Runner | None:
    """Make a component runnable.

    Called at most once per component and device; the runner is kept.

    Args:
        component: The component, fresh from an export or loaded.
        request: Device and runner options.

    Returns:
        The runner; None to leave it to the backend this one builds on.

    Raises:
        InputError: The device or an option is not available.
    """


@hookspec(firstresult=True)
def polyport_describe(component: ExportedComponent) -> Mapping[str, Any] | None:
    """Say what is inside a program, for `polyport inspect`.

    Called when somebody looks.

    Args:
        component: The component, fresh from an export or loaded.

    Returns:
        JSON values; None where nothing is known. `"operators"` holds operator name -> how often it occurs. Where other
        libraries compute parts of the program, `"delegated"` holds name of the library -> operator name -> how often it
        occurs there, and `"portable"` holds the same of the operators that are left to the format's own runtime.
    """
