"""Exported and foreign ONNX generators on onnxruntime, with PyTorch nowhere on the way."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from gpen_convert.export import export_generator
from gpen_core.backend import NO_TORCH, CropRuntime, find_weights
from gpen_core.checkpoint import load_generator
from gpen_core.cli import run_command
from gpen_core.config import GPEN_TEMPLATE
from gpen_core.errors import CheckpointError, DeviceError, GpenError, MissingWeightsError, UsageError
from gpen_core.restorer import Options, Restorer
from gpen_core.runtime import Runtime, RuntimeOptions
from gpen_core.runtime_onnx import CPU, CUDA, TENSORRT, OnnxRuntime, choose_providers
from gpen_core.types import Image
from tests.exported import ENLARGING, PLAIN, SEG2FACE, WITHOUT_TORCH, converted, run_process
from tests.legacy import TINY
from tests.stubs import smooth_picture

FLOAT, HALF = TensorProto.FLOAT, TensorProto.FLOAT16


def crops(count: int, size: int = 16) -> list[Image]:
    return [smooth_picture(size, size, seed) for seed in range(count)]


def foreign(
    path: Path,
    operator: str = "Identity",
    size: Any = 16,
    batch: Any = 1,
    kind: int = FLOAT,
    inputs: int = 1,
    metadata: dict[str, str] | None = None,
    output: Any = None,
) -> Path:
    """A network of one operator, as other tools' files are: no metadata, other names, one face at a time."""
    shape = [batch, 3, size, size]
    entering = [helper.make_tensor_value_info(f"x{i}", kind, shape) for i in range(inputs)]
    leaving = helper.make_tensor_value_info("y", kind, output or shape)
    node = helper.make_node(operator, ["x0"], ["y"])
    graph = helper.make_graph([node], "net", entering, [leaving])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    helper.set_model_props(model, metadata or {})
    onnx.save(model, path)
    return path


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Converted files and what was exported from them: net, enlarging, seg2face."""
    folder = tmp_path_factory.mktemp("exported")
    for name, config in (("net", TINY), ("enlarging", ENLARGING), ("seg2face", SEG2FACE)):
        export_generator(converted(folder, config, name), format="onnx")
    export_generator(folder / "net.safetensors", folder / "half.onnx", format="onnx", dtype="fp16")
    return folder


@pytest.mark.parametrize("name", ["net", "enlarging", "seg2face", "half"])
def test_the_same_pictures_as_pytorch(name: str, exported: Path) -> None:
    generator = load_generator(exported / f"{'net' if name == 'half' else name}.safetensors")
    reference = Runtime(generator, generator.config, RuntimeOptions(device="cpu"))
    runtime = OnnxRuntime(exported / f"{name}.onnx", device="cpu", max_batch=3)
    assert runtime.config == generator.config
    for one, other in zip(runtime(crops(7)), reference(crops(7)), strict=True):
        assert one is not None
        assert other is not None
        assert one.shape == other.shape
        assert one.flags.c_contiguous
        assert np.abs(one.astype(int) - other).max() <= 1


def test_what_it_says(exported: Path) -> None:
    runtime = OnnxRuntime(exported / "half.onnx", device="cpu")
    assert isinstance(runtime, CropRuntime)
    assert runtime.description == "cpu fp16 onnxruntime"
    assert runtime.metadata is not None
    assert runtime.metadata.provenance.licence == "CC0-1.0"
    runtime.warm_up()
    assert runtime([]) == []


@pytest.mark.parametrize("kind", [FLOAT, HALF])
@pytest.mark.parametrize("batch", [1, "n"])
def test_files_of_others_run_without_flags(kind: int, batch: Any, tmp_path: Path) -> None:
    runtime = OnnxRuntime(foreign(tmp_path / "net.onnx", kind=kind, batch=batch), device="cpu")
    assert (runtime.config.input_size, runtime.config.output_size) == (16, 16)
    assert (runtime.config.value_range, runtime.config.template) == ((-1, 1), GPEN_TEMPLATE)
    for crop, result in zip(crops(3), runtime(crops(3)), strict=True):
        assert np.array_equal(crop, np.asarray(result))
    assert runtime.metadata is None


def test_restoring_with_a_file_of_others(tmp_path: Path) -> None:
    restorer = Restorer.load(foreign(tmp_path / "net.onnx", "Neg"), None, device="cpu")
    picture = smooth_picture(16, 16)
    restored = restorer(picture, Options(aligned=True)).image
    assert np.abs(restored.astype(int) - (255 - picture.astype(int))).max() <= 1


def test_what_is_not_finite_is_no_picture(tmp_path: Path) -> None:
    # The square root of what is darker than grey.
    runtime = OnnxRuntime(foreign(tmp_path / "net.onnx", "Sqrt", batch="n"), device="cpu", max_batch=2)
    dark, bright = np.zeros((16, 16, 3), np.uint8), np.full((16, 16, 3), 255, np.uint8)
    results = runtime([bright, dark, bright])
    assert [result is None for result in results] == [False, True, False]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inputs": 2}, "2 inputs"),
        ({"size": "side"}, "not B x 3 x size x size"),
        ({"kind": TensorProto.DOUBLE}, r"tensor\(double\)"),
        ({"batch": 4}, "batches of 4 faces only"),
        ({"metadata": {"gpen_core": "{"}}, "not JSON"),
    ],
)
def test_networks_that_are_no_generators(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        OnnxRuntime(foreign(tmp_path / "net.onnx", **options), device="cpu")
    assert str(tmp_path / "net.onnx") in str(caught.value)


def test_metadata_of_another_network(exported: Path, tmp_path: Path) -> None:
    props = onnx.load(exported / "enlarging.onnx").metadata_props
    path = foreign(tmp_path / "net.onnx", metadata={p.key: p.value for p in props})
    with pytest.raises(CheckpointError, match="says 16 -> 32 px, but the network has 16 -> 16"):
        OnnxRuntime(path, device="cpu")


@pytest.mark.parametrize("content", [b"", b"<html>", b"\x80\x02}q\x00."])
def test_files_that_are_not_onnx(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "net.onnx").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"net\.onnx: not a usable ONNX model"):
        OnnxRuntime(tmp_path / "net.onnx", device="cpu")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        OnnxRuntime(tmp_path / "net.onnx")


def test_providers() -> None:
    everything = [TENSORRT, CUDA, CPU]

    def names(device: str, available: list[str]) -> list[str]:
        return [name for name, _ in choose_providers(device, available)]

    assert names("auto", [CPU]) == names("cpu", everything) == [CPU]
    assert names("auto", everything) == names("cuda", everything) == [CUDA, CPU]
    assert names("tensorrt", everything) == everything
    assert choose_providers("cuda:3", everything)[0][1]["device_id"] == "3"
    for device in ("cuda", "cuda:1", "tensorrt"):
        with pytest.raises(DeviceError, match="onnxruntime-gpu"):
            choose_providers(device, [CPU])
    for device in ("gpu", "cuda:", "cuda:x", "cpu:1", "", "mps"):
        with pytest.raises(UsageError, match="unknown device"):
            choose_providers(device, everything)


class Forgetful:
    """A session that has memory for so many faces."""

    def __init__(self, limit: int, message: str = "Failed to allocate memory for requested buffer") -> None:
        self.limit, self.message = limit, message
        self.batches: list[int] = []

    def run(self, names: None, values: dict[str, NDArray[Any]]) -> list[NDArray[Any]]:
        (value,) = values.values()
        self.batches.append(len(value))
        if len(value) > self.limit:
            raise RuntimeError(self.message)
        return [value]


def test_out_of_memory_halves_the_batch(tmp_path: Path) -> None:
    runtime = OnnxRuntime(foreign(tmp_path / "net.onnx", batch="n"), device="cpu", max_batch=8)
    session = Forgetful(3)
    runtime.session = session
    assert all(np.array_equal(a, np.asarray(b)) for a, b in zip(crops(5), runtime(crops(5)), strict=True))
    assert session.batches == [5, 2, 2, 1]
    runtime.session = Forgetful(0)
    with pytest.raises(DeviceError, match="out of memory on cpu with a single 16 px face"):
        runtime(crops(2))
    runtime.session = Forgetful(0, "bad node\nand more")
    with pytest.raises(DeviceError, match=r"onnxruntime failed on cpu \(bad node\)"):
        runtime(crops(1))


def test_threads_share_a_runtime(exported: Path) -> None:
    runtime = OnnxRuntime(exported / "net.onnx", device="cpu")
    wanted = runtime(crops(6))
    found: dict[int, Any] = {}
    workers = [threading.Thread(target=lambda i=i: found.update({i: runtime([crops(6)[i]])[0]})) for i in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert all(np.array_equal(found[i], np.asarray(wanted[i])) for i in range(6))


# Which file a name means, and what contradicts it.


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPEN_CORE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_a_name_means_the_exported_file(home: Path, exported: Path) -> None:
    with pytest.raises(MissingWeightsError, match="gpen-core export gpen-open-512 --format onnx"):
        find_weights("gpen-open-512", "onnx")
    (home / "gpen-open-512.onnx").write_bytes((exported / "net.onnx").read_bytes())
    assert find_weights("gpen-open-512", "onnx") == home / "gpen-open-512.onnx"
    assert find_weights("gpen-open-512", "torch").suffix == ".safetensors"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "onnx", "weights": "net.safetensors"}, "make one with: gpen-core export"),
        ({"backend": "torch"}, "can't run an ONNX file"),
        ({"backend": "tflite"}, "use one of auto, torch, onnx"),
        ({"compile": True}, "leave --compile out"),
        ({"precision": "fp16"}, "is fp32, which --precision fp16 can't change"),
        ({"max_batch": 0}, "a batch of 0 faces"),
    ],
)
def test_contradictions(options: dict[str, Any], message: str, exported: Path) -> None:
    weights = exported / options.pop("weights", "net.onnx")
    with pytest.raises(GpenError, match=message):
        Restorer.load(weights, None, **options)


def test_info_of_a_file_of_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["info", str(foreign(tmp_path / "net.onnx"))]) == 0
    out = capsys.readouterr().out
    assert "16 -> 16 px that does not describe itself" in out
    assert "one face at a time" in out


# Without PyTorch.


def test_enhance_without_pytorch(exported: Path, tmp_path: Path, centerface_path: Path) -> None:
    photo = Path(__file__).parent.parent / "examples" / "astronaut_degraded.jpg"
    face = tmp_path / "face.png"
    assert cv2.imwrite(str(face), smooth_picture(16, 16))
    options = ["--backend", "onnx", "--weights", exported / "net.onnx", "--json"]
    for arguments in ([photo, "--detector", centerface_path], [face, "--aligned"]):
        done = run_process(WITHOUT_TORCH, ["enhance", *arguments, "-o", tmp_path / "out.png", *options])
        assert (done.returncode, done.stderr) == (0, "")
        record = json.loads(done.stdout)
        assert [f["status"] for f in record["faces"]] == ["restored"]
        assert record["runtime"] == "cpu fp32 onnxruntime"
        without = (tmp_path / "out.png").read_bytes()
        assert run_process(PLAIN, ["enhance", *arguments, "-o", tmp_path / "out.png", *options]).returncode == 0
        assert (tmp_path / "out.png").read_bytes() == without


def test_info_without_pytorch(exported: Path) -> None:
    done = run_process(WITHOUT_TORCH, ["info", exported / "net.onnx"])
    assert (done.returncode, done.stderr) == (0, "")
    assert "16 -> 16 px" in done.stdout


def test_nothing_of_pytorch_is_touched() -> None:
    code = (
        "import sys\n"
        "import gpen_core.restorer, gpen_core.batch, gpen_core.runtime_onnx, gpen_weights\n"
        "assert 'torch' not in sys.modules\n"
    )
    assert run_process(code, []).stderr == ""


@pytest.mark.parametrize(
    "command",
    [
        "enhance {face} --aligned --weights {net}.safetensors",
        "enhance {face} --aligned --weights {net}.safetensors --weights {net}.onnx",
        "enhance {face} --aligned --weights {net}.onnx --compile --cache cache",
        "enhance {face} --aligned --weights {net}.onnx --upscaler {net}.safetensors",
        "seg2face {face} --weights {net}.safetensors",
        "convert {net}.safetensors",
        "export {net}.safetensors --format onnx",
        "export gpen-open-512 --format pt2",
        "compile {net}.safetensors --cache cache",
        "info {net}.safetensors",
    ],
)
def test_what_needs_pytorch_says_so(command: str, exported: Path, tmp_path: Path) -> None:
    """In the same words everywhere, where only requirements-onnx.txt is installed."""
    face = tmp_path / "face.png"
    assert cv2.imwrite(str(face), smooth_picture(16, 16))
    arguments = command.format(face=face, net=exported / "net").split()
    absent = "import os, sys; sys.modules |= dict.fromkeys(('torch', 'safetensors', 'einops', 'onnx')); "
    done = run_process(f"{absent}os.chdir({str(tmp_path)!r}); {PLAIN}", arguments)
    assert done.stderr == f"gpen-core: {NO_TORCH}\n"
    assert (done.returncode, done.stdout) == (1, "")
    assert list(tmp_path.iterdir()) == [face]
