"""What a delegate took, what is left to ExecuTorch's own kernels, and what has none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import attrs
import torch

from polyport.errors import ExportError
from polyport.metadata import ExportMetadata
from polyport_executorch.lowering import Lowered
from polyport_executorch.portable import rewritten

#: Key of `ExportMetadata.backend`.
REPORT = "delegation"

#: What copies nothing, or what the plan of the memory resolves.
_FREE = ("getitem", "executorch_call_delegate", "alloc")


def recorded(lowered: Lowered, metadata: ExportMetadata) -> ExportMetadata:
    """A record with the report of a program.

    Raises:
        ExportError: An operator has no kernel in the runtime that is installed.
    """
    refuse_missing(lowered.manager)
    report = {"delegated": taken(lowered.edge), "portable": left(lowered.manager)}
    return attrs.evolve(metadata, backend={**metadata.backend, REPORT: report})


def taken(edge: Any) -> dict[str, dict[str, int]]:
    """Backend -> operator -> how many of them its delegates compute.

    Args:
        edge: The lowered `torch.export.ExportedProgram`.
    """
    counts: dict[str, Counter[str]] = {}
    for module in edge.graph_module.modules():
        if (name := getattr(module, "backend_id", None)) is not None:
            found = counts.setdefault(str(name), Counter())
            found["delegates"] += 1
            for node in module.original_module.graph.nodes:
                if node.op == "call_function":
                    found[_name(node.target)] += 1
    return {name: dict(found.most_common()) for name, found in sorted(counts.items())}


def left(manager: Any) -> dict[str, int]:
    """Operator -> how many calls of ExecuTorch's own kernels a program makes.

    Args:
        manager: `executorch.exir.ExecutorchProgramManager`.
    """
    counts: Counter[str] = Counter()
    for plan in manager.executorch_program.execution_plan:
        for chain in plan.chains:
            for instruction in chain.instructions:
                index = getattr(instruction.instr_args, "op_index", None)
                if index is not None:
                    counts[_kernel(plan.operators[index])] += 1
    return dict(counts.most_common())


def refuse_missing(manager: Any) -> None:
    """Refuse a program that the runtime has no kernel for: it would fail when it is loaded.

    Raises:
        ExportError: Names the operators.
    """
    kernels = _kernels()
    missing = sorted(
        {
            name
            for plan in manager.executorch_program.execution_plan
            for operator in plan.operators
            if (name := _kernel(operator)) not in kernels
        }
    )
    if missing:
        raise ExportError(
            f"ExecuTorch's runtime has no kernel for {', '.join(missing)}, and no delegate takes "
            f"{'it' if len(missing) == 1 else 'them'}.",
            stage="lower",
            backend="executorch",
        )


def without_kernel(program: torch.export.ExportedProgram) -> list[str]:
    """Operators of a traced program that the runtime has no kernel of any form for, and that aren't rewritten, when a lowering failed.

    Args:
        program: As `torch.export.export` returns it; not changed.
    """
    try:
        graph = program.run_decompositions().graph
    except Exception:  # noqa: BLE001  the lowering failed for the same reason, which is what the error is about
        return []
    known = {name.partition(".")[0] for name in _kernels()} | rewritten()
    # an operator with effects is an argument of a call that puts it in order
    called = (x for node in graph.nodes if node.op == "call_function" for x in (node.target, *node.args))
    # what returns nothing is a check, which the runtime does without
    names = {x._schema.name for x in called if isinstance(x, torch._ops.OpOverload) and x._schema.returns}
    return sorted(name for name in names if not {name, f"{name}_copy"} & known)


def _kernels() -> set[str]:
    from executorch.runtime import Runtime

    return set(Runtime.get().operator_registry.operator_names)


def described(metadata: ExportMetadata) -> Mapping[str, Any]:
    """What `polyport inspect` says of a component."""
    found: Any = metadata.backend.get(REPORT, {})
    return found if isinstance(found, dict) else {}


def _kernel(operator: Any) -> str:
    return f"{operator.name}.{operator.overload}" if operator.overload else str(operator.name)


def _name(target: Any) -> str:
    name = target.name() if hasattr(target, "name") and callable(target.name) else str(target)
    return str(name).replace("::", ".") if isinstance(target, torch._ops.OpOverload) else str(name)
