"""From a traced model to an exported ExecuTorch component: the lowering, told in the terms of the export."""

from __future__ import annotations

import attrs
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from polyport.capture import tensor_leaves
from polyport.errors import ExportError, PolyportError
from polyport.pipeline import ExportedComponent, TracedProgram
from polyport_dynamo.lowering import signature
from polyport_executorch import bounds, delegation
from polyport_executorch.config import ExecutorchConfig
from polyport_executorch.kept import KEPT
from polyport_executorch.lowering import lower_program
from polyport_executorch.recipes import check_call, find_recipe, static_cache_refused
from polyport_executorch.runner import ProgramRunner, try_out
from polyport_executorch.stateful_runner import StatefulRunner


def to_component(traced: TracedProgram, config: ExecutorchConfig) -> ExportedComponent:
    """Lower a traced model.

    Args:
        traced: The traced model; not changed.
        config: Recipe, largest sizes and the memory plan.

    Raises:
        ConfigError: The recipe can't be used here, or a size is none of the graph's.
        ExportError: The program can't be lowered, an operator has no kernel, or its kernel refuses the sample.
    """
    recipe = find_recipe(config.backend)
    sample = {}
    if traced.call is not None:
        # once more: the capture was another format's where formats share a trace
        check_call(config.backend, traced.call.model, traced.call.sample)
        sample = tensor_leaves(traced.call.sample)
    metadata = bounds.bounded(
        traced.metadata,
        bounds.sizes_of(traced.metadata, sample),
        config.max_sizes,
        bounds.chosen_limits(config.dynamic_shapes),
    )
    nodes = {node.name: node for node in traced.program.graph.find_nodes(op="placeholder")}
    inputs = {
        info.name: nodes[name].meta["val"]
        for info, name in zip(metadata.inputs, signature.user_inputs(traced.program), strict=True)
    }
    try:
        lowered = lower_program(
            traced.program,
            metadata,
            recipe=recipe,
            config=config,
            inputs=inputs,
        )
    except PolyportError:
        raise
    except Exception as error:
        missing = delegation.without_kernel(traced.program)
        which = f", in which the runtime has no kernel for {', '.join(missing)}" if missing else ""
        raise ExportError(
            f"ExecuTorch can't lower the traced graph{which}: {_reason(error)}",
            stage="lower",
            backend="executorch",
        ) from error
    if lowered.leaves.in_place and not recipe.static_caches:
        raise static_cache_refused(config.backend)
    recorded = delegation.recorded(lowered, lowered.leaves.without(lowered.kept).recorded(metadata))
    if lowered.kept:
        recorded = attrs.evolve(recorded, backend={**recorded.backend, KEPT: list(lowered.kept)})
    try_out(lowered.manager, recorded, sample, StatefulRunner if lowered.kept else ProgramRunner)
    return ExportedComponent(program=lowered.manager, metadata=recorded)


def _reason(error: BaseException) -> str:
    """What went wrong first: ExecuTorch wraps errors of its passes in others."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error).strip().split("\n\n")[0]
    if isinstance(error, GuardOnDataDependentSymNode) or "finite upper bound" in text:
        text = f"a size depends on values that the model computes. {text}"
    return f"{type(error).__name__}: {text}"
