"""What may be done to a restored face besides pasting it, in float32; nothing of it unless asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

from gpen_core.pixels import luma
from gpen_core.types import Canvas, Image

Floats = NDArray[np.float32]

# Standard deviations: of the blur that leaves colours, and the detail that is sharpened, in crops; of grain in pixels.
COLOUR = 1 / 16
DETAIL = 1.2 / 512
# A narrower Gaussian, in pixels, is none.
LEAST = 0.8
GRAIN = 1.5
# So wide a blur needs no more pixels.
COLOUR_SIZE = 64
# Deviations beyond this many standard deviations of the grain are edges.
EDGES = 3
# Grain is judged by the middle of a region.
SAMPLE = 1024


def match_color(picture: Floats, original: Image) -> Floats:
    """The restored face with the original's colours: what a wide Gaussian blur leaves of both is exchanged.

    picture: T x T x 3 in 0..255. original: the S x S x 3 crop that it was made from. Casts and changed brightness are
    undone wherever in the face they are; detail stays the restored one's.
    """
    size = picture.shape[0]
    small = min(size, COLOUR_SIZE)
    missing = _area(original.astype(np.float32), small) - _area(picture, small)
    wide = _blurred(missing, COLOUR * small)
    return picture + np.asarray(cv2.resize(wide, (size, size), interpolation=cv2.INTER_CUBIC), np.float32)


def sharpen(picture: Floats, amount: float) -> Floats:
    """An unsharp mask of the luma, which makes no coloured fringes. amount: 0 nothing, 1 doubles the finest detail.

    picture: T x T x 3 in 0..255; the result may leave that range.
    """
    bright = luma(picture)
    detail = bright - _blurred(bright, max(LEAST, DETAIL * picture.shape[0]))
    return picture + np.float32(amount) * detail[..., None]


@dataclass(frozen=True, eq=False)
class Grain:
    """The finest structure of a region without its edges.

    before: the region, H x W x 3. amount: factor of the result. deviation: of the blur, in pixels; limit: larger
    differences than this are cut to it; both in the region's levels.
    """

    before: Canvas
    amount: float
    deviation: float
    limit: float

    def rows(self, top: int, bottom: int) -> Floats:
        """Differences [bottom - top, W, 3] to be added; the same whichever rows are asked for together."""
        halo = math.ceil(4 * self.deviation) + 1
        start = max(0, top - halo)
        values = self.before[start : bottom + halo].astype(np.float32)
        residual = (values - _blurred(values, self.deviation))[top - start : bottom - start]
        return np.clip(residual, -self.limit, self.limit) * np.float32(self.amount)


def take_grain(region: Canvas, amount: float, scale: float = 1.0) -> Grain:
    """The grain of a region, of which a copy is kept. scale: pixels that one of the original has become.

    The grain's standard deviation is 1.4826 times the median of absolute differences, which edges hardly raise.
    """
    deviation = GRAIN * scale
    y, x = (max(0, (length - SAMPLE) // 2) for length in region.shape[:2])
    sample = region[y : y + SAMPLE, x : x + SAMPLE].astype(np.float32)
    spread = 1.4826 * float(np.median(np.abs(sample - _blurred(sample, deviation))))
    return Grain(region.copy(), amount, deviation, EDGES * spread)


def _blurred(values: Floats, deviation: float) -> Floats:
    return np.asarray(cv2.GaussianBlur(values, (0, 0), deviation, borderType=cv2.BORDER_REFLECT), np.float32)


def _area(values: Floats, size: int) -> Floats:
    larger = cv2.INTER_AREA if values.shape[0] >= size else cv2.INTER_LINEAR
    return np.asarray(cv2.resize(values, (size, size), interpolation=larger), np.float32)
