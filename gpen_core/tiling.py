"""A picture larger than the network in overlapping tiles, joined without seams.

Along each axis the picture is divided into cells of `stride` pixels, the last one perhaps shorter. A tile lies around
each and reaches (tile - stride) / 2 further on both sides; beyond the picture it sees the picture mirrored. So a pixel
at the border is surrounded by as much as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from gpen_core.pixels import round_to
from gpen_core.types import Image

# Standard deviation of the weights, in tiles: at a tile's edge they have fallen to exp(-8).
SPREAD = 1 / 8


def starts(length: int, tile: int, stride: int) -> list[int]:
    """Where the tiles along an axis of `length` pixels begin; a single one at 0 if it covers the axis."""
    if length <= tile:
        return [0]
    reach = (tile - stride) // 2
    return [cell * stride - reach for cell in range(-(-length // stride))]


def weights(length: int, tile: int, stride: int) -> NDArray[np.float32]:
    """Each tile's share [tiles, length] in each pixel of an axis: Gaussian, cut off at the tile; they sum to 1."""
    at = np.arange(length)
    begins = np.array(starts(length, tile, stride))[:, None]
    distance = (at - begins - (tile - 1) / 2) / (SPREAD * tile)
    inside = (at >= begins) & (at < begins + tile)
    shares = np.where(inside, np.exp(-(distance**2) / 2), 0)
    result: NDArray[np.float32] = (shares / shares.sum(axis=0)).astype(np.float32)
    return result


def tiled(
    picture: Image, tile: int, stride: int, run: Callable[[Sequence[Image]], Sequence[Image | None]]
) -> Image | None:
    """What `run` makes of a picture of any size, tile by tile; None if it gave None for a tile.

    run: takes tile x tile pictures and returns as many of the same size; it is called for one row of tiles at a time,
    and no more than the rows that overlap are held in floating point.
    """
    height, width = picture.shape[:2]
    tops, lefts = starts(height, tile, stride), starts(width, tile, stride)
    down, across = weights(height, tile, stride), weights(width, tile, stride)
    result = np.empty_like(picture)
    # Sums for the picture's rows from `done` on.
    sums = np.zeros((min(tile, height), width, 3), np.float32)
    done = 0
    for index, top in enumerate(tops):
        pictures = run([_window(picture, left, top, tile) for left in lefts])
        first, last = max(top, 0), min(top + tile, height)
        shares = down[index, first:last, None, None]
        for left, restored, share in zip(lefts, pictures, across, strict=True):
            if restored is None:
                return None
            near, far = max(left, 0), min(left + tile, width)
            part = restored[first - top : last - top, near - left : far - left]
            sums[first - done : last - done, near:far] += part * shares * share[None, near:far, None]
        finished = max(tops[index + 1], 0) if index + 1 < len(tops) else height
        count = finished - done
        result[done:finished] = round_to(sums[:count], picture.dtype)
        sums[: len(sums) - count] = sums[count:].copy()
        sums[len(sums) - count :] = 0
        done = finished
    return result


def _window(picture: Image, left: int, top: int, tile: int) -> Image:
    """The tile there; beyond the picture it is mirrored."""
    height, width = picture.shape[:2]
    if top >= 0 and left >= 0 and top + tile <= height and left + tile <= width:
        return np.ascontiguousarray(picture[top : top + tile, left : left + tile])
    rows, columns = _mirrored(top, tile, height), _mirrored(left, tile, width)
    return np.ascontiguousarray(picture[rows[:, None], columns])


def _mirrored(start: int, count: int, length: int) -> NDArray[np.intp]:
    """Indices start ... start + count - 1, folded back into 0 ... length - 1 at the outermost pixels."""
    period = max(1, 2 * (length - 1))
    folded = np.arange(start, start + count) % period
    return np.minimum(folded, period - folded) if length > 1 else np.zeros(count, np.intp)
