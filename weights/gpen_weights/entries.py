"""The catalog of published weight files, read from catalog.json and checked."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

KINDS = ("generator", "detector", "parser", "upscaler")
TASKS = ("restoration", "colorization", "inpainting", "seg2face")
WAYS = ("bundled", "convert", "place", "pull")


@dataclass(frozen=True)
class GeneratorFacts:
    """What `gpen-core info` must say of a converted generator."""

    input_size: int
    output_size: int
    channel_multiplier: int
    narrow: float
    style_dim: int
    n_mlp: int
    task: str
    value_range: tuple[float, float]

    def __post_init__(self) -> None:
        sizes = (self.input_size, self.output_size)
        powers = all(size >= 4 and size & (size - 1) == 0 for size in sizes)
        _require(powers, f"sizes {sizes} are no powers of two")
        _require(self.output_size >= self.input_size, "the output is smaller than the input")
        _require(self.task in TASKS, f"task {self.task!r} is none of {TASKS}")
        _require(self.value_range in ((-1, 1), (0, 1)), f"value range {self.value_range}")


@dataclass(frozen=True)
class Entry:
    """One published weight file.

    name: how commands call it. kind: one of KINDS. way: how it comes to a machine, one of WAYS; "place": it is used
    as published, and the user puts it there.
    file: the name of the file that gpen-core reads. published_file: the name under which it is published.
    source: the page that publishes it. licence: in words.
    tensor_bytes: size of the published parameters and buffers in fp32, where known; the file is slightly
    larger. sha256: of the published file, where it was computed or its publisher states it.
    generator: facts of a generator; None for other kinds.
    """

    name: str
    kind: str
    way: str
    file: str
    published_file: str
    source: str
    licence: str
    tensor_bytes: int | None = None
    sha256: str | None = None
    generator: GeneratorFacts | None = None

    def __post_init__(self) -> None:
        _require(self.kind in KINDS, f"kind {self.kind!r} is none of {KINDS}")
        _require(self.way in WAYS, f"way {self.way!r} is none of {WAYS}")
        _require(Path(self.file).stem == self.name, f"file {self.file!r} is not named after {self.name!r}")
        _require(all((self.published_file, self.source, self.licence)), "an empty field")
        hashed = self.sha256 is None or re.fullmatch("[0-9a-f]{64}", self.sha256)
        _require(bool(hashed), "a malformed sha256")
        has_facts = self.generator is not None
        _require(has_facts == (self.kind == "generator"), "a generator needs its facts, others have none")


@cache
def catalog() -> tuple[Entry, ...]:
    """All known weight files. Raises ValueError if catalog.json is malformed."""
    text = (Path(__file__).parent / "catalog.json").read_text(encoding="utf-8")
    return parse(json.loads(text))


def parse(records: list[dict[str, Any]]) -> tuple[Entry, ...]:
    """Entries from the records of catalog.json. Raises ValueError naming the record at fault."""
    entries = tuple(_entry(record) for record in records)
    names = [entry.name.casefold() for entry in entries]
    _require(len(set(names)) == len(names), "two entries share a name")
    return entries


def find(name: str) -> Entry | None:
    """The entry called `name`, whatever its case, or None."""
    return next((entry for entry in catalog() if entry.name.casefold() == name.casefold()), None)


def _entry(record: dict[str, Any]) -> Entry:
    try:
        values = _known(Entry, record)
        if values.get("generator") is not None:
            facts = _known(GeneratorFacts, values["generator"])
            values["generator"] = GeneratorFacts(**facts | {"value_range": tuple(facts["value_range"])})
        return Entry(**values)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"catalog.json, {record.get('name', record)!r}: {error}") from error


def _known(kind: type[Entry] | type[GeneratorFacts], record: Mapping[str, Any]) -> dict[str, Any]:
    unknown = record.keys() - {field.name for field in fields(kind)}
    _require(not unknown, f"unknown fields {sorted(unknown)}")
    return dict(record)


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise ValueError(reason)
