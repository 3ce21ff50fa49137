"""The form for CPUs computes what the generator computes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from gpen_core.config import GeneratorConfig
from gpen_core.winograd import WinogradConv, WinogradGenerator, transform_kernel
from tests.legacy import image_for, legacy_state
from tests.test_model import generator_of

WIDE = GeneratorConfig(input_size=64, output_size=64, channels=(8, 8, 6, 4, 3), style_dim=16, n_mlp=2)
SR = GeneratorConfig(input_size=32, output_size=128, channels=(8, 8, 6, 4, 3, 3), style_dim=16, n_mlp=2)
ADDED = GeneratorConfig(input_size=32, output_size=32, channels=(8, 6, 4, 4), style_dim=12, n_mlp=3, concat=False)
SHRINKING = GeneratorConfig(input_size=64, output_size=32, channels=(8, 6, 5, 4, 4), style_dim=12, n_mlp=1)


@pytest.mark.parametrize("size", [(4, 5), (8, 8), (32, 7)], ids=str)
@pytest.mark.parametrize("widths", [(3,), (3, 2)], ids=["whole", "parts"])
def test_a_convolution_is_the_direct_one(size: tuple[int, int], widths: tuple[int, ...]) -> None:
    random = torch.Generator().manual_seed(1)
    weight = torch.randn(4, sum(widths), 3, 3, generator=random, dtype=torch.float64)
    parts = [torch.randn(2, width, *size, generator=random, dtype=torch.float64) for width in widths]
    expected = F.conv2d(torch.cat(parts, 1), weight, padding=1)
    assert torch.allclose(WinogradConv(weight)(parts), expected, rtol=0, atol=1e-12)


def test_float32_kernels_are_exact_to_their_last_digit() -> None:
    weight = torch.randn(4, 3, 3, 3, generator=torch.Generator().manual_seed(2))
    assert transform_kernel(weight).shape == (6, 4, 3, 1, 3)
    exact = transform_kernel(weight.double())
    assert torch.allclose(transform_kernel(weight).double(), exact, rtol=1e-7, atol=0)


@pytest.mark.parametrize("config", [WIDE, SR, ADDED, SHRINKING], ids=["plain", "S<T", "added", "S>T"])
def test_a_generator_is_the_plain_one(config: GeneratorConfig) -> None:
    generator = generator_of(legacy_state(config))
    form = WinogradGenerator(generator)
    assert any(isinstance(module, WinogradConv) for module in form.convolutions)
    images = torch.cat([image_for(config), image_for(config).flip(3)])
    noise = generator.noise(seed=3)
    with torch.inference_mode():
        expected, found = generator(images, noise), form(images, noise)
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_weights_that_stay_are_shared() -> None:
    generator = generator_of(legacy_state(WIDE))
    form = WinogradGenerator(generator)
    places = {parameter.data_ptr() for parameter in generator.parameters()}
    own = [name for name, parameter in form.named_parameters() if parameter.data_ptr() not in places]
    assert own and all(".kernels." in name for name in own)
