"""The values that pass between the steps."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Image = NDArray[np.uint8]
"""H x W x 3 RGB, C-contiguous, 0..255."""

Canvas = NDArray[Any]
"""H x W x 3 RGB, C-contiguous, uint8 (0..255) or uint16 (0..65535)."""

Points = NDArray[np.float64]
"""N x 2 positions (x, y) in pixels; integer values are pixel centres."""

Matrix = NDArray[np.float64]
"""2 x 3 affine map of (x, y) positions."""


@dataclass(frozen=True, eq=False)
class Face:
    """One detected face, in pixels of the picture that was given to the detector.

    box: [4] float64, x0 y0 x1 y1.
    landmarks: [5, 2] float64 (x, y): left eye, right eye, nose, left mouth corner, right mouth corner, as they stand
    in the picture.
    score: detector confidence, 0..1.
    """

    box: NDArray[np.float64]
    landmarks: Points
    score: float

    @property
    def width(self) -> float:
        return float(self.box[2] - self.box[0])

    @property
    def height(self) -> float:
        return float(self.box[3] - self.box[1])
