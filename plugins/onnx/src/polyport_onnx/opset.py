"""Differences between opset 18, which torchlib is written for, and the opset of the model."""

from __future__ import annotations

import onnx_ir as ir

_GRID_MODES = {"bilinear": "linear", "bicubic": "cubic"}


def adapt(model: ir.Model, opset_version: int) -> None:
    """Mend the operators whose definition has changed since opset 18; most have only gained types.

    Args:
        model: without functions, changed in place.
        opset_version: what the model declares.
    """
    if opset_version < 20:
        return
    for node in list(ir.traversal.RecursiveGraphIterator(model.graph)):
        if node.op_type == "GridSample" and "mode" in node.attributes:
            mode = node.attributes["mode"].as_string()
            node.attributes["mode"] = ir.AttrString("mode", _GRID_MODES.get(mode, mode))
        elif node.op_type == "DFT" and "axis" in node.attributes:
            _axis_as_input(model, node)


def _axis_as_input(model: ir.Model, node: ir.Node) -> None:
    """`DFT` takes its axis as third input since opset 20."""
    axis = node.attributes.pop("axis").as_int()
    name = f"dft_axis_{axis}"
    value = model.graph.initializers.get(name)
    if value is None:
        value = ir.Value(name=name, const_value=ir.tensor(axis, dtype=ir.DataType.INT64))
        value.shape, value.dtype = ir.Shape(()), ir.DataType.INT64
        model.graph.register_initializer(value)
    if len(node.inputs) < 3:
        node.resize_inputs(3)
    node.replace_input_with(2, value)
