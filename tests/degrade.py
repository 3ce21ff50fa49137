"""A photo made worse in a known way, and how far two pictures are apart."""

from __future__ import annotations

import cv2
import numpy as np
from numpy.typing import NDArray
from skimage.metrics import structural_similarity

from gpen_core.types import Image


def degrade(
    image: Image, *, blur: float = 1.0, reduce: int = 2, noise: float = 6.0, quality: int = 50, seed: int = 0
) -> Image:
    """Blur (sigma in px), reduction by averaging, Gaussian noise (levels), JPEG, and enlargement to the old size.

    The noise comes from a seed, so the result is always the same.
    """
    height, width = image.shape[:2]
    blurred = cv2.GaussianBlur(image, (0, 0), blur)
    small = cv2.resize(blurred, (width // reduce, height // reduce), interpolation=cv2.INTER_AREA)
    noisy = small + np.random.RandomState(seed).standard_normal(small.shape) * noise
    eight = np.clip(np.rint(noisy), 0, 255).astype(np.uint8)
    _, coded = cv2.imencode(".jpg", eight[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, quality])
    decoded = cv2.imdecode(coded, cv2.IMREAD_COLOR)[..., ::-1]
    enlarged = cv2.resize(decoded, (width, height), interpolation=cv2.INTER_CUBIC)
    return np.ascontiguousarray(enlarged, dtype=np.uint8)


def psnr(one: NDArray[np.uint8], other: NDArray[np.uint8]) -> float:
    """Peak signal-to-noise ratio in dB, for 255."""
    error = np.mean((one.astype(np.float64) - other) ** 2)
    return float(10 * np.log10(255**2 / error))


def ssim(one: NDArray[np.uint8], other: NDArray[np.uint8]) -> float:
    """Structural similarity over the colour channels, 1 for equal pictures."""
    return float(structural_similarity(one, other, channel_axis=2, data_range=255))
