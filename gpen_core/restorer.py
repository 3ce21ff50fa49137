"""Detect, crop, restore, paste: the whole way from a picture to the restored picture."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import cv2
import numpy as np

from gpen_core.align import compose, crop, crop_matrix, scale_of, scaling, whole_matrix
from gpen_core.backend import CropRuntime, require_torch
from gpen_core.blend import cover, feathered_mask, full_mask, paste
from gpen_core.config import PictureFormat, require_task, template_named
from gpen_core.detect import LONG_SIDE, Detector, load_detector
from gpen_core.errors import ImageError, UsageError
from gpen_core.find import Box, find_faces, pose
from gpen_core.finish import match_color, sharpen
from gpen_core.masks import Weights, ellipse_mask
from gpen_core.parse import Parser, load_parser
from gpen_core.photo import grey_of, to_depth
from gpen_core.pixels import require_picture, round_to
from gpen_core.selection import WeightFiles, input_size, load_weights, weights_used
from gpen_core.tiling import tiled
from gpen_core.types import Canvas, Face, Image, Matrix

if TYPE_CHECKING:
    from gpen_core.rrdb import RRDBNet
    from gpen_core.runtime import RuntimeOptions, Upscaler

Only = Literal["all", "largest"]
Rotate = Literal["off", "auto"]
Mask = Literal["box", "ellipse", "parse"]
Status = Literal["restored", "failed", "skipped"]

SCALES = (1, 2, 4)
DEPTHS = (np.uint8, np.uint16)
MIN_SIDE = 16
MAX_SHARPEN = 3
MAX_GRAIN = 2
# More pixels than these don't fit most memories, and no JPEG.
MAX_RESULT = 1_000_000_000


def _require_range(name: str, value: float, most: float) -> None:
    # Also refuses NaN.
    if not 0 <= value <= most:
        raise UsageError(f"{name} {value} is outside 0..{most}")


@dataclass(frozen=True)
class Options:
    """What to do with a picture. All positions and sizes are in pixels of the picture that is given.

    strength: 0 leaves the picture as it is, 1 shows the restored face alone; linear in between.
    only: every face or the largest alone. max_faces: so many, the largest first. min_face: faces whose shorter box
    side has fewer pixels are left alone. box: faces whose middle lies elsewhere are left alone.
    rotate: "auto" also finds heads on their side or upside down.
    aligned: the whole picture is one face that fills it as the crop template wants; nothing is detected.
    tile: the whole picture, of any size, is restored in tiles of so many pixels, each at the network's size, that begin
    every `stride` pixels (half a tile by default); nothing is detected.
    long_side: the picture is first shrunk to at most so many pixels on its longer side. upscale: then the result is so
    many times as large; by default as much as the up-scaler enlarges, or 1 without one.
    match_color: faces keep the original's colours. sharpen: amount of an unsharp mask of the faces, 0 to 3. grain:
    how much of the original's grain the faces get, 0 to 2.
    mask: where a restored face is pasted: a soft "box" or "ellipse" of the crop, or what a parser calls face ("parse").
    grey: the picture has no colour and gets none. keep_crops: each face comes with its crop and what became of it.
    """

    strength: float = 1.0
    only: Only = "all"
    max_faces: int | None = None
    min_face: int = 0
    box: Box | None = None
    rotate: Rotate = "off"
    aligned: bool = False
    tile: int | None = None
    stride: int | None = None
    long_side: int | None = None
    upscale: int | None = None
    match_color: bool = False
    sharpen: float = 0.0
    grain: float = 0.0
    mask: Mask = "box"
    grey: bool = False
    keep_crops: bool = False

    def __post_init__(self) -> None:
        _require_range("strength", self.strength, 1)
        _require_range("sharpen", self.sharpen, MAX_SHARPEN)
        _require_range("grain", self.grain, MAX_GRAIN)
        if self.only not in ("all", "largest"):
            raise UsageError(f"only {self.only!r} is neither 'all' nor 'largest'")
        if self.rotate not in ("off", "auto"):
            raise UsageError(f"rotate {self.rotate!r} is neither 'off' nor 'auto'")
        if self.mask not in ("box", "ellipse", "parse"):
            raise UsageError(f"mask {self.mask!r} is none of 'box', 'ellipse' and 'parse'")
        if self.min_face < 0:
            raise UsageError(f"min_face {self.min_face} is negative")
        if self.max_faces is not None and self.max_faces < 1:
            raise UsageError(f"max_faces {self.max_faces} is less than one face")
        if self.upscale not in (None, *SCALES):
            raise UsageError(f"upscale {self.upscale} is not one of {', '.join(map(str, SCALES))}")
        for name, side in (("long_side", self.long_side), ("tile", self.tile)):
            if side is not None and side < MIN_SIDE:
                raise UsageError(f"{name} {side} is less than {MIN_SIDE} pixels")
        if self.stride is not None and not 1 <= self.stride <= (self.tile or 0):
            raise UsageError(
                f"stride {self.stride} is not from 1 to the tile's side" if self.tile else "stride without tile"
            )
        if self.only == "largest" and (self.max_faces or 1) > 1:
            raise UsageError(f"only 'largest' is one face, so max_faces {self.max_faces} can't be used")
        if self.aligned and self.tile is not None:
            raise UsageError("tile takes pictures of any size, so aligned can't be used")
        if not self.whole:
            return
        how = "aligned" if self.aligned else "tile"
        choices = {
            "only": self.only != "all",
            "box": self.box is not None,
            "min_face": self.min_face > 0,
            "max_faces": self.max_faces is not None,
            "rotate": self.rotate == "auto",
        }
        chosen = [name for name, made in choices.items() if made]
        if chosen:
            raise UsageError(f"nothing is detected with {how}, so {' and '.join(chosen)} can't be used")
        if self.mask != "box":
            raise UsageError(f"the whole picture is restored with {how}, so mask {self.mask} can't be used")

    @property
    def whole(self) -> bool:
        """Whether the picture is taken as a whole, without looking for faces."""
        return self.aligned or self.tile is not None


@dataclass(frozen=True, eq=False)
class RestoredFace(Face):
    """A detected face and what became of it; `reason` explains a face that was not restored.

    crop: S x S x 3, what the network saw; picture: T x T x 3, what is pasted. Both only if they are to be kept.
    weights: the file of the network that it went through, where there was a choice.
    """

    status: Status = "restored"
    reason: str = ""
    crop: Image | None = None
    picture: Image | None = None
    weights: str = ""


@dataclass(frozen=True, eq=False)
class Restored:
    """image: the restored picture, of the input's type, and size unless asked for another. faces: as detected.

    seconds: time spent in each step ("detect", "align", "restore", "paste"; "background" if its size changes).
    notes: what the user should know, one sentence each.
    """

    image: Canvas
    faces: tuple[RestoredFace, ...]
    seconds: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def failed(self) -> int:
        """How many faces were left as they were because restoring them failed."""
        return sum(face.status == "failed" for face in self.faces)


@dataclass(frozen=True, eq=False)
class Prepared:
    """A picture whose faces are found, on its way to be restored.

    image, options: as they were given. faces: as detected; those to be restored have that status already. matrices,
    crops: for each of those, the map from the picture to the crop [2, 3], and the crop, S x S x 3. canvas: the picture
    at the result's size, once made. seconds: as `Restored` has them.
    """

    image: Canvas
    options: Options
    faces: tuple[RestoredFace, ...]
    matrices: tuple[Matrix, ...]
    crops: tuple[Image, ...]
    seconds: dict[str, float]
    canvas: Canvas | None = None

    @property
    def waiting(self) -> tuple[Image, ...]:
        """The crops that the network is to restore: none where the picture is to stay as it is."""
        return self.crops if self.options.strength > 0 else ()


class Restorer:
    """Restores the faces of pictures. Calls share nothing but the networks, so threads can call it at once."""

    def __init__(
        self,
        network: Callable[..., object] | CropRuntime,
        config: PictureFormat,
        detector: Detector | None,
        runtime: RuntimeOptions | None = None,
        upscaler: RRDBNet | None = None,
        parser: Parser | None = None,
        task: str = "restoration",
    ) -> None:
        """network: [B, 3, S, S] to [B, 3, T, T] tensors in `config.value_range`, a `Generator` or any callable; or a
        runtime of any engine.

        detector: needed unless every picture is taken as a whole. runtime: for a network that is no runtime yet, and
        for the up-scaler. upscaler: enlarges the background; without it that is done by Lanczos' filter. parser: for
        the mask "parse" alone. task: what is to be done, by a `gpen_core.tasks.Task` if it is not restoration.

        Raises UsageError if `config` says that the network was trained for another task.
        """
        require_task(config, task)
        self.config = config
        self.detector = detector
        self.parser = parser
        self.runtime: CropRuntime = network if isinstance(network, CropRuntime) else _on_torch(network, config, runtime)
        self.upscaler = None if upscaler is None else _upscaling(upscaler, runtime)

    @classmethod
    def load(
        cls,
        weights: WeightFiles = "gpen-open-512",
        detector: str | Path | None = "auto",
        *,
        device: str = "auto",
        precision: str = "auto",
        compile: bool = False,
        cache: Path | None = None,
        max_batch: int | None = None,
        upscaler: str | Path | None = None,
        parser: str | Path | None = None,
        template: str | None = None,
        detect_size: int = LONG_SIDE,
        detector_device: str = "cpu",
        upscaler_tile: int | None = None,
        backend: str = "auto",
        memory: int | None = None,
        task: str = "restoration",
    ) -> Restorer:
        """A restorer from converted or exported weights, a detector, an up-scaler and a parser, each a path or name.

        weights: one network; several, or "auto" for those of every size that is here: then each face goes through the
        one whose size suits it. memory: bytes that several networks may take together; None means no limit.
        detector: "auto" is the original's where it is on this machine, else centerface; None serves only pictures taken
        as a whole. template: name of the crops that the weights were trained on, where their file has it wrong.
        backend: torch, onnx, or auto, which goes by the file; an up-scaler always runs in PyTorch.
        detect_size, detector_device: as `load_detector` has them (long_side, device). device, precision, compile,
        cache, max_batch, upscaler_tile: as `RuntimeOptions` has them.

        task: what the weights must be for; others than restoration are for `gpen_core.tasks`.

        Raises MissingWeightsError for a file that is not on this machine, CheckpointError or DetectorError for one that
        can't be used, UsageError for one of another task, DeviceError for an absent device.
        """
        from gpen_weights import default_detector, resolve

        runtime = load_weights(
            weights,
            memory=memory,
            template=template,
            backend=backend,
            device=device,
            precision=precision,
            compile=compile,
            cache=cache,
            max_batch=max_batch,
        )
        config = runtime.config if template is None else replace(runtime.config, template=template_named(template))  # type: ignore[type-var]
        require_task(config, task)
        found = None
        if detector is not None:
            path = resolve(default_detector() if detector == "auto" else detector)
            found = load_detector(path, long_side=detect_size, device=detector_device)
        parsing = None if parser is None else load_parser(resolve(parser))
        if upscaler is None:
            return cls(runtime, config, found, parser=parsing, task=task)
        require_torch()
        from gpen_core.rrdb import load_upscaler
        from gpen_core.runtime import RuntimeOptions

        options = RuntimeOptions(device=device, precision=precision, upscaler_tile=upscaler_tile)
        return cls(runtime, config, found, options, load_upscaler(resolve(upscaler)), parsing, task)

    def __call__(self, image: Canvas, options: Options = Options()) -> Restored:
        """Restore the faces of one picture. The given array is not changed.

        image: H x W x 3 RGB, uint8 or uint16; anything else raises ImageError. No face is no error: the picture comes
        back as it was.
        """
        if options.tile is not None:
            require_picture(image, DEPTHS)
            return self._tiled(image, options, options.tile)
        prepared = self.prepare(image, options)
        started = time.perf_counter()
        pictures = self.runtime(prepared.waiting)
        return self.finish(prepared, pictures, time.perf_counter() - started)

    def prepare(self, image: Canvas, options: Options = Options()) -> Prepared:
        """The first of three stages: find the faces of a picture and cut out their crops.

        A call does the same as the three: `prepare`, the network on what is `waiting`, `finish`. Different pictures may
        be in different stages at the same time, and share a batch. Not for `options.tile`. Raises as a call does.
        """
        require_picture(image, DEPTHS)
        if options.tile is not None:
            raise UsageError("a picture that is restored in tiles has no stages")
        if options.mask == "parse" and self.parser is None:
            raise UsageError("the mask parse needs a face parser: --parser, or parser= of Restorer.load")
        self.result_size(image, options)
        clock = _Clock()
        view = to_depth(image, np.uint8)
        faces = self._faces(view, options)
        clock.lap("detect")
        chosen = [i for i, face in enumerate(faces) if face.status == "restored"]
        sizes = [self._size(faces[i], view, options) for i in chosen]
        matrices = [self._matrix(faces[i], view, options, size) for i, size in zip(chosen, sizes, strict=True)]
        crops = [crop(view, matrix, size) for matrix, size in zip(matrices, sizes, strict=True)]
        clock.lap("align")
        return Prepared(image, options, tuple(faces), tuple(matrices), tuple(crops), clock.laps)

    def enlarge(self, prepared: Prepared) -> Prepared:
        """With its canvas made, which `finish` does otherwise: an up-scaler's work belongs beside the network's."""
        clock = _Clock(prepared.seconds)
        canvas = self._background(prepared.image, prepared.options)
        clock.lap("background")
        return replace(prepared, canvas=canvas, seconds=clock.laps)

    def finish(self, prepared: Prepared, pictures: Sequence[Image | None], seconds: float = 0.0) -> Restored:
        """The last stage: paste the restored faces into the picture.

        pictures: T x T x 3 for each that was `waiting`, None where the network failed. seconds: what they took. The
        canvas, if it has been made, becomes the result. Raises ImageError for another number of pictures.
        """
        image, options = prepared.image, prepared.options
        if len(pictures) != len(prepared.waiting):
            raise ImageError(f"expected {len(prepared.waiting)} restored pictures, got {len(pictures)}")
        clock = _Clock({**prepared.seconds, "restore": seconds})
        result = self._background(image, options) if prepared.canvas is None else prepared.canvas
        if prepared.canvas is None and (result.shape != image.shape or self.upscaler is not None):
            clock.lap("background")
        scale_x, scale_y = image.shape[1] / result.shape[1], image.shape[0] / result.shape[0]
        faces = list(prepared.faces)
        chosen = [i for i, face in enumerate(faces) if face.status == "restored"]
        made = pictures if options.strength > 0 else prepared.crops
        for i, matrix, seen, given in zip(chosen, prepared.matrices, prepared.crops, made, strict=True):
            picture = None if given is None else finished(given, seen, options)
            faces[i] = self._outcome(faces[i], seen, picture, options)
            if picture is None:
                continue
            mask = self._mask(picture, options)
            if not mask.any():
                faces[i] = replace(faces[i], status="failed", reason="the parser sees no face in it")
            to_crop = compose(matrix, scaling(scale_x, scale_y))
            paste(result, picture, to_crop, seen.shape[0], mask, options.strength, options.grain, 1 / scale_x)
        clock.lap("paste")
        return Restored(result, tuple(faces), clock.laps, _notes(faces, options))

    def result_size(self, image: Canvas, options: Options) -> tuple[int, int]:
        """Height and width of the result. Raises ImageError if it would be too large."""
        height, width = _shrunk_size(image, options.long_side)
        scale = self._scale(options)
        if scale * height * scale * width > MAX_RESULT:
            raise ImageError(
                f"enlarged {scale} times it would have {scale * width} x {scale * height} pixels, too many"
            )
        return scale * height, scale * width

    def _tiled(self, image: Canvas, options: Options, tile: int) -> Restored:
        """The whole picture at the result's size, restored in tiles."""
        clock = _Clock()
        result = self._background(image, options)
        if result.shape != image.shape or self.upscaler is not None:
            clock.lap("background")
        view = to_depth(result, np.uint8)
        size = input_size(self.runtime, tile)

        def run(tiles: Sequence[Image]) -> list[Image | None]:
            pictures = self._restore([stretched(picture, size) for picture in tiles], options)
            return [None if picture is None else eight_bit(stretched(picture, tile)) for picture in pictures]

        picture = tiled(view, tile, options.stride or max(1, tile // 2), run)
        clock.lap("restore")
        face = self._outcome(self._whole(image), view.copy() if options.keep_crops else view, picture, options, size)
        if picture is not None:
            cover(result, picture, options.strength, options.grain, result.shape[1] / image.shape[1])
        clock.lap("paste")
        return Restored(result, (face,), clock.laps)

    def _faces(self, view: Image, options: Options) -> list[RestoredFace]:
        height, width = view.shape[:2]
        if options.aligned:
            if height != width:
                raise ImageError(f"an aligned picture is square; this one has {width} x {height} pixels")
            return [self._whole(view)]
        if self.detector is None:
            raise UsageError("without a detector only aligned pictures can be restored")
        return select_faces(find_faces(self.detector, view, options.box, options.rotate == "auto"), options)

    def _whole(self, image: Canvas) -> RestoredFace:
        """The picture as one face that fills it."""
        height, width = image.shape[:2]
        landmarks = np.array(self.config.template, np.float64) * [width, height]
        return RestoredFace(np.array([0.0, 0.0, width, height]), landmarks, 1.0)

    def _size(self, face: Face, view: Image, options: Options) -> int:
        """Side of the crop for a face."""
        if options.aligned:
            return input_size(self.runtime, view.shape[1])
        return input_size(self.runtime, 1 / scale_of(crop_matrix(face.landmarks, self.config.template, 1)))

    def _matrix(self, face: Face, view: Image, options: Options, size: int) -> Matrix:
        height, width = view.shape[:2]
        if options.aligned:
            return whole_matrix(width, height, size)
        return crop_matrix(face.landmarks, self.config.template, size)

    def _outcome(
        self, face: RestoredFace, seen: Image, picture: Canvas | None, options: Options, size: int | None = None
    ) -> RestoredFace:
        """What became of a face. size: of the network's input, where it is not that of what was seen."""
        if options.strength > 0:
            face = replace(face, weights=weights_used(self.runtime, size or seen.shape[0]))
        if picture is None:
            return replace(face, status="failed", reason="the network gave values that are not finite")
        return replace(face, crop=seen, picture=eight_bit(picture)) if options.keep_crops else face

    def _restore(self, crops: Sequence[Image], options: Options) -> list[Canvas | None]:
        """T x T x 3 for each crop, finished, uint8 or float32 in 0..255; None where the network failed."""
        pictures = self.runtime(crops) if options.strength > 0 else list(crops)
        pairs = zip(pictures, crops, strict=True)
        return [None if picture is None else finished(picture, seen, options) for picture, seen in pairs]

    def _scale(self, options: Options) -> int:
        return options.upscale or (1 if self.upscaler is None else self.upscaler.scale)

    def _background(self, image: Canvas, options: Options) -> Canvas:
        """A new array for the result: the picture at the result's size."""
        height, width = self.result_size(image, options)
        small = shrunk(image, options.long_side)
        if self.upscaler is not None:
            return self.upscaler(small, self._scale(options))
        if small.shape[:2] != (height, width):
            return np.asarray(cv2.resize(small, (width, height), interpolation=cv2.INTER_LANCZOS4))
        return small.copy(order="C") if small is image else small

    def _mask(self, picture: Canvas, options: Options) -> Weights:
        """Paste weights over the crop for a restored face."""
        size = picture.shape[0]
        if options.aligned:
            return full_mask(size)
        if options.mask == "parse" and self.parser is not None:
            return self.parser(eight_bit(picture))
        return ellipse_mask(size) if options.mask == "ellipse" else feathered_mask(size)


def _on_torch(network: Callable[..., object], config: PictureFormat, options: RuntimeOptions | None) -> CropRuntime:
    from gpen_core.runtime import Runtime, RuntimeOptions

    return Runtime(network, config, options or RuntimeOptions())  # type: ignore[arg-type]


def _upscaling(network: RRDBNet, options: RuntimeOptions | None) -> Upscaler:
    from gpen_core.runtime import RuntimeOptions, Upscaler

    return Upscaler(network, options or RuntimeOptions())


def select_faces(faces: Sequence[Face], options: Options) -> list[RestoredFace]:
    """Mark which of the detected faces are to be restored, in their order."""
    marked = [_skipped(face, _unwanted(face, options)) for face in faces]
    limit = 1 if options.only == "largest" else options.max_faces
    if limit is None:
        return marked
    wanted = [face for face in marked if face.status == "restored"]
    kept = sorted(wanted, key=lambda face: -face.width * face.height)[:limit]
    reason = "not the largest" if limit == 1 else f"not among the {limit} largest"
    return [
        _skipped(face, reason) if face.status == "restored" and not any(face is other for other in kept) else face
        for face in marked
    ]


def finished(picture: Image, seen: Image, options: Options) -> Canvas:
    """A restored face as it is to be pasted: uint8 as it came, or float32 if anything was done to it."""
    if options.grey:
        picture = np.repeat(grey_of(picture)[..., None], 3, axis=2)
    if not (options.match_color or options.sharpen):
        return picture
    values = picture.astype(np.float32)
    if options.match_color:
        values = match_color(values, seen)
    if options.sharpen:
        values = sharpen(values, options.sharpen)
    return np.clip(values, 0, 255)


def shrunk(image: Canvas, long_side: int | None) -> Canvas:
    """The picture averaged down until its longer side has `long_side` pixels; itself if it has no more."""
    height, width = _shrunk_size(image, long_side)
    if (height, width) == image.shape[:2]:
        return image
    return np.asarray(cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA))


def _shrunk_size(image: Canvas, long_side: int | None) -> tuple[int, int]:
    height, width = image.shape[:2]
    if long_side is None or max(height, width) <= long_side:
        return height, width
    ratio = long_side / max(height, width)
    return max(1, round(height * ratio)), max(1, round(width * ratio))


def stretched(picture: Canvas, size: int) -> Canvas:
    """A square picture at another size, averaged down or interpolated."""
    if picture.shape[0] == size:
        return picture
    method = cv2.INTER_AREA if picture.shape[0] > size else cv2.INTER_CUBIC
    return np.clip(cv2.resize(picture, (size, size), interpolation=method), 0, 255)


def eight_bit(picture: Canvas) -> Image:
    """uint8 or float32 in 0..255 as uint8."""
    return picture if picture.dtype == np.uint8 else round_to(picture, np.dtype(np.uint8))


def _unwanted(face: Face, options: Options) -> str:
    """Why a face is to be left alone, or nothing."""
    if options.box is not None and not options.box.holds(face):
        return "outside the box"
    short = min(face.width, face.height)
    return f"its shorter side of {short:.0f} px is under {options.min_face}" if short < options.min_face else ""


def _skipped(face: Face, reason: str) -> RestoredFace:
    return RestoredFace(face.box, face.landmarks, face.score, "skipped" if reason else "restored", reason)


def _notes(faces: Sequence[RestoredFace], options: Options) -> tuple[str, ...]:
    notes = []
    box = options.box
    if box is not None and not any(box.holds(face) for face in faces):
        notes.append(f"no face in the box {box.x:g},{box.y:g},{box.width:g},{box.height:g}")
    if options.rotate == "off" and not options.aligned:
        if not faces:
            notes.append("no face found; heads on their side are found with --rotate auto")
        elif any(face.status == "restored" and abs(pose(face)[0]) > math.pi / 4 for face in faces):
            notes.append("a head is tilted far; --rotate auto may restore it better")
    return tuple(notes)


class _Clock:
    """Seconds between laps, by name."""

    def __init__(self, laps: Mapping[str, float] | None = None) -> None:
        self.laps = dict(laps or {})
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = now - self._last
        self._last = now
