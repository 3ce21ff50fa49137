"""The bundled weights and a real detector on real photos: restoring must gain something."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench.quality import CARD, DEGRADATIONS, RESULTS, filled, gains, measure, photos
from gpen_core import Restorer
from tests.degrade import degrade

PHOTOS = dict(photos())


@pytest.fixture(scope="module")
def restorer(centerface_path: Path) -> Restorer:
    return Restorer.load(detector=centerface_path, device="cpu")


def test_the_astronaut(restorer: Restorer) -> None:
    row = measure(restorer, "astronaut", PHOTOS["astronaut"], "mild")
    gain_psnr, gain_ssim = gains([row])
    assert row["faces"] == 1
    assert gain_psnr >= 0.4
    assert gain_ssim >= 0.02


def test_six_portraits(restorer: Restorer) -> None:
    rows = [measure(restorer, name, photo, "mild") for name, photo in PHOTOS.items() if name != "astronaut"]
    gain_psnr, gain_ssim = gains(rows)
    assert [row["faces"] for row in rows] == [1] * 6
    assert gain_psnr >= 1
    assert gain_ssim >= 0.03


def test_the_same_input_gives_the_same_bytes(restorer: Restorer) -> None:
    photo = degrade(PHOTOS["astronaut"])
    assert np.array_equal(restorer(photo).image, restorer(photo).image)


def test_the_model_card_shows_what_was_measured() -> None:
    rows = json.loads(RESULTS.read_text())["rows"]
    assert {row["degradation"] for row in rows} == set(DEGRADATIONS)
    card = CARD.read_text()
    assert card == filled(card, rows)
