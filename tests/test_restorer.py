"""The whole pipeline with networks that do something known: seams, shifts, colour order and rounding show here."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import cv2
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from gpen_core.align import crop_matrix, invert
from gpen_core.blend import feathered_mask, paste
from gpen_core.errors import DeviceError, GpenError, ImageError, UsageError
from gpen_core.find import Box
from gpen_core.photo import to_depth
from gpen_core.restorer import Options, Restorer
from gpen_core.rrdb import RRDBNet, UpscalerConfig, upscale
from gpen_core.runtime import RuntimeOptions, Upscaler
from gpen_core.types import Canvas, Face, Image
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


def test_the_largest_faces() -> None:
    sizes = (60, 100, 40, 80)
    run = restorer(without_channel_0, *(face_at(40 + 70 * i, 120, size) for i, size in enumerate(sizes)))
    for count, chosen in ((1, {100}), (2, {100, 80}), (3, {100, 80, 60}), (9, set(sizes))):
        faces = run(PICTURE, Options(max_faces=count)).faces
        assert {size for size, face in zip(sizes, faces, strict=True) if face.status == "restored"} == chosen
    reasons = {face.reason for face in run(PICTURE, Options(max_faces=2)).faces}
    assert reasons == {"", "not among the 2 largest"}
    # Small faces don't use up the number, nor do faces elsewhere.
    faces = run(PICTURE, Options(max_faces=2, min_face=45)).faces
    assert [face.status for face in faces] == ["skipped", "restored", "skipped", "skipped"]
    faces = run(PICTURE, Options(max_faces=1, box=Box(0, 0, 100, 240))).faces
    assert [face.status for face in faces] == ["restored", "skipped", "skipped", "skipped"]


def test_faces_of_equal_size() -> None:
    run = restorer(without_channel_0, *(face_at(40 + 70 * i, 120, 60) for i in range(4)))
    assert [face.status for face in run(PICTURE, Options(max_faces=2)).faces] == ["restored"] * 2 + ["skipped"] * 2


def test_box() -> None:
    run = restorer(without_channel_0, face_at(80, 120, 60), face_at(220, 120, 60))
    result = run(PICTURE, Options(box=Box(180, 80, 80, 80)))
    assert [(face.status, face.reason) for face in result.faces] == [("skipped", "outside the box"), ("restored", "")]
    assert np.array_equal(result.image[:, :150], PICTURE[:, :150])
    assert result.notes == ()
    result = run(PICTURE, Options(box=Box(1, 2, 30, 40)))
    assert np.array_equal(result.image, PICTURE)
    assert result.notes == ("no face in the box 1,2,30,40",)


def test_hints_at_tilted_heads() -> None:
    for faces in ([], [FACES["upside down"]]):
        assert "--rotate auto" in restorer(identity, *faces)(PICTURE).notes[0]
        assert restorer(identity, *faces)(PICTURE, Options(rotate="auto")).notes == ()
    assert restorer(identity, FACES["turned"])(PICTURE).notes == ()


@dataclass(frozen=True)
class UprightOnly:
    """Sees a face where a picture is white, if the white lies above the black that belongs to it."""

    family: str = "upright"

    def __call__(self, image: Image) -> list[Face]:
        white, black = (np.argwhere((image == value).all(2)) for value in (255, 0))
        if not len(white) or white[:, 0].mean() >= black[:, 0].mean() - 4:
            return []
        x, y = (white.mean(0) + black.mean(0))[::-1] / 2
        return [face_at(x, y, 64)]


@pytest.mark.parametrize("quarters", range(4))
def test_lying_heads_are_restored_as_upright_ones(quarters: int) -> None:
    picture = smooth_picture(200, 150) // 2 + 60
    picture[50:60, 70:100], picture[90:100, 70:100] = 255, 0
    lying = np.ascontiguousarray(np.rot90(picture, quarters))
    seen = []

    def network(x: Tensor) -> Tensor:
        seen.append(x.clone())
        return without_channel_0(x)

    run = Restorer(network, config_of(), UprightOnly())
    upright, turned = run(picture), run(lying, Options(rotate="auto"))
    assert [face.status for face in turned.faces] == ["restored"]
    assert (seen[1] - seen[0]).abs().max() <= 2 * 2 / 255
    assert difference(np.rot90(turned.image, -quarters), upright.image).max() <= 2
    assert np.array_equal(run(lying).image, lying) is (quarters != 0)


RAMP = np.repeat(np.repeat(np.arange(0, 240, 8, dtype=np.uint8)[None, :, None], 30, 0), 3, 2)


@pytest.mark.parametrize("upscale", [1, 2, 4])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_faces_are_pasted_into_an_enlarged_picture(upscale: int, dtype: type) -> None:
    picture = np.ascontiguousarray(RAMP).astype(dtype) * dtype(1 if dtype == np.uint8 else 257)
    face = face_at(15, 15, 20)
    result = restorer(identity, face, size=64)(picture, Options(upscale=upscale))
    assert result.image.dtype == dtype
    expected = cv2.resize(picture, None, fx=upscale, fy=upscale, interpolation=cv2.INTER_LANCZOS4)
    # Half a pixel of the enlarged picture would make 2 levels or more.
    assert difference(result.image, expected).max() <= np.iinfo(dtype).max // 255
    red_gone = restorer(without_channel_0, face)(picture, Options(upscale=upscale)).image
    gone = red_gone[..., 0] < expected[..., 0] * 0.5
    rows, columns = np.flatnonzero(gone.any(1)), np.flatnonzero(gone.any(0))
    assert abs((rows[0] + rows[-1] + 1) / 2 - 15.5 * upscale) <= 1
    assert len(columns) == pytest.approx(18 * upscale, abs=2)
    outside = np.ones(gone.shape, bool)
    outside[5 * upscale : 26 * upscale, 5 * upscale : 26 * upscale] = False
    assert np.array_equal(red_gone[outside], expected[outside])


def small_upscaler(scale: int) -> RRDBNet:
    torch.manual_seed(0)
    return RRDBNet(UpscalerConfig(scale, 8, 1, 4, margin=17)).eval().requires_grad_(False)


def test_an_upscaler_makes_the_background() -> None:
    net = small_upscaler(2)
    run = Restorer(without_channel_0, config_of(), FixedDetector([FACES["same size"]]), upscaler=net)
    result = run(PICTURE)
    expected = upscale(net, PICTURE, 2)
    assert result.image.shape == (480, 600, 3)
    assert np.array_equal(result.image[:170], expected[:170])
    assert (result.image[230:250, 290:310, 0] == 0).all()
    assert list(result.seconds) == ["detect", "align", "restore", "background", "paste"]
    assert run(PICTURE, Options(upscale=1)).image.shape == PICTURE.shape
    with pytest.raises(UsageError, match="enlarges by 2"):
        run(PICTURE, Options(upscale=4))


def test_an_upscaler_short_of_memory_takes_smaller_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    net, tiles = small_upscaler(2), []

    def hungry(net: RRDBNet, picture: Canvas, scale: int, *, tile: int) -> Canvas:
        tiles.append(tile)
        if tile > limit:
            raise MemoryError
        return upscale(net, picture, scale, tile=tile)

    monkeypatch.setattr("gpen_core.runtime.upscale", hungry)
    limit = 64
    assert np.array_equal(Upscaler(net)(PICTURE, 2), upscale(net, PICTURE, 2, tile=64))
    assert tiles == [256, 128, 64]
    limit = 0
    with pytest.raises(DeviceError, match="out of memory"):
        Upscaler(net)(PICTURE, 2)


def test_an_upscaler_that_is_not_finite_in_bf16_runs_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    net = small_upscaler(2)

    def fragile(net: RRDBNet, picture: Canvas, scale: int, *, tile: int) -> Canvas:
        if net.conv_first.weight.dtype == torch.bfloat16:
            raise DeviceError("the up-scaler's result is not finite in bfloat16")
        return upscale(net, picture, scale, tile=tile)

    monkeypatch.setattr("gpen_core.runtime.upscale", fragile)
    run = Upscaler(net, RuntimeOptions(device="cpu", precision="bf16"))
    assert np.array_equal(run(PICTURE[:50, :60], 2), upscale(net, PICTURE[:50, :60], 2))


def test_long_side() -> None:
    run = restorer(without_channel_0, FACES["same size"])
    result = run(PICTURE, Options(long_side=150))
    assert result.image.shape == (120, 150, 3)
    assert np.array_equal(result.faces[0].landmarks, FACES["same size"].landmarks)
    expected = cv2.resize(PICTURE, (150, 120), interpolation=cv2.INTER_AREA)
    assert np.array_equal(result.image[:40], expected[:40])
    assert (result.image[55:65, 70:80, 0] == 0).all()
    assert run(PICTURE, Options(long_side=300)).image.shape == PICTURE.shape
    assert run(PICTURE, Options(long_side=150, upscale=2)).image.shape == (240, 300, 3)


def test_results_that_are_too_large() -> None:
    with pytest.raises(ImageError, match="too many"):
        restorer(identity)(np.zeros((8000, 8000, 3), np.uint8), Options(upscale=4))


@pytest.mark.parametrize(("tile", "stride"), [(64, 32), (64, None), (64, 64), (96, 48), (40, 20)])
def test_tiles(tile: int, stride: int | None) -> None:
    options = Options(tile=tile, stride=stride)
    result = Restorer(identity, config_of(), None)(PICTURE, options)
    assert difference(result.image, PICTURE).max() <= (0 if tile == 64 else 2)
    assert len(result.faces) == 1
    red_gone = Restorer(without_channel_0, config_of(), None)(PICTURE, options)
    assert (red_gone.image[..., 0] == 0).all()
    half = Restorer(without_channel_0, config_of(), None)(PICTURE, replace(options, strength=0.5))
    assert difference(half.image[..., 0], PICTURE[..., 0] / 2).max() <= 1


def test_a_tiled_picture_of_the_network_s_size_is_the_aligned_one() -> None:
    def blurred(x: Tensor) -> Tensor:
        return F.avg_pool2d(F.pad(x, (4, 4, 4, 4)), 9, 1)

    picture = smooth_picture(64, 64)
    run = Restorer(blurred, config_of(), None)
    assert np.array_equal(run(picture, Options(tile=64)).image, run(picture, Options(aligned=True)).image)
    assert run(picture, Options(tile=64, upscale=2)).image.shape == (128, 128, 3)


def test_a_tile_that_is_not_finite_keeps_the_picture() -> None:
    def network(x: Tensor) -> Tensor:
        return torch.where(x.mean() > 0, torch.inf, x)

    picture = PICTURE.copy()
    picture[200:, 200:] = 255
    result = Restorer(network, config_of(), None)(picture, Options(tile=64))
    assert [face.status for face in result.faces] == ["failed"]
    assert np.array_equal(result.image, picture)


def test_tiles_of_deep_and_grey_pictures() -> None:
    deep = np.repeat(PICTURE[..., :1], 3, 2).astype(np.uint16) * 257 + 3
    run = Restorer(without_channel_0, config_of(), None)
    result = run(deep, Options(tile=64, grey=True))
    assert result.image.dtype == np.uint16
    assert np.array_equal(result.image[..., 0], result.image[..., 2])


def test_finish() -> None:
    def tinted(x: Tensor) -> Tensor:
        return x + x.new_tensor([0.2, 0, -0.2])[:, None, None]

    picture = PICTURE // 2 + 60
    run = restorer(tinted, FACES["same size"], size=64)
    assert difference(run(picture).image, picture).max() > 20
    assert difference(run(picture, Options(match_color=True)).image, picture).max() <= 2
    detailed = np.clip(picture + np.random.RandomState(0).normal(0, 8, picture.shape), 0, 255).astype(np.uint8)
    sharp = restorer(identity, FACES["same size"])(detailed, Options(sharpen=1)).image
    middle = (slice(100, 140), slice(130, 170))
    before, after = (np.diff(image[middle].mean(2)).std() for image in (detailed, sharp))
    assert after > 1.2 * before
    assert np.array_equal(sharp[:80], detailed[:80])


def test_crops_are_kept_on_request() -> None:
    run = restorer(without_channel_0, *FACES.values(), output_size=64)
    assert all(face.crop is None and face.picture is None for face in run(PICTURE).faces)
    faces = run(PICTURE, Options(keep_crops=True, sharpen=0.5, max_faces=3)).faces
    for face in faces:
        if face.status == "skipped":
            assert face.crop is None
            continue
        assert face.crop is not None
        assert face.picture is not None
        assert face.crop.shape == face.picture.shape == (64, 64, 3)
        assert face.picture.dtype == np.uint8
    assert sum(face.crop is not None for face in faces) == 3


def test_everything_at_once_is_repeatable_in_threads() -> None:
    options = Options(
        rotate="auto", max_faces=4, upscale=2, long_side=200, match_color=True, sharpen=0.5, grain=1.0, strength=0.8
    )
    noisy = np.clip(PICTURE + np.random.RandomState(0).normal(0, 5, PICTURE.shape), 0, 255).astype(np.uint8)
    run = restorer(without_channel_0, *FACES.values())
    with ThreadPoolExecutor(4) as pool:
        results = {result.image.tobytes() for result in pool.map(lambda _: run(noisy, options), range(8))}
    assert len(results) == 1


def test_pasting_into_a_large_picture_touches_the_face_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    canvas = np.full((4000, 6000, 3), 90, np.uint8)
    picture, mask = np.full((512, 512, 3), 120, np.uint8), feathered_mask(512)
    # A face of 200 pixels has a crop of about twice that.
    matrix = crop_matrix(face_at(3000, 2000, 400).landmarks, config_of().template, 512)
    warp, warped = cv2.warpAffine, []

    def counted(image: NDArray[Any], transform: NDArray[Any], size: tuple[int, int], **options: Any) -> NDArray[Any]:
        warped.append(size[0] * size[1])
        return np.asarray(warp(image, transform, size, **options))

    monkeypatch.setattr(cv2, "warpAffine", counted)
    tracemalloc.start()
    try:
        paste(canvas, picture, matrix, 512, mask)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Colours and weights of the crop's square, with a pixel of border; in float32 that is not a tenth of the canvas.
    assert 2 * 400**2 <= sum(warped) <= 2 * 404**2
    assert peak < canvas.nbytes / 4


WRONG = [
    {"strength": 1.5},
    {"strength": -0.1},
    {"strength": float("nan")},
    {"only": "best"},
    {"min_face": -1},
    {"max_faces": 0},
    {"rotate": "yes"},
    {"upscale": 3},
    {"long_side": 0},
    {"tile": 8},
    {"stride": 32},
    {"tile": 64, "stride": 65},
    {"tile": 64, "stride": 0},
    {"sharpen": -1},
    {"sharpen": float("nan")},
    {"grain": 9},
    {"aligned": True, "rotate": "auto"},
    {"tile": 64, "max_faces": 2},
    {"aligned": True, "box": Box(0, 0, 1, 1)},
]


@pytest.mark.parametrize("arguments", WRONG, ids=str)
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
    assert np.array_equal(to_depth(values, np.uint8), np.rint(values / 257).astype(np.uint8))


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


@pytest.mark.parametrize(
    "options",
    [
        Options(),
        Options(strength=0),
        Options(only="largest", upscale=2, match_color=True, grain=1),
        Options(long_side=150),
        Options(keep_crops=True, min_face=40),
    ],
)
def test_the_stages_do_what_a_call_does(options: Options) -> None:
    run = restorer(without_channel_0, *FACES.values())
    expected = run(PICTURE, options)
    prepared = run.prepare(PICTURE, options)
    pictures = run.runtime(prepared.waiting)
    for one in (prepared, run.enlarge(prepared)):
        result = run.finish(one, pictures, seconds=2.5)
        assert np.array_equal(result.image, expected.image)
        assert [(f.status, f.reason) for f in result.faces] == [(f.status, f.reason) for f in expected.faces]
        assert result.notes == expected.notes
        assert result.seconds["restore"] == 2.5
    assert bool(prepared.waiting) is (options.strength > 0)
    assert run.result_size(PICTURE, options) == expected.image.shape[:2]


def test_preparing_runs_no_network() -> None:
    def never(x: Tensor) -> Tensor:
        raise AssertionError

    prepared = restorer(never, FACES["turned"], FACES["outside"]).prepare(PICTURE)
    assert [crop.shape for crop in prepared.waiting] == [(64, 64, 3)] * 2


def test_tiles_have_no_stages() -> None:
    with pytest.raises(UsageError, match="tiles"):
        restorer(identity).prepare(PICTURE, Options(tile=64))


def test_a_result_that_is_too_large_costs_no_network() -> None:
    def never(x: Tensor) -> Tensor:
        raise AssertionError

    with pytest.raises(ImageError, match="too many"):
        restorer(never, FACES["turned"]).prepare(np.zeros((8000, 8000, 3), np.uint8), Options(upscale=4))
