"""Converted weights: safetensors with a self-describing header, loaded strictly or not at all."""

from __future__ import annotations

import codecs
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gpen_core.config import METADATA_KEY, GeneratorConfig, WeightsMetadata, describe, megabytes
from gpen_core.errors import CheckpointError
from gpen_core.files import NOT_UTF8, is_utf8, why_unreadable
from gpen_core.model import Generator

ARCHIVES = {
    b"\x1f\x8b": "gzip",
    b"7z\xbc\xaf": "7z",
    b"Rar!": "RAR",
    b"\xfd7zXZ": "xz",
    b"BZh": "bzip2",
}
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def read_metadata(path: str | Path) -> WeightsMetadata:
    """What a converted file says about itself. Raises CheckpointError naming the file."""
    return _read(Path(path), with_tensors=False)[0]


def survey(path: str | Path) -> tuple[WeightsMetadata, int]:
    """What a converted file says about itself, and how many values its tensors have; none of them is read.

    Raises CheckpointError as `load_generator` does, for all that shows without reading them.
    """
    path = Path(path)
    metadata = read_metadata(path)
    with open_safetensors(path) as opened:
        names = list(opened.keys())
        found = {name: tuple(opened.get_slice(name).get_shape()) for name in names}
    expected = _shapes(_blank(metadata.config).state_dict())
    if expected != found:
        raise CheckpointError(f"{path}: {describe_difference(expected, found)}")
    return metadata, sum(map(math.prod, found.values()))


def load_tensors(path: str | Path) -> tuple[WeightsMetadata, dict[str, Tensor]]:
    """Metadata and all tensors as stored. Raises CheckpointError naming the file."""
    return _read(Path(path), with_tensors=True)


def load_generator(path: str | Path) -> Generator:
    """The generator in a converted file, float32 on the CPU, in evaluation mode, without gradients.

    Raises CheckpointError if the file is no converted generator or a tensor is missing, unknown or of a wrong shape.
    """
    path = Path(path)
    metadata, tensors = load_tensors(path)
    try:
        return build_generator(metadata, tensors)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


def build_generator(metadata: WeightsMetadata, tensors: Mapping[str, Tensor]) -> Generator:
    """A generator around given tensors, all or nothing."""
    model = _blank(metadata.config)
    expected, found = _shapes(model.state_dict()), _shapes(tensors)
    if expected != found:
        raise CheckpointError(describe_difference(expected, found))
    strange = [name for name, tensor in tensors.items() if tensor.dtype not in FLOATS]
    if strange:
        raise CheckpointError(f"{strange[0]} is {tensors[strange[0]].dtype}, not floating point")
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, strict=True, assign=True)
    model.derive()
    return model.eval().requires_grad_(False)


def kind_of(path: Path) -> str:
    """What a converted file says it holds ("generator", say), or "" if it does not say. Raises nothing."""
    if why_unreadable(path):
        return ""
    try:
        with open_safetensors(path) as opened:
            content = json.loads((opened.metadata() or {}).get(METADATA_KEY, "{}"))
    except (OSError, ValueError, RecursionError, SafetensorError, CheckpointError):
        return ""
    return str(content.get("kind", "")) if isinstance(content, dict) else ""


def describe_file(path: str | Path) -> list[str]:
    """`describe` for a file, and how its tensors are stored. Raises CheckpointError naming the file."""
    metadata, tensors = load_tensors(path)
    kinds = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()})
    parameters = sum(tensor.numel() for tensor in tensors.values())
    size = Path(path).stat().st_size
    stored = f"{len(tensors)} tensors, {' and '.join(kinds)}, {parameters:,} parameters, {megabytes(size)}"
    return [*describe(metadata), f"{stored}, converted by {metadata.provenance.tool_version}"]


def describe_difference(
    expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], limit: int = 3
) -> str:
    """One line about missing, unknown and misshapen tensors, naming the first few of each."""
    shared = expected.keys() & found.keys()
    misshapen = sorted(name for name in shared if expected[name] != found[name])
    parts = [
        ("missing", sorted(expected.keys() - found.keys())),
        ("unknown", sorted(found.keys() - expected.keys())),
        ("misshapen", [f"{n} {list(found[n])} instead of {list(expected[n])}" for n in misshapen]),
    ]
    return "; ".join(
        f"{len(names)} {kind}: {', '.join(names[:limit])}{', ...' if len(names) > limit else ''}"
        for kind, names in parts
        if names
    )


def open_safetensors(path: Path) -> Any:
    """`safe_open` for PyTorch. Raises as it does, and CheckpointError for a name that it can't take."""
    if not is_utf8(path):
        raise CheckpointError(NOT_UTF8)
    return safe_open(path, framework="pt")


def _blank(config: GeneratorConfig) -> Generator:
    """A generator without values."""
    with torch.device("meta"):
        return Generator(config)


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _read(path: Path, *, with_tensors: bool) -> tuple[WeightsMetadata, dict[str, Tensor]]:
    try:
        start = read_start(path)
        if start[8:9] != b"{":
            raise CheckpointError(f"{path}: {describe_foreign(start)}")
        with open_safetensors(path) as opened:
            metadata = WeightsMetadata.decode(opened.metadata() or {})
            names = list(opened.keys()) if with_tensors else []
            tensors = {name: opened.get_tensor(name) for name in names}
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from None
    except SafetensorError as error:
        raise CheckpointError(f"{path}: not a whole safetensors file ({error})") from None
    except CheckpointError as error:
        text = str(error)
        raise CheckpointError(text if text.startswith(str(path)) else f"{path}: {text}") from None
    return metadata, tensors


def read_start(path: Path, count: int = 512) -> bytes:
    """The first bytes of a regular file. Raises OSError, and CheckpointError for anything else."""
    obstacle = why_unreadable(path)
    if obstacle:
        raise CheckpointError(obstacle)
    with path.open("rb") as file:
        return file.read(count)


def describe_foreign(start: bytes) -> str:
    """What a file that is no checkpoint seems to be, from its first 512 bytes."""
    if not start:
        return "the file is empty"
    text = text_of(start)
    if text is not None and text.lstrip()[:1] == "<":
        return "looks like an HTML or XML page, not weights; download it again"
    if text is not None and text.startswith("version https://git-lfs"):
        return "a Git LFS pointer, not the weights themselves; fetch the real file"
    if text is not None:
        return f"looks like text ({' '.join(text.split())[:40]!r}), not weights"
    for magic, name in ARCHIVES.items():
        if start.startswith(magic):
            return f"a {name} archive; unpack it first"
    if start.startswith(b"PK\x03\x04") and b"/data/aotinductor/" in start:
        return "a package compiled ahead of time, not safetensors; it is for enhance --weights, as it is"
    if start.startswith((b"PK\x03\x04", b"\x80")):
        return "a PyTorch checkpoint or another pickle, not safetensors; convert it first with: gpen-core convert"
    if start.startswith(b"\x08"):
        return "an ONNX model, it seems, not safetensors"
    return "neither a PyTorch checkpoint nor safetensors"


def text_of(start: bytes) -> str | None:
    """The text that bytes hold, or None if they are not text."""
    encoding = "utf-16" if start[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    # The end may cut a character in two.
    text = codecs.getincrementaldecoder(encoding)("replace").decode(start)
    return text if all(c.isprintable() or c.isspace() for c in text) and "\ufffd" not in text else None
