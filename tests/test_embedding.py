"""The guide's examples run as they are written, and its numbers are the stored ones."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from bench.startup import PAGE, ROOT, examples, rendered
from gpen_convert.export import export_generator
from gpen_core.config import GeneratorConfig
from tests.exported import converted, run_process

SMALL = GeneratorConfig(input_size=16, output_size=16, channels=(8, 8, 4), style_dim=16, n_mlp=2)


@pytest.mark.parametrize("name", ["worker.py", "threads.py", "function.py"])
def test_examples_run(name: str, tmp_path: Path, centerface_path: Path) -> None:
    export_generator(converted(tmp_path, SMALL), tmp_path / "model.onnx", format="onnx")
    shutil.copyfile(ROOT / "examples" / "astronaut_degraded.jpg", tmp_path / "photo.jpg")
    shutil.copyfile(centerface_path, tmp_path / "centerface.onnx")
    # Compiling takes most of a minute; what runs a package is tested elsewhere.
    code = examples(PAGE.read_text())[name].replace("model.pt2", "model.onnx")
    done = run_process(f"import os; os.chdir({str(tmp_path)!r})\n{code}", [])
    assert (done.returncode, done.stderr) == (0, "")


def test_every_example_is_tested() -> None:
    assert set(examples(PAGE.read_text())) == {"worker.py", "threads.py", "function.py"}


def test_numbers_are_the_stored_ones() -> None:
    page = PAGE.read_text()
    assert rendered(page) == page
