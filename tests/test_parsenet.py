"""ParseNet: against golden logits and labels, and a narrow one through ONNX."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from gpen_convert import parsenet, to_onnx
from gpen_core.errors import CheckpointError
from tests.golden.fill import model_input
from tests.stand_in import FAULTS, GOLDEN, PROVENANCE, Damage, State, fill_state, golden_shapes, relative, with_norm

STRIDE = 16


def layer(prefix: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{prefix}.conv2d.weight": (outputs, inputs, 3, 3), f"{prefix}.conv2d.bias": (outputs,)}


def block(prefix: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
    first = with_norm(f"{prefix}.conv1.conv2d", f"{prefix}.conv1.norm.norm", (outputs, inputs, 3, 3))
    return first | with_norm(f"{prefix}.conv2.conv2d", f"{prefix}.conv2.norm.norm", (outputs, outputs, 3, 3))


def narrow_shapes(widths: tuple[int, ...] = (4, 8, 8), depth: int = 2) -> dict[str, tuple[int, ...]]:
    shapes = layer("encoder.0", 3, widths[0])
    for side, start, path in (("encoder", 1, widths), ("decoder", 0, widths[::-1])):
        for i, (inputs, outputs) in enumerate(pairwise(path), start=start):
            prefix = f"{side}.{i}"
            shapes |= block(prefix, inputs, outputs) | layer(f"{prefix}.shortcut_func", inputs, outputs)
    for i in range(depth):
        shapes |= block(f"body.{i}", widths[-1], widths[-1])
    return shapes | layer("out_img_conv", widths[0], 3) | layer("out_mask_conv", widths[0], 19)


@pytest.fixture
def narrow() -> State:
    return fill_state(narrow_shapes())


def test_the_narrow_layout_is_the_published_one_but_for_widths() -> None:
    assert narrow_shapes((64, 128, 256, 256, 256), 10) == golden_shapes("parsenet")


def test_logits_and_labels_equal_golden() -> None:
    golden = np.load(GOLDEN / "parsenet.npz")
    net = parsenet.build(fill_state(golden_shapes("parsenet")))
    with torch.no_grad():
        logits = net(torch.from_numpy(model_input(5, 1, 512)))
    assert relative(logits[..., ::STRIDE, ::STRIDE], golden["logits"]) < 1e-4
    # Labels may differ only where two classes are equally likely to within rounding.
    first, second = logits.topk(2, 1).values.unbind(1)
    tied = (first - second) < 1e-5 * float(np.abs(golden["logits"]).max())
    differs = logits.argmax(1) != torch.from_numpy(golden["labels"])
    assert not bool((differs & ~tied).any())
    assert int(differs.sum()) <= 5


def test_conversion_is_reproducible_and_runs_any_batch(narrow: State, tmp_path: Path) -> None:
    paths = [tmp_path / "one.onnx", tmp_path / "two.onnx"]
    reports = [parsenet.convert(narrow, path, PROVENANCE) for path in paths]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert "ParseNet" in reports[0][0]
    model = onnx.load(paths[0])
    assert {entry.key: entry.value for entry in model.metadata_props}["family"] == "parsenet"
    assert [entry.name for entry in model.graph.output] == ["logits"]
    axes = [axis.dim_param or axis.dim_value for axis in model.graph.input[0].type.tensor_type.shape.dim]
    assert axes == ["batch", 3, 512, 512]
    assert not [entry.name for entry in model.graph.initializer if "out_img_conv" in entry.name]
    x = model_input(6, 3, 512)
    with torch.no_grad():
        expected = parsenet.build(narrow)(torch.from_numpy(x))
    (logits,) = to_onnx.run(paths[0].read_bytes(), x)
    assert relative(logits, expected) < 1e-4


@pytest.mark.parametrize(("damage", "words"), FAULTS)
@pytest.mark.parametrize(
    "key",
    ["encoder.1.shortcut_func.conv2d.bias", "decoder.1.conv2.norm.norm.running_mean", "out_img_conv.conv2d.weight"],
)
def test_faults_are_named_in_one_line(narrow: State, damage: Damage, words: str, key: str) -> None:
    damage(narrow, key)
    with pytest.raises(CheckpointError) as caught:
        parsenet.build(narrow)
    text = str(caught.value)
    assert words in text
    assert key in text
    assert "\n" not in text


def test_other_classes_are_refused(narrow: State) -> None:
    narrow["out_mask_conv.conv2d.weight"] = torch.zeros(11, 4, 3, 3)
    with pytest.raises(CheckpointError, match="11 classes"):
        parsenet.build(narrow)
