"""Masks that follow the face: soft everywhere, nothing at the crop's border, and only what the parser calls face."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cv2
import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from gpen_convert import parsenet
from gpen_core.align import scaling
from gpen_core.blend import feathered_mask, paste
from gpen_core.errors import CheckpointError
from gpen_core.masks import ellipse_mask, parsed_mask
from gpen_core.parse import Parser, load_parser
from gpen_core.types import Image
from tests.stand_in import PROVENANCE, fill_state
from tests.test_parsenet import narrow_shapes

# Classes whose logit follows one colour, in the stand-in.
SKIN, HAT = 1, 14


def parser_model(classes: int = 19, size: int = 512) -> bytes:
    """Background where all is black, skin where red, hat where green, cloth where blue."""
    kernel, bias = np.zeros((classes, 3, 1, 1), np.float32), np.full(classes, -9, np.float32)
    bias[0] = -0.5
    for channel, label in enumerate((SKIN, HAT, 18)[: classes // 6]):
        kernel[label, channel], bias[label] = 1, 0
    graph = helper.make_graph(
        [helper.make_node("Conv", ["input", "w", "b"], ["logits"])],
        "parser",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["batch", 3, size, size])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", classes, size, size])],
        [numpy_helper.from_array(kernel, "w"), numpy_helper.from_array(bias, "b")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.checker.check_model(model)
    content: bytes = model.SerializeToString()
    return content


@pytest.fixture
def parser(tmp_path: Path) -> Parser:
    path = tmp_path / "parser.onnx"
    path.write_bytes(parser_model())
    return load_parser(path)


def disc(size: int, colour: tuple[int, int, int] = (255, 0, 0), radius: float = 0.3) -> Image:
    y, x = (np.mgrid[:size, :size] + 0.5) / size - 0.5
    picture = np.zeros((size, size, 3), np.uint8)
    picture[np.hypot(x, y) < radius] = colour
    return picture


def steepest(weights: NDArray[np.float32]) -> float:
    """Largest difference of neighbours, counted per pixel of a 512 px crop."""
    scale = weights.shape[0] / 512
    return scale * float(max(np.abs(np.diff(weights, axis=axis)).max() for axis in (0, 1)))


def border(weights: NDArray[np.float32]) -> float:
    return float(max(weights[0].max(), weights[-1].max(), weights[:, 0].max(), weights[:, -1].max()))


@pytest.mark.parametrize("size", [64, 256, 512, 1024])
def test_an_ellipse_is_soft_and_inside(size: int) -> None:
    weights = ellipse_mask(size)
    assert weights.dtype == np.float32
    assert border(weights) == 0
    assert weights.min() == 0
    assert weights[size // 2, size // 2] == pytest.approx(1, abs=1e-3)
    np.testing.assert_allclose(weights, weights[::-1, ::-1], atol=1e-6)
    # Half way at the edge, which is higher than wide.
    across, down = weights[size // 2], weights[:, size // 2]
    assert np.count_nonzero(across > 0.5) == pytest.approx(2 * 0.34 * size, abs=2)
    assert np.count_nonzero(down > 0.5) == pytest.approx(2 * 0.38 * size, abs=2)
    # A Gaussian's integral is steepest in its middle: 1 / (sigma sqrt(2 pi)).
    assert steepest(weights) < 1.1 / (11 * np.sqrt(2) * np.sqrt(2 * np.pi))
    assert not np.any(weights > feathered_mask(size) + 1e-6)


@pytest.mark.parametrize("size", [256, 512, 2048])
def test_the_mask_follows_the_face(parser: Parser, size: int) -> None:
    weights = parser(disc(size))
    assert weights.shape == (512, 512)
    assert weights.dtype == np.float32
    assert weights[256, 256] == pytest.approx(1, abs=1e-4)
    assert border(weights) == 0
    # Half way at the disc's edge, a little less where it curves in.
    assert weights[256, 256 + round(0.3 * 512)] == pytest.approx(0.5, abs=0.06)
    assert weights[256, 440] < 0.05
    assert steepest(weights) < 1.1 / (11 * np.sqrt(2) * np.sqrt(2 * np.pi))


@pytest.mark.parametrize("colour", [(0, 255, 0), (0, 0, 255), (0, 0, 0)], ids=["hat", "cloth", "background"])
def test_what_is_no_face_weighs_nothing(parser: Parser, colour: tuple[int, int, int]) -> None:
    assert parser(disc(512, colour)).max() == 0


def test_a_face_that_fills_the_crop_leaves_no_seam() -> None:
    weights = parsed_mask(np.ones((512, 512), np.bool_))
    assert border(weights) == 0
    assert weights[256, 256] == pytest.approx(1, abs=1e-6)
    # No steeper than the box mask, whose edge has a sigma of 5.7 px.
    assert steepest(weights) <= steepest(feathered_mask(512)) + 0.002


@pytest.mark.parametrize("size", [256, 512, 2048])
def test_pasting_never_shows_pixels_of_the_mask(parser: Parser, size: int) -> None:
    restored = np.full((size, size, 3), 255, np.uint8)
    canvas = np.zeros((1100, 1100, 3), np.uint16)
    scale = size / 1000
    paste(canvas, restored, scaling(scale, scale), size, parser(disc(size)))
    across = canvas[550, :, 0].astype(np.float64) / 65535
    middle, edge = across[500], np.diff(across)
    assert middle == pytest.approx(1, abs=1e-3)
    # One rise and one fall without steps: the slope itself changes slowly.
    assert np.abs(edge).max() < 1.1 * 0.512 / (11 * np.sqrt(2) * np.sqrt(2 * np.pi))
    assert np.abs(np.diff(edge)).max() < 0.002


def test_classes_are_those_of_the_converted_network(tmp_path: Path) -> None:
    path = tmp_path / "ParseNet-latest.onnx"
    face = np.random.default_rng(0).integers(0, 256, (512, 512, 3), np.uint8)
    face = np.asarray(cv2.GaussianBlur(face, (0, 0), 5), np.uint8)
    x = torch.from_numpy(face).permute(2, 0, 1)[None] / 127.5 - 1
    state = fill_state(narrow_shapes())
    with torch.no_grad():
        # Left alone, the stand-in calls everything the same.
        state["out_mask_conv.conv2d.bias"] -= parsenet.build(state)(x).mean((0, 2, 3))
        expected = parsenet.build(state)(x).argmax(1)[0].numpy()
    parsenet.convert(state, path, PROVENANCE)
    labels = load_parser(path).labels(face)
    assert len(np.unique(expected)) > 5
    assert np.mean(labels != expected) < 1e-4
    assert load_parser(path).labels(face[:300, :300]).shape == (512, 512)


def test_threads_can_share_a_parser(parser: Parser) -> None:
    faces = [disc(256, radius=radius) for radius in (0.1, 0.2, 0.3, 0.4)]
    alone = [parser(face) for face in faces]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(parser, faces))
    assert all(np.array_equal(one, other) for one, other in zip(alone, together, strict=True))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not a usable ONNX model"),
        (b"PK\x03\x04" + bytes(50), "gpen-core convert"),
        (parser_model(classes=11), "1x11x512x512"),
        (parser_model(size=256), "not a face parser"),
    ],
    ids=["empty", "checkpoint", "classes", "size"],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "some.onnx"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        load_parser(path)
    text = str(caught.value)
    assert words in text
    assert str(path) in text
    assert "\n" not in text


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"absent\.onnx"):
        load_parser(tmp_path / "absent.onnx")
