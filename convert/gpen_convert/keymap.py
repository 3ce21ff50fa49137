"""The table that leads from legacy keys to ours, and what is folded on the way.

Every legacy key matches exactly one rule. `{i}` stands for a number. Equalised layers use their stored weight
as W / sqrt(fan_in) (Karras et al., "Progressive Growing of GANs", section 4.1); activations have a gain of sqrt(2)
(StyleGAN2), which leaky ReLU lets through.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gpen_convert.precision import rounded
from gpen_core.config import GeneratorConfig
from gpen_core.errors import CheckpointError

ACTIVATION_GAIN = math.sqrt(2)
MAPPING_LR_MUL = 0.01
TAPS = (1.0, 3.0, 3.0, 1.0)

Fold = Callable[[Tensor], Tensor]


def _fan_in(weight: Tensor) -> int:
    """[..., O, I, k, k] or [O, I]."""
    return math.prod(weight.shape[-3:]) if weight.dim() > 2 else weight.shape[-1]


def equalised(weight: Tensor) -> Tensor:
    return weight / math.sqrt(_fan_in(weight))


def equalised_active(weight: Tensor) -> Tensor:
    return equalised(weight) * ACTIVATION_GAIN


def active(value: Tensor) -> Tensor:
    return value * ACTIVATION_GAIN


def mapping_weight(weight: Tensor) -> Tensor:
    return equalised_active(weight) * MAPPING_LR_MUL


def mapping_bias(bias: Tensor) -> Tensor:
    return active(bias) * MAPPING_LR_MUL


def modulated(weight: Tensor) -> Tensor:
    """[1, O, I, k, k] -> [O, I, k, k]."""
    return equalised(weight)[0]


def modulated_up(weight: Tensor) -> Tensor:
    """[1, O, I, k, k] -> [I, O, k, k], as a transposed convolution stores it."""
    return equalised(weight)[0].transpose(0, 1)


def flat(value: Tensor) -> Tensor:
    return value.reshape(-1)


def same(value: Tensor) -> Tensor:
    return value


@dataclass(frozen=True)
class Rule:
    """`legacy` key pattern -> `target` name pattern.

    `fold` turns the stored value into ours. A target of None means that the value is checked against `fir_gain`
    times the filter and dropped. `shift` is added to the number in the target.
    """

    legacy: str
    target: str | None
    fold: Fold = same
    shift: int = 0
    fir_gain: float = 0.0

    def match(self, key: str) -> int | None:
        """The number in the key (0 where the pattern has none), or None."""
        found = re.fullmatch(re.escape(self.legacy).replace(r"\{i\}", r"(0|[1-9]\d*)"), key)
        if found is None:
            return None
        return int(found.group(1)) if found.groups() else 0

    def name(self, number: int) -> str | None:
        return self.target and self.target.replace("{i}", str(number + self.shift))


# The first rule that matches counts. `styles.*` targets are joined into one product in the order of the style slots.
RULES: tuple[Rule, ...] = (
    Rule("ecd0.0.0.weight", "encoder.0.weight", equalised_active),
    Rule("ecd0.0.1.bias", "encoder.0.bias", active),
    Rule("ecd{i}.0.0.kernel", None, fir_gain=1.0),
    Rule("ecd{i}.0.1.weight", "encoder.{i}.weight", equalised_active),
    Rule("ecd{i}.0.2.bias", "encoder.{i}.bias", active),
    Rule("final_linear.0.weight", "to_latent.weight", equalised_active),
    Rule("final_linear.0.bias", "to_latent.bias", active),
    Rule("generator.style.{i}.weight", "mapping.{i}.weight", mapping_weight, shift=-1),
    Rule("generator.style.{i}.bias", "mapping.{i}.bias", mapping_bias, shift=-1),
    Rule("generator.input.input", "constant"),
    Rule("generator.conv1.conv.weight", "layers.0.weight", modulated),
    Rule("generator.conv1.conv.modulation.weight", "styles.weight/layers.0", equalised),
    Rule("generator.conv1.conv.modulation.bias", "styles.bias/layers.0"),
    Rule("generator.conv1.noise.weight", "layers.0.feature_gain", active),
    Rule("generator.conv1.activate.bias", "layers.0.bias", active),
    Rule("generator.convs.{i}.conv.weight", "layers.{i}.weight", modulated, shift=1),
    Rule("generator.convs.{i}.conv.blur.kernel", None, fir_gain=4.0),
    Rule("generator.convs.{i}.conv.modulation.weight", "styles.weight/layers.{i}", equalised, shift=1),
    Rule("generator.convs.{i}.conv.modulation.bias", "styles.bias/layers.{i}", shift=1),
    Rule("generator.convs.{i}.noise.weight", "layers.{i}.feature_gain", active, shift=1),
    Rule("generator.convs.{i}.activate.bias", "layers.{i}.bias", active, shift=1),
    Rule("generator.to_rgb1.conv.weight", "to_rgb.0.weight", modulated),
    Rule("generator.to_rgb1.conv.modulation.weight", "styles.weight/to_rgb.0", equalised),
    Rule("generator.to_rgb1.conv.modulation.bias", "styles.bias/to_rgb.0"),
    Rule("generator.to_rgb1.bias", "to_rgb.0.bias", flat),
    Rule("generator.to_rgbs.{i}.conv.weight", "to_rgb.{i}.weight", modulated, shift=1),
    Rule("generator.to_rgbs.{i}.conv.modulation.weight", "styles.weight/to_rgb.{i}", equalised, shift=1),
    Rule("generator.to_rgbs.{i}.conv.modulation.bias", "styles.bias/to_rgb.{i}", shift=1),
    Rule("generator.to_rgbs.{i}.bias", "to_rgb.{i}.bias", flat, shift=1),
    Rule("generator.to_rgbs.{i}.upsample.kernel", None, fir_gain=4.0),
)


def find_rule(key: str) -> tuple[Rule, int] | None:
    """The rule for a legacy key and the number in the key."""
    for rule in RULES:
        number = rule.match(key)
        if number is not None:
            return rule, number
    return None


def legacy_shapes(config: GeneratorConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter of the legacy layout (no filter buffers) and its shape, for a configuration."""
    return dict(_legacy_shapes(config))


def _legacy_shapes(config: GeneratorConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    descending = config.encoder_levels[::-1]
    yield "ecd0.0.0.weight", (config.width(descending[0]), 3, 1, 1)
    yield "ecd0.0.1.bias", (config.width(descending[0]),)
    for i, r in enumerate(descending[1:], start=1):
        yield f"ecd{i}.0.1.weight", (config.width(r), config.width(2 * r), 3, 3)
        yield f"ecd{i}.0.2.bias", (config.width(r),)
    dim = config.style_dim
    yield "final_linear.0.weight", (dim, config.width(4) * 16)
    yield "final_linear.0.bias", (dim,)
    for i in range(1, config.n_mlp + 1):
        yield f"generator.style.{i}.weight", (dim, dim)
        yield f"generator.style.{i}.bias", (dim,)
    yield "generator.input.input", (1, config.width(4), 4, 4)
    yield from _styled_conv("generator.conv1", config.width(4), config.width(4), config)
    yield from _to_rgb("generator.to_rgb1", config.layer_width(4), dim)
    for i, r in enumerate(config.decoder_levels[1:]):
        entering, leaving = config.layer_width(r // 2), config.layer_width(r)
        yield from _styled_conv(f"generator.convs.{2 * i}", entering, config.width(r), config)
        yield from _styled_conv(f"generator.convs.{2 * i + 1}", leaving, config.width(r), config)
        yield from _to_rgb(f"generator.to_rgbs.{i}", leaving, dim)


def _styled_conv(
    prefix: str, inputs: int, outputs: int, config: GeneratorConfig
) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}.conv.weight", (1, outputs, inputs, 3, 3)
    yield f"{prefix}.conv.modulation.weight", (inputs, config.style_dim)
    yield f"{prefix}.conv.modulation.bias", (inputs,)
    yield f"{prefix}.noise.weight", (1,)
    yield f"{prefix}.activate.bias", (outputs * (2 if config.concat else 1),)


def _to_rgb(prefix: str, inputs: int, style_dim: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}.conv.weight", (1, 3, inputs, 1, 1)
    yield f"{prefix}.conv.modulation.weight", (inputs, style_dim)
    yield f"{prefix}.conv.modulation.bias", (inputs,)
    yield f"{prefix}.bias", (1, 3, 1, 1)


def fold(config: GeneratorConfig, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Our tensors from legacy ones, whose names and shapes were checked against `legacy_shapes`.

    Computed in float64 and rounded once. Raises CheckpointError for a filter of other taps and for values that
    `dtype` can't hold, being too large or too small.
    """
    parts: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        found = find_rule(key)
        if found is None:
            raise CheckpointError(f"no rule for {key}")
        rule, number = found
        name = rule.name(number)
        if name is None:
            _check_filter(key, tensor, rule.fir_gain)
            continue
        # Every even entry of `convs` doubles the size.
        doubles = rule.legacy == "generator.convs.{i}.conv.weight" and number % 2 == 0
        parts[name] = (modulated_up if doubles else rule.fold)(tensor.double())
    for kind in ("weight", "bias"):
        slots = [parts.pop(f"styles.{kind}/{slot.layer}") for slot in config.style_slots()]
        parts[f"styles.{kind}"] = torch.cat(slots)
    return rounded(parts, dtype)


def _check_filter(key: str, kernel: Tensor, gain: float) -> None:
    taps = torch.tensor(TAPS, dtype=torch.float64)
    expected = torch.outer(taps, taps) * (gain / 64)
    if kernel.shape != expected.shape or not torch.allclose(kernel.double(), expected, rtol=1e-3, atol=0):
        raise CheckpointError(f"{key} is not the filter [1, 3, 3, 1] that GPEN uses, so this is another network")
