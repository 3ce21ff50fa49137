"""Crop geometry against the original's matrices, and the aliasing that OpenCV hides."""

from __future__ import annotations

import json
from pathlib import Path

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpen_core.align import compose, crop, crop_matrix, invert, region, scale_of, scaling, similarity, whole_matrix
from gpen_core.config import GPEN_TEMPLATE
from gpen_core.types import Matrix, Points

GOLDEN = json.loads((Path(__file__).parent / "golden" / "alignment.json").read_text())


def apply(matrix: Matrix, points: Points) -> Points:
    return np.asarray(points @ matrix[:, :2].T + matrix[:, 2])


def test_template() -> None:
    assert np.abs(np.array(GPEN_TEMPLATE) * 512 - np.array(GOLDEN["template_512"])).max() < 1e-6


def test_there_are_24_alignments() -> None:
    assert len(GOLDEN["alignment"]) == 24


@pytest.mark.parametrize("case", GOLDEN["alignment"])
def test_alignment_equals_the_original(case: dict[str, list[list[float]]]) -> None:
    landmarks, forward, inverse = (np.array(case[name]) for name in ("landmarks", "forward", "inverse"))
    matrix = crop_matrix(landmarks, GPEN_TEMPLATE, int(case["size"]))  # type: ignore[call-overload]
    expected = apply(forward, landmarks)
    assert np.abs(apply(matrix, landmarks) - expected).max() < 0.01
    assert np.abs(apply(invert(matrix), expected) - apply(inverse, expected)).max() < 0.01


@given(st.floats(0.05, 20), st.floats(-np.pi, np.pi), st.floats(-500, 500), st.floats(-500, 500))
def test_a_similarity_is_recovered(scale: float, angle: float, x: float, y: float) -> None:
    c, s = scale * np.cos(angle), scale * np.sin(angle)
    true = np.array([[c, -s, x], [s, c, y]])
    points = np.array([[3.0, 1], [40, 2], [21, 30], [9, 50], [33, 47]])
    found = similarity(points, apply(true, points))
    assert np.allclose(found, true, atol=1e-6)
    assert scale_of(found) == pytest.approx(scale, rel=1e-6)


@pytest.mark.parametrize("points", [np.full((5, 2), 7.0), np.full((5, 2), np.nan)])
def test_degenerate_points(points: Points) -> None:
    with pytest.raises(ValueError, match="coincide"):
        similarity(points, np.array(GPEN_TEMPLATE))


def gradient(width: int, height: int) -> NDArray[np.uint8]:
    """Red tells x and green tells y, up to 255."""
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    return np.asarray(np.stack([x % 256, y % 256, np.full_like(x, 9)], 2), np.uint8)


def test_crop_of_whole_pixels_is_exact() -> None:
    image = gradient(200, 150)
    matrix = np.array([[1.0, 0, -30], [0, 1.0, -20]])
    assert np.array_equal(crop(image, matrix, 64), image[20:84, 30:94])


def test_crop_keeps_positions_when_it_shrinks() -> None:
    image = gradient(240, 240)
    # Crop pixel (i, j) averages 4 x 4 pixels around 4 i + 1.5.
    matrix = compose(scaling(0.25, 0.25), np.array([[1.0, 0, -40], [0, 1.0, -40]]))
    small = crop(image, matrix, 32)
    assert np.abs(small[..., 0] - (40 + 4 * np.arange(32) + 1.5)[None, :]).max() <= 1
    assert np.abs(small[..., 1] - (40 + 4 * np.arange(32) + 1.5)[:, None]).max() <= 1


def test_crop_does_not_alias() -> None:
    stripes = np.zeros((1024, 1024, 3), np.uint8)
    stripes[:, ::2] = 255
    angle = np.deg2rad(10)
    matrix = 0.11 * np.array([[np.cos(angle), -np.sin(angle), 0], [np.sin(angle), np.cos(angle), 0]])
    small = crop(stripes, compose(np.array([[1.0, 0, 20], [0, 1.0, 0]]), matrix), 64)
    direct = cv2.warpAffine(
        stripes, compose(np.array([[1.0, 0, 20], [0, 1.0, 0]]), matrix), (64, 64), flags=cv2.INTER_AREA
    )
    assert np.abs(small[10:50, 20:40].astype(int) - 127).max() < 30
    # What this guards against: OpenCV's area flag is silently bilinear here.
    assert np.abs(direct[10:50, 20:40].astype(int) - 127).max() > 100


def test_crop_beyond_the_border_mirrors() -> None:
    image = gradient(100, 100)
    cut = crop(image, np.array([[1.0, 0, 10], [0, 1.0, 0]]), 64)
    assert np.array_equal(cut[:, 10:], image[:64, :54])
    assert np.array_equal(cut[:, 9], image[:64, 1])
    assert np.array_equal(cut[:, 5], image[:64, 5])


@pytest.mark.parametrize("shape", [(1, 1), (1, 900), (3000, 2)])
def test_tiny_and_thin_pictures(shape: tuple[int, int]) -> None:
    image = np.full((*shape, 3), 77, np.uint8)
    landmarks = np.array(GPEN_TEMPLATE) * float(max(shape))
    for matrix in (crop_matrix(landmarks, GPEN_TEMPLATE, 64), whole_matrix(shape[1], shape[0], 64)):
        assert np.array_equal(crop(image, matrix, 64), np.full((64, 64, 3), 77))


def test_crop_wholly_outside() -> None:
    image = gradient(50, 50)
    assert crop(image, np.array([[1.0, 0, 5000], [0, 1.0, 5000]]), 32).shape == (32, 32, 3)


def test_region() -> None:
    shifted = np.array([[2.0, 0, -20], [0, 2.0, -40]])
    assert region(shifted, 64, 1000, 1000) == (9, 19, 43, 53)
    assert region(shifted, 64, 20, 30) == (9, 19, 20, 30)
    x0, y0, x1, y1 = region(np.array([[1.0, 0, 500], [0, 1.0, 0]]), 64, 100, 100)
    assert x0 >= x1 or y0 >= y1


def test_inverse_maps_undo_maps() -> None:
    matrix = similarity(np.array([[0.0, 0], [9, 2], [4, 7]]), np.array([[100.0, 50], [130, 90], [80, 95]]))
    points = np.array([[0.0, 0], [511, 3], [-40, 1e4]])
    assert apply(invert(matrix), apply(matrix, points)) == pytest.approx(points, abs=1e-9)
    stretched = whole_matrix(640, 31, 512)
    assert compose(invert(stretched), stretched) == pytest.approx(np.eye(3)[:2], abs=1e-12)
    with pytest.raises(np.linalg.LinAlgError):
        invert(np.array([[1.0, 2, 0], [2, 4, 0]]))
