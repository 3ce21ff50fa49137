"""Make the pictures of the README: the degraded example, and before beside after.

    python examples/make_pictures.py

Needs the development extra (scikit-image ships the photo: Eileen Collins, NASA, public domain).
"""

from __future__ import annotations

import sys
from pathlib import Path

import cv2
import numpy as np
from skimage import data

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from gpen_core import Restorer  # noqa: E402
from gpen_core.types import Image  # noqa: E402
from tests.degrade import degrade  # noqa: E402

EXAMPLE = ROOT / "examples" / "astronaut_degraded.jpg"
BEFORE_AFTER = ROOT / "docs" / "images" / "before_after.png"
# The part of the photo that the README shows, enlarged.
PART = np.s_[30:230, 125:325]
ZOOM = 2


def main() -> None:
    write(EXAMPLE, degrade(data.astronaut()), [cv2.IMWRITE_JPEG_QUALITY, 95])
    before = np.ascontiguousarray(cv2.imread(str(EXAMPLE), cv2.IMREAD_COLOR)[..., ::-1], dtype=np.uint8)
    after = Restorer.load()(before).image
    gap = np.full((PART[0].stop - PART[0].start, 4, 3), 255, np.uint8)
    pair = np.hstack([before[PART], gap, after[PART]])
    write(BEFORE_AFTER, cv2.resize(pair, None, fx=ZOOM, fy=ZOOM, interpolation=cv2.INTER_CUBIC), [])


def write(path: Path, image: Image, options: list[int]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not cv2.imwrite(str(path), np.ascontiguousarray(image[..., ::-1]), options):
        sys.exit(f"{path} can't be written")


if __name__ == "__main__":
    main()
