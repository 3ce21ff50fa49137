"""Faces are found where they are: decoding against golden values, geometry on stand-in models, the real detector."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import onnx
import onnxruntime
import pytest
import skimage.data
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from gpen_convert import retinaface
from gpen_core import detect
from gpen_core.config import Provenance
from gpen_core.detect import Candidates, Detector, load_detector
from gpen_core.errors import DetectorError, DeviceError, GpenError, UsageError
from gpen_core.sessions import open_session
from gpen_core.types import Face, Image
from tests.stand_in import fill_state
from tests.test_retinaface_net import mobilenet_shapes

GOLDEN = Path(__file__).parent / "golden"
PORTRAITS = GOLDEN / "portraits"
CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
LANDMARKS = {name: np.array(points) for name, points in json.loads((PORTRAITS / "landmarks.json").read_text()).items()}


def portrait(name: str, size: int = 256) -> Image:
    pixels = cv2.imread(str(PORTRAITS / name))
    how = cv2.INTER_AREA if size < 256 else cv2.INTER_CUBIC
    resized = cv2.resize(pixels, (size, size), interpolation=how)
    return np.ascontiguousarray(resized[..., ::-1])


# Decoding


@pytest.mark.parametrize("case", ["", "nms_"], ids=["plain", "overlapping"])
def test_retinaface_decode_equals_the_golden(case: str) -> None:
    golden = np.load(GOLDEN / "retinaface_decode.npz")
    raw = "nms_raw_" if case else "raw_"
    height, width = golden[f"{case or 'raw_'}image_size"]
    found = detect.decode_retinaface(
        golden[raw + "loc"][0], golden[raw + "conf"][0], golden[raw + "landms"][0], (height, width), 0.9
    )
    found = found.take(detect.suppress(found.boxes, found.scores))
    boxes = golden[case + "decoded_dets"]
    # The golden holds all five x, then all five y.
    points = golden[case + "decoded_landmarks_xxxxxyyyyy"].reshape(-1, 2, 5).transpose(0, 2, 1)
    assert len(found.scores) == len(boxes) >= 10
    np.testing.assert_allclose(found.boxes, boxes[:, :4], rtol=0, atol=0.01)
    np.testing.assert_allclose(found.scores, boxes[:, 4], rtol=0, atol=1e-6)
    np.testing.assert_allclose(found.landmarks, points, rtol=0, atol=0.01)


def test_retinaface_anchors_go_by_level_row_column_size() -> None:
    centres, sides = detect.retinaface_anchors(40, 20)
    counts = [5 * 3 * 2, 3 * 2 * 2, 2 * 1 * 2]
    assert len(centres) == len(sides) == sum(counts)
    assert sides[:4].tolist() == [16, 32, 16, 32]
    assert centres[:6].tolist() == [[4, 4], [4, 4], [12, 4], [12, 4], [20, 4], [20, 4]]
    assert centres[6].tolist() == [4, 12]
    assert sides[counts[0] :][:2].tolist() == [64, 128]
    assert sides[-2:].tolist() == [256, 512]
    assert centres[-1].tolist() == [16, 48]


def test_centerface_decode_of_one_cell() -> None:
    maps = {name: np.zeros((channels, 5, 6), np.float32) for name, channels in (("s", 2), ("o", 2), ("l", 10))}
    heat = np.zeros((5, 6), np.float32)
    heat[2, 3] = 0.75
    maps["s"][:, 2, 3] = math.log(20 / 4), math.log(12 / 4)
    maps["o"][:, 2, 3] = 0.25, -0.25
    maps["l"][:, 2, 3] = 0.3, 0.1, 0.4, 0.9, 0.5, 0.5, 0.8, 0.2, 0.7, 0.7
    found = detect.decode_centerface(heat, maps["s"], maps["o"], maps["l"], 0.5)
    # Middle: cell (3, 2) at stride 4 moved by (-0.25, 0.25) cells, half a pixel less for pixel centres.
    middle = np.array([4 * 3.25 - 0.5, 4 * 2.75 - 0.5])
    corner, far = middle - [6, 10], middle + np.array([6, 10])
    np.testing.assert_allclose(found.boxes, [[*corner, *far]], atol=1e-5)
    fractions = np.array([[0.1, 0.3], [0.9, 0.4], [0.5, 0.5], [0.2, 0.8], [0.7, 0.7]])
    np.testing.assert_allclose(found.landmarks, [corner + fractions * [12, 20]], atol=1e-5)
    assert found.scores.tolist() == [0.75]
    assert len(detect.decode_centerface(heat, maps["s"], maps["o"], maps["l"], 0.75).scores) == 0


def test_suppression_keeps_the_best_of_overlapping_boxes() -> None:
    boxes = np.array([[0, 0, 9, 9], [1, 0, 10, 9], [100, 0, 109, 9], [0, 6, 9, 15]], np.float64)
    scores = np.array([0.6, 0.9, 0.7, 0.8])
    assert detect.suppress(boxes, scores).tolist() == [1, 3, 2]
    assert detect.suppress(boxes, np.ones(4)).tolist() == [0, 2, 3]
    assert detect.suppress(np.zeros((0, 4)), np.zeros(0)).tolist() == []
    # Overlap exactly at the limit: 4 of 10 columns of 1 x 7 pixels each way, widths counted with both ends.
    touching = np.array([[0, 0, 6, 0], [3, 0, 9, 0]], np.float64)
    assert detect.suppress(touching, np.ones(2), iou=0.4).tolist() == [0, 1]
    assert detect.suppress(touching, np.ones(2), iou=0.39).tolist() == [0]


@pytest.mark.parametrize(
    ("second", "kept"),
    [
        ([20, 50, 59, 89], [0]),  # a mouth taken for a face
        ([-60, -60, 180, 180], [0]),  # a head and shoulders taken for a face
        ([-10, 80, 29, 139], [0, 1]),  # two people, a third of the smaller face shared
        ([55, 10, 154, 109], [0, 1]),  # cheek to cheek
        ([200, 0, 230, 30], [0, 1]),
    ],
)
def test_nested_boxes_go_and_neighbours_stay(second: list[float], kept: list[int]) -> None:
    boxes = np.array([[0, 0, 99, 99], second], np.float64)
    assert detect.drop_nested(boxes).tolist() == kept


def test_dropping_nested_boxes_of_nobody() -> None:
    assert detect.drop_nested(np.zeros((0, 4))).tolist() == []


FINE = np.array([[30, 40], [70, 40], [50, 60], [35, 80], [65, 80]], np.float64)


@pytest.mark.parametrize(
    ("box", "points", "expected"),
    [
        ([0, 0, 100, 100], FINE, True),
        ([-60, 0, 100, 160], FINE, True),
        ([0, 0, 100, 100], np.full((5, 2), np.nan), False),
        ([0, 0, np.inf, 100], FINE, False),
        ([np.nan, 0, 100, 100], FINE, False),
        ([0, 0, 100, 0], FINE, False),
        ([-3000, -3000, 3000, 3000], FINE, False),
        ([0, 0, 100, 100], np.full((5, 2), 50.0), False),
        ([0, 0, 100, 100], FINE * 0.05 + 50, False),
        ([0, 0, 100, 100], FINE + np.array([400, 0]), False),
        ([320, 0, 420, 100], FINE + np.array([320, 0]), False),
    ],
    ids=["fine", "at border", "nan", "inf box", "nan box", "flat", "vast", "point", "tiny", "far off", "outside"],
)
def test_absurd_candidates_are_refused(box: list[float], points: NDArray[np.float64], expected: bool) -> None:
    candidate = Candidates(np.array([box], np.float64), points[None], np.array([0.9]))
    assert detect.plausible(candidate, (200, 300)).tolist() == [expected]


def test_overflowing_sizes_are_refused_quietly() -> None:
    huge = np.full((2, 1, 1), 1e4, np.float32)
    fractions = np.linspace(0.1, 0.9, 10, dtype=np.float32).reshape(10, 1, 1)
    with np.errstate(all="raise"):
        found = detect.decode_centerface(np.ones((1, 1)), huge, 0 * huge, fractions, 0.5)
        assert detect.plausible(found, (4, 4)).tolist() == [False]


# Stand-in models whose findings are known


FRACTIONS = np.array([[0.3, 0.4], [0.7, 0.4], [0.5, 0.6], [0.35, 0.8], [0.65, 0.8]])
STUB_SIDE = 40.0


def graph_model(nodes: list[onnx.NodeProto], weights: dict[str, NDArray[np.generic]], outputs: list[str]) -> bytes:
    def value(name: str, shape: list[int | str] | None) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)

    graph = helper.make_graph(
        nodes,
        "stub",
        [value("input", [1, 3, "height", "width"])],
        [value(name, None) for name in outputs],
        [numpy_helper.from_array(np.ascontiguousarray(array), name) for name, array in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    data: bytes = model.SerializeToString()
    return data


def conv(name: str, stride: int) -> onnx.NodeProto:
    sides = [stride, stride]
    return helper.make_node("Conv", ["input", f"{name}_w", f"{name}_b"], [name], kernel_shape=sides, strides=sides)


def centerface_stub(*, side: float = STUB_SIDE, landmarks: NDArray[np.float64] = FRACTIONS) -> bytes:
    """Confidence of a cell: the mean of its red values over 255. Each box has the same side."""
    weights: dict[str, NDArray[np.generic]] = {}
    biases = {
        "heat": np.zeros(1),
        "scale": np.full(2, math.log(side / 4)),
        "offset": np.zeros(2),
        "points": landmarks[:, ::-1].reshape(10),
    }
    for name, bias in biases.items():
        kernel = np.zeros((len(bias), 3, 4, 4), np.float32)
        if name == "heat":
            kernel[:, 0] = 1 / (16 * 255)
        weights |= {f"{name}_w": kernel, f"{name}_b": bias.astype(np.float32)}
    return graph_model([conv(name, 4) for name in biases], weights, list(biases))


def retinaface_stub() -> bytes:
    """A face is a cell of 8 whose channel 2 is above the mean by some 100 levels; outputs in an unusual order."""
    nodes: list[onnx.NodeProto] = []
    weights: dict[str, NDArray[np.generic]] = {}
    for name, width in (("conf", 2), ("points", 10), ("loc", 4)):
        weights[f"{name}_shape"] = np.array([1, -1, width], np.int64)
        for stride in (8, 16, 32):
            level = f"{name}{stride}"
            kernel = np.zeros((2 * width, 3, stride, stride), np.float32)
            bias = np.zeros(2 * width, np.float32)
            if name == "conf":
                bias[[0, 2]] = 10
                # Only the first size of the first level ever fires.
                kernel[1, 2] = 0.2 / stride**2 if stride == 8 else 0
            if name == "points":
                bias[:] = np.tile((10 * (FRACTIONS - 0.5)).reshape(10), 2)
            weights |= {f"{level}_w": kernel, f"{level}_b": bias}
            nodes += [
                conv(level, stride),
                helper.make_node("Transpose", [level], [f"{level}_t"], perm=[0, 2, 3, 1]),
                helper.make_node("Reshape", [f"{level}_t", f"{name}_shape"], [f"{level}_r"]),
            ]
        joined = "logits" if name == "conf" else name
        nodes.append(helper.make_node("Concat", [f"{name}{s}_r" for s in (8, 16, 32)], [joined], axis=1))
    nodes.append(helper.make_node("Softmax", ["logits"], ["conf"], axis=-1))
    return graph_model(nodes, weights, ["conf", "points", "loc"])


def opened(tmp_path: Path, model: bytes, **options: Any) -> Detector:
    path = tmp_path / "stub.onnx"
    path.write_bytes(model)
    return load_detector(path, **options)


def spot(height: int, width: int, box: tuple[int, int, int, int], colour: tuple[int, int, int]) -> Image:
    picture = np.zeros((height, width, 3), np.uint8)
    x0, y0, x1, y1 = box
    picture[y0:y1, x0:x1] = colour
    return picture


def assert_face(face: Face, middle: tuple[float, float], sides: tuple[float, float]) -> None:
    corner = np.array(middle) - np.array(sides) / 2
    np.testing.assert_allclose(face.box, [*corner, *(corner + sides)], atol=1e-4)
    np.testing.assert_allclose(face.landmarks, corner + FRACTIONS * sides, atol=1e-4)


def test_families_are_recognised_by_their_outputs(tmp_path: Path) -> None:
    assert opened(tmp_path, centerface_stub()).family == "centerface"
    assert opened(tmp_path, retinaface_stub()).family == "retinaface"


def test_a_converted_retinaface_is_a_detector(tmp_path: Path) -> None:
    path = tmp_path / "converted.onnx"
    retinaface.convert(fill_state(mobilenet_shapes()), path, Provenance("net.pth", "0" * 64))
    detector = load_detector(path, long_side=320, threshold=0.01)
    assert detector.family == "retinaface"
    # Its weights mean nothing; that its outputs fit the anchors of any size is what counts.
    assert isinstance(detector(portrait("male_12.jpg", 500)), list)


def test_position_in_a_picture_that_is_not_shrunk(tmp_path: Path) -> None:
    detector = opened(tmp_path, centerface_stub())
    # The 4 pixels 80..83 have their middle at 81.5.
    [face] = detector(spot(101, 203, (80, 40, 84, 44), (255, 0, 0)))
    assert_face(face, (81.5, 41.5), (STUB_SIDE, STUB_SIDE))
    assert face.score == pytest.approx(1.0)


def test_position_in_a_picture_that_is_shrunk(tmp_path: Path) -> None:
    detector = opened(tmp_path, centerface_stub(), long_side=300)
    # Shrunk by exactly 5, the block is one cell of the detector's grid.
    [face] = detector(spot(1000, 1500, (800, 400, 820, 420), (255, 0, 0)))
    assert_face(face, (809.5, 409.5), (5 * STUB_SIDE, 5 * STUB_SIDE))


def test_axes_that_shrink_by_different_ratios_are_undone_one_by_one(tmp_path: Path) -> None:
    detector = opened(tmp_path, centerface_stub(), long_side=64)
    # 1000 x 99 becomes 64 x 6: 15.625 across, 16.5 down. Columns 500..562 are the cell of 32..35.
    picture = spot(99, 1000, (500, 0, 563, 66), (255, 0, 0))
    best = detector(picture)[0]
    assert_face(best, (34 * 15.625 - 0.5, 2 * 16.5 - 0.5), (STUB_SIDE * 15.625, STUB_SIDE * 16.5))


def test_retinaface_takes_bgr_minus_its_mean(tmp_path: Path) -> None:
    detector = opened(tmp_path, retinaface_stub())
    [face] = detector(spot(90, 130, (64, 32, 72, 40), (255, 0, 0)))
    # Network coordinates are taken as they are: the anchor's centre is at 8 * 8 + 4.
    assert_face(face, (68, 36), (16, 16))
    # 0.2 * (255 - 123) against a bias of 10.
    assert face.score == pytest.approx(1 / (1 + math.exp(10 - 0.2 * 132)), abs=1e-6)
    assert detector(spot(90, 130, (64, 32, 72, 40), (0, 0, 255))) == []


def test_faces_come_most_confident_first(tmp_path: Path) -> None:
    picture = spot(64, 256, (24, 32, 28, 36), (180, 0, 0))
    picture[32:36, 124:128, 0] = 250
    picture[32:36, 224:228, 0] = 215
    faces = opened(tmp_path, centerface_stub())(picture)
    assert [round(face.score * 255) for face in faces] == [250, 215, 180]
    assert [face.box[0] for face in faces] == pytest.approx([105.5, 205.5, 5.5], abs=1e-4)


def test_threshold_is_a_setting(tmp_path: Path) -> None:
    picture = spot(64, 64, (32, 32, 36, 36), (150, 0, 0))
    assert len(opened(tmp_path, centerface_stub())(picture)) == 1
    assert opened(tmp_path, centerface_stub(), threshold=0.6)(picture) == []


def test_collapsed_landmarks_are_no_face(tmp_path: Path) -> None:
    picture = spot(64, 64, (32, 32, 36, 36), (255, 0, 0))
    assert opened(tmp_path, centerface_stub(landmarks=np.full((5, 2), 0.5)))(picture) == []


def test_a_face_too_large_for_the_network_is_read_in_a_coarse_copy(tmp_path: Path) -> None:
    picture = spot(800, 800, (384, 384, 400, 400), (140, 0, 0))
    # A face of 330 in the fine copy is beyond the limit: only the coarse copy, where it is small, counts.
    [face] = opened(tmp_path, centerface_stub(side=330.0))(picture)
    assert_face(face, (391.5, 391.5), (4 * 330, 4 * 330))


# Files that are no detector, and wrong settings


def failing(call: Callable[[], object], error: type[Exception]) -> str:
    with pytest.raises(error) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "not a usable ONNX model"),
        (b"<!DOCTYPE html><html>", "not a usable ONNX model"),
        (b"PK\x03\x04" + bytes(50), "PyTorch checkpoint"),
        (b"\x80\x02}q\x00.", "PyTorch checkpoint"),
        (centerface_stub()[:400], "not a usable ONNX model"),
    ],
    ids=["empty", "web page", "zip checkpoint", "pickle", "truncated"],
)
def test_a_file_that_is_no_onnx_model(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "models" / "detector.onnx"
    path.parent.mkdir()
    path.write_bytes(content)
    text = failing(lambda: load_detector(path), DetectorError)
    assert str(path) in text
    assert expected in text


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    assert "absent.onnx" in failing(lambda: load_detector(tmp_path / "absent.onnx"), DetectorError)
    assert str(tmp_path) in failing(lambda: load_detector(tmp_path), DetectorError)


def test_a_model_of_another_kind_is_refused(tmp_path: Path) -> None:
    identity = graph_model([helper.make_node("Identity", ["input"], ["output"])], {}, ["output"])
    text = failing(lambda: opened(tmp_path, identity), DetectorError)
    assert "1x3x64x64" in text
    assert "retinaface, centerface" in text


def test_a_model_of_one_size_is_refused(tmp_path: Path) -> None:
    model = onnx.load_model_from_string(centerface_stub())
    for axis, size in enumerate((10, 3, 32, 32)):
        model.graph.input[0].type.tensor_type.shape.dim[axis].dim_value = size
    assert "10 x 3 x 32 x 32" in failing(lambda: opened(tmp_path, model.SerializeToString()), DetectorError)


def test_wrong_settings_are_refused(tmp_path: Path) -> None:
    model = centerface_stub()
    for settings in ({"long_side": 0}, {"threshold": 0.0}, {"threshold": 1.5}, {"device": "tpu"}):
        failing(partial(opened, tmp_path, model, **settings), UsageError)


def with_providers(*available: str, starting: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """An onnxruntime that has these providers, of which some start; returns what each session was asked for."""
    asked: list[list[str]] = []
    real = onnxruntime.InferenceSession

    class Session:
        def __init__(self, path: str, options: Any, providers: list[str]) -> None:
            asked.append(providers)
            self.session = real(path, options, providers=["CPUExecutionProvider"])

        def get_providers(self) -> list[str]:
            return [name for name in asked[-1] if name in starting]

        def __getattr__(self, name: str) -> Any:
            return getattr(self.session, name)

    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: list(available))
    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    return asked


def test_cuda_is_used_where_its_provider_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = spot(64, 64, (32, 32, 36, 36), (255, 0, 0))
    [face] = opened(tmp_path, centerface_stub())(picture)
    asked = with_providers(CUDA, CPU, starting=(CUDA, CPU), monkeypatch=monkeypatch)
    [again] = opened(tmp_path, centerface_stub(), device="cuda")(picture)
    # The CPU runs only what CUDA can't.
    assert asked == [[CUDA, CPU]]
    assert np.array_equal(again.box, face.box)
    opened(tmp_path, centerface_stub(), device="cpu")
    assert asked[1:] == [[CPU]]


def test_cuda_without_its_provider_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = with_providers(CPU, starting=(CPU,), monkeypatch=monkeypatch)
    text = failing(lambda: opened(tmp_path, centerface_stub(), device="cuda"), DeviceError)
    assert text == "detector on cuda needs onnxruntime's CUDA provider: pip install onnxruntime-gpu"
    assert asked == []


def test_a_cuda_provider_that_does_not_start_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As of a build for CUDA on a machine without the libraries, where the session quietly uses the CPU.
    with_providers(CUDA, CPU, starting=(CPU,), monkeypatch=monkeypatch)
    text = failing(lambda: opened(tmp_path, centerface_stub(), device="cuda"), DeviceError)
    assert "did not start" in text


class MeetingSession:
    """A session that tells whether two calls of it ever met."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self._meeting = threading.Barrier(2)
        self.met = False

    def run(self, *arguments: Any) -> Any:
        try:
            self._meeting.wait(0.2)
            self.met = True
        except threading.BrokenBarrierError:
            self._meeting.reset()
        return self._session.run(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


def test_a_gpu_looks_at_one_picture_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = []

    def meeting(path: Path, device: str, what: str, failure: type[GpenError]) -> MeetingSession:
        sessions.append(MeetingSession(open_session(path, "cpu", what, failure)))
        return sessions[-1]

    monkeypatch.setattr(detect, "open_session", meeting)
    detector = opened(tmp_path, centerface_stub(), device="cuda")
    picture = np.zeros((64, 64, 3), np.uint8)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(detector, [picture] * 2)) == [[], []]
    assert [session.met for session in sessions] == [False]


# The real detector


@pytest.fixture(scope="module")
def centerface(centerface_path: Path) -> Detector:
    return load_detector(centerface_path)


def spread(found: NDArray[np.float64], expected: NDArray[np.float64]) -> float:
    """Mean distance of landmarks in units of the distance of the eyes."""
    eyes = np.linalg.norm(expected[1] - expected[0])
    return float(np.linalg.norm(found - expected, axis=1).mean() / eyes)


@pytest.mark.parametrize("size", [128, 256, 1024, 2400])
@pytest.mark.parametrize("name", LANDMARKS)
def test_landmarks_lie_on_the_face_at_every_size(centerface: Detector, name: str, size: int) -> None:
    [face] = centerface(portrait(name, size))
    assert spread((face.landmarks + 0.5) * 256 / size - 0.5, LANDMARKS[name]) < 0.1
    x0, y0, x1, y1 = face.box
    assert np.all((face.landmarks > [x0, y0]) & (face.landmarks < [x1, y1]))


@pytest.mark.parametrize("name", LANDMARKS)
def test_left_stays_left_in_the_mirror(centerface: Detector, name: str) -> None:
    [face] = centerface(np.ascontiguousarray(portrait(name)[:, ::-1]))
    mirrored = LANDMARKS[name][[1, 0, 2, 4, 3]]
    mirrored[:, 0] = 255 - mirrored[:, 0]
    assert spread(face.landmarks, mirrored) < 0.1


@pytest.mark.parametrize("name", LANDMARKS)
def test_degraded_faces_are_found(centerface: Detector, name: str) -> None:
    picture = cv2.GaussianBlur(portrait(name, 512), (0, 0), 3)
    small = cv2.resize(picture, (128, 128), interpolation=cv2.INTER_AREA)
    picture = cv2.resize(small, (512, 512), interpolation=cv2.INTER_LINEAR)
    picture = cv2.imdecode(cv2.imencode(".jpg", picture, [cv2.IMWRITE_JPEG_QUALITY, 30])[1], cv2.IMREAD_COLOR)
    [face] = centerface(np.asarray(picture, np.uint8))
    assert spread((face.landmarks + 0.5) / 2 - 0.5, LANDMARKS[name]) < 0.15


def group(columns: int, rows: int, side: int) -> tuple[Image, list[NDArray[np.float64]]]:
    """A picture of columns x rows portraits, and the landmarks of each."""
    picture = np.zeros((rows * side, columns * side, 3), np.uint8)
    points = []
    names = list(LANDMARKS)
    for index in range(columns * rows):
        row, column = divmod(index, columns)
        name = names[(index + row) % len(names)]
        at = np.array([column * side, row * side])
        picture[at[1] : at[1] + side, at[0] : at[0] + side] = portrait(name, side)
        points.append((LANDMARKS[name] + 0.5) * side / 256 - 0.5 + at)
    return picture, points


@pytest.mark.parametrize(("columns", "rows", "side"), [(2, 1, 400), (4, 3, 200), (10, 9, 120)])
def test_everybody_in_a_group_is_found_once(centerface: Detector, columns: int, rows: int, side: int) -> None:
    picture, points = group(columns, rows, side)
    faces = centerface(picture)
    assert len(faces) == len(points)
    for expected in points:
        assert min(spread(face.landmarks, expected) for face in faces) < 0.15
    assert [face.score for face in faces] == sorted((face.score for face in faces), reverse=True)


@pytest.mark.parametrize("name", LANDMARKS)
def test_faces_cut_by_the_border_are_found(centerface: Detector, name: str) -> None:
    picture = portrait(name)
    nose = LANDMARKS[name][2].astype(int)
    for cut in (picture[:, nose[0] :], picture[:, : nose[0]], picture[: nose[1] + 10], picture[nose[1] - 20 :]):
        assert len(centerface(np.ascontiguousarray(cut))) == 1


def test_two_people_close_together_stay_two(centerface: Detector) -> None:
    picture = portrait("male_12.jpg")
    picture[:, 170:] = portrait("male_34.jpg")[:, 60:146]
    assert len(centerface(picture)) == 2


def test_a_real_photo(centerface: Detector) -> None:
    picture = np.ascontiguousarray(skimage.data.astronaut())
    [face] = centerface(picture)
    read_by_eye = np.array([[204, 101], [246, 104], [225, 127], [205, 140], [243, 140]], np.float64)
    assert spread(face.landmarks, read_by_eye) < 0.1


@pytest.mark.parametrize("name", ["brick", "coffee", "chelsea", "rocket", "coins", "moon", "retina", "page"])
def test_no_face_is_found_where_there_is_none(centerface: Detector, name: str) -> None:
    pixels = np.asarray(getattr(skimage.data, name)())
    picture = pixels if pixels.ndim == 3 else np.repeat(pixels[..., None], 3, axis=2)
    assert centerface(np.ascontiguousarray(picture)) == []


@pytest.mark.parametrize("size", [(1, 1), (3, 2000), (2000, 3), (1, 100_000), (7, 5), (31, 33)])
@pytest.mark.parametrize("level", [0, 128, 255])
def test_plain_and_tiny_pictures(centerface: Detector, size: tuple[int, int], level: int) -> None:
    assert centerface(np.full((*size, 3), level, np.uint8)) == []


def test_noise_is_no_face(centerface: Detector) -> None:
    assert centerface(np.random.default_rng(0).integers(0, 256, (480, 640, 3), np.uint8)) == []


def as_numbers(faces: list[Face]) -> list[tuple[object, ...]]:
    return [(face.score, face.box.tolist(), face.landmarks.tolist()) for face in faces]


def test_the_same_in_threads_and_again(centerface: Detector) -> None:
    pictures = [portrait(name, size) for name in LANDMARKS for size in (256, 600)]
    alone = [as_numbers(centerface(picture)) for picture in pictures]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda picture: as_numbers(centerface(picture)), pictures))
    assert alone == together


def test_the_picture_is_left_alone(centerface: Detector) -> None:
    picture = portrait("male_12.jpg", 1400)
    before = picture.copy()
    centerface(picture)
    assert np.array_equal(picture, before)
