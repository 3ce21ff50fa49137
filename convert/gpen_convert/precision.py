"""Tensors in the precision that a file keeps, if that is precise enough for them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gpen_core.errors import CheckpointError
from gpen_core.ops import EPSILON

DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
LARGEST_LOSS = 2e-3
"""Root mean square of the rounding over that of the values; rounding to float16 alone gives 3e-4."""


def rounded(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Our tensors, sorted by name, in `dtype`.

    Raises CheckpointError for values that are not finite then, and for kernels and matrices so small that float16
    keeps too little of them. Biases and gains are added to, or scale, values around 1, where all that float16 loses of
    small ones is below 1e-7.
    """
    word = str(dtype).removeprefix("torch.")
    result = {name: tensor.to(dtype).contiguous() for name, tensor in sorted(tensors.items())}
    for name, tensor in result.items():
        if not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"{name} holds values that are not finite in {word}")
        loss = _loss(name, tensors[name], tensor)
        if loss > LARGEST_LOSS:
            raise CheckpointError(
                f"{name} holds values too small for {word}, which would lose {loss:.1%} of it: use --dtype fp32"
            )
    return result


def _loss(name: str, exact: Tensor, kept: Tensor) -> float:
    if exact.dim() < 2 or kept.dtype != torch.float16:
        return 0.0
    error, exact = (exact.double() - kept.double()).square(), exact.double().square()
    if not name.startswith("layers."):
        return float((error.sum() / exact.sum().clamp_min(torch.finfo(torch.float64).tiny)).sqrt())
    # Demodulation brings every channel to the same strength, however small its kernel is. Doubling layers, every
    # other one, keep the input axis first.
    axis = int(name.split(".")[1]) % 2
    others = [i for i in range(exact.dim()) if i != axis]
    return float((error.sum(others) / (exact.sum(others) + EPSILON)).mean().sqrt())
