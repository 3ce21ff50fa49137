"""RRDBNet, the background's up-scaler (ESRGAN, Wang et al., 2018; Real-ESRGAN, Wang et al., 2021), run in tiles."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor, nn

from gpen_core.checkpoint import FLOATS, describe_difference, describe_foreign, open_safetensors, read_start
from gpen_core.config import FORMAT_VERSION, METADATA_KEY, Provenance, require_version
from gpen_core.errors import CheckpointError, DeviceError, UsageError
from gpen_core.pixels import round_to
from gpen_core.types import Canvas

KIND = "upscaler"
ENLARGEMENT = 4
SCALES = (1, 2, 4)
SLOPE = 0.2
RESIDUAL = 0.2
# Cells that the four convolutions after the features reach: 1 and 1/2 after one doubling, 3 times 1/4 after two.
HEAD_REACH = 2
LARGEST = 1 << 12


@dataclass(frozen=True)
class UpscalerConfig:
    """The structure of an RRDBNet and how far its tiles must reach.

    scale: 1, 2 or 4. The network always enlarges its grid by 4; a grid cell is 4 / scale pixels of the picture wide.
    features, blocks, growth: width, number of residual blocks, channels that each convolution of a dense block adds.
    margin: grid cells that a tile must see beyond its core so that the result is that of the whole picture; at most
    `receptive_field`, where it is exact. Measured on the weights when they were converted.
    """

    scale: int
    features: int
    blocks: int
    growth: int
    margin: int

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= LARGEST:
                raise CheckpointError(f"{name} {value!r} of the up-scaler is not a whole number from 1 to {LARGEST}")
        if self.scale not in SCALES:
            raise CheckpointError(f"the up-scaler's scale is {self.scale}, not one of {SCALES}")

    @property
    def cell(self) -> int:
        """Pixels of the picture on a side of one grid cell."""
        return ENLARGEMENT // self.scale

    @property
    def receptive_field(self) -> int:
        """Cells around a cell that its features can depend on: one for each 3x3 convolution in a row."""
        return 15 * self.blocks + 2


class DenseBlock(nn.Module):
    """Five 3x3 convolutions, each reading all that was made before it; the last one is added, scaled by 0.2."""

    def __init__(self, features: int, growth: int) -> None:
        super().__init__()
        self.conv1, self.conv2, self.conv3, self.conv4 = (_conv(features + i * growth, growth) for i in range(4))
        self.conv5 = _conv(features + 4 * growth, features)

    def forward(self, x: Tensor) -> Tensor:
        made = x
        for conv in (self.conv1, self.conv2, self.conv3, self.conv4):
            made = torch.cat([made, _activate(conv(made))], 1)
        result: Tensor = x + RESIDUAL * self.conv5(made)
        return result


class ResidualBlock(nn.Module):
    """Three dense blocks in a row, added, scaled by 0.2."""

    def __init__(self, features: int, growth: int) -> None:
        super().__init__()
        self.rdb1, self.rdb2, self.rdb3 = (DenseBlock(features, growth) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + RESIDUAL * self.rdb3(self.rdb2(self.rdb1(x)))
        return result


class RRDBNet(nn.Module):
    """[B, 3, H, W] RGB in [0, 1], H and W multiples of `config.cell` -> [B, 3, scale * H, scale * W], not clamped."""

    def __init__(self, config: UpscalerConfig) -> None:
        super().__init__()
        self.config = config
        self.conv_first = _conv(3 * config.cell**2, config.features)
        self.body = nn.Sequential(*(ResidualBlock(config.features, config.growth) for _ in range(config.blocks)))
        self.conv_body = _conv(config.features, config.features)
        self.conv_up1 = _conv(config.features, config.features)
        self.conv_up2 = _conv(config.features, config.features)
        self.conv_hr = _conv(config.features, config.features)
        self.conv_last = _conv(config.features, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.paint(self.look(x))

    def look(self, x: Tensor) -> Tensor:
        """Features, one for each grid cell: nearly all of the work, and all of the far sight."""
        x = self.conv_first(F.pixel_unshuffle(x, self.config.cell))
        result: Tensor = x + self.conv_body(self.body(x))
        return result

    def paint(self, x: Tensor) -> Tensor:
        """4 x 4 pixels for each cell of features: nearly all of the memory."""
        for conv in (self.conv_up1, self.conv_up2):
            x = _activate(conv(F.interpolate(x, scale_factor=2.0, mode="nearest")))
        result: Tensor = self.conv_last(_activate(self.conv_hr(x)))
        return result


def _activate(x: Tensor) -> Tensor:
    """In place: the widest tensors set how much memory a tile takes."""
    return F.leaky_relu(x, SLOPE, inplace=True)


def _conv(inputs: int, outputs: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1)


def upscale(net: RRDBNet, picture: Canvas, scale: int | None = None, *, tile: int = 256) -> Canvas:
    """Enlarge a picture of any size by `scale`, in tiles.

    picture: H x W x 3 RGB, uint8 or uint16. scale: the network's own, or a divisor of it, reached by averaging
    pixels; the network's own by default. tile: side of the tiles in grid cells; memory grows with its square.
    Returns scale * H x scale * W x 3 of the same type, equal to the untiled result to the level for which the
    network's margin was measured. It runs where the network's parameters are, in their precision.
    Raises UsageError for a scale that the network can't give, DeviceError if the result is not finite.
    """
    config = net.config
    scale = config.scale if scale is None else scale
    if scale < 1 or config.scale % scale:
        raise UsageError(f"this up-scaler enlarges by {config.scale}, so it can't enlarge by {scale}")
    if tile < 1:
        raise UsageError(f"tiles of {tile} cells; at least 1 is needed")
    height, width = picture.shape[:2]
    padded = np.pad(picture, ((0, -height % config.cell), (0, -width % config.cell), (0, 0)), "edge")
    rows, columns = padded.shape[0] // config.cell, padded.shape[1] // config.cell
    pitch = config.cell * scale
    canvas = np.empty((rows * pitch, columns * pitch, 3), picture.dtype)
    with torch.inference_mode():
        for (top, bottom), (left, right) in product(_spans(rows, tile), _spans(columns, tile)):
            painted = _paint_tile(net, padded, (top, bottom), (left, right))
            averaged = F.avg_pool2d(painted.clamp(0, 1), config.scale // scale)
            canvas[top * pitch : bottom * pitch, left * pitch : right * pitch] = _pixels(averaged, picture.dtype)
    return np.ascontiguousarray(canvas[: height * scale, : width * scale])


Span = tuple[int, int]


def _spans(length: int, longest: int) -> Iterator[Span]:
    """Nearly equal pieces of at most `longest`."""
    pieces = -(-length // longest)
    return pairwise(length * i // pieces for i in range(pieces + 1))


def _widen(span: Span, by: int, length: int) -> Span:
    return max(span[0] - by, 0), min(span[1] + by, length)


def _paint_tile(net: RRDBNet, picture: Canvas, rows: Span, columns: Span) -> Tensor:
    """The result [1, 3, h, w] float32 for a block of cells that sees as far as it must."""
    cell, margin = net.config.cell, net.config.margin
    height, width = picture.shape[0] // cell, picture.shape[1] // cell
    (top, bottom), (left, right) = _widen(rows, margin, height), _widen(columns, margin, width)
    seen = picture[top * cell : bottom * cell, left * cell : right * cell]
    features = net.look(_values(seen, net.conv_first.weight))
    (upper, lower), (near, far) = _widen(rows, HEAD_REACH, height), _widen(columns, HEAD_REACH, width)
    painted = net.paint(features[..., upper - top : lower - top, near - left : far - left])
    y, x = ENLARGEMENT * (rows[0] - upper), ENLARGEMENT * (columns[0] - near)
    h, w = ENLARGEMENT * (rows[1] - rows[0]), ENLARGEMENT * (columns[1] - columns[0])
    core = painted[..., y : y + h, x : x + w].float()
    if not bool(core.isfinite().all()):
        precision = str(painted.dtype).removeprefix("torch.")
        raise DeviceError(f"the up-scaler's result is not finite in {precision}; try fp32")
    return core


def _values(picture: Canvas, like: Tensor) -> Tensor:
    """Integer pixels to [1, 3, H, W] in [0, 1]."""
    scaled = picture.astype(np.float32) / np.float32(np.iinfo(picture.dtype).max)
    return torch.from_numpy(scaled).to(like).permute(2, 0, 1)[None].contiguous()


def _pixels(values: Tensor, dtype: np.dtype[Any]) -> Canvas:
    """[1, 3, H, W] in [0, 1] to integer pixels."""
    array: NDArray[np.float32] = values[0].permute(1, 2, 0).cpu().numpy()
    return round_to(array * np.float32(np.iinfo(dtype).max), dtype)


def load_upscaler(path: str | Path) -> RRDBNet:
    """The up-scaler in a converted file, float32 on the CPU, in evaluation mode, without gradients.

    Raises CheckpointError naming the file if it is no converted up-scaler or its tensors don't fit.
    """
    path = Path(path)
    try:
        start = read_start(path)
        if start[8:9] != b"{":
            raise CheckpointError(describe_foreign(start))
        with open_safetensors(path) as opened:
            config, _ = decode(opened.metadata() or {})
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a mapping)
        return build_upscaler(config, tensors)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from None
    except SafetensorError as error:
        raise CheckpointError(f"{path}: not a whole safetensors file ({error})") from None
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


def build_upscaler(config: UpscalerConfig, tensors: Mapping[str, Tensor]) -> RRDBNet:
    """An up-scaler around given tensors, all or nothing. Raises CheckpointError."""
    with torch.device("meta"):
        net = RRDBNet(config)
    expected = {name: tuple(tensor.shape) for name, tensor in net.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if expected != found:
        raise CheckpointError(describe_difference(expected, found))
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOATS:
            raise CheckpointError(f"{name} is {tensor.dtype}, not floating point")
        if not bool(tensor.isfinite().all()):
            raise CheckpointError(f"{name} holds values that are not finite")
    net.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, strict=True, assign=True)
    return net.eval().requires_grad_(False)


def encode(config: UpscalerConfig, provenance: Provenance) -> dict[str, str]:
    """The metadata of a safetensors file: one JSON string."""
    content = {
        "format_version": FORMAT_VERSION,
        "kind": KIND,
        "config": asdict(config),
        "provenance": asdict(provenance),
    }
    return {METADATA_KEY: json.dumps(content, sort_keys=True)}


def describe_file(path: Path) -> list[str]:
    """What a converted up-scaler is and where it comes from, in lines for people. Raises CheckpointError."""
    try:
        with open_safetensors(path) as opened:
            config, origin = decode(opened.metadata() or {})
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    return [
        f"RRDBNet up-scaler x{config.scale}, {config.blocks} blocks, {config.features} features",
        f"tiles overlap by {config.margin * config.cell} px",
        f"source {origin.source_name}, sha256 {origin.source_sha256}, licence: {origin.licence}",
        f"kept {origin.kept or 'the whole file'}, converted by {origin.tool_version}",
    ]


def decode(metadata: Mapping[str, str]) -> tuple[UpscalerConfig, Provenance]:
    """What `encode` wrote. Raises CheckpointError if it is absent, malformed, too new or of something else."""
    if METADATA_KEY not in metadata:
        raise CheckpointError("no gpen-core metadata; convert the original with: gpen-core convert")
    try:
        content = json.loads(metadata[METADATA_KEY])
    except (ValueError, RecursionError):
        raise CheckpointError("the gpen-core metadata is not JSON") from None
    if not isinstance(content, dict):
        raise CheckpointError("the gpen-core metadata is not a JSON object")
    version, kind = content.get("format_version"), content.get("kind")
    config, provenance = content.get("config"), content.get("provenance")
    require_version(version, FORMAT_VERSION)
    if kind != KIND:
        raise CheckpointError(f"holds a {kind!r}, not an {KIND}")
    if not isinstance(config, dict) or set(config) != {field.name for field in fields(UpscalerConfig)}:
        raise CheckpointError("incomplete up-scaler configuration in the gpen-core metadata")
    if not isinstance(provenance, dict):
        raise CheckpointError("no provenance in the gpen-core metadata")
    return UpscalerConfig(**config), Provenance.from_dict(provenance)
