"""What is no regular file, where weights or pictures are expected: one line, and nothing waits for it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import cv2
import pytest
import torch

from gpen_core.cli import run_command
from gpen_core.errors import CheckpointError
from gpen_core.rrdb import load_upscaler
from tests.legacy import TINY, legacy_state
from tests.stubs import smooth_picture

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no pipes, sockets and devices in folders")

COMMANDS = {
    "info": ["info", "IT"],
    "convert": ["convert", "IT"],
    "export": ["export", "IT", "--format", "onnx"],
    "compile": ["compile", "IT", "--cache", "cache"],
    "photo": ["enhance", "IT", "--aligned"],
    "weights": ["enhance", "photo.png", "--aligned", "--weights", "IT"],
    "detector": ["enhance", "photo.png", "--detector", "IT"],
    "upscaler": ["enhance", "photo.png", "--aligned", "--upscaler", "IT"],
    "colours": ["colorize", "photo.png", "--weights", "IT"],
    "mask image": ["inpaint", "photo.png", "--mask-image", "IT"],
}


def socket_at(path: Path) -> None:
    # A path of a socket has at most 108 bytes.
    before = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(before)


KINDS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "socket": socket_at,
    "folder": Path.mkdir,
    "device": lambda path: path.symlink_to("/dev/zero"),
}


SUFFIXES = ("", ".safetensors", ".onnx", ".pt2", ".png")
RUN = (
    "import json, sys\n"
    "from gpen_core.cli import run_command\n"
    "for arguments in json.loads(sys.argv[1]):\n"
    "    print('>', run_command(arguments), file=sys.stderr, flush=True)\n"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("odd")
    for kind, make in KINDS.items():
        for suffix in SUFFIXES:
            make(folder / f"{kind}{suffix}")
    assert cv2.imwrite(str(folder / "photo.png"), smooth_picture(64, 64))
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_every_command_says_so(kind: str, folder: Path) -> None:
    names = [f"{kind}{suffix}" for suffix in SUFFIXES]
    asked = [[f"./{name}" if word == "IT" else word for word in words] for name in names for words in COMMANDS.values()]
    # In a process of its own, which is not waited for without end.
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(asked)],
        check=False,
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "GPEN_CORE_HOME": str(folder / "home")},
        timeout=300,
    )
    answers = done.stderr.splitlines()
    assert len(answers) == 2 * len(asked), done.stderr
    for arguments, line, result in zip(asked, answers[::2], answers[1::2], strict=True):
        name = next(word for word in arguments if word.startswith("./"))[2:]
        # A folder of photos is fine, but for its having none.
        empty = kind == "folder" and arguments[:2] == ["enhance", f"./{name}"]
        start = "no photos found" if empty else f"{name}: "
        assert line.startswith(f"gpen-core: {start}"), arguments
        assert result in ("> 1", "> 2", "> 4"), arguments


@pytest.mark.parametrize("kind", KINDS)
def test_the_up_scaler_says_so(kind: str, folder: Path) -> None:
    with pytest.raises(CheckpointError, match="a folder, not a file" if kind == "folder" else "not a regular file"):
        load_upscaler(folder / kind)


def test_a_pipe_where_the_output_would_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(legacy_state(TINY), tmp_path / "old.pth")
    os.mkfifo(tmp_path / "old.safetensors")
    assert run_command(["convert", str(tmp_path / "old.pth")]) == 1
    assert "old.safetensors: a file is there that was not made from" in capsys.readouterr().err
