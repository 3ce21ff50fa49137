"""The one owner of value ranges, channel order and rounding between pictures and networks.

The arithmetic works alike on numpy arrays and on torch tensors of any device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

WHITE = 255


def to_network(pixels: Any, value_range: tuple[float, float]) -> Any:
    """0..255 in floating point to the network's range; any layout."""
    black, white = value_range
    return pixels * ((white - black) / WHITE) + black


def from_network(values: Any, value_range: tuple[float, float]) -> Any:
    """The network's range to 0..255, clamped and rounded half to even, still in floating point; NaN stays NaN."""
    black, white = value_range
    return ((values - black) * (WHITE / (white - black))).clip(0, WHITE).round()


def round_to(values: NDArray[np.floating[Any]], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Floating-point pixels to uint8 or uint16: clamped to the type's range, rounded half to even."""
    return np.rint(np.clip(values, 0, np.iinfo(dtype).max)).astype(dtype)


def level(dtype: np.dtype[Any]) -> int:
    """How many levels of a pixel type make one of uint8: 1 for uint8, 257 for uint16."""
    return int(np.iinfo(dtype).max) // WHITE


def luma(pixels: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rec. 601 luma [H, W] of H x W x 3 RGB in floating point; `photo.grey_of` does it for integers."""
    return np.asarray(pixels @ np.array([0.299, 0.587, 0.114], pixels.dtype))
