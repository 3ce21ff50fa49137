"""What an exported file says about itself comes back when it is converted, or is refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest

from gpen_convert.convert import convert
from gpen_convert.export import export_generator
from gpen_core.checkpoint import load_tensors, read_metadata
from gpen_core.config import ARCFACE_128_TEMPLATE, FFHQ_TEMPLATE, METADATA_KEY, VALUE_RANGES, GeneratorConfig
from gpen_core.errors import CheckpointError, UsageError
from tests.exported import SEG2FACE, converted
from tests.legacy import TINY

COLOUR = replace(TINY, task="colorization", template=FFHQ_TEMPLATE)
STRANGE = replace(TINY, value_range=(-2.0, 0.5), template=tuple((x / 2, y / 2) for x, y in ARCFACE_128_TEMPLATE))


@pytest.mark.parametrize("config", [TINY, SEG2FACE, COLOUR, STRANGE], ids=["plain", "seg2face", "colour", "strange"])
def test_there_and_back_gives_the_same_bytes(config: GeneratorConfig, tmp_path: Path) -> None:
    source, exported, back = converted(tmp_path, config), tmp_path / "net.onnx", tmp_path / "back.safetensors"
    export_generator(source, format="onnx")
    lines = convert(exported, back)
    assert back.read_bytes() == source.read_bytes()
    assert any("what the ONNX file says about itself" in line for line in lines)
    assert not any("assumed" in line for line in lines)
    export_generator(back, tmp_path / "again.onnx", format="onnx")
    assert (tmp_path / "again.onnx").read_bytes() == exported.read_bytes()
    # So the first file may stand where the second is written by default.
    convert(exported)
    assert back.read_bytes() == source.read_bytes()


def test_half_an_export_keeps_the_rest_and_says_what_is_lost(tmp_path: Path) -> None:
    source, exported = converted(tmp_path, COLOUR), tmp_path / "half.onnx"
    export_generator(source, exported, format="onnx", dtype="fp16")
    assert any("come back rounded" in line for line in convert(exported))
    assert read_metadata(tmp_path / "half.safetensors") == read_metadata(source)
    exported.rename(tmp_path / "net.onnx")
    before = source.read_bytes()
    with pytest.raises(UsageError, match="was not made from"):
        convert(tmp_path / "net.onnx")
    assert source.read_bytes() == before


def test_the_users_word_counts_and_the_contradiction_is_told(tmp_path: Path) -> None:
    source, exported = converted(tmp_path, COLOUR), tmp_path / "net.onnx"
    export_generator(source, format="onnx")
    lines = convert(exported, tmp_path / "b.safetensors", task="seg2face", template="gpen", licence="mine")
    assert "--task seg2face, although the file says colorization" in lines
    assert "--template gpen, although the file says ffhq" in lines
    assert "--licence mine, although the file says CC0-1.0" in lines
    metadata = read_metadata(tmp_path / "b.safetensors")
    assert metadata.config == replace(TINY, task="seg2face", value_range=VALUE_RANGES["seg2face"])
    origin = read_metadata(source).provenance
    assert metadata.provenance == replace(origin, licence="mine")
    agreed = convert(exported, tmp_path / "c.safetensors", task="colorization", template="ffhq", licence="CC0-1.0")
    assert not any("although" in line for line in agreed)
    assert load_tensors(tmp_path / "c.safetensors")[0] == read_metadata(source)


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """An exported file."""
    folder = tmp_path_factory.mktemp("export")
    export_generator(converted(folder, SEG2FACE), format="onnx")
    return (folder / "net.onnx").read_bytes()


def changed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    model = onnx.load(str(path))
    for entry in model.metadata_props:
        if entry.key == METADATA_KEY:
            content = json.loads(entry.value)
            change(content)
            entry.value = json.dumps(content)
    onnx.save(model, str(path))


def wider(content: dict[str, Any]) -> None:
    content["config"].update(channels=[9, 8, 4])


def larger(content: dict[str, Any]) -> None:
    content["config"].update(input_size=32, output_size=32, channels=[8, 8, 4, 4])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (wider, r"it says channels \(9, 8, 4\), but the graph has \(8, 8, 4\)"),
        (larger, "it says input_size 32, but the graph has 16"),
        (lambda c: c["config"].update(task="dance"), "what it says about itself is damaged .*'dance'"),
        (lambda c: c["config"].update(template=[]), "what it says about itself is damaged .*points"),
        (lambda c: c["config"].update(value_range=[1, -1]), "what it says about itself is damaged .*ascending"),
        (lambda c: c.pop("config"), "what it says about itself is damaged"),
        (lambda c: c["provenance"].pop("licence"), "what it says about itself is damaged .*provenance"),
        (lambda c: c.update(kind="detector"), "what it says about itself is damaged .*detector"),
        (lambda c: c.update(format_version=99), "what it says about itself is damaged .*format version 99"),
    ],
)
def test_what_contradicts_the_graph_or_itself_is_refused(
    change: Callable[[dict[str, Any]], object], words: str, export: bytes, tmp_path: Path
) -> None:
    exported = tmp_path / "net.onnx"
    exported.write_bytes(export)
    changed(exported, change)
    with pytest.raises(CheckpointError, match=words) as caught:
        convert(exported)
    assert str(caught.value).startswith(f"{exported}: ")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == [exported]


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"format_version": 1', "[" * 100_000])
def test_metadata_that_is_no_json_object(text: str, export: bytes, tmp_path: Path) -> None:
    model = onnx.load_model_from_string(export)
    next(entry for entry in model.metadata_props if entry.key == METADATA_KEY).value = text
    onnx.save(model, str(tmp_path / "bad.onnx"))
    with pytest.raises(CheckpointError, match=r"bad\.onnx: what it says about itself is damaged .*export it again"):
        convert(tmp_path / "bad.onnx")
