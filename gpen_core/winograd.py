"""The generator in the form that a CPU runs fastest in float32 once compiled: the same function, fewer products.

A 3x3 convolution that keeps the size becomes a minimal filter F(4, 3) down the columns (Winograd 1980; Lavin and Gray,
CVPR 2016, section 4.1): six 1x3 convolutions of combined rows give four rows, for which the direct form needs twelve.
These layers hold 60 % of all products. Both dimensions at once would save more of them, but on large pictures they
wait for memory then, and float32 loses another digit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpen_core.model import Generator
from gpen_core.ops import activate, blur, upsample2

ROWS = 4
SMALLEST = 32
"""Below this resolution a convolution waits for its weights, of which this form has twice as many."""
# The kernel as a polynomial at 0, 1, -1, 2, -2 and infinity; the factors of the inverse are in here.
POINTS = (
    (1 / 4, 0, 0),
    (-1 / 6, -1 / 6, -1 / 6),
    (-1 / 6, 1 / 6, -1 / 6),
    (1 / 24, 1 / 12, 1 / 6),
    (1 / 24, -1 / 12, 1 / 6),
    (0, 0, 1),
)


def transform_kernel(weight: Tensor) -> Tensor:
    """[O, I, 3, 3] to [6, O, I, 1, 3], computed in float64."""
    points = torch.tensor(POINTS, dtype=torch.float64)
    return torch.einsum("pi, ocij -> pocj", points, weight.double()).to(weight.dtype)[:, :, :, None]


def transform_input(x: Tensor) -> list[Tensor]:
    """[B, C, H, W] to the six [B, C, H / 4, W] that the convolutions read, with zeros above and below."""
    x = F.pad(x, (0, 0, 1, 1))
    last = x.shape[2] - 6
    a, b, c, d, e, f = (x[:, :, i : last + i + 1 : ROWS] for i in range(6))
    return [
        4 * a - 5 * c + e,
        (e + d) - 4 * (c + b),
        (e - d) - 4 * (c - b),
        (e - c) + 2 * (d - b),
        (e - c) - 2 * (d - b),
        4 * b - 5 * d + f,
    ]


def transform_output(m: Sequence[Tensor]) -> Tensor:
    """The six results [B, C, H / 4, W] to [B, C, H, W]."""
    sums, differences = (m[1] + m[2], m[3] + m[4]), (m[1] - m[2], m[3] - m[4])
    rows = [
        m[0] + sums[0] + sums[1],
        differences[0] + 2 * differences[1],
        sums[0] + 4 * sums[1],
        differences[0] + 8 * differences[1] + m[5],
    ]
    batch, channels, count, width = m[0].shape
    return torch.stack(rows, 3).reshape(batch, channels, ROWS * count, width)


class DirectConv(nn.Module):
    """A 3x3 convolution, padding 1, of parts that stand beside each other in the channels."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, parts: Sequence[Tensor]) -> Tensor:
        return F.conv2d(torch.cat(list(parts), 1), self.weight, padding=1)


class WinogradConv(nn.Module):
    """The same for heights that 4 divides."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        kernels = transform_kernel(weight)
        self.kernels = nn.ParameterList(nn.Parameter(k.contiguous(), requires_grad=False) for k in kernels)

    def forward(self, parts: Sequence[Tensor]) -> Tensor:
        # Joined after their transformation, the parts themselves need not be written out.
        rows = zip(*(transform_input(part) for part in parts), strict=True)
        pairs = zip(rows, self.kernels, strict=True)
        return transform_output([F.conv2d(torch.cat(row, 1), kernel, padding=(0, 1)) for row, kernel in pairs])


class WinogradGenerator(nn.Module):
    """A `Generator` in this form. It shares the weights that it takes as they are.

    Its float32 results differ from the generator's by the order of rounding, about 1e-6 of the largest value.
    """

    def __init__(self, generator: Generator) -> None:
        super().__init__()
        self.generator = generator
        resolutions = [r for r in generator.config.decoder_levels for _ in range(2)][1:]
        self.convolutions = nn.ModuleList(
            nn.Identity() if layer.up else (WinogradConv if r >= SMALLEST else DirectConv)(layer.weight.detach())
            for layer, r in zip(generator.styled_layers(), resolutions, strict=True)
        )

    def forward(self, image: Tensor, noise: Sequence[Tensor]) -> Tensor:
        """image [B, 3, S, S] and noise as `Generator.forward` takes them; returns [B, 3, T, T] float32."""
        network = self.generator
        features = network.encode(image)
        styles, gains = network.modulation(features[4])
        maps = list(noise)
        parts = [network.constant.expand(image.shape[0], -1, -1, -1)]
        parts = self._layer(0, parts, styles[0], gains[0], features[4])
        rgb: Tensor = network.to_rgb[0](torch.cat(parts, 1), styles[1])
        for i, r in enumerate(network.config.decoder_levels[1:], start=1):
            first, second = (features[r], features[r]) if r in features else (maps.pop(0), maps.pop(0))
            parts = self._layer(2 * i - 1, parts, styles[3 * i - 1], gains[2 * i - 1], first)
            parts = self._layer(2 * i, parts, styles[3 * i], gains[2 * i], second)
            rgb = network.to_rgb[i](torch.cat(parts, 1), styles[3 * i + 1]) + upsample2(rgb)
        return rgb

    def _layer(self, index: int, parts: list[Tensor], style: Tensor, gain: Tensor, features: Tensor) -> list[Tensor]:
        """`StyledConv.forward` with input and output in parts."""
        layer = self.generator.styled_layers()[index]
        factors = style[:, :, None, None].split([part.shape[1] for part in parts], 1)
        parts = [part * factor for part, factor in zip(parts, factors, strict=True)]
        gain = gain[:, :, None, None]
        if layer.up:
            x = blur(F.conv_transpose2d(torch.cat(parts, 1), layer.weight, stride=2), pad=(1, 1), gain=4) * gain
        else:
            x = self.convolutions[index](parts) * gain
        features = features * layer.feature_gain
        joined = [x, features.expand(x.shape[0], -1, -1, -1)] if layer.concat else [x + features]
        biases = layer.bias[:, None, None].split(x.shape[1])
        return [activate(part + bias) for part, bias in zip(joined, biases, strict=True)]
