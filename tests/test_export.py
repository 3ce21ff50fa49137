"""Exported networks compute what PyTorch computes, say what they are, and come whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

import gpen_weights
from gpen_convert import export
from gpen_convert.export import export_generator, probe
from gpen_convert.generator import write_verified
from gpen_convert.infer import infer_config
from gpen_convert.keymap import fold
from gpen_core.ahead import Fixed
from gpen_core.checkpoint import load_generator
from gpen_core.cli import run_command
from gpen_core.config import GeneratorConfig, WeightsMetadata
from gpen_core.errors import CheckpointError, DeviceError, GpenError, UsageError
from gpen_core.model import Generator
from tests.exported import ENLARGING, PLAIN, PROVENANCE, SEG2FACE, converted, run_process
from tests.legacy import TINY, golden_case

ADDED = GeneratorConfig(input_size=16, output_size=16, channels=(8, 8, 4), style_dim=16, n_mlp=2, concat=False)
BATCHES = (1, 3, 8)
# From docs/operators.md of onnx-tensorrt for TensorRT 10.15 (February 2026), which takes opsets 9 to 24: operators that
# networks like these could meet, by the types that they are supported for. (Equal gives BOOL.)
TENSORRT_OPSETS = range(9, 25)
FLOATING = {"FLOAT", "FLOAT16", "BFLOAT16"}
NUMBERS = FLOATING | {"INT32", "INT64"}
TENSORRT = {
    **dict.fromkeys(("Clip", "Conv", "ConvTranspose", "Gemm", "LeakyRelu", "MatMul"), FLOATING),
    **dict.fromkeys(("Reciprocal", "Resize", "Sqrt"), FLOATING),
    **dict.fromkeys(("Add", "Div", "Max", "Min", "Mul", "Pad", "Pow", "Range", "Sub", "Sum"), NUMBERS),
    **dict.fromkeys(("ReduceMean", "ReduceSum"), NUMBERS),
    **dict.fromkeys(("Cast", "Concat", "Constant", "ConstantOfShape", "Equal", "Expand"), NUMBERS | {"BOOL"}),
    **dict.fromkeys(("Flatten", "Gather", "Identity", "Reshape", "Shape", "Slice"), NUMBERS | {"BOOL"}),
    **dict.fromkeys(("Split", "Squeeze", "Tile", "Transpose", "Unsqueeze", "Where"), NUMBERS | {"BOOL"}),
}
# Its restrictions that matter here: these inputs, by their position, must be constants.
TENSORRT_CONSTANT = {"ReduceMean": 1, "ReduceSum": 1, "Squeeze": 1, "Unsqueeze": 1}


def run(path: Path, image: torch.Tensor) -> Any:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(["output"], {"input": image.numpy()})[0]


def expected(generator: Generator, image: torch.Tensor) -> Any:
    with torch.inference_mode():
        return generator(image).numpy()


def relative(expected: Any, found: Any) -> float:
    assert expected.shape == found.shape
    return float(np.abs(expected - found).max() / np.abs(expected).max())


def decibels(expected: Any, found: Any) -> float:
    assert expected.shape == found.shape
    return float(20 * np.log10(np.abs(expected).max() / np.sqrt(np.mean((expected - found) ** 2))))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted(tmp_path_factory.mktemp("tiny"), TINY)


@pytest.mark.parametrize("config", [TINY, ENLARGING, SEG2FACE, ADDED], ids=["tiny", "enlarging", "seg2face", "added"])
def test_onnx_computes_the_same_at_any_batch(config: GeneratorConfig, tmp_path: Path) -> None:
    source = converted(tmp_path, config)
    export_generator(source, tmp_path / "net.onnx", format="onnx")
    export_generator(source, tmp_path / "half.onnx", format="onnx", dtype="fp16")
    generator = load_generator(source)
    for batch in (*BATCHES, 20):
        image = probe(config, batch)
        wanted = expected(generator, image)
        assert relative(wanted, run(tmp_path / "net.onnx", image)) <= 1e-4
        assert decibels(wanted, run(tmp_path / "half.onnx", image)) >= 55


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_a_published_structure(dtype: str, tmp_path: Path) -> None:
    case = golden_case("bfr-256")
    config = infer_config({name: tuple(tensor.shape) for name, tensor in case.state.items()})
    source, target = tmp_path / "net.safetensors", tmp_path / "net.onnx"
    write_verified(source, WeightsMetadata(config, PROVENANCE), fold(config, case.state, torch.float32))
    export_generator(source, target, format="onnx", dtype=dtype)
    found = run(target, case.image)[..., :: case.stride, :: case.stride]
    error = np.abs(found - case.output)
    if dtype == "fp32":
        assert error.max() <= 1e-4 * case.absmax
    else:
        assert 20 * np.log10(case.absmax / np.sqrt(np.mean(error**2))) >= 55


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_the_bundled_weights(dtype: str, tmp_path: Path) -> None:
    source = gpen_weights.resolve("gpen-open-512", suffixes=(".safetensors",))
    target = tmp_path / "net.onnx"
    export_generator(source, target, format="onnx", dtype=dtype)
    generator = load_generator(source)
    for batch in BATCHES:
        image = probe(generator.config, batch)
        wanted, found = expected(generator, image), run(target, image)
        assert relative(wanted, found) <= 1e-4 if dtype == "fp32" else decibels(wanted, found) >= 55


def test_the_graph_is_a_drop_in(tiny: Path, tmp_path: Path) -> None:
    export_generator(tiny, tmp_path / "net.onnx", format="onnx", dtype="fp16")
    model = onnx.load(tmp_path / "net.onnx")
    (entering,), (leaving,) = model.graph.input, model.graph.output
    for value, name in ((entering, "input"), (leaving, "output")):
        shape = [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]
        assert (value.name, shape) == (name, ["batch", 3, 16, 16])
        assert value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    assert [(opset.domain, opset.version) for opset in model.opset_import] == [("", 17)]
    assert WeightsMetadata.decode({p.key: p.value for p in model.metadata_props}) == WeightsMetadata(TINY, PROVENANCE)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("config", [TINY, ENLARGING, ADDED], ids=["tiny", "enlarging", "added"])
def test_every_operator_is_known_to_tensorrt(config: GeneratorConfig, dtype: str, tmp_path: Path) -> None:
    target = tmp_path / "net.onnx"
    export_generator(converted(tmp_path, config), target, format="onnx", dtype=dtype)
    model = onnx.shape_inference.infer_shapes(onnx.load(target), strict_mode=True)
    nodes = model.graph.node
    assert {node.domain for node in nodes} == {""}
    assert model.opset_import[0].version in TENSORRT_OPSETS
    values = [*model.graph.value_info, *model.graph.output]
    types = {value.name: onnx.TensorProto.DataType.Name(value.type.tensor_type.elem_type) for value in values}
    for node in nodes:
        assert {types[name] for name in node.output} <= TENSORRT[node.op_type], node.name
    constants = {tensor.name for tensor in model.graph.initializer}
    constants |= {name for node in nodes if node.op_type == "Constant" for name in node.output}
    for node in nodes:
        position = TENSORRT_CONSTANT.get(node.op_type)
        if position is not None and len(node.input) > position:
            assert node.input[position] in constants, node.name


def test_fp16_keeps_styles_and_demodulation_in_fp32(tiny: Path, tmp_path: Path) -> None:
    target = tmp_path / "net.onnx"
    export_generator(tiny, target, format="onnx", dtype="fp16")
    model = onnx.shape_inference.infer_shapes(onnx.load(target))
    kinds = {v.name: v.type.tensor_type.elem_type for v in model.graph.value_info}
    kinds |= {i.name: i.data_type for i in model.graph.initializer}
    half, full = onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT
    of = {op: [n for n in model.graph.node if n.op_type == op] for op in ("Conv", "Gemm", "Sqrt")}
    assert all(kinds[n.input[1]] == half for n in of["Conv"])
    assert all(kinds[name] == full for op in ("Gemm", "Sqrt") for n in of[op] for name in n.output)
    assert all(of.values())


def test_the_same_bytes_in_every_process(tiny: Path, tmp_path: Path) -> None:
    export_generator(tiny, tmp_path / "one.onnx", format="onnx")
    export_generator(tiny, tmp_path / "two.onnx", format="onnx")
    arguments = ["export", tiny, "--format", "onnx", "-o", tmp_path / "three.onnx"]
    assert run_process(PLAIN, arguments).returncode == 0
    assert len({(tmp_path / f"{name}.onnx").read_bytes() for name in ("one", "two", "three")}) == 1


def test_the_command(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "net.onnx"
    assert run_command(["export", str(tiny), "--format", "onnx", "-o", str(target)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert str(target) in out
    assert "batch 1, 3, 8" in out
    assert run_command(["info", str(target)]) == 0
    told = capsys.readouterr().out
    for part in ("16 -> 16 px", "CC0-1.0", "ONNX, fp32", "gpen-core"):
        assert part in told


NEEDS_PACKAGES = pytest.mark.skipif(not hasattr(torch._inductor, "aoti_load_package"), reason="needs PyTorch 2.6")


def test_a_name_is_exported_to_the_working_folder(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    stored = home / "GPEN-BFR-256.safetensors"
    stored.write_bytes(tiny.read_bytes())
    monkeypatch.setenv("GPEN_CORE_HOME", str(home))
    monkeypatch.chdir(here)
    for name in ("GPEN-BFR-256", "gpen-bfr-256", stored.name):
        assert run_command(["export", name, "--format", "onnx"]) == 0
        (here / "GPEN-BFR-256.onnx").unlink()
    assert run_command(["export", str(stored), "--format", "onnx"]) == 0
    assert sorted(path.name for path in home.iterdir()) == ["GPEN-BFR-256.onnx", stored.name]
    (here / "GPEN-BFR-256.onnx").write_bytes(b"another")
    assert run_command(["export", "GPEN-BFR-256", "--format", "onnx"]) == 1
    assert "a file is there that was not made from" in capsys.readouterr().err
    assert (here / "GPEN-BFR-256.onnx").read_bytes() == b"another"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ({"format": "tflite"}, UsageError, "use onnx or pt2"),
        ({"format": "onnx", "dtype": "int8"}, UsageError, "use fp32 or fp16"),
        ({"format": "onnx", "device": "cuda"}, UsageError, "runs on every device"),
        pytest.param({"format": "pt2", "dtype": "fp16"}, DeviceError, "needs --device cuda", marks=NEEDS_PACKAGES),
        ({"format": "onnx", "output": Path("net.pt2")}, UsageError, r"must be named \*\.onnx"),
        ({"format": "onnx", "output": Path("nowhere/net.onnx")}, UsageError, "does not exist"),
    ],
)
def test_wrong_arguments(
    arguments: dict[str, Any], code: type[GpenError], message: str, tiny: Path, tmp_path: Path
) -> None:
    if "output" in arguments:
        arguments = {**arguments, "output": tmp_path / arguments["output"]}
    with pytest.raises(code, match=message):
        export_generator(tiny, **arguments)
    assert list(tmp_path.iterdir()) == []
    assert [path.name for path in tiny.parent.iterdir()] == [tiny.name]


def test_what_disagrees_is_not_written(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = tmp_path / "net.onnx"
    before.write_bytes(b"what was there")

    class Off(Fixed):
        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return super().forward(image) * 1.01

    monkeypatch.setattr(export, "Fixed", Off)
    with pytest.raises(CheckpointError, match="not written, onnxruntime and PyTorch disagree"):
        export_generator(tiny, before, format="onnx")
    assert before.read_bytes() == b"what was there"
    assert list(tmp_path.iterdir()) == [before]


def test_a_network_that_depends_on_its_batch_is_not_written(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Frozen(Fixed):
        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return super().forward(image) * torch.ones(2, 1, 1, 1)

    monkeypatch.setattr(export, "Fixed", Frozen)
    with pytest.raises(CheckpointError, match="not written, onnxruntime fails at batch 3"):
        export_generator(tiny, tmp_path / "net.onnx", format="onnx")
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_generator(tmp_path: Path) -> None:
    (tmp_path / "net.safetensors").write_text("<html>")
    with pytest.raises(CheckpointError, match="HTML"):
        export_generator(tmp_path / "net.safetensors", format="onnx")


def test_the_measures() -> None:
    one = np.array([[1.0, -2.0]])
    assert export.difference(one, one + np.array([[0.0, 0.02]])) == pytest.approx(
        (0.01, 20 * np.log10(2 / (0.02 / 2**0.5)))
    )
    assert export.difference(one, one)[0] == 0
    assert not export.Agreement((1,), *export.difference(one, one * np.nan)).good("fp16")
    assert not export.Agreement((1,), *export.difference(one, one[:, :1])).good("fp32")
