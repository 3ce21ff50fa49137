"""Colour, sharpness and grain."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

from gpen_core import blend
from gpen_core.blend import cover, feathered_mask, paste
from gpen_core.finish import match_color, sharpen, take_grain
from tests.stubs import smooth_picture

PICTURE = smooth_picture(128, 128)
NOISE = np.random.RandomState(0).normal(0, 6, (300, 200, 3))
NOISY = np.clip(smooth_picture(200, 300) * 0.6 + 50 + NOISE, 0, 255).astype(np.uint8)


@pytest.mark.parametrize("size", [64, 128, 256, 32])
def test_a_cast_is_undone(size: int) -> None:
    restored = cv2.resize(PICTURE, (size, size), interpolation=cv2.INTER_AREA).astype(np.float32)
    cast = restored + np.array([25, -10, 5], np.float32)
    assert np.abs(match_color(cast, PICTURE) - restored).max() < 4
    assert np.abs((match_color(cast, PICTURE) - restored).mean((0, 1))).max() < 0.3


def test_detail_stays_the_restored_one() -> None:
    detail = np.random.RandomState(0).normal(0, 20, PICTURE.shape).astype(np.float32)
    changed = match_color(PICTURE + detail, PICTURE) - (PICTURE + detail)
    assert changed.std() < 1.5
    assert np.abs(np.diff(changed, axis=0)).max() < 0.5


def test_matching_itself_changes_nothing() -> None:
    assert np.abs(match_color(PICTURE.astype(np.float32), PICTURE) - PICTURE).max() < 1e-3


def test_sharpening_raises_edges_alone() -> None:
    step = np.full((512, 512, 3), 60, np.float32)
    step[:, 256:] = 180
    assert np.array_equal(sharpen(step, 0), step)
    sharp = sharpen(step, 1)
    assert np.abs(sharp[:, :240] - 60).max() < 1e-3
    assert sharp[100, 255].max() < 55
    assert sharp[100, 256].min() > 185
    assert np.allclose(sharpen(step, 2) - step, 2 * (sharp - step), atol=1e-3)


def test_sharpening_keeps_colours_together() -> None:
    red = np.zeros((64, 64, 3), np.float32)
    red[:, 32:, 0] = 200
    change = sharpen(red, 1) - red
    assert np.allclose(change[..., 0], change[..., 1], atol=1e-4)
    assert np.abs(change).max() > 5


def test_grain_is_the_noise() -> None:
    found = take_grain(NOISY, 1.0).rows(0, 300)
    assert found.std() == pytest.approx(NOISE.std(), rel=0.15)
    assert np.corrcoef(found.ravel(), NOISE.ravel())[0, 1] > 0.9
    assert np.allclose(take_grain(NOISY, 0.5).rows(0, 300), found / 2)


def test_edges_are_no_grain() -> None:
    step = np.full((200, 200, 3), 30, np.uint8)
    step[:, 100:] = 220
    assert np.abs(take_grain(step, 1.0).rows(0, 200)).max() == 0
    noisy = np.clip(step + NOISE[:200], 0, 255).astype(np.uint8)
    assert np.abs(take_grain(noisy, 1.0).rows(0, 200)).max() < 3.5 * NOISE.std()


@pytest.mark.parametrize("scale", [1, 2, 4])
def test_grain_in_strips(scale: float) -> None:
    grain = take_grain(NOISY, 1.0, scale)
    strips = [grain.rows(top, min(top + 37, 300)) for top in range(0, 300, 37)]
    assert np.allclose(np.concatenate(strips), grain.rows(0, 300), atol=1e-4)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_pasted_faces_get_the_grain(dtype: type, monkeypatch: pytest.MonkeyPatch) -> None:
    levels = 257 if dtype == np.uint16 else 1
    canvas = NOISY.astype(dtype) * dtype(levels)
    flat = np.full((128, 128, 3), 120, np.uint8)
    matrix = np.array([[1.0, 0, -36], [0, 1.0, -80]])
    smooth, grainy, strips = canvas.copy(), canvas.copy(), canvas.copy()
    paste(smooth, flat, matrix, 128, feathered_mask(128))
    paste(grainy, flat, matrix, 128, feathered_mask(128), grain=1.0)
    middle = (slice(120, 170), slice(80, 120))
    assert smooth[middle].std() < levels
    assert grainy[middle].std() == pytest.approx(NOISE.std() * levels, rel=0.2)
    assert grainy[middle].mean() == pytest.approx(120 * levels, rel=0.01)
    outside = np.ones(canvas.shape[:2], bool)
    outside[80:208, 36:164] = False
    assert np.array_equal(grainy[outside], canvas[outside])
    monkeypatch.setattr(blend, "STRIP_PIXELS", 1000)
    paste(strips, flat, matrix, 128, feathered_mask(128), grain=1.0)
    assert np.array_equal(strips, grainy)


def test_covering() -> None:
    canvas = NOISY.copy()
    other = np.full_like(canvas, 99)
    cover(canvas, other, 0.0)
    assert np.array_equal(canvas, NOISY)
    cover(canvas, other, 0.5)
    assert np.abs(canvas - (NOISY + (99 - NOISY.astype(float)) / 2)).max() <= 0.5
    cover(canvas, other)
    assert np.array_equal(canvas, other)
