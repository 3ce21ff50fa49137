"""From a face in a picture to the network's square crop.

Positions are (x, y) with integer values at pixel centres, as OpenCV has them.
"""

from __future__ import annotations

import math
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from gpen_core.config import Template
from gpen_core.types import Image, Matrix, Points

# Pixels around the sampled region that interpolation may touch.
MARGIN = 4


def similarity(source: Points, target: Points) -> Matrix:
    """The least-squares similarity [2, 3] that takes source points [N, 2] to target points (Umeyama, 1991).

    In complex numbers: a = sum(conj(z - mean z) (t - mean t)) / sum |z - mean z|^2. Raises ValueError if the source
    points coincide or are not finite.
    """
    z = source[:, 0] + 1j * source[:, 1]
    t = target[:, 0] + 1j * target[:, 1]
    spread = np.vdot(z - z.mean(), z - z.mean()).real
    if not np.isfinite(spread) or spread <= 0:
        raise ValueError("the points coincide or are not finite")
    a = np.vdot(z - z.mean(), t - t.mean()) / spread
    b = t.mean() - a * z.mean()
    return np.array([[a.real, -a.imag, b.real], [a.imag, a.real, b.imag]])


def crop_matrix(landmarks: Points, template: Template, size: int) -> Matrix:
    """The map from picture to crop [2, 3] for five landmarks [5, 2] and a crop of `size` pixels."""
    return similarity(landmarks, np.array(template, np.float64) * size)


def whole_matrix(width: int, height: int, size: int) -> Matrix:
    """The map that stretches a whole width x height picture over the crop."""
    return scaling(size / width, size / height)


def scaling(x: float, y: float) -> Matrix:
    """Scaling [2, 3] that keeps pixel areas together: centre p goes to (p + 1/2) * scale - 1/2."""
    return np.array([[x, 0.0, (x - 1) / 2], [0.0, y, (y - 1) / 2]])


def compose(outer: Matrix, inner: Matrix) -> Matrix:
    """The map that applies `inner`, then `outer`."""
    return np.asarray(outer @ np.vstack([inner, [0, 0, 1]]))


def invert(matrix: Matrix) -> Matrix:
    """The inverse map. Raises numpy.linalg.LinAlgError if there is none."""
    (a, b, x), (c, d, y) = matrix.tolist()
    determinant = a * d - b * c
    if determinant == 0:
        raise np.linalg.LinAlgError("a map that flattens the picture has no inverse")
    # Written out, because a library for large matrices wakes its threads for small ones too.
    inverse = np.array([[d, -b, b * y - d * x], [-c, a, c * x - a * y]])
    return np.asarray(inverse / determinant)


def scale_of(matrix: Matrix) -> float:
    """How many target pixels long one source pixel becomes."""
    return math.sqrt(abs(np.linalg.det(matrix[:, :2])))


def region(matrix: Matrix, size: int, width: int, height: int) -> tuple[int, int, int, int]:
    """Bounds x0, y0, x1, y1 (ends excluded) of the part of a width x height picture that a crop of `size` covers."""
    corners = np.array([[-0.5, -0.5], [size - 0.5, -0.5], [-0.5, size - 0.5], [size - 0.5, size - 0.5]])
    inverse = invert(matrix)
    points = corners @ inverse[:, :2].T + inverse[:, 2]
    low, high = np.floor(points.min(0)).astype(int), np.ceil(points.max(0)).astype(int) + 1
    x0, y0 = (int(v) for v in np.clip(low, 0, [width, height]))
    x1, y1 = (int(v) for v in np.clip(high, 0, [width, height]))
    return x0, y0, x1, y1


def crop(image: Image, matrix: Matrix, size: int) -> Image:
    """The size x size crop of a picture under a map from picture to crop.

    A shrinking map would alias, so the picture's region is first reduced by averaging to the crop's scale. Beyond the
    border the picture is mirrored.
    """
    height, width = image.shape[:2]
    x0, y0, x1, y1 = region(matrix, size, width, height)
    x0, y0 = max(0, min(x0, width - 1) - MARGIN), max(0, min(y0, height - 1) - MARGIN)
    x1, y1 = min(width, max(x1, x0 + 1) + MARGIN), min(height, max(y1, y0 + 1) + MARGIN)
    part = image[y0:y1, x0:x1]
    matrix = compose(matrix, np.array([[1.0, 0.0, x0], [0.0, 1.0, y0]]))
    part, matrix = reduce(part, matrix)
    # Mirroring needs two pixels.
    border = cv2.BORDER_REFLECT_101 if min(part.shape[:2]) > 1 else cv2.BORDER_REPLICATE
    warped = cv2.warpAffine(part, matrix, (size, size), flags=cv2.INTER_LINEAR, borderMode=border)
    return np.ascontiguousarray(warped, dtype=np.uint8)


def reduce(image: NDArray[Any], matrix: Matrix) -> tuple[NDArray[Any], Matrix]:
    """A picture averaged down to the scale of what `matrix` makes of it, and the map from there.

    A picture that `matrix` enlarges is returned as it is.
    """
    # Column lengths are the scales along x and y, which differ only for stretched whole pictures.
    scale_x, scale_y = (min(1.0, float(s)) for s in np.hypot(matrix[0, :2], matrix[1, :2]))
    height, width = image.shape[:2]
    new_width, new_height = max(1, round(width * scale_x)), max(1, round(height * scale_y))
    if (new_width, new_height) == (width, height):
        return image, matrix
    reduced = cv2.resize(image, (new_width, new_height), interpolation=cv2.INTER_AREA)
    return np.asarray(reduced), compose(matrix, scaling(width / new_width, height / new_height))
