"""What the README says to type works, and what it shows is what comes out."""

from __future__ import annotations

import hashlib
import re
import shlex
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

import gpen_weights
from gpen_core.checkpoint import read_metadata
from gpen_core.cli import run_command
from gpen_core.rrdb import RRDBNet, UpscalerConfig
from tests.legacy import TINY, legacy_state

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    lines = [part for block in blocks("bash") for line in block.splitlines() for part in line.split(" && ")]
    return [line for line in lines if line.startswith("gpen-core ")]


@pytest.fixture(scope="module")
def folder(centerface_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a reader of the README has: photos, old checkpoints and, in `home`, the detector."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "home").mkdir()
    shutil.copyfile(centerface_path, folder / "home" / "centerface.onnx")
    photo = cv2.imread(str(ROOT / "examples" / "astronaut_degraded.jpg"))
    (folder / "examples").mkdir()
    for name in ("photo.jpg", "other.png", "examples/astronaut_degraded.jpg"):
        assert cv2.imwrite(str(folder / name), photo)
    assert cv2.imwrite(str(folder / "face.png"), photo[60:188, 160:288])
    config = read_metadata(gpen_weights.resolve("gpen-open-512")).config
    for name in ("old.pth", "gpen-open-512.pth"):
        torch.save(legacy_state(config), folder / name)
    torch.save(legacy_state(TINY), folder / "tiny.pth")
    torch.manual_seed(0)
    net = RRDBNet(UpscalerConfig(2, features=8, blocks=1, growth=4, margin=17))
    torch.save({"params_ema": net.state_dict()}, folder / "upscaler.pth")
    return folder


@pytest.fixture
def at_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The reader's folder, in which nothing is found that somebody has on this machine."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("GPEN_CORE_HOME", str(folder / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    return folder


def test_there_is_something_to_test() -> None:
    assert len(commands()) >= 8
    assert len(blocks("python")) == 2


def test_commands_work(at_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["convert", "tiny.pth"]) == 0
    for command in commands():
        arguments = shlex.split(command)[1:]
        # The first command runs as it is; for the others' options, a network of 16 pixels will do.
        if arguments[0] == "enhance" and "--weights" not in arguments and command != commands()[0]:
            arguments += ["--weights", "tiny.safetensors"]
        assert run_command(arguments) == 0, f"{command}\n{capsys.readouterr().err}"
    restored = cv2.imread(str(at_home / "examples" / "astronaut_degraded_restored.jpg"))
    assert not np.array_equal(restored, cv2.imread(str(at_home / "examples" / "astronaut_degraded.jpg")))


def test_the_conversion_is_shown_as_it_is(at_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (session,) = blocks("console")
    prompt, shown = session.split("\n", 1)
    assert run_command(shlex.split(prompt)[2:]) == 0
    # A stand-in of the same structure, so the hash alone differs.
    digest = hashlib.sha256(Path("gpen-open-512.pth").read_bytes()).hexdigest()
    assert capsys.readouterr().out == re.sub(r"\b[0-9a-f]{64}\b", digest, shown)


def test_python_works(at_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["convert", "old.pth"]) == 0
    for block in blocks("python"):
        exec(block, {})
    printed = capsys.readouterr().out
    assert "1 [" in printed
    assert "restored" in printed
    assert "torch.Size([2, 3, 512, 512])" in printed


def test_links_and_pictures_are_there() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if not target.startswith("https://"):
            assert (ROOT / target).exists(), target
