"""Colourisation, inpainting and faces from label maps, with networks that do something known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpen_core.errors import ImageError, UsageError
from gpen_core.photo import Photo
from gpen_core.restorer import Options, Restorer
from gpen_core.tasks import colorize, find_holes, inpaint, mixed, restore, seg2face, with_luma_of
from tests.exported import SEG2FACE, converted
from tests.stubs import FixedDetector, config_of, face_at, never_finite, smooth_picture


def photo_of(pixels: NDArray[np.uint8], **values: object) -> Photo:
    settings = {"grey": False, "alpha": None, "format": "png", **values}
    return Photo(pixels=pixels, **settings)  # type: ignore[arg-type]


def restorer_for(task: str, network: Callable[[Tensor], Tensor], size: int = 64) -> Restorer:
    config = replace(config_of(size), task=task)
    return Restorer(network, config, FixedDetector([face_at(150, 120, 100)]), task=task)


def tinted(x: Tensor) -> Tensor:
    """Adds red and removes blue, which leaves no pixel grey."""
    return (x + x.new_tensor([0.3, 0.0, -0.3])[:, None, None]).clamp(-1, 1)


def painted_red(x: Tensor) -> Tensor:
    return x.new_tensor([1.0, -1.0, -1.0])[:, None, None].expand_as(x)


def luma(pixels: NDArray[Any]) -> NDArray[np.float64]:
    return np.asarray(pixels @ np.array([0.299, 0.587, 0.114]))


def test_weights_are_used_for_their_task() -> None:
    message = "these weights are for colorization, not restoration: use gpen-core colorize"
    with pytest.raises(UsageError, match=message):
        Restorer(tinted, replace(config_of(64), task="colorization"), None)
    photo, options = photo_of(smooth_picture(64, 64)), Options(aligned=True)
    for task in (restore, seg2face, inpaint(np.ones((64, 64), bool))):
        with pytest.raises(UsageError, match=f"for colorization, not {task.kind}"):
            task(restorer_for("colorization", tinted), photo, options)


def test_weights_are_loaded_for_their_task(tmp_path: Path) -> None:
    path = converted(tmp_path, SEG2FACE)
    with pytest.raises(UsageError, match=r"for seg2face, not restoration: .*task='seg2face' of Restorer"):
        Restorer.load(path, None)
    with pytest.raises(UsageError, match="for seg2face, not colorization"):
        Restorer.load(path, None, task="colorization")
    restorer = Restorer.load(path, None, task="seg2face", device="cpu")
    picture, _ = seg2face(restorer, photo_of(smooth_picture(16, 16)), Options(aligned=True))
    assert picture.pixels.shape == (16, 16, 3)


def test_restore_keeps_grey_photos_grey() -> None:
    picture = np.repeat(smooth_picture(300, 240)[..., :1], 3, 2)
    result, restored = restore(restorer_for("restoration", tinted), photo_of(picture, grey=True), Options())
    assert result.grey
    assert np.array_equal(result.pixels[..., 0], result.pixels[..., 2])
    assert restored.faces[0].status == "restored"


@pytest.mark.parametrize("aligned", [True, False])
def test_colorize_keeps_the_luma(aligned: bool) -> None:
    size = (200, 200) if aligned else (300, 240)
    grey = np.repeat(smooth_picture(*size)[..., :1] // 2 + 64, 3, 2)
    photo = photo_of(grey, grey=True, icc=b"a grey profile")
    result, _ = colorize(restorer_for("colorization", tinted), photo, Options(aligned=aligned))
    coloured = result.pixels[..., 0] != result.pixels[..., 2]
    assert not result.grey
    assert result.icc is None
    assert coloured[100, 100 if aligned else 150]
    assert np.abs(luma(result.pixels) - luma(grey)).max() <= 1
    if not aligned:
        assert np.array_equal(result.pixels[:, :60], grey[:, :60])


def test_colorize_at_the_networks_size_is_the_network_alone() -> None:
    grey = np.full((64, 64, 3), 128, np.uint8)
    result, _ = colorize(restorer_for("colorization", painted_red), photo_of(grey), Options(aligned=True))
    assert (result.pixels == [255, 0, 0]).all()


def test_colorize_drops_old_colours() -> None:
    seen = []

    def network(x: Tensor) -> Tensor:
        seen.append(x)
        return tinted(x)

    colorize(restorer_for("colorization", network), photo_of(smooth_picture(300, 240)), Options())
    assert torch.equal(seen[0][:, 0], seen[0][:, 2])


@pytest.mark.parametrize("aligned", [True, False])
def test_colorize_mixes_with_the_photo_as_it_was(aligned: bool) -> None:
    picture = smooth_picture(*((64, 64) if aligned else (300, 240)))
    restorer = restorer_for("colorization", tinted)
    whole, _ = colorize(restorer, photo_of(picture), Options(aligned=aligned))
    for strength in (0.25, 0.5):
        result, restored = colorize(restorer, photo_of(picture), Options(aligned=aligned, strength=strength))
        expected = (1 - strength) * picture + strength * whole.pixels
        assert np.abs(result.pixels - expected).max() <= 0.51
        assert restored.image is result.pixels or np.array_equal(restored.image, result.pixels)


def test_mixing_in_16_bits() -> None:
    one, other = np.zeros((600, 2, 3), np.uint16), np.full((600, 2, 3), 60001, np.uint16)
    assert (mixed(one, other, 0.5) == 30000).all()
    assert np.array_equal(mixed(one, other, 1), other)


@pytest.mark.parametrize("why", ["strength 0", "no face", "not finite"])
def test_what_colorize_leaves_is_the_photo(why: str) -> None:
    network = never_finite if why == "not finite" else tinted
    faces = [] if why == "no face" else [face_at(150, 120, 100)]
    restorer = Restorer(network, replace(config_of(64), task="colorization"), FixedDetector(faces), task="colorization")
    options = Options(strength=0.0 if why == "strength 0" else 1.0)
    grey = np.repeat(smooth_picture(300, 240)[..., :1], 3, 2)
    for photo in (photo_of(smooth_picture(300, 240)), photo_of(grey, grey=True, icc=b"a grey profile")):
        result, restored = colorize(restorer, photo, options)
        assert result is photo
        assert np.array_equal(restored.image, photo.pixels)


def test_what_a_network_fails_at_stays_as_it_was() -> None:
    picture = np.minimum(smooth_picture(64, 64), 250)
    alpha = np.where(holes((64, 64)), 0, 255).astype(np.uint8)
    for task, name in ((inpaint(None), "inpainting"), (seg2face, "seg2face")):
        photo = photo_of(picture, alpha=alpha)
        result, restored = task(restorer_for(name, never_finite), photo, Options())
        assert restored.failed == 1
        assert result is photo
        assert np.array_equal(restored.image, picture)


def test_luma_in_16_bits() -> None:
    grey = np.repeat(np.linspace(8000, 50000, 6400).reshape(80, 80, 1), 3, 2).astype(np.uint16)
    coloured = np.clip(grey + np.array([3000, 0, -3000]), 0, 65535).astype(np.uint16)
    joined = with_luma_of(grey, coloured)
    assert joined.dtype == np.uint16
    assert np.abs(luma(joined) - luma(grey)).max() <= 1
    assert np.array_equal(with_luma_of(grey, grey), grey)


def holes(shape: tuple[int, int]) -> NDArray[np.bool_]:
    mask = np.zeros(shape, np.bool_)
    mask[20:40, 10:50] = True
    return mask


@pytest.mark.parametrize("given", ["mask", "alpha", "strokes"])
def test_inpaint_fills_the_holes_and_nothing_else(given: str) -> None:
    picture = np.minimum(smooth_picture(64, 64), 250)
    mask = holes((64, 64))
    seen = []

    def network(x: Tensor) -> Tensor:
        seen.append(x[0].permute(1, 2, 0).numpy())
        return painted_red(x)

    alpha = np.where(mask, 0, 255).astype(np.uint8) if given == "alpha" else None
    if given == "strokes":
        picture[mask] = 255
    task = inpaint(mask if given == "mask" else None)
    result, _ = task(restorer_for("inpainting", network), photo_of(picture, alpha=alpha), Options())
    assert (seen[0][mask] == 1).all()
    assert (result.pixels[mask] == [255, 0, 0]).all()
    assert np.array_equal(result.pixels[~mask], picture[~mask])
    assert result.alpha is None or (result.alpha == 255).all()


def test_inpaint_of_another_size_keeps_the_rest() -> None:
    picture = np.minimum(smooth_picture(150, 150), 250)
    mask = holes((150, 150))
    result, _ = inpaint(mask)(restorer_for("inpainting", painted_red), photo_of(picture), Options())
    assert np.array_equal(result.pixels[~mask], picture[~mask])
    assert (result.pixels[mask] == [255, 0, 0]).all()


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_holes_are_at_least_half_transparent(dtype: type[np.integer[Any]]) -> None:
    most = np.iinfo(dtype).max
    pixels = np.zeros((8, 8, 3), dtype)
    pixels[7] = most
    alpha = np.full((8, 8), most, dtype)
    alpha[:4] = np.array([0, most // 4, most // 2, most // 2 + 1], dtype)[:, None]
    assert np.array_equal(np.flatnonzero(find_holes(photo_of(pixels, alpha=alpha)).all(1)), [0, 1, 2])
    alpha[:3] = most // 2 + 1
    assert np.array_equal(np.flatnonzero(find_holes(photo_of(pixels, alpha=alpha)).all(1)), [7])


def test_a_soft_rim_stays() -> None:
    picture = np.minimum(smooth_picture(64, 64), 250)
    alpha = np.full((64, 64), 255, np.uint8)
    alpha[20:40] = 200
    alpha[25:35] = 100
    result, _ = inpaint(None)(restorer_for("inpainting", painted_red), photo_of(picture, alpha=alpha), Options())
    filled = alpha == 100
    assert (result.pixels[filled] == [255, 0, 0]).all()
    assert np.array_equal(result.pixels[~filled], picture[~filled])
    assert result.alpha is not None
    assert np.array_equal(result.alpha, np.where(filled, 255, alpha))


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (None, "nothing to fill: no pixel is at least half transparent, and none is pure white; give the holes with"),
        (np.zeros((64, 64), np.bool_), "nothing to fill: nothing in the mask image is white"),
        (holes((60, 60)), "60 x 60"),
    ],
)
def test_inpaint_without_holes(mask: NDArray[np.bool_] | None, message: str) -> None:
    picture = np.minimum(smooth_picture(64, 64), 250)
    alpha = np.full((64, 64), 128, np.uint8)
    with pytest.raises(ImageError, match=message):
        inpaint(mask)(restorer_for("inpainting", painted_red), photo_of(picture, alpha=alpha), Options())


def test_seg2face_never_mixes_labels() -> None:
    labels = np.zeros((200, 200, 3), np.uint8)
    labels[50:] = [204, 0, 0]
    labels[120:] = [0, 255, 255]
    seen = []

    def network(x: Tensor) -> Tensor:
        seen.append(x)
        return x

    result, _ = seg2face(restorer_for("seg2face", network), photo_of(labels), Options())
    assert result.pixels.shape == (64, 64, 3)
    assert {tuple(colour) for colour in result.pixels.reshape(-1, 3).tolist()} == {
        (0, 0, 0),
        (204, 0, 0),
        (0, 255, 255),
    }
    with pytest.raises(ImageError, match="a label map is square"):
        seg2face(restorer_for("seg2face", network), photo_of(labels[:100]), Options())
