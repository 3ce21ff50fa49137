"""The GPEN generator: a convolutional encoder whose features feed every level of a StyleGAN2 decoder.

Equations: GPEN (Yang et al., CVPR 2021) and StyleGAN2 (Karras et al., CVPR 2020). All constants of the equalised
layers, the mapping network's learning-rate multiplier and the activation gain are folded into the weights, so that
these are ordinary layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpen_core.config import GeneratorConfig
from gpen_core.errors import ImageError, UsageError
from gpen_core.ops import activate, blur, demodulation, kernel_energy, pixel_norm, upsample2


class StyledConv(nn.Module):
    """A modulated 3x3 convolution joined with features (or noise) of its resolution, then bias and activation."""

    energy: Tensor

    def __init__(self, inputs: int, outputs: int, *, up: bool, concat: bool) -> None:
        super().__init__()
        self.up, self.concat = up, concat
        # A transposed convolution keeps its input axis first.
        shape = (inputs, outputs) if up else (outputs, inputs)
        self.weight = nn.Parameter(torch.empty(*shape, 3, 3))
        self.feature_gain = nn.Parameter(torch.empty(1))
        self.bias = nn.Parameter(torch.empty(outputs * (2 if concat else 1)))
        self.register_buffer("energy", torch.empty(outputs, inputs), persistent=False)

    def derive(self) -> None:
        """Compute what follows from the weights."""
        weight = self.weight.detach()
        self.energy = kernel_energy(weight.transpose(0, 1) if self.up else weight)

    def gain(self, style: Tensor) -> Tensor:
        """Demodulation [B, O] float32 for a style [B, I] float32.

        It holds the activation's sqrt(2), which it would undo if that stood in the weights.
        """
        return math.sqrt(2) * demodulation(style, self.energy)

    def forward(self, x: Tensor, style: Tensor, gain: Tensor, features: Tensor) -> Tensor:
        """x [B, I, h, w], style [B, I], gain [B, O], features [B or 1, O, H, W] -> [B, 2 O or O, H, W]."""
        x = x * style.to(x.dtype)[:, :, None, None]
        gain = gain.to(x.dtype)[:, :, None, None]
        if self.up:
            x = blur(F.conv_transpose2d(x, self.weight, stride=2), pad=(1, 1), gain=4) * gain
        else:
            x = F.conv2d(x, self.weight, padding=1) * gain
        features = features.to(x.dtype) * self.feature_gain.to(x.dtype)
        if self.concat:
            x = torch.cat([x, features.expand(x.shape[0], -1, -1, -1)], 1)
        else:
            x = x + features
        return activate(x + self.bias.to(x.dtype)[:, None, None])


class ToRGB(nn.Module):
    """A modulated 1x1 convolution to three channels, without demodulation."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, inputs, 1, 1))
        self.bias = nn.Parameter(torch.empty(3))

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        """x [B, I, H, W], style [B, I] float32 -> [B, 3, H, W] float32."""
        rgb = F.conv2d(x * style.to(x.dtype)[:, :, None, None], self.weight)
        return rgb.float() + self.bias.float()[:, None, None]


class Generator(nn.Module):
    """Restores an aligned face. One tensor in, one tensor out, the same output for the same input."""

    def __init__(self, config: GeneratorConfig) -> None:
        super().__init__()
        self.config = config
        width, concat = config.width, config.concat
        descending = config.encoder_levels[::-1]
        self.encoder = nn.ModuleList([nn.Conv2d(3, width(config.input_size), 1)])
        self.encoder.extend(nn.Conv2d(width(r), width(r // 2), 3, stride=2) for r in descending[:-1])
        self.to_latent = nn.Linear(width(4) * 16, config.style_dim)
        self.mapping = nn.ModuleList(nn.Linear(config.style_dim, config.style_dim) for _ in range(config.n_mlp))
        self.slot_widths = [slot.width for slot in config.style_slots()]
        self.styles = nn.Linear(config.style_dim, sum(self.slot_widths))
        self.constant = nn.Parameter(torch.empty(1, width(4), 4, 4))
        self.layers = nn.ModuleList([StyledConv(width(4), width(4), up=False, concat=concat)])
        self.to_rgb = nn.ModuleList([ToRGB(config.layer_width(4))])
        for r in config.decoder_levels[1:]:
            entering, leaving = config.layer_width(r // 2), config.layer_width(r)
            self.layers.append(StyledConv(entering, width(r), up=True, concat=concat))
            self.layers.append(StyledConv(leaving, width(r), up=False, concat=concat))
            self.to_rgb.append(ToRGB(leaving))

    def derive(self) -> None:
        """Compute what follows from the weights; call it after they were set."""
        for layer in self.styled_layers():
            layer.derive()

    def styled_layers(self) -> list[StyledConv]:
        return [layer for layer in self.layers if isinstance(layer, StyledConv)]

    def noise(self, seed: int = 0) -> list[Tensor]:
        """Standard normal maps [1, C, r, r] float32 for the layers above the encoder's size (two a level), from a seed.

        Empty where input and output have the same size. One map serves a whole batch, so that a face's result
        does not depend on its neighbours.
        """
        if not self.config.noise_levels:
            return []
        generator = torch.Generator().manual_seed(seed)
        shapes = [(1, self.config.width(r), r, r) for r in self.config.noise_levels for _ in range(2)]
        return [torch.randn(shape, generator=generator).to(self.constant.device) for shape in shapes]

    def forward(self, image: Tensor, noise: Sequence[Tensor] | None = None) -> Tensor:
        """Restore a batch of aligned faces.

        image: [B, 3, S, S] RGB in `config.value_range`. noise: as `self.noise` gives it; by default that of seed 0.
        Returns [B, 3, T, T] float32 RGB, not clamped. Weights of a low precision make the convolutions run in it;
        latent, styles and demodulation stay float32. Raises ImageError for pictures of another shape.
        """
        features = self.encode(image)
        styles, gains = self.modulation(features[4])
        maps = list(self.noise() if noise is None else noise)
        if len(maps) != 2 * len(self.config.noise_levels):
            raise UsageError(f"{len(maps)} noise maps for {2 * len(self.config.noise_levels)} layers")
        x = self.constant.expand(image.shape[0], -1, -1, -1)
        x = self.layers[0](x, styles[0], gains[0], features[4])
        rgb: Tensor = self.to_rgb[0](x, styles[1])
        for i, r in enumerate(self.config.decoder_levels[1:], start=1):
            first, second = (features[r], features[r]) if r in features else (maps.pop(0), maps.pop(0))
            x = self.layers[2 * i - 1](x, styles[3 * i - 1], gains[2 * i - 1], first)
            x = self.layers[2 * i](x, styles[3 * i], gains[2 * i], second)
            rgb = self.to_rgb[i](x, styles[3 * i + 1]) + upsample2(rgb)
        return rgb

    def encode(self, image: Tensor) -> dict[int, Tensor]:
        """Features by resolution: f_S = act(conv1x1(image)), f_{r/2} = act(conv3x3(blur(f_r), stride 2))."""
        resolution = self.config.input_size
        if image.shape[1:] != (3, resolution, resolution):
            raise ImageError(f"expected [B, 3, {resolution}, {resolution}], got {list(image.shape)}")
        x = activate(self.encoder[0](image.to(self.constant.dtype)))
        features = {resolution: x}
        for convolution in self.encoder[1:]:
            x = activate(convolution(blur(x, pad=(2, 2))))
            resolution //= 2
            features[resolution] = x
        return features

    def modulation(self, deepest: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Styles in the order of `config.style_slots()` and gains in the order of the layers, all float32 [B, width].

        deepest: the 4x4 features [B, C, 4, 4]. Autocast stays out: 1e-8 is 0 and 256^2 infinite in float16.
        """
        with torch.autocast(deepest.device.type, enabled=False):
            z = activate(self.to_latent(deepest.float().flatten(1)))
            w = pixel_norm(z)
            for layer in self.mapping:
                w = activate(layer(w))
            styles = list(self.styles(w).split(self.slot_widths, 1))
            of_layers = [styles[0], *(s for i, s in enumerate(styles[2:]) if i % 3 != 2)]
            gains = [layer.gain(s) for layer, s in zip(self.styled_layers(), of_layers, strict=True)]
        return styles, gains
