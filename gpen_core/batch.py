"""Many photos: which file becomes which, one after the other, each written whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpen_core import image_io
from gpen_core.errors import ExitCode, GpenError, ImageError, UsageError
from gpen_core.files import same_file

if TYPE_CHECKING:
    from gpen_core.restorer import Options, Restored, Restorer

SUFFIX = "_restored"


@dataclass(frozen=True)
class Job:
    """One photo to read and the file to write."""

    source: Path
    target: Path


def plan(inputs: Sequence[Path], output: Path | None, *, recursive: bool = False) -> list[Job]:
    """What is to be read and written.

    A single photo may have a file as its output; more of them, and folders, need a folder, which mirrors theirs.
    Raises UsageError where two photos would be written to one file, or a photo over itself.
    """
    one_file = len(inputs) == 1 and not inputs[0].is_dir()
    if output is not None and one_file and not _is_folder(output):
        jobs = [Job(inputs[0], output)]
    else:
        if output is not None and output.exists() and not output.is_dir():
            raise UsageError(f"{output}: a folder is needed for more than one photo")
        jobs = [_job(photo, root, output) for root in inputs for photo in _photos(root, recursive)]
    return _checked(jobs)


def _is_folder(output: Path) -> bool:
    return output.is_dir() or output.suffix.lower() not in image_io.SUFFIXES


def _photos(root: Path, recursive: bool) -> Iterator[Path]:
    if not root.is_dir():
        yield root
        return
    found = root.rglob("*") if recursive else root.glob("*")
    yield from sorted(p for p in found if p.suffix.lower() in image_io.SUFFIXES and p.is_file())


def _job(photo: Path, root: Path, output: Path | None) -> Job:
    if output is None:
        return Job(photo, photo.with_name(f"{photo.stem}{SUFFIX}{photo.suffix}"))
    inside = photo.relative_to(root) if photo != root else Path(photo.name)
    return Job(photo, output / inside)


def _checked(jobs: list[Job]) -> list[Job]:
    taken: dict[Path, Path] = {}
    for job in jobs:
        target = job.target.absolute()
        if same_file(job.source, job.target):
            raise UsageError(f"{job.target}: the output would replace its source; choose another with -o")
        if target in taken:
            raise UsageError(f"{taken[target]} and {job.source} would both be written to {job.target}")
        taken[target] = job.source
    return jobs


def run(
    jobs: Sequence[Job],
    load: Callable[[], Restorer],
    options: Options,
    report: Callable[[Any], None],
    complain: Callable[[str], None],
    *,
    as_records: bool = False,
) -> ExitCode:
    """Restore every photo. A bad one is reported and the rest go on; the exit code tells how it went.

    load: makes the restorer, when the first readable photo needs it. report: takes a line for each photo, or a record
    with `as_records`. complain: takes a line for each failure.
    """
    restorer: Restorer | None = None
    done = failed = partly = 0
    for job in jobs:
        try:
            photo = image_io.read(job.source)
            restorer = restorer or load()
            restored = restorer(photo.pixels, replace(options, grey=photo.grey))
            job.target.parent.mkdir(parents=True, exist_ok=True)
            lost = image_io.write(job.target, photo.with_pixels(restored.image))
        except (ImageError, OSError) as error:
            failed += 1
            reason = explain(error, job)
            complain(f"gpen-core: {reason}")
            if as_records:
                report({"input": str(job.source), "output": None, "error": reason, "faces": []})
            continue
        done += 1
        partly += restored.failed > 0
        for note in (*photo.notes, *lost):
            complain(f"{job.source}: {note}")
        report(_record(job, restored, restorer) if as_records else _line(job, restored, restorer))
    if not jobs:
        complain("gpen-core: no photos found")
    if not done:
        return ExitCode.BAD_INPUT if len(jobs) == 1 else ExitCode.NOTHING_DONE
    return ExitCode.SOME_FAILED if failed or partly else ExitCode.OK


def explain(error: GpenError | OSError, job: Job) -> str:
    """One line that names a file and what is wrong with it."""
    if isinstance(error, OSError):
        return f"{error.filename or job.target}: {error.strerror or error}"
    text = str(error)
    return text if str(job.source) in text or str(job.target) in text else f"{job.source}: {text}"


def _line(job: Job, restored: Restored, restorer: Restorer) -> str:
    counts = {status: sum(f.status == status for f in restored.faces) for status in ("restored", "skipped", "failed")}
    faces = f"{len(restored.faces)} face{'' if len(restored.faces) == 1 else 's'}"
    others = ", ".join(f"{n} {status}" for status, n in counts.items() if n and status != "restored")
    steps = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in restored.seconds.items())
    where = restorer.runtime.description
    return f"{job.source} -> {job.target}: {faces}{f' ({others})' if others else ''}, {where}, {steps}"


def _record(job: Job, restored: Restored, restorer: Restorer) -> dict[str, Any]:
    return {
        "input": str(job.source),
        "output": str(job.target),
        "faces": [
            {
                "box": [round(float(v), 2) for v in face.box],
                "landmarks": [[round(float(v), 2) for v in point] for point in face.landmarks],
                "score": round(face.score, 4),
                "status": face.status,
                **({"reason": face.reason} if face.reason else {}),
            }
            for face in restored.faces
        ],
        "runtime": restorer.runtime.description,
        "seconds": {name: round(seconds, 4) for name, seconds in restored.seconds.items()},
    }
