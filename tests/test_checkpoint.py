"""Converted files: strict loading, and metadata that somebody made up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpen_convert.generator import convert_generator
from gpen_core.checkpoint import load_generator, read_metadata
from gpen_core.config import METADATA_KEY
from gpen_core.errors import CheckpointError
from tests.legacy import TINY, legacy_state

Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted")
    torch.save(legacy_state(TINY), folder / "tiny.pth")
    return convert_generator(folder / "tiny.pth").output


def changed(converted: Path, path: Path, change: Change) -> Path:
    content = json.loads(read_metadata(converted).encode()[METADATA_KEY])
    change(content)
    save_file(load_file(converted), path, {METADATA_KEY: json.dumps(content)})
    return path


CHANGES: dict[str, tuple[Change, str]] = {
    "version as text": (lambda c: c.update(format_version="1"), "format version '1' is not a whole number"),
    "version as truth": (lambda c: c.update(format_version=True), "format version True is not a whole number"),
    "version": (lambda c: c.update(format_version=2), "format version 2; this gpen-core reads 1"),
    "kind": (lambda c: c.update(kind="detector"), "holds a 'detector', not a generator"),
    "no config": (lambda c: c.pop("config"), "incomplete gpen-core metadata"),
    "missing setting": (lambda c: c["config"].pop("n_mlp"), "incomplete generator configuration"),
    "unknown setting": (lambda c: c["config"].update(speed=3), "unknown settings speed"),
    "size": (lambda c: c["config"].update(input_size=24), "input_size 24 is not a power of two"),
    "huge": (lambda c: c["config"].update(input_size=1 << 40), "input_size 1099511627776 is outside"),
    "text for a size": (lambda c: c["config"].update(input_size="16"), "input_size '16' is not a whole number"),
    "width": (lambda c: c["config"].update(channels=[8, 8, 0]), "width 0 is not a positive whole number"),
    "depth": (lambda c: c["config"].update(channels=[8, 8]), "2 widths for 3 resolutions"),
    "other width": (lambda c: c["config"].update(channels=[8, 8, 5]), "misshapen"),
    "range": (lambda c: c["config"].update(value_range=[1, -1]), "not ascending"),
    "huge range": (lambda c: c["config"].update(value_range=[0, 10**400]), "is not 2 moderate numbers"),
    "infinite range": (lambda c: c["config"].update(value_range=[0, float("inf")]), "is not 2 moderate numbers"),
    "template of one point": (lambda c: c["config"].update(template=[[0.5, 0.5]] * 5), "on top of each other"),
    "template far away": (lambda c: c["config"]["template"][0].__setitem__(0, 1e5), "far outside the crop"),
    "template of four": (lambda c: c["config"]["template"].pop(), "4 points instead of 5"),
    "task": (lambda c: c["config"].update(task="magic"), "task 'magic' is none of"),
    "provenance": (lambda c: c["provenance"].update(licence=3), "incomplete provenance"),
    "list": (lambda c: c["provenance"].update(dropped="all"), "incomplete provenance"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_made_up_metadata(case: str, converted: Path, tmp_path: Path) -> None:
    change, message = CHANGES[case]
    path = changed(converted, tmp_path / "bad.safetensors", change)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_generator(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100000])
def test_metadata_that_is_no_object(text: str, converted: Path, tmp_path: Path) -> None:
    save_file(load_file(converted), tmp_path / "bad.safetensors", {METADATA_KEY: text})
    with pytest.raises(CheckpointError, match="the gpen-core metadata is not"):
        load_generator(tmp_path / "bad.safetensors")


def test_unchanged_metadata_loads(converted: Path, tmp_path: Path) -> None:
    model = load_generator(changed(converted, tmp_path / "good.safetensors", lambda c: None))
    assert model.config == TINY
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("missing", lambda t: t.pop("constant")),
        ("unknown", lambda t: t.update(extra=torch.zeros(1))),
        ("misshapen", lambda t: t.update(constant=torch.zeros(1, 8, 4, 5))),
        ("not floating point", lambda t: t.update(constant=torch.zeros(1, 8, 4, 4, dtype=torch.int32))),
    ],
)
def test_tensors_fit_or_nothing_loads(
    name: str, change: Callable[[dict[str, torch.Tensor]], object], converted: Path, tmp_path: Path
) -> None:
    tensors = load_file(converted)
    change(tensors)
    save_file(tensors, tmp_path / "bad.safetensors", read_metadata(converted).encode())
    with pytest.raises(CheckpointError, match=name):
        load_generator(tmp_path / "bad.safetensors")


def test_safetensors_of_others(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match="no gpen-core metadata; convert the original"):
        load_generator(tmp_path / "other.safetensors")
