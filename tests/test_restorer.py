"""The whole pipeline with networks that do something known: seams, shifts, colour order and rounding show here."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numpy.typing import NDArray
from torch import Tensor

from gpen_core.align import crop_matrix, invert
from gpen_core.blend import feathered_mask
from gpen_core.errors import GpenError, ImageError, UsageError
from gpen_core.restorer import Options, Restorer, eight_bit
from gpen_core.types import Face
from tests.stubs import (
    FixedDetector,
    config_of,
    doubled,
    face_at,
    identity,
    never_finite,
    smooth_picture,
    without_channel_0,
)

FACES = {
    "same size": face_at(150, 120, 64),
    "enlarged": face_at(150.3, 120.7, 31),
    "shrunk": face_at(160, 118, 200),
    "turned": face_at(150, 120, 90, degrees=33),
    "upside down": face_at(150, 120, 90, degrees=180),
    "at the left border": face_at(4, 120, 90),
    "at the corner": face_at(299, 239, 120, degrees=-20),
    "larger than the picture": face_at(150, 120, 700),
    "outside": face_at(900, 900, 50),
}
PICTURE = smooth_picture(300, 240)


def restorer(
    network: Callable[[Tensor], Tensor], *faces: Face, size: int = 64, output_size: int | None = None
) -> Restorer:
    return Restorer(network, config_of(size, output_size), FixedDetector(faces))


def covered(face: Face, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """Pixels whose centre lies in the square that the face's crop covers."""
    matrix = crop_matrix(face.landmarks, config_of().template, 64)
    x, y = np.meshgrid(np.arange(shape[1]), np.arange(shape[0]))
    at = np.stack([x, y, np.ones_like(x)], 2) @ matrix.T
    return np.asarray(((at > -0.5) & (at < 63.5)).all(2))


def difference(one: NDArray[np.generic], other: NDArray[np.generic]) -> NDArray[np.int64]:
    return np.asarray(np.abs(one.astype(np.int64) - other.astype(np.int64)))


@pytest.mark.parametrize("output_size", [256, 512])
@pytest.mark.parametrize("where", FACES)
def test_identity_generator_returns_its_input(where: str, output_size: int) -> None:
    face = FACES[where]
    network = identity if output_size == 256 else doubled
    result = restorer(network, face, size=256, output_size=output_size)(PICTURE)
    changed = difference(result.image, PICTURE)
    assert changed.max() <= 2
    assert changed[~covered(face, PICTURE.shape)].max(initial=0) == 0
    assert [f.status for f in result.faces] == ["restored"]


@pytest.mark.parametrize("where", ["same size", "turned", "at the corner"])
def test_noise_outside_the_mask_is_untouched(where: str) -> None:
    noise = np.random.RandomState(0).randint(0, 256, PICTURE.shape).astype(np.uint8)
    face = FACES[where]
    result = restorer(without_channel_0, face)(noise)
    outside = ~covered(face, noise.shape)
    assert np.array_equal(result.image[outside], noise[outside])
    assert not np.array_equal(result.image, noise)


def test_zeroed_channel_0_removes_red_alone() -> None:
    face = FACES["same size"]
    result = restorer(without_channel_0, face)(PICTURE)
    assert difference(result.image[..., 1:], PICTURE[..., 1:]).max() <= 1
    # The crop is copied pixel by pixel here, so the mask is all there is between the two.
    x, y = np.rint(invert(crop_matrix(face.landmarks, config_of().template, 64))[:, 2]).astype(int)
    red = PICTURE[y : y + 64, x : x + 64, 0]
    assert difference(result.image[y : y + 64, x : x + 64, 0], np.rint(red * (1 - feathered_mask(64)))).max() <= 1
    assert result.image[y + 32, x + 32, 0] == 0


def test_mask_has_soft_edges_and_ends() -> None:
    mask = feathered_mask(512)
    assert mask[256, 256] == 1
    assert mask[256, 26] == pytest.approx(0.5, abs=0.05)
    assert (mask[0] == 0).all()
    assert (mask[:, -1] == 0).all()
    assert np.array_equal(mask, mask.T)
    assert np.allclose(mask, mask[::-1])
    assert (np.diff(mask[256, :256]) >= 0).all()


@pytest.mark.parametrize("size", [32, 64, 256, 1024])
def test_mask_scales_with_the_crop(size: int) -> None:
    assert feathered_mask(size).mean() == pytest.approx(feathered_mask(512).mean(), abs=0.02)


def test_rounding_has_no_bias() -> None:
    def half_up(x: Tensor) -> Tensor:
        return x + 0.4 * 2 / 255

    result = restorer(half_up, FACES["same size"])(PICTURE)
    assert np.array_equal(result.image, PICTURE)


@pytest.mark.parametrize("value_range", [(-1.0, 1.0), (0.0, 1.0)])
def test_value_range_of_the_weights(value_range: tuple[float, float]) -> None:
    seen = []

    def network(x: Tensor) -> Tensor:
        seen.append((float(x.min()), float(x.max())))
        return x

    picture = np.zeros((128, 128, 3), np.uint8)
    picture[:, 64:] = 255
    detector = FixedDetector([face_at(64, 64, 64)])
    result = Restorer(network, config_of(value_range=value_range), detector)(picture)
    assert seen[0] == pytest.approx(value_range)
    assert np.array_equal(result.image, picture)


def test_strength_is_linear() -> None:
    face = FACES["same size"]
    run = restorer(without_channel_0, face)
    full = run(PICTURE).image.astype(float)
    assert np.array_equal(run(PICTURE, Options(strength=0)).image, PICTURE)
    for strength in (0.25, 0.5, 0.8):
        expected = PICTURE + strength * (full - PICTURE)
        assert np.abs(run(PICTURE, Options(strength=strength)).image - expected).max() <= 1


def test_no_face_is_a_result() -> None:
    result = restorer(without_channel_0)(PICTURE)
    assert np.array_equal(result.image, PICTURE)
    assert result.faces == ()


def test_input_is_not_changed_and_result_is_repeatable() -> None:
    picture = PICTURE.copy()
    run = restorer(without_channel_0, *FACES.values())
    results = {run(picture).image.tobytes() for _ in range(10)}
    assert len(results) == 1
    assert np.array_equal(picture, PICTURE)


def test_values_that_are_not_finite_keep_the_picture() -> None:
    result = restorer(never_finite, FACES["same size"])(PICTURE)
    assert np.array_equal(result.image, PICTURE)
    assert [face.status for face in result.faces] == ["failed"]
    assert result.failed == 1
    assert "not finite" in result.faces[0].reason


def test_one_bad_face_does_not_harm_the_others() -> None:
    def network(x: Tensor) -> Tensor:
        y = without_channel_0(x)
        y[x.flatten(1).mean(1) > 0.5] = float("inf")
        return y

    picture = PICTURE.copy()
    picture[:, 200:] = 250
    dark, bright = face_at(60, 120, 64), face_at(250, 120, 64)
    result = restorer(network, bright, dark)(picture)
    assert [face.status for face in result.faces] == ["failed", "restored"]
    assert np.array_equal(result.image[:, 200:], picture[:, 200:])
    assert result.image[120, 60, 0] == 0


def test_ninety_faces_go_through_in_batches() -> None:
    sizes = []

    def network(x: Tensor) -> Tensor:
        sizes.append(len(x))
        return without_channel_0(x)

    faces = [face_at(20 + 25 * (i % 10), 15 + 25 * (i // 10), 24) for i in range(90)]
    result = restorer(network, *faces)(PICTURE)
    assert sum(sizes) >= 90
    assert max(sizes) <= 8
    assert {face.status for face in result.faces} == {"restored"}
    assert all(result.image[round(f.landmarks[2, 1]), round(f.landmarks[2, 0]), 0] == 0 for f in faces)


def test_choosing_faces() -> None:
    large, small = face_at(80, 120, 100), face_at(220, 120, 40)
    run = restorer(without_channel_0, small, large)
    assert [f.status for f in run(PICTURE, Options(min_face=30)).faces] == ["skipped", "restored"]
    only = run(PICTURE, Options(only="largest"))
    assert [f.status for f in only.faces] == ["skipped", "restored"]
    assert np.array_equal(only.image[100:140, 200:], PICTURE[100:140, 200:])
    assert [f.status for f in run(PICTURE, Options(min_face=500)).faces] == ["skipped", "skipped"]


@pytest.mark.parametrize(
    "arguments", [{"strength": 1.5}, {"strength": -0.1}, {"strength": float("nan")}, {"only": "best"}, {"min_face": -1}]
)
def test_wrong_options(arguments: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        Options(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [64, 40, 200])
def test_aligned_picture(size: int) -> None:
    picture = smooth_picture(size, size)
    run = Restorer(identity, config_of(), None)
    result = run(picture, Options(aligned=True))
    assert difference(result.image, picture).max() <= (0 if size == 64 else 2)
    assert len(result.faces) == 1
    red_gone = Restorer(without_channel_0, config_of(), None)(picture, Options(aligned=True)).image
    assert (red_gone[..., 0] == 0).all()


def test_aligned_pictures_are_square() -> None:
    with pytest.raises(ImageError, match="300 x 240"):
        Restorer(identity, config_of(), None)(PICTURE, Options(aligned=True))


def test_detector_is_needed_unless_aligned() -> None:
    with pytest.raises(UsageError, match="detector"):
        Restorer(identity, config_of(), None)(PICTURE)


def test_sixteen_bits_stay_sixteen_bits() -> None:
    deep = PICTURE.astype(np.uint16) * 257 + np.random.RandomState(0).randint(-100, 100, PICTURE.shape)
    deep = np.clip(deep, 0, 65535).astype(np.uint16)
    face = FACES["same size"]
    result = restorer(identity, face)(deep)
    assert result.image.dtype == np.uint16
    outside = ~covered(face, deep.shape)
    assert np.array_equal(result.image[outside], deep[outside])
    assert difference(result.image, deep).max() <= 2 * 257


def test_eight_bit_view_rounds() -> None:
    values = np.arange(65536, dtype=np.uint16).reshape(256, 256, 1).repeat(3, 2)
    assert np.array_equal(eight_bit(values), np.rint(values / 257).astype(np.uint8))


def test_grey_stays_grey() -> None:
    grey = np.repeat(PICTURE[..., :1], 3, 2)

    def coloured(x: Tensor) -> Tensor:
        return x * x.new_tensor([1, 0.2, -0.5])[:, None, None]

    result = restorer(coloured, FACES["turned"])(grey, Options(grey=True))
    assert np.array_equal(result.image[..., 0], result.image[..., 1])
    assert np.array_equal(result.image[..., 0], result.image[..., 2])
    assert not np.array_equal(result.image, grey)


@pytest.mark.parametrize(
    "picture",
    [np.zeros((4, 4), np.uint8), np.zeros((4, 4, 4), np.uint8), np.zeros((4, 4, 3)), np.zeros((0, 4, 3), np.uint8)],
)
def test_what_is_no_picture(picture: NDArray[np.generic]) -> None:
    with pytest.raises(GpenError, match="H x W x 3"):
        restorer(identity)(picture)


def test_two_threads_never_meet() -> None:
    pictures = [smooth_picture(300, 240, seed) for seed in range(8)]
    run = restorer(without_channel_0, *FACES.values())
    alone = [run(picture).image for picture in pictures]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda picture: run(picture).image, pictures))
    assert all(np.array_equal(one, other) for one, other in zip(alone, together, strict=True))


def test_seconds_by_step() -> None:
    assert list(restorer(identity, FACES["turned"])(PICTURE).seconds) == ["detect", "align", "restore", "paste"]
