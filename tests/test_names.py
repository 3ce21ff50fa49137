"""What a file's name tells, what a conversion is called, and what it may replace."""

from __future__ import annotations

import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from gpen_convert.convert import convert
from gpen_convert.export import export_generator
from gpen_convert.generator import convert_generator
from gpen_convert.names import STRUCTURE, published_as, published_network, stem_of, task_of
from gpen_convert.precision import rounded
from gpen_convert.targets import origin_of
from gpen_core.checkpoint import read_metadata
from gpen_core.cli import run_command
from gpen_core.config import GeneratorConfig
from gpen_core.errors import CheckpointError, UsageError
from gpen_weights import catalog, find, find_restorers, resolve
from tests.exported import converted
from tests.legacy import TINY, legacy_state
from tests.stand_in import fill_state
from tests.test_parsenet import narrow_shapes
from tests.test_rrdb import far_sighted

LIKE_1024 = GeneratorConfig(
    input_size=1024,
    output_size=1024,
    channels=(512, 512, 512, 512, 512, 256, 128, 64, 32),
    style_dim=512,
    n_mlp=8,
)


def put(tree: Any, path: Path) -> Path:
    torch.save(tree, path)
    return path


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return put(legacy_state(TINY), tmp_path / "old.pth")


@pytest.mark.parametrize(
    ("name", "stem"),
    [
        ("old.pth", "old"),
        ("old.PTH", "old"),
        ("old.pth.tar", "old"),
        ("v1.2", "v1.2"),
        ("v1.2.pth", "v1.2"),
        ("gpen.v1.final", "gpen.v1.final"),
        (".pth", ".pth"),
        ("model.onnx", "model"),
        ("no suffix", "no suffix"),
    ],
)
def test_only_what_checkpoints_end_with_is_a_suffix(name: str, stem: str) -> None:
    assert stem_of(name) == stem


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("GPEN-Seg2face-512 (1).pth", "seg2face"),
        ("gpen-seg2face-512_ema.pth", "seg2face"),
        ("GPEN-Seg2face-512-fp16.pth", "seg2face"),
        ("Segmentation2Face.pth", "seg2face"),
        ("seg_to_face.pt", "seg2face"),
        ("GPEN_Colorization.pth", "colorization"),
        ("copy of GPEN-Colorization-1024.pth", "colorization"),
        ("colourise.v2.ckpt", "colorization"),
        ("FaceColorization.pth", "colorization"),
        ("gpencolorization1024.pth", "colorization"),
        ("GPEN-INPAINTING-1024.PTH", "inpainting"),
        ("face_inpaint.pth", "inpainting"),
        ("GPEN-BFR-512.pth", "restoration"),
        ("selfie.pth", "restoration"),
        # Nothing is told, or too much.
        ("pytorch_model.pt", None),
        ("model.pth", None),
        ("colors.pth", None),
        ("seg.pth", None),
        ("face.pth", None),
        ("repaint.pth", None),
        ("colorization-and-inpainting.pth", None),
        ("GPEN-BFR-512-colorization.pth", None),
    ],
)
def test_the_words_of_a_name_tell_the_task(name: str, task: str | None) -> None:
    assert task_of(name) == task


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("pytorch_model.pt", "GPEN-BFR-1024"),
        ("GPEN-BFR-1024.pth", "GPEN-BFR-1024"),
        ("gpen_bfr_1024.onnx", "GPEN-BFR-1024"),
        ("GPEN-BFR-1024 (2).pth", "GPEN-BFR-1024"),
        ("Copy of GPEN-BFR-1024.pth", "GPEN-BFR-1024"),
        ("GPEN-BFR-1024 - Copy (3).pth", "GPEN-BFR-1024"),
        ("GPEN-Inpainting-1024 copy.pth", "GPEN-Inpainting-1024"),
        ("GPEN-BFR-1024-mine.pth", None),
        ("pytorch_model-2048.pt", None),
        ("GPEN-BFR-512.pth", None),
    ],
)
def test_published_files_are_known_by_any_spelling_of_their_name(name: str, entry: str | None) -> None:
    found = published_as(name, LIKE_1024)
    assert (found.name if found else None) == entry


def test_other_networks_are_known_by_name_and_kind() -> None:
    assert published_network("retinaface-r50 (1).pth", "detector") == find("RetinaFace-R50")
    assert published_network("retinaface-r50 (1).pth", "parser") is None


def test_the_published_1024_is_found_by_auto(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPEN_CORE_HOME", str(tmp_path))
    # The catalog as it would be if the published network were tiny.
    tiny = {name: getattr(TINY, name) for name in STRUCTURE}
    entries = [
        replace(entry, generator=replace(entry.generator, **tiny)) if entry.name == "GPEN-BFR-1024" else entry
        for entry in catalog()
        if entry.generator
    ]
    monkeypatch.setattr("gpen_convert.names.catalog", lambda: entries)
    monkeypatch.setattr("gpen_weights.lookup.catalog", lambda: entries)
    source, target = put(legacy_state(TINY), tmp_path / "pytorch_model.pt"), tmp_path / "GPEN-BFR-1024.safetensors"
    assert any("found as GPEN-BFR-1024" in line for line in convert(source))
    assert target in find_restorers()
    assert resolve("GPEN-BFR-1024") == target
    first = target.read_bytes()
    convert(source)
    assert target.read_bytes() == first
    # For another task it is another file.
    convert(source, task="colorization")
    assert read_metadata(tmp_path / "pytorch_model.safetensors").config.task == "colorization"
    assert target.read_bytes() == first


def test_networks_get_the_name_of_the_catalog(tmp_path: Path) -> None:
    lines = convert(put(far_sighted(2, blocks=1), tmp_path / "RealESRNet x2 (1).pth"))
    assert (tmp_path / "realesrnet_x2.safetensors").exists()
    assert any("found as realesrnet_x2" in line for line in lines)


def test_a_dot_in_a_name_stays(tmp_path: Path) -> None:
    assert convert_generator(put(legacy_state(TINY), tmp_path / "v1.2")).output.name == "v1.2.safetensors"
    exported = tmp_path / "v1.2.safetensors"
    export_generator(exported, format="onnx")
    assert (tmp_path / "v1.2.onnx").exists()


@pytest.mark.parametrize(
    ("name", "options", "task", "words"),
    [
        ("old.pth", {}, "restoration", "restoration is assumed"),
        ("GPEN_Colorization.pth", {}, "colorization", "colorization is taken from the file's name"),
        (
            "GPEN-Colorization-1024.pth",
            {"task": "inpainting"},
            "inpainting",
            "although the file's name says colorization",
        ),
        ("my-bfr.pth", {}, "restoration", None),
        ("old.pth", {"task": "restoration"}, "restoration", None),
    ],
)
def test_where_the_task_comes_from_is_said(
    name: str, options: dict[str, str], task: str, words: str | None, tmp_path: Path
) -> None:
    folder = tmp_path / "inpainting"
    folder.mkdir()
    report = convert_generator(put(legacy_state(TINY), folder / name), **options)  # type: ignore[arg-type]
    assert report.metadata.config.task == task
    said = [line for line in report.lines() if "--task" in line]
    assert len(said) == (words is not None)
    assert words is None or words in said[0]


# What may be replaced.


def test_the_default_output_does_not_replace_what_it_did_not_write(old: Path) -> None:
    target = old.with_suffix(".safetensors")
    target.write_bytes(b"mine")
    for output in (None, old.parent):
        with pytest.raises(UsageError, match=r"was not made from .*old\.pth; name the output with -o"):
            convert(old, output)
    assert target.read_bytes() == b"mine"
    convert(old, target)
    assert target.read_bytes() != b"mine"


def test_nor_another_conversion(old: Path) -> None:
    other = put({k: v + (k == "generator.input.input") for k, v in legacy_state(TINY).items()}, old.parent / "b.pth")
    convert(other, old.with_suffix(".safetensors"))
    with pytest.raises(UsageError, match="was not made from"):
        convert(old)
    assert run_command(["convert", str(old)]) == 1


def test_the_same_source_is_converted_again(old: Path) -> None:
    target = old.with_suffix(".safetensors")
    convert(old)
    first = target.read_bytes()
    assert "replaced what was there from the same source" in convert(old)
    assert target.read_bytes() == first
    convert(old, task="colorization")
    assert read_metadata(target).config.task == "colorization"


@pytest.mark.parametrize(("tree", "suffix"), [("parser", ".onnx"), ("upscaler", ".safetensors")])
def test_so_it_is_with_other_networks(tree: str, suffix: str, tmp_path: Path) -> None:
    source = put(fill_state(narrow_shapes()) if tree == "parser" else far_sighted(2, blocks=1), tmp_path / "net.pth")
    target = tmp_path / f"net{suffix}"
    convert(source)
    first = target.read_bytes()
    convert(source)
    assert target.read_bytes() == first
    target.write_bytes(b"mine")
    with pytest.raises(UsageError, match="was not made from"):
        convert(source)
    assert target.read_bytes() == b"mine"


def test_an_export_replaces_its_own_only(tmp_path: Path) -> None:
    source, target = converted(tmp_path, TINY), tmp_path / "net.onnx"
    export_generator(source, format="onnx")
    first = target.read_bytes()
    export_generator(source, format="onnx")
    assert target.read_bytes() == first
    target.write_bytes(b"mine")
    with pytest.raises(UsageError, match="was not made from"):
        export_generator(source, format="onnx")
    assert target.read_bytes() == b"mine"


@pytest.mark.parametrize("name", ["net.pt2", "net.pt2.json"])
def test_a_package_replaces_its_own_only(name: str, tmp_path: Path) -> None:
    source = converted(tmp_path, TINY)
    (tmp_path / name).write_bytes(b"mine")
    with pytest.raises(UsageError, match=f"{name}: a file is there that was not made from"):
        export_generator(source, format="pt2")
    assert (tmp_path / name).read_bytes() == b"mine"


@pytest.mark.parametrize("content", [b"mine", b'{"weights": {}}', b"\xff"])
@pytest.mark.parametrize("output", ["net.pt2", "out/other.pt2"])
def test_a_sidecar_replaces_sidecars_only(content: bytes, output: str, tmp_path: Path) -> None:
    source, target = converted(tmp_path, TINY), tmp_path / output
    target.parent.mkdir(exist_ok=True)
    note = target.with_name(f"{target.name}.json")
    note.write_bytes(content)
    with pytest.raises(UsageError, match=f"{note.name}: a file is there that describes no package"):
        export_generator(source, target, format="pt2")
    assert note.read_bytes() == content
    assert not target.exists()


def test_a_compiled_package_is_not_converted(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "net.pt2", "w") as archive:
        archive.writestr("package/data/aotinductor/model/a.cpp", "")
    with pytest.raises(CheckpointError, match="compiled ahead of time"):
        convert(tmp_path / "net.pt2")


def test_a_folder_at_the_default_output(old: Path) -> None:
    old.with_suffix(".safetensors").mkdir()
    with pytest.raises(UsageError, match="a folder is there; name the output with -o"):
        convert(old)


@pytest.mark.parametrize("name", ["a.safetensors", "a.onnx", "a.pt2"])
@pytest.mark.parametrize("content", [b"", b"\x08", b"text", b"\x02\0\0\0\0\0\0\0{}", bytes(range(256))])
def test_what_is_no_file_of_ours_has_no_origin(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    (tmp_path / f"{name}.json").write_bytes(content)
    assert origin_of(tmp_path / name) == ""


@pytest.mark.parametrize("said", ["{", "[]", "1", json.dumps({"provenance": []}), json.dumps({"provenance": None})])
def test_strange_metadata_has_no_origin(said: str, tmp_path: Path) -> None:
    save_file({"x": torch.zeros(1)}, tmp_path / "a.safetensors", {"gpen_core": said})
    assert origin_of(tmp_path / "a.safetensors") == ""


# Names that are none.


@pytest.mark.parametrize(
    "arguments",
    [
        ["convert", ""],
        ["convert", "old.pth", "-o", ""],
        ["convert", "old.pth", "--output="],
        ["export", "", "--format", "onnx"],
        ["export", "net.safetensors", "--format", "onnx", "-o", ""],
        ["compile", "", "--cache", "cache"],
        ["compile", "net.safetensors", "--cache", ""],
        ["info", ""],
        ["weights", "path", ""],
        ["enhance", "photo.jpg", "--weights", ""],
    ],
)
def test_empty_names(
    arguments: list[str], old: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(old.parent)
    converted(old.parent, TINY)
    before = sorted(old.parent.iterdir())
    assert run_command(arguments) == 1
    text = capsys.readouterr().err
    assert "an empty file name" in text
    assert text.count("\n") == 1
    assert sorted(old.parent.iterdir()) == before


@pytest.mark.parametrize(
    "arguments",
    [
        ["convert", "a\0b"],
        ["convert", "old.pth", "-o", "a\0b.safetensors"],
        ["export", "a\0b", "--format", "onnx"],
        ["compile", "a\0b", "--cache", "c"],
        ["info", "a\0b"],
        ["weights", "path", "a\0b"],
        ["enhance", "a\0b.jpg"],
        ["enhance", "a.jpg", "-o", "a\0b"],
        ["colorize", "a\0b.jpg"],
    ],
)
def test_a_nul_in_a_name(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(arguments) == 1
    text = capsys.readouterr().err
    assert r"\x00" in text
    assert text.count("\n") == 1


def test_a_nul_in_a_name_that_a_program_gives(old: Path) -> None:
    with pytest.raises(UsageError, match="NUL"):
        convert(old, old.parent / "a\0b.safetensors")
    with pytest.raises(CheckpointError):
        convert(old.parent / "a\0b.pth")


# Half precision.


def test_small_values_that_matter_are_refused() -> None:
    values = torch.randn(64, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for small in (2e-6, 1e-7, 1e-12):
        with pytest.raises(
            CheckpointError, match=r"to_latent\.weight holds values too small for float16.*--dtype fp32"
        ):
            rounded({"to_latent.weight": values * small}, torch.float16)
        rounded({"to_latent.weight": values * small}, torch.float32)
    rounded({"to_latent.weight": values * 1e-2}, torch.float16)


def test_small_values_that_do_not_matter_are_kept() -> None:
    values = torch.randn(64, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    few = values.clone()
    few[::2] *= 1e-9
    tensors = {"a.weight": few, "b.bias": values[0] * 1e-9, "c.weight": torch.zeros(4, 4, dtype=torch.float64)}
    assert rounded(tensors, torch.float16).keys() == tensors.keys()


@pytest.mark.parametrize(("name", "axis"), [("layers.2.weight", 0), ("layers.3.weight", 1)])
def test_small_channels_matter_where_demodulation_makes_them_large(name: str, axis: int) -> None:
    random = torch.Generator().manual_seed(0)
    kernel = torch.randn(8, 512, 3, 3, generator=random, dtype=torch.float64).mul(2e-6)
    kernel[0] *= 1e4
    turned = kernel.transpose(0, axis)
    with pytest.raises(CheckpointError, match="too small"):
        rounded({name: turned}, torch.float16)
    # Without demodulation the one large channel is all that counts.
    assert rounded({"to_rgb.0.weight": turned}, torch.float16)["to_rgb.0.weight"].dtype == torch.float16
    # So small that demodulation leaves nothing of it.
    assert rounded({name: turned * 1e-9}, torch.float16)[name].dtype == torch.float16


def test_a_conversion_to_half_says_so(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = legacy_state(TINY)
    state["final_linear.0.weight"] = state["final_linear.0.weight"] * 1e-6
    put(state, old)
    assert run_command(["convert", str(old), "--dtype", "fp16"]) == 2
    text = capsys.readouterr().err
    assert "to_latent.weight holds values too small" in text
    assert text.count("\n") == 1
    assert not old.with_suffix(".safetensors").exists()
    assert run_command(["convert", str(old)]) == 0


# Networks in whatever wraps them.


@pytest.mark.parametrize("prefix", ["", "module.", "net.", "netP.module."])
def test_networks_under_any_prefix(prefix: str, tmp_path: Path) -> None:
    state = {f"{prefix}{key}": tensor for key, tensor in far_sighted(2, blocks=1).items()}
    for number, tree in enumerate((state, {"params": state}, [state, {"epoch": 1}])):
        source = put(tree, tmp_path / f"{number}.pth")
        assert "RRDBNet up-scaler x2, 1 blocks, 8 features" in convert(source)


def test_of_two_networks_the_averaged_one_is_taken(tmp_path: Path) -> None:
    state = far_sighted(2, blocks=1)
    both = {**{f"g.{k}": v + 1 for k, v in state.items()}, **{f"g_ema.{k}": v for k, v in state.items()}}
    lines = convert(put(both, tmp_path / "two.pth"))
    assert "kept g_ema; g is there too (--key g)" in lines
    assert not any("dropped" in line for line in lines)


def test_of_a_generator_and_a_parser_the_generator_is_taken(tmp_path: Path) -> None:
    source = put({"g_ema": legacy_state(TINY), "parser": fill_state(narrow_shapes())}, tmp_path / "both.pth")
    assert any("GPEN generator" in line for line in convert(source))
    assert any("ParseNet" in line for line in convert(source, key="parser"))


def test_a_sparse_tensor_in_a_network(tmp_path: Path) -> None:
    state = far_sighted(2, blocks=1)
    state["conv_last.bias"] = state["conv_last.bias"].to_sparse()
    with pytest.raises(CheckpointError, match=r"net\.pth: conv_last\.bias is sparse"):
        convert(put(state, tmp_path / "net.pth"))


def test_a_parser_that_is_not_whole(tmp_path: Path) -> None:
    state = {key: t for key, t in fill_state(narrow_shapes()).items() if not key.startswith("encoder.0")}
    with pytest.raises(CheckpointError, match="a ParseNet face parser, parts of which are missing"):
        convert(put(state, tmp_path / "net.pth"))


def test_info_and_convert_know_a_converted_parser(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert(put(fill_state(narrow_shapes()), tmp_path / "net.pth"))
    assert run_command(["info", str(tmp_path / "net.onnx")]) == 0
    told = capsys.readouterr().out
    assert "parsenet" in told
    assert "net.pth" in told
    assert run_command(["convert", str(tmp_path / "net.onnx")]) == 2
    assert "already converted: use it with --mask parse --parser" in capsys.readouterr().err
