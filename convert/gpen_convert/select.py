"""Which of the state dicts in a checkpoint is the generator to keep."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpen_convert.infer import ANCHOR, describe_foreign_keys, prefixes_before
from gpen_convert.shapes import Shapes
from gpen_core.config import EMPTY
from gpen_core.errors import CheckpointError, UsageError

# The averaged weights are what GPEN publishes and what looks best.
PREFERENCE = ("g_ema", "params_ema", "ema", "g", "params", "state_dict", "model", "generator")
DEPTH = 8


@dataclass(frozen=True)
class Selection:
    """A generator's tensors by legacy key.

    key: where in the file they were ("" for a flat file). others: other generators there. dropped: everything else;
    " (empty)" follows the name of a place for weights that holds none.
    """

    tensors: dict[str, Tensor]
    key: str
    others: tuple[str, ...]
    dropped: tuple[str, ...]


def select(tree: Any, key: str | None = None) -> Selection:
    """The generator in what a checkpoint holds; `key` picks one by name, else averaged weights come first.

    Raises UsageError for a `key` that is not there, CheckpointError if there is no generator or a tensor is not usable.
    """
    if not isinstance(tree, Mapping | list | tuple):
        raise CheckpointError(f"holds an object of the type {type(tree).__name__}, not a state dict")
    states = dict(_state_dicts(tree, ""))
    if not states:
        raise CheckpointError(f"holds no tensors by name{_shown(tree)}")
    candidates = dict(_candidates(states, ANCHOR))
    if key is not None and key not in candidates and key not in states:
        names = sorted({*candidates, *(name for name in states if "." not in name)} - {""})
        raise UsageError(f"--key {key}: no such state dict; there is {', '.join(names) or 'only a flat one'}")
    if key is not None and key not in candidates:
        raise CheckpointError(f"--key {key}: {describe_foreign_keys(list(states[key]))}")
    if not candidates:
        raise CheckpointError(_describe(states))
    chosen = min(candidates, key=_rank) if key is None else key
    selection = _take(tree, states, candidates, chosen)
    for name, tensor in selection.tensors.items():
        if not tensor.is_floating_point():
            raise CheckpointError(f"{name} is {str(tensor.dtype).removeprefix('torch.')}, not floating point")
    return selection


def holds_generator(tree: Any) -> bool:
    """Whether there is a generator in what a checkpoint holds, whole or not."""
    return any(_candidates(_states(tree), ANCHOR))


def _take(
    tree: Any, states: Mapping[str, Mapping[str, Tensor]], candidates: Mapping[str, tuple[str, str]], chosen: str
) -> Selection:
    """One of several networks, each given by its state dict and the prefix of its keys there."""
    path, prefix = candidates[chosen]
    tensors = {name.removeprefix(prefix): t for name, t in states[path].items() if name.startswith(prefix)}
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            raise CheckpointError(f"{name} is sparse, quantised or empty storage; a dense tensor is needed")
    prefixes = tuple(p for other, p in candidates.values() if other == path)
    outside = sum(not name.startswith(prefixes) for name in states[path])
    dropped = _dropped(tree, chosen, [other for other, _ in candidates.values()]) if path else []
    return Selection(
        tensors=tensors,
        key=chosen,
        others=tuple(name for name in candidates if name != chosen),
        dropped=(*dropped, *([f"{outside} tensors outside {prefix}*"] if outside else [])),
    )


def _candidates(states: Mapping[str, Mapping[str, Tensor]], anchor: str) -> Iterator[tuple[str, tuple[str, str]]]:
    """Name -> (state dict, prefix) of every network with the key `anchor`; one that shares its state dict is named by
    its prefix too."""
    for path, state in states.items():
        prefixes = prefixes_before(anchor, list(state))
        for prefix in prefixes:
            own = prefix.rstrip(".") if len(prefixes) > 1 else ""
            yield ".".join(part for part in (path, own) if part), (path, prefix)


def select_network(tree: Any, key: str | None, anchor: str, recognise: Callable[[Shapes], bool]) -> Selection | None:
    """The network with the key `anchor` that `recognise` knows by its shapes; None if there is none."""
    states = _states(tree)
    found = {
        name: (path, prefix)
        for name, (path, prefix) in _candidates(states, anchor)
        if recognise({k.removeprefix(prefix): tuple(t.shape) for k, t in states[path].items() if k.startswith(prefix)})
    }
    chosen = [name for name in sorted(found, key=_rank) if key in (None, name)]
    return _take(tree, states, found, chosen[0]) if chosen else None


def _states(tree: Any) -> dict[str, dict[str, Tensor]]:
    return dict(_state_dicts(tree, "")) if isinstance(tree, Mapping | list | tuple) else {}


def _state_dicts(tree: Any, path: str) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Every mapping with tensors of its own, by its path of keys joined with dots; lists count from 0.

    Each container is looked into once, by its shortest path, because a few that share others have endless paths. A
    mapping with tensors has a path for each place that it is directly in.
    """
    level = [(path, tree)]
    known: dict[int, dict[str, Tensor]] = {}
    for depth in range(DEPTH + 1):
        below: list[tuple[str, Any]] = []
        for place, value in level:
            if id(value) not in known:
                entries = dict(enumerate(value)) if isinstance(value, list | tuple) else value
                own = {
                    name: item for name, item in entries.items() if isinstance(name, str) and isinstance(item, Tensor)
                }
                known[id(value)] = own
                below += [
                    (f"{place}.{name}" if place else str(name), item)
                    for name, item in entries.items()
                    if isinstance(name, str | int) and isinstance(item, Mapping | list | tuple) and depth < DEPTH
                ]
            if known[id(value)]:
                yield place, known[id(value)]
        level = below


def _rank(path: str) -> tuple[bool, int, int, str]:
    last = path.rsplit(".", 1)[-1]
    averaged = "ema" in re.split(r"[^a-z]+", path.lower())
    place = PREFERENCE.index(last) if last in PREFERENCE else len(PREFERENCE)
    return not averaged, place, path.count("."), path


def _dropped(tree: Any, chosen: str, generators: list[str]) -> list[str]:
    """Top-level entries that neither are nor hold a generator."""
    if not chosen or not isinstance(tree, Mapping):
        return []
    kept = {name.split(".", 1)[0] for name in generators}
    return [f"{name}{EMPTY if _is_empty(name, tree[name]) else ''}" for name in tree if str(name) not in kept]


def _is_empty(name: object, value: Any) -> bool:
    """Whether weights usually lie under this name, and here none do."""
    return name in PREFERENCE and isinstance(value, Mapping) and not any(_state_dicts(value, ""))


def _describe(states: Mapping[str, Mapping[str, Tensor]]) -> str:
    largest = max(states, key=lambda name: len(states[name]))
    description = describe_foreign_keys(list(states[largest]))
    return f"{largest}: {description}" if largest else description


def _shown(tree: Any) -> str:
    names = [str(name)[:40] for name in list(tree)[:3]] if isinstance(tree, Mapping) else []
    return f" (only {', '.join(names)})" if names else ""
