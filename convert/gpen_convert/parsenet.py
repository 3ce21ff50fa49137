"""ParseNet, the 19-class face parser behind GPEN's paste mask: legacy weights to ONNX.

A residual encoder-decoder with reflection padding and batch norms; keys are those of the common PyTorch layout
(`encoder.0.conv2d`, `body.0.conv1.norm.norm`, `out_mask_conv.conv2d`).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpen_convert.folding import Source, load_folded
from gpen_convert.shapes import Shapes, count, shapes_of, size
from gpen_convert.to_onnx import export, properties
from gpen_core.config import Provenance
from gpen_core.errors import CheckpointError

FAMILY = "parsenet"
SIGNATURE = ("out_mask_conv.conv2d.weight", "encoder.0.conv2d.weight")
INPUT_SIZE = 512
CLASSES = 19
SLOPE = 0.2


class ConvLayer(nn.Module):
    """3x3 convolution with reflected borders, that may double the size before it or halve it."""

    def __init__(self, inputs: int, outputs: int, scale: float = 1) -> None:
        super().__init__()
        self.enlarge = scale > 1
        self.conv2d = nn.Conv2d(inputs, outputs, 3, stride=2 if scale < 1 else 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.enlarge:
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
        result: Tensor = self.conv2d(F.pad(x, (1, 1, 1, 1), mode="reflect"))
        return result


class ResidualBlock(nn.Module):
    """Two convolution layers beside a shortcut: up-scaling in the first of them, down-scaling in the second."""

    def __init__(self, inputs: int, outputs: int, scale: float = 1) -> None:
        super().__init__()
        self.conv1 = ConvLayer(inputs, outputs, max(scale, 1))
        self.conv2 = ConvLayer(outputs, outputs, min(scale, 1))
        changes = scale != 1 or inputs != outputs
        self.shortcut_func = ConvLayer(inputs, outputs, scale) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.conv2(F.leaky_relu(self.conv1(x), SLOPE)) + self.shortcut_func(x)
        return result


class ParseNet(nn.Module):
    """[B, 3, S, S] RGB in [-1, 1] -> class logits [B, 19, S, S]; published weights were trained at S = 512.

    widths: channels of the encoder at full, half, ... size, which the decoder mirrors. depth: blocks at the smallest.
    """

    def __init__(self, widths: tuple[int, ...], depth: int) -> None:
        super().__init__()
        down = [ResidualBlock(inputs, outputs, 0.5) for inputs, outputs in pairwise(widths)]
        up = [ResidualBlock(inputs, outputs, 2) for inputs, outputs in pairwise(widths[::-1])]
        self.encoder = nn.Sequential(ConvLayer(3, widths[0]), *down)
        self.body = nn.Sequential(*(ResidualBlock(widths[-1], widths[-1]) for _ in range(depth)))
        self.decoder = nn.Sequential(*up)
        self.out_mask_conv = ConvLayer(widths[0], CLASSES)
        # A second head of every file, which paints a picture that nobody uses; here so that it is checked.
        self.out_img_conv = ConvLayer(widths[0], 3)

    def forward(self, x: Tensor) -> Tensor:
        encoded = self.encoder(x)
        result: Tensor = self.out_mask_conv(self.decoder(encoded + self.body(encoded)))
        return result


def recognise(shapes: Shapes) -> bool:
    """Whether a flat state dict is a ParseNet, whole or not."""
    return all(key in shapes for key in SIGNATURE)


def build(state: Mapping[str, Tensor]) -> ParseNet:
    """The network from legacy tensors (prefixes removed), batch norms folded, float32, in evaluation mode.

    Raises CheckpointError if a tensor is missing, unknown, of a wrong shape or type, or not finite.
    """
    shapes = shapes_of(state)
    classes = size(shapes, SIGNATURE[0], 0)
    if classes != CLASSES:
        raise CheckpointError(f"this ParseNet tells {classes} classes apart; the mask is defined for {CLASSES}")
    blocks = count(shapes, r"encoder\.(\d+)\..*") - 1
    widths = [size(shapes, "encoder.0.conv2d.weight", 0)]
    widths += [size(shapes, f"encoder.{i + 1}.conv1.conv2d.weight", 0) for i in range(blocks)]
    with torch.device("meta"):
        net = ParseNet(tuple(widths), count(shapes, r"body\.(\d+)\..*"))
    load_folded(net, _find_source, state)
    return net


def convert(state: Mapping[str, Tensor], out_path: Path, provenance: Provenance) -> list[str]:
    """Write the parser as ONNX, [B, 3, 512, 512] to `logits` with a free batch; `ParseNet` describes both.

    Returns what was done, a line each. Raises CheckpointError if the tensors don't fit, or if onnxruntime and PyTorch
    disagree, and writes nothing then.
    """
    net = build(state)
    noise = torch.Generator().manual_seed(0)
    probes = [torch.rand((batch, 3, INPUT_SIZE, INPUT_SIZE), generator=noise) * 2 - 1 for batch in (1, 2)]
    difference = export(
        net,
        out_path,
        outputs={"logits": {0: "batch"}},
        free={0: "batch"},
        probes=probes,
        metadata=properties(FAMILY, provenance),
    )
    return [
        f"ParseNet face parser, {CLASSES} classes, {INPUT_SIZE} px",
        f"onnxruntime equals PyTorch to {difference:.0e} of the largest value, at batches of 1 and 2",
    ]


def _find_source(name: str) -> Source:
    """Where a convolution of ours comes from: only those on a block's main path have a norm."""
    layer = name.removesuffix(".conv2d")
    if layer.endswith((".conv1", ".conv2")):
        return Source(name, f"{layer}.norm.norm")
    return Source(name)
