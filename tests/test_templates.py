"""Crops of other tools: how much larger a face stands in them, and that a file keeps its template."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from gpen_convert.generator import convert_generator
from gpen_core.align import scale_of, similarity
from gpen_core.checkpoint import describe_file, read_metadata
from gpen_core.config import GPEN_TEMPLATE, TEMPLATES, template_name, template_named
from gpen_core.errors import UsageError
from tests.legacy import TINY, legacy_state


@pytest.mark.parametrize(("name", "ratio"), [("gpen", 1.0), ("ffhq", 1.12), ("arcface128", 1.31)])
def test_faces_are_larger_in_other_crops(name: str, ratio: float) -> None:
    matrix = similarity(np.array(GPEN_TEMPLATE), np.array(template_named(name)))
    assert scale_of(matrix) == pytest.approx(ratio, abs=0.006)
    # Upright, and the same points: what is left after scaling is small.
    left = np.array(GPEN_TEMPLATE) @ matrix[:, :2].T + matrix[:, 2] - np.array(template_named(name))
    assert np.abs(left).max() < 0.015
    assert abs(matrix[1, 0]) < 0.01


def test_templates_are_told_apart_by_name() -> None:
    assert [template_name(points) for points in TEMPLATES.values()] == list(TEMPLATES) == ["gpen", "ffhq", "arcface128"]
    assert template_name(GPEN_TEMPLATE[:4]) == "its own"
    with pytest.raises(UsageError, match="--template dlib: use gpen, ffhq, arcface128"):
        template_named("dlib")


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversion_keeps_the_template(tmp_path: Path, name: str) -> None:
    source = tmp_path / "old.pth"
    torch.save(legacy_state(TINY), source)
    output = convert_generator(source, template=name).output
    assert read_metadata(output).config.template == TEMPLATES[name]
    assert any(f"{name} crops" in line for line in describe_file(output)) == (name != "gpen")


def test_an_unknown_template_writes_nothing(tmp_path: Path) -> None:
    source = tmp_path / "old.pth"
    torch.save(legacy_state(TINY), source)
    with pytest.raises(UsageError, match="--template"):
        convert_generator(source, template="dlib")
    assert list(tmp_path.iterdir()) == [source]
