"""Which of the state dicts in a checkpoint is the generator to keep."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpen_convert.infer import Shapes, describe_foreign_keys, generator_prefix
from gpen_core.errors import CheckpointError, UsageError

# The averaged weights are what GPEN publishes and what looks best.
PREFERENCE = ("g_ema", "params_ema", "ema", "g", "params", "state_dict", "model", "generator")
DEPTH = 4


@dataclass(frozen=True)
class Selection:
    """A generator's tensors by legacy key.

    key: where in the file they were ("" for a flat file). others: other generators there. dropped: everything else.
    """

    tensors: dict[str, Tensor]
    key: str
    others: tuple[str, ...]
    dropped: tuple[str, ...]


def select(tree: Any, key: str | None = None) -> Selection:
    """The generator in what a checkpoint holds; `key` picks one by name, else the first of `PREFERENCE`.

    Raises UsageError for a `key` that is not there, CheckpointError if there is no generator or a tensor is not usable.
    """
    if not isinstance(tree, Mapping):
        raise CheckpointError(f"holds a {type(tree).__name__}, not a state dict")
    states = dict(_state_dicts(tree, ""))
    if not states:
        raise CheckpointError(f"holds no tensors by name{_shown(tree)}")
    if key is not None and key not in states:
        raise UsageError(f"--key {key}: no such state dict; there is {', '.join(sorted(states)) or 'only a flat one'}")
    generators = [name for name, state in states.items() if generator_prefix(list(state)) is not None]
    if key is None and not generators:
        raise CheckpointError(_describe(states))
    chosen = min(generators, key=_rank) if key is None else key
    prefix = generator_prefix(list(states[chosen]))
    if prefix is None:
        raise CheckpointError(f"--key {chosen}: {describe_foreign_keys(list(states[chosen]))}")
    tensors = {name.removeprefix(prefix): t for name, t in states[chosen].items() if name.startswith(prefix)}
    outside = [name for name in states[chosen] if not name.startswith(prefix)]
    for name, tensor in tensors.items():
        _check(name, tensor)
    return Selection(
        tensors=tensors,
        key=chosen,
        others=tuple(name for name in generators if name != chosen),
        dropped=(
            *_dropped(tree, chosen, generators),
            *([f"{len(outside)} tensors outside {prefix}*"] if outside else []),
        ),
    )


def select_network(tree: Any, key: str | None, recognise: Callable[[Shapes], bool]) -> Selection | None:
    """The first state dict that `recognise` knows by its shapes, `module.` removed; None if there is none."""
    states = dict(_state_dicts(tree, "")) if isinstance(tree, Mapping) else {}
    for name in sorted(states, key=_rank):
        state = {k.removeprefix("module."): tensor for k, tensor in states[name].items()}
        if key in (None, name) and recognise({k: tuple(tensor.shape) for k, tensor in state.items()}):
            return Selection(state, name, (), tuple(_dropped(tree, name, [name])))
    return None


def _state_dicts(tree: Mapping[Any, Any], path: str, depth: int = 0) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Every mapping with tensors of its own, by its path of keys joined with dots."""
    own = {name: value for name, value in tree.items() if isinstance(name, str) and isinstance(value, Tensor)}
    if own:
        yield path, own
    if depth == DEPTH:
        return
    for name, value in tree.items():
        if isinstance(name, str) and isinstance(value, Mapping):
            yield from _state_dicts(value, f"{path}.{name}" if path else name, depth + 1)


def _rank(path: str) -> tuple[int, int, str]:
    last = path.rsplit(".", 1)[-1]
    place = PREFERENCE.index(last) if last in PREFERENCE else len(PREFERENCE)
    return place, path.count("."), path


def _dropped(tree: Mapping[Any, Any], chosen: str, generators: list[str]) -> list[str]:
    """Top-level entries that neither are nor hold a generator."""
    if not chosen:
        return []
    kept = {name.split(".", 1)[0] for name in generators}
    return [str(name) for name in tree if str(name) not in kept]


def _describe(states: Mapping[str, Mapping[str, Tensor]]) -> str:
    largest = max(states, key=lambda name: len(states[name]))
    description = describe_foreign_keys(list(states[largest]))
    return f"{largest}: {description}" if largest else description


def _shown(tree: Mapping[Any, Any]) -> str:
    names = [str(name)[:40] for name in list(tree)[:3]]
    return f" (only {', '.join(names)})" if names else ""


def _check(name: str, tensor: Tensor) -> None:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise CheckpointError(f"{name} is sparse, quantised or empty storage; a dense tensor is needed")
    if not tensor.is_floating_point():
        raise CheckpointError(f"{name} is {str(tensor.dtype).removeprefix('torch.')}, not floating point")
