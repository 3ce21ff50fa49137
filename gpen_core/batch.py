"""Many photos, one after the other: read ahead, restored, written behind; each written whole or not at all."""

from __future__ import annotations

import errno
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gpen_core import image_io
from gpen_core.errors import ExitCode, GpenError, ImageError, UsageError
from gpen_core.files import copy, remove_leftovers, require_writable, sha256
from gpen_core.gallery import Gallery
from gpen_core.ledger import Ledger
from gpen_core.plan import Job
from gpen_core.stopping import Stop, stop_on_signals
from gpen_core.tasks import Task, restore

if TYPE_CHECKING:
    from gpen_core.restorer import Options, Restored, RestoredFace, Restorer

Status = Literal["restored", "partly", "no face", "skipped", "failed"]
WORKERS = min(4, max(2, (os.cpu_count() or 2) // 2))
HEAVY_FILE = 32 * 2**20
HEAVY_PIXELS = 96 * 2**20
"""Bytes of a file, and of its pixels, from which a photo is the only one in memory."""
HOPELESS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Failures of writing that the next photo would meet as well."""


@dataclass(frozen=True)
class Files:
    """How photos are read and written.

    max_pixels: pictures with more are refused. quality: 1..100 of lossy outputs; None follows the source.
    skip_existing: leave out photos whose output is there already, made from the same content with the same settings.
    workers: photos that are read ahead and written behind, each.
    """

    max_pixels: int = 200_000_000
    quality: int | None = None
    skip_existing: bool = False
    workers: int = WORKERS

    def __post_init__(self) -> None:
        if self.quality is not None and not 1 <= self.quality <= 100:
            raise UsageError(f"the quality must lie between 1 and 100, not {self.quality}")
        if self.max_pixels < 1:
            raise UsageError(f"with at most {self.max_pixels} pixels there is no picture")
        if self.workers < 1:
            raise UsageError(f"{self.workers} workers are none")


@dataclass(frozen=True, eq=False)
class Outcome:
    """What became of one photo.

    "partly": written, but some of its faces could not be restored. "no face": written as it was. `error` is one line.
    """

    job: Job
    status: Status
    faces: tuple[RestoredFace, ...] = ()
    runtime: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    error: str = ""
    exit_code: ExitCode = ExitCode.BAD_INPUT

    def line(self) -> str:
        """For people."""
        if self.status == "skipped":
            return f"{self.job.source} -> {self.job.target}: skipped, done before"
        counts = Counter(face.status for face in self.faces)
        faces = f"{len(self.faces)} face{'' if len(self.faces) == 1 else 's'}"
        told = [f"{counts[name]} {name}" for name in ("skipped", "failed") if counts[name]]
        used = Counter(Path(face.weights).stem for face in self.faces if face.weights)
        others = ", ".join([*told, *(f"{count} by {name}" for name, count in sorted(used.items()))])
        steps = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.seconds.items())
        others = f" ({others})" if others else ""
        return f"{self.job.source} -> {self.job.target}: {faces}{others}, {self.runtime}, {steps}"

    def record(self) -> dict[str, Any]:
        """For programs."""
        return {
            "input": str(self.job.source),
            "output": None if self.status == "failed" else str(self.job.target),
            "status": self.status,
            **({"error": self.error} if self.error else {}),
            "faces": [
                {
                    "box": [round(float(v), 2) for v in face.box],
                    "landmarks": [[round(float(v), 2) for v in point] for point in face.landmarks],
                    "score": round(face.score, 4),
                    "status": face.status,
                    **({"reason": face.reason} if face.reason else {}),
                    **({"weights": face.weights} if face.weights else {}),
                }
                for face in self.faces
            ],
            **({"notes": self.notes} if self.notes else {}),
            **({"runtime": self.runtime} if self.runtime else {}),
            "seconds": {name: round(seconds, 4) for name, seconds in self.seconds.items()},
        }


@dataclass(frozen=True)
class Summary:
    """How a run went: photos by what became of them, how many there were, and what ended it early."""

    counts: dict[Status, int]
    total: int
    seconds: float
    interrupted: bool = False
    stopped: str = ""
    alone: ExitCode | None = None
    """The exit code of a run of one named photo that failed."""

    @property
    def exit_code(self) -> ExitCode:
        good = sum(self.counts.values()) - self.counts.get("failed", 0)
        if self.interrupted:
            return ExitCode.INTERRUPTED
        if not good:
            return ExitCode.NOTHING_DONE if self.alone is None else self.alone
        whole = good == self.total and not self.counts.get("partly")
        return ExitCode.OK if whole else ExitCode.SOME_FAILED

    def line(self) -> str:
        """For people."""
        get = self.counts.get
        parts = [f"{get('restored', 0)} restored"]
        parts += [f"{get('partly', 0)} with faces that failed"] if get("partly") else []
        parts += [f"{get('no face', 0)} no face", f"{get('failed', 0)} failed", f"{get('skipped', 0)} skipped"]
        left = self.total - sum(self.counts.values())
        parts += [f"{left} not tried"] if left else []
        worked = sum(self.counts.values()) - get("skipped", 0)
        rate = f" ({worked / self.seconds:.2f} photos/s)" if worked and self.seconds else ""
        return f"{', '.join(parts)} in {self.seconds:.1f} s{rate}"


def run(
    jobs: Sequence[Job],
    load: Callable[[], Restorer],
    options: Options,
    tell: Callable[[Outcome], None],
    *,
    files: Files = Files(),
    settings: Callable[[], str] | None = None,
    gallery: Gallery | None = None,
    task: Task = restore,
) -> Summary:
    """Restore every photo, in order. A bad one is told of and the rest go on.

    load: makes the restorer, when the first readable photo needs it; what it raises ends the run. tell: hears of each
    photo in the order of the jobs, from the caller's thread. settings: fingerprint of all that decides what becomes
    of a photo; with it a ledger is kept in each job's folder, as `files.skip_existing` needs. gallery: writes further
    pictures after each output. task: what to do with a photo.
    SIGINT and SIGTERM end the run after the photos being written; so does a full disk.
    """
    started = time.monotonic()
    counts: Counter[Status] = Counter()
    alone = None
    with stop_on_signals() as stop, _opened(jobs, load, options, files, settings, gallery, task, stop) as work:
        for outcome in work.outcomes(jobs):
            counts[outcome.status] += 1
            if len(jobs) == 1 and outcome.job.named and outcome.error:
                alone = outcome.exit_code
            tell(outcome)
        interrupted = stop.requested and counts.total() < len(jobs)
    return Summary(dict(counts), len(jobs), time.monotonic() - started, interrupted, work.hopeless, alone)


@contextmanager
def _opened(
    jobs: Sequence[Job],
    load: Callable[[], Restorer],
    options: Options,
    files: Files,
    settings: Callable[[], str] | None,
    gallery: Gallery | None,
    task: Task,
    stop: Stop,
) -> Iterator[_Work]:
    with ExitStack() as stack:
        ledgers: dict[Path, Ledger] = {}
        for folder in {job.folder for job in jobs}:
            require_writable(folder)
            if settings is not None:
                ledgers[folder] = Ledger(folder)
                stack.callback(ledgers[folder].close)
        busy = {folder for folder, ledger in ledgers.items() if not ledger.alone}
        free = [job for job in jobs if job.folder not in busy]
        remove_leftovers(job.target for job in free)
        if gallery is not None:
            remove_leftovers(path for job in free for path in gallery.leftovers(job))
        readers, writers = (ThreadPoolExecutor(files.workers, name) for name in ("read", "write"))
        stack.callback(writers.shutdown)
        stack.callback(readers.shutdown, cancel_futures=True)
        yield _Work(load, options, files, settings, gallery, task, stop, ledgers, readers, writers)


@dataclass(frozen=True, eq=False)
class _Loaded:
    photo: image_io.Photo
    content: str


class _Work:
    """One run. The networks work in the caller's thread, reading and writing in others around it."""

    def __init__(
        self,
        load: Callable[[], Restorer],
        options: Options,
        files: Files,
        settings: Callable[[], str] | None,
        gallery: Gallery | None,
        task: Task,
        stop: Stop,
        ledgers: dict[Path, Ledger],
        readers: ThreadPoolExecutor,
        writers: ThreadPoolExecutor,
    ) -> None:
        self.hopeless = ""
        self._load, self._options, self._files = load, options, files
        self._make_settings, self._settings = settings, ""
        self._gallery, self._task, self._stop, self._ledgers = gallery, task, stop, ledgers
        self._readers, self._writers = readers, writers
        self._restorer: Restorer | None = None
        # How many photos are read ahead: of large ones, that only decoding shows, one.
        self._depth = 1

    def outcomes(self, jobs: Sequence[Job]) -> Iterator[Outcome]:
        """What becomes of each job, in their order. Stops early on request and where going on is hopeless."""
        behind: deque[Future[Outcome]] = deque()
        broken: Exception | None = None
        if self._files.skip_existing:
            try:
                self._require_settings()
            except KeyboardInterrupt:
                self._stop.requested = True
                return
        for job, reading in self._read_ahead(jobs):
            if self._stop.requested or self.hopeless:
                break
            try:
                result, heavy = self._one(job, reading)
            except KeyboardInterrupt:
                self._stop.requested = True
                break
            except Exception as error:
                broken = error
                break
            del reading
            self._depth = 1 if heavy else self._files.workers
            behind.append(result)
            kept = 0 if heavy else self._files.workers
            while behind and (len(behind) > kept or behind[0].done()):
                yield behind.popleft().result()
        while behind:
            yield behind.popleft().result()
        if broken is not None:
            raise broken

    def _read_ahead(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Future[_Loaded | None]]]:
        ahead: deque[tuple[Job, Future[_Loaded | None]]] = deque()
        for job in jobs:
            alone = _is_heavy(job.source)
            while ahead and alone:
                yield ahead.popleft()
            ahead.append((job, self._readers.submit(self._read, job)))
            while len(ahead) > (0 if alone else self._depth):
                yield ahead.popleft()
        while ahead:
            yield ahead.popleft()

    def _read(self, job: Job) -> _Loaded | None:
        """The photo, or None if its output is there already."""
        if job.problem:
            raise ImageError(job.problem)
        content = ""
        ledger = self._ledgers.get(job.folder)
        if ledger is not None and job.source.is_file():
            # Before the photo is read: if it changes in between, the record matches neither and it is done again.
            with suppress(OSError):
                content = sha256(job.source)
            held = content and self._files.skip_existing and ledger.holds(job.target, content, self._settings)
            if held and (self._gallery is None or self._gallery.is_there(job)):
                return None
        return _Loaded(image_io.read(job.source, max_pixels=self._files.max_pixels), content)

    def _one(self, job: Job, reading: Future[_Loaded | None]) -> tuple[Future[Outcome], bool]:
        """What will become of one photo, and whether no other should be in memory beside it."""
        try:
            with self._stop.at_once():
                loaded = reading.result()
        except Exception as error:
            return _known(_failure(job, error)), False
        if loaded is None:
            return _known(Outcome(job, "skipped")), False
        restorer = self._require_restorer()
        try:
            with self._stop.at_once():
                photo, restored = self._task(restorer, loaded.photo, self._options)
        except Exception as error:
            return _known(_failure(job, error)), False
        runtime = restorer.runtime.description
        heavy = restored.image.nbytes > HEAVY_PIXELS
        return self._writers.submit(self._write, job, loaded, photo, restored, runtime), heavy

    def _write(self, job: Job, loaded: _Loaded, photo: image_io.Photo, restored: Restored, runtime: str) -> Outcome:
        ledger = self._ledgers.get(job.folder)
        before = loaded.photo
        try:
            if ledger is not None:
                # The lock tells other processes not to take what is being written for something left over.
                ledger.open()
            job.target.parent.mkdir(parents=True, exist_ok=True)
            format = _format(job, before)
            lost: tuple[str, ...] = ()
            if self._files.quality is None and _is_copy(job, format, before, photo):
                copy(job.source, job.target)
            else:
                lost = (*before.notes, *image_io.write(job.target, photo, format=format, quality=self._files.quality))
            if self._gallery is not None:
                self._gallery.write(job, before, restored, format)
            if ledger is not None and not restored.failed:
                ledger.add(job.target, loaded.content, self._settings)
        except Exception as error:
            if _number(error) in HOPELESS:
                self.hopeless = f"stopped: {_explain(error, job)}"
            return _failure(job, error)
        failed = (f"a face was left as it was: {face.reason}" for face in restored.faces if face.status == "failed")
        notes = (*restored.notes, *lost, *failed)
        return Outcome(job, _status(restored), restored.faces, runtime, restored.seconds, notes)

    def _require_restorer(self) -> Restorer:
        if self._restorer is None:
            with self._stop.at_once():
                self._restorer = self._load()
            self._require_settings()
        return self._restorer

    def _require_settings(self) -> None:
        if self._make_settings is not None and not self._settings:
            with self._stop.at_once():
                self._settings = self._make_settings()


def _is_heavy(path: Path) -> bool:
    try:
        return path.stat().st_size > HEAVY_FILE
    except (OSError, ValueError):
        return False


def _known(outcome: Outcome) -> Future[Outcome]:
    future: Future[Outcome] = Future()
    future.set_result(outcome)
    return future


def _format(job: Job, photo: image_io.Photo) -> str | None:
    """The format to write, or None for that of the target's suffix."""
    if not job.same_format:
        return None
    if photo.format != "gif":
        return photo.format
    return None if job.target.suffix else "png"


def _is_copy(job: Job, format: str | None, before: image_io.Photo, after: image_io.Photo) -> bool:
    """Whether nothing changed, so that the output can be the input, byte for byte."""
    same_format = format == before.format or job.source.suffix.lower() == job.target.suffix.lower()
    if not same_format or before.turned or before.grey != after.grey or before.icc != after.icc:
        return False
    same_alpha = before.alpha is after.alpha or np.array_equal(before.alpha, after.alpha)  # type: ignore[arg-type]
    return same_alpha and np.array_equal(before.pixels, after.pixels)


def _status(restored: Restored) -> Status:
    if restored.failed:
        return "partly"
    return "restored" if any(face.status == "restored" for face in restored.faces) else "no face"


def _failure(job: Job, error: Exception) -> Outcome:
    code = error.exit_code if isinstance(error, GpenError) else ExitCode.BAD_INPUT
    return Outcome(job, "failed", error=_explain(error, job), exit_code=code)


def _explain(error: Exception, job: Job) -> str:
    """One line that names a file and what is wrong with it."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or job.target}: {error.strerror.lower()}"
    if isinstance(error, MemoryError):
        return f"{job.source}: not enough memory"
    text = " ".join(str(error).split())
    if not isinstance(error, GpenError):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    named = any(image_io.shown(path) in text for path in (job.source, job.target))
    return text if named else f"{job.source}: {text}"


def _number(error: BaseException | None) -> int | None:
    """The operating system's number of an error, also of one that was put into other words."""
    while error is not None:
        if isinstance(error, OSError):
            return error.errno
        error = error.__context__
    return None
