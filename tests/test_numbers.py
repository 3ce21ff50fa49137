"""Numbers in the running text of the pages are those of the code, the weights or the results."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import gpen_weights
from bench import detectors, report
from bench.model import published_config
from gpen_core import detect, gallery, package_cache, restorer
from gpen_core.align import scale_of, similarity
from gpen_core.checkpoint import read_metadata
from gpen_core.config import GPEN_TEMPLATE, template_named
from gpen_core.errors import ExitCode
from gpen_core.model import Generator
from gpen_core.presets import GIB, PRESETS
from gpen_core.winograd import SMALLEST

ROOT = Path(__file__).resolve().parents[1]
README, BENCH, DETECTORS, PROJECT = (
    (ROOT / name).read_text(encoding="utf-8")
    for name in ("README.md", "bench/README.md", "docs/detectors.md", "pyproject.toml")
)
CARD = (ROOT / "weights" / "gpen_weights" / "MODEL_CARD.md").read_text(encoding="utf-8")
# Of GPEN-BFR-512, as tests/test_bench.py counts the bytes of its tensors.
PUBLISHED_PARAMETERS = 71e6


def said(page: str, pattern: str) -> tuple[str, ...]:
    """The groups of a sentence that the page must have, wherever its lines break."""
    found = re.search(pattern, " ".join(page.split()))
    assert found, f"not there any more: {pattern}"
    return found.groups()


def rows(page: str, header: str) -> list[list[str]]:
    """The cells of the table with that header."""
    lines = page[page.index(header) :].splitlines()[2:]
    table = lines[: next(i for i, line in enumerate(lines) if not line.startswith("|"))]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_python_versions() -> None:
    first, last = said(README, r"with Python 3\.(\d+) to 3\.(\d+)")
    assert f'requires-python = ">=3.{first},<3.{int(last) + 1}"' in PROJECT


def test_size_of_the_detector(centerface_path: Path) -> None:
    assert said(README, r"\(CenterFace, (\S+) MB") == (f"{centerface_path.stat().st_size / 1e6:.1f}",)


def test_bounds_of_options() -> None:
    assert said(README, r"at most (\d+) pixels wide") == (str(gallery.LARGEST),)
    assert said(README, r"`--sharpen` sharpens the faces \(0 to (\d)\)") == (str(restorer.MAX_SHARPEN),)
    assert said(README, r"photo around them \(0 to (\d);") == (str(restorer.MAX_GRAIN),)
    assert said(README, r"`--upscale (\S+)` enlarges the whole photo") == ("|".join(map(str, restorer.SCALES)),)


def test_exit_codes() -> None:
    assert [row[0] for row in rows(README, "| exit code |")] == [str(int(code)) for code in ExitCode]


def test_presets() -> None:
    table = rows(README, "| `--preset` |")
    assert [row[0].strip("`") for row in table] == list(PRESETS)
    for (_, memory, faces, long_side, tile, together, remark), (name, preset) in zip(
        table, PRESETS.items(), strict=True
    ):
        assert together == f"{preset.networks / GIB:g} GiB"
        assert faces == str(preset.max_batch)
        assert long_side == (f"{preset.long_side} px" if preset.long_side else "")
        assert tile == str(preset.tile)
        assert remark.startswith("compiled") == preset.compile
        if preset.needs is not None:
            assert f"{preset.needs // GIB} GB" in memory, name
    least = min(preset.needs for preset in PRESETS.values() if preset.needs is not None)
    assert f"less than {least // GIB} GB" in table[0][1]


def test_crops_of_other_tools() -> None:
    scales = [
        scale_of(similarity(np.array(GPEN_TEMPLATE), np.array(template_named(name)))) for name in ("ffhq", "arcface128")
    ]
    wanted = said(README, r"crops \(faces (\S+) and (\S+) times as large as GPEN's\)")
    assert wanted == tuple(f"{scale:.2f}" for scale in scales)


def test_the_bundled_weights() -> None:
    path = gpen_weights.resolve("gpen-open-512", suffixes=(".safetensors",))
    parameters = sum(tensor.numel() for tensor in load_file(path).values())
    assert said(README, r"small generator \((\S+) million parameters") == (f"{parameters / 1e6:.1f}",)
    assert said(CARD, r"(\S+) million parameters") == (f"{parameters / 1e6:.2f}",)
    assert said(CARD, r"it has a (\w+) of the parameters of GPEN-BFR-512") == ("sixteenth",)
    assert round(PUBLISHED_PARAMETERS / parameters) == 16
    # The conversion that is shown is the one that they come from.
    assert said(README, r"sha256 ([0-9a-f]{64})") == (read_metadata(path).provenance.source_sha256,)


def test_what_the_rows_of_the_waterfall_are() -> None:
    said(README, r"The third row is what runs without `--compile`, the last three what runs with it\.")
    networks = [row["case"]["network"] for row in report.steps()]
    assert networks[2] == "shared"
    assert networks[-3:] == ["kernels"] * 3


def test_what_is_said_of_a_cpu() -> None:
    rows = {
        (row["case"]["network"], row["case"]["precision"]): row["batches"]["1"]
        for row in report.load("cpu")
        if row["case"]["keeps_memory"]
    }
    compiled, eager, ours, theirs = (rows[name, "fp32"] for name in ("ahead", "shared", "openvino-shared", "openvino"))
    said(README, r"`--compile` pays on a CPU once its first photo has waited for the compiler\.")
    later = report.load("cpu")[0]["warm"]["first_s"]
    assert compiled["median_ms"] < eager["median_ms"] < 1000 * later < 1000 * compiled["first_s"]
    assert said(README, r"cache folder \((\d) GB at most") == (str(package_cache.MOST_BYTES // 10**9),)
    said(README, r"OpenVINO is no faster on our graph than on the original's")
    assert ours["median_ms"] > 0.98 * theirs["median_ms"]


def test_operations_of_an_image() -> None:
    with FakeTensorMode():
        generator = Generator(published_config(512)).requires_grad_(False)
        image = torch.zeros(1, 3, 512, 512)
        with FlopCounterMode(display=False) as counter:
            generator(image)
    assert said(BENCH, r"An image at 512 px takes (\d+) GFLOP") == (f"{counter.get_total_flops() / 1e9:.0f}",)


def test_the_share_of_the_minimal_filters() -> None:
    said(BENCH, r"the convolutions that keep the size, six tenths of\s+all")
    config = published_config(512)
    kept = sum(2 * 9 * config.layer_width(r) * config.width(r) * r * r for r in config.decoder_levels if r >= SMALLEST)
    (total,) = said(BENCH, r"An image at 512 px takes (\d+) GFLOP")
    assert round(kept / 1e9 / float(total), 1) == 0.6


def test_detection() -> None:
    assert said(DETECTORS, r"longer side has (\d+) px") == (str(detect.LONG_SIDE),)
    thresholds = {family.name: family.threshold for family in detect._FAMILIES}
    found = said(
        DETECTORS, r"RetinaFace and YuNet report faces above a confidence of (\S+), .* CenterFace above (\S+)\."
    )
    assert found == (str(thresholds["retinaface"]), str(thresholds["centerface"]))
    assert thresholds["retinaface"] == thresholds["yunet"]
    columns, lines = detectors.GRIDS[3]
    width, height = said(DETECTORS, r"for a picture of (\d+) x (\d+) px")
    assert (int(width), int(height)) == (detectors.WIDTH, detectors.WIDTH // columns * lines)
    assert said(DETECTORS, r"the least of (\w+) runs") == ("three",)
    assert detectors.REPEATS == 3


@pytest.mark.parametrize("page", sorted([ROOT / "README.md", ROOT / "bench" / "README.md", *ROOT.glob("docs/*.md")]))
def test_times_stand_in_tables_alone(page: Path) -> None:
    """Measured times, rates and shares come from results; in the running text nothing would keep them right."""
    text = re.sub(r"```.*?```|<!-- (\S+) -->.*?<!-- /\1 -->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert re.findall(r"\d+(?:\.\d+)? ?(?:ms|s|seconds|minutes|dB|FPS|photos/s|%)(?![\w/])", text) == []
