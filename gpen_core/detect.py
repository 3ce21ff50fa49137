"""Find faces: an ONNX model on onnxruntime, decoded in numpy.

Three families of model are known, told apart by the shapes of what they return, never by the file's name:

- RetinaFace (Deng et al., CVPR 2020), the detector that GPEN was published with: three outputs [B, N, 4],
  [B, N, 2] and [B, N, 10] over N anchors, scores already softmaxed; input BGR minus its mean.
- CenterFace (Xu et al., 2019): maps of 1, 2, 2 and 10 channels at a quarter of the size; input RGB 0..255.
- YuNet (Wu et al., Machine Intelligence Research 2023), as the OpenCV zoo publishes it: for each of the strides 8,
  16 and 32 four outputs [B, cells, 1 | 1 | 4 | 10]; input BGR 0..255.

A network with free height and width sees the picture as large as is asked for; one of a fixed size sees it fitted
into that size.

Faces come most confident first. Positions are those of the picture given, integers being pixel centres.
"""

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import cv2
import numpy as np
import onnxruntime
from numpy.typing import NDArray

from gpen_core.errors import DetectorError, UsageError
from gpen_core.pixels import require_picture
from gpen_core.sessions import first_line, open_session
from gpen_core.types import Face, Image

LONG_SIDE = 1280
"""Longest side in pixels of the picture that the detector sees, by default.

Measured with CenterFace on JPEG group pictures of 4000 x 3000 made of portraits: at 640 px it found 134 of
180 faces where there are 90 in a picture, at 960 px 172, at 1280 px 179, at 1600 px 180 in 1.6 times the
time; all faces at every size where there are up to 30.
"""

_COARSE = 4
_MULTIPLE = 32
_PROBE = 64
_UNKNOWN = "not a face detector of a known family (retinaface, centerface, yunet)"
_NMS_IOU = 0.4
_NESTED = 0.7
_YUNET_STRIDES = (8, 16, 32)

FloatArray = NDArray[np.floating[Any]]


class Detector(Protocol):
    """A callable that finds the faces of one picture; safe to share between threads."""

    @property
    def family(self) -> str:
        """Kind of network, e.g. "centerface"."""
        ...

    def __call__(self, image: Image) -> list[Face]:
        """Faces of `image` (H x W x 3 uint8 RGB), most confident first; [] if there are none.

        Raises ImageError for anything else.
        """
        ...


@dataclass(frozen=True, eq=False)
class Candidates:
    """N possible faces: boxes [N, 4] x0 y0 x1 y1, landmarks [N, 5, 2] x y, scores [N]."""

    boxes: NDArray[np.float64]
    landmarks: NDArray[np.float64]
    scores: NDArray[np.float64]

    def take(self, index: "NDArray[np.bool_] | NDArray[np.intp]") -> "Candidates":
        return Candidates(self.boxes[index], self.landmarks[index], self.scores[index])


def load_detector(
    path: str | os.PathLike[str],
    *,
    long_side: int = LONG_SIDE,
    threshold: float | None = None,
    device: str = "cpu",
) -> Detector:
    """Open a face detector.

    path: an ONNX file of a known family.
    long_side: a larger picture is shrunk for detection until its longer side has this many pixels; none is
        enlarged. CenterFace finds faces from about 24 pixels high in the shrunk picture; twice the size finds
        faces half as large in four times the time. A network of a fixed size sees no more than that size.
    threshold: least confidence of a face, 0..1; None means the family's own (RetinaFace and YuNet 0.9,
        CenterFace 0.5).
    device: "cpu", or "cuda" where onnxruntime has its CUDA provider.

    Raises DetectorError for a file that is not such a model, DeviceError for a device that onnxruntime can't
    use and UsageError for an argument out of range.
    """
    if long_side < _MULTIPLE:
        raise UsageError(f"detection size {long_side} is too small: at least {_MULTIPLE} pixels")
    if threshold is not None and not 0 < threshold < 1:
        raise UsageError(f"detection threshold {threshold} is not between 0 and 1")
    session = open_session(Path(path), device, "detector", DetectorError)
    family, outputs, fixed = _recognise(session, Path(path))
    least = family.threshold if threshold is None else threshold
    # On a GPU, several pictures at once would take as many times the memory and no less time.
    turn: AbstractContextManager[object] = threading.Lock() if device == "cuda" else nullcontext()
    return _OnnxDetector(session, family, outputs, fixed, long_side, least, turn)


def retinaface_anchors(height: int, width: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Centres [N, 2] (x, y) and sides [N] in pixels of RetinaFace's anchors over a height x width picture."""
    centres, sides = [], []
    for stride, sizes in ((8, (16, 32)), (16, (64, 128)), (32, (256, 512))):
        rows, columns = -(-height // stride), -(-width // stride)
        y, x = np.mgrid[:rows, :columns].reshape(2, -1)
        centres.append(np.repeat((np.stack([x, y], axis=1) + 0.5) * stride, len(sizes), axis=0))
        sides.append(np.tile(np.asarray(sizes, np.float64), rows * columns))
    return np.concatenate(centres), np.concatenate(sides)


def decode_retinaface(
    loc: FloatArray, conf: FloatArray, landmarks: FloatArray, size: tuple[int, int], threshold: float
) -> Candidates:
    """Candidates scoring above `threshold` among RetinaFace's raw outputs for one picture, unclipped.

    loc [N, 4], conf [N, 2] (softmaxed, class 1 is face) and landmarks [N, 10] (x, y pairs) over the anchors
    of a picture of `size` (height, width). Offsets count anchor sides, times 0.1; logarithms of sizes are
    times 0.2.
    """
    centres, sides = retinaface_anchors(*size)
    chosen = np.flatnonzero(conf[:, 1] > threshold)
    centres, sides = centres[chosen], sides[chosen, None]
    offsets = loc[chosen].astype(np.float64)
    middle = centres + 0.1 * offsets[:, :2] * sides
    half = _exp(0.2 * offsets[:, 2:]) * sides / 2
    points = centres[:, None] + 0.1 * landmarks[chosen].reshape(-1, 5, 2).astype(np.float64) * sides[:, None]
    scores = conf[chosen, 1].astype(np.float64)
    return Candidates(np.concatenate([middle - half, middle + half], axis=1), points, scores)


def decode_centerface(
    heatmap: FloatArray, scale: FloatArray, offset: FloatArray, landmarks: FloatArray, threshold: float
) -> Candidates:
    """Candidates scoring above `threshold` among CenterFace's raw outputs for one picture, unclipped.

    heatmap [h, w] of confidences, scale [2, h, w] (logarithms of height and width over 4), offset [2, h, w]
    (y and x of the box's middle from its cell's, in cells), landmarks [10, h, w] (y, x pairs, fractions of
    the box).
    """
    row, column = np.nonzero(heatmap > threshold)
    size = 4 * _exp(scale[:, row, column].T[:, ::-1].astype(np.float64))
    cell = np.stack([column, row], axis=1)
    # The network counts from the corner of the first pixel, we count from its centre: without the half pixel,
    # faces and their mirror images disagree more.
    middle = 4 * (cell + offset[:, row, column].T[:, ::-1] + 0.5) - 0.5
    corner = middle - size / 2
    fractions = landmarks[:, row, column].T.reshape(-1, 5, 2)[..., ::-1]
    points = corner[:, None] + fractions * size[:, None]
    scores = heatmap[row, column].astype(np.float64)
    return Candidates(np.concatenate([corner, corner + size], axis=1), points.astype(np.float64), scores)


def decode_yunet(maps: Sequence[FloatArray], size: tuple[int, int], threshold: float) -> Candidates:
    """Candidates scoring above `threshold` among YuNet's raw outputs for one picture, unclipped.

    maps: for each of the strides s = 8, 16, 32 over the cells of a picture of `size` (height, width), row by row:
    class and object confidence [N, 1] each, box [N, 4], landmarks [N, 10] (x, y pairs). The score is
    sqrt(class * object), the box's middle ((column + dx) s, (row + dy) s), its sides s exp(d), a landmark
    ((column + x) s, (row + y) s): what OpenCV's FaceDetectorYN computes.
    """
    boxes, points, scores = [], [], []
    for stride, level in zip(_YUNET_STRIDES, range(0, len(maps), 4), strict=True):
        classes, objects, offsets, marks = (m.astype(np.float64) for m in maps[level : level + 4])
        confidence = np.sqrt(np.clip(classes[:, 0], 0, 1) * np.clip(objects[:, 0], 0, 1))
        chosen = np.flatnonzero(confidence > threshold)
        row, column = np.divmod(chosen, -(-size[1] // stride))
        cell = np.stack([column, row], axis=1)
        middle = (cell + offsets[chosen, :2]) * stride
        half = _exp(offsets[chosen, 2:]) * stride / 2
        boxes.append(np.concatenate([middle - half, middle + half], axis=1))
        points.append((cell[:, None] + marks[chosen].reshape(-1, 5, 2)) * stride)
        scores.append(confidence[chosen])
    return Candidates(np.concatenate(boxes), np.concatenate(points), np.concatenate(scores))


def suppress(boxes: NDArray[np.float64], scores: NDArray[np.float64], iou: float = _NMS_IOU) -> NDArray[np.intp]:
    """Greedy non-maximum suppression: indices of the boxes kept, best first.

    A box goes if it overlaps a better one by more than `iou`, widths counted as x1 - x0 + 1. Of equal scores
    the first wins.
    """
    order = np.argsort(-scores, kind="stable")
    area = np.prod(boxes[:, 2:] - boxes[:, :2] + 1, axis=1)
    kept = []
    while order.size:
        best, rest = order[0], order[1:]
        kept.append(best)
        shared = _shared_area(boxes[best], boxes[rest])
        order = rest[shared <= iou * (area[best] + area[rest] - shared)]
    return np.array(kept, np.intp)


def drop_nested(boxes: NDArray[np.float64], fraction: float = _NESTED) -> NDArray[np.intp]:
    """Indices of the boxes, given best first, that remain when nested ones go.

    Two boxes are nested if they share more than `fraction` of the smaller one's area: then the lower scored
    is a part of a face, or a face with its surroundings, taken for another face. Of two people, one would
    have to hide most of the other's face, landmarks included, for their boxes to overlap so far.
    """
    area = np.prod(boxes[:, 2:] - boxes[:, :2] + 1, axis=1)
    kept: list[int] = []
    for index, box in enumerate(boxes):
        shared = _shared_area(box, boxes[kept])
        if np.all(shared <= fraction * np.minimum(area[index], area[kept])):
            kept.append(index)
    return np.array(kept, np.intp)


def plausible(candidates: Candidates, size: tuple[int, int]) -> NDArray[np.bool_]:
    """Which candidates can be aligned and are in a picture of `size` (height, width).

    Refused: anything not finite, a box without area, longer than three pictures or whose middle is outside the
    picture, landmarks within a tenth of the box of each other, and landmarks further from the box's middle than
    the box is long.
    """
    boxes, points = candidates.boxes, candidates.landmarks
    finite = np.isfinite(boxes).all(axis=1) & np.isfinite(points).all(axis=(1, 2)) & np.isfinite(candidates.scores)
    with np.errstate(invalid="ignore", over="ignore"):
        side = boxes[:, 2:] - boxes[:, :2]
        middle = (boxes[:, 2:] + boxes[:, :2]) / 2
        longest = side.max(axis=1)
        spread = (points.max(axis=1) - points.min(axis=1)).max(axis=1)
        reach = np.abs(points - middle[:, None]).max(axis=(1, 2))
        inside = ((middle > -0.5) & (middle < np.array(size[::-1]) - 0.5)).all(axis=1)
        sized = (side.min(axis=1) > 0) & (longest < 3 * max(size))
        result: NDArray[np.bool_] = finite & sized & inside & (spread > 0.1 * longest) & (reach < longest)
    return result


@dataclass(frozen=True)
class _Family:
    """How one kind of network is fed and read."""

    name: str
    threshold: float
    largest: float | None
    """Longest face side in pixels that the network reads well, or None.

    Larger faces are read in a coarser copy. For CenterFace: landmarks spread by 4 to 5 % of the distance of
    the eyes for faces of 50 to 300 px, by 7 % at 400, 10 % at 600, 24 % at 900 px, and above 700 px parts of
    faces win. YuNet's authors state 10 to 300 px.
    """
    shapes: Callable[[int, int], tuple[tuple[int, ...], ...]]
    """Shapes of the outputs for one picture of (height, width), in the order that `decode` takes them."""
    prepare: Callable[[NDArray[np.float32]], NDArray[np.float32]]
    """H x W x 3 RGB 0..255 to the network's own channels; padding is 0 in the result."""
    decode: Callable[[Sequence[NDArray[Any]], tuple[int, int], float], Candidates]
    """Outputs for one picture, its (height, width) and the threshold to candidates in its pixels."""


def _retinaface_shapes(height: int, width: int) -> tuple[tuple[int, ...], ...]:
    anchors = 2 * sum(-(-height // s) * -(-width // s) for s in (8, 16, 32))
    return tuple((1, anchors, values) for values in (4, 2, 10))


def _centerface_shapes(height: int, width: int) -> tuple[tuple[int, ...], ...]:
    return tuple((1, channels, height // 4, width // 4) for channels in (1, 2, 2, 10))


def _yunet_shapes(height: int, width: int) -> tuple[tuple[int, ...], ...]:
    cells = [(height // s) * (width // s) for s in _YUNET_STRIDES]
    return tuple((1, count, values) for count in cells for values in (1, 1, 4, 10))


def _to_retinaface(rgb: NDArray[np.float32]) -> NDArray[np.float32]:
    return rgb[..., ::-1] - np.array([104, 117, 123], np.float32)


_FAMILIES = (
    _Family(
        name="retinaface",
        threshold=0.9,
        largest=None,
        shapes=_retinaface_shapes,
        prepare=_to_retinaface,
        decode=lambda maps, size, threshold: decode_retinaface(maps[0], maps[1], maps[2], size, threshold),
    ),
    _Family(
        name="centerface",
        threshold=0.5,
        largest=320,
        shapes=_centerface_shapes,
        prepare=lambda rgb: rgb,
        decode=lambda maps, _, threshold: decode_centerface(maps[0][0], maps[1], maps[2], maps[3], threshold),
    ),
    _Family(
        name="yunet",
        threshold=0.9,
        largest=300,
        shapes=_yunet_shapes,
        prepare=lambda rgb: rgb[..., ::-1],
        decode=decode_yunet,
    ),
)


@dataclass(frozen=True, eq=False)
class _OnnxDetector:
    session: onnxruntime.InferenceSession
    network: _Family
    outputs: tuple[str, ...]
    fixed: tuple[int, int] | None
    """Height and width of the network's input, or None if they are free."""
    long_side: int
    threshold: float
    turn: AbstractContextManager[object]

    @property
    def family(self) -> str:
        return self.network.name

    def __call__(self, image: Image) -> list[Face]:
        require_picture(image)
        fine = _shrink(image, self.long_side, self.fixed)
        found = self._look(fine)
        largest = self.network.largest
        if largest is not None and max(_size(fine)) > largest:
            coarse = _shrink(fine, max(_size(fine)) // _COARSE)
            big = _rescale(self._look(coarse), coarse, fine)
            # The ranges overlap: a face that measures differently in the two must not be lost between them.
            found = _join(found.take(_longest(found) < largest), big.take(_longest(big) > 0.6 * largest))
        found = found.take(suppress(found.boxes, found.scores))
        found = found.take(drop_nested(found.boxes))
        return _faces(_rescale(found, fine, image))

    def _look(self, seen: Image) -> Candidates:
        pixels = _pad(self.network.prepare(seen.astype(np.float32)), self.fixed)
        found = self.network.decode(self._run(pixels), _size(pixels), self.threshold)
        return found.take(plausible(found, _size(seen)))

    def _run(self, pixels: NDArray[np.float32]) -> list[NDArray[Any]]:
        batch = np.ascontiguousarray(pixels.transpose(2, 0, 1)[None])
        try:
            with self.turn:
                outputs = self.session.run(self.outputs, {self.session.get_inputs()[0].name: batch})
        except Exception as error:  # onnxruntime's exceptions share no narrower base
            height, width = pixels.shape[:2]
            raise DetectorError(f"face detection failed at {width} x {height}: {first_line(error)}") from error
        return [output[0] for output in outputs]


def _shrink(image: Image, long_side: int, within: tuple[int, int] | None = None) -> Image:
    """A copy no longer than `long_side`, and no larger than `within` (height, width)."""
    height, width = image.shape[:2]
    ratio = long_side / max(height, width)
    if within:
        ratio = min(ratio, within[0] / height, within[1] / width)
    if ratio >= 1:
        return image
    size = (max(1, round(width * ratio)), max(1, round(height * ratio)))
    return np.asarray(cv2.resize(image, size, interpolation=cv2.INTER_AREA), np.uint8)


def _pad(pixels: NDArray[np.float32], to: tuple[int, int] | None) -> NDArray[np.float32]:
    """Pixels with zeros below and to the right: up to the size `to`, or the next multiple that a network takes."""
    height, width = pixels.shape[:2]
    rows, columns = to or (height + -height % _MULTIPLE, width + -width % _MULTIPLE)
    below, right = rows - height, columns - width
    return np.pad(pixels, ((0, below), (0, right), (0, 0)))


def _rescale(found: Candidates, seen: Image, image: Image) -> Candidates:
    """The same faces in pixels of `image`, of which `seen` is a copy of another size: edges match edges."""
    ratio = np.array([image.shape[1] / seen.shape[1], image.shape[0] / seen.shape[0]])
    boxes = (found.boxes.reshape(-1, 2, 2) + 0.5) * ratio - 0.5
    return Candidates(boxes.reshape(-1, 4), (found.landmarks + 0.5) * ratio - 0.5, found.scores)


def _join(one: Candidates, other: Candidates) -> Candidates:
    return Candidates(
        np.concatenate([one.boxes, other.boxes]),
        np.concatenate([one.landmarks, other.landmarks]),
        np.concatenate([one.scores, other.scores]),
    )


def _longest(found: Candidates) -> NDArray[np.float64]:
    side: NDArray[np.float64] = (found.boxes[:, 2:] - found.boxes[:, :2]).max(axis=1)
    return side


def _faces(found: Candidates) -> list[Face]:
    rows = zip(found.boxes, found.landmarks, found.scores, strict=True)
    return [Face(box, landmarks, float(score)) for box, landmarks, score in rows]


def _size(pixels: NDArray[Any]) -> tuple[int, int]:
    return pixels.shape[0], pixels.shape[1]


def _shared_area(box: NDArray[np.float64], others: NDArray[np.float64]) -> NDArray[np.float64]:
    low = np.maximum(box[:2], others[:, :2])
    high = np.minimum(box[2:], others[:, 2:])
    area: NDArray[np.float64] = np.prod(np.maximum(high - low + 1, 0), axis=1)
    return area


def _exp(logarithm: NDArray[np.float64]) -> NDArray[np.float64]:
    # Beyond any picture, yet finite; `plausible` refuses what is that long.
    return np.asarray(np.exp(np.minimum(logarithm, 20)), np.float64)


def _recognise(
    session: onnxruntime.InferenceSession, path: Path
) -> tuple[_Family, tuple[str, ...], tuple[int, int] | None]:
    """The family whose outputs the network has for a black picture, their names in its order, and the fixed size."""
    fixed = _fixed_size(_input_shape(session, path), path)
    height, width = fixed or (_PROBE, _PROBE)
    probe = np.zeros((1, 3, height, width), np.float32)
    try:
        outputs = session.run(None, {session.get_inputs()[0].name: probe})
    except Exception as error:  # onnxruntime's exceptions share no narrower base
        raise DetectorError(f"{path}: {_UNKNOWN}: {first_line(error)}") from error
    names = [output.name for output in session.get_outputs()]
    for family in _FAMILIES:
        ordered = _match(family.shapes(height, width), dict(zip(names, outputs, strict=True)))
        if ordered:
            return family, ordered, fixed
    shapes = ", ".join("x".join(map(str, np.shape(output))) for output in outputs)
    raise DetectorError(f"{path}: {_UNKNOWN}: its outputs are {shapes} for a {width} x {height} picture")


def _fixed_size(shape: list[int | str | None], path: Path) -> tuple[int, int] | None:
    """(height, width) of the only pictures that a network takes, or None."""
    batch, _, height, width = shape
    text = " x ".join(str(side) for side in shape)
    if isinstance(batch, int) and batch != 1:
        raise DetectorError(f"{path}: takes {text} only; a detector needs one picture at a time, of any size")
    if not isinstance(height, int) and not isinstance(width, int):
        return None
    sound = isinstance(height, int) and isinstance(width, int) and not height % _MULTIPLE and not width % _MULTIPLE
    if not sound:
        raise DetectorError(f"{path}: takes pictures of {text} only; a fixed size must be a multiple of {_MULTIPLE}")
    return int(height), int(width)  # type: ignore[arg-type]


def _input_shape(session: onnxruntime.InferenceSession, path: Path) -> list[int | str | None]:
    inputs = session.get_inputs()
    if len(inputs) != 1 or inputs[0].type != "tensor(float)" or len(inputs[0].shape) != 4:
        raise DetectorError(f"{path}: {_UNKNOWN}: its input is not one float32 picture")
    shape: list[int | str | None] = inputs[0].shape
    return shape


def _match(shapes: tuple[tuple[int, ...], ...], outputs: dict[str, Any]) -> tuple[str, ...] | None:
    if sorted(shapes) != sorted(np.shape(output) for output in outputs.values()):
        return None
    # Stable: outputs of one shape keep the order of the file.
    return tuple(sorted(outputs, key=lambda name: shapes.index(np.shape(outputs[name]))))
