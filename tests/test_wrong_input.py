"""Whatever is handed over in the place of a picture or a crop: one kind of error, in one line, from every engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpen_core.backend import CropRuntime, submit
from gpen_core.detect import load_detector
from gpen_core.errors import ImageError
from gpen_core.footprint import Footprint
from gpen_core.parse import Parser
from gpen_core.restorer import Options, Restorer
from gpen_core.rrdb import RRDBNet, UpscalerConfig
from gpen_core.runtime import Runtime, RuntimeOptions, Upscaler
from gpen_core.runtime_onnx import OnnxRuntime
from gpen_core.selection import Candidate, Selection
from tests.stubs import FixedDetector, config_of, face_at, identity, smooth_picture
from tests.test_runtime_onnx import foreign

NO_CROPS: dict[str, Any] = {
    "larger": [np.zeros((32, 32, 3), np.uint8)],
    "one of two": [np.zeros((16, 16, 3), np.uint8), np.zeros((16, 8, 3), np.uint8)],
    "channels first": [np.zeros((3, 16, 16), np.uint8)],
    "transparent": [np.zeros((16, 16, 4), np.uint8)],
    "grey": [np.zeros((16, 16), np.uint8)],
    "float": [np.zeros((16, 16, 3), np.float32)],
    "16 bits": [np.zeros((16, 16, 3), np.uint16)],
    "tensor": [torch.zeros(16, 16, 3, dtype=torch.uint8)],
    "a crop alone": np.zeros((16, 16, 3), np.uint8),
    "no array": [[0]],
    "none in a list": [None],
    "none": None,
    "text": "face.png",
}
NO_PICTURES: dict[str, Any] = {
    "none": None,
    "text": "photo.jpg",
    "path": Path("photo.jpg"),
    "list": [1, 2],
    "grey": np.zeros((16, 16), np.uint8),
    "transparent": np.zeros((16, 16, 4), np.uint8),
    "empty": np.zeros((0, 16, 3), np.uint8),
    "float": np.zeros((16, 16, 3), np.float32),
    "tensor": torch.zeros(16, 16, 3, dtype=torch.uint8),
}


def on_torch() -> Runtime:
    return Runtime(identity, config_of(16), RuntimeOptions("cpu"))


@pytest.fixture(scope="module")
def runtimes(tmp_path_factory: pytest.TempPathFactory) -> list[CropRuntime]:
    """Of every engine but pt2, which has a test beside its packages; all take crops of 16 px alone."""
    path = foreign(tmp_path_factory.mktemp("foreign") / "net.onnx")
    selection = Selection([Candidate("a", config_of(16), Footprint(0, 0, 1), on_torch)])
    return [on_torch(), OnnxRuntime(path, device="cpu"), selection]


@pytest.mark.parametrize("crops", NO_CROPS.values(), ids=NO_CROPS)
def test_what_is_no_crop(crops: Any, runtimes: list[CropRuntime]) -> None:
    for runtime in runtimes:
        for start in (runtime, lambda given, runtime=runtime: submit(runtime, given)):
            with pytest.raises(ImageError, match=r"^expected ") as caught:
                start(crops)
            assert "\n" not in str(caught.value)


def test_what_is_a_crop(runtimes: list[CropRuntime]) -> None:
    crop = smooth_picture(16, 16)
    for runtime in runtimes:
        assert runtime([]) == []
        several: list[Any] = [[crop, crop], (crop, crop), np.stack([crop, crop])]
        for crops in several:
            for result in runtime(crops):
                np.testing.assert_array_equal(np.asarray(result), crop)


@pytest.mark.parametrize("picture", NO_PICTURES.values(), ids=NO_PICTURES)
def test_what_is_no_picture(picture: Any, centerface_path: Path) -> None:
    restorer = Restorer(identity, config_of(16), FixedDetector([face_at(8, 8, 16)]), RuntimeOptions("cpu"))
    upscaler = Upscaler(RRDBNet(UpscalerConfig(2, 4, 1, 2, margin=4)), RuntimeOptions("cpu"))
    takers = (
        restorer,
        restorer.prepare,
        lambda image: restorer(image, Options(tile=16)),
        lambda image: restorer(image, Options(aligned=True)),
        load_detector(centerface_path),
        Parser(None, Path("parser.onnx")),
        lambda image: upscaler(image, 2),
    )
    for take in takers:
        with pytest.raises(ImageError, match=r"^expected H x W x 3 uint8") as caught:
            take(picture)
        assert "\n" not in str(caught.value)


def test_another_number_of_pictures() -> None:
    restorer = Restorer(identity, config_of(16), FixedDetector([face_at(8, 8, 16)]), RuntimeOptions("cpu"))
    prepared = restorer.prepare(smooth_picture(16, 16))
    with pytest.raises(ImageError, match="expected 1 restored pictures, got 2"):
        restorer.finish(prepared, [None, None])
