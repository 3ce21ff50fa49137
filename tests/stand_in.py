"""Stand-in weights for the plain networks: golden key and shape lists, and what each fault in them must say."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gpen_core.config import Provenance
from tests.golden.fill import fill_batchnorm_net

GOLDEN = Path(__file__).parent / "golden"
PROVENANCE = Provenance(
    source_name="net.pth",
    source_sha256="0" * 64,
    kept="params_ema",
    dropped=("params",),
    licence="MIT",
    tool_version="gpen-core 0.0.0",
)

Shapes = Mapping[str, tuple[int, ...]]
State = dict[str, Tensor]
Damage = Callable[[State, str], None]


def golden_shapes(name: str) -> dict[str, tuple[int, ...]]:
    """Keys and shapes of a published file; stored by shape to be small."""
    by_shape = json.loads((GOLDEN / "net_shapes.json").read_text())[name]
    return {key: tuple(json.loads(shape)) for shape, keys in by_shape.items() for key in keys.split()}


def fill_state(shapes: Shapes) -> State:
    return {key: torch.from_numpy(np.asarray(fill_batchnorm_net(key, shape))) for key, shape in shapes.items()}


def with_norm(key: str, norm: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """A convolution without bias and the batch norm behind it, in the legacy layout."""
    tensors = ("weight", "bias", "running_mean", "running_var")
    counter = {f"{norm}.num_batches_tracked": ()}
    return {f"{key}.weight": shape, **{f"{norm}.{tensor}": shape[:1] for tensor in tensors}, **counter}


def remove(state: State, key: str) -> None:
    del state[key]


def misshape(state: State, key: str) -> None:
    state[key] = state[key][..., None]


def make_whole(state: State, key: str) -> None:
    state[key] = state[key].int()


def spoil(state: State, key: str) -> None:
    state[key] = torch.full_like(state[key], float("nan"))


def rename(state: State, key: str) -> None:
    state[f"{key}2"] = state.pop(key)


FAULTS: list[tuple[Damage, str]] = [
    (remove, "missing"),
    (misshape, "misshapen"),
    (make_whole, "is torch.int32, not floating point"),
    (spoil, "not finite"),
    (rename, "unknown"),
]


def relative(found: object, expected: object) -> float:
    """Largest difference over the largest expected value."""
    a, b = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert a.shape == b.shape
    return float(np.abs(a - b).max() / np.abs(b).max())
