"""The health checks of the images: they pass where photos can be restored, and fail where they can't."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from gpen_convert.export import export_generator
from gpen_core.ahead import SIDECAR, describe_machine
from gpen_core.runtime import compiles_ahead
from tests.exported import PLAIN, SMALL, converted, run_process

DOCKER = Path(__file__).parents[1] / "docker"
CPU = torch.device("cpu")
# As on a machine that lacks what the code was compiled for.
LESSER = (
    "from gpen_core import ahead; from dataclasses import replace; here = ahead.describe_machine\n"
    "ahead.describe_machine = lambda device: replace(here(device), features=())\n"
)
NO_EXECUTION = (
    "import os; from types import SimpleNamespace; os.statvfs = lambda _: SimpleNamespace(f_flag=os.ST_NOEXEC)\n"
)
WITHOUT_TORCH = "import sys; sys.modules |= dict.fromkeys(('torch', 'safetensors', 'einops', 'onnx'))\n"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory, centerface_path: Path) -> Path:
    """What an image has in /weights."""
    folder = tmp_path_factory.mktemp("weights")
    export_generator(converted(tmp_path_factory.mktemp("source"), SMALL), folder / "model.onnx", format="onnx")
    shutil.copyfile(centerface_path, folder / "centerface.onnx")
    return folder


def health_command(image: str) -> list[str]:
    """What the image's health check runs."""
    (found,) = re.findall(r"^HEALTHCHECK .*CMD (.*)$", (DOCKER / f"{image}.Dockerfile").read_text(), re.MULTILINE)
    return list(json.loads(found))


def check(image: str, weights: Path, code: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """The health check of an image, in a process of its own with the weights of this folder."""
    program, *arguments = health_command(image)
    assert program == "gpen-core"
    environment = {"PATH": os.environ["PATH"], "GPEN_CORE_HOME": str(weights), "HOME": str(weights), **variables}
    return run_process(code + PLAIN, [part.replace("/weights/", f"{weights}/") for part in arguments], environment)


def test_onnx(weights: Path, tmp_path: Path) -> None:
    assert check("onnx-cpu", weights, WITHOUT_TORCH).returncode == 0
    spoiled = Path(shutil.copytree(weights, tmp_path / "spoiled"))
    content = (spoiled / "model.onnx").read_bytes()
    (spoiled / "model.onnx").write_bytes(content[: len(content) // 2])
    done = check("onnx-cpu", spoiled, WITHOUT_TORCH)
    assert (done.returncode, "!!  weights" in done.stdout) == (4, True)


@pytest.mark.skipif(not compiles_ahead(CPU), reason="needs Linux and PyTorch 2.6 or newer")
def test_pt2(weights: Path, small_package: Path, tmp_path: Path) -> None:
    for suffix in ("", SIDECAR):
        shutil.copyfile(f"{small_package}{suffix}", weights / f"model.pt2{suffix}")
    done = check("torch-cpu", weights)
    assert done.returncode == 0, done.stdout
    assert "one face restored in" in done.stdout
    assert "cpu fp32 ahead of time" in done.stdout
    assert describe_machine(CPU).features, "else no machine is lesser"
    spoiled = Path(shutil.copytree(weights, tmp_path / "spoiled"))
    (spoiled / f"model.pt2{SIDECAR}").unlink()
    for where, code, said in (
        (weights, LESSER, "which this one lacks; export it again here"),
        (weights, NO_EXECUTION, "allows no execution"),
        (spoiled, "", "its sidecar model.pt2.json is missing"),
    ):
        done = check("torch-cpu", where, code, TMPDIR=str(tmp_path))
        assert done.returncode == 4
        assert said in done.stdout


def test_a_face_that_comes_out_broken_fails(weights: Path) -> None:
    broken = "import gpen_core.runtime_onnx as o; o.OnnxRuntime.__call__ = lambda self, crops: [None] * len(crops)\n"
    assert check("onnx-cpu", weights, WITHOUT_TORCH + broken).returncode == 4


def test_every_image_has_a_check() -> None:
    for path in DOCKER.glob("*.Dockerfile"):
        assert health_command(path.name.removesuffix(".Dockerfile"))
