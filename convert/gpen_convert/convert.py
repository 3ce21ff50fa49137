"""One door for every checkpoint: which network it holds decides what it becomes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from gpen_convert import parsenet, retinaface, rrdb
from gpen_convert.from_onnx import convert_onnx, is_onnx
from gpen_convert.generator import Claims, Wanted, convert_tree, renamed
from gpen_convert.names import published_network
from gpen_convert.select import Selection, holds_generator, select_network
from gpen_convert.shapes import Shapes
from gpen_convert.targets import digest_of, may_replace, origin_of, output_path
from gpen_convert.unpickle import load_tree
from gpen_core import __version__
from gpen_core.config import Provenance, describe_origin, megabytes
from gpen_core.errors import CheckpointError, UsageError
from gpen_core.files import Stamp, stamp


@dataclass(frozen=True)
class Network:
    """A network beside the generator: how it is recognised, written, and what its file is called.

    kind: as the catalog has it. anchor: a key that it alone has, whatever stands before its keys.
    """

    kind: str
    anchor: str
    recognise: Callable[[Shapes], bool]
    write: Callable[[Mapping[str, Tensor], Path, Provenance], list[str]]
    suffix: str


NETWORKS = (
    Network("detector", retinaface.SIGNATURE[0], retinaface.recognise, retinaface.convert, ".onnx"),
    Network("parser", parsenet.SIGNATURE[0], parsenet.recognise, parsenet.convert, ".onnx"),
    Network("upscaler", rrdb.SIGNATURE[0], rrdb.recognise, rrdb.convert, ".safetensors"),
)


def convert(
    source: Path,
    output: Path | None = None,
    *,
    key: str | None = None,
    dtype: str = "fp32",
    task: str | None = None,
    licence: str | None = None,
    template: str | None = None,
    claims: Claims = Claims(),
) -> list[str]:
    """Convert a legacy checkpoint of any network that GPEN's pipeline uses; returns the report, line by line.

    Generators and up-scalers become safetensors, detectors and parsers ONNX; a generator that somebody exported as
    ONNX becomes safetensors too. `dtype`, `task`, `template` and `claims` are for generators alone. Without `output`,
    or in a folder, a file that has another source is not replaced. Raises CheckpointError and UsageError, and writes
    nothing then.
    """
    wanted = Wanted(dtype, task, licence, template, claims)
    if is_onnx(source):
        if key is not None:
            raise UsageError(f"{source}: --key is for checkpoints; an ONNX file holds one network")
        return convert_onnx(source, output, wanted)
    before = stamp(source)
    tree = load_tree(source)
    # Of a file with several networks the generator is meant, unless a key says otherwise.
    for network in () if key is None and holds_generator(tree) else NETWORKS:
        try:
            selection = select_network(tree, key, network.anchor, network.recognise)
        except CheckpointError as error:
            raise CheckpointError(f"{source}: {error}") from None
        if selection is not None:
            return _convert_network(network, selection, before, source, output, wanted)
    return convert_tree(tree, before, source, output, key, wanted).lines()


def _convert_network(
    network: Network, selection: Selection, before: Stamp | None, source: Path, output: Path | None, wanted: Wanted
) -> list[str]:
    if wanted != Wanted(licence=wanted.licence):
        raise UsageError(f"{source}: not a generator, so only -o, --key and --licence apply")
    entry = published_network(source.name, network.kind)
    target = output_path(source, output, network.suffix, entry.file if entry else None)
    digest = digest_of(source, before)
    replaced = may_replace(target, output, source, lambda there: origin_of(there) == digest)
    provenance = Provenance(
        source_name=source.name,
        source_sha256=digest,
        kept=selection.key,
        others=selection.others,
        dropped=selection.dropped,
        licence=wanted.licence or (entry.licence if entry else "not stated"),
        tool_version=f"gpen-core {__version__}",
    )
    try:
        lines = network.write(selection.tensors, target, provenance)
    except CheckpointError as error:
        text = str(error)
        raise CheckpointError(text if text.startswith(str(target)) else f"{source}: {text}") from None
    return [
        f"{source}:",
        *lines,
        *describe_origin(provenance),
        *renamed(source, target),
        *replaced,
        f"wrote {target}: {megabytes(target.stat().st_size)}",
    ]
