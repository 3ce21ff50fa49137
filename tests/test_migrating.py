"""The guide for users of the original: its commands, on stand-in checkpoints of a small size."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from gpen_core.cli import run_command
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
