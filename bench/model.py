"""A GPEN of any configuration with seeded random weights, scaled so that activations stay near 1."""

from __future__ import annotations

import torch
from torch import Tensor

from gpen_convert.keymap import fold, legacy_shapes
from gpen_core.checkpoint import build_generator
from gpen_core.config import GeneratorConfig, Provenance, WeightsMetadata
from gpen_core.model import Generator


def published_config(size: int, narrow: float = 1.0, multiplier: int = 2) -> GeneratorConfig:
    """GPEN-BFR-512 and its like: published widths for an input and output of `size` pixels."""
    count = size.bit_length() - 2
    wide = [512, 512, 512, 512, *(multiplier * w for w in (256, 128, 64, 32, 16, 8))]
    channels = tuple(int(w * narrow) for w in wide[:count])
    return GeneratorConfig(size, size, channels, style_dim=512, n_mlp=8)


def legacy_tensors(config: GeneratorConfig, seed: int = 0) -> dict[str, Tensor]:
    """Random tensors under the legacy keys: standard normal weights (equalised layers expect them), small biases."""
    generator = torch.Generator().manual_seed(seed)
    return {key: _draw(key, shape, generator) for key, shape in legacy_shapes(config).items()}


def _draw(key: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    values = torch.randn(shape, generator=generator)
    if key.endswith("noise.weight"):
        return torch.full(shape, 0.5)
    if key.endswith("modulation.bias"):
        return 1 + 0.1 * values
    if key.endswith("bias"):
        return 0.1 * values
    # The mapping network's learning-rate multiplier is undone, as its initialisation does.
    return values / 0.01 if key.startswith("generator.style.") else values


def random_generator(config: GeneratorConfig, seed: int = 0) -> Generator:
    """A generator in float32 on the CPU."""
    metadata = WeightsMetadata(config, Provenance("random", "", licence="CC0-1.0"))
    return build_generator(metadata, fold(config, legacy_tensors(config, seed), torch.float32))
