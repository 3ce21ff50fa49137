"""ONNX files that keep weights elsewhere are refused in one line, before anything opens what they name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from gpen_core import onnx_file
from gpen_core.cli import run_command
from gpen_core.detect import load_detector
from gpen_core.errors import CheckpointError, DetectorError, GpenError
from gpen_core.onnx_file import outside, require_whole
from gpen_core.parse import load_parser
from gpen_core.runtime_onnx import OnnxRuntime, describe_file, survey
from tests.stubs import smooth_picture

VALUES = np.arange(3 * 16 * 16, dtype=np.float32).reshape(1, 3, 16, 16)


def model(tensor: Any) -> Any:
    """x + tensor, for pictures of 16 px."""
    shape = [1, 3, 16, 16]
    entering, leaving = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "xy")
    graph = helper.make_graph([helper.make_node("Add", ["x", "w"], ["y"])], "net", [entering], [leaving], [tensor])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def inside() -> Any:
    return numpy_helper.from_array(VALUES, "w")


def elsewhere(location: str, name: str = "w") -> Any:
    tensor = numpy_helper.from_array(VALUES, name)
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("length", str(VALUES.nbytes))):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, value
    return tensor


def in_a_constant(location: str) -> Any:
    net = model(inside())
    net.graph.node.insert(0, helper.make_node("Constant", [], ["c"], value=elsewhere(location)))
    return net


def in_a_branch(location: str) -> Any:
    net = model(inside())
    leaving = helper.make_tensor_value_info("b", TensorProto.FLOAT, [1, 3, 16, 16])
    branch = helper.make_graph([], "branch", [], [leaving], [elsewhere(location, "b")])
    net.graph.node.append(helper.make_node("If", ["x"], ["z"], then_branch=branch, else_branch=branch))
    return net


def in_sparse_values(location: str) -> Any:
    net = model(inside())
    net.graph.sparse_initializer.add().values.CopyFrom(elsewhere(location))
    return net


def in_a_list(location: str) -> Any:
    net = model(inside())
    attribute = net.graph.node[0].attribute.add()
    attribute.name, attribute.type = "list", onnx.AttributeProto.TENSORS
    attribute.tensors.append(elsewhere(location))
    return net


def in_a_function(location: str) -> Any:
    net = model(inside())
    net.functions.add().node.add().CopyFrom(helper.make_node("Constant", [], ["c"], value=elsewhere(location)))
    return net


def in_training(location: str) -> Any:
    net = model(inside())
    net.training_info.add().initialization.initializer.append(elsewhere(location))
    return net


def in_an_initializer(location: str) -> Any:
    return model(elsewhere(location))


PLACES: list[Callable[[str], Any]] = [
    in_an_initializer,
    in_a_constant,
    in_a_branch,
    in_sparse_values,
    in_a_list,
    in_a_function,
    in_training,
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with weights and a FIFO in it, and weights beside it."""
    inner = tmp_path / "in"
    inner.mkdir()
    for path in (inner / "net.onnx.data", tmp_path / "outside.data"):
        path.write_bytes(VALUES.tobytes())
    (inner / "link").symlink_to(tmp_path / "outside.data")
    os.mkfifo(inner / "fifo")
    return inner


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("location", ["net.onnx.data", "../outside.data", "link", "fifo", "/dev/zero", "absent", ""])
def test_weights_elsewhere_are_refused(
    place: Callable[[str], Any], location: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnxruntime, "InferenceSession", None)
    path = folder / "net.onnx"
    path.write_bytes(place(location).SerializeToString())
    named = f" ({location})" if location else ""
    said = f"{path}: its weights are in another file{named}, which is not opened; save it as one file"
    takers: list[tuple[Callable[[Path], object], type[GpenError]]] = [
        (lambda path: OnnxRuntime(path, device="cpu"), CheckpointError),
        (survey, CheckpointError),
        (describe_file, CheckpointError),
        (load_detector, DetectorError),
        (load_parser, CheckpointError),
    ]
    for take, error in takers:
        with pytest.raises(error) as caught:
            take(path)
        assert str(caught.value).startswith(said)
        assert "\n" not in str(caught.value)


def test_the_command_says_so_in_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "net.onnx"
    path.write_bytes(model(elsewhere("net.onnx.data")).SerializeToString())
    face = folder / "face.png"
    assert cv2.imwrite(str(face), smooth_picture(16, 16))
    assert run_command(["enhance", str(face), "--aligned", "--weights", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"gpen-core: {path}: its weights are in another file (net.onnx.data), which is not opened")
    onnx.save_model(onnx.load(path), path)
    assert run_command(["enhance", str(face), "--aligned", "--weights", str(path)]) == 0, "the cure does not help"


def test_weights_inside_are_not(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    path.write_bytes(model(inside()).SerializeToString())
    require_whole(path, CheckpointError)
    assert OnnxRuntime(path, device="cpu").config.input_size == 16


def test_other_ways_to_write_the_same() -> None:
    """Whatever a reader of protocol buffers takes for a tensor elsewhere is one."""

    def message(number: int, content: bytes) -> bytes:
        return bytes([number << 3 | 2, len(content)]) + content

    def nested(tensor: bytes) -> bytes:
        return message(7, message(5, tensor))

    location, value = message(1, b"location"), message(2, b"file")
    assert outside(nested(message(13, location + value))) == "file"
    assert outside(nested(message(13, value + location))) == "file"
    assert outside(nested(message(13, message(1, b"length") + value))) == ""
    for one in (b"\x01", b"\x81\x00", b"\x81\x80\x80\x80\x10"):
        assert outside(nested(b"\x70" + one)) == ""
    # The number of the field itself with bits beyond those that count.
    assert outside(nested(b"\xf0\x80\x80\x80\x10\x01")) == ""
    assert outside(nested(b"\x70\x00")) is None
    assert outside(message(5, message(13, location + value))) is None, "not a part of the graph"


@pytest.mark.parametrize(
    "content", [b"", b"<html>", b"\x08", b"\x3a\x05ab", b"\x3b\x3c", b"\xff" * 20, b"\x00\x00", b"\x80\x02}q\x00."]
)
def test_what_is_no_model(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "net.onnx"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"net\.onnx: not a usable ONNX model"):
        OnnxRuntime(path, device="cpu")


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "net.onnx")
    for load, error in ((load_detector, DetectorError), (load_parser, CheckpointError)):
        with pytest.raises(error, match="not a regular file"):
            load(tmp_path / "net.onnx")
        with pytest.raises(error, match="no such file"):
            load(tmp_path / "absent.onnx")
    with pytest.raises(CheckpointError, match="not a file"):
        require_whole(tmp_path / "net.onnx", CheckpointError)


def test_every_field_that_can_hold_a_tensor_is_looked_at() -> None:
    """Against the definition of the format that is installed."""
    kinds = {
        "ModelProto": "model",
        "TrainingInfoProto": "training",
        "GraphProto": "graph",
        "FunctionProto": "function",
        "NodeProto": "node",
        "AttributeProto": "attribute",
        "SparseTensorProto": "sparse",
        "TensorProto": "tensor",
    }
    found: dict[str, dict[int, str]] = {}
    waiting = [onnx.ModelProto.DESCRIPTOR]
    while waiting:
        message = waiting.pop()
        held = {field.number: field.message_type for field in message.fields if field.message_type}
        found[kinds[message.name]] = {number: kinds[kind.name] for number, kind in held.items() if kind.name in kinds}
        waiting += [kind for kind in held.values() if kind.name in kinds and kinds[kind.name] not in found]
    found["tensor"] = {onnx.TensorProto.DESCRIPTOR.fields_by_name["external_data"].number: "place"}
    assert {**found, "place": {}} == onnx_file.NESTED
    assert onnx.TensorProto.DESCRIPTOR.fields_by_name["data_location"].number == onnx_file.DATA_LOCATION
