"""Pictures for looking at what was done: each face before and after, and the whole photo before and after."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import cv2
import numpy as np

from gpen_core import image_io
from gpen_core.apart import Written
from gpen_core.errors import ImageError, UsageError
from gpen_core.files import require_writable
from gpen_core.photo import Photo
from gpen_core.plan import COMPARE, FACE_NAME, Job
from gpen_core.types import Canvas

if TYPE_CHECKING:
    from gpen_core.restorer import Restored

# Longer side of a comparison at most: every format holds it, and every viewer shows it.
LARGEST = 8000


@dataclass(frozen=True)
class Gallery:
    """What to write besides the outputs. faces: for each source, the path that its faces' names begin with."""

    faces: dict[Path, Path]
    compare: bool

    def leftovers(self, jobs: Sequence[Job]) -> tuple[list[Path], list[Path]]:
        """What unfinished files of a run may be of: comparisons, and what the names of faces begin with."""
        comparisons = [comparison_path(job) for job in jobs if self.compare]
        return comparisons, [path.with_name(f"{path.name}_face") for path in self.faces.values()]

    def written(self, jobs: Sequence[Job]) -> list[Written]:
        """The files that the gallery of a run may consist of."""
        readable = [job for job in jobs if not job.problem]
        pictures = [job for job in readable if self.compare]
        found = [Written(comparison_path(job), f"the comparison of {job.source} (--compare)") for job in pictures]
        begins = [(job, self.faces[job.source]) for job in readable if job.source in self.faces]
        found += [Written(path, f"a face of {job.source} (--save-faces)", names=FACE_NAME) for job, path in begins]
        return found

    def write(
        self, job: Job, photo: Photo, restored: Restored, format: str | None
    ) -> tuple[list[Path], list[ImageError | OSError]]:
        """Write what is wanted for one photo, each file whole or not at all; the files, and what kept any from being
        written.

        photo: before it was restored. format: of the output, None for that of its suffix.
        """
        written: list[Path] = []
        failures: list[ImageError | OSError] = []
        for path, picture, named in self._pictures(job, photo, restored, format):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                image_io.write(path, picture, format=named)
                written.append(path)
            except (ImageError, OSError) as error:
                failures.append(error)
        return written, failures

    def _pictures(
        self, job: Job, photo: Photo, restored: Restored, format: str | None
    ) -> Iterator[tuple[Path, Photo, str | None]]:
        if self.compare:
            pixels = side_by_side(photo.pixels, restored.image)
            yield comparison_path(job), replace(photo, pixels=pixels, alpha=None), format
        begin = self.faces.get(job.source)
        if begin is None:
            return
        for number, face in enumerate(restored.faces, 1):
            if face.crop is None or face.picture is None:
                continue
            both = side_by_side(face.crop, face.picture)
            for kind, pixels in (("crop", face.crop), ("restored", face.picture), ("both", both)):
                path = begin.with_name(f"{begin.name}_face{number}_{kind}.png")
                yield path, Photo(pixels, grey=photo.grey, alpha=None, format="png"), None


def open_gallery(jobs: Sequence[Job], faces: Path | None, compare: bool) -> Gallery:
    """The gallery for a run.

    faces: the folder for faces, or None. Their names begin with the photo's own, suffix included, in folders that lie
    to each other as those of the photos do; so no two photos meet.
    """
    if faces is None or not jobs:
        return Gallery({}, compare)
    require_writable(faces)
    sources = [job.source.absolute() for job in jobs]
    try:
        root = os.path.commonpath([source.parent for source in sources])
    except ValueError:
        raise UsageError("--save-faces: the photos lie on different drives") from None
    return Gallery(
        {job.source: faces / source.relative_to(root) for job, source in zip(jobs, sources, strict=True)}, compare
    )


def comparison_path(job: Job) -> Path:
    """Where the comparison of a photo is written: beside its output."""
    return job.target.with_name(f"{job.target.stem}{COMPARE}{job.target.suffix}")


def side_by_side(before: Canvas, after: Canvas) -> Canvas:
    """Two pictures of one type at the size of the second, or smaller, beside each other."""
    height, width = after.shape[:2]
    ratio = min(1.0, LARGEST / max(height, 2 * width))
    size = (max(1, int(width * ratio)), max(1, int(height * ratio)))
    return np.concatenate([_fitted(before, size), _fitted(after, size)], axis=1)


def _fitted(picture: Canvas, size: tuple[int, int]) -> Canvas:
    if picture.shape[1::-1] == size:
        return picture
    smaller = picture.shape[1] > size[0]
    return np.asarray(cv2.resize(picture, size, interpolation=cv2.INTER_AREA if smaller else cv2.INTER_CUBIC))
