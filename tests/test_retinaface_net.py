"""RetinaFace: golden outputs (ResNet-50), a literal statement without folding (MobileNet), and both in ONNX."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpen_convert import parsenet, retinaface, rrdb, to_onnx
from gpen_core.errors import CheckpointError, UsageError
from tests.stand_in import (
    FAULTS,
    GOLDEN,
    PROVENANCE,
    Damage,
    State,
    fill_state,
    golden_shapes,
    relative,
    spoil,
    with_norm,
)

OUTPUTS = ("loc", "conf", "landms")


def golden_input() -> Tensor:
    return torch.from_numpy((np.random.RandomState(3).random_sample((1, 3, 160, 224)) * 255 - 117).astype(np.float32))


def mobilenet_shapes() -> dict[str, tuple[int, ...]]:
    """The MobileNet-0.25 file, written out from its tables."""
    shapes = with_norm("body.stage1.0.0", "body.stage1.0.1", (8, 3, 3, 3))
    stages = {
        "stage1": [(8, 16), (16, 32), (32, 32), (32, 64), (64, 64)],
        "stage2": [(64, 128)] + [(128, 128)] * 5,
        "stage3": [(128, 256), (256, 256)],
    }
    for stage, pairs in stages.items():
        for i, (inputs, outputs) in enumerate(pairs, start=1 if stage == "stage1" else 0):
            prefix = f"body.{stage}.{i}"
            shapes |= with_norm(f"{prefix}.0", f"{prefix}.1", (inputs, 1, 3, 3))
            shapes |= with_norm(f"{prefix}.3", f"{prefix}.4", (outputs, inputs, 1, 1))
    convs = {f"fpn.output{i}": (64, width, 1, 1) for i, width in ((1, 64), (2, 128), (3, 256))}
    convs |= {f"fpn.merge{i}": (64, 64, 3, 3) for i in (1, 2)}
    for i in (1, 2, 3):
        convs |= {f"ssh{i}.conv3X3": (32, 64, 3, 3), f"ssh{i}.conv5X5_1": (16, 64, 3, 3)}
        convs |= {f"ssh{i}.{name}": (16, 16, 3, 3) for name in ("conv5X5_2", "conv7X7_2", "conv7x7_3")}
    for name, shape in convs.items():
        shapes |= with_norm(f"{name}.0", f"{name}.1", shape)
    for head, values in (("ClassHead", 4), ("BboxHead", 8), ("LandmarkHead", 20)):
        for i in range(3):
            shapes |= {f"{head}.{i}.conv1x1.weight": (values, 64, 1, 1), f"{head}.{i}.conv1x1.bias": (values,)}
    return shapes


def mobilenet_reference(state: State, x: Tensor) -> list[Tensor]:
    """Every convolution, batch norm and activation in float64, one by one."""
    state = {key: tensor.double() for key, tensor in state.items()}

    def normed(x: Tensor, conv: str, norm: str, stride: int = 1) -> Tensor:
        weight = state[f"{conv}.weight"]
        groups = x.shape[1] // weight.shape[1]
        x = F.conv2d(x, weight, None, stride, weight.shape[-1] // 2, groups=groups)
        mean, variance = state[f"{norm}.running_mean"], state[f"{norm}.running_var"]
        return F.batch_norm(x, mean, variance, state[f"{norm}.weight"], state[f"{norm}.bias"], eps=1e-5)

    def leaky(x: Tensor, conv: str, norm: str, stride: int = 1) -> Tensor:
        return F.leaky_relu(normed(x, conv, norm, stride), 0.1)

    def separable(x: Tensor, prefix: str, stride: int) -> Tensor:
        return leaky(leaky(x, f"{prefix}.0", f"{prefix}.1", stride), f"{prefix}.3", f"{prefix}.4")

    x = leaky(x.double(), "body.stage1.0.0", "body.stage1.0.1", 2)
    levels = []
    for stage, strides in (("stage1", (1, 2, 1, 2, 1)), ("stage2", (2, 1, 1, 1, 1, 1)), ("stage3", (2, 1))):
        for i, stride in enumerate(strides, start=1 if stage == "stage1" else 0):
            x = separable(x, f"body.{stage}.{i}", stride)
        levels.append(x)
    p1, p2, p3 = (leaky(level, f"fpn.output{i}.0", f"fpn.output{i}.1") for i, level in enumerate(levels, 1))
    p2 = leaky(p2 + F.interpolate(p3, size=p2.shape[2:]), "fpn.merge2.0", "fpn.merge2.1")
    p1 = leaky(p1 + F.interpolate(p2, size=p1.shape[2:]), "fpn.merge1.0", "fpn.merge1.1")
    found: dict[str, list[Tensor]] = {"BboxHead": [], "ClassHead": [], "LandmarkHead": []}
    for i, level in enumerate((p1, p2, p3), start=1):
        name = f"ssh{i}"
        three = normed(level, f"{name}.conv3X3.0", f"{name}.conv3X3.1")
        shared = leaky(level, f"{name}.conv5X5_1.0", f"{name}.conv5X5_1.1")
        five = normed(shared, f"{name}.conv5X5_2.0", f"{name}.conv5X5_2.1")
        seven = leaky(shared, f"{name}.conv7X7_2.0", f"{name}.conv7X7_2.1")
        seven = normed(seven, f"{name}.conv7x7_3.0", f"{name}.conv7x7_3.1")
        feature = F.relu(torch.cat([three, five, seven], 1))
        for head, values in (("BboxHead", 4), ("ClassHead", 2), ("LandmarkHead", 10)):
            key = f"{head}.{i - 1}.conv1x1"
            raw = F.conv2d(feature, state[f"{key}.weight"], state[f"{key}.bias"])
            found[head].append(raw.permute(0, 2, 3, 1).reshape(len(raw), -1, values))
    loc, conf, landms = (torch.cat(each, 1) for each in found.values())
    return [loc, conf.softmax(-1), landms]


@pytest.fixture(scope="module")
def resnet() -> State:
    return fill_state(golden_shapes("retinaface"))


@pytest.fixture
def mobilenet() -> State:
    return fill_state(mobilenet_shapes())


def test_resnet50_equals_golden(resnet: State) -> None:
    golden = np.load(GOLDEN / "retinaface_net.npz")
    with torch.no_grad():
        found = retinaface.build(resnet)(golden_input())
    for name, tensor in zip(OUTPUTS, found, strict=True):
        assert relative(tensor, golden[name]) < 1e-4, name


def test_resnet50_in_onnxruntime_equals_golden(resnet: State, tmp_path: Path) -> None:
    report = retinaface.convert(resnet, tmp_path / "r50.onnx", PROVENANCE)
    assert "ResNet-50" in report[0]
    golden = np.load(GOLDEN / "retinaface_net.npz")
    found = to_onnx.run((tmp_path / "r50.onnx").read_bytes(), golden_input().numpy())
    for name, array in zip(OUTPUTS, found, strict=True):
        assert relative(array, golden[name]) < 1e-4, name


@pytest.mark.parametrize("size", [(96, 128), (75, 109)])
def test_mobilenet_equals_unfolded_reference(mobilenet: State, size: tuple[int, int]) -> None:
    x = torch.rand((2, 3, *size), generator=torch.Generator().manual_seed(1)) * 255 - 117
    with torch.no_grad():
        found = retinaface.build(mobilenet)(x)
        expected = mobilenet_reference(mobilenet, x)
    cells = sum(-(-size[0] // stride) * -(-size[1] // stride) for stride in (8, 16, 32))
    for tensor, literal, values in zip(found, expected, (4, 2, 10), strict=True):
        assert tensor.shape == (2, 2 * cells, values)
        assert relative(tensor, literal) < 1e-5


def test_conversion_is_reproducible_and_describes_itself(mobilenet: State, tmp_path: Path) -> None:
    paths = [tmp_path / "one.onnx", tmp_path / "two.onnx"]
    reports = [retinaface.convert(mobilenet, path, PROVENANCE) for path in paths]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert reports[0] == reports[1]
    assert "MobileNet-0.25" in reports[0][0]
    model = onnx.load(paths[0])
    assert {entry.key: entry.value for entry in model.metadata_props} == {
        "family": "retinaface",
        "licence": "MIT",
        "source_key": "params_ema",
        "source_name": "net.pth",
        "source_sha256": "0" * 64,
        "tool_version": "gpen-core 0.0.0",
    }
    assert (model.producer_name, model.producer_version) == ("gpen-core", "0.0.0")
    assert [entry.name for entry in model.graph.input] == ["input"]
    assert [entry.name for entry in model.graph.output] == list(OUTPUTS)
    axes = [axis.dim_param or axis.dim_value for axis in model.graph.input[0].type.tensor_type.shape.dim]
    assert axes == ["batch", 3, "height", "width"]


def test_conversion_says_nothing_by_itself(mobilenet: State, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        retinaface.convert(mobilenet, tmp_path / "net.onnx", PROVENANCE)
    assert not [str(warning.message) for warning in caught]
    assert capfd.readouterr() == ("", "")


def test_counters_may_be_absent_and_halves_are_welcome(mobilenet: State) -> None:
    whole = retinaface.build(mobilenet).state_dict()
    bare = {key: tensor for key, tensor in mobilenet.items() if not key.endswith("num_batches_tracked")}
    assert len(bare) < len(mobilenet)
    for name, tensor in retinaface.build(bare).state_dict().items():
        assert torch.equal(tensor, whole[name]), name
    halves = {key: tensor.half() if tensor.is_floating_point() else tensor for key, tensor in mobilenet.items()}
    assert all(tensor.dtype == torch.float32 for tensor in retinaface.build(halves).state_dict().values())


@pytest.mark.parametrize(("damage", "words"), FAULTS)
@pytest.mark.parametrize("key", ["ssh2.conv5X5_1.0.weight", "body.stage2.3.4.running_var", "BboxHead.1.conv1x1.bias"])
def test_faults_are_named_in_one_line(mobilenet: State, damage: Damage, words: str, key: str) -> None:
    damage(mobilenet, key)
    with pytest.raises(CheckpointError) as caught:
        retinaface.build(mobilenet)
    text = str(caught.value)
    assert words in text
    assert key in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("ClassHead.0.conv1x1.weight", torch.zeros(6, 64, 1, 1), "3 anchors"),
        ("body.stage1.0.1.running_var", -torch.ones(8), "negative"),
        ("fpn.output1.0.weight", torch.zeros(3, 64, 1, 1), "multiple of 4"),
        ("fpn.output1.0.weight", torch.zeros(0, 64, 1, 1), "shape [0, 64, 1, 1]"),
        ("fc.weight", torch.zeros(2, 2), "1 unknown: fc.weight"),
    ],
)
def test_strange_structures_are_refused(mobilenet: State, key: str, value: Tensor, words: str) -> None:
    mobilenet[key] = value
    with pytest.raises(CheckpointError) as caught:
        retinaface.build(mobilenet)
    assert words in str(caught.value)


def test_an_unknown_backbone_is_refused(mobilenet: State) -> None:
    state = {key: tensor for key, tensor in mobilenet.items() if not key.startswith("body.")}
    with pytest.raises(CheckpointError, match="backbone"):
        retinaface.build(state)


def test_only_retinaface_is_recognised(mobilenet: State) -> None:
    nets = {"retinaface": retinaface.recognise, "parsenet": parsenet.recognise, "rrdb_x4": rrdb.recognise}
    for name in nets:
        assert [recognise(golden_shapes(name)) for recognise in nets.values()] == [name == other for other in nets]
    assert retinaface.recognise({key: tuple(tensor.shape) for key, tensor in mobilenet.items()})


def test_a_failure_leaves_nothing_and_keeps_what_was_there(mobilenet: State, tmp_path: Path) -> None:
    target = tmp_path / "net.onnx"
    target.write_bytes(b"before")
    spoil(mobilenet, "BboxHead.0.conv1x1.bias")
    with pytest.raises(CheckpointError):
        retinaface.convert(mobilenet, target, PROVENANCE)
    assert list(tmp_path.iterdir()) == [target]
    assert target.read_bytes() == b"before"


def test_a_disagreeing_runtime_is_a_failure(mobilenet: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = to_onnx.run
    monkeypatch.setattr(to_onnx, "run", lambda *given: [array * 1.001 for array in run(*given)])
    with pytest.raises(CheckpointError, match="disagree"):
        retinaface.convert(mobilenet, tmp_path / "net.onnx", PROVENANCE)
    assert not list(tmp_path.iterdir())


def test_a_missing_folder_is_named(mobilenet: State, tmp_path: Path) -> None:
    target = tmp_path / "nowhere" / "net.onnx"
    with pytest.raises(CheckpointError) as caught:
        retinaface.convert(mobilenet, target, PROVENANCE)
    assert str(caught.value) == f"{target}: can't be written (No such file or directory)"


def test_a_missing_onnx_package_is_named(mobilenet: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="pip install onnx"):
        retinaface.convert(mobilenet, tmp_path / "net.onnx", PROVENANCE)
