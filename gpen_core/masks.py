"""Paste weights other than the plain box: an ellipse, and what a parser takes for the face."""

from __future__ import annotations

import math

import cv2
import numpy as np
from numpy.typing import NDArray

from gpen_core.blend import CUTOFF, feathered_mask

Weights = NDArray[np.float32]

# An upright oval over eyes, mouth and chin of the crop templates, as fractions of the crop.
SEMI_AXES = (0.34, 0.38)
# The parser's mask in pixels of 512: blurred twice with this sigma in a window of 101, a border of 10 cleared, as
# users of facexlib's parsers know it.
PARSED_SIZE = 512
SIGMA = 11.0
WINDOW = 101
BORDER = 10


def ellipse_mask(size: int) -> Weights:
    """Paste weights [size, size] in 0..1: an upright ellipse with soft edges, 0 at the border of the crop.

    As soft as a parser's mask: across the edge a Gaussian's integral over the distance to it.
    """
    at = (np.arange(size) + 0.5) / size - 0.5
    x, y = at[None, :] / SEMI_AXES[0], at[:, None] / SEMI_AXES[1]
    radius = np.hypot(x, y)
    # Distance from the edge to first order: (1 - r) over the length of r's gradient.
    slope = np.hypot(x / SEMI_AXES[0], y / SEMI_AXES[1]) / np.maximum(radius, 1e-9)
    distance = (1 - radius) / np.maximum(slope, 1e-9)
    sigmas = np.linspace(-4, 4, 801)
    profile = [0.5 + 0.5 * math.erf(s / math.sqrt(2)) for s in sigmas]
    soft = np.interp(distance / (SIGMA * math.sqrt(2) / PARSED_SIZE), sigmas, profile)
    return _framed(soft.astype(np.float32))


def parsed_mask(face: NDArray[np.bool_]) -> Weights:
    """Paste weights [512, 512] in 0..1 from the pixels [512, 512] that are face, 0 at the border of the crop."""
    weights = face.astype(np.float32)
    for _ in range(2):
        weights = np.asarray(cv2.GaussianBlur(weights, (WINDOW, WINDOW), SIGMA), np.float32)
    weights[:BORDER] = weights[-BORDER:] = weights[:, :BORDER] = weights[:, -BORDER:] = 0
    return _framed(weights)


def _framed(weights: Weights) -> Weights:
    """The weights inside the box mask: a face that reaches the crop's border must not end in a seam."""
    framed = np.clip(weights, 0, 1) * feathered_mask(weights.shape[0])
    return np.where(framed < CUTOFF, 0, framed).astype(np.float32)
