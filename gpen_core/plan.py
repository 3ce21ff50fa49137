"""Which photos are to be restored, and which file each becomes."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpen_core import image_io
from gpen_core.apart import Read, Written, require_apart
from gpen_core.errors import UsageError
from gpen_core.files import is_broken_link, is_folder, same_file

SUFFIX = "_restored"
COMPARE = "_compare"
MOST_NAMED = 5
# A face of a photo: the photo's whole name, a number, and what it shows.
FACE_NAME = re.compile(r"(.+)_face\d+_(?:crop|restored|both)\.png", re.DOTALL)


@dataclass(frozen=True)
class Job:
    """One photo to read and the file to write.

    folder: the output's root, where the ledger lies. named: the photo itself was named, not a folder around it.
    same_format: the output has the format of the source's content, whatever its name says.
    problem: why the source can't be read, if that is known already.
    """

    source: Path
    target: Path
    folder: Path
    named: bool = True
    same_format: bool = False
    problem: str = ""


def plan(
    inputs: Sequence[Path],
    output: Path | None,
    *,
    recursive: bool = False,
    as_folder: bool = False,
    beside: Sequence[Path] = (),
    mask_image: Path | None = None,
    notice: Callable[[str], None] = lambda _: None,
) -> list[Job]:
    """What is to be read and written.

    A single photo may have a file as its output; more of them, and folders, need a folder, which mirrors theirs.
    as_folder: the output is a folder, whatever its name. beside: further folders that are written to, and not read.
    mask_image: a picture that belongs to all photos, and is none of them. notice: told what is left out, in one line
    each.
    Raises UsageError where two photos would be written to one file, or a photo over one of the sources or a broken link
    that is named.
    """
    if mask_image is not None and any(same_file(photo, mask_image) for photo in inputs):
        raise UsageError(f"{mask_image}: that is the mask image, not a picture to work on")
    if output is not None and not as_folder and not is_folder(output) and output.suffix:
        if len(inputs) > 1 or is_folder(inputs[0]):
            raise UsageError(f"{output}: more than one photo needs a folder; write {output}{os.sep} if it is one")
        if output.suffix.lower() not in image_io.WRITABLE:
            known = ", ".join(sorted(image_io.WRITABLE))
            raise UsageError(f"{output}: files end in {known}; write {output}{os.sep} if a folder is meant")
        if is_broken_link(output):
            raise UsageError(f"{output}: a link that leads nowhere; remove it or choose another name")
        return _checked([Job(inputs[0], output, output.parent)])
    if output is not None and _is_other_file(output):
        raise UsageError(f"{output}: a file, not a folder")
    jobs = []
    for root in inputs:
        if not is_folder(root):
            jobs.append(_mirrored(root, root.parent, output, named=True))
            continue
        written = [folder for folder in (output, *beside) if folder is not None]
        excluded = [folder for folder in written if not same_file(root, folder)]
        # Where results go into the folder that is read, they are known by their names.
        ours = output is None or len(excluded) < len(written)
        results: list[Path] = []
        found = sorted(_found(root, recursive, excluded, results if ours else None, notice), key=lambda entry: entry[0])
        if results:
            what = "a result" if len(results) == 1 else f"{len(results)} results"
            notice(f"{root}: {what} of earlier runs left out, by name: {listed(results)}")
        for path, problem in found:
            job = Job(path, path, output or root, named=False, problem=problem)
            if mask_image is None or not same_file(path, mask_image):
                jobs.append(job if problem else _mirrored(path, root, output, named=False))
    return _checked(jobs)


def _is_other_file(path: Path) -> bool:
    try:
        return path.exists() and not path.is_dir()
    except (OSError, ValueError):
        return False


def _found(
    folder: Path,
    recursive: bool,
    excluded: Sequence[Path],
    results: list[Path] | None,
    notice: Callable[[str], None],
) -> Iterator[tuple[Path, str]]:
    """Photos in a folder, and folders that can't be read with the reason. Links to folders are not followed.

    results: gets the photos that earlier runs wrote, which are left out; None if they would lie elsewhere.
    """
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        yield folder, f"{folder}: {(error.strerror or str(error)).lower()}"
        return
    names = {entry.name for entry in entries}
    for entry in entries:
        # Hidden files are no photos: thumbnails, what macOS leaves beside each photo, and our own unfinished ones.
        if entry.name.startswith("."):
            continue
        if not is_folder(entry):
            if not _is_photo(entry):
                continue
            if results is not None and _is_result(entry, names):
                results.append(entry)
            else:
                yield entry, ""
        elif not recursive or any(same_file(entry, folder) for folder in excluded):
            continue
        elif entry.is_symlink():
            notice(f"{entry}: a link to a folder is not followed; name it to have its photos restored")
        else:
            yield from _found(entry, recursive, excluded, results, notice)


def listed(paths: Sequence[Path]) -> str:
    """For people: the first ones, and how many there are besides."""
    more = len(paths) - MOST_NAMED
    return ", ".join(map(str, paths[:MOST_NAMED])) + (f" and {more} more" if more > 0 else "")


def _is_photo(path: Path) -> bool:
    """By its suffix, or by its content where there is none. A broken link counts: it is a photo that is missing."""
    if path.suffix:
        return path.suffix.lower() in image_io.SUFFIXES and (path.is_file() or path.is_symlink())
    return image_io.is_picture(path)


def _is_result(path: Path, names: set[str]) -> bool:
    """Whether an earlier run wrote this file beside its source."""
    face = FACE_NAME.fullmatch(path.name)
    if face and face[1] in names:
        return True
    stem = path.stem.removesuffix(COMPARE).removesuffix(SUFFIX)
    if stem == path.stem:
        return False
    return f"{stem}{path.suffix}" in names or (stem.lower().endswith(".gif") and stem in names)


def _mirrored(photo: Path, root: Path, output: Path | None, *, named: bool) -> Job:
    is_gif = photo.suffix.lower() == ".gif"
    # Nothing writes GIF. The whole name stays in front of the new suffix, because there may be a PNG of the same stem.
    name, suffix = (photo.name, ".png") if is_gif else (photo.stem, photo.suffix)
    if output is None:
        target = photo.with_name(f"{name}{SUFFIX}{suffix}")
    else:
        target = (output if named else output / photo.relative_to(root).parent) / f"{name}{suffix}"
    return Job(photo, target, root if output is None else output, named, same_format=not is_gif)


def files_of(jobs: Sequence[Job]) -> tuple[list[Read], list[Written]]:
    """The photos that are read and the outputs that are written."""
    readable = [job for job in jobs if not job.problem]
    read = [Read(job.source, "a photo that is read") for job in readable]
    return read, [Written(job.target, f"the output of {job.source}", job.source) for job in readable]


def _checked(jobs: list[Job]) -> list[Job]:
    require_apart(*files_of(jobs))
    return jobs
