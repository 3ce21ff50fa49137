"""Detect, crop, restore, paste: the whole way from a picture to the restored picture."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from gpen_core.align import crop, crop_matrix, whole_matrix
from gpen_core.backend import CropRuntime, load_runtime
from gpen_core.blend import feathered_mask, full_mask, paste
from gpen_core.config import PictureFormat
from gpen_core.detect import Detector, load_detector
from gpen_core.errors import ImageError, UsageError
from gpen_core.pixels import grey_of, level
from gpen_core.types import Canvas, Face, Image, Matrix

if TYPE_CHECKING:
    from gpen_core.runtime import RuntimeOptions

Only = Literal["all", "largest"]
Status = Literal["restored", "failed", "skipped"]


@dataclass(frozen=True)
class Options:
    """What to do with a picture.

    strength: 0 leaves the picture as it is, 1 shows the restored face alone; linear in between.
    only: every face or the largest alone. min_face: faces whose shorter box side has fewer pixels are left alone.
    aligned: the whole picture is one face that fills it as the crop template wants; nothing is detected.
    grey: the picture has no colour and gets none.
    """

    strength: float = 1.0
    only: Only = "all"
    min_face: int = 0
    aligned: bool = False
    grey: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.strength <= 1:
            raise UsageError(f"strength {self.strength} is outside 0..1")
        if self.only not in ("all", "largest"):
            raise UsageError(f"only {self.only!r} is neither 'all' nor 'largest'")
        if self.min_face < 0:
            raise UsageError(f"min_face {self.min_face} is negative")


@dataclass(frozen=True, eq=False)
class RestoredFace(Face):
    """A detected face and what became of it; `reason` explains a face that was not restored."""

    status: Status = "restored"
    reason: str = ""


@dataclass(frozen=True, eq=False)
class Restored:
    """image: the restored picture, of the input's size and type. faces: in the detector's order.

    seconds: time spent in each step ("detect", "align", "restore", "paste").
    """

    image: Canvas
    faces: tuple[RestoredFace, ...]
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def failed(self) -> int:
        """How many faces were left as they were because restoring them failed."""
        return sum(face.status == "failed" for face in self.faces)


class Restorer:
    """Restores the faces of pictures. Calls share nothing but the networks, so threads can call it at once."""

    def __init__(
        self,
        network: Callable[..., object] | CropRuntime,
        config: PictureFormat,
        detector: Detector | None,
        runtime: RuntimeOptions | None = None,
    ) -> None:
        """network: [B, 3, S, S] to [B, 3, T, T] tensors in `config.value_range`, a `Generator` or any callable; or a
        runtime of any engine, which `runtime` does not apply to.

        detector: needed unless every picture is aligned.
        """
        self.config = config
        self.detector = detector
        self.runtime: CropRuntime = network if isinstance(network, CropRuntime) else _on_torch(network, config, runtime)

    @classmethod
    def load(
        cls,
        weights: str | Path = "gpen-open-512",
        detector: str | Path | None = "centerface",
        *,
        device: str = "auto",
        precision: str = "auto",
        compile: bool = False,
        max_batch: int | None = None,
        backend: str = "auto",
    ) -> Restorer:
        """A restorer from converted or exported weights and a detector, each a path or a name of the catalog.

        backend: torch, onnx, or auto, which goes by the file. detector None serves aligned pictures only.
        Raises MissingWeightsError for a file that is not on this machine, CheckpointError or DetectorError for one
        that can't be used, DeviceError for a device that is not there.
        """
        from gpen_weights import resolve

        runtime = load_runtime(
            weights, backend=backend, device=device, precision=precision, compile=compile, max_batch=max_batch
        )
        found = None if detector is None else load_detector(resolve(detector))
        return cls(runtime, runtime.config, found)

    def __call__(self, image: Canvas, options: Options = Options()) -> Restored:
        """Restore the faces of one picture. The given array is not changed.

        image: H x W x 3 RGB, uint8 or uint16. No face is no error: the picture comes back as it was.
        """
        _check(image)
        clock = _Clock()
        view = eight_bit(image)
        faces = self._faces(view, options)
        clock.lap("detect")
        chosen = [i for i, face in enumerate(faces) if face.status == "restored"]
        matrices = [self._matrix(faces[i], view, options) for i in chosen]
        crops = [crop(view, matrix, self.config.input_size) for matrix in matrices]
        clock.lap("align")
        restored = self.runtime(crops) if options.strength > 0 else list(crops)
        clock.lap("restore")
        result = image.copy(order="C")
        for i, matrix, picture in zip(chosen, matrices, restored, strict=True):
            if picture is None:
                faces[i] = _marked(faces[i], "failed", "the network gave values that are not finite")
                continue
            self._paste(result, picture, matrix, options)
        clock.lap("paste")
        return Restored(result, tuple(faces), clock.laps)

    def _faces(self, view: Image, options: Options) -> list[RestoredFace]:
        height, width = view.shape[:2]
        if options.aligned:
            if height != width:
                raise ImageError(f"an aligned picture is square; this one has {width} x {height} pixels")
            landmarks = np.array(self.config.template, np.float64) * width
            return [RestoredFace(np.array([0.0, 0.0, width, height]), landmarks, 1.0)]
        if self.detector is None:
            raise UsageError("without a detector only aligned pictures can be restored")
        return select_faces(self.detector(view), options)

    def _matrix(self, face: Face, view: Image, options: Options) -> Matrix:
        height, width = view.shape[:2]
        if options.aligned:
            return whole_matrix(width, height, self.config.input_size)
        return crop_matrix(face.landmarks, self.config.template, self.config.input_size)

    def _paste(self, canvas: Canvas, picture: Image, matrix: Matrix, options: Options) -> None:
        if options.grey:
            picture = np.rint(grey_of(picture.astype(np.float32))).astype(np.uint8)
        size = picture.shape[0]
        mask = full_mask(size) if options.aligned else feathered_mask(size)
        paste(canvas, picture, matrix, self.config.input_size, mask, options.strength)


def _on_torch(network: Callable[..., object], config: PictureFormat, options: RuntimeOptions | None) -> CropRuntime:
    from gpen_core.runtime import Runtime, RuntimeOptions

    return Runtime(network, config, options or RuntimeOptions())  # type: ignore[arg-type]


def select_faces(faces: Sequence[Face], options: Options) -> list[RestoredFace]:
    """Mark which of the detected faces are to be restored, in their order."""
    marked = []
    for face in faces:
        short = min(face.width, face.height)
        small = short < options.min_face
        reason = f"its shorter side of {short:.0f} px is under {options.min_face}" if small else ""
        marked.append(_marked(face, "skipped" if small else "restored", reason))
    if options.only == "all":
        return marked
    largest = max(
        (face for face in marked if face.status == "restored"), key=lambda f: f.width * f.height, default=None
    )
    return [
        face if face is largest or face.status == "skipped" else _marked(face, "skipped", "not the largest")
        for face in marked
    ]


def eight_bit(image: Canvas) -> Image:
    """The uint8 view of a picture: itself, or 16 bits rounded to 8."""
    step = level(image.dtype)
    if step == 1:
        return image
    return ((image.astype(np.uint32) + step // 2) // step).astype(np.uint8)


def _marked(face: Face, status: Status, reason: str) -> RestoredFace:
    return RestoredFace(face.box, face.landmarks, face.score, status, reason)


def _check(image: NDArray[np.generic]) -> None:
    if image.dtype not in (np.uint8, np.uint16) or image.ndim != 3 or image.shape[2] != 3 or 0 in image.shape:
        raise ImageError(f"expected H x W x 3 uint8 or uint16 pixels, got {image.dtype} {list(image.shape)}")


class _Clock:
    """Seconds between laps, by name."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = now - self._last
        self._last = now
