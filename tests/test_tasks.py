"""Colourisation, inpainting and faces from label maps, with networks that do something known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpen_core.errors import ImageError, UsageError
from gpen_core.photo import Photo
from gpen_core.restorer import Options, Restorer
from gpen_core.tasks import colorize, inpaint, require_task, restore, seg2face, with_luma_of
from tests.stubs import FixedDetector, config_of, face_at, smooth_picture


def photo_of(pixels: NDArray[np.uint8], **values: object) -> Photo:
    settings = {"grey": False, "alpha": None, "format": "png", **values}
    return Photo(pixels=pixels, **settings)  # type: ignore[arg-type]


def restorer_for(task: str, network: Callable[[Tensor], Tensor], size: int = 64) -> Restorer:
    config = replace(config_of(size), task=task)
    return Restorer(network, config, FixedDetector([face_at(150, 120, 100)]))


def tinted(x: Tensor) -> Tensor:
    """Adds red and removes blue, which leaves no pixel grey."""
    return (x + x.new_tensor([0.3, 0.0, -0.3])[:, None, None]).clamp(-1, 1)


def painted_red(x: Tensor) -> Tensor:
    return x.new_tensor([1.0, -1.0, -1.0])[:, None, None].expand_as(x)


def luma(pixels: NDArray[Any]) -> NDArray[np.float64]:
    return np.asarray(pixels @ np.array([0.299, 0.587, 0.114]))


def test_weights_are_used_for_their_task() -> None:
    require_task(restorer_for("inpainting", tinted), "inpainting")
    with pytest.raises(UsageError, match="these weights are for colorization, not restoration: use gpen-core colorize"):
        require_task(restorer_for("colorization", tinted), "restoration")


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


@pytest.mark.parametrize(
    ("mask", "message"),
    [(None, "nothing to fill"), (np.zeros((64, 64), np.bool_), "nothing to fill"), (holes((60, 60)), "60 x 60")],
)
def test_inpaint_without_holes(mask: NDArray[np.bool_] | None, message: str) -> None:
    picture = np.minimum(smooth_picture(64, 64), 250)
    with pytest.raises(ImageError, match=message):
        inpaint(mask)(restorer_for("inpainting", painted_red), photo_of(picture), Options())


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
