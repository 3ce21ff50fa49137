"""YuNet: stand-in graphs of its layout, read as OpenCV's own FaceDetectorYN reads them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from gpen_core import detect
from gpen_core.detect import Detector, load_detector
from gpen_core.errors import DetectorError, UsageError
from gpen_core.types import Image

STRIDES = (8, 16, 32)
KINDS = {"cls": 1, "obj": 1, "bbox": 4, "kps": 10}
FRACTIONS = np.array([[0.3, 0.4], [0.7, 0.4], [0.5, 0.6], [0.35, 0.8], [0.65, 0.8]])


def yunet_model(
    kernels: dict[str, NDArray[np.float32]], biases: dict[str, NDArray[np.float32]], size: tuple[int, int] | None
) -> bytes:
    """One convolution of a cell's size for each output, `kind_stride`; confidences through a sigmoid."""
    nodes, weights = [], []
    for kind, width in KINDS.items():
        weights.append(numpy_helper.from_array(np.array([1, -1, width], np.int64), f"{kind}_shape"))
        for stride in STRIDES:
            name, cell = f"{kind}_{stride}", [stride, stride]
            weights.append(numpy_helper.from_array(kernels[name], f"{name}_w"))
            weights.append(numpy_helper.from_array(biases[name], f"{name}_b"))
            nodes += [
                helper.make_node(
                    "Conv", ["input", f"{name}_w", f"{name}_b"], [f"{name}_c"], kernel_shape=cell, strides=cell
                ),
                helper.make_node("Transpose", [f"{name}_c"], [f"{name}_t"], perm=[0, 2, 3, 1]),
                helper.make_node("Reshape", [f"{name}_t", f"{kind}_shape"], [f"{name}_r"]),
                helper.make_node("Sigmoid" if width == 1 else "Identity", [f"{name}_r"], [name]),
            ]
    sides: tuple[int | str, ...] = size or ("height", "width")
    graph = helper.make_graph(
        nodes,
        "yunet",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, [1, 3, *sides])],
        [
            helper.make_tensor_value_info(f"{kind}_{stride}", TensorProto.FLOAT, [1, None, KINDS[kind]])
            for kind in KINDS
            for stride in STRIDES
        ],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 11)], ir_version=6)
    onnx.checker.check_model(model)
    content: bytes = model.SerializeToString()
    return content


def random_model(size: tuple[int, int]) -> bytes:
    """Faces everywhere, of sizes, places and confidences that follow the pixels."""
    random = np.random.default_rng(3)
    kernels, biases = {}, {}
    for kind, width in KINDS.items():
        for stride in STRIDES:
            scale = {"cls": 3.0, "obj": 3.0, "bbox": 0.3, "kps": 0.7}[kind] / (100 * stride)
            kernels[f"{kind}_{stride}"] = random.normal(0, scale, (width, 3, stride, stride)).astype(np.float32)
            biases[f"{kind}_{stride}"] = random.normal(0, 0.3, width).astype(np.float32)
    return yunet_model(kernels, biases, size)


def spot_model(size: tuple[int, int] | None = None) -> bytes:
    """A face of 24 pixels where a cell of 8 is red: the published layout's channel 2 of BGR."""
    kernels = {f"{kind}_{s}": np.zeros((width, 3, s, s), np.float32) for kind, width in KINDS.items() for s in STRIDES}
    biases = {f"{kind}_{s}": np.zeros(width, np.float32) for kind, width in KINDS.items() for s in STRIDES}
    for stride in STRIDES:
        biases[f"obj_{stride}"] += 20
        biases[f"cls_{stride}"] -= 10
        biases[f"bbox_{stride}"][:] = 0.5, 0.5, math.log(24 / stride), math.log(24 / stride)
        marks = 0.5 + (FRACTIONS - 0.5) * 24 / stride
        biases[f"kps_{stride}"][:] = marks.reshape(10)
    kernels["cls_8"][:, 2] = 20 / (255 * 64)
    return yunet_model(kernels, biases, size)


def opened(tmp_path: Path, model: bytes, **options: Any) -> Detector:
    path = tmp_path / "stub.onnx"
    path.write_bytes(model)
    return load_detector(path, **options)


def by_opencv(path: Path, image: Image, threshold: float) -> NDArray[np.float32]:
    """Rows x, y, width, height, ten landmark values and score; nothing suppressed."""
    height, width = image.shape[:2]
    reference = cv2.FaceDetectorYN.create(str(path), "", (width, height), threshold, 1.0, 5000)
    _, found = reference.detect(np.ascontiguousarray(image[..., ::-1]))
    return np.zeros((0, 15), np.float32) if found is None else np.asarray(found, np.float32)


def test_decoding_equals_opencv(tmp_path: Path) -> None:
    size = (96, 160)
    path = tmp_path / "random.onnx"
    path.write_bytes(random_model(size))
    image = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
    expected = by_opencv(path, image, 0.5)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [f"{kind}_{stride}" for stride in STRIDES for kind in KINDS]
    bgr = np.ascontiguousarray(image[..., ::-1].transpose(2, 0, 1)[None], np.float32)
    maps = [output[0] for output in session.run(names, {"input": bgr})]
    found = detect.decode_yunet(maps, size, 0.5)
    assert len(found.scores) == len(expected) > 50
    mine, theirs = np.argsort(-found.scores), np.argsort(-expected[:, 14])
    boxes = expected[theirs, :4].astype(np.float64)
    boxes[:, 2:] += boxes[:, :2]
    np.testing.assert_allclose(found.scores[mine], expected[theirs, 14], rtol=0, atol=1e-5)
    np.testing.assert_allclose(found.boxes[mine], boxes, rtol=0, atol=1e-3)
    np.testing.assert_allclose(found.landmarks[mine].reshape(-1, 10), expected[theirs, 4:14], rtol=0, atol=1e-3)


def red_cell(height: int, width: int, row: int, column: int, colour: tuple[int, int, int] = (255, 0, 0)) -> Image:
    picture = np.zeros((height, width, 3), np.uint8)
    picture[8 * row : 8 * row + 8, 8 * column : 8 * column + 8] = colour
    return picture


@pytest.mark.parametrize("size", [None, (96, 160)], ids=["free", "fixed"])
def test_a_face_lies_where_opencv_finds_it(tmp_path: Path, size: tuple[int, int] | None) -> None:
    picture = red_cell(90, 130, 4, 8)
    detector = opened(tmp_path, spot_model(size), threshold=0.9)
    assert detector.family == "yunet"
    [face] = detector(picture)
    # OpenCV takes the fixed graph only at its own size, where the rest is black as well.
    path = tmp_path / "fixed.onnx"
    path.write_bytes(spot_model((96, 160)))
    [row] = by_opencv(path, red_cell(96, 160, 4, 8), 0.9)
    np.testing.assert_allclose(face.box[:2], row[:2], atol=1e-3)
    np.testing.assert_allclose([face.width, face.height], row[2:4], atol=1e-3)
    np.testing.assert_allclose(face.landmarks.reshape(-1), row[4:14], atol=1e-3)
    assert face.score == pytest.approx(float(row[14]), abs=1e-5)
    np.testing.assert_allclose((face.box[:2] + face.box[2:]) / 2, [8.5 * 8, 4.5 * 8], atol=1e-4)
    assert detector(red_cell(90, 130, 4, 8, (0, 0, 255))) == []


def test_a_fixed_size_is_fitted_into(tmp_path: Path) -> None:
    detector = opened(tmp_path, spot_model((96, 160)))
    # 288 x 384 shrinks by 3 to fill 96 rows; a red block of 24 becomes one cell.
    picture = np.kron(red_cell(96, 128, 3, 5), np.ones((3, 3, 1), np.uint8))
    [face] = detector(picture)
    # A position p in the small copy is (p + 1/2) * 3 - 1/2 in the picture.
    np.testing.assert_allclose((face.box[:2] + face.box[2:]) / 2, (np.array([44, 28]) + 0.5) * 3 - 0.5, atol=1e-3)
    np.testing.assert_allclose([face.width, face.height], [72, 72], atol=1e-3)


def test_the_detection_size_still_bounds_a_fixed_network(tmp_path: Path) -> None:
    detector = opened(tmp_path, spot_model((96, 160)), long_side=64)
    picture = np.kron(red_cell(48, 64, 3, 5), np.ones((2, 2, 1), np.uint8))
    [face] = detector(picture)
    np.testing.assert_allclose([face.width, face.height], [48, 48], atol=1e-3)


@pytest.mark.parametrize("shape", [(1, 1), (3, 2000), (2000, 3), (31, 33)])
@pytest.mark.parametrize("size", [None, (96, 160)], ids=["free", "fixed"])
def test_plain_and_tiny_pictures(tmp_path: Path, shape: tuple[int, int], size: tuple[int, int] | None) -> None:
    assert opened(tmp_path, spot_model(size))(np.zeros((*shape, 3), np.uint8)) == []


def failing(tmp_path: Path, model: bytes, error: type[Exception], **options: Any) -> str:
    with pytest.raises(error) as caught:
        opened(tmp_path, model, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def resized(model: bytes, *shape: int | str) -> bytes:
    proto = onnx.load_model_from_string(model)
    for axis, side in zip(proto.graph.input[0].type.tensor_type.shape.dim, shape, strict=True):
        if isinstance(side, int):
            axis.dim_value = side
        else:
            axis.dim_param = side
    content: bytes = proto.SerializeToString()
    return content


@pytest.mark.parametrize("shape", [(1, 3, 100, 160), (1, 3, 96, "width"), (2, 3, 96, 160)])
def test_odd_fixed_sizes_are_refused(tmp_path: Path, shape: tuple[int | str, ...]) -> None:
    text = failing(tmp_path, resized(spot_model(), *shape), DetectorError)
    assert " x ".join(map(str, shape)) in text
    assert "stub.onnx" in text


def test_a_missing_output_is_another_network(tmp_path: Path) -> None:
    proto = onnx.load_model_from_string(spot_model())
    del proto.graph.output[-1]
    assert "yunet" in failing(tmp_path, proto.SerializeToString(), DetectorError)


def test_wrong_settings_are_refused(tmp_path: Path) -> None:
    failing(tmp_path, spot_model(), UsageError, long_side=1)
    failing(tmp_path, spot_model(), UsageError, threshold=1.0)
