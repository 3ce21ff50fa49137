"""Masks, parsers, templates and detection settings, from the command line down to the pixels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpen_convert.generator import convert_generator
from gpen_core.cli import run_command
from gpen_core.config import ARCFACE_128_TEMPLATE, FFHQ_TEMPLATE, GPEN_TEMPLATE
from gpen_core.detect import LONG_SIDE
from gpen_core.errors import CheckpointError, UsageError
from gpen_core.parse import Parser, load_parser
from gpen_core.restorer import Options, Restorer
from gpen_core.types import Image
from gpen_core.verbs import DETECT_SIZE
from tests.legacy import TINY, legacy_state
from tests.stubs import FixedDetector, config_of, face_at, smooth_picture
from tests.test_detect import CPU, CUDA, centerface_stub, with_providers
from tests.test_parse import disc, parser_model

PICTURE = np.ascontiguousarray(smooth_picture(200, 180) // 2 + 20)


def red(x: Tensor) -> Tensor:
    """Red all over, which the stand-in parser takes for skin."""
    return torch.stack([torch.ones_like(x[:, 0]), -torch.ones_like(x[:, 0]), -torch.ones_like(x[:, 0])], 1)


def half_red(x: Tensor) -> Tensor:
    """Skin in the upper half, cloth in the lower one."""
    half = x.shape[2] // 2
    picture = -torch.ones_like(x)
    picture[:, 0, :half], picture[:, 2, half:] = 1, 1
    return picture


def blue(x: Tensor) -> Tensor:
    """Cloth all over."""
    return red(x).flip(1)


@pytest.fixture
def parser_path(tmp_path: Path) -> Path:
    path = tmp_path / "parser.onnx"
    path.write_bytes(parser_model())
    return path


def restorer(network: Any, parser: Path | None = None) -> Restorer:
    detector = FixedDetector([face_at(100, 90, 120)])
    return Restorer(network, config_of(), detector, parser=None if parser is None else load_parser(parser))


def touched(result: Image) -> Image:
    """Where a result differs from the picture."""
    return np.asarray((result != PICTURE).any(axis=2))


def test_an_ellipse_leaves_the_corners_of_the_box_alone() -> None:
    box = touched(restorer(red)(PICTURE).image)
    ellipse = touched(restorer(red)(PICTURE, Options(mask="ellipse")).image)
    assert ellipse[90, 100]
    assert box[90 - 50, 100 - 50]
    assert not ellipse[90 - 50, 100 - 50]
    assert not np.any(ellipse & ~box)
    assert 0.5 < ellipse.sum() / box.sum() < 0.8


def test_only_what_the_parser_calls_face_is_pasted(parser_path: Path) -> None:
    result = restorer(half_red, parser_path)(PICTURE, Options(mask="parse"))
    changed = touched(result.image)
    assert [face.status for face in result.faces] == ["restored"]
    assert result.image[70, 100, 0] > 240
    # Soft to about 47 of 512 pixels beyond the edge, on a crop of 120 here.
    assert not changed[90 + 15 :].any()
    assert changed[90 - 40 : 90 - 20, 100].all()


def test_a_parser_that_sees_no_face_is_a_failure_not_a_silence(parser_path: Path) -> None:
    result = restorer(blue, parser_path)(PICTURE, Options(mask="parse"))
    assert np.array_equal(result.image, PICTURE)
    assert [(face.status, face.reason) for face in result.faces] == [("failed", "the parser sees no face in it")]
    assert result.failed == 1


def test_the_parser_runs_once_a_face(parser_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Image] = []
    real = Parser.labels

    def counted(self: Parser, face: Image) -> NDArray[np.intp]:
        seen.append(face)
        return real(self, face)

    monkeypatch.setattr(Parser, "labels", counted)
    detector = FixedDetector([face_at(60, 60, 60), face_at(140, 120, 70)])
    Restorer(red, config_of(), detector, parser=load_parser(parser_path))(PICTURE, Options(mask="parse"))
    assert len(seen) == 2


def test_parsing_without_a_parser_is_refused() -> None:
    with pytest.raises(UsageError, match="needs a face parser"):
        restorer(red)(PICTURE, Options(mask="parse"))


@pytest.mark.parametrize(
    "options", [{"mask": "circle"}, {"mask": "parse", "aligned": True}, {"mask": "ellipse", "tile": 64}]
)
def test_masks_that_make_no_sense(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="mask"):
        Options(**options)


# Loading


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of weights, and a working folder with small weights of ffhq crops, a detector and a photo."""
    work, home = tmp_path / "work", tmp_path / "home"
    for folder in (work, home):
        folder.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("GPEN_CORE_HOME", str(home))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    torch.save(legacy_state(TINY), work / "old.pth")
    convert_generator(work / "old.pth", work / "w.safetensors", template="ffhq")
    (work / "detector.onnx").write_bytes(centerface_stub())
    cv2.imwrite(str(work / "photo.png"), disc(96)[..., ::-1])
    return home


def test_the_template_is_the_files_or_the_users(home: Path) -> None:
    load = Restorer.load
    assert load(Path("w.safetensors"), None).config.template == FFHQ_TEMPLATE
    assert load(Path("w.safetensors"), None, template="arcface128").config.template == ARCFACE_128_TEMPLATE
    assert load(Path("w.safetensors"), None, template="gpen").config.template == GPEN_TEMPLATE
    with pytest.raises(UsageError, match="--template dlib"):
        load(Path("w.safetensors"), None, template="dlib")


def test_the_original_detector_is_taken_where_it_is(home: Path) -> None:
    (home / "centerface.onnx").write_bytes(centerface_stub())
    assert Restorer.load(Path("w.safetensors")).detector is not None
    # Found and opened, though it is nothing of the kind.
    (home / "RetinaFace-R50.onnx").write_bytes(parser_model())
    with pytest.raises(Exception, match=r"RetinaFace-R50\.onnx: not a face detector"):
        Restorer.load(Path("w.safetensors"))


def test_detection_settings_reach_the_detector(home: Path) -> None:
    found = Restorer.load(Path("w.safetensors"), Path("detector.onnx"), detect_size=320)
    assert found.detector is not None
    assert found.detector.long_side == 320  # type: ignore[attr-defined]


@pytest.mark.parametrize("verb", ["enhance", "colorize"])
def test_detection_on_cuda(
    verb: str, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--weights", f"{verb}.safetensors", "--detector", "detector.onnx", "--detector-device", "cuda"]
    arguments = [verb, "photo.png", "-o", "out.png", *options]
    convert_generator(Path("old.pth"), Path("enhance.safetensors"))
    convert_generator(Path("old.pth"), Path("colorize.safetensors"), task="colorization")
    with monkeypatch.context() as patched:
        asked = with_providers(CPU, starting=(CPU,), monkeypatch=patched)
        assert run_command(arguments) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert "detector on cuda needs onnxruntime's CUDA provider: pip install onnxruntime-gpu" in error
        assert asked == []
        assert not Path("out.png").exists()
    asked = with_providers(CUDA, CPU, starting=(CUDA, CPU), monkeypatch=monkeypatch)
    assert run_command(arguments) == 0, capsys.readouterr().err
    assert asked == [[CUDA, CPU]]
    assert Path("out.png").is_file()


def test_a_parser_is_loaded_only_if_asked_for(home: Path, parser_path: Path) -> None:
    assert Restorer.load(Path("w.safetensors"), None).parser is None
    assert Restorer.load(Path("w.safetensors"), None, parser=parser_path).parser is not None
    with pytest.raises(CheckpointError, match="not a face parser"):
        Restorer.load(Path("w.safetensors"), None, parser=Path("detector.onnx"))


def command(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    code = run_command(
        ["enhance", "photo.png", "--weights", "./w.safetensors", "--detector", "./detector.onnx", *options]
    )
    return code, capsys.readouterr().err


def test_a_run_needs_no_parser(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for mask in ("box", "ellipse"):
        code, errors = command(capsys, "--mask", mask, "--detect-size", "64", "--template", "gpen", "-o", f"{mask}.png")
        assert code == 0, errors
        assert Path(f"{mask}.png").is_file()


def test_parse_without_a_parser_says_where_to_get_it(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, errors = command(capsys, "--mask", "parse")
    assert code == 2
    assert errors.count("\n") == 1
    for part in ("ParseNet-latest.pth", "gpen-core convert", str(home)):
        assert part in errors
    assert not Path("photo_restored.png").exists()


def test_parse_with_a_parser(home: Path, parser_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, errors = command(capsys, "--mask", "parse", "--parser", str(parser_path))
    # Whether the small network's picture holds a face for the stand-in is of no interest here.
    assert code in (0, 3), errors
    (home / "ParseNet-latest.onnx").write_bytes(parser_path.read_bytes())
    assert command(capsys, "--mask", "parse", "-o", "again.png")[0] == code


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--parser", "some.onnx"), 1, "--mask parse"),
        (("--mask", "circle"), 1, "circle"),
        (("--template", "dlib"), 1, "arcface128"),
        (("--detect-size", "8"), 1, "detect-size"),
        (("--detector-device", "tpu"), 1, "cpu or cuda"),
    ],
)
def test_wrong_settings_are_one_line(
    home: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], code: int, words: str
) -> None:
    found, errors = command(capsys, *options)
    assert (found, errors.count("\n")) == (code, 1)
    assert words in errors


def test_the_detection_size_is_the_detectors_own() -> None:
    assert DETECT_SIZE == LONG_SIDE


# Colourisation pastes faces too.


@pytest.fixture
def colours(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Weights that paint faces red, in a working folder with a grey photo of one face."""
    config = replace(config_of(), task="colorization")
    load = Restorer.load.__func__  # type: ignore[attr-defined]

    def loaded(cls: type[Restorer], /, weights: object, detector: object, **options: Any) -> Restorer:
        real = load(cls, "gpen-open-512", None, parser=options["parser"], template=options["template"])
        detector = FixedDetector([face_at(100, 90, 120)])
        template = real.config.template if options["template"] else config.template
        return Restorer(half_red, replace(config, template=template), detector, parser=real.parser, task="colorization")

    monkeypatch.setattr(Restorer, "load", classmethod(loaded))
    monkeypatch.setattr("gpen_core.verbs.find_detector", lambda name: name)
    assert cv2.imwrite("grey.png", PICTURE.mean(2).astype(np.uint8))
    return home


def coloured(capsys: pytest.CaptureFixture[str], *options: str) -> NDArray[np.bool_]:
    """Where a photo has colour after the command."""
    assert run_command(["colorize", "grey.png", "-o", "out.png", *options]) == 0, capsys.readouterr().err
    result = cv2.imread("out.png")
    return np.asarray(np.ptp(result, axis=2) > 8)


def test_colours_go_where_the_mask_says(colours: Path, parser_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    box, ellipse = coloured(capsys), coloured(capsys, "--mask", "ellipse")
    assert box[90 - 50, 100 - 50]
    assert not ellipse[90 - 50, 100 - 50]
    assert 0.5 < ellipse.sum() / box.sum() < 0.9
    parse = coloured(capsys, "--mask", "parse", "--parser", str(parser_path))
    assert parse[90 - 40 : 90 - 20, 100].all()
    assert not parse[90 + 15 :].any()
    # The same face is larger in ffhq's crops, so they reach less far.
    ffhq = coloured(capsys, "--template", "ffhq")
    assert ffhq.sum() < 0.9 * box.sum()


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--parser", "some.onnx"), 1, "--mask parse"),
        (("--mask", "circle"), 1, "circle"),
        (("--mask", "ellipse", "--aligned"), 1, "aligned"),
        (("--detect-size", "8"), 1, "detect-size"),
        (("--mask", "parse"), 2, "gpen-core convert"),
    ],
)
def test_wrong_settings_of_colorize_are_one_line(
    home: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], code: int, words: str
) -> None:
    convert_generator(Path("old.pth"), Path("c.safetensors"), task="colorization")
    arguments = ["colorize", "photo.png", "--weights", "c.safetensors", "--detector", "detector.onnx", *options]
    assert run_command(arguments) == code
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert words in error
