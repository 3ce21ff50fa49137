"""The command line as a user types it: outputs, exit codes, and one line for every mistake."""

from __future__ import annotations

import json
import pickle
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from gpen_core import __version__, image_io
from gpen_core.cli import main, run_command
from gpen_core.restorer import Restorer
from tests.legacy import TINY, legacy_state
from tests.stubs import FixedDetector, config_of, face_at, never_finite, smooth_picture, without_channel_0
from tests.test_convert import Exploit

PICTURE = smooth_picture(120, 100)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a photo, and weights looked up nowhere else."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GPEN_CORE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save_png(Path("photo.png"), PICTURE)
    return tmp_path


def save_png(path: Path, image: NDArray[np.uint8]) -> None:
    assert cv2.imwrite(str(path), image[..., ::-1])


def load_png(path: Path) -> NDArray[Any]:
    return np.asarray(cv2.imread(str(path), cv2.IMREAD_UNCHANGED))[..., ::-1]


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """`enhance` with a network that removes red from one face; returns what `Restorer.load` was asked for."""
    calls: list[dict[str, Any]] = []

    def load(cls: type[Restorer], /, weights: object, detector: object, **options: Any) -> Restorer:
        calls.append({"weights": weights, "detector": detector, **options})
        return Restorer(without_channel_0, config_of(), FixedDetector([face_at(60, 50, 64)]), task=options["task"])

    monkeypatch.setattr(Restorer, "load", classmethod(load))
    monkeypatch.setattr("gpen_core.verbs.find_detector", lambda name: name)
    monkeypatch.setattr("gpen_core.verbs.fingerprint", lambda *networks, **others: "the same")
    return calls


def one_line(text: str) -> str:
    assert text.endswith("\n")
    assert text.count("\n") == 1, text
    assert "Traceback" not in text
    return text


# enhance: what is written where.


def test_enhance_writes_beside_the_input(folder: Path, stub: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    before = Path("photo.png").read_bytes()
    assert run_command(["enhance", "photo.png"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    for part in ("photo.png -> photo_restored.png", "1 face", "cpu fp32", "detect", "restore", "paste"):
        assert part in one_line(captured.out)
    restored = load_png(Path("photo_restored.png"))
    assert restored.shape == PICTURE.shape
    assert restored[50, 60, 0] == 0
    assert np.array_equal(restored[:, :20], PICTURE[:, :20])
    assert Path("photo.png").read_bytes() == before
    assert sorted(p.name for p in folder.iterdir()) == ["photo.png", "photo_restored.png"]


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("out.png", "out.png"),
        ("out.jpg", "out.jpg"),
        ("new/deep/out.png", "new/deep/out.png"),
        ("new", "new/photo.png"),
        ("new/", "new/photo.png"),
    ],
)
def test_enhance_output(output: str, expected: str, folder: Path, stub: list[Any]) -> None:
    assert run_command(["enhance", "photo.png", "-o", output]) == 0
    assert (folder / expected).is_file()


def test_enhance_many(folder: Path, stub: list[Any]) -> None:
    Path("älbum one").mkdir()
    save_png(Path("other.png"), PICTURE)
    Path("älbum one/PHOTO 2.JPG").write_bytes(cv2.imencode(".jpg", PICTURE)[1].tobytes())
    Path("älbum one/notes.txt").write_text("no photo")
    assert run_command(["enhance", "photo.png", "other.png", "älbum one", "-o", "out"]) == 0
    assert sorted(p.name for p in Path("out").glob("[!.]*")) == ["PHOTO 2.JPG", "other.png", "photo.png"]
    assert len(stub) == 1


def test_enhance_folders_mirror(folder: Path, stub: list[Any]) -> None:
    Path("in/a/b").mkdir(parents=True)
    save_png(Path("in/top.png"), PICTURE)
    save_png(Path("in/a/b/deep.png"), PICTURE)
    assert run_command(["enhance", "in", "-o", "flat"]) == 0
    assert run_command(["enhance", "in", "-o", "tree", "--recursive"]) == 0
    assert [p.name for p in Path("flat").rglob("*.png")] == ["top.png"]
    assert sorted(str(p.relative_to("tree")) for p in Path("tree").rglob("*.png")) == ["a/b/deep.png", "top.png"]


def test_enhance_json(folder: Path, stub: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad.jpg").write_text("<html>")
    assert run_command(["enhance", "photo.png", "bad.jpg", "-o", "out", "--json"]) == 3
    good, bad = map(json.loads, capsys.readouterr().out.splitlines())
    assert (good["input"], good["output"]) == ("photo.png", str(Path("out/photo.png")))
    assert set(good["faces"][0]) == {"box", "landmarks", "score", "status"}
    assert good["faces"][0]["status"] == "restored"
    assert len(good["faces"][0]["landmarks"]) == 5
    assert bad["faces"] == []
    assert bad["output"] is None
    assert "bad.jpg" in bad["error"]


def test_enhance_passes_its_options_on(folder: Path, stub: list[Any]) -> None:
    arguments = [
        "--weights",
        "w.safetensors",
        "--detector",
        "d.onnx",
        "--device",
        "cpu",
        "--precision",
        "fp32",
        "--compile",
        "--cache",
        "cache",
        "--template",
        "ffhq",
        "--detect-size",
        "640",
        "--detector-device",
        "cuda",
    ]
    assert run_command(["enhance", "photo.png", *arguments]) == 0
    assert stub == [
        {
            "weights": "w.safetensors",
            "detector": "d.onnx",
            "backend": "auto",
            "device": "cpu",
            "precision": "fp32",
            "compile": True,
            "cache": Path("cache"),
            "max_batch": None,
            "upscaler": None,
            "parser": None,
            "template": "ffhq",
            "detect_size": 640,
            "detector_device": "cuda",
            "task": "restoration",
            "upscaler_tile": None,
            "memory": None,
        }
    ]


def test_enhance_aligned_needs_no_detector(folder: Path, stub: list[Any]) -> None:
    save_png(Path("face.png"), smooth_picture(64, 64))
    assert run_command(["enhance", "face.png", "--aligned"]) == 0
    assert stub[0]["detector"] is None
    assert (load_png(Path("face_restored.png"))[..., 0] == 0).all()


def test_enhance_strength_0(folder: Path, stub: list[Any]) -> None:
    assert run_command(["enhance", "photo.png", "--strength", "0"]) == 0
    assert np.array_equal(load_png(Path("photo_restored.png")), PICTURE)


def test_a_face_that_is_not_finite(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    restorer = Restorer(never_finite, config_of(), FixedDetector([face_at(60, 50, 64)]))
    monkeypatch.setattr(Restorer, "load", classmethod(lambda *a, **k: restorer))
    monkeypatch.setattr("gpen_core.verbs.find_detector", lambda name: name)
    assert run_command(["enhance", "photo.png"]) == 3
    assert "1 failed" in capsys.readouterr().out
    assert np.array_equal(load_png(Path("photo_restored.png")), PICTURE)


# enhance: faces, sizes, pictures to look at.


def test_enhance_box(folder: Path, stub: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["enhance", "photo.png", "--box", "50,40,20,20"]) == 0
    assert capsys.readouterr().err == ""
    assert load_png(Path("photo_restored.png"))[50, 60, 0] == 0
    assert run_command(["enhance", "photo.png", "-o", "other.png", "--box", "0,0,20,20"]) == 0
    assert "no face in the box 0,0,20,20" in one_line(capsys.readouterr().err)
    assert np.array_equal(load_png(Path("other.png")), PICTURE)


def test_enhance_hints_at_tilted_heads(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    restorer = Restorer(never_finite, config_of(), FixedDetector([]))
    monkeypatch.setattr(Restorer, "load", classmethod(lambda *a, **k: restorer))
    monkeypatch.setattr("gpen_core.verbs.find_detector", lambda name: name)
    assert run_command(["enhance", "photo.png"]) == 0
    captured = capsys.readouterr()
    assert "0 faces" in one_line(captured.out)
    assert "--rotate auto" in one_line(captured.err)
    assert run_command(["enhance", "photo.png", "-o", "turned.png", "--rotate", "auto"]) == 0
    assert capsys.readouterr().err == ""


def test_enhance_sizes(folder: Path, stub: list[Any]) -> None:
    assert run_command(["enhance", "photo.png", "-o", "a.png", "--upscale", "2"]) == 0
    assert load_png(Path("a.png")).shape == (200, 240, 3)
    assert run_command(["enhance", "photo.png", "-o", "b.png", "--long-side", "60"]) == 0
    assert load_png(Path("b.png")).shape == (50, 60, 3)
    assert [call["upscaler"] for call in stub] == [None, None]
    assert run_command(["enhance", "photo.png", "-o", "c.png", "--upscaler", "up.safetensors"]) == 0
    assert stub[2]["upscaler"] == "up.safetensors"


def test_enhance_tiles_need_no_detector(folder: Path, stub: list[Any]) -> None:
    assert run_command(["enhance", "photo.png", "--tile", "64", "--stride", "32"]) == 0
    assert stub[0]["detector"] is None
    assert (load_png(Path("photo_restored.png"))[..., 0] == 0).all()


def test_enhance_compare(folder: Path, stub: list[Any]) -> None:
    rgba = np.dstack([PICTURE, np.full(PICTURE.shape[:2], 200, np.uint8)])
    assert cv2.imwrite("clear.png", rgba[..., [2, 1, 0, 3]])
    assert run_command(["enhance", "photo.png", "clear.png", "-o", "out", "--compare"]) == 0
    names = {path.name for path in Path("out").iterdir()}
    assert names == {"photo.png", "photo_compare.png", "clear.png", "clear_compare.png"}
    for name in ("photo", "clear"):
        both = load_png(Path(f"out/{name}_compare.png"))
        assert np.array_equal(both[:, :120], PICTURE)
        assert np.array_equal(both[:, 120:], load_png(Path("out/photo.png")))


def test_transparency_that_a_jpeg_cannot_hold_is_refused_before_any_work(
    folder: Path, stub: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    clear = np.dstack([PICTURE, np.full(PICTURE.shape[:2], 200, np.uint8)])
    assert cv2.imwrite("clear.png", clear)
    assert run_command(["enhance", "clear.png", "-o", "out.jpg"]) == 2
    assert "out.jpg: JPEG can't hold its transparency" in one_line(capsys.readouterr().err)
    assert stub == []
    assert not Path("out.jpg").exists()
    clear[..., 3] = 255
    assert cv2.imwrite("clear.png", clear)
    assert run_command(["enhance", "clear.png", "-o", "out.jpg"]) == 0


@pytest.mark.parametrize(("kind", "name", "output"), [(".png", "a.jpg", "b.jpg"), (".jpg", "a.PNG", "b.png")])
@pytest.mark.parametrize("strength", ["0", "1"])
def test_an_output_that_is_named_is_what_its_name_says(
    kind: str, name: str, output: str, strength: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restorer = Restorer(without_channel_0, config_of(), FixedDetector([]))
    monkeypatch.setattr(Restorer, "load", classmethod(lambda *a, **k: restorer))
    monkeypatch.setattr("gpen_core.verbs.find_detector", lambda name: name)
    content = cv2.imencode(kind, PICTURE)[1].tobytes()
    Path(name).write_bytes(content)
    assert run_command(["enhance", name, "-o", output, "--strength", strength]) == 0
    assert image_io.read(Path(output)).format == image_io.format_of(Path(output))
    # Nobody said what the copy in a folder should be.
    assert run_command(["enhance", name, "-o", "out/", "--strength", strength]) == 0
    assert (Path("out") / name).read_bytes() == content
    named = Path(f"same{kind}")
    assert run_command(["enhance", name, "-o", str(named), "--strength", strength]) == 0
    assert named.read_bytes() == content


def test_a_comparison_never_replaces_a_photo(folder: Path, stub: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    save_png(Path("photo_compare.png"), PICTURE[::-1])
    before = Path("photo_compare.png").read_bytes()
    assert run_command(["enhance", "photo.png", "photo_compare.png", "-o", "out", "--compare"]) == 1
    assert "photo_compare.png" in one_line(capsys.readouterr().err)
    assert not Path("out").exists()
    assert Path("photo_compare.png").read_bytes() == before


def test_enhance_save_faces(folder: Path, stub: list[Any]) -> None:
    for name in ("a/photo.png", "a/b/photo.png"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        save_png(Path(name), PICTURE)
    assert cv2.imwrite("a/photo.jpg", PICTURE)
    assert run_command(["enhance", "a", "--recursive", "-o", "out", "--save-faces", "faces"]) == 0
    found = {path.relative_to("faces").as_posix() for path in Path("faces").rglob("*") if path.is_file()}
    kinds = ("crop", "restored", "both")
    photos = ("photo.png", "photo.jpg", "b/photo.png")
    assert found == {f"{photo}_face1_{kind}.png" for photo in photos for kind in kinds}
    crop, restored, both = (load_png(Path(f"faces/b/photo.png_face1_{kind}.png")) for kind in kinds)
    assert crop.shape == restored.shape == (64, 64, 3)
    assert crop[..., 0].max() > 0
    assert restored[..., 0].max() == 0
    assert np.array_equal(both, np.hstack([crop, restored]))


@pytest.mark.parametrize("skip", [[], ["--skip-existing"]])
def test_faces_that_cannot_be_written_leave_the_output(
    skip: list[str], folder: Path, stub: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    # In the way, whoever runs the tests.
    blocked = Path("faces/photo.png_face1_restored.png")
    blocked.mkdir(parents=True)
    options = ["-o", "out/photo.png", "--save-faces", "faces", "--report", "report.jsonl", *skip]
    for _ in range(2):
        assert run_command(["enhance", "photo.png", *options]) == 3
        captured = capsys.readouterr()
        assert one_line(captured.err).startswith(f"photo.png: not written: {blocked}: ")
        assert "photo.png -> out/photo.png: 1 face" in one_line(captured.out)
        record = json.loads(Path("report.jsonl").read_text())
        assert (record["status"], record["output"]) == ("partly", str(Path("out/photo.png")))
        assert [text.split(": ")[0] for text in record["not_written"]] == [str(blocked)]
        assert load_png(Path("out/photo.png"))[50, 60, 0] == 0
    # The others are there, and what is not is done again.
    assert {path.name for path in Path("faces").iterdir() if path.is_file()} == {
        "photo.png_face1_crop.png",
        "photo.png_face1_both.png",
    }
    blocked.rmdir()
    assert run_command(["enhance", "photo.png", *options]) == 0
    assert blocked.is_file()


def test_save_faces_into_a_file(folder: Path, stub: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["enhance", "photo.png", "--save-faces", "photo.png"]) == 2
    assert "photo.png" in one_line(capsys.readouterr().err)


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp"])
def test_a_photo_without_faces_is_copied(
    suffix: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    restorer = Restorer(without_channel_0, config_of(), FixedDetector([]))
    monkeypatch.setattr(Restorer, "load", classmethod(lambda *a, **k: restorer))
    monkeypatch.setattr("gpen_core.verbs.find_detector", lambda name: name)
    source = Path(f"empty{suffix}")
    assert cv2.imwrite(str(source), PICTURE)
    assert run_command(["enhance", str(source), "-o", "out"]) == 0
    assert "0 faces" in one_line(capsys.readouterr().out)
    assert (Path("out") / source).read_bytes() == source.read_bytes()


def test_a_name_with_a_line_break(folder: Path, stub: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    Path("a\nb\x1b[31m.jpg").write_text("no photo")
    assert run_command(["enhance", "a\nb\x1b[31m.jpg"]) == 2
    assert one_line(capsys.readouterr().err).count("a\\nb\\x1b[31m.jpg") == 1


ODD = "a  b\t\nc\rd\x1b[2K\x85\u2028e"
SHOWN = "a  b\\t\\nc\\rd\\x1b[2K\\x85\\u2028e"


@pytest.mark.parametrize(
    "arguments",
    [
        ["info", f"{ODD}.safetensors"],
        ["convert", f"{ODD}.pth"],
        ["export", f"{ODD}.safetensors", "--format", "onnx"],
        ["compile", ODD, "--cache", "c"],
        ["enhance", f"{ODD}.png"],
        ["enhance", "photo.png", "--aligned", "--weights", f"{ODD}.safetensors"],
        ["enhance", "photo.png", "--aligned", "--report", f"photo.png/{ODD}"],
        ["enhance", "photo.png", "--only", ODD],
        ["weights", "path", f"{ODD}.onnx"],
        [ODD],
    ],
    ids=lambda arguments: "-".join(arguments[:4:2]).encode("unicode_escape").decode(),
)
def test_nothing_of_an_odd_name_is_lost(arguments: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(arguments) in (1, 2)
    line = one_line(capsys.readouterr().err)
    assert SHOWN in line or repr(ODD)[1:-1] in line.replace("\\\\", "\\")
    assert line[:-1].isprintable()


def test_nothing_of_an_odd_name_is_lost_by_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError(f"{ODD}\n\n   second line")

    restorer = Restorer(without_channel_0, config_of(), None)
    monkeypatch.setattr(Restorer, "load", classmethod(lambda *a, **k: restorer))
    monkeypatch.setattr(Restorer, "prepare", broken)
    assert run_command(["enhance", "photo.png", "--aligned"]) == 2
    shown = SHOWN.replace("\\t\\nc", " c")
    assert one_line(capsys.readouterr().err) == f"gpen-core: photo.png: RuntimeError: {shown} second line\n"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["--version"]) == 0
    assert capsys.readouterr().out == f"gpen-core {__version__}\n"


# Tasks beside restoration.


def task_weights(task: str) -> None:
    torch.save(legacy_state(TINY), f"{task}.pth")
    assert run_command(["convert", f"{task}.pth", "--task", task]) == 0


def test_colorize(folder: Path) -> None:
    task_weights("colorization")
    assert cv2.imwrite("grey.png", smooth_picture(40, 40)[..., 0])
    assert (
        run_command(["colorize", "grey.png", "-o", "out.png", "--aligned", "--weights", "colorization.safetensors"])
        == 0
    )
    assert load_png(Path("out.png")).shape == (40, 40, 3)


def test_colorize_passes_its_options_on(folder: Path, stub: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--detect-size", "640", "--detector-device", "cuda", "--template", "ffhq", "--mask", "parse"]
    # The stand-in is for restoration, which is only told of once it is loaded.
    assert run_command(["colorize", "photo.png", "--weights", "c.safetensors", *arguments]) == 1
    assert "use gpen-core enhance" in one_line(capsys.readouterr().err)
    asked = {name: stub[0][name] for name in ("detect_size", "detector_device", "template", "parser")}
    assert asked == {
        "detect_size": 640,
        "detector_device": "cuda",
        "template": "ffhq",
        "parser": "ParseNet-latest",
    }


@pytest.mark.parametrize(("strength", "faces"), [("0", 1), ("1", 0), ("0.5", 0)])
@pytest.mark.parametrize("name", ["colour.png", "grey.png", "colour.jpg", "grey.jpg"])
def test_what_is_not_coloured_is_copied(
    name: str, strength: str, faces: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [face_at(60, 50, 64)] * faces
    config = replace(config_of(), task="colorization")
    restorer = Restorer(without_channel_0, config, FixedDetector(found), task="colorization")
    monkeypatch.setattr(Restorer, "load", classmethod(lambda *a, **k: restorer))
    monkeypatch.setattr("gpen_core.verbs.find_detector", lambda name: name)
    assert cv2.imwrite(name, PICTURE[..., 0] if "grey" in name else PICTURE)
    assert run_command(["colorize", name, "-o", "out/", "--strength", strength]) == 0
    assert (Path("out") / name).read_bytes() == Path(name).read_bytes()


def test_inpaint(folder: Path) -> None:
    task_weights("inpainting")
    picture = np.minimum(smooth_picture(16, 16), 250)
    save_png(Path("face.png"), picture)
    mask = np.zeros((16, 16), np.uint8)
    mask[4:8] = 255
    assert cv2.imwrite("mask.png", mask)
    arguments = ["inpaint", "face.png", "-o", "out.png", "--weights", "inpainting.safetensors"]
    assert run_command([*arguments, "--mask-image", "mask.png"]) == 0
    result = load_png(Path("out.png"))
    assert np.array_equal(result[mask == 0], picture[mask == 0])
    assert not np.array_equal(result, picture)


def test_a_mask_image_in_colours_counts_by_its_brightness(folder: Path) -> None:
    task_weights("inpainting")
    picture = np.minimum(smooth_picture(16, 16), 250)
    save_png(Path("face.png"), picture)
    mask = np.zeros((16, 16, 3), np.uint8)
    mask[2:4], mask[6:8], mask[10:12] = (255, 0, 0), (128, 128, 128), (0, 255, 255)
    save_png(Path("mask.png"), mask)
    arguments = ["inpaint", "face.png", "-o", "out.png", "--weights", "inpainting.safetensors"]
    assert run_command([*arguments, "--mask-image", "mask.png"]) == 0
    changed = (load_png(Path("out.png")) != picture).any((1, 2))
    assert set(np.flatnonzero(changed)) <= {6, 7, 10, 11}
    assert changed[[6, 10]].all()


def test_holes_that_are_filled_fit_into_a_jpeg(folder: Path) -> None:
    task_weights("inpainting")
    clear = np.dstack([np.minimum(smooth_picture(16, 16), 250), np.full((16, 16), 255, np.uint8)])
    clear[4:8, :, 3] = 0
    assert cv2.imwrite("face.png", clear)
    assert run_command(["inpaint", "face.png", "-o", "out.jpg", "--weights", "inpainting.safetensors"]) == 0
    assert load_png(Path("out.jpg")).shape == (16, 16, 3)


def test_seg2face(folder: Path) -> None:
    task_weights("seg2face")
    save_png(Path("labels.png"), smooth_picture(32, 32))
    assert run_command(["seg2face", "labels.png", "-o", "out.png", "--weights", "seg2face.safetensors"]) == 0
    assert load_png(Path("out.png")).shape == (16, 16, 3)


@pytest.mark.parametrize(
    ("command", "right"), [("enhance", "colorize"), ("inpaint", "colorize"), ("seg2face", "colorize")]
)
def test_a_wrong_task_names_the_right_command(
    command: str, right: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task_weights("colorization")
    capsys.readouterr()
    save_png(Path("face.png"), smooth_picture(16, 16))
    aligned = ["--aligned"] if command == "enhance" else []
    assert run_command([command, "face.png", "--weights", "colorization.safetensors", *aligned]) == 1
    assert f"use gpen-core {right}" in one_line(capsys.readouterr().err)


# enhance: mistakes.

BAD_PHOTOS = {
    "absent.jpg": None,
    "empty.jpg": b"",
    "page.jpg": b"<!DOCTYPE html><html>",
    "text.png": b"hello",
    "cut.jpg": cv2.imencode(".jpg", PICTURE)[1].tobytes()[:900],
    "weights.jpg": pickle.dumps({"a": 1}),
}


@pytest.mark.parametrize("name", BAD_PHOTOS)
def test_unreadable_photo(name: str, folder: Path, stub: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    content = BAD_PHOTOS[name]
    if content is not None:
        Path(name).write_bytes(content)
    assert run_command(["enhance", name, "-o", "out"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert name in one_line(captured.err)
    assert not Path("out").exists()
    assert stub == []


def test_one_bad_photo_does_not_end_the_run(folder: Path, stub: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    for name, content in BAD_PHOTOS.items():
        if content is not None:
            Path(name).write_bytes(content)
    save_png(Path("z.png"), PICTURE)
    names = ["photo.png", *BAD_PHOTOS, "z.png"]
    assert run_command(["enhance", *names, "-o", "out"]) == 3
    assert sorted(p.name for p in Path("out").iterdir()) == ["photo.png", "z.png"]
    *reasons, summary = capsys.readouterr().err.splitlines()
    assert len(reasons) == len(BAD_PHOTOS)
    assert f"2 restored, 0 no face, {len(BAD_PHOTOS)} failed, 0 skipped" in summary
    assert run_command(["enhance", *BAD_PHOTOS, "-o", "none"]) == 4


USAGE = {
    "no input": ["enhance"],
    "unknown command": ["restore", "photo.png"],
    "unknown option": ["enhance", "photo.png", "--fast"],
    "strength": ["enhance", "photo.png", "--strength", "2"],
    "strength text": ["enhance", "photo.png", "--strength", "much"],
    "only": ["enhance", "photo.png", "--only", "best"],
    "min face": ["enhance", "photo.png", "--min-face", "-3"],
    "box": ["enhance", "photo.png", "--box", "1,2,3"],
    "box text": ["enhance", "photo.png", "--box", "the left one"],
    "empty box": ["enhance", "photo.png", "--box", "1,2,0,5"],
    "max faces": ["enhance", "photo.png", "--max-faces", "0"],
    "rotate": ["enhance", "photo.png", "--rotate", "45"],
    "upscale": ["enhance", "photo.png", "--upscale", "3"],
    "long side": ["enhance", "photo.png", "--long-side", "-5"],
    "tile": ["enhance", "photo.png", "--tile", "0"],
    "stride": ["enhance", "photo.png", "--stride", "256"],
    "wide stride": ["enhance", "photo.png", "--tile", "64", "--stride", "65"],
    "sharpen": ["enhance", "photo.png", "--sharpen", "nan"],
    "grain": ["enhance", "photo.png", "--grain", "-1"],
    "box of aligned": ["enhance", "photo.png", "--aligned", "--box", "1,2,3,4"],
    "over itself": ["enhance", "photo.png", "-o", "photo.png"],
    "into its folder": ["enhance", "photo.png", "-o", "."],
    "over itself by another way": ["enhance", "photo.png", "-o", "not-yet/../photo.png"],
    "over another source": ["enhance", "photo.png", "sub/../photo.png", "sub/photo.png", "-o", "."],
    "unknown suffix": ["enhance", "photo.png", "-o", "out.txt"],
    "output size": ["convert", "tiny.pth", "--output-size", "0"],
    "collision": ["enhance", "photo.png", "sub/photo.png", "-o", "out"],
    "file for many": ["enhance", "photo.png", "sub/photo.png", "-o", "sub/photo.png"],
    "dtype": ["convert", "photo.png", "--dtype", "int8"],
    "task": ["convert", "photo.png", "--task", "magic"],
    "convert without input": ["convert"],
}


@pytest.mark.parametrize("case", USAGE)
def test_wrong_usage(case: str, folder: Path, stub: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    Path("sub").mkdir()
    save_png(Path("sub/photo.png"), PICTURE)
    torch.save(legacy_state(TINY), "tiny.pth")
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    assert run_command(USAGE[case]) == 1
    line = one_line(capsys.readouterr().err)
    assert "gpen-core: " in line
    assert all(word in line for word in USAGE[case][-2:] if word.startswith("--")), "named as it was typed"
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--strength", "2"], "--strength 2.0 is outside 0..1"),
        (["--mask", "ring"], "--mask 'ring' is none of 'box', 'ellipse' and 'parse'"),
        (["--stride", "9"], "--stride without --tile"),
        (["--tile", "64", "--stride", "65"], "--stride 65 is not from 1 to the tile's side"),
        (["--aligned", "--box", "1,2,3,4"], "nothing is detected with --aligned, so --box can't be used"),
        (["--tile", "64", "--rotate", "auto"], "nothing is detected with --tile, so --rotate can't be used"),
        (["--box", "max_faces"], "--box 'max_faces' is not x,y,width,height in pixels, as in 100,50,300,300"),
    ],
)
def test_mistakes_are_told_as_they_were_typed(
    arguments: list[str], line: str, folder: Path, stub: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["enhance", "photo.png", *arguments]) == 1
    assert capsys.readouterr().err == f"gpen-core: {line}\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "cuda"], "sees no CUDA device"),
        (["--device", "tpu"], "unknown device 'tpu'"),
        (["--precision", "int4"], "unknown precision 'int4'"),
        (["--weights", "gpen-bfr-512"], "GPEN-BFR-512"),
        (["--weights", "absent.safetensors"], "absent.safetensors"),
        (["--weights", "./photo.png"], "photo.png: neither a PyTorch checkpoint nor safetensors"),
    ],
)
def test_what_this_machine_does_not_have(
    options: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    save_png(Path("face.png"), smooth_picture(64, 64))
    assert run_command(["enhance", "face.png", "--aligned", *options]) in (1, 2)
    assert message in one_line(capsys.readouterr().err)
    assert not Path("face_restored.png").exists()


def test_enhance_never_unpickles(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = folder / "mark"
    torch.save({**legacy_state(TINY), "extra": Exploit(mark)}, "evil.safetensors")
    save_png(Path("face.png"), smooth_picture(64, 64))

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a pickle was read")

    for reader in ("pickle.load", "pickle.loads", "pickle.Unpickler", "torch.load"):
        monkeypatch.setattr(reader, refuse)
    assert run_command(["enhance", "face.png", "--aligned", "--weights", "evil.safetensors"]) == 2
    assert "convert it first" in one_line(capsys.readouterr().err)
    assert not mark.exists()


# convert and info.


def test_convert_and_info(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"g_ema": legacy_state(TINY), "d": {"x": torch.zeros(1)}}, "old.pth")
    assert run_command(["convert", "old.pth", "--licence", "CC0-1.0"]) == 0
    report = capsys.readouterr().out
    for part in (
        "16 -> 16 px",
        "kept g_ema",
        "dropped d",
        "filter buffers",
        "read back and compared",
        "old.safetensors",
    ):
        assert part in report
    assert run_command(["info", "old.safetensors"]) == 0
    told = capsys.readouterr().out
    for part in (
        "16 -> 16 px",
        "style_dim 16",
        "2 mapping layers",
        "task restoration",
        "CC0-1.0",
        "old.pth",
        "kept g_ema",
        "dropped d",
        "tensors, float32",
        "sha256",
    ):
        assert part in told


def test_converted_weights_restore(folder: Path) -> None:
    torch.save(legacy_state(TINY), "old.pth")
    save_png(Path("face.png"), smooth_picture(16, 16))
    assert run_command(["convert", "old.pth", "-o", "new.safetensors"]) == 0
    assert run_command(["enhance", "face.png", "--aligned", "--weights", "new.safetensors"]) == 0
    assert load_png(Path("face_restored.png")).shape == (16, 16, 3)


@pytest.mark.parametrize(
    "arguments",
    [["convert", "absent.pth"], ["info", "absent.safetensors"], ["info", "photo.png"], ["convert", "photo.png"]],
)
def test_wrong_files(arguments: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(arguments) == 2
    assert arguments[1] in one_line(capsys.readouterr().err)


def test_contradicting_flag(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(legacy_state(TINY), "old.pth")
    assert run_command(["convert", "old.pth", "--size", "512"]) == 1
    line = one_line(capsys.readouterr().err)
    assert "512" in line
    assert "16" in line
    assert not Path("old.safetensors").exists()


def test_interruption(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Restorer, "load", interrupted)
    monkeypatch.setattr("gpen_core.verbs.find_detector", lambda name: name)
    assert run_command(["enhance", "photo.png"]) == 130
    assert "interrupted" in one_line(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("arguments", "width"),
    [
        ([], 6100),
        (["--preset", "laptop"], 6000),
        (["--preset", "laptop", "--long-side", "500"], 500),
        (["--preset", "8gb"], 6100),
    ],
)
def test_presets_limit_the_size_of_results(arguments: list[str], width: int, folder: Path, stub: list[Any]) -> None:
    assert cv2.imwrite("wide.png", np.zeros((61, 6100, 3), np.uint8))
    assert run_command(["enhance", "wide.png", "-o", "out.png", *arguments]) == 0
    assert load_png(Path("out.png")).shape[1] == width
    assert stub[0]["upscaler_tile"] == {"laptop": 128, "8gb": 256}.get(arguments[1] if arguments else "")


def test_the_process_keeps_the_memory_it_frees(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("gpen_core.cli.keep_freed_memory", lambda: asked.append("once"))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit):
        main(["--version"])
    assert asked == ["once"]
