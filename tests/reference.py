"""The original's mathematics stated literally, in float64: slow, and independent of the package.

Per-sample kernels in grouped convolutions, zeros really inserted, filters really applied as two-dimensional
correlations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

KERNEL = torch.outer(torch.tensor([1.0, 3, 3, 1]), torch.tensor([1.0, 3, 3, 1])).double() / 64


def act(z: Tensor) -> Tensor:
    return math.sqrt(2) * torch.where(z >= 0, z, 0.2 * z)


def blur(x: Tensor, before: int, after: int, gain: float = 1.0) -> Tensor:
    b, c, h, w = x.shape
    padded = torch.zeros(b, c, h + before + after, w + before + after, dtype=x.dtype)
    padded[:, :, before : before + h, before : before + w] = x
    height, width = padded.shape[2] - 3, padded.shape[3] - 3
    out = torch.zeros(b, c, height, width, dtype=x.dtype)
    for i in range(4):
        for j in range(4):
            out += gain * KERNEL[i, j] * padded[:, :, i : i + height, j : j + width]
    return out


def upsample2(x: Tensor) -> Tensor:
    b, c, h, w = x.shape
    spread = torch.zeros(b, c, 2 * h, 2 * w, dtype=x.dtype)
    spread[:, :, ::2, ::2] = x
    return blur(spread, 2, 1, gain=4)


def equal_linear(x: Tensor, weight: Tensor, bias: Tensor, lr_mul: float = 1.0) -> Tensor:
    return x @ (weight * (lr_mul / math.sqrt(weight.shape[1]))).T + bias * lr_mul


def modulated(
    x: Tensor, w: Tensor, p: Mapping[str, Tensor], prefix: str, *, demodulate: bool = True, up: bool = False
) -> Tensor:
    weight = p[f"{prefix}.weight"][0]
    out_channels, in_channels, k, _ = weight.shape
    style = equal_linear(w, p[f"{prefix}.modulation.weight"], p[f"{prefix}.modulation.bias"])
    kernels = weight[None] / math.sqrt(in_channels * k * k) * style[:, None, :, None, None]
    if demodulate:
        kernels = kernels / torch.sqrt(kernels.square().sum((2, 3, 4), keepdim=True) + 1e-8)
    batch, _, height, width = x.shape
    stacked = x.reshape(1, batch * in_channels, height, width)
    if up:
        swapped = kernels.transpose(1, 2).reshape(batch * in_channels, out_channels, k, k)
        y = F.conv_transpose2d(stacked, swapped, stride=2, groups=batch)
        return blur(y.reshape(batch, out_channels, 2 * height + 1, 2 * width + 1), 1, 1, gain=4)
    flat = kernels.reshape(batch * out_channels, in_channels, k, k)
    y = F.conv2d(stacked, flat, padding=k // 2, groups=batch)
    return y.reshape(batch, out_channels, height, width)


def styled(
    x: Tensor, w: Tensor, features: Tensor, p: Mapping[str, Tensor], prefix: str, concat: bool, up: bool = False
) -> Tensor:
    y = modulated(x, w, p, f"{prefix}.conv", up=up)
    scaled = p[f"{prefix}.noise.weight"] * features
    y = torch.cat([y, scaled], 1) if concat else y + scaled
    return act(y + p[f"{prefix}.activate.bias"][:, None, None])


def to_rgb(x: Tensor, w: Tensor, p: Mapping[str, Tensor], prefix: str) -> Tensor:
    return modulated(x, w, p, f"{prefix}.conv", demodulate=False) + p[f"{prefix}.bias"]


def generate(p: Mapping[str, Tensor], image: Tensor, noise: Sequence[Tensor] = ()) -> Tensor:
    """The generator with legacy tensors `p` (float64) on `image` [B, 3, S, S]; noise maps for the levels above S."""
    x = act(F.conv2d(image, p["ecd0.0.0.weight"] / math.sqrt(3)) + p["ecd0.0.1.bias"][:, None, None])
    features = {x.shape[2]: x}
    block = 1
    while f"ecd{block}.0.1.weight" in p:
        weight = p[f"ecd{block}.0.1.weight"]
        y = F.conv2d(blur(x, 2, 2), weight / math.sqrt(weight.shape[1] * 9), stride=2)
        x = act(y + p[f"ecd{block}.0.2.bias"][:, None, None])
        features[x.shape[2]] = x
        block += 1
    z = act(equal_linear(x.flatten(1), p["final_linear.0.weight"], p["final_linear.0.bias"]))
    w = z / torch.sqrt(z.square().mean(1, keepdim=True) + 1e-8)
    layer = 1
    while f"generator.style.{layer}.weight" in p:
        w = act(equal_linear(w, p[f"generator.style.{layer}.weight"], p[f"generator.style.{layer}.bias"], 0.01))
        layer += 1

    weight = p["generator.conv1.conv.weight"]
    concat = len(p["generator.conv1.activate.bias"]) == 2 * weight.shape[1]
    maps = list(noise)
    x = p["generator.input.input"].expand(len(image), -1, -1, -1)
    x = styled(x, w, features[4], p, "generator.conv1", concat)
    rgb = to_rgb(x, w, p, "generator.to_rgb1")
    level = 0
    while f"generator.to_rgbs.{level}.bias" in p:
        r = 8 << level
        joined = (features[r], features[r]) if r in features else (maps.pop(0), maps.pop(0))
        first, second = (f.expand(len(image), -1, -1, -1) for f in joined)
        x = styled(x, w, first, p, f"generator.convs.{2 * level}", concat, up=True)
        x = styled(x, w, second, p, f"generator.convs.{2 * level + 1}", concat)
        rgb = to_rgb(x, w, p, f"generator.to_rgbs.{level}") + upsample2(rgb)
        level += 1
    return rgb
