"""Reading a network's structure off the shapes of its tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

from gpen_core.errors import CheckpointError

Shapes = Mapping[str, tuple[int, ...]]

LARGEST = 1 << 16


def shapes_of(state: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {key: tuple(tensor.shape) for key, tensor in state.items()}


def count(shapes: Shapes, pattern: str, start: int = 0) -> int:
    """How many numbers from `start` on appear without a gap in the group of `pattern`, which a whole key matches."""
    numbers = {int(m.group(1)) for m in (re.fullmatch(pattern, key) for key in shapes) if m}
    end = start
    while end in numbers:
        end += 1
    return end - start


def size(shapes: Shapes, key: str, axis: int) -> int:
    """One dimension of one tensor. Raises CheckpointError if it isn't there or can't be a number of channels."""
    shape = shapes.get(key)
    if shape is None:
        raise CheckpointError(f"incomplete: {key} is missing")
    if len(shape) <= axis or not 0 < shape[axis] <= LARGEST:
        raise CheckpointError(f"{key} has the shape {list(shape)}")
    return shape[axis]
