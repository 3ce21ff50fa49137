"""Nothing that a run reads is written over, by whatever way, and nothing is written twice."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from gpen_core import apart
from gpen_core.apart import Read, Written, ignores_case, require_apart
from gpen_core.cli import run_command
from gpen_core.errors import UsageError
from gpen_core.restorer import Restorer
from tests.legacy import TINY, legacy_state
from tests.stubs import FixedDetector, config_of, face_at, smooth_picture, without_channel_0

PICTURE = cv2.imencode(".png", np.minimum(smooth_picture(64, 64), 250))[1].tobytes()
NETWORKS = {"--weights": "weights", "--detector": "detector", "--upscaler": "up-scaler", "--parser": "face parser"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Photos, and networks that have names as photos may have them; none of them is ever loaded."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GPEN_CORE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("in", "sub", "home"):
        Path(name).mkdir()
    for name in ("in/a.png", "in/b.png", *(f"{name[2:]}.png" for name in NETWORKS)):
        Path(name).write_bytes(PICTURE + name.encode())
    for name in ("GPEN-BFR-512.safetensors", "centerface.onnx"):
        (Path("home") / name).write_bytes(b"network")
    return tmp_path


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """How often a network was loaded, which removes red from one face."""
    calls: list[Any] = []

    def load(*networks: object, **options: object) -> Restorer:
        calls.append(networks)
        return Restorer(without_channel_0, config_of(), FixedDetector([face_at(32, 32, 40)]))

    monkeypatch.setattr(Restorer, "load", classmethod(load))
    return calls


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a command is refused with, which changes no file and makes none."""
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    assert run_command(arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before
    return captured.err


def symbolic(path: Path) -> str:
    Path("link.png").symlink_to(path)
    return "link.png"


def hard(path: Path) -> str:
    os.link(path, "link.png")
    return "link.png"


WAYS: dict[str, Callable[[Path], str]] = {
    "as it is": str,
    "absolute": lambda path: str(path.absolute()),
    "by a folder and back": lambda path: f"sub/../{path}",
    "by a folder that is not there": lambda path: f"nowhere/../{path}",
    "by a symbolic link": symbolic,
    "by a hard link": hard,
}


def networks() -> list[str]:
    return [part for option in NETWORKS for part in (option, f"./{option[2:]}.png")] + ["--mask", "parse"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("writer", ["-o", "--report"])
@pytest.mark.parametrize("network", NETWORKS)
def test_no_network_is_written_over(
    network: str, writer: str, way: str, folder: Path, loaded: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    target = WAYS[way](Path(f"{network[2:]}.png"))
    line = refused(["enhance", "in/a.png", writer, target, *networks()], capsys)
    what = "the output of in/a.png" if writer == "-o" else "the report (--report)"
    assert line.startswith(f"gpen-core: {Path(target)}: {what} would replace the {NETWORKS[network]}")
    assert loaded == []


@pytest.mark.parametrize("network", NETWORKS)
def test_neither_comparisons_nor_faces_replace_a_network(
    network: str, folder: Path, loaded: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    file, what = f"{network[2:]}.png", NETWORKS[network]
    others = [part for option in NETWORKS if option != network for part in (option, f"./{option[2:]}.png")]
    others += ["--mask", "parse"]
    Path("out").mkdir()
    Path(file).rename("out/a_compare.png")
    arguments = ["enhance", "in", "-o", "out", *others, network, "out/a_compare.png"]
    line = refused([*arguments, "--compare"], capsys)
    assert f"out/a_compare.png: the comparison of in/a.png (--compare) would replace the {what}" in line
    for name, link in (("crop", os.symlink), ("both", os.link)):
        Path("faces").mkdir(exist_ok=True)
        link(Path("out/a_compare.png").absolute(), f"faces/b.png_face12_{name}.png")
        line = refused([*arguments, "--save-faces", "faces"], capsys)
        assert "a face of in/b.png (--save-faces) would replace" in line
        assert f"the {what}" in line
        Path(f"faces/b.png_face12_{name}.png").unlink()
    assert loaded == []


def test_what_a_name_means_is_not_written_over(
    folder: Path, loaded: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    for options, name in (
        (["--weights", "gpen-bfr-512"], "GPEN-BFR-512.safetensors"),
        (["--weights", "auto"], "GPEN-BFR-512.safetensors"),
        ([], "centerface.onnx"),
    ):
        line = refused(["enhance", "in/a.png", "--report", f"home/{name}", *options], capsys)
        assert f"home/{name}: the report (--report) would replace the " in line
    # No file is meant by these.
    assert run_command(["enhance", "in/a.png", "-o", "out.png", "--report", "auto"]) == 0


def test_the_sidecar_of_a_package_is_not_written_over(
    folder: Path, loaded: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("w.pt2", "w.pt2.json"):
        Path(name).write_bytes(b"package")
    line = refused(["enhance", "in/a.png", "--weights", "w.pt2", "--report", "w.pt2.json"], capsys)
    assert "would replace what belongs to the weights" in line


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["--compare", "--report", "out/a_compare.png"],
            "out/a_compare.png: both the comparison of in/a.png (--compare) and the report (--report)",
        ),
        (
            ["--save-faces", "faces", "--report", "faces/b.png_face1_crop.png"],
            "faces/b.png_face1_crop.png: both the report (--report) and a face of in/b.png (--save-faces)",
        ),
        (["--report", "out/a.png"], "out/a.png: both the output of in/a.png and the report (--report)"),
        (["--report", "out"], "out: the report (--report) can't stand where a folder is needed"),
        (["--save-faces", "f", "--report", "f"], "f: the report (--report) can't stand where a folder is needed"),
        (
            ["--compile", "--cache", "c", "--report", "c"],
            "c: the report (--report) can't stand where a folder is needed",
        ),
        (["--report", "in/../in/b.png"], "in/../in/b.png: the report (--report) would replace a photo that is read"),
    ],
)
def test_nothing_is_written_twice(
    arguments: list[str], line: str, folder: Path, loaded: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(["enhance", "in", "-o", "out", *arguments], capsys).startswith(f"gpen-core: {line}")


def test_a_photo_that_is_named_twice(folder: Path, loaded: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(["enhance", "in/a.png", "in/a.png", "-o", "out"], capsys)
    assert "out/a.png: the output of in/a.png would be written there twice" in line


def test_the_record_of_a_folder_replaces_nothing(
    folder: Path, loaded: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("out").mkdir()
    Path("out/.gpen-core.jsonl").symlink_to(Path("weights.png").absolute())
    line = refused(["enhance", "in", "-o", "out", "--weights", "./weights.png"], capsys)
    assert "out/.gpen-core.jsonl: the record would replace the weights, weights.png" in line


def test_what_lies_apart_is_written(folder: Path, loaded: list[Any]) -> None:
    options = ["--compare", "--save-faces", "faces", "--report", "out/report.jsonl", *networks()[:4]]
    for _ in range(2):
        assert run_command(["enhance", "in", "-o", "out", *options]) == 0
    assert len(list(Path("faces").iterdir())) == 6


# The mask image of inpainting.


@pytest.fixture
def inpainting(folder: Path) -> list[str]:
    """Weights, and photos with a mask image among them."""
    torch.save(legacy_state(TINY), "i.pth")
    assert run_command(["convert", "i.pth", "--task", "inpainting"]) == 0
    mask = np.zeros((64, 64), np.uint8)
    mask[4:8] = 255
    assert cv2.imwrite("in/mask.png", mask)
    return ["--weights", "i.safetensors", "--mask-image", "in/mask.png"]


@pytest.mark.parametrize("way", WAYS)
def test_the_mask_image_is_not_written_over(
    way: str, inpainting: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    target = WAYS[way](Path("in/mask.png"))
    line = refused(["inpaint", "in/a.png", "-o", target, *inpainting], capsys)
    assert f"{Path(target)}: the output of in/a.png would replace the mask image" in line


def test_the_mask_image_of_a_folder_is_no_photo(inpainting: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("in/link.png").symlink_to("mask.png")
    assert run_command(["inpaint", "in", "-o", "out", *inpainting]) == 0
    assert sorted(path.name for path in Path("out").glob("[!.]*")) == ["a.png", "b.png"]
    capsys.readouterr()
    line = refused(["inpaint", "in/a.png", "in/mask.png", "-o", "other", *inpainting], capsys)
    assert line == "gpen-core: in/mask.png: that is the mask image, not a picture to work on\n"


def test_an_output_among_the_photos_spares_the_mask(inpainting: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("out").mkdir()
    Path("in/mask.png").rename("out/a.png")
    capsys.readouterr()
    line = refused(["inpaint", "in", "-o", "out", *inpainting[:2], "--mask-image", "out/a.png"], capsys)
    assert "would replace the mask image" in line


# Where case means nothing.


def test_this_folder_tells_whether_case_matters(tmp_path: Path) -> None:
    (tmp_path / "probe").touch()
    assert ignores_case(tmp_path / "not" / "there") == (tmp_path / "PROBE").exists()


def test_names_that_differ_in_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = [Read(tmp_path / "Photo.png", "a photo"), Read(tmp_path / "f/X.PNG_face1_crop.png", "the mask")]
    one, other = Written(tmp_path / "out/a.PNG", "one"), Written(tmp_path / "OUT/A.png", "other")
    faces = Written(tmp_path / "f/x.png", "faces", names=re.compile(r"(.+)_face\d+_crop\.png"))
    monkeypatch.setattr(apart, "ignores_case", lambda folder: False)
    require_apart(read, [one, other, faces, Written(tmp_path / "photo.PNG", "another")])
    monkeypatch.setattr(apart, "ignores_case", lambda folder: True)
    for written, message in (
        ([one, other], "both one and other"),
        ([faces], "faces would replace the mask"),
        ([Written(tmp_path / "photo.PNG", "another")], "another would replace a photo"),
    ):
        with pytest.raises(UsageError, match=message):
            require_apart(read, written)
