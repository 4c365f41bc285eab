"""Tracing a captured call with `torch.export`, and checking that what was promised to vary does."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from polyport.capture import is_constant, tensor_leaves, true_lengths, untouched
from polyport.config import ExportConfig
from polyport.errors import ExportError, PolyportError
from polyport.pipeline import CapturedCall, TracedProgram
from polyport_dynamo.axes import check_axes
from polyport_dynamo.guards import at_sample_sizes, drop_needless_guards, frozen_by, refused_by
from polyport_dynamo.limits import beyond_limits, widen
from polyport_dynamo.record import describe

logger = logging.getLogger(__name__)

STAGE = "trace"


def trace(call: CapturedCall, config: ExportConfig) -> TracedProgram:
    """Trace the call into a graph.

    Args:
        call: The captured call. Its model comes back unchanged.
        config: The export config.

    Returns:
        The program, in torch.export's training IR, sharing the model's weights, with the record of what goes in and out.

    Raises:
        ExportError: torch.export can't trace the model, or the trace fixed an axis that varies.
    """
    kwargs = {name: value for name, value in call.kwargs.items() if not is_constant(value)}
    constants = {name: value for name, value in call.kwargs.items() if is_constant(value)}
    with untouched(call.model), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = _export(call, kwargs, constants, config)
        names = check_axes(program, call)
        if longer := beyond_limits(call, kwargs, names.ranges):
            kwargs = {name: value for name, value in longer.items() if not is_constant(value)}
            program = _export(call, kwargs, constants, config)
            names = check_axes(program, call)
        drop_needless_guards(program, call)
        if refused_by(program, call):
            # a branch on a size went another way than the caller's sample does; at its own sizes it can't
            kwargs = at_sample_sizes(call, kwargs)
            program = _export(call, kwargs, constants, config)
            names = check_axes(program, call)
            drop_needless_guards(program, call)
            if refused := refused_by(program, call):
                raise ExportError(
                    f"{type(call.model).__name__} computes differently depending on a size, and the graph would refuse "
                    f"the sample inputs ({'; '.join(refused[:3])}). Export with dynamic=False, or give dynamic_shapes.",
                    stage=STAGE,
                )
        # before limits are lowered: at its smallest size a graph may agree with a model that it agrees with nowhere else
        if frozen := frozen_by(program, call, names.symbols):
            named = ", ".join(
                sorted({names.symbols.get(s, str(s)) for guard in frozen for s in guard.free_symbols})
            )
            raise ExportError(
                f"Axis {named} varies when {type(call.model).__name__} runs, but the trace fixed it "
                f"({'; '.join(str(guard) for guard in frozen[:2])}): a loop over it was unrolled, or its code needs a "
                "plain number. Export with dynamic=False, or give dynamic_shapes.",
                stage=STAGE,
            )
        names = widen(program, call, names)
    metadata = describe(program, call, kwargs, constants, names, config)
    return TracedProgram(program=program, metadata=metadata, call=call)


def _export(
    call: CapturedCall, kwargs: dict[str, Any], constants: Mapping[str, Any], config: ExportConfig
) -> torch.export.ExportedProgram:
    try:
        program = torch.export.export(
            _Call(call.model, kwargs, constants),
            args=(),
            kwargs=kwargs,
            dynamic_shapes=call.dynamic_shapes,
            strict=config.strict,
            prefer_deferred_runtime_asserts_over_guards=config.prefer_deferred_runtime_asserts_over_guards,
        )
        # limits of sums of axes: nobody reads them, and a file that names one can't be read without evaluating it
        program._range_constraints = {
            symbol: span for symbol, span in program.range_constraints.items() if symbol.is_Symbol
        }
        return program
    except PolyportError:
        raise
    except Exception as error:
        raise ExportError(
            f"{type(call.model).__name__} can't be traced by torch.export ({torch.__version__}): "
            f"{type(error).__name__}: {_first_lines(error)}",
            stage=STAGE,
        ) from error


def _first_lines(error: Exception) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return " ".join(lines[:3])[:600]


class _Call(torch.nn.Module):
    """The model as a module whose forward takes exactly the traced kwargs.

    It shares the model's own tables of parameters and submodules instead of holding the model as a child, so that names in
    the program are the names in the model's state dict.
    """

    def __init__(
        self, model: torch.nn.Module, kwargs: Mapping[str, Any], constants: Mapping[str, Any]
    ) -> None:
        super().__init__()
        own = vars(self)
        for table in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            own[table] = vars(model)[table]
        own["training"] = False
        fixed = dict(constants)
        if _takes(model, "return_dict"):
            fixed["return_dict"] = True
        target = model.forward

        def forward(**inputs: Any) -> Any:
            return target(**inputs, **fixed)

        def with_buffers(**inputs: Any) -> Any:
            with true_lengths(inputs):
                return target(**inputs, **fixed)

        if any("cumulative_length" in name for name in tensor_leaves(kwargs)):
            forward = with_buffers  # static caches; strict mode can't read this context manager

        # torch.export matches dynamic_shapes with parameters by name
        parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in kwargs]
        forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        own["forward"] = forward


def _takes(model: torch.nn.Module, name: str) -> bool:
    return name in inspect.signature(model.forward).parameters
