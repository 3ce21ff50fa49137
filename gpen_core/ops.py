"""The fixed filters and the modulated convolution, as ordinary differentiable tensor functions.

Formulas: StyleGAN2 (Karras et al., 2020), section 2.2 and appendix B, with the 4-tap binomial filter [1, 3, 3, 1].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

EPSILON = 1e-8
SLOPE = 0.2


def activate(x: Tensor) -> Tensor:
    """Leaky ReLU; StyleGAN2's gain sqrt(2) is folded into the weights before it."""
    return F.leaky_relu(x, SLOPE)


def blur(x: Tensor, pad: tuple[int, int], gain: float = 1.0) -> Tensor:
    """Correlate with the outer product of [1, 3, 3, 1] / 8, times `gain`, after zero padding.

    x: [B, C, H, W]; pad: zeros before and after, in both axes. Returns [B, C, H + sum(pad) - 3, W + sum(pad) - 3].
    Sums of shifted views: a compiler fuses them with their neighbours, which it can't do with a depthwise convolution.
    """
    before, after = pad
    x = F.pad(x, (before, after, before, after))
    x = (x[..., :-3] + x[..., 3:]) + 3 * (x[..., 1:-2] + x[..., 2:-1])
    x = (x[..., :-3, :] + x[..., 3:, :]) + 3 * (x[..., 1:-2, :] + x[..., 2:-1, :])
    return x * (gain / 64)


def upsample2(x: Tensor) -> Tensor:
    """Twice the size: zeros inserted after each sample, then `blur` with padding (2, 1) and gain 4.

    x: [B, C, H, W], returns [B, C, 2H, 2W]. Written by phases: even outputs are (x[i-1] + 3 x[i]) / 4,
    odd ones (3 x[i] + x[i+1]) / 4, with zeros beyond the border.
    """
    x = F.pad(x, (1, 1, 1, 1))
    left, centre, right = x[..., :-2], 3 * x[..., 1:-1], x[..., 2:]
    x = rearrange([left + centre, centre + right], "phase b c h w -> b c h (w phase)")
    above, centre, below = x[..., :-2, :], 3 * x[..., 1:-1, :], x[..., 2:, :]
    return rearrange([above + centre, centre + below], "phase b c h w -> b c (h phase) w") / 16


def pixel_norm(z: Tensor) -> Tensor:
    """z / sqrt(mean(z^2) + 1e-8) over the last axis."""
    return z * torch.rsqrt(z.square().mean(-1, keepdim=True) + EPSILON)


def kernel_energy(weight: Tensor) -> Tensor:
    """Sum over taps of the squared kernel, float32: [O, I, k, k] -> [O, I]. The constant part of demodulation."""
    return weight.float().square().sum((2, 3))


def demodulation(style: Tensor, energy: Tensor) -> Tensor:
    """1 / sqrt(sum_i (s_i^2 * energy_oi) + 1e-8), float32: style [B, I], energy [O, I] -> [B, O]."""
    # As a bias: some compilers (PyTorch 2.11 on a CPU) fail on a number added to a linear layer.
    return torch.rsqrt(F.linear(style.square(), energy, energy.new_full(energy.shape[:1], EPSILON)))
