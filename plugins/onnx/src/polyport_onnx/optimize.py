"""What is left to tidy after translation, in passes that each visit a node a fixed number of times."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import common


def inline_functions(model: ir.Model) -> None:
    """Put the bodies of functions in the place of their calls: runtimes and later passes see one graph."""
    if model.functions:
        common.InlinePass()(model)
        model.functions.clear()


def optimize_model(model: ir.Model) -> None:
    """Remove what the translation left behind: unused nodes, constants as nodes, equal nodes made by torchlib."""
    common.RemoveUnusedNodesPass()(model)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    common.LiftSubgraphInitializersToMainGraphPass()(model)
    common.CommonSubexpressionEliminationPass()(model)
    common.RemoveUnusedNodesPass()(model)
