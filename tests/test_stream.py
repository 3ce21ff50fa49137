"""Photos that share the batches of a device: what is in them, what comes of them, and whose fault a failure is."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from gpen_core import image_io
from gpen_core.batch import Files, Outcome, Summary, run
from gpen_core.config import PictureFormat
from gpen_core.plan import Job
from gpen_core.restorer import Options, Prepared, Restorer
from gpen_core.types import Canvas, Image
from tests.stubs import FixedDetector, config_of, face_at

PHOTOS, FACES, BATCH = 12, 3, 8


def level_of(photo: int) -> int:
    """The grey that a photo consists of."""
    return 10 + 20 * photo


def photo_of(picture: Canvas) -> int:
    return (int(picture[0, 0, 0]) - 10) // 20


class Device:
    """A stand-in for a GPU: batches end together when it is let go. Pictures become their negatives.

    batches: the photos in each. culprit: a photo with whose crops every batch raises. With `fails` it is the second one
    of the first batch that holds several.
    """

    max_batch = BATCH
    description = "stub"

    def __init__(self, fails: bool = False) -> None:
        self.config: PictureFormat = config_of()
        self.batches: list[list[int]] = []
        self.culprit: int | None = None
        self.fails = fails
        self.go = threading.Event()

    def submit(self, crops: Sequence[Image]) -> Flight:
        photos = [photo_of(crop) for crop in crops]
        self.batches.append(photos)
        if self.fails and self.culprit is None and len(set(photos)) > 1:
            self.culprit = sorted(set(photos))[1]
        return Flight(self, tuple(crops))

    def __call__(self, crops: Sequence[Image]) -> list[Image | None]:
        return self.submit(crops).result()


@dataclass(frozen=True, eq=False)
class Flight:
    device: Device
    crops: tuple[Image, ...]

    def done(self) -> bool:
        return self.device.go.is_set()

    def result(self) -> list[Image | None]:
        assert self.device.go.wait(60), "the stream never filled up"
        if self.device.culprit in [photo_of(crop) for crop in self.crops]:
            raise ValueError("culprit")
        return [np.bitwise_not(crop) for crop in self.crops]


class Watched(Restorer):
    """Lets the device go when so many photos are prepared."""

    def __init__(self, device: Device, photos: int) -> None:
        # Side by side, with a strip above that no crop covers.
        detector: Any = FixedDetector([face_at(50 + 80 * i, 60, 64) for i in range(FACES)])
        super().__init__(device, config_of(), detector)
        self.device = device
        self._left = photos
        self._lock = threading.Lock()

    def prepare(self, image: Canvas, options: Options = Options()) -> Prepared:
        prepared = super().prepare(image, options)
        with self._lock:
            self._left -= 1
            if not self._left:
                self.device.go.set()
        return prepared


def stream(folder: Path, device: Device) -> tuple[Summary, list[Outcome]]:
    """Run all photos; the device's first batches end when all photos but one are prepared."""
    jobs = []
    for photo in range(PHOTOS):
        source = folder / f"{photo}.png"
        assert cv2.imwrite(str(source), np.full((120, 260, 3), level_of(photo), np.uint8))
        jobs.append(Job(source, folder / "out" / source.name, folder / "out"))
    outcomes: list[Outcome] = []
    restorer = Watched(device, PHOTOS - 1)
    summary = run(jobs, lambda: restorer, Options(), outcomes.append, files=Files(workers=2))
    assert [outcome.job for outcome in outcomes] == jobs
    return summary, outcomes


def test_batches_hold_faces_of_several_photos_and_each_gets_its_own_back(tmp_path: Path) -> None:
    device = Device()
    summary, _ = stream(tmp_path, device)
    assert summary.counts == {"restored": PHOTOS}
    assert [photo for batch in device.batches for photo in batch] == [n for n in range(PHOTOS) for _ in range(FACES)]
    # At first no more than two photos are in hand. While the device was busy the others gathered.
    assert device.batches[0] in ([0] * FACES, [0] * FACES + [1] * FACES)
    assert any(len(batch) == BATCH and len(set(batch)) > 1 for batch in device.batches)
    for photo in range(PHOTOS):
        pixels = image_io.read(tmp_path / "out" / f"{photo}.png").pixels
        assert (pixels[:20] == level_of(photo)).all()
        for i in range(FACES):
            assert (pixels[60, 50 + 80 * i] == 255 - level_of(photo)).all()


def test_a_batch_that_raises_fails_only_the_photo_that_is_to_blame(tmp_path: Path) -> None:
    device = Device(fails=True)
    summary, outcomes = stream(tmp_path, device)
    assert device.culprit is not None
    assert [outcome.status for outcome in outcomes] == [
        "failed" if photo == device.culprit else "restored" for photo in range(PHOTOS)
    ]
    assert outcomes[device.culprit].error.endswith(f"{device.culprit}.png: ValueError: culprit")
    assert summary.counts == {"restored": PHOTOS - 1, "failed": 1}


@pytest.mark.parametrize("workers", [1, 4])
def test_a_stream_is_the_photos_one_by_one(workers: int, tmp_path: Path) -> None:
    jobs = []
    for photo in range(PHOTOS):
        source = tmp_path / f"{photo}.png"
        noise = np.random.RandomState(photo).randint(0, 256, (120, 260, 3)).astype(np.uint8)
        assert cv2.imwrite(str(source), noise)
        jobs.append(Job(source, tmp_path / "out" / source.name, tmp_path / "out"))
    device = Device()
    device.go.set()
    restorer = Watched(device, 1)
    run(jobs, lambda: restorer, Options(), lambda outcome: None, files=Files(workers=workers))
    for job in jobs:
        expected = restorer(image_io.read(job.source).pixels).image
        assert np.array_equal(image_io.read(job.target).pixels, expected)
