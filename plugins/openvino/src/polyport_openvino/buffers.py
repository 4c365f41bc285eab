"""Tensors of PyTorch and of OpenVINO on one memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino as ov
import torch

#: dtypes that numpy lacks: OpenVINO's, and what carries the bits.
_CARRIED = {
    torch.bfloat16: (ov.Type.bf16, torch.int16),
    torch.float8_e4m3fn: (ov.Type.f8e4m3, torch.uint8),
    torch.float8_e5m2: (ov.Type.f8e5m2, torch.uint8),
}

#: Types that numpy lacks: what carries the bits, and PyTorch's dtype.
CARRIERS = {
    kind: (np.dtype(str(carrier).removeprefix("torch.")), dtype)
    for dtype, (kind, carrier) in _CARRIED.items()
}


def to_openvino(tensor: torch.Tensor) -> ov.Tensor:
    """A tensor on the same memory, which the caller keeps alive as long as it is used.

    Args:
        tensor: On the CPU, contiguous.
    """
    kind, carrier = _CARRIED.get(tensor.dtype, (None, None))
    if kind is not None and carrier is not None:
        if not tensor.numel():
            return ov.Tensor(kind, ov.Shape(tensor.shape))
        return ov.Tensor(tensor.view(carrier).numpy(), ov.Shape(tensor.shape), kind)
    return ov.Tensor(tensor.numpy(), shared_memory=True)


def to_torch(tensor: ov.Tensor) -> torch.Tensor:
    """A tensor on the same memory, which it keeps alive if OpenVINO allocated it.

    Args:
        tensor: Of any type that PyTorch has.
    """
    array: Any = tensor.data
    found = CARRIERS.get(tensor.get_element_type())
    if found is None:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(found[0])).view(found[1])
