"""The face detectors compared: time, and faces found in group pictures made of portraits.

python -m bench.detectors                      # measure and show
python -m bench.detectors --write              # also into bench/results/detectors.json and docs/detectors.md
python -m bench.detectors --portraits FOLDER   # other portraits, one face each

RetinaFace runs with stand-in weights where the converted file is not on this machine: then its time counts, and what
it finds does not. A detector that is not here at all is left out, and the table says so.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from gpen_convert import retinaface
from gpen_core.detect import Detector, load_detector
from gpen_core.errors import MissingWeightsError
from gpen_core.types import Face, Image
from gpen_weights import resolve
from tests.stand_in import PROVENANCE, fill_state, golden_shapes

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results" / "detectors.json"
PAGE = ROOT / "docs" / "detectors.md"
PORTRAITS = ROOT / "tests" / "golden" / "portraits_512"
START, END = "<!-- detectors -->", "<!-- /detectors -->"
NAMES = ("RetinaFace-R50", "centerface", "yunet")
# Columns and rows of portraits: 2, 6, 12, 30 and 90 faces.
GRIDS = ((2, 1), (3, 2), (4, 3), (6, 5), (10, 9))
SIZES = (640, 960, 1280, 1600)
WIDTH = 3600
REPEATS = 3

Row = dict[str, Any]


@dataclass(frozen=True)
class Group:
    """A picture of portraits side by side, and the bounds x0 y0 x1 y1 of each."""

    picture: Image
    tiles: tuple[tuple[int, int, int, int], ...]

    def found(self, faces: Sequence[Face]) -> tuple[int, int]:
        """In how many portraits there is a face, and how many faces there are beside those."""
        middles = [(face.box[:2] + face.box[2:]) / 2 for face in faces]
        hits = sum(any(x0 <= x < x1 and y0 <= y < y1 for x, y in middles) for x0, y0, x1, y1 in self.tiles)
        return hits, len(faces) - hits


def groups(folder: Path) -> Iterator[Group]:
    """One picture for each grid, every other portrait mirrored, as a JPEG of ordinary quality."""
    portraits = [np.asarray(cv2.imread(str(path), cv2.IMREAD_COLOR), np.uint8) for path in sorted(folder.glob("*.jpg"))]
    if not portraits:
        raise SystemExit(f"{folder}: no portraits (*.jpg) there")
    for columns, rows in GRIDS:
        side = WIDTH // columns
        canvas = np.zeros((rows * side, columns * side, 3), np.uint8)
        tiles = []
        for index in range(columns * rows):
            row, column = divmod(index, columns)
            portrait = portraits[(index + row) % len(portraits)]
            how = cv2.INTER_AREA if side < portrait.shape[0] else cv2.INTER_CUBIC
            tile = cv2.resize(portrait, (side, side), interpolation=how)
            x, y = column * side, row * side
            canvas[y : y + side, x : x + side] = tile[:, ::-1] if index % 2 else tile
            tiles.append((x, y, x + side, y + side))
        blurred = cv2.GaussianBlur(canvas, (0, 0), 1.0)
        _, encoded = cv2.imencode(".jpg", blurred, [cv2.IMWRITE_JPEG_QUALITY, 75])
        decoded = np.asarray(cv2.imdecode(encoded, cv2.IMREAD_COLOR), np.uint8)
        yield Group(np.ascontiguousarray(decoded[..., ::-1]), tuple(tiles))


def stand_in(folder: Path) -> Path:
    path = folder / "RetinaFace-R50.onnx"
    retinaface.convert(fill_state(golden_shapes("retinaface")), path, PROVENANCE)
    return path


def seconds(detector: Detector, picture: Image) -> tuple[float, float]:
    """Least wall and processor time of a few runs. The latter, over all threads, is less disturbed by others."""
    wall, processor = [], []
    for _ in range(REPEATS):
        started, used = time.perf_counter(), time.process_time()
        detector(picture)
        wall.append(time.perf_counter() - started)
        processor.append(time.process_time() - used)
    return min(wall), min(processor)


def measure(name: str, path: Path, trained: bool, pictures: Sequence[Group]) -> Iterator[Row]:
    for size in SIZES:
        detector = load_detector(path, long_side=size)
        # Which picture makes no difference to a network, only to what follows: the one with 30 faces.
        wall, processor = seconds(detector, pictures[3].picture)
        row: Row = {"detector": name, "size": size, "wall_ms": round(1000 * wall), "cpu_ms": round(1000 * processor)}
        if trained:
            counts = [group.found(detector(group.picture)) for group in pictures]
            row["found"] = {str(len(group.tiles)): hits for group, (hits, _) in zip(pictures, counts, strict=True)}
            row["extra"] = sum(extra for _, extra in counts)
        print(row)
        yield row


def run(folder: Path, about: str) -> dict[str, Any]:
    pictures = list(groups(folder))
    rows: list[Row] = []
    absent: list[str] = []
    stand_ins: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in NAMES:
            trained = True
            try:
                path = resolve(name)
            except MissingWeightsError:
                if name != "RetinaFace-R50":
                    absent.append(name)
                    continue
                path, trained = stand_in(Path(scratch)), False
                stand_ins.append(name)
            rows += measure(name, path, trained, pictures)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "machine": f"{platform.machine()}, {cores} cores, load {os.getloadavg()[0]:.0f} at the end",
        "portraits": about,
        "rows": rows,
        "absent": absent,
        "stand_ins": stand_ins,
    }


def table(results: dict[str, Any]) -> str:
    """The results for people, in Markdown."""
    counts = [str(columns * rows) for columns, rows in GRIDS]
    lines = [
        "| detector | longer side px | CPU ms | " + " | ".join(f"of {count}" for count in counts) + " | others |",
        "|---|---|---|" + "---|" * (len(counts) + 1),
    ]
    for row in results["rows"]:
        found = row.get("found")
        cells = [str(found[count]) for count in counts] + [str(row["extra"])] if found else ["-"] * (len(counts) + 1)
        lines.append(f"| {row['detector']} | {row['size']} | {row['cpu_ms']} | " + " | ".join(cells) + " |")
    lines += ["", f"Faces found in group pictures of {', '.join(counts)}, and what was taken for a face besides."]
    lines.append(f"Portraits: {results['portraits']}. Machine: {results['machine']}.")
    for name in results["stand_ins"]:
        lines.append(f"{name}: the published weights were not there, so only the time counts (stand-in weights).")
    for name in results["absent"]:
        lines.append(f"{name}: not measured, the published file was not there.")
    return "\n".join(lines)


def rendered(page: str, results: dict[str, Any]) -> str:
    """The page with the table between its markers renewed."""
    before, rest = page.split(START)
    after = rest.split(END)[1]
    return f"{before}{START}\n{table(results)}\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--portraits", type=Path, default=PORTRAITS)
    parser.add_argument("--about", help="what the portraits are")
    options = parser.parse_args()
    ours = "the six in tests/golden/portraits_512" if options.portraits == PORTRAITS else options.portraits.name
    results = run(options.portraits, options.about or ours)
    print(table(results))
    if options.write:
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        PAGE.write_text(rendered(PAGE.read_text(), results))


if __name__ == "__main__":
    main()
