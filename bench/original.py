"""The network as its papers write it down, step by step: the starting point of the waterfall.

Written from the equations of StyleGAN2 and GPEN over the legacy tensors as published files name them: equalised
weights scaled in each call, kernels modulated for each sample and run as one grouped convolution, up-sampling by
explicit zeros, filters as depthwise convolutions, noise by concatenation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from gpen_core.config import GeneratorConfig


def activate(x: Tensor, bias: Tensor) -> Tensor:
    """sqrt(2) * leaky_relu(x + bias, 0.2), the bias along axis 1."""
    shape = [1, -1] + [1] * (x.dim() - 2)
    return F.leaky_relu(x + bias.view(shape), 0.2) * math.sqrt(2)


def upfirdn(x: Tensor, kernel: Tensor, up: int, pad: tuple[int, int]) -> Tensor:
    """Insert up - 1 zeros after each sample, pad, and correlate each channel with the (symmetric) kernel."""
    # Plain numbers, also while an exporter traces.
    b, c, h, w = map(int, x.shape)
    if up > 1:
        x = F.pad(x.view(b, c, h, 1, w, 1), (0, up - 1, 0, 0, 0, up - 1)).view(b, c, h * up, w * up)
    x = F.pad(x, (pad[0], pad[1], pad[0], pad[1]))
    return F.conv2d(x, kernel.expand(c, 1, 4, 4), groups=c)


class Original:
    """Call with [B, 3, S, S]; returns [B, 3, T, T]. Only for networks whose output is not larger than their input."""

    def __init__(
        self, config: GeneratorConfig, tensors: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype
    ) -> None:
        self.config = config
        self.tensors = {key: value.to(device, dtype) for key, value in tensors.items()}
        taps = torch.tensor([1.0, 3.0, 3.0, 1.0], device=device)
        self.kernel = (torch.outer(taps, taps) / 64).to(dtype)

    def __call__(self, image: Tensor) -> Tensor:
        t, config = self.tensors, self.config
        x = image.to(self.kernel.dtype)
        x = activate(self._equalised(x, "ecd0.0.0.weight"), t["ecd0.0.1.bias"])
        features = [x]
        for i in range(1, len(config.encoder_levels)):
            x = upfirdn(x, self.kernel, 1, (2, 2))
            x = activate(self._equalised(x, f"ecd{i}.0.1.weight", stride=2), t[f"ecd{i}.0.2.bias"])
            features.append(x)
        features.reverse()
        z = self._linear(x.flatten(1), "final_linear.0")
        w = z * torch.rsqrt(z.square().mean(1, keepdim=True) + 1e-8)
        for i in range(1, config.n_mlp + 1):
            w = self._linear(w, f"generator.style.{i}", rate=0.01)
        x = t["generator.input.input"].expand(len(image), -1, -1, -1)
        x = self._styled(x, w, features[0], "generator.conv1", up=False)
        rgb = self._to_rgb(x, w, "generator.to_rgb1")
        for i in range(len(config.decoder_levels) - 1):
            x = self._styled(x, w, features[i + 1], f"generator.convs.{2 * i}", up=True)
            x = self._styled(x, w, features[i + 1], f"generator.convs.{2 * i + 1}", up=False)
            rgb = self._to_rgb(x, w, f"generator.to_rgbs.{i}") + upfirdn(rgb, 4 * self.kernel, 2, (2, 1))
        return rgb.float()

    def _equalised(self, x: Tensor, key: str, stride: int = 1) -> Tensor:
        weight = self.tensors[key]
        return F.conv2d(x, weight / math.sqrt(weight[0].numel()), stride=stride)

    def _linear(self, x: Tensor, key: str, rate: float = 1.0) -> Tensor:
        weight = self.tensors[f"{key}.weight"]
        x = F.linear(x, weight * (rate / math.sqrt(weight.shape[1])))
        return activate(x, self.tensors[f"{key}.bias"] * rate)

    def _modulated(self, x: Tensor, w: Tensor, key: str, *, up: bool, demodulate: bool) -> Tensor:
        t = self.tensors
        modulation = t[f"{key}.modulation.weight"]
        style = F.linear(w, modulation / math.sqrt(modulation.shape[1]), t[f"{key}.modulation.bias"])
        weight = t[f"{key}.weight"]
        weight = weight / math.sqrt(weight[0, 0].numel()) * style[:, None, :, None, None]
        if demodulate:
            weight = weight * torch.rsqrt(weight.float().square().sum((2, 3, 4), keepdim=True) + 1e-8).to(x.dtype)
        b, o, i, k, _ = map(int, weight.shape)
        h, wide = map(int, x.shape[-2:])
        x = x.reshape(1, b * i, h, wide)
        if up:
            weight = weight.transpose(1, 2).reshape(b * i, o, k, k)
            x = F.conv_transpose2d(x, weight, stride=2, groups=b)
            return upfirdn(x.view(b, o, 2 * h + 1, 2 * wide + 1), 4 * self.kernel, 1, (1, 1))
        x = F.conv2d(x, weight.reshape(b * o, i, k, k), padding=k // 2, groups=b)
        return x.view(b, o, h, wide)

    def _styled(self, x: Tensor, w: Tensor, noise: Tensor, key: str, *, up: bool) -> Tensor:
        x = self._modulated(x, w, f"{key}.conv", up=up, demodulate=True)
        x = torch.cat([x, self.tensors[f"{key}.noise.weight"] * noise], 1)
        return activate(x, self.tensors[f"{key}.activate.bias"])

    def _to_rgb(self, x: Tensor, w: Tensor, key: str) -> Tensor:
        return self._modulated(x, w, f"{key}.conv", up=False, demodulate=False) + self.tensors[f"{key}.bias"]
