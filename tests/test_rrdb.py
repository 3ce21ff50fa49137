"""RRDBNet: golden parity at each scale, the converted file, and tiles that leave no seam."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from gpen_convert import rrdb as converter
from gpen_core import rrdb
from gpen_core.errors import CheckpointError, DeviceError, UsageError
from gpen_core.types import Canvas
from tests.stand_in import FAULTS, GOLDEN, PROVENANCE, Damage, State, fill_state, golden_shapes, relative

CHANNELS = {1: 48, 2: 12, 4: 3}
WHOLE = 10**6


def published(scale: int) -> State:
    shapes = golden_shapes("rrdb_x4") | {"conv_first.weight": (32, CHANNELS[scale], 3, 3)}
    return fill_state(shapes)


def far_sighted(scale: int, blocks: int = 8) -> State:
    """A small net whose strong residual branches see tens of cells; its pictures are neither black nor white."""
    shapes = rrdb.RRDBNet(rrdb.UpscalerConfig(scale, 8, blocks, 8, 1)).state_dict()
    state = fill_state({key: tuple(tensor.shape) for key, tensor in shapes.items()})
    for key in state:
        if key.startswith("body.") and key.endswith("weight"):
            state[key] *= 2.5
    with torch.inference_mode():
        spread = converter.build(state)(converter.probe_picture(64)).std()
    state["conv_last.weight"] *= 0.2 / spread
    state["conv_last.bias"] = torch.full((3,), 0.5)
    return state


def photo(height: int, width: int, dtype: type[np.uint8] | type[np.uint16] = np.uint8) -> Canvas:
    square = converter.probe_picture(max(height, width, 16))[0, :, :height, :width]
    picture: Canvas = np.ascontiguousarray(
        np.rint(square.permute(1, 2, 0).numpy() * float(np.iinfo(dtype).max)).astype(dtype)
    )
    return picture


def levels_apart(one: Canvas, other: Canvas) -> int:
    assert one.shape == other.shape
    assert one.dtype == other.dtype
    return int(np.abs(one.astype(np.int64) - other.astype(np.int64)).max())


@pytest.mark.parametrize("scale", [1, 2, 4])
def test_golden(scale: int) -> None:
    net = converter.build(published(scale))
    assert (net.config.scale, net.config.blocks, net.config.features, net.config.growth) == (scale, 23, 32, 32)
    x = np.random.RandomState(scale).random_sample((1, 3, 32, 48)).astype(np.float32)
    with torch.inference_mode():
        found = net(torch.from_numpy(x)).numpy()
    assert found.shape == (1, 3, 32 * scale, 48 * scale)
    stride = 2 if scale == 4 else 1
    assert relative(found[..., ::stride, ::stride], np.load(GOLDEN / "rrdb.npz")[f"x{scale}"]) < 1e-5


@pytest.mark.parametrize("scale", [1, 2, 4])
def test_tiles_equal_the_whole_to_one_level(scale: int, tmp_path: Path) -> None:
    converter.convert(far_sighted(scale), tmp_path / "net.safetensors", PROVENANCE)
    net = rrdb.load_upscaler(tmp_path / "net.safetensors")
    assert 16 <= net.config.margin < net.config.receptive_field
    # Sides that are no multiple of a cell, several tiles each way, the last ones cut by the border.
    picture = photo(90 * net.config.cell + 1, 131 * net.config.cell + 2)
    whole = rrdb.upscale(net, picture, tile=WHOLE)
    assert whole.shape == (picture.shape[0] * scale, picture.shape[1] * scale, 3)
    assert whole.std() > 20
    assert levels_apart(rrdb.upscale(net, picture, tile=24), whole) <= 1
    net.config = replace(net.config, margin=2)
    assert levels_apart(rrdb.upscale(net, picture, tile=24), whole) > 8


def test_at_the_receptive_field_tiles_are_exact() -> None:
    net = converter.build(far_sighted(4, blocks=1))
    assert net.config.margin == net.config.receptive_field == 17
    picture = photo(60, 70, np.uint16)
    assert levels_apart(rrdb.upscale(net, picture, tile=20), rrdb.upscale(net, picture, tile=WHOLE)) <= 1


def test_the_receptive_field_is_not_larger_than_stated() -> None:
    net = converter.build(far_sighted(4, blocks=1)).double()
    x = torch.rand((1, 3, 50, 50), generator=torch.Generator().manual_seed(0)).double().requires_grad_(True)
    (gradient,) = torch.autograd.grad(net.look(x)[..., 25, 25].sum(), x)
    reached = gradient.abs().sum((0, 1)).nonzero()
    assert int((reached - 25).abs().max()) == net.config.receptive_field


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (5, 3)])
@pytest.mark.parametrize("scale", [1, 2, 4])
def test_tiny_pictures(scale: int, shape: tuple[int, int]) -> None:
    net = converter.build(far_sighted(scale, blocks=1))
    picture = photo(*shape)
    assert rrdb.upscale(net, picture).shape == (shape[0] * scale, shape[1] * scale, 3)


def test_a_smaller_scale_is_the_average_of_the_larger_one() -> None:
    net = converter.build(far_sighted(4, blocks=1))
    picture = photo(40, 50)
    largest = rrdb.upscale(net, picture, tile=WHOLE).astype(np.float64)
    for scale, factor in ((2, 2), (1, 4)):
        smaller = rrdb.upscale(net, picture, scale, tile=17)
        assert smaller.dtype == np.uint8
        assert smaller.flags.c_contiguous
        mean = largest.reshape(40 * scale, factor, 50 * scale, factor, 3).mean((1, 3))
        assert np.abs(smaller - mean).max() <= 1.5


def test_sixteen_bits_stay() -> None:
    net = converter.build(far_sighted(2, blocks=1))
    deep = photo(32, 40, np.uint16)
    eight = np.rint(deep / 257).astype(np.uint8)
    result = rrdb.upscale(net, deep)
    assert result.dtype == np.uint16
    assert len(np.unique(result)) > 1000
    assert np.abs(result / 257 - rrdb.upscale(net, eight)).max() < 8


@pytest.mark.parametrize("scale", [3, 4, 0, -1])
def test_scales_that_the_net_cannot_give(scale: int) -> None:
    net = converter.build(far_sighted(2, blocks=1))
    with pytest.raises(UsageError, match=f"enlarges by 2, so it can't enlarge by {scale}"):
        rrdb.upscale(net, photo(8, 8), scale)


def test_no_tile_is_no_tile() -> None:
    with pytest.raises(UsageError, match="tiles of 0"):
        rrdb.upscale(converter.build(far_sighted(4, blocks=1)), photo(8, 8), tile=0)


def test_overflow_is_not_a_picture() -> None:
    net = converter.build(far_sighted(4, blocks=1))
    torch.nn.init.constant_(net.conv_last.weight, float("inf"))
    with pytest.raises(DeviceError, match="not finite in float32"):
        rrdb.upscale(net, photo(8, 8))


def test_it_runs_in_the_precision_of_its_parameters() -> None:
    net = converter.build(far_sighted(4, blocks=1))
    picture = photo(24, 24)
    exact = rrdb.upscale(net, picture)
    assert levels_apart(rrdb.upscale(net.to(torch.bfloat16), picture), exact) < 16


def test_converting_twice_gives_the_same_bytes_and_all_that_is_known(tmp_path: Path) -> None:
    state = far_sighted(2, blocks=2)
    paths = [tmp_path / "one.safetensors", tmp_path / "two.safetensors"]
    reports = [converter.convert(state, path, PROVENANCE) for path in paths]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert sorted(tmp_path.iterdir()) == paths
    assert reports[0][0] == "RRDBNet up-scaler x2, 2 blocks, 8 features"
    net = rrdb.load_upscaler(paths[0])
    with safe_open(paths[0], framework="pt") as file:
        content = json.loads(file.metadata()["gpen_core"])
    assert content == {
        "format_version": 1,
        "kind": "upscaler",
        "config": {"scale": 2, "features": 8, "blocks": 2, "growth": 8, "margin": net.config.margin},
        "provenance": json.loads(json.dumps(asdict(PROVENANCE))),
    }
    assert rrdb.decode({"gpen_core": json.dumps(content)}) == (net.config, PROVENANCE)
    assert not net.training
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, state[name]), name


@pytest.mark.parametrize(("damage", "words"), FAULTS)
@pytest.mark.parametrize("key", ["body.0.rdb2.conv3.weight", "conv_last.bias"])
def test_faults_are_named_in_one_line(damage: Damage, words: str, key: str) -> None:
    state = far_sighted(4, blocks=1)
    damage(state, key)
    with pytest.raises(CheckpointError) as caught:
        converter.build(state)
    text = str(caught.value)
    assert words in text
    assert key in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("key", "shape", "words"),
    [
        ("conv_first.weight", (8, 4, 3, 3), "takes 4 channels"),
        ("conv_first.weight", (8,), "has the shape [8]"),
        ("body.1.rdb1.conv1.weight", (8, 8, 3, 3), "missing: body.1.rdb1.conv1.bias"),
        ("conv_up3.bias", (8,), "1 unknown: conv_up3.bias"),
    ],
)
def test_strange_structures_are_refused(key: str, shape: tuple[int, ...], words: str) -> None:
    state = far_sighted(4, blocks=1)
    state[key] = torch.zeros(shape)
    with pytest.raises(CheckpointError) as caught:
        converter.build(state)
    assert words in str(caught.value)


def rewrite(path: Path, **changes: object) -> None:
    """Change the metadata of a converted file."""
    with safe_open(path, framework="pt") as file:
        content = json.loads(file.metadata()["gpen_core"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    save_file(tensors, path, {"gpen_core": json.dumps(content | changes)})


CONFIG = {"scale": 4, "features": 8, "blocks": 1, "growth": 8, "margin": 17}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": "generator"}, "holds a 'generator', not an upscaler"),
        ({"format_version": 2}, "format version 2"),
        ({"format_version": "1"}, "format version '1' is not a whole number"),
        ({"config": {"scale": 4}}, "incomplete up-scaler configuration"),
        ({"config": None}, "incomplete up-scaler configuration"),
        ({"provenance": None}, "no provenance"),
        ({"provenance": {"licence": "MIT"}}, "incomplete provenance"),
        ({"config": CONFIG | {"scale": 3}}, "scale is 3"),
        ({"config": CONFIG | {"margin": True}}, "margin True"),
        ({"config": CONFIG | {"blocks": 10**9}}, "blocks 1000000000"),
        ({"config": CONFIG | {"blocks": 2}}, "missing: body.1."),
    ],
)
def test_metadata_is_checked(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    path = tmp_path / "net.safetensors"
    converter.convert(far_sighted(4, blocks=1), path, PROVENANCE)
    rewrite(path, **changes)
    with pytest.raises(CheckpointError) as caught:
        rrdb.load_upscaler(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b"<!DOCTYPE html>", "HTML"),
        (b"PK\x03\x04" + bytes(60), "gpen-core convert"),
        (b"\x40\x00\x00\x00\x00\x00\x00\x00{", "not a whole safetensors file"),
    ],
)
def test_foreign_files_are_named(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "net.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        rrdb.load_upscaler(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert words in str(caught.value)
    path.unlink()
    with pytest.raises(CheckpointError, match="no such file"):
        rrdb.load_upscaler(path)


def test_safetensors_without_our_metadata(tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(CheckpointError, match="no gpen-core metadata"):
        rrdb.load_upscaler(path)
    save_file({"x": torch.zeros(1)}, path, {"gpen_core": "{"})
    with pytest.raises(CheckpointError, match="not JSON"):
        rrdb.load_upscaler(path)
    save_file({"x": torch.zeros(1)}, path, {"gpen_core": "[]"})
    with pytest.raises(CheckpointError, match="not a JSON object"):
        rrdb.load_upscaler(path)
