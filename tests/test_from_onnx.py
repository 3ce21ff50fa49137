"""Generators exported by others: weights recovered from the graph, or one line that says why not."""

from __future__ import annotations

import copy
import io
import logging
import sys
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from gpen_convert import parsenet
from gpen_convert.convert import convert
from gpen_convert.from_onnx import recover
from gpen_convert.generator import Claims
from gpen_convert.keymap import fold
from gpen_core.checkpoint import build_generator, load_generator, read_metadata
from gpen_core.config import FFHQ_TEMPLATE, GeneratorConfig, Provenance, WeightsMetadata
from gpen_core.errors import CheckpointError, GpenError, UsageError
from tests.legacy import TINY, image_for, legacy_state
from tests.legacy_net import LegacyNet
from tests.reference import generate
from tests.stand_in import PROVENANCE, fill_state, relative
from tests.test_parsenet import narrow_shapes

# One mapping layer more than usual here, and a style as wide as the widest layer, so that shapes alone don't tell.
SQUARE = GeneratorConfig(input_size=32, output_size=32, channels=(8, 8, 8, 4), style_dim=8, n_mlp=3)


def ours(config: GeneratorConfig) -> nn.Module:
    tensors = fold(config, legacy_state(config), torch.float32)
    return build_generator(WeightsMetadata(config, Provenance("", "")), tensors)


def theirs(config: GeneratorConfig) -> nn.Module:
    return LegacyNet(legacy_state(config)).eval()


@cache
def exported(make: Callable[[GeneratorConfig], nn.Module], config: GeneratorConfig, folding: bool, free: bool) -> bytes:
    buffer = io.BytesIO()
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    net = make(config)
    image = image_for(config, batch=1).to(next(net.parameters()).dtype)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            net,
            (image,),
            buffer,  # type: ignore[arg-type,unused-ignore]
            input_names=["input"],
            output_names=["output"],
            dynamic_axes={"input": {0: "batch"}, "output": {0: "batch"}} if free else None,
            opset_version=17,
            do_constant_folding=folding,
            dynamo=False,
        )
    return buffer.getvalue()


def put(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def refused(path: Path, error: type[GpenError] = CheckpointError, **options: Any) -> str:
    before = sorted(path.parent.iterdir())
    with pytest.raises(error) as caught:
        convert(path, **options)
    text = str(caught.value)
    assert "\n" not in text
    assert str(path) in text
    assert sorted(path.parent.iterdir()) == before
    return text


def test_the_exported_formulation_is_the_originals() -> None:
    state = legacy_state(TINY)
    image = image_for(TINY, batch=1)
    with torch.no_grad():
        found = theirs(TINY)(image)
    assert relative(found, generate({key: value.double() for key, value in state.items()}, image.double())) < 1e-6


CASES = [(theirs, True, False), (theirs, False, False), (ours, True, False), (ours, False, False), (ours, True, True)]


@pytest.mark.parametrize("config", [TINY, SQUARE], ids=["tiny", "square"])
@pytest.mark.parametrize(("make", "folding", "free"), CASES)
def test_weights_come_back(
    tmp_path: Path, make: Callable[[GeneratorConfig], nn.Module], folding: bool, free: bool, config: GeneratorConfig
) -> None:
    # Named like a checkpoint: content counts.
    source = put(tmp_path / "model.pth", exported(make, config, folding, free))
    lines = convert(source)
    target = tmp_path / "model.safetensors"
    assert str(target) in "\n".join(lines)
    metadata = read_metadata(target)
    assert metadata.config == config
    assert metadata.provenance.source_name == "model.pth"
    expected = fold(config, legacy_state(config), torch.float32)
    found = load_generator(target).state_dict()
    assert {name: tuple(t.shape) for name, t in found.items()} == {n: tuple(t.shape) for n, t in expected.items()}
    for name, tensor in expected.items():
        assert relative(found[name], tensor) < 1e-6, name


def test_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    source = put(tmp_path / "model.onnx", exported(theirs, TINY, True, False))
    for name in ("one.safetensors", "two.safetensors"):
        convert(source, tmp_path / name)
    assert (tmp_path / "one.safetensors").read_bytes() == (tmp_path / "two.safetensors").read_bytes()


def test_names_and_the_order_of_storage_do_not_matter(tmp_path: Path) -> None:
    model = onnx.load_model_from_string(exported(theirs, TINY, True, False))
    names = {tensor.name: f"w{i}" for i, tensor in enumerate(reversed(model.graph.initializer))}
    shuffled = [copy.deepcopy(tensor) for tensor in reversed(model.graph.initializer)]
    for tensor in shuffled:
        tensor.name = names[tensor.name]
    del model.graph.initializer[:]
    model.graph.initializer.extend(shuffled)
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
    assert recover(put(tmp_path / "model.onnx", model.SerializeToString())).config == TINY


@pytest.mark.parametrize("level", ["ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED"])
@pytest.mark.parametrize("make", [theirs, ours])
def test_graphs_that_onnxruntime_optimised(
    tmp_path: Path, make: Callable[[GeneratorConfig], nn.Module], level: str
) -> None:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    options.optimized_model_filepath = str(tmp_path / "model.onnx")
    options.log_severity_level = 4
    onnxruntime.InferenceSession(exported(make, TINY, True, False), options, providers=["CPUExecutionProvider"])
    assert recover(tmp_path / "model.onnx").config == TINY


def test_filter_taps_that_an_optimiser_moved(tmp_path: Path) -> None:
    model = onnx.load_model_from_string(exported(ours, TINY, True, False))
    makers = {name: node for node in model.graph.node for name in node.output}
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    moved = 0
    for node in model.graph.node:
        if node.op_type == "Conv" and node.input[1] in ("encoder.1.weight", "encoder.2.weight"):
            scaling = makers[node.input[0]]
            assert scaling.op_type == "Mul"
            node.input[0] = scaling.input[0]
            tensor = stored[node.input[1]]
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) / np.float32(64), tensor.name))
            moved += 1
    assert moved == 2
    recovered = recover(put(tmp_path / "model.onnx", model.SerializeToString()))
    expected = fold(TINY, legacy_state(TINY), torch.float32)
    assert all(relative(recovered.tensors[name], expected[name]) < 1e-6 for name in expected)


def theirs_in_half(config: GeneratorConfig) -> nn.Module:
    return theirs(config).half()


def test_half_precision(tmp_path: Path) -> None:
    recovered = recover(put(tmp_path / "model.onnx", exported(theirs_in_half, TINY, True, False)))
    expected = fold(TINY, legacy_state(TINY), torch.float32)
    for name, tensor in expected.items():
        assert relative(recovered.tensors[name], tensor) < 1e-3, name


def test_what_the_user_says_is_recorded(tmp_path: Path) -> None:
    source = put(tmp_path / "model.onnx", exported(theirs, TINY, True, False))
    convert(source, task="seg2face", licence="mine", template="ffhq", dtype="fp16")
    metadata = read_metadata(tmp_path / "model.safetensors")
    assert metadata.config.task == "seg2face"
    assert metadata.config.value_range == (0, 1)
    assert metadata.config.template == FFHQ_TEMPLATE
    assert metadata.provenance.licence == "mine"


def test_contradictions_are_refused(tmp_path: Path) -> None:
    source = put(tmp_path / "model.onnx", exported(theirs, TINY, True, False))
    assert "--style-dim 512" in refused(source, UsageError, claims=Claims(style_dim=512))
    assert "--key" in refused(source, UsageError, key="g_ema")


def changed(change: Callable[[Any], object]) -> bytes:
    model = onnx.load_model_from_string(exported(theirs, TINY, True, False))
    change(model)
    content: bytes = model.SerializeToString()
    return content


def first_node(model: Any, kind: str) -> Any:
    return next(node for node in model.graph.node if node.op_type == kind)


def other_slope(model: Any) -> None:
    first_node(model, "LeakyRelu").attribute[0].f = 0.1


def other_width(model: Any) -> None:
    tensor = next(t for t in model.graph.initializer if t.dims == [8, 4, 3, 3])
    tensor.CopyFrom(numpy_helper.from_array(np.zeros((9, 4, 3, 3), np.float32), tensor.name))


def other_first_kernel(model: Any) -> None:
    tensor = next(t for t in model.graph.initializer if t.dims == [4, 3, 1, 1])
    tensor.CopyFrom(numpy_helper.from_array(np.zeros((4, 3, 3, 3), np.float32), tensor.name))


def unknown_operator(model: Any) -> None:
    first_node(model, "LeakyRelu").op_type = "LeakyReluOfMine"


def cut_weight(model: Any) -> None:
    tensor = next(t for t in model.graph.initializer if t.dims == [8, 4, 3, 3])
    tensor.raw_data = tensor.raw_data[:-8]


def free_size(model: Any) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[2].dim_param = "height"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (other_slope, "computes something else"),
        (other_width, "instead of [8, 9, 3, 3]"),
        (other_first_kernel, "begin with GPEN's 1x1 convolution"),
        (unknown_operator, "onnxruntime can't run it"),
        (cut_weight, "not a sound ONNX model"),
        (free_size, "one square picture"),
    ],
)
def test_other_graphs_are_refused(tmp_path: Path, change: Callable[[Any], object], words: str) -> None:
    assert words in refused(put(tmp_path / "model.onnx", changed(change)))


class WithNoise(nn.Module):
    """Noise that was drawn once, as an exporter bakes it in."""

    def __init__(self, generator: nn.Module, noise: list[Tensor]) -> None:
        super().__init__()
        self.generator, self.drawn = generator, noise

    def forward(self, image: Tensor) -> Tensor:
        result: Tensor = self.generator(image, self.drawn)
        return result


def enlarging(config: GeneratorConfig) -> nn.Module:
    generator = ours(config)
    return WithNoise(generator, generator.noise())  # type: ignore[operator]


def test_larger_outputs_are_refused(tmp_path: Path) -> None:
    config = GeneratorConfig(input_size=16, output_size=32, channels=(8, 8, 4, 4), style_dim=16, n_mlp=2)
    text = refused(put(tmp_path / "model.onnx", exported(enlarging, config, True, False)))
    assert "16 into 32 px" in text


@pytest.mark.parametrize(
    ("content", "words"),
    [(exported(theirs, TINY, True, False)[:5000], "not a whole ONNX model"), (b"\x08", "not a whole ONNX model")],
    ids=["truncated", "almost nothing"],
)
def test_damaged_files(tmp_path: Path, content: bytes, words: str) -> None:
    assert words in refused(put(tmp_path / "model.onnx", content))


def test_another_network(tmp_path: Path) -> None:
    path = tmp_path / "parser.onnx"
    parsenet.convert(fill_state(narrow_shapes()), path, PROVENANCE)
    assert "no GPEN generator" in refused(path)


def outside(tensor: Any, location: str) -> None:
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    entry = tensor.external_data.add()
    entry.key, entry.value = "location", location


def outside_initializer(model: Any, location: str) -> None:
    outside(model.graph.initializer[0], location)


def outside_constant(model: Any, location: str) -> None:
    value = numpy_helper.from_array(np.zeros(1, np.float32))
    outside(value, location)
    model.graph.node.insert(0, helper.make_node("Constant", [], ["elsewhere"], value=value))


def outside_branch(model: Any, location: str) -> None:
    value = numpy_helper.from_array(np.zeros(1, np.float32), "inner")
    outside(value, location)
    output = helper.make_tensor_value_info("inner", TensorProto.FLOAT, [1])
    branch = helper.make_graph([], "branch", [], [output], [value])
    model.graph.node.append(helper.make_node("If", ["input"], ["chosen"], then_branch=branch, else_branch=branch))


@pytest.mark.parametrize("place", [outside_initializer, outside_constant, outside_branch])
def test_weights_in_other_files_are_never_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Callable[[Any, str], None]
) -> None:
    (tmp_path / "in").mkdir()
    secret = put(tmp_path / "secret", bytes(1 << 16))
    source = put(tmp_path / "in" / "model.onnx", changed(lambda model: place(model, "../secret")))
    opened: list[str] = []
    sys.addaudithook(lambda event, arguments: opened.append(str(arguments[0])) if event == "open" else None)
    monkeypatch.chdir(tmp_path / "in")
    assert "another file" in refused(source)
    assert not [name for name in opened if Path(name).name == secret.name]


def test_without_the_onnx_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = put(tmp_path / "model.onnx", exported(theirs, TINY, True, False))
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(UsageError, match="pip install onnx"):
        convert(source)


def test_images_agree(tmp_path: Path) -> None:
    content = exported(theirs, TINY, True, False)
    convert(put(tmp_path / "model.onnx", content))
    image: Tensor = image_for(TINY, batch=1, seed=9)
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {"input": image.numpy()})
    assert relative(load_generator(tmp_path / "model.safetensors")(image), expected) < 1e-5
