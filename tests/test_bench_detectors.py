"""The page on detectors says what was measured."""

from __future__ import annotations

import json

import numpy as np
import pytest

from bench.detectors import GRIDS, PAGE, RESULTS, SIZES, Group, rendered, table
from gpen_core.types import Face


def test_the_page_shows_the_results() -> None:
    results = json.loads(RESULTS.read_text())
    page = PAGE.read_text()
    assert rendered(page, results) == page
    changed = json.loads(RESULTS.read_text())
    changed["rows"][0]["cpu_ms"] += 1
    assert rendered(page, changed) != page


def test_results_cover_every_size_and_say_what_is_missing() -> None:
    results = json.loads(RESULTS.read_text())
    measured = {row["detector"] for row in results["rows"]}
    assert measured | set(results["absent"]) == {"RetinaFace-R50", "centerface", "yunet"}
    assert {(row["detector"], row["size"]) for row in results["rows"]} == {(n, s) for n in measured for s in SIZES}
    for row in results["rows"]:
        assert ("found" in row) == (row["detector"] not in results["stand_ins"])
        assert list(row.get("found", {})) in ([], [str(columns * rows) for columns, rows in GRIDS])
    text = table(results)
    assert all(f"{name}: " in text for name in (*results["absent"], *results["stand_ins"]))


def face(x: float, y: float) -> Face:
    return Face(np.array([x - 5, y - 5, x + 5, y + 5]), np.zeros((5, 2)), 0.9)


@pytest.mark.parametrize(
    ("faces", "expected"),
    [([], (0, 0)), ([face(5, 5)], (1, 0)), ([face(5, 5), face(6, 6)], (1, 1)), ([face(15, 5), face(5, 5)], (2, 0))],
)
def test_faces_are_counted_once_for_each_portrait(faces: list[Face], expected: tuple[int, int]) -> None:
    group = Group(np.zeros((10, 20, 3), np.uint8), ((0, 0, 10, 10), (10, 0, 20, 10)))
    assert group.found(faces) == expected
