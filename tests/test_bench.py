"""The benchmark's own formulas, and that pages say what was measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import fidelity, plots, profile, report, stream
from bench.cases import SUITES, Case
from bench.measure import export as make
from bench.measure import measure, summary
from bench.model import legacy_tensors, published_config, random_generator
from bench.original import Original
from bench.run import suite
from gpen_core.ahead import Network
from gpen_core.config import GeneratorConfig, WeightsMetadata
from gpen_core.model import Generator
from gpen_core.runtime import compiles_ahead

CONFIG = GeneratorConfig(32, 32, (16, 16, 12, 8), style_dim=16, n_mlp=2)
CPU = torch.device("cpu")


def test_the_original_formulation_and_ours_are_the_same_function() -> None:
    original = Original(CONFIG, legacy_tensors(CONFIG), CPU, torch.float32)
    image = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(1)) * 2 - 1
    with torch.inference_mode():
        torch.testing.assert_close(random_generator(CONFIG)(image), original(image), rtol=1e-4, atol=1e-4)


def test_the_512_configuration_is_the_published_one() -> None:
    config = published_config(512)
    assert config.channels == (512, 512, 512, 512, 512, 256, 128, 64)
    assert (config.narrow, config.channel_multiplier) == (1, 2)
    filters = 2 * (len(config.encoder_levels) - 1) + len(config.decoder_levels) - 1
    parameters = sum(tensor.numel() for tensor in legacy_tensors(config).values())
    assert 4 * (parameters + 16 * filters) == 284_022_236


def test_random_activations_stay_near_one() -> None:
    with torch.inference_mode():
        output = random_generator(CONFIG)(torch.zeros(1, 3, 32, 32))
    assert 0.1 < output.std() < 10


def test_equal_pictures_have_no_difference() -> None:
    picture = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    found = fidelity.compare(picture, picture)
    # How a processor rounds the conversion to Lab can differ between two equal pictures, which lie apart in memory.
    assert found.pop("ciede2000") == pytest.approx(0, abs=1e-9)
    assert found == {"finite": 1.0, "max_abs": 0.0, "psnr_db": float("inf"), "ssim": 1.0}


def test_a_known_difference_is_measured() -> None:
    picture = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    picture[0, :, 0, 0], picture[0, :, 0, 1] = 0, 1
    found = fidelity.compare(picture + 0.01, picture)
    assert found["max_abs"] == pytest.approx(0.01, rel=1e-3)
    assert found["psnr_db"] == pytest.approx(40, abs=0.01)
    assert 0.2 < found["ciede2000"] < 2
    assert fidelity.compare(picture * float("nan"), picture) == {"finite": 0.0}


def test_the_inputs_are_the_four_of_the_field() -> None:
    found = fidelity.inputs(64)
    assert list(found) == ["black", "white", "checkerboard", "photo"]
    for picture in found.values():
        assert picture.shape == (1, 3, 64, 64)
        assert picture.min() >= -1 and picture.max() <= 1


def test_a_summary_is_median_and_p90() -> None:
    found = summary([float(i) for i in range(11)], batch=5)
    assert found == {"median_ms": 5.0, "p90_ms": 9.0, "ms_per_image": 1.0, "calls": 11}


def test_cases_survive_json() -> None:
    for case in (case for cases in SUITES.values() for case in cases):
        assert Case.from_dict(json.loads(json.dumps(case.to_dict()))) == case


@pytest.mark.parametrize("network", ["original", "shared"])
def test_a_case_gives_a_row(network: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(SUITES["cpu"][0], network=network, size=32)
    monkeypatch.setattr("bench.measure.config_of", lambda case: CONFIG)
    row = measure(case)
    assert row["batches"]["1"]["median_ms"] > 0
    assert row["fidelity"]["photo"]["psnr_db"] > 80


REFERENCE = """
import torch

class Original(torch.nn.Module):
    def forward(self, image):
        return image.flip(3), None

def build(size):
    assert size == 32
    return Original()
"""


def test_the_real_original_is_measured_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert suite("cpu") == SUITES["cpu"]
    (tmp_path / "original.py").write_text(REFERENCE)
    monkeypatch.setenv("GPEN_REFERENCE", str(tmp_path / "original.py"))
    added = [case for case in suite("gpu") if case not in SUITES["gpu"]]
    assert [(case.network, case.precision) for case in added] == [
        ("reference", "tf32"),
        ("reference", "fp16"),
        ("reference-compiled", "fp16"),
    ]
    eager = suite("cpu")[-2]
    assert eager.network == "reference"
    assert measure(replace(eager, size=32))["batches"]["1"]["median_ms"] > 0


@pytest.mark.skipif(not compiles_ahead(CPU), reason="needs Linux and PyTorch 2.6 or newer")
def test_the_compiled_case_is_what_the_option_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def compiled(generator: Generator, precision: str) -> Network:
        asked.append(precision)
        return generator

    monkeypatch.setattr("bench.measure.config_of", lambda case: CONFIG)
    monkeypatch.setattr("bench.measure.compiled_ahead", compiled)
    row = measure(replace(SUITES["cpu"][0], network="ahead", size=32))
    assert asked == ["fp32"]
    assert row["fidelity"]["photo"]["psnr_db"] > 80


def test_the_exported_case_is_what_export_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made by another process, and run where there is neither Triton nor a compiler."""
    written: list[tuple[Generator, Path, str, torch.device]] = []
    fails = False

    def elsewhere(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert command[1:3] == ["-m", "bench.measure"]
        if fails:
            return subprocess.CompletedProcess(command, 1, "", "Traceback\nDeviceError: no compiler\n")
        make(Case.from_dict(json.loads(command[3])), Path(command[4]))
        return subprocess.CompletedProcess(command, 0, "", "")

    def export(
        generator: Generator, metadata: WeightsMetadata, target: Path, dtype: str, device: torch.device, digest: str
    ) -> None:
        written.append((generator, target, dtype, device))

    def load(path: Path, device: torch.device) -> tuple[None, Network]:
        ((generator, target, *_),) = written
        assert path == target
        assert os.environ["PATH"] == "" and sys.modules["triton"] is None
        return None, generator

    monkeypatch.setattr("bench.measure.config_of", lambda case: CONFIG)
    monkeypatch.setattr("bench.measure.export_package", export)
    monkeypatch.setattr("bench.measure.load_package", load)
    monkeypatch.setattr("bench.measure.subprocess", SimpleNamespace(run=elsewhere, PIPE=subprocess.PIPE))
    monkeypatch.setenv("PATH", os.environ["PATH"])
    monkeypatch.setitem(sys.modules, "triton", None)
    (case,) = [case for case in SUITES["cpu"] if case.network == "package"]
    row = measure(replace(case, size=32, fidelity=True))
    assert written[0][2:] == ("fp32", CPU)
    assert row["fidelity"]["photo"]["psnr_db"] > 80
    fails = True
    with pytest.raises(SystemExit, match="DeviceError: no compiler"):
        measure(replace(case, size=32))


def test_packages_stand_beside_what_compile_runs(tmp_path: Path) -> None:
    def row(network: str, size: int, times: dict[str, float]) -> dict[str, Any]:
        batches = {batch: {"median_ms": ms, "first_s": 0.5} for batch, ms in times.items()}
        case = {"network": network, "precision": "fp16", "size": size}
        return {"case": case, "batches": batches, "fidelity": {"black": {"psnr_db": 70}, "photo": {"psnr_db": 66}}}

    rows = [row("kernels", 256, {"1": 0.5, "4": 1.0}), row("package", 256, {"1": 0.51, "8": 3})]
    (tmp_path / "packages.json").write_text(json.dumps({"rows": [*rows, row("kernels", 512, {"1": 2.0})]}))
    assert report.packages(tmp_path).splitlines()[2:] == ["| 256 | 1 | 0.500 | 0.510 | +2.0 % | 0.5 | 66.0 |"]


def test_pages_show_the_results() -> None:
    for page in report.PAGES:
        if page.exists():
            text = page.read_text(encoding="utf-8")
            assert report.render(text) == text, f"run: python -m bench.report ({page.name})"


@pytest.mark.parametrize("picture", plots.PICTURES, ids=lambda picture: picture.name)
def test_pictures_show_the_results(picture: plots.Picture) -> None:
    content = picture.path.read_text(encoding="utf-8")
    assert f"<dc:identifier>{picture.identifier}</dc:identifier>" in content, "run: python -m bench.plots"
    # Nothing that differs from day to day.
    assert "<dc:date>" not in content
    assert len(content) < 100_000
    shown = (report.ROOT / "bench" / "README.md").read_text(encoding="utf-8")
    assert f"(../docs/images/{picture.path.name})" in shown


def test_pictures_hold_the_numbers_of_the_tables() -> None:
    table = report.waterfall()
    for row in plots.waterfall():
        assert f"| {row['title']} | {' | '.join(map(report.milliseconds, row['ms']))} |" in table
    compared = [line for line in report.worst().splitlines() if line.startswith("| ") and "dB" not in line]
    found = [row for row in plots.fidelity() if "CPU" not in row["machine"]]
    assert len(found) == len(compared) - 1
    assert all(f" {row['psnr_db']:.1f} " in line for row, line in zip(found, compared[1:], strict=True))
    assert any("CPU" in row["machine"] for row in plots.fidelity())


def test_another_number_is_another_picture() -> None:
    numbers = plots.waterfall()
    changed = [{**numbers[0], "ms": [0.0, *numbers[0]["ms"][1:]]}, *numbers[1:]]
    assert plots.digest(changed) != plots.digest(numbers) == plots.digest(plots.waterfall())


@pytest.mark.parametrize("picture", plots.PICTURES, ids=lambda picture: picture.name)
def test_pictures_are_drawn_alike_every_time(
    picture: plots.Picture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install -e '.[bench]'")
    monkeypatch.setattr(plots, "FOLDER", tmp_path)
    contents = []
    for _ in range(2):
        picture.write()
        contents.append(picture.path.read_bytes())
    assert contents[0] == contents[1]
    assert picture.identifier.encode() in contents[0]


def test_a_table_is_made_between_its_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(report.TABLES, "cpu", lambda: "NEW")
    text = "a\n<!-- bench:cpu -->\nold\n<!-- /bench:cpu -->\nb"
    assert report.render(text) == "a\n<!-- bench:cpu -->\nNEW\n<!-- /bench:cpu -->\nb"


@pytest.mark.parametrize("as_stream", [True, False])
def test_a_stream_of_photos_gives_a_row(as_stream: bool, tmp_path: Path) -> None:
    (case, _) = stream.cases("cpu", 3, True, 640, "cpu")
    row = stream.measure(replace(case, stream=as_stream))
    assert row["faces"] == 24
    assert row["faces_per_batch"] == 1
    assert 0 < row["busy_share"] <= 1
    assert row["detector"] == "stand-in that knows the faces"
    (tmp_path / "stream.json").write_text(json.dumps({"suite": "stream", "rows": [row]}))
    assert f"| {100 * row['busy_share']:.0f} % |" in report.stream(tmp_path)
    assert "stream.json" in report.machines(tmp_path)


def test_the_profile_holds_the_convolutions_of_the_network() -> None:
    """And their work: that of the large levels is nearly all of an image's 274 GFLOP."""
    layers = list(profile.convolutions(published_config(512)))
    assert len({(layer.kind, layer.side) for layer in layers}) == 12
    assert 0.9 * 274e9 < sum(layer.flop(1) for layer in layers) < 274e9
    found = json.loads((report.RESULTS / "profile.json").read_text())["convolutions"]
    for layer, row in zip(layers, found["layers"], strict=True):
        assert {**asdict(layer), "ms": row["ms"], "tflops": round(layer.flop(8) / row["ms"] / 1e9)} == row


def test_every_kernel_of_the_profile_is_told() -> None:
    rows = json.loads((report.RESULTS / "profile.json").read_text())["rows"]
    kinds = {report.kind(kernel["name"]) for row in rows for kernel in row["kernels"]}
    assert {"convolutions (cuDNN)", "matrix products (cuBLAS)", "our other kernels", "`up_kernel`"} <= kinds
    total = sum(float(line.split("|")[3]) for line in report.profile().splitlines()[2:])
    assert total == pytest.approx(sum(kernel["ms"] for kernel in rows[1]["kernels"]), abs=0.05)


def test_a_stream_that_nobody_measured(tmp_path: Path) -> None:
    assert report.stream(tmp_path) == "Not measured yet."


def test_the_busy_share_is_of_the_time_from_start_to_end() -> None:
    assert stream.busy_share([(0.0, 1.0, 8), (1.0, 2.5, 8), (3.0, 4.0, 1)]) == pytest.approx(3.5 / 4)
    assert stream.busy_share([(7.0, 9.0, 8)]) == 1
