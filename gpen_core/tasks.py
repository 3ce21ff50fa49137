"""What weights can be trained for besides restoration: colour for grey photos, holes filled, faces from label maps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import cv2
import numpy as np
from numpy.typing import NDArray

from gpen_core.config import require_task
from gpen_core.errors import ImageError
from gpen_core.photo import Photo, grey_of
from gpen_core.pixels import luma, round_to
from gpen_core.restorer import Options, Restored, Restorer
from gpen_core.types import Canvas


@dataclass(frozen=True)
class Task:
    """What is done with a photo: the restorer's work, and what comes before and after it.

    kind: what the weights must be for. enter: the picture and the options that the restorer gets for a photo, given the
    user's options. leave: the photo that its result becomes, and that result as it is to be told of.
    """

    kind: str
    enter: Callable[[Restorer, Photo, Options], tuple[Canvas, Options]]
    leave: Callable[[Restorer, Photo, Options, Restored], tuple[Photo, Restored]]

    def __call__(self, restorer: Restorer, photo: Photo, options: Options) -> tuple[Photo, Restored]:
        """A photo in, a photo and what became of its faces out. Raises UsageError for a restorer of another task."""
        require_task(restorer.config, self.kind)
        picture, inner = self.enter(restorer, photo, options)
        return self.leave(restorer, photo, options, restorer(picture, inner))


STRIP_ROWS = 256
NO_HOLES = (
    "nothing to fill: no pixel is at least half transparent, and none is pure white; give the holes with --mask-image"
)


def _plain(restorer: Restorer, photo: Photo, options: Options) -> tuple[Canvas, Options]:
    return photo.pixels, replace(options, grey=photo.grey)


def _with_result(restorer: Restorer, photo: Photo, options: Options, restored: Restored) -> tuple[Photo, Restored]:
    return photo.with_pixels(restored.image), restored


restore = Task("restoration", _plain, _with_result)
"""Restore the faces of a photo."""


def _without_colour(restorer: Restorer, photo: Photo, options: Options) -> tuple[Canvas, Options]:
    # All of the colour, of which as much as is wanted is mixed in afterwards: the photo may have colours of its own.
    return _grey(photo), replace(options, grey=False, strength=float(options.strength > 0))


def _coloured(restorer: Restorer, photo: Photo, options: Options, restored: Restored) -> tuple[Photo, Restored]:
    if options.strength == 0 or not _is_restored(restored):
        return photo, replace(restored, image=photo.pixels)
    size = restorer.config.output_size
    image = restored.image
    if not (options.aligned and photo.pixels.shape[:2] == (size, size)):
        image = with_luma_of(_grey(photo), image)
    if options.strength < 1:
        image = mixed(photo.pixels, image, options.strength)
    coloured = replace(photo, grey=False, icc=None if photo.grey else photo.icc)
    return coloured.with_pixels(image), replace(restored, image=image)


colorize = Task("colorization", _without_colour, _coloured)
"""Give the faces of a photo colour; its own colours, if any, are dropped first.

Where the network's picture has another size than the face, the photo's luma is kept and only the colour is new. With a
strength below 1 the result is mixed with the photo as it was; at 0, and where no face was coloured, it is the photo.
"""


def inpaint(holes: NDArray[np.bool_] | None) -> Task:
    """A task that fills the holes of an aligned face; all other pixels stay.

    holes: H x W, True where the picture is missing; None takes what `find_holes` finds. A face that the network failed
    at stays as it was, with its holes.
    """

    def enter(restorer: Restorer, photo: Photo, options: Options) -> tuple[Canvas, Options]:
        missing = find_holes(photo) if holes is None else holes
        if missing.shape != photo.pixels.shape[:2]:
            raise ImageError(
                f"the mask has {missing.shape[1]} x {missing.shape[0]} pixels, "
                f"the picture {photo.width} x {photo.height}"
            )
        if not missing.any():
            raise ImageError(NO_HOLES if holes is None else "nothing to fill: nothing in the mask image is white")
        painted = photo.pixels.copy()
        painted[missing] = np.iinfo(painted.dtype).max
        return painted, replace(options, aligned=True, grey=photo.grey)

    def leave(restorer: Restorer, photo: Photo, options: Options, restored: Restored) -> tuple[Photo, Restored]:
        if not _is_restored(restored):
            return photo, replace(restored, image=photo.pixels)
        missing = find_holes(photo) if holes is None else holes
        image = np.where(missing[..., None], restored.image, photo.pixels)
        filled = photo.with_pixels(image)
        if filled.alpha is not None:
            alpha = filled.alpha.copy()
            alpha[missing] = np.iinfo(alpha.dtype).max
            filled = replace(filled, alpha=alpha)
        return filled, replace(restored, image=image)

    return Task("inpainting", enter, leave)


def _labels(restorer: Restorer, photo: Photo, options: Options) -> tuple[Canvas, Options]:
    size = restorer.config.input_size
    if photo.width != photo.height:
        raise ImageError(f"a label map is square; this one has {photo.width} x {photo.height} pixels")
    labels = cv2.resize(photo.rgb8(), (size, size), interpolation=cv2.INTER_NEAREST)
    return np.asarray(labels), replace(options, aligned=True, grey=False)


def _face(restorer: Restorer, photo: Photo, options: Options, restored: Restored) -> tuple[Photo, Restored]:
    if not _is_restored(restored):
        return photo, replace(restored, image=photo.pixels)
    plain = replace(photo, grey=False, alpha=None, icc=None)
    return plain.with_pixels(restored.image), restored


seg2face = Task("seg2face", _labels, _face)
"""A face of the network's size from a label map drawn in colours. Labels are not mixed when the map is resized."""


def keeps_alpha(task: Task) -> bool:
    """Whether a photo comes out of a task with the transparency that it went in with."""
    return task in (restore, colorize)


def _grey(photo: Photo) -> Canvas:
    return np.repeat(grey_of(photo.pixels)[..., None], 3, axis=2)


def _is_restored(restored: Restored) -> bool:
    return any(face.status == "restored" for face in restored.faces)


def find_holes(photo: Photo) -> NDArray[np.bool_]:
    """Pixels [H, W] that are at least half transparent, or where there are none, pure white ones.

    Half is an alpha of 127 of 255: an eraser's soft rim belongs to the picture where it shows more than half of it.
    """
    if photo.alpha is not None:
        missing = np.asarray(photo.alpha <= np.iinfo(photo.alpha.dtype).max // 2)
        if missing.any():
            return missing
    return np.asarray((photo.pixels == np.iinfo(photo.pixels.dtype).max).all(2))


def mixed(before: Canvas, after: Canvas, share: float) -> Canvas:
    """`before` with a share (0..1) of `after`, linearly. Works in strips, so memory stays bounded."""
    result = np.empty_like(before)
    for top in range(0, before.shape[0], STRIP_ROWS):
        rows = slice(top, top + STRIP_ROWS)
        one, other = before[rows].astype(np.float32), after[rows].astype(np.float32)
        result[rows] = round_to(one + share * (other - one), before.dtype)
    return result


def with_luma_of(grey: Canvas, coloured: Canvas) -> Canvas:
    """`coloured` with the Rec. 601 luma of `grey`: all channels moved by the difference, so the chroma stays.

    Pixels where both agree stay as they are. Works in strips, so memory stays bounded.
    """
    result = coloured.copy()
    for top in range(0, grey.shape[0], STRIP_ROWS):
        rows = slice(top, top + STRIP_ROWS)
        colour = coloured[rows].astype(np.float32)
        moved = colour + (grey[rows] - luma(colour)[..., None])
        changed = (coloured[rows] != grey[rows]).any(2)
        np.copyto(result[rows], round_to(moved, grey.dtype), where=changed[..., None])
    return result
