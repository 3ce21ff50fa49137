"""The same command twice, and results that lie among the photos: nothing is overwritten, nothing grows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from gpen_core import image_io
from gpen_core.cli import run_command
from gpen_core.errors import CheckpointError
from gpen_core.restorer import Restorer
from tests.leftovers import abandoned
from tests.stubs import FixedDetector, config_of, face_at, smooth_picture, without_channel_0
from tests.test_rrdb import far_sighted


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with two photos in `in`, and a network that removes red from one face of each."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        Restorer,
        "load",
        classmethod(lambda *a, **k: Restorer(without_channel_0, config_of(), FixedDetector([face_at(60, 50, 64)]))),
    )
    monkeypatch.setattr("gpen_core.verbs.find_detector", lambda name: name)
    monkeypatch.setattr("gpen_core.verbs.fingerprint", lambda *networks, **others: str(sorted(others.items())))
    Path("in").mkdir()
    for i in range(2):
        assert cv2.imwrite(f"in/{i}.png", smooth_picture(120, 100, i))
    return tmp_path


def names(folder: str) -> set[str]:
    return {str(path.relative_to(folder)) for path in Path(folder).rglob("*.png")}


@pytest.mark.parametrize(
    "options",
    [
        ["in"],
        ["in", "--compare"],
        ["in", "--save-faces", "in"],
        ["in", "-o", "in/out", "-r", "--save-faces", "in/faces", "--compare"],
        ["in", "-o", "out", "--save-faces", "in"],
    ],
)
def test_the_same_command_twice(options: list[str], photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    originals = {path: path.read_bytes() for path in Path("in").glob("?.png")}
    assert run_command(["enhance", *options]) == 0, capsys.readouterr().err
    first = names(".")
    assert run_command(["enhance", *options, "--skip-existing"]) == 0, capsys.readouterr().err
    assert names(".") == first
    assert "2 skipped" in capsys.readouterr().err
    assert run_command(["enhance", *options]) == 0
    assert names(".") == first
    assert {path: path.read_bytes() for path in Path("in").glob("?.png")} == originals


def test_faces_never_replace_a_photo(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("other").mkdir()
    (Path("other") / "x.png").write_bytes((photos / "in/0.png").read_bytes())
    named = Path("other/0.png_face1_crop.png")
    named.write_bytes((photos / "in/1.png").read_bytes())
    before = named.read_bytes()
    assert run_command(["enhance", "in/0.png", str(named), "-o", "out", "--save-faces", "other"]) in (0, 1)
    assert named.read_bytes() == before
    assert run_command(["enhance", "in/0.png", "-o", str(named), "--save-faces", "other"]) == 1
    assert "choose another folder" in capsys.readouterr().err
    assert named.read_bytes() == before


def test_extra_pictures_are_made_again(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["enhance", "in", "-o", "out", "--skip-existing", "--compare"]
    assert run_command(command) == 0
    Path("out/0_compare.png").unlink()
    assert run_command(command) == 0
    assert "1 skipped" in capsys.readouterr().err
    assert Path("out/0_compare.png").is_file()
    assert run_command([*command, "--save-faces", "faces"]) == 0
    assert len(names("faces")) == 6


@pytest.mark.parametrize("output", ["in", "out"])
def test_faces_are_made_again(output: str, photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["enhance", "in", *(["-o", output] if output == "out" else []), "--skip-existing"]
    command += ["--save-faces", "faces"]
    assert run_command(command) == 0
    Path("faces/0.png_face1_both.png").unlink()
    for expected in ("1 restored, 0 no face, 0 failed, 1 skipped", "0 restored, 0 no face, 0 failed, 2 skipped"):
        assert run_command(command) == 0
        assert expected in capsys.readouterr().err
        assert len(names("faces")) == 6


def test_without_faces_there_is_nothing_to_make_again(
    photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    restorer = Restorer(without_channel_0, config_of(), FixedDetector([]))
    monkeypatch.setattr(Restorer, "load", classmethod(lambda *a, **k: restorer))
    for expected in ("2 no face", "2 skipped"):
        assert run_command(["enhance", "in", "-o", "out", "--skip-existing", "--save-faces", "faces"]) == 0
        assert expected in capsys.readouterr().err


def test_pictures_beside_outputs_are_found_where_the_folder_is_moved(
    photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["enhance", "in", "-o", "out", "--compare"]) == 0
    Path("out").rename("moved")
    assert run_command(["enhance", "in", "-o", "moved", "--compare", "--skip-existing"]) == 0
    assert "2 skipped" in capsys.readouterr().err


def test_leftovers_of_extra_pictures_go(photos: Path) -> None:
    for name in ("out", "faces"):
        Path(name).mkdir()
    left = [abandoned(Path(name)) for name in ("out/0_compare.png", "faces/0.png_face1_both.png")]
    assert run_command(["enhance", "in", "-o", "out", "--compare", "--save-faces", "faces"]) == 0
    assert not any(path.exists() for path in left)


@pytest.mark.parametrize("output", ["album.v1/", "x.jpg/"])
def test_a_slash_means_a_folder(output: str, photos: Path) -> None:
    assert run_command(["enhance", "in/0.png", "-o", output]) == 0
    assert (photos / output / "0.png").is_file()


@pytest.mark.parametrize("arguments", [[""], ["in/0.png", "-o", ""], ["in/0.png", ""]])
def test_an_empty_name_is_none(arguments: list[str], photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = names(".")
    assert run_command(["enhance", *arguments]) == 1
    assert "empty file name" in capsys.readouterr().err
    assert names(".") == before


@pytest.mark.parametrize("report", ["in/0.png", "out", "out/.gpen-core.jsonl", "in"])
def test_a_report_replaces_nothing(report: str, photos: Path) -> None:
    assert run_command(["enhance", "in/0.png", "-o", "out/", "--report", report]) == 1
    assert not Path("out").exists()


OLD = '{"input": "in/0.png", "output": null, "status": "failed", "faces": [], "seconds": {}}\n'


def test_a_report_never_speaks_of_another_run(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any, **options: Any) -> None:
        raise CheckpointError("w.safetensors: no weights")

    monkeypatch.setattr(Restorer, "load", broken)
    Path("old.jsonl").write_text(OLD)
    assert run_command(["enhance", "in", "-o", "out", "--report", "old.jsonl"]) == 2
    assert Path("old.jsonl").read_text() == ""


@pytest.mark.parametrize("options", [["-o", "file/out"], ["-o", "in"], ["-o", "out", "--skip-existing"]])
def test_a_run_that_is_refused_leaves_the_report(
    options: list[str], photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("file").touch()
    Path("out/.gpen-core.jsonl").mkdir(parents=True)
    Path("old.jsonl").write_text(OLD)
    assert run_command(["enhance", "in", *options, "--report", "old.jsonl"]) in (1, 2)
    assert capsys.readouterr().err.count("\n") == 1
    assert Path("old.jsonl").read_text() == OLD


@pytest.mark.parametrize("options", [["--min-face", "10"], ["--only", "largest"], ["--max-faces", "1"]])
@pytest.mark.parametrize("whole", [["--aligned"], ["--tile", "64"]])
def test_choosing_faces_needs_detection(options: list[str], whole: list[str], photos: Path) -> None:
    assert run_command(["enhance", "in/0.png", *whole, *options]) == 1


def test_info_of_an_upscaler(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"params_ema": far_sighted(2, blocks=1)}, "up.pth")
    assert run_command(["convert", "up.pth"]) == 0
    capsys.readouterr()
    assert run_command(["info", "up.safetensors"]) == 0
    told = capsys.readouterr().out
    assert "RRDBNet up-scaler x2" in told
    assert "kept params_ema" in told


def test_black_under_transparency_stays_black_in_webp(tmp_path: Path) -> None:
    pixels = smooth_picture(90, 70)
    alpha = np.full((70, 90), 255, np.uint8)
    alpha[10:60, 20:50] = 0
    pixels[alpha == 0] = 0
    photo = image_io.Photo(pixels, grey=False, alpha=alpha, format="webp")
    pytest.importorskip("PIL.Image", reason="colours under transparency need Pillow")
    image_io.write(tmp_path / "a.webp", photo)
    again = image_io.read(tmp_path / "a.webp")
    assert np.array_equal(again.pixels, pixels)


def test_a_fourth_sample_of_a_tiff_is_opacity(tmp_path: Path) -> None:
    from PIL import Image as Pillow

    rgba = np.dstack([smooth_picture(40, 30), np.full((30, 40), 99, np.uint8)])
    assert cv2.imwrite(str(tmp_path / "a.tif"), rgba)
    photo = image_io.read(tmp_path / "a.tif")
    image_io.write(tmp_path / "b.tif", photo)
    with Pillow.open(tmp_path / "b.tif") as written:
        assert written.mode == "RGBA"
        assert np.asarray(written)[0, 0, 3] == 99
