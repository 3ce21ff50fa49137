"""What has no effect is told of, hints name options that are there, and impossible values are one line."""

from __future__ import annotations

import ast
import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
import typer.main

import gpen_core
from gpen_core import verbs
from gpen_core.backend import load_runtime
from gpen_core.cli import app, run_command
from gpen_core.errors import GpenError
from gpen_core.restorer import Restorer
from tests.legacy import TINY, legacy_state
from tests.stubs import FixedDetector, config_of, face_at, smooth_picture, without_channel_0

VERBS = ("enhance", "colorize", "inpaint", "seg2face")
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with photos, and a network that removes red from one face."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GPEN_CORE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("photo.png", "photo.jpg"):
        assert cv2.imwrite(name, np.minimum(smooth_picture(64, 64), 250))
    restorer = Restorer(without_channel_0, config_of(), FixedDetector([face_at(32, 32, 40)]))
    monkeypatch.setattr(Restorer, "load", classmethod(lambda *networks, **options: restorer))
    monkeypatch.setattr(verbs, "find_detector", lambda name: name)
    monkeypatch.setattr(verbs, "fingerprint", lambda *networks, **others: "the same")
    return tmp_path


def error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a command that writes nothing says, in one line."""
    before = sorted(Path().rglob("*"))
    assert run_command(arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    assert sorted(Path().rglob("*")) == before
    return captured.err.removeprefix("gpen-core: ").removesuffix("\n")


# What would have no effect.

WHOLE = {
    "--detector d.onnx": "nothing is detected with {}, so --detector can't be used",
    "--detect-size 640": "nothing is detected with {}, so --detect-size can't be used",
    "--detector-device cuda": "nothing is detected with {}, so --detector-device can't be used",
    "--detect-size 1280 --detector auto": "nothing is detected with {}, so --detector and --detect-size can't be used",
    "--template ffhq": "nothing is cropped with {}, so --template can't be used",
    "--rotate auto": "nothing is detected with {}, so --rotate can't be used",
    "--mask ellipse": "the whole picture is restored with {}, so --mask ellipse can't be used",
    "--mask parse --parser p.onnx": "the whole picture is restored with {}, so --mask parse can't be used",
    "--parser p.onnx": "--parser p.onnx has nothing to do with --mask box: add --mask parse",
}
ENHANCE = {
    "--max-faces 2": "nothing is detected with {}, so --max-faces can't be used",
    "--min-face 9 --only largest": "nothing is detected with {}, so --only and --min-face can't be used",
    "--box 1,2,3,4": "nothing is detected with {}, so --box can't be used",
}


@pytest.mark.parametrize("how", ["--aligned", "--tile 32"])
@pytest.mark.parametrize("options", [*WHOLE, *ENHANCE])
def test_what_whole_pictures_have_no_use_for(
    options: str, how: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = {**WHOLE, **ENHANCE}[options].format(how.split()[0])
    assert error(["enhance", "photo.png", *how.split(), *options.split()], capsys) == line
    if options in WHOLE and how == "--aligned":
        assert error(["colorize", "photo.png", how, *options.split()], capsys) == line


def test_what_says_that_nothing_is_wanted_may_be_said(folder: Path) -> None:
    neutral = ["--rotate", "off", "--only", "all", "--min-face", "0", "--mask", "box", "--no-compile"]
    assert run_command(["enhance", "photo.png", "--aligned", *neutral]) == 0


def test_several_networks_have_to_agree_on_a_template(folder: Path) -> None:
    for weights in (["--weights", "auto"], ["--weights", "a.safetensors", "--weights", "b.safetensors"]):
        assert run_command(["enhance", "photo.png", "--aligned", "--template", "ffhq", *weights]) == 0


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ("--aligned --tile 32", "--tile takes pictures of any size, so --aligned can't be used"),
        ("--only largest --max-faces 3", "--only 'largest' is one face, so --max-faces 3 can't be used"),
        ("--cache c", "--cache is for --compile"),
        ("--cache c --no-compile --preset throughput", "--cache is for --compile"),
        (
            "--backend onnx --compile",
            "onnxruntime compiles by itself, so --compile can't be used with --backend onnx",
        ),
        ("--strength 0.1 --strength=0.2", "--strength is given 2 times; enhance takes one"),
        ("-o a.png --output b.png -o c.png", "--output is given 3 times; enhance takes one"),
        ("--compile --no-compile", "--compile is given 2 times; enhance takes one"),
    ],
)
def test_what_contradicts_itself(options: str, line: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert error(["enhance", "photo.png", *options.split()], capsys) == line


@pytest.mark.parametrize("verb", VERBS[1:])
def test_one_network_for_the_other_tasks(verb: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = error([verb, "photo.png", "--weights", "a.safetensors", "--weights", "b.safetensors"], capsys)
    assert line == f"--weights is given 2 times; {verb} takes one"
    line = error([verb, "photo.png", "--weights", "auto"], capsys)
    assert line.startswith("--weights auto takes weights for restoration: name those for ")


def test_flags_may_be_repeated(folder: Path) -> None:
    assert run_command(["enhance", "photo.png", "--json", "--json", "--aligned", "--aligned"]) == 0


@pytest.mark.parametrize(
    ("options", "warnings"),
    [
        ("photo.png --recursive", ["--recursive has no effect: none of these is a folder"]),
        (". --recursive", []),
        ("photo.png --quality 50", ["--quality has no effect on PNG, TIFF and BMP"]),
        ("photo.png photo.jpg --quality 50", []),
        (
            "photo.png --strength 0 --sharpen 1 --match-color",
            ["--match-color and --sharpen: no effect with --strength 0, which leaves the photo as it is"],
        ),
        ("photo.png --strength 0.1 --sharpen 1", []),
    ],
)
def test_what_does_no_harm_is_a_warning(
    options: str, warnings: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["enhance", *options.split(), "-o", "out/"]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if " restored, " not in line]
    assert lines == [f"gpen-core: {line}" for line in warnings]


# Hints.

# Modules whose words are not those of all verbs. A hint may name the option that it is about: nobody meets it without.
SPEAKERS = {
    "cli": (),
    "verbs": (),
    "usage": (),
    "doctor": (),
    "config": (),
    "service": (),
    "gallery": ("enhance",),
    "presets": ("enhance",),
    "report": ("enhance",),
    "selection": ("enhance",),
    "restorer": ("enhance", "colorize"),
    "tasks": ("inpaint",),
}
ABOUT_THEMSELVES = {
    "backend": {"--backend", "--compile", "--precision", "--no-compile", "--preset", "--format"},
    "config": {"--template"},
    "package_cache": {"--compile", "--cache"},
    "runtime": {"--compile", "--precision"},
    # What a file that is no generator is for.
    "runtime_onnx": {"--detector", "--mask", "--parser"},
    "runtime_pt2": {"--format", "--precision"},
    # As "gpen-core convert --task".
    "tasks": {"--task"},
}


def texts(path: Path) -> Iterator[str]:
    """Text in a module that a user may read: neither documentation nor anything in comments."""
    tree = ast.parse(path.read_text())
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
    statements = [statement.value for body in bodies for statement in body if isinstance(statement, ast.Expr)]
    documentation = {id(value) for value in statements}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            yield node.value


def options_of(verb: str) -> set[str]:
    return {name for parameter in COMMANDS[verb].params for name in (*parameter.opts, *parameter.secondary_opts)}


@pytest.mark.parametrize("path", sorted(Path(gpen_core.__file__).parent.glob("*.py")), ids=lambda path: path.stem)
def test_hints_name_options_that_are_there(path: Path) -> None:
    named = {option for text in texts(path) for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)}
    for verb in SPEAKERS.get(path.stem, VERBS):
        assert named - ABOUT_THEMSELVES.get(path.stem, set()) <= options_of(verb), verb


def test_the_walk_over_hints_finds_some() -> None:
    found = {option for text in texts(Path(gpen_core.__file__).parent / "restorer.py") for option in text.split()}
    assert "--rotate" in found


def test_colorize_hints_at_what_it_has(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = replace(config_of(), task="colorization")
    restorer = Restorer(without_channel_0, config, FixedDetector([]), task="colorization")
    monkeypatch.setattr(Restorer, "load", classmethod(lambda *networks, **options: restorer))
    assert run_command(["colorize", "photo.png"]) == 0
    assert "heads on their side are found with --rotate auto" in capsys.readouterr().err
    assert run_command(["colorize", "photo.png", "-o", "turned.png", "--rotate", "auto"]) == 0
    assert capsys.readouterr().err == ""


# Folders for what is compiled.


def test_a_cache_that_cannot_be(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for cache, reason in (
        ("photo.png", "photo.png is no folder"),
        ("photo.png/cache", "photo.png is no folder"),
        ("photo.png/a/b", "photo.png is no folder"),
        ("n" * 300, "file name too long"),
    ):
        line = error(["enhance", "photo.jpg", "--compile", "--cache", cache], capsys)
        assert line == f"--cache {cache}: {reason}"
    # Root may write anywhere, so nobody may here.
    monkeypatch.setattr("os.access", lambda path, mode: False)
    Path("empty").mkdir()
    for cache in ("new/cache", "empty"):
        line = error(["enhance", "photo.jpg", "--preset", "throughput", "--cache", cache], capsys)
        assert line == f"--cache {cache}: no permission to write there"


def test_a_cache_in_an_image_is_only_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpen_core.files import require_writable

    Path("filled").mkdir()
    Path("filled/entry").touch()
    asked = []

    def unwritable(path: Path) -> None:
        asked.append(path)
        require_writable(path)

    monkeypatch.setattr("gpen_core.files.require_writable", unwritable)
    assert run_command(["enhance", "photo.jpg", "--compile", "--cache", "filled", "--device", "cpu"]) == 0
    assert Path("filled") not in asked


@pytest.mark.parametrize("home", ["photo.png", "photo.png/home", "home"])
def test_a_home_that_cannot_be(
    home: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GPEN_CORE_HOME", home)
    monkeypatch.setattr("gpen_core.runtime.compiles_ahead", lambda device: True)
    compiled = folder / home / "compiled"
    if home == "home":
        compiled.parent.mkdir()
        compiled.touch()
    line = error(["enhance", "photo.jpg", "--compile", "--device", "cpu"], capsys)
    path = compiled if home == "home" else folder / "photo.png"
    assert line == f"{compiled}: {path} is no folder: set GPEN_CORE_HOME to a folder, or use --cache"
    # Nothing is to be kept in it by these.
    assert run_command(["enhance", "photo.jpg", "--compile", "--cache", "c", "--device", "cpu"]) == 0
    assert run_command(["enhance", "photo.jpg"]) == 0


# Values that can't be.

IMPOSSIBLE = [
    *(["enhance", "photo.png", option, "a\0b"] for option in ("-o", "--weights", "--detector", "--report", "--box")),
    *(["enhance", "photo.png", option, "a\0b"] for option in ("--save-faces", "--upscaler", "--template", "--preset")),
    ["enhance", "photo.png", "--compile", "--cache", "a\0b"],
    ["enhance", "photo.png", "--mask", "parse", "--parser", "a\0b"],
    *([verb, "a\0b"] for verb in (*VERBS, "convert", "info", "export", "compile", "doctor", "restore")),
    ["inpaint", "photo.png", "--mask-image", "a\0b"],
    ["convert", "photo.png", "--licence", "a\0b"],
    ["weights", "path", "a\0b"],
    ["weights", "pull", "a\0b"],
    ["doctor", "--weights", "a\0b"],
    ["a\0b"],
    ["enhance", "photo.png", "--a\0b"],
]


@pytest.mark.parametrize("arguments", IMPOSSIBLE, ids=" ".join)
def test_a_zero_byte(arguments: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = error(arguments, capsys)
    assert line == f"{arguments[-1]}: not a possible file name or value".replace("\0", "\\x00")


def test_characters_that_no_file_system_takes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert error(["info", "a\ud800b"], capsys) == r"a\ud800b: not a possible file name or value"
    # Bytes of a name that is not text come in like this.
    assert run_command(["info", "a\udcffb"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("verb", VERBS)
def test_empty_values(verb: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert error([verb, ""], capsys) == "an empty file name"
    assert error([verb, "photo.png", "-o", ""], capsys) == "-o: an empty file name or value"
    assert error([verb, "photo.png", "--weights="], capsys) == "--weights: an empty file name or value"
    if verb == "enhance":
        for option in ("--save-faces", "--report", "--cache"):
            assert error([verb, "photo.png", option, ""], capsys) == f"{option}: an empty file name or value"


@pytest.mark.parametrize(
    "arguments",
    [
        ["export", "a.safetensors", "--format", "onnx", "-o", "a.onnx", "-o", "b.onnx"],
        ["compile", "a.safetensors", "--cache", "c", "--cache", "d"],
        ["convert", "a.pth", "-o", "a.safetensors", "-o", "b.safetensors"],
        ["doctor", "--weights", "a", "--weights", "b"],
    ],
)
def test_other_commands_take_one_value_too(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(arguments) == 1
    assert f"is given 2 times; {arguments[0]} takes one" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="names are text")
def test_names_that_are_not_utf_8(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = os.fsdecode(b"o\xff")
    place = tmp_path / "odd"
    place.mkdir()
    monkeypatch.chdir(place)
    torch.save(legacy_state(TINY), f"{odd}.pth")
    assert run_command(["convert", f"{odd}.pth", "-o", "plain.safetensors"]) == 0
    assert run_command(["export", "plain.safetensors", "--format", "onnx"]) == 0
    for suffix in (".safetensors", ".onnx"):
        shutil.copy(f"plain{suffix}", f"{odd}{suffix}")
    shutil.copy(folder / "photo.png", f"{odd}.png")
    assert run_command(["convert", f"{odd}.onnx", "-o", "back.safetensors"]) == 0
    assert run_command(["enhance", f"{odd}.png", "-o", f"{odd}/", "--report", f"{odd}.json"]) == 0
    assert Path(odd, f"{odd}.png").exists()
    for command in (
        ["convert", f"{odd}.pth"],
        ["info", f"{odd}.safetensors"],
        ["info", f"{odd}.onnx"],
        ["export", f"{odd}.safetensors", "--format", "onnx"],
        ["export", "plain.safetensors", "--format", "onnx", "-o", f"{odd}.2.onnx"],
    ):
        capsys.readouterr()
        assert run_command(command) in (1, 2)
        (line,) = capsys.readouterr().err.splitlines()
        assert "o\\udcff" in line
        assert "not UTF-8" in line
    with pytest.raises(GpenError, match="not UTF-8"):
        load_runtime(f"{odd}.onnx")
    with pytest.raises(GpenError, match="not UTF-8"):
        load_runtime(f"{odd}.safetensors")
    assert not list(place.glob("*.part"))
