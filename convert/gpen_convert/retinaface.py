"""RetinaFace (Deng et al., CVPR 2020), the detector that GPEN uses: legacy weights to ONNX.

Backbones: ResNet-50 (He et al., 2016, with the stride in the 3x3 convolution) and MobileNet v1 at a quarter of its
width (Howard et al., 2017, table 1). Keys are those of the common PyTorch layout (`body`, `fpn`, `ssh1`, `ClassHead`).
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

FAMILY = "retinaface"
SIGNATURE = ("ClassHead.0.conv1x1.weight", "BboxHead.0.conv1x1.weight", "LandmarkHead.0.conv1x1.weight")
ANCHORS = 2
LEVELS = 3
EXPANSION = 4
# Up to this width the pyramid is the small variant's, whose activations leak.
LEAKY_WIDTH, LEAK = 64, 0.1

Levels = tuple[Tensor, Tensor, Tensor]


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    """With a bias; out = ceil(in / stride)."""
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups)


def activate(x: Tensor, leak: float) -> Tensor:
    return F.leaky_relu(x, leak) if leak else F.relu(x)


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions added to a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = EXPANSION * width
        self.conv1 = conv(inputs, width, 1)
        self.conv2 = conv(width, width, 3, stride)
        self.conv3 = conv(width, outputs, 1)
        project = stride != 1 or inputs != outputs
        self.downsample = nn.Sequential(conv(inputs, outputs, 1, stride)) if project else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.conv1(x))
        y = F.relu(self.conv2(y))
        return F.relu(self.conv3(y) + self.downsample(x))


class ResNet(nn.Module):
    """[B, 3, H, W] to features at strides 8, 16 and 32."""

    def __init__(self, width: int, depths: tuple[int, ...]) -> None:
        super().__init__()
        self.name = f"ResNet-{2 + 3 * sum(depths)}"
        self.conv1 = conv(3, width, 7, 2)
        self.widths = tuple(EXPANSION * (width << level) for level in range(1, 4))
        self.layer1 = _bottlenecks(width, width, depths[0], 1)
        self.layer2 = _bottlenecks(EXPANSION * width, width << 1, depths[1], 2)
        self.layer3 = _bottlenecks(self.widths[0], width << 2, depths[2], 2)
        self.layer4 = _bottlenecks(self.widths[1], width << 3, depths[3], 2)

    def forward(self, x: Tensor) -> Levels:
        x = F.max_pool2d(F.relu(self.conv1(x)), 3, 2, padding=1)
        second = self.layer2(self.layer1(x))
        third = self.layer3(second)
        return second, third, self.layer4(third)


def _bottlenecks(inputs: int, width: int, depth: int, stride: int) -> nn.Sequential:
    first = Bottleneck(inputs, width, stride)
    return nn.Sequential(first, *(Bottleneck(EXPANSION * width, width, 1) for _ in range(depth - 1)))


class MobileNet(nn.Module):
    """[B, 3, H, W] to features at strides 8, 16 and 32. Each convolution is followed by a leaky ReLU of 0.1."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.name = f"MobileNet-{width / 32:g}"
        self.widths = (8 * width, 16 * width, 32 * width)
        stem = nn.Sequential(conv(3, width, 3, 2), nn.LeakyReLU(LEAK))
        self.stage1 = nn.Sequential(stem, *_separable(width, (1, 2, 4, 4, 8, 8)))
        self.stage2 = nn.Sequential(*_separable(width, (8, 16, 16, 16, 16, 16, 16)))
        self.stage3 = nn.Sequential(*_separable(width, (16, 32, 32)))

    def forward(self, x: Tensor) -> Levels:
        first = self.stage1(x)
        second = self.stage2(first)
        return first, second, self.stage3(second)


def _separable(width: int, multiples: tuple[int, ...]) -> list[nn.Sequential]:
    """Depthwise and pointwise convolutions; the size halves wherever the width doubles, save at the very first."""
    return [
        nn.Sequential(
            *(conv(width * a, width * a, 3, 2 if a < b and a > 1 else 1, groups=width * a), nn.LeakyReLU(LEAK)),
            *(conv(width * a, width * b, 1), nn.LeakyReLU(LEAK)),
        )
        for a, b in pairwise(multiples)
    ]


class Pyramid(nn.Module):
    """Three levels brought to one width, each added to the finer one below it."""

    def __init__(self, widths: tuple[int, ...], channels: int, leak: float) -> None:
        super().__init__()
        self.leak = leak
        self.output1, self.output2, self.output3 = (conv(width, channels, 1) for width in widths)
        self.merge1, self.merge2 = conv(channels, channels, 3), conv(channels, channels, 3)

    def forward(self, levels: Levels) -> Levels:
        fine, middle, coarse = (
            activate(project(level), self.leak)
            for project, level in zip((self.output1, self.output2, self.output3), levels, strict=True)
        )
        middle = activate(self.merge2(middle + _enlarge(coarse, middle)), self.leak)
        fine = activate(self.merge1(fine + _enlarge(middle, fine)), self.leak)
        return fine, middle, coarse


def _enlarge(x: Tensor, like: Tensor) -> Tensor:
    return F.interpolate(x, size=like.shape[-2:], mode="nearest")


class Context(nn.Module):
    """SSH (Najibi et al., 2017): 3x3, 5x5 and 7x7 contexts out of 3x3 convolutions, side by side."""

    def __init__(self, channels: int, leak: float) -> None:
        super().__init__()
        self.leak = leak
        half, quarter = channels // 2, channels // 4
        self.conv3X3 = conv(channels, half, 3)
        self.conv5X5_1 = conv(channels, quarter, 3)
        self.conv5X5_2 = conv(quarter, quarter, 3)
        self.conv7X7_2 = conv(quarter, quarter, 3)
        self.conv7x7_3 = conv(quarter, quarter, 3)

    def forward(self, x: Tensor) -> Tensor:
        shared = activate(self.conv5X5_1(x), self.leak)
        wide = self.conv7x7_3(activate(self.conv7X7_2(shared), self.leak))
        return F.relu(torch.cat([self.conv3X3(x), self.conv5X5_2(shared), wide], 1))


class RetinaFace(nn.Module):
    """[B, 3, H, W] float32, BGR 0..255 minus (104, 117, 123), any size -> raw predictions for each anchor.

    Returns loc [B, N, 4], conf [B, N, 2] (softmaxed; 1 is a face) and landms [B, N, 10] (x, y pairs); N counts, for
    strides 8, 16, 32, rows, then columns, then two anchors in ceil(H / stride) x ceil(W / stride) cells.
    """

    def __init__(self, body: ResNet | MobileNet, channels: int) -> None:
        super().__init__()
        leak = LEAK if channels <= LEAKY_WIDTH else 0.0
        self.body = body
        self.fpn = Pyramid(body.widths, channels, leak)
        self.ssh1, self.ssh2, self.ssh3 = (Context(channels, leak) for _ in range(LEVELS))
        self.BboxHead, self.ClassHead, self.LandmarkHead = (
            nn.ModuleList(conv(channels, ANCHORS * values, 1) for _ in range(LEVELS)) for values in (4, 2, 10)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        pyramid = self.fpn(self.body(x))
        features = [ssh(level) for ssh, level in zip((self.ssh1, self.ssh2, self.ssh3), pyramid, strict=True)]
        boxes = _predictions(self.BboxHead, features, 4)
        scores = _predictions(self.ClassHead, features, 2)
        return boxes, scores.softmax(-1), _predictions(self.LandmarkHead, features, 10)


def _predictions(heads: nn.ModuleList, features: list[Tensor], values: int) -> Tensor:
    maps = [head(feature).permute(0, 2, 3, 1) for head, feature in zip(heads, features, strict=True)]
    return torch.cat([each.flatten(1).unflatten(1, (-1, values)) for each in maps], 1)


def recognise(shapes: Shapes) -> bool:
    """Whether a flat state dict is a RetinaFace, whole or not."""
    return all(key in shapes for key in SIGNATURE)


def build(state: Mapping[str, Tensor]) -> RetinaFace:
    """The network from legacy tensors (prefixes removed), batch norms folded, float32, in evaluation mode.

    Raises CheckpointError if a tensor is missing, unknown, of a wrong shape or type, or not finite.
    """
    shapes = shapes_of(state)
    channels = size(shapes, "fpn.output1.0.weight", 0)
    anchors = size(shapes, SIGNATURE[0], 0) / 2
    if anchors != ANCHORS:
        raise CheckpointError(f"this RetinaFace has {anchors:g} anchors a cell; only {ANCHORS} are supported")
    if channels % 4:
        raise CheckpointError(f"fpn.output1.0.weight has {channels} channels, not a multiple of 4")
    with torch.device("meta"):
        net = RetinaFace(_infer_body(shapes), channels)
    load_folded(net, _find_source, state)
    return net


def convert(state: Mapping[str, Tensor], out_path: Path, provenance: Provenance) -> list[str]:
    """Write the detector as ONNX with free batch, height and width; `RetinaFace` describes input and outputs.

    Returns what was done, a line each. Raises CheckpointError if the tensors don't fit, or if onnxruntime and PyTorch
    disagree, and writes nothing then.
    """
    net = build(state)
    noise = torch.Generator().manual_seed(0)
    probes = [torch.rand(shape, generator=noise) * 255 - 117 for shape in ((1, 3, 96, 128), (2, 3, 75, 109))]
    anchors = {0: "batch", 1: "anchors"}
    difference = export(
        net,
        out_path,
        outputs={"loc": anchors, "conf": anchors, "landms": anchors},
        free={0: "batch", 2: "height", 3: "width"},
        probes=probes,
        metadata=properties(FAMILY, provenance),
    )
    return [
        f"RetinaFace detector, {net.body.name} backbone, any size",
        f"onnxruntime equals PyTorch to {difference:.0e} of the largest value, at 128x96 and 109x75",
    ]


def _infer_body(shapes: Shapes) -> ResNet | MobileNet:
    if "body.stage1.0.0.weight" in shapes:
        return MobileNet(size(shapes, "body.stage1.0.0.weight", 0))
    depths = tuple(count(shapes, rf"body\.layer{level}\.(\d+)\.conv1\.weight") for level in range(1, 5))
    if not all(depths):
        raise CheckpointError("its backbone is neither a ResNet with bottlenecks nor a MobileNet")
    return ResNet(size(shapes, "body.conv1.weight", 0), depths)


def _find_source(name: str) -> Source:
    """Where a convolution of ours comes from."""
    if "Head" in name:
        return Source(f"{name}.conv1x1")
    if name.startswith(("fpn.", "ssh")):
        return Source(f"{name}.0", f"{name}.1")
    stem, last = name.rsplit(".", 1)
    if last.startswith("conv"):
        return Source(name, f"{stem}.bn{last.removeprefix('conv')}")
    if stem.endswith("downsample"):
        return Source(name, f"{stem}.1")
    return _separable_source(name)


def _separable_source(name: str) -> Source:
    """A legacy unit is convolution, norm, activation, twice over; ours has no norm."""
    stem, last = name.rsplit(".", 1)
    position = int(last) // 2 * 3
    return Source(f"{stem}.{position}", f"{stem}.{position + 1}")
