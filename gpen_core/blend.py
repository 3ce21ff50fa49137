"""From the restored crop back into the picture, touching nothing but the face's region."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from gpen_core.align import compose, invert, reduce, region, scaling
from gpen_core.finish import take_grain
from gpen_core.pixels import level, round_to
from gpen_core.types import Canvas, Image, Matrix

# GPEN's mask: a 512-pixel box inset by 26, blurred twice with sigma 4.
INSET = 26 / 512
SIGMA = 4 * math.sqrt(2) / 512
# Weights below this are 0, so that the mask ends.
CUTOFF = 1 / 1024
STRIP_PIXELS = 1 << 21

Array = NDArray[Any]


@lru_cache(maxsize=4)
def feathered_mask(size: int) -> NDArray[np.float32]:
    """Paste weights [size, size] in 0..1: a box with soft edges, 0 at the border of the crop. Not to be written to.

    The convolution of a box with a Gaussian in closed form: a difference of error functions, for each axis.
    """
    at = (np.arange(size) + 0.5) / size
    erf = np.vectorize(math.erf)
    edge = SIGMA * math.sqrt(2)
    profile = (erf((at - INSET) / edge) + erf((1 - INSET - at) / edge)) / 2
    mask = np.outer(profile, profile)
    weights = np.where(mask < CUTOFF, 0, mask).astype(np.float32)
    weights.flags.writeable = False
    return weights


def full_mask(size: int) -> NDArray[np.float32]:
    """Paste weights of 1 everywhere, for a crop that is the whole picture."""
    return np.ones((size, size), np.float32)


def paste(
    canvas: Canvas,
    restored: Canvas,
    matrix: Matrix,
    crop_size: int,
    mask: NDArray[np.float32],
    strength: float = 1.0,
    grain: float = 0.0,
    scale: float = 1.0,
) -> None:
    """Blend a restored crop into `canvas`, in place: canvas + strength * mask * (restored - canvas), rounded once.

    canvas: H x W x 3, uint8 or uint16. restored: T x T x 3 in 0..255, uint8 or float32. matrix: from picture to the
    crop of `crop_size` pixels. mask: [M, M] paste weights over the crop. strength: 0 (nothing) to 1. grain: how much
    of the canvas's own grain the restored crop gets; scale: pixels of the canvas that one of the original has become.
    Works in strips, so memory stays bounded.
    """
    height, width = canvas.shape[:2]
    x0, y0, x1, y1 = region(matrix, crop_size, width, height)
    if x0 >= x1 or y0 >= y1 or strength == 0:
        return
    to_picture = invert(matrix)
    picture, picture_map = _prepare(restored, to_picture, crop_size)
    weights, weights_map = _prepare(mask, to_picture, crop_size)
    # Beyond a full mask's edge lies nothing; its outermost pixels reach half a pixel further.
    border = cv2.BORDER_REPLICATE if mask[0, 0] > 0 else cv2.BORDER_CONSTANT
    part = canvas[y0:y1, x0:x1]
    kept = take_grain(part, grain, scale) if grain else None
    for top, bottom in _strips(part):
        window = np.array([[1.0, 0.0, -x0], [0.0, 1.0, -y0 - top]])
        size = (x1 - x0, bottom - top)
        alpha = _warp(weights, compose(window, weights_map), size, border) * np.float32(strength)
        colour = _warp(picture, compose(window, picture_map), size, cv2.BORDER_REPLICATE)
        _blend(part[top:bottom], colour, alpha, kept.rows(top, bottom) if kept else None)


def cover(canvas: Canvas, restored: Image, strength: float = 1.0, grain: float = 0.0, scale: float = 1.0) -> None:
    """Blend a restored picture of the canvas's size over all of it, in place, as `paste` does."""
    if strength == 0:
        return
    kept = take_grain(canvas, grain, scale) if grain else None
    for top, bottom in _strips(canvas):
        alpha = np.full((bottom - top, canvas.shape[1]), strength, np.float32)
        colour = restored[top:bottom].astype(np.float32)
        _blend(canvas[top:bottom], colour, alpha, kept.rows(top, bottom) if kept else None)


def _strips(part: Canvas) -> Iterator[tuple[int, int]]:
    height, width = part.shape[:2]
    rows = max(1, STRIP_PIXELS // width)
    for top in range(0, height, rows):
        yield top, min(top + rows, height)


def _blend(
    target: Canvas, colour: NDArray[np.float32], alpha: NDArray[np.float32], grain: NDArray[np.float32] | None
) -> None:
    base = target.astype(np.float32)
    wanted = colour * level(target.dtype)
    if grain is not None:
        wanted += grain
    blended = base + alpha[..., None] * (wanted - base)
    np.copyto(target, round_to(blended, target.dtype), where=(alpha > 0)[..., None])


def _prepare(image: Array, to_picture: Matrix, crop_size: int) -> tuple[Array, Matrix]:
    """An array over the crop, averaged down where the picture is coarser, and its map to the picture."""
    size = image.shape[0]
    return reduce(image, compose(to_picture, scaling(crop_size / size, crop_size / size)))


def _warp(image: Array, matrix: Matrix, size: tuple[int, int], border: int) -> NDArray[np.float32]:
    """The warped array, float32."""
    warped = cv2.warpAffine(image, matrix, size, flags=cv2.INTER_LINEAR, borderMode=border)
    return np.asarray(warped, np.float32)
