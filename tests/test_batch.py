"""Runs of many photos: their order, their failures, their ends, and the memory they take."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cv2
import pytest
from torch import Tensor

from gpen_core import image_io
from gpen_core.batch import Files, Outcome, Summary, run
from gpen_core.errors import CheckpointError, ExitCode, ImageError, UsageError
from gpen_core.plan import Job
from gpen_core.restorer import Options, Prepared, Restored, Restorer
from gpen_core.types import Canvas, Image
from tests.stubs import FixedDetector, config_of, face_at, never_finite, smooth_picture, without_channel_0

PICTURE = smooth_picture(120, 100)


class Spy(Restorer):
    """Removes red from one face; `before` is called with each stage and the number of its photo."""

    def __init__(self, before: Callable[[str, int], None] = lambda stage, n: None, faces: int = 1) -> None:
        detector: Any = FixedDetector([face_at(60, 50, 64)] * faces)
        super().__init__(self.network, config_of(), detector)
        self.before = before
        self.calls = 0

    def prepare(self, image: Canvas, options: Options = Options()) -> Prepared:
        self.before("prepare", number_of(image))
        return super().prepare(image, options)

    def network(self, crops: Tensor) -> Tensor:
        # One face a photo and one crop a batch: the photos come in their order.
        self.calls += 1
        self.before("network", self.calls - 1)
        return without_channel_0(crops)

    def finish(self, prepared: Prepared, pictures: Sequence[Image | None], seconds: float = 0.0) -> Restored:
        self.before("finish", number_of(prepared.image))
        return super().finish(prepared, pictures, seconds)


def in_network(before: Callable[[int], None]) -> Spy:
    return Spy(lambda stage, n: before(n) if stage == "network" else None)


def number_of(picture: Canvas) -> int:
    """Of the photo that `photos` made."""
    return int(picture[0, 0, 0])


def photos(folder: Path, count: int, picture: Image = PICTURE, suffix: str = ".png") -> list[Job]:
    folder.mkdir(exist_ok=True)
    jobs = []
    for i in range(count):
        source = folder / f"{i:03}{suffix}"
        numbered = picture.copy()
        numbered[0, 0] = i % 256
        source.write_bytes(cv2.imencode(suffix, numbered)[1].tobytes())
        jobs.append(Job(source, folder / "out" / source.name, folder / "out"))
    return jobs


def perform(jobs: list[Job], restorer: Restorer | None = None, **options: Any) -> tuple[Summary, list[Outcome]]:
    outcomes: list[Outcome] = []
    found = restorer or Spy()
    summary = run(jobs, lambda: found, Options(), outcomes.append, **options)
    return summary, outcomes


def written(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "out").iterdir()) if (folder / "out").exists() else []


def test_outcomes_come_in_the_order_of_the_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = photos(tmp_path, 12)
    read, write = image_io.read, image_io.write

    def slow_read(path: Path, **options: Any) -> image_io.Photo:
        time.sleep(0.03 if int(path.stem) % 3 == 0 else 0)
        return read(path, **options)

    def slow_write(path: Path, photo: image_io.Photo, **options: Any) -> tuple[str, ...]:
        time.sleep(0.03 if int(path.stem) % 4 == 0 else 0)
        return write(path, photo, **options)

    monkeypatch.setattr(image_io, "read", slow_read)
    monkeypatch.setattr(image_io, "write", slow_write)
    summary, outcomes = perform(jobs, files=Files(workers=3))
    assert [outcome.job for outcome in outcomes] == jobs
    assert {outcome.status for outcome in outcomes} == {"restored"}
    assert summary.exit_code == ExitCode.OK
    assert written(tmp_path) == [job.source.name for job in jobs]


class Milestones:
    """Which stage began with which photo. To wait for one that never comes is a failure."""

    def __init__(self) -> None:
        self._begun: defaultdict[tuple[str, int], threading.Event] = defaultdict(threading.Event)

    def reach(self, stage: str, number: int) -> None:
        self._begun[stage, number].set()

    def wait(self, stage: str, number: int) -> None:
        assert self._begun[stage, number].wait(60), f"{stage} {number} never began"


def test_reading_and_writing_overlap_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = photos(tmp_path, 8)
    begun, last = Milestones(), len(jobs) - 1
    read, write = image_io.read, image_io.write

    def watched_read(path: Path, **options: Any) -> image_io.Photo:
        begun.reach("read", int(path.stem))
        return read(path, **options)

    def watched_write(path: Path, photo: image_io.Photo, **options: Any) -> tuple[str, ...]:
        begun.reach("write", int(path.stem))
        if int(path.stem) < last:
            begun.wait("network", int(path.stem) + 1)
        return write(path, photo, **options)

    def network(number: int) -> None:
        begun.reach("network", number)
        if number < last:
            begun.wait("read", number + 1)
        if number > 0:
            begun.wait("write", number - 1)

    monkeypatch.setattr(image_io, "read", watched_read)
    monkeypatch.setattr(image_io, "write", watched_write)
    summary, outcomes = perform(jobs, in_network(network))
    assert [outcome.error for outcome in outcomes] == [""] * len(jobs)
    assert summary.exit_code == ExitCode.OK


def test_finding_and_pasting_faces_overlap_the_network(tmp_path: Path) -> None:
    jobs = photos(tmp_path, 8)
    begun, last = Milestones(), len(jobs) - 1

    def before(stage: str, number: int) -> None:
        begun.reach(stage, number)
        if stage == "network" and number < last:
            begun.wait("prepare", number + 1)
        if stage == "finish" and number < last:
            begun.wait("network", number + 1)

    summary, outcomes = perform(jobs, Spy(before))
    assert [outcome.error for outcome in outcomes] == [""] * len(jobs)
    assert summary.exit_code == ExitCode.OK


def test_few_photos_are_in_memory_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = photos(tmp_path, 40)
    read, write = image_io.read, image_io.write
    lock = threading.Lock()
    alive, most = 0, 0

    def counted_read(path: Path, **options: Any) -> image_io.Photo:
        nonlocal alive, most
        with lock:
            alive += 1
            most = max(most, alive)
        return read(path, **options)

    def counted_write(path: Path, photo: image_io.Photo, **options: Any) -> tuple[str, ...]:
        nonlocal alive
        time.sleep(0.005)
        with lock:
            alive -= 1
        return write(path, photo, **options)

    monkeypatch.setattr(image_io, "read", counted_read)
    monkeypatch.setattr(image_io, "write", counted_write)
    perform(jobs, files=Files(workers=2))
    # Two being prepared, one with the network and one behind it, two being written.
    assert 2 <= most <= 6


def test_a_network_that_takes_one_face_at_a_time_has_one_photo_prepared_at_a_time(tmp_path: Path) -> None:
    meeting, met = threading.Barrier(2), []

    def before(stage: str, number: int) -> None:
        if stage != "prepare":
            return
        try:
            met.append(meeting.wait(0.05))
        except threading.BrokenBarrierError:
            meeting.reset()

    summary, _ = perform(photos(tmp_path, 6), Spy(before), files=Files(workers=3))
    assert summary.counts == {"restored": 6}
    assert met == []


def test_large_photos_are_read_one_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Before and after, three of them.
    monkeypatch.setattr("gpen_core.batch.IN_HAND", 6 * PICTURE.nbytes - 1)
    read, write = image_io.read, image_io.write
    lock = threading.Lock()
    alive, most = 0, 0

    def counted_read(path: Path, **options: Any) -> image_io.Photo:
        nonlocal alive, most
        with lock:
            alive += 1
            most = max(most, alive)
        return read(path, **options)

    def counted_write(path: Path, photo: image_io.Photo, **options: Any) -> tuple[str, ...]:
        nonlocal alive
        time.sleep(0.005)
        lost = write(path, photo, **options)
        with lock:
            alive -= 1
        return lost

    monkeypatch.setattr(image_io, "read", counted_read)
    monkeypatch.setattr(image_io, "write", counted_write)
    perform(photos(tmp_path, 20), files=Files(workers=4))
    assert most == 2


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the memory of the process is read from /proc")
def test_memory_is_flat_over_500_photos(tmp_path: Path) -> None:
    jobs = photos(tmp_path, 500, smooth_picture(320, 240), ".jpg")
    sizes = []

    def tell(outcome: Outcome) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        sizes.append(pages * os.sysconf("SC_PAGE_SIZE") / 2**20)

    summary = run(jobs, Spy, Options(), tell, settings=lambda: "settings")
    assert summary.counts == {"restored": 500}
    # A picture has 0.22 MB: if each tenth were kept, this would be 9 MB.
    assert max(sizes[400:]) - max(sizes[:100]) < 6, (max(sizes[:100]), max(sizes[400:]))


# Failures.

FAULTS = {
    "runtime": (RuntimeError("odd\nshape"), "RuntimeError: odd shape"),
    "memory": (MemoryError(), "not enough memory"),
    "value": (ValueError(), "ValueError"),
    "ours": (ImageError("an aligned picture is square"), "an aligned picture is square"),
}


@pytest.mark.parametrize("stage", ["prepare", "network", "finish"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_photo_that_fails_does_not_end_the_run(fault: str, stage: str, tmp_path: Path) -> None:
    error, text = FAULTS[fault]
    if (fault, stage) == ("memory", "network"):
        text = "out of memory on cpu with a single 64 px face"

    def fail_second(at: str, number: int) -> None:
        if (at, number) == (stage, 1):
            raise error

    jobs = photos(tmp_path, 4)
    summary, outcomes = perform(jobs, Spy(fail_second))
    assert [outcome.status for outcome in outcomes] == ["restored", "failed", "restored", "restored"]
    assert outcomes[1].error == f"{jobs[1].source}: {text}"
    assert outcomes[1].record()["output"] is None
    assert summary.exit_code == ExitCode.SOME_FAILED
    assert written(tmp_path) == ["000.png", "002.png", "003.png"]


def test_a_network_that_raises_everywhere(tmp_path: Path) -> None:
    def broken(x: Tensor) -> Tensor:
        raise RuntimeError("no")

    detector: Any = FixedDetector([face_at(60, 50, 64)])
    summary, outcomes = perform(photos(tmp_path, 3), Restorer(broken, config_of(), detector))
    assert [outcome.status for outcome in outcomes] == ["failed"] * 3
    assert summary.exit_code == ExitCode.NOTHING_DONE
    assert written(tmp_path) == []


def test_faces_that_fail_make_a_part_of_a_success(tmp_path: Path) -> None:
    detector: Any = FixedDetector([face_at(60, 50, 64)])
    summary, outcomes = perform(photos(tmp_path, 2), Restorer(never_finite, config_of(), detector))
    assert [outcome.status for outcome in outcomes] == ["partly", "partly"]
    assert summary.exit_code == ExitCode.SOME_FAILED
    assert "2 with faces that failed" in summary.line()


def test_no_face_is_a_success(tmp_path: Path) -> None:
    summary, outcomes = perform(photos(tmp_path, 2), Spy(faces=0))
    assert [outcome.status for outcome in outcomes] == ["no face", "no face"]
    assert summary.exit_code == ExitCode.OK
    assert (tmp_path / "out" / "000.png").read_bytes() == (tmp_path / "000.png").read_bytes()


def test_a_restorer_that_cannot_be_made_ends_the_run(tmp_path: Path) -> None:
    calls = []

    def load() -> Restorer:
        calls.append(1)
        raise CheckpointError("w.safetensors: not weights")

    with pytest.raises(CheckpointError, match=r"w\.safetensors"):
        run(photos(tmp_path, 5), load, Options(), lambda outcome: None)
    assert calls == [1]
    assert written(tmp_path) == []


def test_a_full_disk_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync, count = os.fsync, 0

    def full(descriptor: int) -> None:
        nonlocal count
        count += 1
        if count > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    spy = Spy()
    summary, outcomes = perform(photos(tmp_path, 60), spy, files=Files(workers=1))
    assert [outcome.status for outcome in outcomes][:4] == ["restored"] * 3 + ["failed"]
    assert "003.png: no space left on device" in outcomes[3].error
    assert "no space left on device" in summary.stopped
    assert summary.exit_code == ExitCode.SOME_FAILED
    assert "not tried" in summary.line()
    assert spy.calls < 10
    assert written(tmp_path) == ["000.png", "001.png", "002.png"]


def test_a_folder_that_cannot_be_written_costs_no_work(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    spy = Spy()
    with pytest.raises(ImageError, match="no folder"):
        perform(photos(tmp_path, 3), spy)
    assert spy.calls == 0


@pytest.mark.parametrize("options", [{"quality": 0}, {"quality": 101}, {"max_pixels": 0}, {"workers": 0}])
def test_impossible_options(options: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        Files(**options)  # type: ignore[arg-type]


# Interruptions.


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_and_leaves_whole_files(number: signal.Signals, tmp_path: Path) -> None:
    before = signal.getsignal(number)

    def interrupt(photo: int) -> None:
        if photo == 4:
            signal.raise_signal(number)

    jobs = photos(tmp_path, 50)
    summary, outcomes = perform(jobs, in_network(interrupt))
    assert summary.interrupted
    assert summary.exit_code == ExitCode.INTERRUPTED
    assert [outcome.job for outcome in outcomes] == jobs[:4]
    assert summary.line().startswith("4 restored, 0 no face, 0 failed, 0 skipped, 46 not tried")
    assert written(tmp_path) == ["000.png", "001.png", "002.png", "003.png"]
    assert signal.getsignal(number) is before


def test_a_signal_does_not_wait_for_the_network(tmp_path: Path) -> None:
    begun, never, waited = threading.Event(), threading.Event(), []

    def network(photo: int) -> None:
        begun.set()
        waited.append(never.wait(60))

    def interrupt() -> None:
        assert begun.wait(60)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    summary, outcomes = perform(photos(tmp_path, 3), in_network(network))
    assert (summary.exit_code, outcomes) == (ExitCode.INTERRUPTED, [])
    assert waited == [], "the network was waited for"


def test_a_signal_while_loading(tmp_path: Path) -> None:
    def load() -> Restorer:
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("not interrupted")

    summary = run(photos(tmp_path, 3), load, Options(), lambda outcome: None)
    assert summary.exit_code == ExitCode.INTERRUPTED


def test_a_run_in_another_thread_leaves_signals_alone(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    seen, results = [], []

    def look(photo: int) -> None:
        seen.append(signal.getsignal(signal.SIGINT))

    def work() -> None:
        results.append(perform(photos(tmp_path, 1), in_network(look))[0].exit_code)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert (seen, results) == ([before], [ExitCode.OK])
