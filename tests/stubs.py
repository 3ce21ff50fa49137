"""Networks and detectors that do something known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gpen_core.config import GPEN_TEMPLATE, GeneratorConfig
from gpen_core.types import Face, Image


def config_of(
    size: int = 64, output_size: int | None = None, value_range: tuple[float, float] = (-1.0, 1.0)
) -> GeneratorConfig:
    output_size = output_size or size
    widths = (4,) * (max(size, output_size).bit_length() - 2)
    return GeneratorConfig(size, output_size, widths, style_dim=4, n_mlp=1, value_range=value_range)


def identity(x: Tensor) -> Tensor:
    return x


def doubled(x: Tensor) -> Tensor:
    """The identity for T = 2 S, with pixel areas kept together."""
    return F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)


def without_channel_0(x: Tensor) -> Tensor:
    """Black in the first channel, for values in [-1, 1]."""
    return torch.cat([torch.full_like(x[:, :1], -1), x[:, 1:]], 1)


def never_finite(x: Tensor) -> Tensor:
    return torch.full_like(x, torch.nan)


def face_at(x: float, y: float, size: float, degrees: float = 0.0) -> Face:
    """A face whose crop is a square of `size` pixels around (x, y), turned by `degrees`."""
    angle = np.deg2rad(degrees)
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    landmarks = ((np.array(GPEN_TEMPLATE) - 0.5) * size) @ turn.T + [x, y]
    half = size / 4
    return Face(np.array([x - half, y - half, x + half, y + half]), landmarks, 0.99)


@dataclass(frozen=True)
class FixedDetector:
    """Finds the same faces in every picture."""

    faces: Sequence[Face]
    family: str = "fixed"

    def __call__(self, image: Image) -> list[Face]:
        return list(self.faces)


def smooth_picture(width: int, height: int, seed: int = 0) -> Image:
    """Random colours that change slowly."""
    rng = np.random.RandomState(seed)
    small = rng.randint(0, 256, (max(2, height // 40), max(2, width // 40), 3)).astype(np.float32)
    large = cv2.resize(small, (width, height), interpolation=cv2.INTER_CUBIC)
    return np.clip(cv2.GaussianBlur(large, (0, 0), 12), 0, 255).astype(np.uint8)
