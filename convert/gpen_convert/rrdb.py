"""RRDBNet (ESRGAN, Real-ESRGAN, Real-ESRNet) up-scalers: legacy weights to a self-describing safetensors file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from gpen_convert.shapes import Shapes, count, shapes_of, size
from gpen_core.config import Provenance
from gpen_core.errors import CheckpointError
from gpen_core.files import replacing
from gpen_core.rrdb import ENLARGEMENT, RRDBNet, UpscalerConfig, build_upscaler, encode, load_upscaler

SIGNATURE = ("conv_first.weight", "body.0.rdb1.conv1.weight")
SCALE_OF_CHANNELS = {3: 4, 12: 2, 48: 1}
PROBE, CUT, STEP = 160, 32, 8
# Half a level of 255, so that a picture's rounded values differ by one level at most.
VISIBLE = 0.5 / 255


def recognise(shapes: Shapes) -> bool:
    """Whether a flat state dict is an RRDBNet, whole or not."""
    return all(key in shapes for key in SIGNATURE)


def infer_config(shapes: Shapes) -> UpscalerConfig:
    """Structure from shapes, with the margin that suits any weights: the receptive field.

    Raises CheckpointError if a shape that tells the structure is missing or strange.
    """
    channels = size(shapes, "conv_first.weight", 1)
    if channels not in SCALE_OF_CHANNELS:
        raise CheckpointError(f"conv_first.weight takes {channels} channels; an RRDBNet for RGB takes 3, 12 or 48")
    config = UpscalerConfig(
        scale=SCALE_OF_CHANNELS[channels],
        features=size(shapes, "conv_first.weight", 0),
        blocks=count(shapes, r"body\.(\d+)\.rdb1\.conv1\.weight"),
        growth=size(shapes, "body.0.rdb1.conv1.weight", 0),
        margin=1,
    )
    return replace(config, margin=config.receptive_field)


def build(state: Mapping[str, Tensor]) -> RRDBNet:
    """The network from legacy tensors (prefixes removed), float32, in evaluation mode, its margin not yet measured.

    Raises CheckpointError if a tensor is missing, unknown, of a wrong shape or type, or not finite.
    """
    floats = {key: tensor.float() if tensor.is_floating_point() else tensor for key, tensor in state.items()}
    return build_upscaler(infer_config(shapes_of(state)), floats)


def measure_margin(net: RRDBNet) -> int:
    """How many grid cells beyond a cut the result still shows that something was cut away there.

    The theoretical receptive field (347 cells for 23 blocks) is far more than what weights use. A test picture is run
    whole and cropped; where the two agree to half a level of 255 from some distance on, that distance, rounded up to a
    multiple of 8, is the margin. The receptive field if they never agree.
    """
    config = net.config
    picture = probe_picture(PROBE * config.cell)
    with torch.inference_mode():
        whole = net(picture)[..., CUT * ENLARGEMENT :, CUT * ENLARGEMENT :]
        cropped = net(picture[..., CUT * config.cell :, CUT * config.cell :])
        wrong = ((whole - cropped).abs() > VISIBLE).any(1)[0].nonzero()
    reach = 0 if len(wrong) == 0 else int(wrong.min(1).values.max()) // ENLARGEMENT + 1
    if reach > PROBE - CUT - STEP:
        return config.receptive_field
    return min(-(-max(reach, 1) // STEP) * STEP, config.receptive_field)


def probe_picture(side: int) -> Tensor:
    """[1, 3, side, side] in [0, 1]: spectrum 1/f as in photographs, with a band of hard stripes."""
    noise = np.random.RandomState(0).standard_normal((3, side, side))
    frequency = np.hypot(np.fft.fftfreq(side)[:, None], np.fft.fftfreq(side)[None])
    texture = np.fft.ifft2(np.fft.fft2(noise) / np.maximum(frequency, 1 / side)).real
    low, high = texture.min((1, 2), keepdims=True), texture.max((1, 2), keepdims=True)
    texture = (texture - low) / (high - low)
    band = slice(side // 3, side * 2 // 3)
    texture[:, band, ::8] = 1 - texture[:, band, ::8]
    return torch.from_numpy(texture[None].astype(np.float32))


def convert(state: Mapping[str, Tensor], out_path: Path, provenance: Provenance) -> list[str]:
    """Write the up-scaler as safetensors, for `gpen_core.rrdb.load_upscaler`.

    Returns what was done, a line each. Raises CheckpointError if the tensors don't fit, and writes nothing then.
    """
    net = build(state)
    config = replace(net.config, margin=measure_margin(net))
    tensors = {name: tensor.contiguous() for name, tensor in sorted(net.state_dict().items())}
    try:
        with replacing(out_path) as temporary:
            # Not `save_file`, which puts another file in the place of this one.
            temporary.write_bytes(save(tensors, encode(config, provenance)))
            stored = load_upscaler(temporary)
            if stored.config != config or any(not torch.equal(stored.state_dict()[n], t) for n, t in tensors.items()):
                raise CheckpointError(f"{out_path}: what was read back differs from what was written; nothing is kept")
    except OSError as error:
        raise CheckpointError(f"{out_path}: can't be written ({error.strerror or error})") from None
    return [
        f"RRDBNet up-scaler x{config.scale}, {config.blocks} blocks, {config.features} features",
        f"tiles overlap by {config.margin * config.cell} px, measured on these weights",
    ]
