"""The benchmark's own formulas, and that pages say what was measured."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from bench import fidelity, report
from bench.cases import SUITES, Case
from bench.measure import measure, summary
from bench.model import legacy_tensors, published_config, random_generator
from bench.original import Original
from gpen_core.ahead import Network
from gpen_core.config import GeneratorConfig
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
    for case in (case for suite in SUITES.values() for case in suite):
        assert Case.from_dict(json.loads(json.dumps(case.to_dict()))) == case


@pytest.mark.parametrize("network", ["original", "shared"])
def test_a_case_gives_a_row(network: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(SUITES["cpu"][0], network=network, size=32)
    monkeypatch.setattr("bench.measure.config_of", lambda case: CONFIG)
    row = measure(case)
    assert row["batches"]["1"]["median_ms"] > 0
    assert row["fidelity"]["photo"]["psnr_db"] > 80


@pytest.mark.skipif(not compiles_ahead(CPU), reason="needs Linux and PyTorch 2.6 or newer")
def test_the_compiled_case_is_what_the_option_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def compiled(generator: Generator, precision: str) -> Network:
        asked.append(precision)
        return generator

    monkeypatch.setattr("bench.measure.config_of", lambda case: CONFIG)
    monkeypatch.setattr("bench.measure.compiled_ahead", compiled)
    row = measure(replace(SUITES["cpu"][0], network="inductor", size=32))
    assert asked == ["fp32"]
    assert row["fidelity"]["photo"]["psnr_db"] > 80


def test_pages_show_the_results() -> None:
    for page in report.PAGES:
        if page.exists():
            text = page.read_text(encoding="utf-8")
            assert report.render(text) == text, f"run: python -m bench.report ({page.name})"


def test_a_table_is_made_between_its_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(report.TABLES, "cpu", lambda: "NEW")
    text = "a\n<!-- bench:cpu -->\nold\n<!-- /bench:cpu -->\nb"
    assert report.render(text) == "a\n<!-- bench:cpu -->\nNEW\n<!-- /bench:cpu -->\nb"
