"""How busy a stream of photos with eight faces keeps the device, from JPEG files to JPEG files.

python -m bench.stream                                        # measure and show
python -m bench.stream -o bench/results/stream.json           # and keep; then: python -m bench.report
python -m bench.stream --short                                # a small network and few photos: does it run?

The network is GPEN-BFR-512 with random weights. Busy is the device from the first to the last kernel of each batch, by
its own events, or on a CPU the network's thread between entering and leaving the network; copies count as idle. The
share is that of the time from the first batch's start to the last one's end. Each configuration is measured with one
photo after the other and as a stream. Where CenterFace is not on this machine, a stand-in that knows where the faces
are takes its place, and the row says so: finding faces then costs nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from torch import Tensor

from bench.measure import machine
from bench.model import published_config, random_generator
from gpen_core import image_io
from gpen_core.batch import Files, run
from gpen_core.config import GPEN_TEMPLATE, GeneratorConfig
from gpen_core.detect import LONG_SIDE, Detector, load_detector
from gpen_core.errors import MissingWeightsError
from gpen_core.plan import Job
from gpen_core.restorer import Options, Restorer
from gpen_core.runtime import Runtime, RuntimeOptions, Step
from gpen_core.types import Face, Image
from gpen_weights import resolve

ROOT = Path(__file__).resolve().parents[1]
PORTRAITS = ROOT / "tests" / "golden" / "portraits_512"
# Two rows of four portraits in a photo of an ordinary shape.
WIDTH, HEIGHT, SIDE, COLUMNS, ROWS = 1280, 960, 320, 4, 2
STAND_IN = "stand-in that knows the faces"
TOP = (HEIGHT - ROWS * SIDE) // 2
SHORT = GeneratorConfig(32, 32, (16, 16, 12, 8), style_dim=16, n_mlp=2)

Row = dict[str, Any]
Span = tuple[Any, Any, int]
"""Start and end, by device events or in seconds, and how many faces."""


@dataclass(frozen=True)
class Case:
    """stream: through `batch.run`, or one photo after the other. photos: how many. short: with a small network.

    detect_size, detector_device: as `load_detector` has them.
    """

    device: str
    compile: bool
    batch: int
    stream: bool
    photos: int
    detect_size: int = LONG_SIDE
    detector_device: str = "cpu"
    short: bool = False


@dataclass(frozen=True)
class Knowing:
    """Stands in for a detector: the faces are where the portraits were put."""

    family: str = "stand-in"

    def __call__(self, image: Image) -> list[Face]:
        return [face_in(x, y) for x, y in corners()]


def corners() -> list[tuple[int, int]]:
    """Left upper corners of the portraits in a photo."""
    return [(SIDE * column, TOP + SIDE * row) for row in range(ROWS) for column in range(COLUMNS)]


def face_in(x: int, y: int) -> Face:
    """The face of a portrait that lies there."""
    landmarks = np.array(GPEN_TEMPLATE, np.float64) * SIDE + [x, y]
    low, high = landmarks.min(0) - SIDE / 6, landmarks.max(0) + SIDE / 10
    return Face(np.concatenate([low, high]), landmarks, 1.0)


def make_photos(folder: Path, count: int) -> list[Job]:
    """JPEG files, each with the portraits in another order, and where their results go."""
    portraits = [np.asarray(cv2.imread(str(path)), np.uint8) for path in sorted(PORTRAITS.glob("*.jpg"))]
    tiles = [cv2.resize(portrait, (SIDE, SIDE), interpolation=cv2.INTER_AREA) for portrait in portraits]
    tiles += [tile[:, ::-1] for tile in tiles]
    jobs = []
    for number in range(count):
        order = np.random.RandomState(number).permutation(len(tiles))
        photo = np.full((HEIGHT, WIDTH, 3), 96, np.uint8)
        for (x, y), index in zip(corners(), order, strict=False):
            photo[y : y + SIDE, x : x + SIDE] = tiles[index]
        source = folder / f"{number:04}.jpg"
        assert cv2.imwrite(str(source), photo, [cv2.IMWRITE_JPEG_QUALITY, 90])
        jobs.append(Job(source, folder / "out" / source.name, folder / "out"))
    return jobs


def find_detector(case: Case) -> Detector:
    if case.short:
        return Knowing()
    try:
        return load_detector(resolve("centerface"), long_side=case.detect_size, device=case.detector_device)
    except MissingWeightsError:
        return Knowing()


def timed(step: Step, device: torch.device, spans: list[Span]) -> Step:
    """The step, with a span added for each call."""

    def on_gpu(pixels: Tensor) -> tuple[Tensor, Tensor]:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        result = step(pixels)
        last.record()
        spans.append((first, last, len(pixels)))
        return result

    def on_cpu(pixels: Tensor) -> tuple[Tensor, Tensor]:
        first = time.perf_counter()
        result = step(pixels)
        spans.append((first, time.perf_counter(), len(pixels)))
        return result

    return on_gpu if device.type == "cuda" else on_cpu


def seconds_between(start: Any, end: Any) -> float:
    return float(end - start if isinstance(start, float) else start.elapsed_time(end) / 1000)


def busy_share(spans: Sequence[Span]) -> float:
    """Of the time from the first start to the last end. Spans follow one another."""
    return sum(seconds_between(start, end) for start, end, _ in spans) / seconds_between(spans[0][0], spans[-1][1])


def measure(case: Case) -> Row:
    """The row of a case."""
    config = SHORT if case.short else published_config(512)
    options = RuntimeOptions(case.device, compile=case.compile, max_batch=case.batch)
    runtime = Runtime(random_generator(config), config, options)
    runtime.warm_up()
    restorer = Restorer(runtime, config, find_detector(case))
    with tempfile.TemporaryDirectory() as scratch:
        jobs = make_photos(Path(scratch), case.photos)
        # What is only done once: code that is loaded, memory that is taken.
        one_by_one(restorer, jobs[:1])
        spans: list[Span] = []
        runtime._run = timed(runtime._run, runtime.device, spans)
        started = time.perf_counter()
        faces = (as_stream if case.stream else one_by_one)(restorer, jobs)
        seconds = time.perf_counter() - started
    if runtime.device.type == "cuda":
        torch.cuda.synchronize()
    restored = sum(count for _, _, count in spans)
    working = sum(seconds_between(start, end) for start, end, _ in spans)
    assert restorer.detector is not None
    known = isinstance(restorer.detector, Knowing)
    return {
        "case": asdict(case),
        "title": "as a stream" if case.stream else "one photo after the other",
        "network": runtime.description,
        "detector": STAND_IN if known else f"centerface on {case.detector_device}, {case.detect_size} px",
        "photo": f"{WIDTH} x {HEIGHT} JPEG",
        "faces": faces,
        "seconds": round(seconds, 3),
        "photos_per_s": round(case.photos / seconds, 2),
        "busy_share": round(busy_share(spans), 4),
        "faces_per_batch": round(restored / len(spans), 2),
        "network_ms_per_face": round(1000 * working / restored, 3),
        "machine": {**machine(), "cores": str(os.cpu_count())},
    }


def as_stream(restorer: Restorer, jobs: Sequence[Job]) -> int:
    """How many faces were restored."""
    faces = []
    run(jobs, lambda: restorer, Options(), lambda outcome: faces.append(len(outcome.faces)), files=Files())
    return sum(faces)


def one_by_one(restorer: Restorer, jobs: Sequence[Job]) -> int:
    """How many faces were restored."""
    faces = 0
    for job in jobs:
        photo = image_io.read(job.source)
        restored = restorer(photo.pixels)
        job.target.parent.mkdir(exist_ok=True)
        image_io.write(job.target, photo.with_pixels(restored.image))
        faces += len(restored.faces)
    return faces


def cases(device: str, photos: int | None, short: bool, detect_size: int, detector_device: str) -> list[Case]:
    """What is measured on a device: on a CPU not the compiled network, because the compiler would take longer."""
    gpu = device.startswith("cuda")
    count = photos or (8 if short else 400 if gpu else 4)
    ways = ((True, 16), (True, 8), (False, 8)) if gpu and not short else ((False, 8 if gpu else 1),)
    return [
        Case(device, compile, batch, stream, count, detect_size, detector_device, short)
        for compile, batch in ways
        for stream in (False, True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--detect-size", type=int, default=LONG_SIDE)
    parser.add_argument("--detector-device", default="cpu")
    parser.add_argument("--photos", type=int)
    parser.add_argument("--short", action="store_true")
    given = parser.parse_args()
    rows = []
    for case in cases(given.device, given.photos, given.short, given.detect_size, given.detector_device):
        rows.append(measure(case))
        print(json.dumps(rows[-1]), flush=True)
        if given.output is not None:
            given.output.write_text(json.dumps({"suite": "stream", "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
