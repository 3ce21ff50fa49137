"""The guide for users of the original: its commands, on stand-in checkpoints of a small size."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
import typer.main

from gpen_core.cli import app, run_command
from gpen_core.restorer import Restorer
from tests.legacy import TINY, legacy_state
from tests.stand_in import fill_state
from tests.stubs import FixedDetector, face_at, smooth_picture
from tests.test_retinaface_net import mobilenet_shapes
from tests.test_rrdb import far_sighted

GUIDE = (Path(__file__).resolve().parents[1] / "docs" / "migrating.md").read_text()
TASKS = {
    "BFR-512": "restoration",
    "Colorization-1024": "colorization",
    "Inpainting-1024": "inpainting",
    "Seg2face-512": "seg2face",
}


def commands() -> list[list[str]]:
    blocks = re.findall(r"^```bash\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    return [shlex.split(line)[1:] for block in blocks for line in block.splitlines()]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What somebody has who used the original."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GPEN_CORE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in TASKS:
        torch.save(legacy_state(TINY), f"GPEN-{name}.pth")
    # The small variant of the detector: the large one and the parser are converted in tests of their own.
    torch.save(fill_state(mobilenet_shapes()), "RetinaFace-R50.pth")
    for name in ("imgs", "grays", "ffhq-10", "segs"):
        (tmp_path / "examples" / name).mkdir(parents=True)
        picture = np.minimum(smooth_picture(64, 64), 250)
        picture[20:30, 20:30] = 255
        assert cv2.imwrite(str(tmp_path / "examples" / name / "a.png"), picture)
    return tmp_path


def test_the_guide_names_four_commands_of_each() -> None:
    assert GUIDE.count("python demo.py --task") == 4
    assert [arguments[0] for arguments in commands() if arguments[0] != "convert"] == [
        "enhance",
        "colorize",
        "inpaint",
        "seg2face",
    ]


def test_the_commands_work(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"params_ema": far_sighted(2, blocks=1)}, "realesrnet_x2.pth")
    load = Restorer.load.__func__  # type: ignore[attr-defined]

    def without_detector(cls: type[Restorer], /, weights: str, detector: object, **options: object) -> Restorer:
        restorer = load(cls, weights, None, **options)
        restorer.detector = FixedDetector([face_at(32, 32, 30)])
        return restorer  # type: ignore[no-any-return]

    monkeypatch.setattr(Restorer, "load", classmethod(without_detector))
    monkeypatch.setattr("gpen_core.verbs.find_detector", lambda name: "RetinaFace-R50.onnx")
    for arguments in commands():
        if arguments[1] == "ParseNet-latest.pth":
            continue
        assert run_command(arguments) == 0, f"{arguments}\n{capsys.readouterr().err}"
    results = sorted(str(path.relative_to(folder)) for path in (folder / "examples").glob("outs-*/*.png"))
    assert results == [f"examples/outs-{name}/a.png" for name in ("bfr", "colorization", "inpainting", "seg2face")]
    assert cv2.imread("examples/outs-bfr/a.png").shape == (128, 128, 3)
    assert len(list((folder / "examples" / "faces").rglob("*.png"))) == 3


COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def original_options() -> list[str]:
    """Every option of the original that the guide names: in its commands and in the first column of its table."""
    lines = [line for line in GUIDE.splitlines() if line.startswith("python demo.py")]
    cells = [line.split("|")[1] for line in GUIDE.splitlines() if line.startswith("| ")]
    return sorted(set(re.findall(r"--\w+", " ".join(lines + cells))))


def own_options(command: str) -> set[str]:
    return {name for parameter in COMMANDS[command].params for name in parameter.opts}


def test_the_guide_names_options_of_the_original() -> None:
    assert {"--in_size", "--out_size", "--use_cuda", "--save_face", "--alpha", "--tile_size"} <= set(original_options())


@pytest.mark.parametrize("command", ["enhance", "colorize", "inpaint", "seg2face"])
@pytest.mark.parametrize("option", original_options())
def test_options_of_the_original_are_known(option: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for given in ([option, "1"], [f"{option}=1"]):
        assert run_command([command, "absent.png", *given]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"gpen-core: {option} is an option of the original; here: ")
        advice = line.partition("; here: ")[2]
        for name in re.findall(r"--[\w-]+", advice):
            assert name in own_options("enhance" if "enhance" in advice else command)


def test_every_other_option_of_the_guide_is_one_of_ours() -> None:
    text = "\n".join(line for line in GUIDE.splitlines() if not line.startswith("python demo.py"))
    ours = set().union(*(own_options(command) for command in COMMANDS if command != "weights"))
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text))
    assert "--save-faces" in named
    assert named - ours <= set(original_options())


def test_convert_checks_what_the_original_was_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = next(line for line in GUIDE.splitlines() if line.startswith("| `--in_size`"))
    names = re.findall(r"`(--[\w-]+)`", row)
    assert set(names) <= own_options("convert")
    for name in names:
        assert run_command(["convert", "GPEN-BFR-512.pth", name, "3"]) == 1
        assert "contradicts the file" in capsys.readouterr().err
    size = str(TINY.input_size)
    assert run_command(["convert", "GPEN-BFR-512.pth", "--in_size", size, "--out_size", size]) == 0
