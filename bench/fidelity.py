"""How far a fast result is from the float32 one, in the field's measures."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def inputs(size: int) -> dict[str, Tensor]:
    """The four pictures every precision has to survive: [1, 3, S, S] in [-1, 1]."""
    import cv2
    from skimage.data import astronaut

    board = torch.from_numpy(np.indices((size, size)).sum(0) % 2 * 2.0 - 1).float()
    # The astronaut's face and shoulders fill this part of the 512 px picture.
    photo = cv2.resize(np.ascontiguousarray(astronaut()[:256, 96:352]), (size, size), interpolation=cv2.INTER_AREA)
    return {
        "black": torch.full((1, 3, size, size), -1.0),
        "white": torch.full((1, 3, size, size), 1.0),
        "checkerboard": board.expand(1, 3, -1, -1).contiguous(),
        "photo": torch.from_numpy(photo).permute(2, 0, 1)[None] / 127.5 - 1,
    }


def compare(result: Tensor, reference: Tensor) -> dict[str, float]:
    """[1, 3, T, T] against float32: max |d|, PSNR in dB, SSIM and mean CIEDE2000.

    Random weights paint outside [-1, 1], where clamping would hide differences: both pictures are mapped so that the
    reference fills [0, 1] exactly, and all measures are taken there. Not finite anywhere: only {"finite": 0.0}.
    """
    from skimage.color import deltaE_ciede2000, rgb2lab
    from skimage.metrics import structural_similarity

    if not bool(result.isfinite().all()):
        return {"finite": 0.0}
    low, high = reference.min(), reference.max()
    a, b = (picture(((x - low) / (high - low)).cpu()) for x in (result, reference))
    error = float(np.square(a - b).mean())
    difference: NDArray[Any] = deltaE_ciede2000(rgb2lab(np.clip(a, 0, 1)), rgb2lab(np.clip(b, 0, 1)))
    return {
        "finite": 1.0,
        "max_abs": float(np.abs(a - b).max()),
        "psnr_db": float("inf") if error == 0 else float(-10 * np.log10(error)),
        "ssim": float(structural_similarity(a, b, channel_axis=2, data_range=1.0)),
        "ciede2000": float(difference.mean()),
    }


def picture(x: Tensor) -> NDArray[np.float64]:
    return x[0].permute(1, 2, 0).double().numpy()
