"""One door for every checkpoint: which network it holds decides what it becomes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from gpen_convert import parsenet, retinaface, rrdb
from gpen_convert.from_onnx import convert_onnx, is_onnx
from gpen_convert.generator import Claims, Wanted, convert_tree, output_path
from gpen_convert.select import select_network
from gpen_convert.shapes import Shapes
from gpen_convert.unpickle import load_tree
from gpen_core import __version__
from gpen_core.config import Provenance, megabytes
from gpen_core.errors import CheckpointError, UsageError
from gpen_core.files import sha256
from gpen_weights import catalog


@dataclass(frozen=True)
class Network:
    """A network beside the generator: how it is recognised, written, and what its file is called."""

    recognise: Callable[[Shapes], bool]
    write: Callable[[Mapping[str, Tensor], Path, Provenance], list[str]]
    suffix: str


NETWORKS = (
    Network(retinaface.recognise, retinaface.convert, ".onnx"),
    Network(parsenet.recognise, parsenet.convert, ".onnx"),
    Network(rrdb.recognise, rrdb.convert, ".safetensors"),
)


def convert(
    source: Path,
    output: Path | None = None,
    *,
    key: str | None = None,
    dtype: str = "fp32",
    task: str | None = None,
    licence: str | None = None,
    template: str = "gpen",
    claims: Claims = Claims(),
) -> list[str]:
    """Convert a legacy checkpoint of any network that GPEN's pipeline uses; returns the report, line by line.

    Generators and up-scalers become safetensors, detectors and parsers ONNX; a generator that somebody exported as
    ONNX becomes safetensors too. `dtype`, `task`, `template` and `claims` are for generators alone. Raises
    CheckpointError and UsageError, and writes nothing then.
    """
    wanted = Wanted(dtype, task, licence, template, claims)
    if is_onnx(source):
        if key is not None:
            raise UsageError(f"{source}: --key is for checkpoints; an ONNX file holds one network")
        return convert_onnx(source, output, wanted)
    tree = load_tree(source)
    for network in NETWORKS:
        selection = select_network(tree, key, network.recognise)
        if selection is None:
            continue
        if wanted != Wanted(licence=licence):
            raise UsageError(f"{source}: not a generator, so only -o, --key and --licence apply")
        target = output_path(source, output, network.suffix)
        provenance = Provenance(
            source_name=source.name,
            source_sha256=sha256(source),
            kept=selection.key,
            dropped=selection.dropped,
            licence=licence or _licence(source.name),
            tool_version=f"gpen-core {__version__}",
        )
        try:
            lines = network.write(selection.tensors, target, provenance)
        except CheckpointError as error:
            text = str(error)
            raise CheckpointError(text if text.startswith(str(target)) else f"{source}: {text}") from None
        return [f"{source}:", *lines, f"wrote {target}: {megabytes(target.stat().st_size)}"]
    return convert_tree(tree, source, output, key, wanted).lines()


def _licence(name: str) -> str:
    stem = Path(name).stem.casefold()
    found = (entry for entry in catalog() if Path(entry.published_file).stem.casefold() == stem)
    return next((entry.licence for entry in found), "not stated")
