"""A legacy GPEN checkpoint becomes a safetensors file that describes itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from gpen_convert.infer import infer_config
from gpen_convert.keymap import find_rule, fold
from gpen_convert.select import Selection, select
from gpen_convert.unpickle import load_tree
from gpen_core import __version__
from gpen_core.checkpoint import build_generator, load_tensors
from gpen_core.config import (
    TASKS,
    VALUE_RANGES,
    GeneratorConfig,
    Provenance,
    WeightsMetadata,
    describe,
    megabytes,
    template_named,
)
from gpen_core.errors import CheckpointError, UsageError
from gpen_core.files import is_folder, remove_leftovers, replacing, same_file, sha256
from gpen_core.runtime import is_out_of_memory
from gpen_weights import Entry, catalog

DTYPES = {"fp32": torch.float32, "fp16": torch.float16}


@dataclass(frozen=True)
class Claims:
    """What the user says about a checkpoint; None where nothing was said. A contradiction is an error."""

    input_size: int | None = None
    output_size: int | None = None
    channel_multiplier: float | None = None
    narrow: float | None = None
    style_dim: int | None = None
    n_mlp: int | None = None

    def check(self, config: GeneratorConfig) -> None:
        """Raises UsageError, naming both values, if the file says otherwise."""
        for name, claimed in vars(self).items():
            found = getattr(config, name)
            if claimed is None or (found is not None and abs(claimed - found) < 1e-6):
                continue
            text = "undetermined" if found is None else f"{found:g}"
            flag = "size" if name == "input_size" else name.replace("_", "-")
            raise UsageError(f"--{flag} {claimed:g} contradicts the file, which says {text}")


@dataclass(frozen=True)
class Report:
    """What a conversion found and wrote."""

    source: Path
    output: Path
    metadata: WeightsMetadata
    dtype: str
    tensors: int
    size: int

    def lines(self) -> list[str]:
        """The report for people."""
        return [
            f"{self.source}:",
            *describe(self.metadata),
            f"wrote {self.output}: {self.tensors} tensors, {self.dtype}, {megabytes(self.size)}, "
            "read back and compared",
        ]


def convert_generator(
    source: Path,
    output: Path | None = None,
    *,
    key: str | None = None,
    dtype: str = "fp32",
    task: str | None = None,
    licence: str | None = None,
    template: str = "gpen",
    claims: Claims = Claims(),
) -> Report:
    """Convert a legacy checkpoint to `output` (by default beside it, named .safetensors).

    task, licence: by default what the catalog says about a file of this name and structure, else restoration and
    "not stated". template: of the crops that the weights were trained on.

    The written file is read back and every tensor compared before it takes its name; on any failure there is no file.
    Raises CheckpointError for a file that is no GPEN generator and UsageError for arguments that contradict it.
    """
    wanted = Wanted(dtype, task, licence, template, claims)
    return convert_tree(load_tree(source), source, output, key, wanted)


@dataclass(frozen=True)
class Wanted:
    """What the user said about a generator's file; `convert_generator` explains the fields."""

    dtype: str = "fp32"
    task: str | None = None
    licence: str | None = None
    template: str = "gpen"
    claims: Claims = Claims()

    def __post_init__(self) -> None:
        check_choices(self.dtype, self.task, self.template)

    def apply(self, config: GeneratorConfig, name: str) -> tuple[GeneratorConfig, str]:
        """The configuration of a file called `name` with its task and template, and its licence.

        Raises UsageError for a claim that contradicts it.
        """
        self.claims.check(config)
        entry = published_as(name, config)
        task = self.task or (entry.generator.task if entry and entry.generator else "restoration")
        licence = self.licence or (entry.licence if entry else "not stated")
        described = replace(config, task=task, value_range=VALUE_RANGES[task], template=template_named(self.template))
        return described, licence


def check_choices(dtype: str, task: str | None, template: str = "gpen") -> None:
    """Raises UsageError for a value that is none of the choices."""
    if dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype}: use {' or '.join(DTYPES)}")
    if task is not None and task not in TASKS:
        raise UsageError(f"--task {task}: use one of {', '.join(TASKS)}")
    template_named(template)


def convert_tree(tree: Any, source: Path, output: Path | None, key: str | None, wanted: Wanted) -> Report:
    """`convert_generator` for what `load_tree` gave."""
    target = output_path(source, output, ".safetensors")
    try:
        selection = select(tree, key)
        config, licence = wanted.apply(_config(selection), source.name)
        tensors = fold(config, selection.tensors, DTYPES[wanted.dtype])
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from None
    except CheckpointError as error:
        raise CheckpointError(f"{source}: {error}") from None
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise CheckpointError(f"{source}: its tensors do not fit into memory") from None
    rules = [find_rule(name) for name in selection.tensors]
    provenance = Provenance(
        source_name=source.name,
        source_sha256=sha256(source),
        kept=selection.key,
        others=selection.others,
        dropped=selection.dropped,
        filters=sum(found is not None and found[0].target is None for found in rules),
        licence=licence,
        tool_version=f"gpen-core {__version__}",
    )
    metadata = WeightsMetadata(config, provenance)
    write_verified(target, metadata, tensors)
    return Report(source, target, metadata, wanted.dtype, len(tensors), target.stat().st_size)


def _config(selection: Selection) -> GeneratorConfig:
    try:
        return infer_config({name: tuple(t.shape) for name, t in selection.tensors.items()})
    except CheckpointError as error:
        if not selection.key:
            raise
        others = f"; {', '.join(selection.others)} is there too (--key)" if selection.others else ""
        raise CheckpointError(f"{selection.key}: {error}{others}") from None


def published_as(name: str, config: GeneratorConfig) -> Entry | None:
    """The catalog's entry for a file name, if the structure is that entry's too."""
    structure = ("input_size", "output_size", "channel_multiplier", "narrow", "style_dim", "n_mlp")
    for entry in catalog():
        same_name = Path(name).stem.casefold() in (entry.name.casefold(), Path(entry.published_file).stem.casefold())
        facts = entry.generator
        if same_name and facts and all(getattr(facts, f) == getattr(config, f) for f in structure):
            return entry
    return None


def output_path(source: Path, output: Path | None, suffix: str) -> Path:
    """Where a conversion writes. Raises UsageError if that is the source itself or no place for a file."""
    target = output or source.with_suffix(suffix)
    if is_folder(target):
        target = target / source.with_suffix(suffix).name
    if same_file(source, target):
        raise UsageError(f"{target}: the output would replace its source; name another file with -o")
    if target.suffix != suffix:
        raise UsageError(f"{target}: the output must be named *{suffix}")
    if not is_folder(target.parent):
        raise UsageError(f"{target}: the folder {target.parent} does not exist")
    return target


def write_verified(target: Path, metadata: WeightsMetadata, tensors: Mapping[str, Tensor]) -> None:
    """Write, read back, compare every tensor, load strictly, and only then give the file its name."""
    remove_leftovers([target])
    try:
        with replacing(target) as temporary:
            save_file(dict(tensors), temporary, metadata.encode())
            stored_metadata, stored = load_tensors(temporary)
            if stored_metadata != metadata or stored.keys() != tensors.keys():
                raise CheckpointError(f"{target}: what was read back differs from what was written; nothing is kept")
            for name, tensor in tensors.items():
                if stored[name].dtype != tensor.dtype or not torch.equal(stored[name], tensor):
                    raise CheckpointError(f"{target}: {name} was read back differently; nothing is kept")
            build_generator(stored_metadata, stored)
    except SafetensorError as error:
        raise CheckpointError(f"{target}: can't be written ({error})") from None
    except OSError as error:
        raise CheckpointError(f"{target}: can't be written ({error.strerror or error})") from None
