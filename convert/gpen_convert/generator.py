"""A legacy GPEN checkpoint becomes a safetensors file that describes itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from gpen_convert.infer import infer_config
from gpen_convert.keymap import find_rule, fold
from gpen_convert.names import published_as, stem_of, task_of
from gpen_convert.precision import DTYPES
from gpen_convert.select import Selection, select
from gpen_convert.targets import digest_of, may_replace, origin_of, output_path
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
    template_name,
    template_named,
)
from gpen_core.errors import CheckpointError, UsageError
from gpen_core.files import Stamp, remove_leftovers, replacing, stamp
from gpen_core.runtime import is_out_of_memory
from gpen_weights import Entry, find

SUFFIX = ".safetensors"


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
    """What a conversion found and wrote. notes: lines about what the file does not tell, or the name alone tells."""

    source: Path
    output: Path
    metadata: WeightsMetadata
    dtype: str
    tensors: int
    size: int
    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """The report for people."""
        return [
            f"{self.source}:",
            *describe(self.metadata),
            *self.notes,
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
    template: str | None = None,
    claims: Claims = Claims(),
) -> Report:
    """Convert a legacy checkpoint to `output`, by default beside it; a file there that has another source stays.

    The default name is that of the catalog for a published file (`names.published_as`), else the source's own.
    task, licence: by default what the catalog says about a published file; the task else as the words of the file's
    name say, or restoration. template: of the crops that the weights were trained on, by default gpen.

    The written file is read back and every tensor compared before it takes its name; on any failure there is no file.
    Raises CheckpointError for a file that is no GPEN generator and UsageError for arguments that contradict it.
    """
    wanted = Wanted(dtype, task, licence, template, claims)
    before = stamp(source)
    return convert_tree(load_tree(source), before, source, output, key, wanted)


@dataclass(frozen=True)
class Wanted:
    """What the user said about a generator's file; `convert_generator` explains the fields."""

    dtype: str = "fp32"
    task: str | None = None
    licence: str | None = None
    template: str | None = None
    claims: Claims = Claims()

    def __post_init__(self) -> None:
        check_choices(self.dtype, self.task, self.template)

    def apply(self, config: GeneratorConfig, name: str, stated: WeightsMetadata | None = None) -> Described:
        """What becomes of a generator of this structure in a file called `name`.

        stated: what that file says about itself; the user's word counts more. Raises UsageError for a claim that
        contradicts the structure.
        """
        self.claims.check(config)
        entry = published_as(name, config)
        if stated is not None:
            return self._correct(stated, entry)
        told = entry.generator.task if entry and entry.generator else task_of(name)
        task = self.task or told or "restoration"
        template = template_named(self.template or "gpen")
        config = replace(config, task=task, value_range=VALUE_RANGES[task], template=template)
        licence = self.licence or (entry.licence if entry else "not stated")
        return Described(config, licence, _file_name(entry, task), _doubts(self.task, told))

    def _correct(self, stated: WeightsMetadata, entry: Entry | None) -> Described:
        """What a file says about itself, but for what the user says."""
        config, licence = stated.config, stated.provenance.licence
        said = {
            "task": (self.task, config.task),
            "template": (self.template, template_name(config.template)),
            "licence": (self.licence, licence),
        }
        others = {name: pair for name, pair in said.items() if pair[0] not in (None, pair[1])}
        if "task" in others:
            task = str(self.task)
            config = replace(config, task=task, value_range=VALUE_RANGES[task])
        if "template" in others:
            config = replace(config, template=template_named(str(self.template)))
        notes = [f"--{name} {ours}, although the file says {theirs}" for name, (ours, theirs) in others.items()]
        return Described(config, self.licence or licence, _file_name(entry, config.task), tuple(notes))


@dataclass(frozen=True)
class Described:
    """What a converted generator will say about itself.

    file_name: the catalog's, where it is a published file, or None. notes: for people, about what is not certain.
    """

    config: GeneratorConfig
    licence: str
    file_name: str | None
    notes: tuple[str, ...]


def _file_name(entry: Entry | None, task: str) -> str | None:
    return entry.file if entry and entry.generator and entry.generator.task == task else None


def _doubts(said: str | None, told: str | None) -> tuple[str, ...]:
    """What is to be said about a task that the user names, or the file's name tells, or neither."""
    if said is not None:
        return () if told in (None, said) else (f"--task {said}, although the file's name says {told}",)
    if told is None:
        others = " or ".join(f"--task {task}" for task in TASKS if task != "restoration")
        return (
            f"task restoration is assumed, because nothing tells it; if it is another, convert again with {others}",
        )
    if told == "restoration":
        return ()
    return (f"task {told} is taken from the file's name; if it is another, convert again with --task",)


def check_choices(dtype: str, task: str | None, template: str | None = None) -> None:
    """Raises UsageError for a value that is none of the choices."""
    if dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype}: use {' or '.join(DTYPES)}")
    if task is not None and task not in TASKS:
        raise UsageError(f"--task {task}: use one of {', '.join(TASKS)}")
    if template is not None:
        template_named(template)


def convert_tree(
    tree: Any, before: Stamp | None, source: Path, output: Path | None, key: str | None, wanted: Wanted
) -> Report:
    """`convert_generator` for what `load_tree` gave. before: the source's stamp before that."""
    if output is not None:
        output_path(source, output, SUFFIX)
    try:
        selection = select(tree, key)
        described = wanted.apply(_config(selection), source.name)
        target = output_path(source, output, SUFFIX, described.file_name)
        digest = digest_of(source, before)
        replaced = may_replace(target, output, source, lambda there: origin_of(there) == digest)
        tensors = fold(described.config, selection.tensors, DTYPES[wanted.dtype])
    except UsageError as error:
        raise UsageError(_naming(source, error)) from None
    except CheckpointError as error:
        raise CheckpointError(_naming(source, error)) from None
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise CheckpointError(f"{source}: its tensors do not fit into memory") from None
    rules = [find_rule(name) for name in selection.tensors]
    provenance = Provenance(
        source_name=source.name,
        source_sha256=digest,
        kept=selection.key,
        others=selection.others,
        dropped=selection.dropped,
        filters=sum(found is not None and found[0].target is None for found in rules),
        licence=described.licence,
        tool_version=f"gpen-core {__version__}",
    )
    metadata = WeightsMetadata(described.config, provenance)
    write_verified(target, metadata, tensors)
    notes = (*described.notes, *renamed(source, target), *replaced)
    return Report(source, target, metadata, wanted.dtype, len(tensors), target.stat().st_size, notes)


def renamed(source: Path, target: Path) -> list[str]:
    """A line if an output got the catalog's name in the place of its source's."""
    name = stem_of(target.name)
    if name == stem_of(source.name) or find(name) is None:
        return []
    return [f"named {target.name}, so that in a weights folder it is found as {name}"]


def _naming(source: Path, error: Exception) -> str:
    """What an error says, with the source before it unless it names it."""
    return str(error) if str(source) in str(error) else f"{source}: {error}"


def _config(selection: Selection) -> GeneratorConfig:
    try:
        return infer_config({name: tuple(t.shape) for name, t in selection.tensors.items()})
    except CheckpointError as error:
        if not selection.key:
            raise
        others = f"; {', '.join(selection.others)} is there too (--key)" if selection.others else ""
        raise CheckpointError(f"{selection.key}: {error}{others}") from None


def write_verified(target: Path, metadata: WeightsMetadata, tensors: Mapping[str, Tensor]) -> None:
    """Write, read back, compare every tensor, load strictly, and only then give the file its name."""
    remove_leftovers([target])
    try:
        with replacing(target) as temporary:
            # Not `save_file`, which puts another file in the place of this one.
            temporary.write_bytes(save(dict(tensors), metadata.encode()))
            stored_metadata, stored = load_tensors(temporary)
            if stored_metadata != metadata or stored.keys() != tensors.keys():
                raise CheckpointError(f"{target}: what was read back differs from what was written; nothing is kept")
            for name, tensor in tensors.items():
                if stored[name].dtype != tensor.dtype or not torch.equal(stored[name], tensor):
                    raise CheckpointError(f"{target}: {name} was read back differently; nothing is kept")
            build_generator(stored_metadata, stored)
    except OSError as error:
        raise CheckpointError(f"{target}: can't be written ({error.strerror or error})") from None
