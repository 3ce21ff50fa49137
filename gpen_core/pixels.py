"""The one owner of value ranges, channel order and rounding between pictures and networks.

The arithmetic works alike on numpy arrays and on torch tensors of any device.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from gpen_core.errors import ImageError

WHITE = 255


def to_network(pixels: Any, value_range: tuple[float, float]) -> Any:
    """0..255 in floating point to the network's range; any layout."""
    black, white = value_range
    return pixels * ((white - black) / WHITE) + black


def from_network(values: Any, value_range: tuple[float, float]) -> Any:
    """The network's range to 0..255, clamped and rounded half to even, still in floating point; NaN stays NaN."""
    black, white = value_range
    return ((values - black) * (WHITE / (white - black))).clip(0, WHITE).round()


def require_picture(image: Any, types: Sequence[DTypeLike] = (np.uint8,)) -> None:
    """Raises ImageError for anything but an array H x W x 3 of one of the types, with at least one pixel."""
    names = [np.dtype(kind).name for kind in types]
    fits = isinstance(image, np.ndarray) and image.dtype.name in names and image.ndim == 3
    if not fits or image.shape[2] != 3 or 0 in image.shape:
        raise ImageError(f"expected H x W x 3 {' or '.join(names)} pixels, got {_seen(image)}")


def require_crops(crops: Any, sides: Collection[int]) -> None:
    """Raises ImageError for anything but a sequence of arrays S x S x 3 uint8, each S one of the sides."""
    if not isinstance(crops, Sequence | np.ndarray):
        raise ImageError(f"expected a sequence of crops, got {_seen(crops)}")
    shapes = [(side, side, 3) for side in sides]
    for crop in crops:
        if not isinstance(crop, np.ndarray) or crop.dtype != np.uint8 or crop.shape not in shapes:
            wanted = " or ".join(f"{side} x {side} x 3" for side in sides)
            raise ImageError(f"expected crops of {wanted} uint8 pixels, got {_seen(crop)}")


def _seen(value: Any) -> str:
    """What somebody took for a picture."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype} {list(value.shape)}"
    return type(value).__name__


def round_to(values: NDArray[np.floating[Any]], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Floating-point pixels to uint8 or uint16: clamped to the type's range, rounded half to even."""
    return np.rint(np.clip(values, 0, np.iinfo(dtype).max)).astype(dtype)


def level(dtype: np.dtype[Any]) -> int:
    """How many levels of a pixel type make one of uint8: 1 for uint8, 257 for uint16."""
    return int(np.iinfo(dtype).max) // WHITE


def luma(pixels: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rec. 601 luma [H, W] of H x W x 3 RGB in floating point; `photo.grey_of` does it for integers."""
    return np.asarray(pixels @ np.array([0.299, 0.587, 0.114], pixels.dtype))
