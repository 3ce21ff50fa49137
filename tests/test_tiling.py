"""Tiles that cover everything and can't be told from the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import cv2
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpen_core.tiling import starts, tiled, weights
from gpen_core.types import Image
from tests.stubs import smooth_picture

Run = Callable[[Sequence[Image]], list[Image | None]]
NOISE = np.random.RandomState(0).randint(0, 256, (300, 417, 3)).astype(np.uint8)


def psnr(one: NDArray[np.generic], other: NDArray[np.generic]) -> float:
    error = np.mean((one.astype(float) - other.astype(float)) ** 2)
    return float("inf") if error == 0 else float(10 * np.log10(255**2 / error))


def same(pictures: Sequence[Image]) -> list[Image | None]:
    return list(pictures)


axes = st.tuples(st.integers(1, 700), st.integers(1, 128)).flatmap(
    lambda pair: st.tuples(st.just(pair[0]), st.just(pair[1]), st.integers(1, pair[1]))
)


@given(axes)
@settings(max_examples=200)
def test_every_pixel_counts(axis: tuple[int, int, int]) -> None:
    length, tile, _ = axis
    shares = weights(*axis)
    assert shares.shape == (len(starts(*axis)), length)
    assert (shares >= 0).all()
    assert np.allclose(shares.sum(axis=0), 1, atol=1e-5)
    begins = np.array(starts(*axis))
    at = np.arange(length)
    covering = ((at >= begins[:, None]) & (at < begins[:, None] + tile)).sum(axis=0)
    assert covering.min() >= 1


def test_each_pixel_lies_in_the_middle_of_a_tile() -> None:
    begins = np.array(starts(1000, 64, 32))
    from_middle = np.abs(np.arange(1000) - begins[:, None] - 31.5).min(axis=0)
    assert from_middle.max() <= 16


@pytest.mark.parametrize("size", [(300, 417), (64, 64), (64, 65), (20, 300), (1, 1), (1, 200), (500, 3), (128, 32)])
@pytest.mark.parametrize(("tile", "stride"), [(64, 32), (64, 64), (64, 48), (64, 17), (63, 31)])
def test_tiles_of_nothing_done_are_the_picture(size: tuple[int, int], tile: int, stride: int) -> None:
    picture = np.random.RandomState(1).randint(0, 256, (*size, 3)).astype(np.uint8)
    joined = tiled(picture, tile, stride, same)
    assert joined is not None
    assert np.array_equal(joined, picture)


def test_a_picture_of_the_tile_s_size_is_run_once() -> None:
    seen: list[Image] = []

    def run(pictures: Sequence[Image]) -> list[Image | None]:
        seen.extend(pictures)
        return list(pictures)

    picture = NOISE[:64, :64].copy()
    tiled(picture, 64, 32, run)
    assert len(seen) == 1
    assert np.array_equal(seen[0], picture)


def test_beyond_the_border_tiles_see_the_picture_mirrored() -> None:
    seen: list[Image] = []

    def run(pictures: Sequence[Image]) -> list[Image | None]:
        seen.extend(pictures)
        return list(pictures)

    tiled(NOISE, 64, 32, run)
    assert all(picture.shape == (64, 64, 3) and picture.flags.c_contiguous for picture in seen)
    assert np.array_equal(seen[0], np.pad(NOISE, ((16, 0), (16, 0), (0, 0)), "reflect")[:64, :64])
    assert np.array_equal(seen[-1][-20:, -20:], np.pad(NOISE, ((0, 64), (0, 64), (0, 0)), "reflect")[316:336, 444:464])


def convolve(pictures: Sequence[Image]) -> list[Image | None]:
    """Three zero-padded convolutions with rectifiers between them, as networks have: wrong within 6 px of a border."""
    torch.manual_seed(0)
    x = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float() / 255
    with torch.inference_mode():
        y = F.relu(F.conv2d(x, torch.randn(8, 3, 5, 5) * 0.2, padding=2))
        y = F.relu(F.conv2d(y, torch.randn(8, 8, 5, 5) * 0.1, padding=2))
        y = torch.sigmoid(F.conv2d(y, torch.randn(3, 8, 5, 5) * 0.2, padding=2))
    return list((y * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy())


def smear(pictures: Sequence[Image]) -> list[Image | None]:
    """A local operator whose reach, 3 sigma, is 9 px."""
    return [np.asarray(cv2.GaussianBlur(picture, (19, 19), 3)) for picture in pictures]


def drift(pictures: Sequence[Image]) -> list[Image | None]:
    """Pulls pixels towards their tile's mean, as networks that see the whole tile shift tones."""
    return [
        np.clip(np.rint(p + 0.1 * (p.mean((0, 1)) - p.astype(np.float32))), 0, 255).astype(np.uint8) for p in pictures
    ]


@pytest.mark.parametrize("picture", [NOISE, smooth_picture(417, 300)], ids=["noise", "smooth"])
@pytest.mark.parametrize("network", [convolve, smear])
@pytest.mark.parametrize(("tile", "stride"), [(128, 64), (64, 32), (128, 96)])
def test_seams_against_the_untiled_result(network: Run, picture: Image, tile: int, stride: int) -> None:
    whole, joined = network([picture])[0], tiled(picture, tile, stride, network)
    assert whole is not None
    assert joined is not None
    # At the picture's own border the tiles see it mirrored, the whole sees what the network pads with.
    inside = (slice(10, -10), slice(10, -10))
    assert psnr(joined[inside], whole[inside]) > 42
    begins = np.array(starts(417, tile, stride))
    seams = np.union1d(begins, begins + tile)
    seams = seams[(seams > 10) & (seams < 407)]
    assert psnr(joined[10:-10, seams], whole[10:-10, seams]) > 42


def test_tones_change_slowly_where_tiles_disagree() -> None:
    picture = smooth_picture(417, 300)
    joined = tiled(picture, 128, 64, drift)
    assert joined is not None
    step = np.abs(np.diff(joined.astype(int), axis=1)).max()
    assert step <= np.abs(np.diff(picture.astype(int), axis=1)).max() + 1


def test_a_tile_that_fails_fails_the_picture() -> None:
    calls = []

    def run(pictures: Sequence[Image]) -> list[Image | None]:
        calls.append(len(pictures))
        return [None if len(calls) == 3 and i == 1 else picture for i, picture in enumerate(pictures)]

    assert tiled(NOISE, 64, 32, run) is None
