"""Many photos in a stream: read and prepared ahead, restored together, written behind; each whole or not at all.

Around the network, which the caller's thread drives, other threads read photos, find faces, paste and write. Faces of
several photos share a batch; none waits for more of them. How many photos are in memory is bounded by their size.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gpen_core import image_io
from gpen_core.errors import ExitCode, GpenError, ImageError, UsageError, one_line
from gpen_core.files import copy, remove_leftovers, require_writable, sha256
from gpen_core.gallery import Gallery
from gpen_core.gather import IN_FLIGHT, NOTHING, Gatherer, Landed
from gpen_core.ledger import Ledger
from gpen_core.plan import Job
from gpen_core.stopping import Stop, stop_on_signals
from gpen_core.tasks import Task, keeps_alpha, restore

if TYPE_CHECKING:
    from gpen_core.restorer import Options, Prepared, Restored, RestoredFace, Restorer

Status = Literal["restored", "partly", "no face", "skipped", "failed"]
WORKERS = min(16, max(2, (os.cpu_count() or 2) // 2))
HEAVY_FILE = 32 * 2**20
"""Bytes of a file from which its photo is the only one in memory."""
IN_HAND = 2**30
"""Bytes of pixels, before and after, up to which more than two photos are in memory."""
POLL = 0.001
"""Seconds between looks at the device while the next photo is being prepared."""
HOPELESS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Failures of writing that the next photo would meet as well."""


@dataclass(frozen=True)
class Files:
    """How photos are read and written.

    max_pixels: pictures with more are refused. quality: 1..100 of lossy outputs; None follows the source.
    skip_existing: leave out photos whose output is there already, made from the same content with the same settings,
        with all that a gallery wrote beside it.
    workers: threads that read photos and find faces, and as many that paste and write.
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

    "partly": written, but some of its faces could not be restored, or not all that goes with it could be written.
    "no face": written as it was. missing: files beside the output that could not be written, each with the reason.
    `error` is one line.
    """

    job: Job
    status: Status
    faces: tuple[RestoredFace, ...] = ()
    runtime: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
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
            **({"not_written": self.missing} if self.missing else {}),
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

    @property
    def left(self) -> int:
        """Photos that were not tried."""
        return self.total - sum(self.counts.values())

    def line(self) -> str:
        """For people."""
        get = self.counts.get
        parts = [f"{get('restored', 0)} restored"]
        parts += [f"{get('partly', 0)} partly"] if get("partly") else []
        parts += [f"{get('no face', 0)} no face", f"{get('failed', 0)} failed", f"{get('skipped', 0)} skipped"]
        parts += [f"{self.left} not tried"] if self.left else []
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
    With a runtime that takes several crops at once, those of neighbouring photos share its batches, as they come; see
    `gather` for what that means for a result. A batch that raises fails no photo but the one that is to blame.
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
        remove_leftovers(job.target for job in jobs)
        if gallery is not None:
            remove_leftovers(*gallery.leftovers(jobs))
        readers, writers = (ThreadPoolExecutor(files.workers, name) for name in ("read", "write"))
        stack.callback(writers.shutdown)
        stack.callback(readers.shutdown, cancel_futures=True)
        work = _Work(load, options, files, settings, gallery, task, stop, ledgers, readers, writers)
        stack.callback(work.restorer.give_up)
        yield work


@dataclass(frozen=True, eq=False)
class _Loaded:
    photo: image_io.Photo
    content: str


@dataclass(frozen=True, eq=False)
class _Ready:
    """A photo whose faces are found. prepared: None where it is restored in tiles. size: bytes of its pixels, before
    and after."""

    loaded: _Loaded
    prepared: Prepared | None
    size: int


@dataclass(eq=False)
class _Way:
    """A photo on its way from file to file.

    alone: no other should be in memory beside it. preparing: until it has gone on to the network. size: as of `_Ready`,
    once known. outcome: from when its end is in sight.
    """

    job: Job
    alone: bool
    preparing: Future[_Ready | None] | None
    size: int | None = None
    outcome: Future[Outcome] | None = None


class _OnDemand:
    """The restorer: made by the run's own thread when another one first needs it."""

    def __init__(self) -> None:
        self.needed: Future[None] = Future()
        self.made: Future[Restorer] = Future()
        self._lock = threading.Lock()

    def get(self) -> Restorer:
        """Waits for it. Raises CancelledError if the run ends without."""
        with self._lock:
            if not self.needed.done():
                self.needed.set_result(None)
        return self.made.result()

    def give_up(self) -> None:
        """Let go those who wait."""
        self.made.cancel()


class _Work:
    """One run. The networks work in the caller's thread, all else in others around it."""

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
        self.restorer = _OnDemand()
        self._load, self._options, self._files = load, options, files
        self._make_settings, self._settings = settings, ""
        self._gallery, self._task, self._stop, self._ledgers = gallery, task, stop, ledgers
        self._readers, self._writers = readers, writers
        self._gatherer: Gatherer[tuple[_Way, _Ready]] | None = None
        self._finding = threading.Semaphore(1)
        # What the next photo is expected to take: only decoding shows it, so at first as if all were large.
        self._expected = IN_HAND

    def outcomes(self, jobs: Sequence[Job]) -> Iterator[Outcome]:
        """What becomes of each job, in their order. Stops early on request and where going on is hopeless."""
        ways: deque[_Way] = deque()
        broken: Exception | None = None
        try:
            if self._files.skip_existing:
                self._require_settings()
            yield from self._stream(deque(jobs), ways)
        except KeyboardInterrupt:
            self._stop.requested = True
        except Exception as error:
            broken = error
        for way in ways:
            if way.outcome is not None:
                yield way.outcome.result()
        if broken is not None:
            raise broken

    def _stream(self, jobs: deque[Job], ways: deque[_Way]) -> Iterator[Outcome]:
        """Takes jobs in hand, brings each forward and tells of it. `ways`: those in hand and not told of."""
        ahead: deque[_Way] = deque()
        while (jobs or ways) and not (self._stop.requested or self.hopeless):
            if self._gatherer is None and self.restorer.needed.done():
                self._make_restorer()
            while ahead and _is_done(ahead[0].preparing) and (self._gatherer is None or self._gatherer.hungry):
                self._enter(ahead.popleft())
            # Afterwards, because the first ones show how large photos are.
            while jobs and self._has_room(jobs[0], ways):
                job = jobs.popleft()
                ahead.append(_Way(job, _is_heavy(job.source), self._readers.submit(self._prepare, job)))
                ways.append(ahead[-1])
            self._drive(ahead, ways)
            while ways and (outcome := ways[0].outcome) is not None and outcome.done():
                ways.popleft()
                yield outcome.result()

    def _has_room(self, job: Job, ways: Sequence[_Way]) -> bool:
        """Whether one more photo may be in memory."""
        held = [way for way in ways if not _is_done(way.outcome)]
        if len(held) < 2:
            return not held or not (held[0].alone or _is_heavy(job.source))
        batch = self._gatherer.limit if self._gatherer is not None else 1
        if len(held) >= 2 * (self._files.workers + batch):
            return False
        size = sum(self._expected if way.size is None else way.size for way in held) + self._expected
        return size <= IN_HAND and not any(way.alone for way in held) and not _is_heavy(job.source)

    def _prepare(self, job: Job) -> _Ready | None:
        """The photo with its faces, or None if its output is there already."""
        loaded = self._read(job)
        if loaded is None:
            return None
        restorer = self.restorer.get()
        picture, options = self._task.enter(restorer, loaded.photo, self._options)
        height, width = restorer.result_size(picture, options)
        with self._finding:
            prepared = restorer.prepare(picture, options) if options.tile is None else None
        return _Ready(loaded, prepared, picture.nbytes + 3 * height * width * picture.itemsize)

    def _enter(self, way: _Way) -> None:
        """Send a prepared photo on: to the network, or past it."""
        assert way.preparing is not None
        preparing, way.preparing = way.preparing, None
        try:
            ready = preparing.result()
        except Exception as error:
            way.outcome = _known(_failure(way.job, error))
            return
        if ready is None:
            way.outcome = _known(Outcome(way.job, "skipped"))
            return
        self._expected = way.size = ready.size
        if ready.prepared is not None and ready.prepared.waiting:
            assert self._gatherer is not None
            self._gatherer.add((way, ready), ready.prepared.waiting)
            return
        self._leave(way, ready)

    def _drive(self, ahead: Sequence[_Way], ways: Sequence[_Way]) -> None:
        """Keep the network busy with what is there, or wait until something is."""
        gatherer = self._gatherer
        if gatherer is not None:
            with self._stop.at_once():
                launched = gatherer.launch()
                busy = gatherer.flying == IN_FLIGHT or (gatherer.flying > 0 and not ahead)
                landed = gatherer.collect(wait=busy)
            for one in landed:
                self._leave(*one.key, one)
            if launched or landed:
                return
        awaited: list[Future[Any] | None] = [ahead[0].preparing] if ahead else []
        awaited += [ways[0].outcome] if ways else []
        awaited += [self.restorer.needed] if gatherer is None else []
        with self._stop.at_once():
            pause = POLL if gatherer is not None and gatherer.flying else None
            wait([future for future in awaited if future is not None], pause, FIRST_COMPLETED)

    def _leave(self, way: _Way, ready: _Ready, landed: Landed[Any] = NOTHING) -> None:
        """Have a photo finished and written when the network is done with it, or has nothing to do for it."""
        restorer = self.restorer.made.result()
        loaded, prepared = ready.loaded, ready.prepared
        try:
            if landed.error is not None:
                raise landed.error
            with self._stop.at_once():
                if prepared is None:
                    whole = self._task(restorer, loaded.photo, self._options)
                elif restorer.upscaler is not None:
                    prepared = restorer.enlarge(prepared)
        except Exception as error:
            way.outcome = _known(_failure(way.job, error))
            return
        if prepared is None:
            way.outcome = self._writers.submit(self._write, way.job, loaded, *whole)
        else:
            way.outcome = self._writers.submit(self._finish, way.job, loaded, prepared, landed)

    def _finish(self, job: Job, loaded: _Loaded, prepared: Prepared, landed: Landed[Any]) -> Outcome:
        restorer = self.restorer.made.result()
        try:
            restored = restorer.finish(prepared, landed.pictures, landed.seconds)
            photo, restored = self._task.leave(restorer, loaded.photo, self._options, restored)
        except Exception as error:
            return _failure(job, error)
        return self._write(job, loaded, photo, restored)

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
            if content and self._files.skip_existing and ledger.holds(job.target, content, self._settings):
                return None
        photo = image_io.read(job.source, max_pixels=self._files.max_pixels)
        if keeps_alpha(self._task):
            image_io.require_room(job.target, photo, format=_format(job, photo))
        return _Loaded(photo, content)

    def _write(self, job: Job, loaded: _Loaded, photo: image_io.Photo, restored: Restored) -> Outcome:
        before = loaded.photo
        try:
            job.target.parent.mkdir(parents=True, exist_ok=True)
            format = _format(job, before)
            lost: tuple[str, ...] = ()
            if self._files.quality is None and _is_copy(job, format, before, photo):
                copy(job.source, job.target)
            else:
                lost = (*before.notes, *image_io.write(job.target, photo, format=format, quality=self._files.quality))
        except Exception as error:
            self._give_up_if_hopeless(error, job)
            return _failure(job, error)
        runtime = self.restorer.made.result().runtime.description
        missing = self._complete(job, loaded, restored, format)
        failed = (f"a face was left as it was: {face.reason}" for face in restored.faces if face.status == "failed")
        notes = (*restored.notes, *lost, *failed)
        status: Status = "partly" if missing else _status(restored)
        # Outcomes wait for their turn, and pictures of faces are large.
        faces = tuple(replace(face, crop=None, picture=None) for face in restored.faces)
        return Outcome(job, status, faces, runtime, restored.seconds, notes, missing)

    def _complete(self, job: Job, loaded: _Loaded, restored: Restored, format: str | None) -> tuple[str, ...]:
        """Write what goes with an output that is there, and record it if it is whole; what could not be written."""
        beside: list[Path] = []
        failures: list[Exception] = []
        ledger = self._ledgers.get(job.folder)
        try:
            if self._gallery is not None:
                beside, lost = self._gallery.write(job, loaded.photo, restored, format)
                failures += lost
            if ledger is not None and not restored.failed and not failures:
                ledger.add(job.target, loaded.content, self._settings, beside)
        except Exception as error:
            failures.append(error)
        for failure in failures:
            self._give_up_if_hopeless(failure, job)
        return tuple(str(error) if isinstance(error, ImageError) else _explain(error, job) for error in failures)

    def _give_up_if_hopeless(self, error: Exception, job: Job) -> None:
        if _number(error) in HOPELESS:
            self.hopeless = f"stopped: {_explain(error, job)}"

    def _make_restorer(self) -> None:
        with self._stop.at_once():
            restorer = self._load()
        self._require_settings()
        self._gatherer = Gatherer(restorer.runtime)
        # A network that takes one face at a time is slower than a detector, which takes hundreds of megabytes.
        self._finding = threading.Semaphore(1 if self._gatherer.limit == 1 else self._files.workers)
        self.restorer.made.set_result(restorer)

    def _require_settings(self) -> None:
        if self._make_settings is not None and not self._settings:
            with self._stop.at_once():
                self._settings = self._make_settings()


def _is_heavy(path: Path) -> bool:
    try:
        return path.stat().st_size > HEAVY_FILE
    except (OSError, ValueError):
        return False


def _is_done(future: Future[Any] | None) -> bool:
    return future is not None and future.done()


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
    # Of the content: the names may both be wrong about it.
    same_format = before.format == (format or image_io.format_of(job.target))
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
    text = one_line(error)
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
