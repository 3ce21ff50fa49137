"""The generator for a GPU: cuDNN's convolutions, and Triton kernels for all that lies between them.

Everything is channels-last, and each kernel reads and writes a feature map once. What `Generator.forward` computes is
computed here, in another order of passes:

- a convolution's demodulation, bias and activation, the concatenation with features and the scaling by the *next*
  convolution's style are one pass; the to-RGB product is taken in the same pass, so that the last level's features are
  never written;
- FIR filters march down the rows: four loads for each sample instead of sixteen, the vertical part in registers;
- features are kept as their convolution left them, and activated where they are read;
- convolutions of the smallest maps are matrix products, which split a long sum where cuDNN doesn't;
- the latent, the styles and the demodulation of all layers are matrix-vector products with float32 sums over weights
  stored in 16 bits.

Import this only where Triton is installed. The eager twin is `Generator`; tests hold the two together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn

from gpen_core.model import Generator, StyledConv
from gpen_core.ops import EPSILON, SLOPE

ROWS = 16
"""Output channels that one program of `demodulation_kernel` handles."""

SMALL, TINY_MAP = 2048, 256
"""Pixels up to which a transposed convolution, and a convolution, are faster as one matrix product (H200)."""

LEAK = tl.constexpr(SLOPE)
TINY = tl.constexpr(EPSILON)
GAIN = tl.constexpr(math.sqrt(2))


@triton.jit
def leaky(x):
    return tl.maximum(x, x * LEAK)


@triton.jit
def linear_kernel(
    x, x_row, pre_bias, pre_width, w, bias, y, width, outputs,
    PRE: tl.constexpr, NORM: tl.constexpr, ACTIVE: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """y[b, n] = act(sum_k w[n, k] x[b, k] + bias[n]), x activated or normalised before."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    b = tl.program_id(1)
    total = tl.zeros((BN, BK), tl.float32)
    squares = tl.zeros((BK,), tl.float32)
    for start in range(0, width, BK):
        k = start + tl.arange(0, BK)
        value = tl.load(x + b * x_row + k, mask=k < width, other=0).to(tl.float32)
        if PRE:
            value = tl.where(k < width, leaky(value + tl.load(pre_bias + k % pre_width)), 0)
        if NORM:
            squares += value * value
        inside = (n[:, None] < outputs) & (k[None, :] < width)
        total += tl.load(w + n[:, None] * width + k[None, :], mask=inside, other=0).to(tl.float32) * value[None, :]
    result = tl.sum(total, 1)
    if NORM:
        result = result * tl.rsqrt(tl.sum(squares, 0) / width + TINY)
    result += tl.load(bias + n, mask=n < outputs, other=0)
    if ACTIVE:
        result = leaky(result)
    tl.store(y + b * outputs + n, result, mask=n < outputs)


@triton.jit
def demodulation_kernel(
    styles, styles_row, energies, table, gains, gains_row, BN: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """gains[b, o] = sqrt(2 / (sum_i energy[o, i] style[b, i]^2 + 1e-8)) for the rows of all layers, by a table."""
    entry = table + tl.program_id(0) * 5
    b = tl.program_id(1)
    energy, style, width, gain, rows = (
        tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3), tl.load(entry + 4),
    )  # fmt: skip
    o = tl.arange(0, BN)
    total = tl.zeros((BN, BK), tl.float32)
    for start in range(0, width, BK):
        k = start + tl.arange(0, BK)
        s = tl.load(styles + b * styles_row + style + k, mask=k < width, other=0)
        inside = (o[:, None] < rows) & (k[None, :] < width)
        e = tl.load(energies + energy + o[:, None] * width + k[None, :], mask=inside, other=0).to(tl.float32)
        total += e * (s * s)[None, :]
    result = GAIN * tl.rsqrt(tl.sum(total, 1) + TINY)
    tl.store(gains + b * gains_row + gain + o, result, mask=o < rows)


@triton.jit
def scatter_kernel(x, y, height, width, out_height, out_width, channels, BP: tl.constexpr, BC: tl.constexpr):
    """A stride-2 transposed 3x3 convolution from its nine products: y[2 i + a, 2 j + b] = sum of x[i, j, a, b]."""
    p = tl.program_id(0) * BP + tl.arange(0, BP)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    b = tl.program_id(2).to(tl.int64)
    good, real = p < out_height * out_width, c < channels
    row = p // out_width
    column = p % out_width
    x += b * height * width * 9 * channels
    total = tl.zeros((BP, BC), tl.float32)
    for m in tl.static_range(2):
        for n in tl.static_range(2):
            i = row // 2 - m
            j = column // 2 - n
            # Odd places have one product in an axis (tap 1), even ones have two (taps 0 and 2).
            tap = (row % 2 + 2 * m) * 3 + column % 2 + 2 * n
            use = good & (row % 2 + m < 2) & (column % 2 + n < 2) & (i >= 0) & (j >= 0) & (i < height) & (j < width)
            at = ((i * width + j) * 9 + tap) * channels
            total += tl.load(x + at[:, None] + c[None, :], mask=use[:, None] & real[None, :], other=0).to(tl.float32)
    target = y + b * out_height * out_width * channels + p[:, None] * channels + c[None, :]
    tl.store(target, total.to(y.dtype.element_ty), mask=good[:, None] & real[None, :])


@triton.jit
def gather_kernel(
    x, out, height, width, out_width, pixels, channels,
    STRIDE: tl.constexpr, PAD: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The nine samples under a 3x3 kernel, side by side: [B, H, W, C] -> [B OH OW, 9 C]."""
    m = tl.program_id(0)
    tap = tl.program_id(1)
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    b = m // pixels
    row = (m % pixels) // out_width * STRIDE + tap // 3 - PAD
    column = m % out_width * STRIDE + tap % 3 - PAD
    good = (c < channels) & (row >= 0) & (row < height) & (column >= 0) & (column < width)
    value = tl.load(x + ((b * height + row) * width + column) * channels + c, mask=good, other=0)
    tl.store(out + (m * 9 + tap) * channels + c, value, mask=c < channels)


@triton.jit
def colour_kernel(
    image, batch_stride, channel_stride, stride_y, stride_x, w, bias, out, height, width, channels,
    BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The encoder's first layer: out[b, y, x, c] = act(sum_k w[k, c] image[b, k, y, x] + bias[c])."""
    p = tl.program_id(0) * BP + tl.arange(0, BP)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    b = tl.program_id(2).to(tl.int64)
    good, real = p < height * width, c < channels
    source = image + b * batch_stride + (p // width) * stride_y + (p % width) * stride_x
    total = tl.load(bias + c, mask=real, other=0)[None, :] + tl.zeros((BP, BC), tl.float32)
    for k in tl.static_range(3):
        value = tl.load(source + k * channel_stride, mask=good, other=0).to(tl.float32)
        total += value[:, None] * tl.load(w + k * channels + c, mask=real, other=0)[None, :]
    target = out + b * height * width * channels + p[:, None] * channels + c[None, :]
    tl.store(target, leaky(total).to(out.dtype.element_ty), mask=good[:, None] & real[None, :])


@triton.jit
def sample(x, row, at, height, width, channels, c, real, bias, RAW: tl.constexpr):
    """Samples in one row, zero beyond the border: [P, C] float32; RAW ones get a bias and are activated."""
    good = (at >= 0) & (at < width) & (row >= 0) & (row < height)
    inside = good[:, None] & real[None, :]
    value = tl.load(x + (row * width + at)[:, None] * channels + c[None, :], mask=inside, other=0).to(tl.float32)
    if RAW:
        value = tl.where(good[:, None], leaky(value + bias), 0)
    return value


@triton.jit
def blur_kernel(
    x, bias, out, height, width, channels,
    RAW: tl.constexpr, TY: tl.constexpr, TX: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The encoder's filter, [1, 3, 3, 1] / 8 in both axes with padding 2: [H, W] -> [H + 1, W + 1].

    A program marches down TY rows of 4 TX columns, each thread with four columns side by side: activating is dearer
    than loading.
    """
    blocks = tl.cdiv(channels, BC)
    c = (tl.program_id(0) % blocks) * BC + tl.arange(0, BC)
    column = ((tl.program_id(0) // blocks) * TX + tl.arange(0, TX)) * 4
    top = tl.program_id(1) * TY
    b = tl.program_id(2).to(tl.int64)
    real = c < channels
    x += b * height * width * channels
    out += b * (height + 1) * (width + 1) * channels
    pre = tl.zeros((1, BC), tl.float32)
    if RAW:
        pre += tl.load(bias + c, mask=real, other=0)[None, :]
    # Zeros for each: names that share a tensor before a loop are not carried through it.
    p0 = tl.zeros((TX, BC), tl.float32)
    p1 = tl.zeros((TX, BC), tl.float32)
    p2 = tl.zeros((TX, BC), tl.float32)
    p3 = tl.zeros((TX, BC), tl.float32)
    q0 = tl.zeros((TX, BC), tl.float32)
    q1 = tl.zeros((TX, BC), tl.float32)
    q2 = tl.zeros((TX, BC), tl.float32)
    q3 = tl.zeros((TX, BC), tl.float32)
    r0 = tl.zeros((TX, BC), tl.float32)
    r1 = tl.zeros((TX, BC), tl.float32)
    r2 = tl.zeros((TX, BC), tl.float32)
    r3 = tl.zeros((TX, BC), tl.float32)
    for j in range(TY + 3):
        row = top + j - 2
        a0 = sample(x, row, column - 2, height, width, channels, c, real, pre, RAW)
        a1 = sample(x, row, column - 1, height, width, channels, c, real, pre, RAW)
        a2 = sample(x, row, column, height, width, channels, c, real, pre, RAW)
        a3 = sample(x, row, column + 1, height, width, channels, c, real, pre, RAW)
        a4 = sample(x, row, column + 2, height, width, channels, c, real, pre, RAW)
        a5 = sample(x, row, column + 3, height, width, channels, c, real, pre, RAW)
        a6 = sample(x, row, column + 4, height, width, channels, c, real, pre, RAW)
        s0 = a0 + a3 + 3 * (a1 + a2)
        s1 = a1 + a4 + 3 * (a2 + a3)
        s2 = a2 + a5 + 3 * (a3 + a4)
        s3 = a3 + a6 + 3 * (a4 + a5)
        line = top + j - 3
        good = ((line >= top) & (line <= height)) & real[None, :]
        target = out + (line * (width + 1) + column)[:, None] * channels + c[None, :]
        v0 = (p0 + s0 + 3 * (q0 + r0)) / 64
        v1 = (p1 + s1 + 3 * (q1 + r1)) / 64
        v2 = (p2 + s2 + 3 * (q2 + r2)) / 64
        v3 = (p3 + s3 + 3 * (q3 + r3)) / 64
        tl.store(target, v0.to(out.dtype.element_ty), mask=good & (column <= width)[:, None])
        tl.store(target + channels, v1.to(out.dtype.element_ty), mask=good & (column + 1 <= width)[:, None])
        tl.store(target + 2 * channels, v2.to(out.dtype.element_ty), mask=good & (column + 2 <= width)[:, None])
        tl.store(target + 3 * channels, v3.to(out.dtype.element_ty), mask=good & (column + 3 <= width)[:, None])
        p0 = q0
        p1 = q1
        p2 = q2
        p3 = q3
        q0 = r0
        q1 = r1
        q2 = r2
        q3 = r3
        r0 = s0
        r1 = s1
        r2 = s2
        r3 = s3


@triton.jit
def up_kernel(
    x, out, height, width, channels, gain, gain_row, bias, scale, scale_row,
    features, batch_stride, features_bias, features_gain,
    RAW: tl.constexpr, TY: tl.constexpr, TX: tl.constexpr, BC: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """A doubling styled layer after its transposed convolution x [H+1, W+1, C]: the filter with padding 1 and gain 4,
    demodulation, bias, activation, concatenation with features, and the scaling by the next layer's style.
    """
    blocks = tl.cdiv(channels, BC)
    c = (tl.program_id(0) % blocks) * BC + tl.arange(0, BC)
    column = (tl.program_id(0) // blocks) * TX + tl.arange(0, TX)
    top = tl.program_id(1) * TY
    b = tl.program_id(2).to(tl.int64)
    real = c < channels
    x += b * (height + 1) * (width + 1) * channels
    features += b * batch_stride
    out += b * height * width * channels * 2
    g = tl.load(gain + b * gain_row + c, mask=real, other=0)[None, :] / 16
    b1 = tl.load(bias + c, mask=real, other=0)[None, :]
    b2 = tl.load(bias + channels + c, mask=real, other=0)[None, :]
    s1 = tl.load(scale + b * scale_row + c, mask=real, other=0)[None, :]
    s2 = tl.load(scale + b * scale_row + channels + c, mask=real, other=0)[None, :]
    pre = tl.zeros((1, BC), tl.float32)
    if RAW:
        pre += tl.load(features_bias + c, mask=real, other=0)[None, :]
    # Zeros for each: names that share a tensor before a loop are not carried through it.
    h0 = tl.zeros((TX, BC), tl.float32)
    h1 = tl.zeros((TX, BC), tl.float32)
    h2 = tl.zeros((TX, BC), tl.float32)
    for j in tl.range(0, TY + 3, loop_unroll_factor=UNROLL):
        row = top + j - 1
        a0 = sample(x, row, column - 1, height + 1, width + 1, channels, c, real, b1, False)
        a1 = sample(x, row, column, height + 1, width + 1, channels, c, real, b1, False)
        a2 = sample(x, row, column + 1, height + 1, width + 1, channels, c, real, b1, False)
        a3 = sample(x, row, column + 2, height + 1, width + 1, channels, c, real, b1, False)
        h3 = a0 + a3 + 3 * (a1 + a2)
        line = top + j - 3
        inside = ((line >= top) & (line < height) & (column < width))[:, None] & real[None, :]
        pixel = (line * width + column)[:, None]
        value = leaky((h0 + h3 + 3 * (h1 + h2)) * g + b1) * s1
        f = tl.load(features + pixel * channels + c[None, :], mask=inside, other=0).to(tl.float32)
        if RAW:
            f = leaky(f + pre)
        f = leaky(f * tl.cast(features_gain, tl.float32) + b2) * s2
        target = out + pixel * (2 * channels) + c[None, :]
        tl.store(target, value.to(out.dtype.element_ty), mask=inside)
        tl.store(target + channels, f.to(out.dtype.element_ty), mask=inside)
        h0 = h1
        h1 = h2
        h2 = h3


@triton.jit
def merge_kernel(
    x, out, rgb, skip, height, width, channels, gain, gain_row, bias, scale, scale_row,
    features, batch_stride, features_bias, features_gain, w_rgb, b_rgb, s_rgb, s_rgb_row,
    RAW: tl.constexpr, STORE: tl.constexpr, SKIP: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """A styled layer's output after its convolution x, scaled for the next convolution (STORE), and the picture so far.

    rgb[b, k, y, x] = sum_c w_rgb[k, c] s_rgb[b, c] layer[b, y, x, c] + b_rgb[k] + upsample2(skip)[b, k, y, x].
    """
    b = tl.program_id(1).to(tl.int64)
    c = tl.arange(0, BC)
    real = c < channels
    half_height = height // 2
    half_width = width // 2
    x += b * height * width * channels
    out += b * height * width * channels * 2
    features += b * batch_stride
    rgb += b * height * width * 3
    skip += b * half_height * half_width * 3
    g = tl.load(gain + b * gain_row + c, mask=real, other=0)[None, :]
    b1 = tl.load(bias + c, mask=real, other=0)[None, :]
    b2 = tl.load(bias + channels + c, mask=real, other=0)[None, :]
    pre = tl.zeros((1, BC), tl.float32)
    if RAW:
        pre += tl.load(features_bias + c, mask=real, other=0)[None, :]
    s1 = pre
    s2 = pre
    if STORE:
        s1 = tl.load(scale + b * scale_row + c, mask=real, other=0)[None, :]
        s2 = tl.load(scale + b * scale_row + channels + c, mask=real, other=0)[None, :]
    r1 = tl.load(s_rgb + b * s_rgb_row + c, mask=real, other=0)[None, :]
    r2 = tl.load(s_rgb + b * s_rgb_row + channels + c, mask=real, other=0)[None, :]
    red1 = tl.load(w_rgb + c, mask=real, other=0)[None, :] * r1
    red2 = tl.load(w_rgb + channels + c, mask=real, other=0)[None, :] * r2
    green1 = tl.load(w_rgb + 2 * channels + c, mask=real, other=0)[None, :] * r1
    green2 = tl.load(w_rgb + 3 * channels + c, mask=real, other=0)[None, :] * r2
    blue1 = tl.load(w_rgb + 4 * channels + c, mask=real, other=0)[None, :] * r1
    blue2 = tl.load(w_rgb + 5 * channels + c, mask=real, other=0)[None, :] * r2
    p = tl.program_id(0) * BP + tl.arange(0, BP)
    good = p < height * width
    inside = good[:, None] & real[None, :]
    here = p[:, None] * channels + c[None, :]
    v = tl.load(x + here, mask=inside, other=0).to(tl.float32)
    f = tl.load(features + here, mask=inside, other=0).to(tl.float32)
    v = leaky(v * g + b1)
    if RAW:
        f = leaky(f + pre)
    f = leaky(f * tl.cast(features_gain, tl.float32) + b2)
    if STORE:
        target = out + p[:, None] * (2 * channels) + c[None, :]
        tl.store(target, (v * s1).to(out.dtype.element_ty), mask=inside)
        tl.store(target + channels, (f * s2).to(out.dtype.element_ty), mask=inside)
    red = tl.sum(v * red1 + f * red2, 1) + tl.load(b_rgb)
    green = tl.sum(v * green1 + f * green2, 1) + tl.load(b_rgb + 1)
    blue = tl.sum(v * blue1 + f * blue2, 1) + tl.load(b_rgb + 2)
    if SKIP:
        red += enlarged(skip, p, good, width, half_height, half_width)
        green += enlarged(skip + half_height * half_width, p, good, width, half_height, half_width)
        blue += enlarged(skip + 2 * half_height * half_width, p, good, width, half_height, half_width)
    tl.store(rgb + p, red, mask=good)
    tl.store(rgb + height * width + p, green, mask=good)
    tl.store(rgb + 2 * height * width + p, blue, mask=good)


@triton.jit
def enlarged(plane, p, good, width, half_height, half_width):
    """`ops.upsample2` of one channel at pixels p of the larger picture."""
    y = p // width
    x = p % width
    near_y = y // 2
    near_x = x // 2
    far_y = near_y + 2 * (y % 2) - 1
    far_x = near_x + 2 * (x % 2) - 1
    y_good = good & (far_y >= 0) & (far_y < half_height)
    x_good = good & (far_x >= 0) & (far_x < half_width)
    near = 3 * tl.load(plane + near_y * half_width + near_x, mask=good, other=0)
    near += tl.load(plane + near_y * half_width + far_x, mask=x_good, other=0)
    far = 3 * tl.load(plane + far_y * half_width + near_x, mask=y_good, other=0)
    far += tl.load(plane + far_y * half_width + far_x, mask=y_good & x_good, other=0)
    return (3 * near + far) / 16


class Features:
    """What a layer is joined with, [B, r, r, C]; with a bias, an encoder convolution's output to be activated.

    shared: [1, r, r, C] for all of a batch.
    """

    def __init__(self, values: Tensor, bias: Tensor | None = None, *, shared: bool = False) -> None:
        self.values, self.raw = values, bias is not None
        self.bias = values if bias is None else bias
        self.batch_stride = 0 if shared else values.stride(0)


class Affine(nn.Module):
    """A layer's weight and bias as the kernels read them. gain: of the features that its output is joined with."""

    weight: Tensor
    bias: Tensor

    def __init__(self, weight: Tensor, bias: Tensor, gain: float = 1) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)
        self.gain = gain


class FusedGenerator(nn.Module):
    """A generator packed for the kernels, on their device; noise above the encoder's size is that of seed 0.

    dtype: of the convolutions and feature maps. faces: how many the tiles are chosen for, so that one trace fits every
    batch; None means as many as come. Needs a configuration with `concat`.
    """

    constant: Tensor
    energies: Tensor
    table: Tensor

    def __init__(
        self, generator: Generator, device: torch.device, dtype: torch.dtype, faces: int | None = None
    ) -> None:
        super().__init__()
        config = generator.config
        if not config.concat:
            raise ValueError("the kernels are for generators that concatenate their features")
        self.config, self.device, self.dtype, self.faces = config, device, dtype, faces

        def exact(value: Tensor) -> Tensor:
            return value.detach().to(device, torch.float32).contiguous()

        def matrix(value: Tensor) -> Tensor:
            low = dtype != torch.float32 and bool(value.detach().abs().max() < torch.finfo(torch.float16).max)
            return value.detach().to(device, torch.float16 if low else torch.float32).contiguous()

        def kernel(value: Tensor) -> Tensor:
            return value.detach().to(device, dtype).contiguous(memory_format=torch.channels_last)

        def parameters(name: str) -> tuple[Tensor, Tensor]:
            return generator.get_parameter(f"{name}.weight"), generator.get_parameter(f"{name}.bias")

        weight, bias = parameters("encoder.0")
        self.colour = Affine(exact(weight.flatten(1).T), exact(bias))
        others = [parameters(f"encoder.{i}") for i in range(1, len(generator.encoder))]
        self.encoder = nn.ModuleList(Affine(kernel(weight), exact(bias)) for weight, bias in others)
        c = config.width(4)
        # Channels-last features are flattened in another order than the weights expect.
        latent = generator.to_latent.weight.detach().reshape(-1, c, 4, 4).permute(0, 2, 3, 1).flatten(1)
        self.to_latent = Affine(matrix(latent), exact(generator.to_latent.bias))
        # Eight layers in a row: rounding them to 16 bits would cost more than all others together.
        mapping = [parameters(f"mapping.{i}") for i in range(len(generator.mapping))]
        self.mapping = nn.ModuleList(Affine(exact(weight), exact(bias)) for weight, bias in mapping)
        self.styles = Affine(matrix(generator.styles.weight), exact(generator.styles.bias))
        self.register_buffer("constant", exact(generator.constant.permute(0, 2, 3, 1)))
        layers = generator.styled_layers()
        self.layers = nn.ModuleList(
            Affine(kernel(layer.weight), exact(layer.bias), float(layer.feature_gain)) for layer in layers
        )
        to_rgb = [parameters(f"to_rgb.{i}") for i in range(len(generator.to_rgb))]
        # Of two axes: so short a vector a compiler would take into its code, and write anew at each call.
        self.to_rgb = nn.ModuleList(Affine(exact(weight.flatten(1)), exact(bias[None])) for weight, bias in to_rgb)
        maps = [m.to(device, dtype).permute(0, 2, 3, 1).contiguous() for m in generator.noise()]
        self.noise = nn.ParameterList(nn.Parameter(m, requires_grad=False) for m in maps)
        self.slots: dict[str, slice] = {}
        start = 0
        for slot in config.style_slots():
            self.slots[slot.layer] = slice(start, start + slot.width)
            start += slot.width
        self._pack_energies(layers)

    def _pack_energies(self, layers: Sequence[StyledConv]) -> None:
        """All layers' kernel energies end to end, and where each program of the kernel finds its rows."""
        entries, energies, energy_at, gain_at = [], [], 0, 0
        self.gains: list[slice] = []
        for i, layer in enumerate(layers):
            outputs, inputs = layer.energy.shape
            for row in range(0, outputs, ROWS):
                count = min(ROWS, outputs - row)
                style = self.slots[f"layers.{i}"].start
                entries.append((energy_at + row * inputs, style, inputs, gain_at + row, count))
            # Bfloat16's 8 bits are enough: the errors of hundreds of summands of one sign average out.
            low = layer.energy.flatten().to(
                self.device, torch.float32 if self.dtype == torch.float32 else torch.bfloat16
            )
            energies.append(low)
            self.gains.append(slice(gain_at, gain_at + outputs))
            energy_at += outputs * inputs
            gain_at += outputs
        self.register_buffer("energies", torch.cat(energies))
        self.register_buffer("table", torch.tensor(entries, dtype=torch.int32, device=self.device))
        self.gains_width = gain_at

    def forward(self, image: Tensor) -> Tensor:
        """image [B, 3, S, S] float32 in the configuration's range -> [B, 3, T, T] float32, not clamped."""
        config = self.config
        features = self.encode(image)
        maps = [Features(m, shared=True) for m in self.noise]
        styles, gains = self.modulation(features[4])
        x = (self.constant * styles[:, None, None, self.slots["layers.0"]]).to(self.dtype)
        x = self._convolve(x, self._weight(0), stride=1, padding=1)
        x, rgb = self._merge(x, 0, features.pop(4), styles, gains, None)
        for i, r in enumerate(config.decoder_levels[1:], start=1):
            # Each level's features are read for the last time here, and their memory is free again.
            first, second = (features[r], features.pop(r)) if r in features else (maps.pop(0), maps.pop(0))
            # One name, so that no map outlives its last reader.
            x = self._double(x, self._weight(2 * i - 1))
            x = self._up(x, i, first, styles, gains)
            x = self._convolve(x, self._weight(2 * i), stride=1, padding=1)
            x, rgb = self._merge(x, i, second, styles, gains, rgb)
            del first, second
        return rgb

    def _weight(self, layer: int) -> Tensor:
        return affine(self.layers[layer]).weight

    def encode(self, image: Tensor) -> dict[int, Features]:
        resolution = self.config.input_size
        b, _, h, w = image.shape
        c = len(self.colour.bias)
        x = image.new_empty((b, h, w, c), dtype=self.dtype)
        bc = min(triton.next_power_of_2(c), 64)
        grid = (triton.cdiv(h * w, 64), triton.cdiv(c, bc), b)
        launch(colour_kernel)[grid](
            image, *image.stride(), self.colour.weight, self.colour.bias, x, h, w, c, BP=64, BC=bc
        )
        features = {resolution: Features(x)}
        for layer in map(affine, self.encoder):
            blurred = self._blur(features[resolution])
            resolution //= 2
            convolved = self._convolve(blurred, layer.weight, stride=2, padding=0)
            features[resolution] = Features(convolved, layer.bias)
        return features

    def modulation(self, deepest: Features) -> tuple[Tensor, Tensor]:
        """Styles [B, sum of slots] and gains [B, sum of layers' widths], float32."""
        w = linear(deepest.values.flatten(1), self.to_latent, active=True, before=deepest.bias)
        for i, layer in enumerate(map(affine, self.mapping)):
            w = linear(w, layer, active=True, norm=i == 0)
        styles = linear(w, self.styles, active=False)
        gains = styles.new_empty((styles.shape[0], self.gains_width))
        grid = (len(self.table), styles.shape[0])
        launch(demodulation_kernel)[grid](
            styles, styles.stride(0), self.energies, self.table, gains, gains.stride(0), BN=ROWS, BK=512
        )
        return styles, gains

    def _blur(self, features: Features) -> Tensor:
        b, h, w, c = features.values.shape
        out = features.values.new_empty((b, h + 1, w + 1, c))
        blocks, tile = blur_tile(self.faces or b, h + 1, w + 1, c)
        grid = (*blocks, b)
        launch(blur_kernel)[grid](features.values, features.bias, out, h, w, c, RAW=features.raw, **tile)
        return out

    def _convolve(self, x: Tensor, weight: Tensor, *, stride: int, padding: int) -> Tensor:
        """A 3x3 convolution of channels-last maps; as one matrix product where they are tiny."""
        b, h, w, c = x.shape
        height, width = ((size + 2 * padding - 3) // stride + 1 for size in (h, w))
        if (self.faces or b) * height * width > TINY_MAP:
            return nhwc(F.conv2d(nchw(x), weight, stride=stride, padding=padding))
        samples = x.new_empty((b * height * width, 9 * c))
        bc = min(triton.next_power_of_2(c), 1024)
        launch(gather_kernel)[(b * height * width, 9, triton.cdiv(c, bc))](
            x, samples, h, w, width, height * width, c, STRIDE=stride, PAD=padding, BC=bc
        )
        # Channels-last weights are [O, 3, 3, I] in memory.
        return (samples @ nhwc(weight).reshape(len(weight), -1).T).view(b, height, width, -1)

    def _double(self, x: Tensor, weight: Tensor) -> Tensor:
        """The transposed convolution; as one matrix product where it is small: [B, h, w, I] -> [B, 2h+1, 2w+1, O]."""
        b, h, w, inputs = x.shape
        if (self.faces or b) * h * w > SMALL:
            return nhwc(F.conv_transpose2d(nchw(x), weight, stride=2))
        c = weight.shape[1]
        # Channels-last weights are [I, 3, 3, O] in memory.
        products = x.reshape(-1, inputs) @ nhwc(weight).reshape(inputs, -1)
        y = x.new_empty((b, 2 * h + 1, 2 * w + 1, c))
        bc = min(triton.next_power_of_2(c), 256)
        bp = 1024 // bc
        grid = (triton.cdiv((2 * h + 1) * (2 * w + 1), bp), triton.cdiv(c, bc), b)
        launch(scatter_kernel)[grid](products, y, h, w, 2 * h + 1, 2 * w + 1, c, BP=bp, BC=bc)
        return y

    def _up(self, x: Tensor, i: int, features: Features, styles: Tensor, gains: Tensor) -> Tensor:
        b, h, w, c = x.shape[0], x.shape[1] - 1, x.shape[2] - 1, x.shape[3]
        layer = affine(self.layers[2 * i - 1])
        out = x.new_empty((b, h, w, 2 * c))
        blocks, tile = up_tile(self.faces or b, h, w, c)
        grid = (*blocks, b)
        launch(up_kernel)[grid](
            x, out, h, w, c, gains[:, self.gains[2 * i - 1]], gains.stride(0), layer.bias,
            styles[:, self.slots[f"layers.{2 * i}"]], styles.stride(0),
            features.values, features.batch_stride, features.bias, layer.gain,
            RAW=features.raw, **tile
        )  # fmt: skip
        return out

    def _merge(
        self, x: Tensor, i: int, features: Features, styles: Tensor, gains: Tensor, skip: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        b, h, w, c = x.shape
        layer, to_rgb = affine(self.layers[2 * i]), affine(self.to_rgb[i])
        rgb = styles.new_empty((b, 3, h, w))
        last = 2 * i == len(self.layers) - 1
        # Of its own also where nothing is written: a compiler would copy what might be.
        out = x.new_empty(1 if last else (b, h, w, 2 * c))
        scale = styles if last else styles[:, self.slots[f"layers.{2 * i + 1}"]]
        blocks, tile = merge_tile(self.faces or b, h * w, c)
        grid = (*blocks, b)
        launch(merge_kernel)[grid](
            x, out, rgb, styles if skip is None else skip, h, w, c,
            gains[:, self.gains[2 * i]], gains.stride(0), layer.bias, scale, styles.stride(0),
            features.values, features.batch_stride, features.bias, layer.gain,
            to_rgb.weight, to_rgb.bias, styles[:, self.slots[f"to_rgb.{i}"]], styles.stride(0),
            RAW=features.raw, STORE=not last, SKIP=skip is not None, **tile
        )  # fmt: skip
        return out, rgb


def launch(kernel: Any) -> Any:
    """A kernel that is called with its grid, or recorded where the network is traced for a package."""
    return torch.library.wrap_triton(kernel) if torch.compiler.is_compiling() else kernel


def affine(layer: nn.Module) -> Affine:
    assert isinstance(layer, Affine)
    return layer


def linear(x: Tensor, layer: Affine, *, active: bool, norm: bool = False, before: Tensor | None = None) -> Tensor:
    """[B, K] -> [B, N] float32; before: bias of x by channel, after which x is activated."""
    outputs, width = layer.weight.shape
    y = layer.bias.new_empty((x.shape[0], outputs))
    bn, bk = (16, 256) if outputs > 4096 else (1, 2048) if width > 2048 else (4, 512)
    launch(linear_kernel)[(triton.cdiv(outputs, bn), x.shape[0])](
        x, x.stride(0), layer.bias if before is None else before, 1 if before is None else len(before),
        layer.weight, layer.bias, y, width, outputs,
        PRE=before is not None, NORM=norm, ACTIVE=active, BN=bn, BK=bk
    )  # fmt: skip
    return y


Tile = tuple[tuple[int, ...], dict[str, int]]
"""A kernel's grid for one face and its tile, as measured to be fast on an H200."""


def blur_tile(batch: int, height: int, width: int, channels: int) -> Tile:
    bc = min(triton.next_power_of_2(channels), 64)
    ty = 16 if batch * height * width * channels >= 1 << 24 else 4
    tx = 128 // bc
    grid = (triton.cdiv(width, 4 * tx) * triton.cdiv(channels, bc), triton.cdiv(height, ty))
    return grid, {"TY": ty, "TX": tx, "BC": bc, "num_warps": 1}


def up_tile(batch: int, height: int, width: int, channels: int) -> Tile:
    bc = min(triton.next_power_of_2(channels), 128)
    large = batch * height * width * channels >= 1 << 22
    tx, ty, unroll, warps = (1024 // bc, 8, 11, 4) if large else (256 // bc, 2, 5, 2)
    grid = (triton.cdiv(width, tx) * triton.cdiv(channels, bc), triton.cdiv(height, ty))
    return grid, {"TY": ty, "TX": tx, "BC": bc, "UNROLL": unroll, "num_warps": warps}


def merge_tile(batch: int, pixels: int, channels: int) -> Tile:
    bc = triton.next_power_of_2(channels)
    if bc <= 64:
        bp, warps = 4096 // bc, 2
    elif bc <= 128:
        bp, warps = 16, 4
    elif bc <= 256 or batch * pixels >= 16384:
        bp, warps = 8, 2
    else:
        bp, warps = (16, 4) if batch * pixels >= 4096 else (1, 4)
    return (triton.cdiv(pixels, bp),), {"BP": bp, "BC": bc, "num_warps": warps}


def nchw(x: Tensor) -> Tensor:
    return x.permute(0, 3, 1, 2)


def nhwc(x: Tensor) -> Tensor:
    """A convolution's output as channels-last, without a copy where cuDNN wrote it so."""
    return x.permute(0, 2, 3, 1).contiguous()
