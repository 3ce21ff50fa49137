"""Find faces: an ONNX model on onnxruntime, decoded in numpy.

Two families of model are known, told apart by the shapes of what they return, never by the file's name:

- RetinaFace (Deng et al., CVPR 2020), the detector that GPEN was published with: three outputs [B, N, 4],
  [B, N, 2] and [B, N, 10] over N anchors, scores already softmaxed; input BGR minus its mean.
- CenterFace (Xu et al., 2019): maps of 1, 2, 2 and 10 channels at a quarter of the size; input RGB 0..255.

Faces come most confident first. Positions are those of the picture given, integers being pixel centres.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import cv2
import numpy as np
import onnxruntime
from numpy.typing import NDArray

from gpen_core.errors import DetectorError, DeviceError, UsageError
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
_UNKNOWN = "not a face detector of a known family (retinaface, centerface)"
_NMS_IOU = 0.4
_NESTED = 0.7
_MAX_THREADS = 8
_LEGACY_STARTS = (b"PK\x03\x04", b"\x80")

FloatArray = NDArray[np.floating[Any]]


class Detector(Protocol):
    """A callable that finds the faces of one picture; safe to share between threads."""

    @property
    def family(self) -> str:
        """Kind of network, e.g. "centerface"."""
        ...

    def __call__(self, image: Image) -> list[Face]:
        """Faces of `image` (H x W x 3 uint8 RGB), most confident first; [] if there are none."""
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

    path: an ONNX file of a known family with free height and width.
    long_side: a larger picture is shrunk for detection until its longer side has this many pixels; none is
        enlarged. CenterFace finds faces from about 24 pixels high in the shrunk picture; twice the size finds
        faces half as large in four times the time.
    threshold: least confidence of a face, 0..1; None means the family's own (RetinaFace 0.9, CenterFace 0.5).
    device: "cpu", or "cuda" where onnxruntime has its CUDA provider.

    Raises DetectorError for a file that is not such a model, DeviceError for a device that onnxruntime can't
    use and UsageError for an argument out of range.
    """
    if long_side < _MULTIPLE:
        raise UsageError(f"detection size {long_side} is too small: at least {_MULTIPLE} pixels")
    if threshold is not None and not 0 < threshold < 1:
        raise UsageError(f"detection threshold {threshold} is not between 0 and 1")
    session = _open_session(Path(path), device)
    family, outputs = _recognise(session, Path(path))
    return _OnnxDetector(session, family, outputs, long_side, family.threshold if threshold is None else threshold)


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
    faces win.
    """
    probe_shapes: tuple[tuple[int, ...], ...]
    """Shapes of the outputs for one picture of _PROBE x _PROBE, in the order that `decode` takes them."""
    prepare: Callable[[NDArray[np.float32]], NDArray[np.float32]]
    """H x W x 3 RGB 0..255 to the network's own channels; padding is 0 in the result."""
    decode: Callable[[Sequence[NDArray[Any]], tuple[int, int], float], Candidates]
    """Outputs for one picture, its (height, width) and the threshold to candidates in its pixels."""


def _to_retinaface(rgb: NDArray[np.float32]) -> NDArray[np.float32]:
    return rgb[..., ::-1] - np.array([104, 117, 123], np.float32)


_FAMILIES = (
    _Family(
        name="retinaface",
        threshold=0.9,
        largest=None,
        probe_shapes=((1, 168, 4), (1, 168, 2), (1, 168, 10)),
        prepare=_to_retinaface,
        decode=lambda maps, size, threshold: decode_retinaface(maps[0], maps[1], maps[2], size, threshold),
    ),
    _Family(
        name="centerface",
        threshold=0.5,
        largest=320,
        probe_shapes=((1, 1, 16, 16), (1, 2, 16, 16), (1, 2, 16, 16), (1, 10, 16, 16)),
        prepare=lambda rgb: rgb,
        decode=lambda maps, _, threshold: decode_centerface(maps[0][0], maps[1], maps[2], maps[3], threshold),
    ),
)


@dataclass(frozen=True, eq=False)
class _OnnxDetector:
    session: onnxruntime.InferenceSession
    network: _Family
    outputs: tuple[str, ...]
    long_side: int
    threshold: float

    @property
    def family(self) -> str:
        return self.network.name

    def __call__(self, image: Image) -> list[Face]:
        fine = _shrink(image, self.long_side)
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
        pixels = _pad(self.network.prepare(seen.astype(np.float32)))
        found = self.network.decode(self._run(pixels), _size(pixels), self.threshold)
        return found.take(plausible(found, _size(seen)))

    def _run(self, pixels: NDArray[np.float32]) -> list[NDArray[Any]]:
        batch = np.ascontiguousarray(pixels.transpose(2, 0, 1)[None])
        try:
            outputs = self.session.run(self.outputs, {self.session.get_inputs()[0].name: batch})
        except Exception as error:  # onnxruntime's exceptions share no narrower base
            height, width = pixels.shape[:2]
            raise DetectorError(f"face detection failed at {width} x {height}: {_first_line(error)}") from error
        return [output[0] for output in outputs]


def _shrink(image: Image, long_side: int) -> Image:
    height, width = image.shape[:2]
    ratio = long_side / max(height, width)
    if ratio >= 1:
        return image
    size = (max(1, round(width * ratio)), max(1, round(height * ratio)))
    return np.asarray(cv2.resize(image, size, interpolation=cv2.INTER_AREA), np.uint8)


def _pad(pixels: NDArray[np.float32]) -> NDArray[np.float32]:
    below, right = -pixels.shape[0] % _MULTIPLE, -pixels.shape[1] % _MULTIPLE
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


def _open_session(path: Path, device: str) -> onnxruntime.InferenceSession:
    providers = _providers(device)
    try:
        with path.open("rb") as file:
            start = file.read(4)
    except OSError as error:
        raise DetectorError(f"{path}: can't read the detector: {error.strerror}") from error
    if start.startswith(_LEGACY_STARTS):
        raise DetectorError(f"{path}: a PyTorch checkpoint, not an ONNX detector: run `gpen-core convert {path}`")
    options = onnxruntime.SessionOptions()
    # Left to itself onnxruntime pins threads to cores, and complains where a container forbids it.
    options.intra_op_num_threads = _thread_count()
    # Idle workers that spin would take the cores from the generator that runs next.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # Patterns are kept for each picture size ever seen.
    options.enable_mem_pattern = False
    options.log_severity_level = 4
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=providers)
    except Exception as error:  # onnxruntime's exceptions share no narrower base
        reason = _first_line(error).rpartition("failed:")[2]
        raise DetectorError(f"{path}: not a usable ONNX model ({reason})") from error


def _providers(device: str) -> list[str]:
    if device == "cpu":
        return ["CPUExecutionProvider"]
    if device != "cuda":
        raise UsageError(f"detection device {device!r}: choose cpu or cuda")
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        raise DeviceError("detection on cuda needs onnxruntime's CUDA provider: pip install onnxruntime-gpu")
    return ["CUDAExecutionProvider", "CPUExecutionProvider"]


def _thread_count() -> int:
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(allowed, _MAX_THREADS)


def _recognise(session: onnxruntime.InferenceSession, path: Path) -> tuple[_Family, tuple[str, ...]]:
    """The family whose outputs the network has for a small black picture, and their names in its order."""
    shape = _input_shape(session, path)
    if any(isinstance(side, int) for side in shape[2:]) or (isinstance(shape[0], int) and shape[0] != 1):
        fixed = " x ".join(str(side) for side in shape)
        raise DetectorError(f"{path}: takes pictures of {fixed} only; a detector needs free height and width")
    probe = np.zeros((1, 3, _PROBE, _PROBE), np.float32)
    try:
        outputs = session.run(None, {session.get_inputs()[0].name: probe})
    except Exception as error:  # onnxruntime's exceptions share no narrower base
        raise DetectorError(f"{path}: {_UNKNOWN}: {_first_line(error)}") from error
    names = [output.name for output in session.get_outputs()]
    for family in _FAMILIES:
        ordered = _match(family.probe_shapes, dict(zip(names, outputs, strict=True)))
        if ordered:
            return family, ordered
    shapes = ", ".join("x".join(map(str, np.shape(output))) for output in outputs)
    raise DetectorError(f"{path}: {_UNKNOWN}: its outputs are {shapes} for a {_PROBE} x {_PROBE} picture")


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


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
