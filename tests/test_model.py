"""The generator against what the original computes, and against a literal statement of the mathematics."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from gpen_convert.infer import infer_config
from gpen_convert.keymap import fold
from gpen_core.checkpoint import build_generator
from gpen_core.config import GeneratorConfig, Provenance, WeightsMetadata
from gpen_core.errors import ImageError, UsageError
from gpen_core.model import Generator
from gpen_core.ops import blur, upsample2
from tests import reference
from tests.legacy import TINY, golden_case, image_for, legacy_state

SR = GeneratorConfig(input_size=16, output_size=64, channels=(8, 8, 6, 4, 3), style_dim=16, n_mlp=2)
ADDED = GeneratorConfig(input_size=16, output_size=16, channels=(8, 6, 4), style_dim=12, n_mlp=3, concat=False)
SHRINKING = GeneratorConfig(input_size=32, output_size=16, channels=(8, 6, 5, 4), style_dim=12, n_mlp=1)


def generator_of(state: dict[str, Tensor]) -> Generator:
    config = infer_config({name: tuple(tensor.shape) for name, tensor in state.items()})
    metadata = WeightsMetadata(config, Provenance("", ""))
    return build_generator(metadata, fold(config, state, torch.float32))


@pytest.mark.parametrize(
    "name",
    [
        "tiny-64",
        "sr-64-to-256",
        "bfr-256",
        "bfr-512",
        pytest.param("bfr-1024", marks=pytest.mark.slow),
        pytest.param("bfr-2048", marks=pytest.mark.slow),
    ],
)
def test_equals_the_original(name: str) -> None:
    case = golden_case(name)
    model = generator_of(case.state)
    with torch.inference_mode():
        output = model(case.image).numpy()
    stored = output[:, :, :: case.stride, :: case.stride]
    assert stored.shape == case.output.shape
    assert np.abs(stored - case.output).max() <= 1e-4 * case.absmax
    assert np.abs(output).max() == pytest.approx(case.absmax, rel=1e-4)


@pytest.mark.parametrize("config", [TINY, SR, ADDED, SHRINKING], ids=["plain", "S<T", "added", "S>T"])
def test_equals_the_literal_mathematics(config: GeneratorConfig) -> None:
    state = legacy_state(config)
    model = generator_of(state)
    assert model.config == config
    image = image_for(config)
    noise = model.noise(seed=3)
    with torch.inference_mode():
        output = model(image, noise).double()
        expected = reference.generate(
            {k: v.double() for k, v in state.items()}, image.double(), [n.double() for n in noise]
        )
    assert output.shape == (2, 3, config.output_size, config.output_size)
    assert (output - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_literal_mathematics_equals_the_original() -> None:
    case = golden_case("tiny-64")
    output = reference.generate({k: v.double() for k, v in case.state.items()}, case.image.double()).numpy()
    assert np.abs(output - case.output).max() <= 1e-5 * case.absmax


@pytest.mark.parametrize(("pad", "gain"), [((2, 2), 1.0), ((1, 1), 4.0)])
def test_blur(pad: tuple[int, int], gain: float) -> None:
    x = torch.randn(2, 3, 7, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(blur(x, pad, gain), reference.blur(x, *pad, gain), rtol=0, atol=1e-12)


def test_upsample2() -> None:
    x = torch.randn(2, 3, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(upsample2(x), reference.upsample2(x), rtol=0, atol=1e-12)


def test_noise_is_an_argument_with_a_seeded_default() -> None:
    model = generator_of(legacy_state(SR))
    image = image_for(SR)
    with torch.inference_mode():
        default, again, other = model(image), model(image), model(image, model.noise(seed=1))
        alone = model(image[1:])
    assert torch.equal(default, again)
    assert not torch.equal(default, other)
    assert torch.allclose(alone, default[1:], rtol=0, atol=1e-5)
    assert [tuple(n.shape) for n in model.noise()] == [(1, 4, 32, 32)] * 2 + [(1, 3, 64, 64)] * 2
    assert generator_of(legacy_state(TINY)).noise() == []


def test_wrong_inputs_are_errors() -> None:
    model = generator_of(legacy_state(TINY))
    with pytest.raises(ImageError, match=r"expected \[B, 3, 16, 16\], got \[1, 3, 8, 8\]"):
        model(torch.zeros(1, 3, 8, 8))
    with pytest.raises(UsageError, match="1 noise maps for 0 layers"):
        model(image_for(TINY), [torch.zeros(1, 4, 16, 16)])
