"""A generator's configuration from the shapes of its legacy tensors, and what a foreign file is."""

from __future__ import annotations

import re

from gpen_convert.keymap import find_rule, legacy_shapes
from gpen_convert.shapes import Shapes, count, size
from gpen_core.checkpoint import describe_difference
from gpen_core.config import GeneratorConfig
from gpen_core.errors import CheckpointError

ANCHOR = "generator.input.input"

# What else people hand in, by keys that only it has.
FOREIGN = (
    ((r"final_conv\.\d", r"final_linear\.1\.weight"), "a GPEN discriminator, not a generator"),
    ((r"stylegan_decoder\.", r"conv_body_first\."), "a GFPGAN generator, not a GPEN one"),
    ((r"quantize\.embedding\.weight",), "a CodeFormer or VQGAN model, not a GPEN generator"),
    ((r"ClassHead\.0", r"BboxHead\.0"), "not a GPEN generator but a RetinaFace detector, parts of which are missing"),
    (
        (r"out_mask_conv\.", r"out_img_conv\."),
        "not a GPEN generator but a ParseNet face parser, parts of which are missing",
    ),
    (
        (r"conv_first\.weight", r"body\.0\.rdb1\."),
        "not a GPEN generator but an RRDBNet (ESRGAN) up-scaler, parts of which are missing",
    ),
    ((r"style\.1\.weight", r"convs\.0\.conv\.weight"), "a StyleGAN2 generator without GPEN's encoder"),
    ((r"vgg|conv1_1\.weight",), "a VGG-type network, not a GPEN generator"),
)


def prefixes_before(anchor: str, keys: list[str]) -> list[str]:
    """What stands before the legacy keys of each network in a state dict (`module.`, say; "" for none).

    anchor: a key that such a network has once.
    """
    return [key.removesuffix(anchor) for key in keys if key.endswith(anchor)]


def describe_foreign_keys(keys: list[str]) -> str:
    """One clause that says what a state dict without a GPEN generator is."""
    for patterns, description in FOREIGN:
        if all(any(re.search(r"(^|\.)" + pattern, key) for key in keys) for pattern in patterns):
            return description
    shown = ", ".join(keys[:3] + ["..."] * (len(keys) > 3))
    return f"no GPEN generator: {ANCHOR} is missing (it holds {len(keys)} tensors: {shown})"


def infer_config(shapes: Shapes) -> GeneratorConfig:
    """The configuration that follows from all shapes of a legacy generator.

    shapes: by legacy key, prefix removed. Raises CheckpointError if a tensor is missing, unknown or does not fit.
    """
    depth_in = count(shapes, r"ecd(\d+)\.0\.[01]\.weight")
    depth_out = count(shapes, r"generator\.to_rgbs\.(\d+)\.conv\.weight")
    n_mlp = count(shapes, r"generator\.style\.(\d+)\.weight", start=1)
    if depth_in < 2 or depth_out < 1 or n_mlp < 1:
        raise CheckpointError(f"incomplete: {depth_in} encoder, {depth_out} to-RGB and {n_mlp} mapping layers")
    decoder = [size(shapes, "generator.conv1.conv.weight", 1)]
    decoder += [size(shapes, f"generator.convs.{2 * i}.conv.weight", 1) for i in range(depth_out)]
    encoder = [size(shapes, f"ecd{i}.0.{1 if i else 0}.weight", 0) for i in range(depth_in)][::-1]
    config = GeneratorConfig(
        input_size=4 << (depth_in - 1),
        output_size=4 << depth_out,
        channels=tuple(decoder + encoder[len(decoder) :]),
        style_dim=size(shapes, "generator.style.1.weight", 0),
        n_mlp=n_mlp,
        concat=size(shapes, "generator.conv1.activate.bias", 0) == 2 * decoder[0],
    )
    parameters = {key: shape for key, shape in shapes.items() if not _is_filter(key)}
    expected = legacy_shapes(config)
    if parameters != expected:
        raise CheckpointError(describe_difference(expected, parameters))
    return config


def _is_filter(key: str) -> bool:
    found = find_rule(key)
    return found is not None and found[0].target is None
