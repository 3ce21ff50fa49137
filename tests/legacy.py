"""Legacy state dicts for tests: stand-in weights in the original's key layout, with its filter buffers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpen_convert.keymap import legacy_shapes
from gpen_core.config import GeneratorConfig
from tests.golden.fill import fill, model_input

GOLDEN = Path(__file__).parent / "golden"
TINY = GeneratorConfig(input_size=16, output_size=16, channels=(8, 8, 4), style_dim=16, n_mlp=2)


@dataclass(frozen=True)
class GoldenCase:
    """A published structure with stand-in weights, and what the original computes from them."""

    state: dict[str, Tensor]
    image: Tensor
    output: NDArray[np.float32]
    stride: int
    absmax: float
    case: dict[str, Any]


def golden_case(name: str) -> GoldenCase:
    entry = json.loads((GOLDEN / "generators.json").read_text())[name]
    state = {key: torch.from_numpy(fill(key, tuple(shape))) for key, shape in entry["parameters"].items()}
    for key in entry["zeroed"]:
        state[key] = torch.zeros_like(state[key])
    state.update(filters(entry["buffers"]))
    return GoldenCase(
        state=state,
        image=torch.from_numpy(model_input(entry["input_seed"], entry["batch"], entry["input_size"])),
        output=np.load(GOLDEN / f"{name}.npz")["output"],
        stride=entry["stored_stride"],
        absmax=entry["absmax"],
        case=entry["case"],
    )


def filters(names: Any) -> dict[str, Tensor]:
    """The buffers that legacy files carry: k outer k / 64 in the encoder, four times that elsewhere."""
    taps = torch.tensor([1.0, 3.0, 3.0, 1.0])
    kernel = torch.outer(taps, taps) / 64
    return {name: kernel.clone() if name.startswith("ecd") else 4 * kernel for name in names}


def legacy_state(config: GeneratorConfig) -> dict[str, Tensor]:
    """A whole legacy state dict for any configuration."""
    state = {key: torch.from_numpy(fill(key, shape)) for key, shape in legacy_shapes(config).items()}
    blocks = range(1, len(config.encoder_levels))
    levels = range(len(config.decoder_levels) - 1)
    state.update(filters(f"ecd{i}.0.0.kernel" for i in blocks))
    state.update(filters(f"generator.convs.{2 * i}.conv.blur.kernel" for i in levels))
    state.update(filters(f"generator.to_rgbs.{i}.upsample.kernel" for i in levels))
    return state


def image_for(config: GeneratorConfig, batch: int = 2, seed: int = 1) -> Tensor:
    return torch.from_numpy(model_input(seed, batch, config.input_size))
