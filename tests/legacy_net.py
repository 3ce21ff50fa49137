"""The original's formulation as a network to export: kernels scaled for each sample, grouped convolutions, filters as
convolutions, zeros inserted by padding. Batch 1, weights as stored."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def sizes(x: Tensor) -> list[int]:
    """The shape in numbers: the exporter knows no convolution whose kernel's shape depends on a tensor's."""
    return [int(n) for n in x.shape]


class LegacyNet(nn.Module):
    """[1, 3, S, S] -> [1, 3, S, S] from a legacy state dict without filter buffers; features concatenated, S = T."""

    kernel: Tensor

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        super().__init__()
        for key, value in state.items():
            if not key.endswith("kernel"):
                self.register_parameter(key.replace(".", "_"), nn.Parameter(value.float()))
        taps = torch.tensor([1.0, 3.0, 3.0, 1.0])
        self.register_buffer("kernel", torch.outer(taps, taps) / 64)

    def stored(self, key: str) -> Tensor:
        return self.get_parameter(key.replace(".", "_"))

    def has(self, key: str) -> bool:
        return hasattr(self, key.replace(".", "_"))

    def filtered(self, x: Tensor, before: int, after: int, gain: float = 1.0) -> Tensor:
        batch, channels, height, width = sizes(x)
        padded = F.pad(x, (before, after, before, after)).reshape(
            -1, 1, height + before + after, width + before + after
        )
        out = F.conv2d(padded, (self.kernel * gain)[None, None])
        return out.reshape(batch, channels, *sizes(out)[2:])

    def doubled(self, x: Tensor) -> Tensor:
        batch, channels, height, width = sizes(x)
        spread = F.pad(x.reshape(batch, channels, height, 1, width, 1), (0, 1, 0, 0, 0, 1))
        return self.filtered(spread.reshape(batch, channels, 2 * height, 2 * width), 2, 1, gain=4)

    def linear(self, x: Tensor, key: str, lr_mul: float = 1.0, active: bool = False) -> Tensor:
        weight, bias = self.stored(f"{key}.weight"), self.stored(f"{key}.bias")
        scaled = weight * (lr_mul / math.sqrt(weight.shape[1]))
        if active:
            return self.act(F.linear(x, scaled), bias * lr_mul)
        return F.linear(x, scaled, bias=bias * lr_mul)

    def act(self, x: Tensor, bias: Tensor) -> Tensor:
        shape = (1, -1, *[1] * (x.dim() - 2))
        return F.leaky_relu(x + bias.view(shape), 0.2) * math.sqrt(2)

    def modulated(self, x: Tensor, w: Tensor, key: str, demodulate: bool = True, up: bool = False) -> Tensor:
        batch, inputs, height, width = sizes(x)
        weight = self.stored(f"{key}.weight")
        _, outputs, _, _, k = sizes(weight)
        style = self.linear(w, f"{key}.modulation").view(batch, 1, inputs, 1, 1)
        kernels = 1 / math.sqrt(inputs * k * k) * weight * style
        if demodulate:
            norm = torch.rsqrt(kernels.pow(2).sum([2, 3, 4]) + 1e-8)
            kernels = kernels * norm.view(batch, outputs, 1, 1, 1)
        x = x.reshape(1, batch * inputs, height, width)
        if up:
            kernels = kernels.transpose(1, 2).reshape(batch * inputs, outputs, k, k)
            y = F.conv_transpose2d(x, kernels, stride=2, groups=batch)
            return self.filtered(y.view(batch, outputs, *sizes(y)[2:]), 1, 1, gain=4)
        y = F.conv2d(x, kernels.view(batch * outputs, inputs, k, k), padding=k // 2, groups=batch)
        return y.view(batch, outputs, *sizes(y)[2:])

    def styled(self, x: Tensor, w: Tensor, features: Tensor, key: str, up: bool = False) -> Tensor:
        y = self.modulated(x, w, f"{key}.conv", up=up)
        joined = torch.cat([y, self.stored(f"{key}.noise.weight") * features], dim=1)
        return self.act(joined, self.stored(f"{key}.activate.bias"))

    def forward(self, image: Tensor) -> Tensor:
        weight = self.stored("ecd0.0.0.weight")
        x = self.act(F.conv2d(image, weight * (1 / math.sqrt(3))), self.stored("ecd0.0.1.bias"))
        features = [x]
        while self.has(f"ecd{len(features)}.0.1.weight"):
            key = f"ecd{len(features)}.0"
            weight = self.stored(f"{key}.1.weight")
            y = F.conv2d(self.filtered(x, 2, 2), weight * (1 / math.sqrt(weight.shape[1] * 9)), stride=2)
            x = self.act(y, self.stored(f"{key}.2.bias"))
            features.append(x)
        w = self.linear(x.view(x.shape[0], -1), "final_linear.0", active=True)
        w = w * torch.rsqrt(torch.mean(w**2, dim=1, keepdim=True) + 1e-8)
        layer = 1
        while self.has(f"generator.style.{layer}.weight"):
            w = self.linear(w, f"generator.style.{layer}", lr_mul=0.01, active=True)
            layer += 1
        x = self.stored("generator.input.input").repeat(image.shape[0], 1, 1, 1)
        x = self.styled(x, w, features[-1], "generator.conv1")
        rgb = self.modulated(x, w, "generator.to_rgb1.conv", demodulate=False) + self.stored("generator.to_rgb1.bias")
        for level, same in enumerate(reversed(features[:-1])):
            x = self.styled(x, w, same, f"generator.convs.{2 * level}", up=True)
            x = self.styled(x, w, same, f"generator.convs.{2 * level + 1}")
            own = self.modulated(x, w, f"generator.to_rgbs.{level}.conv", demodulate=False)
            rgb = own + self.stored(f"generator.to_rgbs.{level}.bias") + self.doubled(rgb)
        return rgb
