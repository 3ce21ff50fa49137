"""Convolutions and the batch norms behind them, folded into one ordinary convolution each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gpen_convert.shapes import Shapes, shapes_of
from gpen_core.checkpoint import FLOATS, describe_difference
from gpen_core.errors import CheckpointError

EPSILON = 1e-5
NORM_TENSORS = ("weight", "bias", "running_mean", "running_var")


@dataclass(frozen=True)
class Source:
    """Legacy prefixes of a convolution and of the batch norm behind it; None where none follows."""

    conv: str
    norm: str | None = None


FindSource = Callable[[str], Source]
"""From the name of one of our convolutions."""


def legacy_shapes(net: nn.Module, find_source: FindSource) -> dict[str, tuple[int, ...]]:
    """Every parameter of the legacy layout and its shape, without `num_batches_tracked`."""
    return dict(_legacy_shapes(net, find_source))


def check_shapes(net: nn.Module, find_source: FindSource, shapes: Shapes) -> None:
    """All or nothing; `num_batches_tracked` may be absent. Raises CheckpointError in one line."""
    counters = {f"{source.norm}.num_batches_tracked" for _, _, source in _sources(net, find_source)} & shapes.keys()
    expected = {**legacy_shapes(net, find_source), **dict.fromkeys(counters, ())}
    if expected != shapes:
        raise CheckpointError(describe_difference(expected, shapes))


def load_folded(net: nn.Module, find_source: FindSource, state: Mapping[str, Tensor]) -> None:
    """Fill a network on the meta device, whose convolutions all have a bias, from legacy tensors.

    y = gamma (conv(x) - mean) / sqrt(var + 1e-5) + beta is linear in the kernel: computed in float64, rounded once to
    float32. The network is left in evaluation mode, without gradients. Raises CheckpointError for a tensor that is
    missing, unknown, misshapen, not floating point or not finite.
    """
    check_shapes(net, find_source, shapes_of(state))
    folded: dict[str, Tensor] = {}
    for name, _, source in _sources(net, find_source):
        weight, bias = _fold(source, state)
        folded[f"{name}.weight"], folded[f"{name}.bias"] = weight.float(), bias.float()
    net.load_state_dict(folded, strict=True, assign=True)
    net.eval().requires_grad_(False)


def _fold(source: Source, state: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    weight = _double(state, f"{source.conv}.weight")
    if source.norm is None:
        return weight, _double(state, f"{source.conv}.bias")
    gamma, beta, mean, variance = (_double(state, f"{source.norm}.{name}") for name in NORM_TENSORS)
    if bool((variance < 0).any()):
        raise CheckpointError(f"{source.norm}.running_var holds negative values")
    gain = gamma / torch.sqrt(variance + EPSILON)
    return weight * gain[:, None, None, None], beta - mean * gain


def _double(state: Mapping[str, Tensor], key: str) -> Tensor:
    tensor = state[key]
    if tensor.dtype not in (*FLOATS, torch.float64):
        raise CheckpointError(f"{key} is {tensor.dtype}, not floating point")
    if not bool(torch.isfinite(tensor).all()):
        raise CheckpointError(f"{key} holds values that are not finite")
    return tensor.double()


def _sources(net: nn.Module, find_source: FindSource) -> Iterator[tuple[str, nn.Conv2d, Source]]:
    for name, module in net.named_modules():
        if isinstance(module, nn.Conv2d):
            yield name, module, find_source(name)


def _legacy_shapes(net: nn.Module, find_source: FindSource) -> Iterator[tuple[str, tuple[int, ...]]]:
    for _, conv, source in _sources(net, find_source):
        yield f"{source.conv}.weight", tuple(conv.weight.shape)
        if source.norm is None:
            yield f"{source.conv}.bias", (conv.out_channels,)
            continue
        for tensor in NORM_TENSORS:
            yield f"{source.norm}.{tensor}", (conv.out_channels,)
