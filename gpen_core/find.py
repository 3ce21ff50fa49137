"""Where to look for faces: the whole picture, a box of it, and either turned."""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

from gpen_core.config import GPEN_TEMPLATE
from gpen_core.detect import drop_nested, suppress
from gpen_core.errors import UsageError
from gpen_core.types import Face, Image, Points

Find = Callable[[Image], Sequence[Face]]

QUARTERS = {1: cv2.ROTATE_90_COUNTERCLOCKWISE, 2: cv2.ROTATE_180, 3: cv2.ROTATE_90_CLOCKWISE}
# On portraits CenterFace's landmarks missed the template by 0.01 to 0.02 crop sides for upright heads, by up to 0.07
# for heads on their side, and by 0.1 where they were nonsense.
MISFIT = 0.08
# A box is looked into together with its surroundings, this part of its longer side.
MARGIN = 0.5


@dataclass(frozen=True)
class Box:
    """A part of a picture in pixels, its left upper corner, width and height."""

    x: float
    y: float
    width: float
    height: float

    def __post_init__(self) -> None:
        if not all(map(math.isfinite, (self.x, self.y, self.width, self.height))) or min(self.width, self.height) <= 0:
            raise UsageError(f"box {self.x:g},{self.y:g},{self.width:g},{self.height:g} has no area")

    def holds(self, face: Face) -> bool:
        """Whether the middle of the face's box lies inside."""
        x, y = (face.box[:2] + face.box[2:]) / 2
        return bool(self.x <= x + 0.5 < self.x + self.width and self.y <= y + 0.5 < self.y + self.height)

    def window(self, width: int, height: int) -> tuple[int, int, int, int]:
        """Bounds x0, y0, x1, y1 (ends excluded) of the box with its surroundings in a width x height picture."""
        margin = MARGIN * max(self.width, self.height)
        x0, y0 = max(0, math.floor(self.x - margin)), max(0, math.floor(self.y - margin))
        x1 = min(width, math.ceil(self.x + self.width + margin))
        y1 = min(height, math.ceil(self.y + self.height + margin))
        return x0, y0, x1, y1


def parse_box(text: str) -> Box:
    """The box written as x,y,width,height. Raises UsageError."""
    try:
        x, y, width, height = map(float, text.split(","))
    except ValueError:
        raise UsageError(f"box {text!r} is not x,y,width,height in pixels, as in 100,50,300,300") from None
    return Box(x, y, width, height)


def find_faces(find: Find, image: Image, box: Box | None = None, turn: bool = False) -> list[Face]:
    """The faces of a picture, most confident first.

    box: if the picture shows none there, the box is looked into by itself, where a face may be larger for the detector.
    turn: look for heads on their side or upside down as well, see `find_turned`.
    """
    everywhere = find_turned if turn else _upright
    faces = everywhere(find, image)
    if box is None or any(box.holds(face) for face in faces):
        return faces
    x0, y0, x1, y1 = box.window(image.shape[1], image.shape[0])
    if x0 >= x1 or y0 >= y1:
        return faces
    inside = everywhere(find, np.ascontiguousarray(image[y0:y1, x0:x1]))
    return _best(faces + [face for face in (moved(face, x0, y0) for face in inside) if box.holds(face)])


def find_turned(find: Find, image: Image) -> list[Face]:
    """The faces of a picture, whichever way their heads are turned.

    Detectors find upright heads best. If there are none, the picture is looked at in its three other positions. A head
    that lies on its side may have been found all the same, but badly, as its landmarks tell: it is looked at the right
    way up. Of detections that overlap, those win whose head was upright when it was detected.
    """
    first = list(find(image))
    found = [(is_upright(face), face) for face in first]
    for quarters in sorted(_worth_turning(first)):
        turned = np.asarray(cv2.rotate(image, QUARTERS[quarters]), np.uint8)
        for face in find(turned):
            found.append((is_upright(face), turned_back(face, quarters, image.shape[1], image.shape[0])))
    return _best([face for upright, face in found if upright], [face for upright, face in found if not upright])


def is_upright(face: Face) -> bool:
    """Whether the landmarks are those of a head tilted by less than 45 degrees."""
    tilt, misfit = pose(face)
    return abs(tilt) < math.pi / 4 and misfit < MISFIT


def pose(face: Face) -> tuple[float, float]:
    """How far the head is turned clockwise, in radians (-pi..pi), and how badly its landmarks fit the template.

    With both sets z, t of landmarks centred and in complex numbers, the best similarity is a = sum(conj(t) z) /
    sum |t|^2; the tilt is its phase, the misfit the root mean square of what is left, in crop sides.
    """
    found, template = (_centred(points) for points in (face.landmarks, np.array(GPEN_TEMPLATE)))
    a = complex(np.vdot(template, found) / np.vdot(template, template))
    left = np.sqrt(np.mean(np.abs(found - a * template) ** 2))
    return cmath.phase(a), float(left / max(abs(a), 1e-9))


def _worth_turning(faces: Sequence[Face]) -> set[int]:
    """Quarter turns counterclockwise that may show heads upright that are not."""
    if not faces:
        return set(QUARTERS)
    turns: set[int] = set()
    for face in faces:
        tilt, misfit = pose(face)
        turns |= set(QUARTERS) if misfit >= MISFIT else {round(tilt / (math.pi / 2)) % 4} - {0}
    return turns


def turned_back(face: Face, quarters: int, width: int, height: int) -> Face:
    """A face in pixels of a width x height picture that was found after `quarters` turns counterclockwise."""
    points = np.concatenate([face.box.reshape(2, 2), face.landmarks])
    x, y = points[:, 0], points[:, 1]
    if quarters == 1:
        points = np.stack([width - 1 - y, x], 1)
    elif quarters == 2:
        points = np.stack([width - 1 - x, height - 1 - y], 1)
    elif quarters == 3:
        points = np.stack([y, height - 1 - x], 1)
    corners, landmarks = points[:2], points[2:]
    return Face(np.concatenate([corners.min(0), corners.max(0)]), landmarks, face.score)


def moved(face: Face, x: float, y: float) -> Face:
    """The face in pixels of a picture that the one it was found in begins at (x, y) of."""
    return Face(face.box + np.array([x, y, x, y]), face.landmarks + np.array([x, y]), face.score)


def _upright(find: Find, image: Image) -> list[Face]:
    return list(find(image))


def _best(*ranks: list[Face]) -> list[Face]:
    """The faces without those that overlap a better one: of an earlier rank, or more confident."""
    faces = [face for rank in ranks for face in sorted(rank, key=lambda face: -face.score)]
    if not faces:
        return []
    boxes = np.stack([face.box for face in faces])
    order = suppress(boxes, -np.arange(len(faces), dtype=np.float64))
    kept = [faces[i] for i in order[drop_nested(boxes[order])]]
    return sorted(kept, key=lambda face: -face.score)


def _centred(points: Points) -> NDArray[np.complex128]:
    z = points[:, 0] + 1j * points[:, 1]
    return np.asarray(z - z.mean(), np.complex128)
