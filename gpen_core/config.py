"""What a generator is: its sizes, widths, value range, crop template and task, frozen and validated."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol

from gpen_core.errors import CheckpointError, UsageError

Template = tuple[tuple[float, float], ...]

# Left eye, right eye, nose, left and right mouth corner as fractions of the crop.
GPEN_TEMPLATE: Template = (
    (0.394610711, 0.474382741),
    (0.604355948, 0.473222619),
    (0.500149999, 0.593670255),
    (0.413983935, 0.716461318),
    (0.587677978, 0.715500605),
)
# The five points of FFHQ faces at 512 px (1024 px, halved) that facexlib, GFPGAN and CodeFormer crop to; from
# facexlib's `FaceRestoreHelper.face_template`, MIT, explained in xinntao/facexlib#14.
FFHQ_TEMPLATE: Template = (
    (192.98138 / 512, 239.94708 / 512),
    (318.90277 / 512, 240.1936 / 512),
    (256.63416 / 512, 314.01935 / 512),
    (201.26117 / 512, 371.41043 / 512),
    (313.08905 / 512, 371.15118 / 512),
)
# ArcFace's five points at 112 px (Deng et al., CVPR 2019; insightface's `arcface_dst`, MIT) in a crop of 128 px that
# has 8 more pixels on the left and on the right and 16 more below, as insightface and face swappers make it.
ARCFACE_128_TEMPLATE: Template = (
    ((38.2946 + 8) / 128, 51.6963 / 128),
    ((73.5318 + 8) / 128, 51.5014 / 128),
    ((56.0252 + 8) / 128, 71.7366 / 128),
    ((41.5493 + 8) / 128, 92.3655 / 128),
    ((70.7299 + 8) / 128, 92.2041 / 128),
)
TEMPLATES = {"gpen": GPEN_TEMPLATE, "ffhq": FFHQ_TEMPLATE, "arcface128": ARCFACE_128_TEMPLATE}
TASKS = ("restoration", "colorization", "inpainting", "seg2face")
VERBS = {"restoration": "enhance", "colorization": "colorize", "inpainting": "inpaint", "seg2face": "seg2face"}
VALUE_RANGES = {task: (0.0, 1.0) if task == "seg2face" else (-1.0, 1.0) for task in TASKS}
SMALLEST, LARGEST = 4, 8192
METADATA_KEY = "gpen_core"
EMPTY = " (empty)"
FORMAT_VERSION = 1


def levels(size: int) -> tuple[int, ...]:
    """Resolutions 4, 8, ..., size."""
    return tuple(SMALLEST << i for i in range(int(math.log2(size // SMALLEST)) + 1))


class PictureFormat(Protocol):
    """How pictures enter and leave a network: all that must be known to run one without looking inside."""

    @property
    def input_size(self) -> int:
        """Side S of the square input in pixels."""
        ...

    @property
    def output_size(self) -> int:
        """Side T of the square output in pixels."""
        ...

    @property
    def value_range(self) -> tuple[float, float]:
        """Values of a black and of a white pixel."""
        ...

    @property
    def template(self) -> Template:
        """Five landmark positions as fractions of the crop (x, y)."""
        ...

    @property
    def task(self) -> str:
        """One of `TASKS`."""
        ...


@dataclass(frozen=True)
class InferredFormat:
    """The format of a network that does not describe itself: sizes as found, the rest as GPEN was published."""

    input_size: int
    output_size: int
    value_range: tuple[float, float] = (-1.0, 1.0)
    template: Template = GPEN_TEMPLATE
    task: str = "restoration"


def require_task(pictures: PictureFormat, task: str) -> None:
    """Raises UsageError, naming the right command, if a network was trained for something else."""
    found = pictures.task
    if found != task:
        raise UsageError(
            f"these weights are for {found}, not {task}: use gpen-core {VERBS[found]} (in Python: task={found!r} of "
            f"Restorer, and gpen_core.tasks), or other --weights; "
            f"if their file is wrong about that, convert the original again: gpen-core convert --task {task}"
        )


def template_named(name: str) -> Template:
    """The crop template called "gpen", "ffhq" or "arcface128". Raises UsageError for another name."""
    if name not in TEMPLATES:
        raise UsageError(f"--template {name}: use {', '.join(TEMPLATES)}")
    return TEMPLATES[name]


def template_name(template: Template) -> str:
    """What a template is called, or "its own"."""
    return next((name for name, points in TEMPLATES.items() if points == template), "its own")


@dataclass(frozen=True)
class StyleSlot:
    """The part of the style vector that one layer reads: `width` values, one for each input channel."""

    layer: str
    width: int


@dataclass(frozen=True)
class GeneratorConfig:
    """The structure of a GPEN generator and how pictures enter and leave it.

    input_size, output_size: side S of the input and T of the output in pixels, powers of two from 8 to 8192.
    channels: convolution widths at 4, 8, ..., max(S, T) pixels, shared by the encoder and the decoder.
    style_dim, n_mlp: width and depth of the mapping network.
    concat: features are concatenated to a layer's output (published GPEN), not added to it.
    value_range: values of a black and of a white pixel.
    template: five landmark positions as fractions of the crop (x, y).
    task: one of `TASKS`.
    """

    input_size: int
    output_size: int
    channels: tuple[int, ...]
    style_dim: int
    n_mlp: int
    concat: bool = True
    value_range: tuple[float, float] = (-1.0, 1.0)
    template: Template = GPEN_TEMPLATE
    task: str = "restoration"

    def __post_init__(self) -> None:
        for name in ("input_size", "output_size"):
            size = getattr(self, name)
            _require(isinstance(size, int) and not isinstance(size, bool), f"{name} {size!r} is not a whole number")
            _require(2 * SMALLEST <= size <= LARGEST, f"{name} {size} is outside {2 * SMALLEST}..{LARGEST}")
            _require(size & (size - 1) == 0, f"{name} {size!r} is not a power of two")
        expected = len(levels(max(self.input_size, self.output_size)))
        _require(len(self.channels) == expected, f"{len(self.channels)} widths for {expected} resolutions")
        for width in (*self.channels, self.style_dim):
            _require(_is_count(width), f"width {width!r} is not a positive whole number")
        _require(_is_count(self.n_mlp), f"n_mlp {self.n_mlp!r} is not a positive whole number")
        _require(isinstance(self.concat, bool), f"concat {self.concat!r} is not true or false")
        black, white = _numbers(self.value_range, 2, "value_range")
        _require(black < white, f"value_range {self.value_range} is not ascending")
        _require(len(self.template) == 5, f"the template has {len(self.template)} points instead of 5")
        for point in self.template:
            x, y = _numbers(point, 2, "template point")
            _require(min(x, y) >= -4 and max(x, y) <= 5, f"template point {point} lies far outside the crop")
        spans = [max(values) - min(values) for values in zip(*self.template, strict=True)]
        _require(min(spans) > 0.01, "the template's points lie on top of each other")
        _require(self.task in TASKS, f"task {self.task!r} is none of {', '.join(TASKS)}")

    @property
    def encoder_levels(self) -> tuple[int, ...]:
        return levels(self.input_size)

    @property
    def decoder_levels(self) -> tuple[int, ...]:
        return levels(self.output_size)

    @property
    def noise_levels(self) -> tuple[int, ...]:
        """Decoder resolutions above the encoder's: their layers take noise in the place of features."""
        return tuple(r for r in self.decoder_levels if r > self.input_size)

    def width(self, resolution: int) -> int:
        """Convolution width at a resolution."""
        return self.channels[int(math.log2(resolution // SMALLEST))]

    def layer_width(self, resolution: int) -> int:
        """Channels that leave a styled layer at a resolution."""
        return self.width(resolution) * (2 if self.concat else 1)

    def style_slots(self) -> tuple[StyleSlot, ...]:
        """Order of all layers' styles in the one style vector."""
        first = [
            StyleSlot("layers.0", self.width(SMALLEST)),
            StyleSlot("to_rgb.0", self.layer_width(SMALLEST)),
        ]
        for i, resolution in enumerate(self.decoder_levels[1:], start=1):
            entering, leaving = self.layer_width(resolution // 2), self.layer_width(resolution)
            first += [
                StyleSlot(f"layers.{2 * i - 1}", entering),
                StyleSlot(f"layers.{2 * i}", leaving),
                StyleSlot(f"to_rgb.{i}", leaving),
            ]
        return tuple(first)

    @property
    def narrow(self) -> float:
        """GPEN's `narrow`: width at 4 pixels over 512."""
        return self.channels[0] / 512

    @property
    def channel_multiplier(self) -> float | None:
        """GPEN's `channel_multiplier`, from the 64-pixel level; None where there is none."""
        if max(self.input_size, self.output_size) < 64:
            return None
        multiplier = self.width(64) / (256 * self.narrow)
        # Widths are truncated to whole numbers, so an integer multiplier can come out a little low.
        nearest = round(multiplier)
        if nearest and int(256 * nearest * self.narrow) == self.width(64):
            return nearest
        return multiplier

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> GeneratorConfig:
        """Raises CheckpointError if a value is missing, unknown or out of range."""
        names = {f.name for f in fields(cls)}
        _require(set(values) <= names, f"unknown settings {', '.join(sorted(set(values) - names))}")
        try:
            known = {
                **values,
                "channels": tuple(values["channels"]),
                "value_range": tuple(values["value_range"]),
                "template": tuple(tuple(point) for point in values["template"]),
            }
            return cls(**known)
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"incomplete generator configuration ({error})") from None


@dataclass(frozen=True)
class Provenance:
    """Where converted weights come from.

    source_name, source_sha256: of the original file. kept: the state dict that was taken ("" for a flat file).
    others: further generators in it. dropped: everything else in it; a name that ends in `EMPTY` promised weights and
    held none. filters: how many fixed filter buffers were checked and dropped. tool_version: of gpen-core.
    """

    source_name: str
    source_sha256: str
    kept: str = ""
    others: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    filters: int = 0
    licence: str = "not stated"
    tool_version: str = ""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Provenance:
        """Raises CheckpointError if a value is missing, unknown or of a wrong type."""
        lists = {name: values.get(name) for name in ("others", "dropped")}
        texts = {f.name: values.get(f.name) for f in fields(cls) if f.type == "str"}
        sound = set(values) == {f.name for f in fields(cls)}
        sound = sound and all(isinstance(text, str) for text in texts.values())
        sound = sound and all(isinstance(v, list) and all(isinstance(t, str) for t in v) for v in lists.values())
        _require(sound and isinstance(values["filters"], int), "incomplete provenance in the gpen-core metadata")
        return cls(**{**values, **{name: tuple(v or ()) for name, v in lists.items()}})


@dataclass(frozen=True)
class WeightsMetadata:
    """All that a weight file says about itself."""

    config: GeneratorConfig
    provenance: Provenance

    def encode(self) -> dict[str, str]:
        """The metadata of a safetensors file: one JSON string."""
        content = {
            "format_version": FORMAT_VERSION,
            "kind": "generator",
            "config": self.config.to_dict(),
            "provenance": asdict(self.provenance),
        }
        return {METADATA_KEY: json.dumps(content, sort_keys=True)}

    @classmethod
    def decode(cls, metadata: Mapping[str, str]) -> WeightsMetadata:
        """Raises CheckpointError if the metadata is absent, malformed or of a newer version."""
        _require(METADATA_KEY in metadata, "no gpen-core metadata; convert the original with: gpen-core convert")
        try:
            content = json.loads(metadata[METADATA_KEY])
        except (ValueError, RecursionError):
            raise CheckpointError("the gpen-core metadata is not JSON") from None
        _require(isinstance(content, dict), "the gpen-core metadata is not a JSON object")
        version, kind = content.get("format_version"), content.get("kind")
        require_version(version, FORMAT_VERSION)
        _require(kind == "generator", f"holds a {kind!r}, not a generator")
        config, provenance = content.get("config"), content.get("provenance")
        _require(isinstance(config, dict) and isinstance(provenance, dict), "incomplete gpen-core metadata")
        return cls(GeneratorConfig.from_dict(config), Provenance.from_dict(provenance))


def require_version(found: object, known: int) -> None:
    """Raises CheckpointError for a format version that is none, or not the known one."""
    # For Python, true is a 1.
    _require(type(found) is int, f"format version {found!r} is not a whole number: the metadata is malformed")
    _require(found == known, f"format version {found}; this gpen-core reads {known}")


def megabytes(size: int) -> str:
    """A file's size in words, three digits or so."""
    return f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.1f} kB"


def describe(metadata: WeightsMetadata) -> list[str]:
    """What a weight file is, what was taken from its source and what was left, in lines for people."""
    config, origin = metadata.config, metadata.provenance
    multiplier = config.channel_multiplier
    widths = ", ".join(f"{r}: {config.width(r)}" for r in levels(max(config.input_size, config.output_size)))
    return [
        f"GPEN generator, {config.input_size} -> {config.output_size} px, task {config.task}, "
        f"values {config.value_range[0]:g}..{config.value_range[1]:g}"
        + ("" if config.template == GPEN_TEMPLATE else f", {template_name(config.template)} crops"),
        f"channel multiplier {'undetermined' if multiplier is None else f'{multiplier:g}'}, narrow {config.narrow:g}, "
        f"style_dim {config.style_dim}, {config.n_mlp} mapping layers, "
        f"features {'concatenated' if config.concat else 'added'}",
        f"convolution widths {widths}",
        *describe_origin(origin),
    ]


def describe_origin(origin: Provenance) -> list[str]:
    """What a weight file comes from, what was taken and what was left, in lines for people."""
    others = "".join(f"; {name} is there too (--key {name})" for name in origin.others)
    others += "".join(f"; {name.removesuffix(EMPTY)} holds no weights" for name in origin.dropped if _is_empty(name))
    dropped = [name for name in origin.dropped if not _is_empty(name)]
    lines = [
        f"source {origin.source_name}, sha256 {origin.source_sha256}, licence: {origin.licence}",
        f"kept {origin.kept or 'the whole file'}{others}",
    ]
    if dropped:
        lines.append(f"dropped {', '.join(dropped)}: not needed to restore")
    if origin.filters:
        lines.append(f"dropped {origin.filters} filter buffers, all of them [1, 3, 3, 1] as expected")
    return lines


def _is_empty(name: str) -> bool:
    return name.endswith(EMPTY)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise CheckpointError(message)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= 1 << 16


def _numbers(values: Any, count: int, name: str) -> tuple[float, ...]:
    ok = isinstance(values, tuple) and len(values) == count
    ok = ok and all(isinstance(v, int | float) and not isinstance(v, bool) and abs(v) < 1e6 for v in values)
    _require(ok, f"{name} {values!r} is not {count} moderate numbers")
    return tuple(values)
