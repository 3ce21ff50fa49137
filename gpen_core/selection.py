"""Several networks at once: each face goes through the one whose size suits it.

A crop's side says which network it is for, so that crops of several sizes can be handed over together; those of one
size share batches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

from gpen_core.backend import CropRuntime, choose_suffixes, find_weights, load_runtime, survey_weights
from gpen_core.config import PictureFormat, template_name, template_named
from gpen_core.errors import DeviceError, UsageError
from gpen_core.footprint import Footprint
from gpen_core.types import Image

WeightFiles = str | Path | Sequence[str | Path]
"""A path or name of weights, several of them, or "auto": one file for each size that is on this machine."""

AUTO = "auto"
# On ten portraits, blurred, halved and noisy, gpen-open-256 came closer to the truth (by PSNR) than gpen-open-512 at
# crops of up to 288 px, and less close from 320 px on.
COVERS = 1.125
"""How much longer than a network's input the side of a crop may be in the photo, for that network to suit it."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """A network that can be loaded. weights: its file. memory: what it takes."""

    weights: str
    config: PictureFormat
    memory: Footprint
    load: Callable[[], CropRuntime]


@dataclass(eq=False)
class _Loaded:
    """A network in memory. most: faces in its largest call so far."""

    runtime: CropRuntime
    most: int = 0


class Selection:
    """Networks of several sizes behind the interface of one. Threads may share it; one call runs at a time.

    The smallest is loaded at once, each other when the first crop needs it. Where all that are loaded would take more
    than `memory` bytes, those that have not been used for longest are released; None keeps them all.

    config: of the smallest network; crop template and task are those of all. Raises UsageError for networks that do not
    go together.
    """

    def __init__(self, candidates: Sequence[Candidate], memory: int | None = None) -> None:
        ordered = sorted(candidates, key=lambda candidate: candidate.config.input_size)
        _require_company(ordered)
        self.config = ordered[0].config
        self.memory = memory
        self._candidates = {candidate.config.input_size: candidate for candidate in ordered}
        # Last used last.
        self._loaded: dict[int, _Loaded] = {}
        self._descriptions: dict[int, str] = {}
        self._lock = threading.Lock()
        # Now, because a device that is not there is nobody's photo's fault.
        self._ready(self.config.input_size, 1)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sides of the networks' inputs in pixels, ascending."""
        return tuple(self._candidates)

    @property
    def description(self) -> str:
        """Devices, precisions and engines used so far, and all sizes, in words."""
        known = dict.fromkeys(self._descriptions[size] for size in sorted(self._descriptions))
        return f"{', '.join(known)} {'/'.join(map(str, self.sizes))} px"

    def choose(self, side: float) -> int:
        """The size for a face whose crop has a side of so many pixels in the photo: the smallest that covers it."""
        return next((size for size in self.sizes if side <= COVERS * size), self.sizes[-1])

    def weights(self, size: int) -> str:
        """The weight file of the network of a size."""
        return self._candidates[size].weights

    def __call__(self, crops: Sequence[Image]) -> list[Image | None]:
        """Restore square uint8 crops, each in the network of its size; results as of any `CropRuntime`."""
        places: dict[int, list[int]] = {}
        for place, crop in enumerate(crops):
            places.setdefault(crop.shape[0], []).append(place)
        results: list[Image | None] = [None] * len(crops)
        with self._lock:
            # What is in memory goes first, before others take its place.
            for size in sorted(places, key=lambda size: (size not in self._loaded, size)):
                pictures = self._run(size, [crops[place] for place in places[size]])
                for place, picture in zip(places[size], pictures, strict=True):
                    results[place] = picture
        return results

    def _run(self, size: int, crops: Sequence[Image]) -> list[Image | None]:
        try:
            return self._ready(size, len(crops))(crops)
        except DeviceError:
            if self._loaded.keys() <= {size}:
                raise
        # Estimates can be too low, and others use the device too: once more, alone.
        self._loaded.clear()
        return self._ready(size, len(crops))(crops)

    def _ready(self, size: int, count: int) -> CropRuntime:
        """The network of a size, with room for a call with `count` faces."""
        candidate = self._candidates[size]
        loaded = self._loaded.pop(size, None)
        most = loaded.most if loaded else 0
        self._make_room(candidate.memory.working(count, most))
        loaded = loaded or _Loaded(candidate.load())
        loaded.most = max(count, most)
        self._loaded[size] = loaded
        self._descriptions = {**self._descriptions, size: loaded.runtime.description}
        return loaded.runtime

    def _make_room(self, needed: int) -> None:
        while self.memory is not None and self._loaded:
            held = sum(self._candidates[size].memory.held(one.most) for size, one in self._loaded.items())
            if held + needed <= self.memory:
                return
            del self._loaded[next(iter(self._loaded))]


def find_all(weights: WeightFiles, backend: str = "auto") -> list[Path]:
    """The files that are meant for a backend. Raises MissingWeightsError and UsageError."""
    if weights == AUTO:
        from gpen_weights import DEFAULT_GENERATOR, find_restorers

        return find_restorers(choose_suffixes(backend)) or [find_weights(DEFAULT_GENERATOR, backend)]
    names = [weights] if isinstance(weights, str | Path) else weights
    if AUTO in names:
        raise UsageError("--weights auto takes all that is here: name no other weights beside it")
    return [find_weights(name, backend) for name in names]


def load_weights(
    weights: WeightFiles,
    *,
    memory: int | None = None,
    template: str | None = None,
    backend: str = "auto",
    device: str = "auto",
    precision: str = "auto",
    compile: bool = False,
    cache: Path | None = None,
    max_batch: int | None = None,
) -> CropRuntime:
    """One weight file in its engine, or several as a `Selection`. Raises what `load_runtime` and `Selection` do.

    memory: as `Selection` has it. template: name of the crops that all were trained on, where files have it wrong.
    """
    paths = find_all(weights, backend)
    load = partial(
        load_runtime,
        backend=backend,
        device=device,
        precision=precision,
        compile=compile,
        cache=cache,
        max_batch=max_batch,
    )
    if len(paths) == 1:
        return load(paths[0])
    candidates = []
    for path in paths:
        config, footprint = survey_weights(
            path, device=device, precision=precision, compile=compile, max_batch=max_batch
        )
        if template is not None:
            config = replace(config, template=template_named(template))  # type: ignore[type-var]
        candidates.append(Candidate(str(path), config, footprint, partial(load, path)))
    return Selection(candidates, memory)


def _require_company(candidates: Sequence[Candidate]) -> None:
    """Raises UsageError if networks, in the order of their sizes, can't be used together."""
    if not candidates:
        raise UsageError("no weights were named")
    for one in candidates:
        if one.config.task != "restoration":
            raise UsageError(f"{one.weights}: for {one.config.task}; only weights for restoration go together")
    for one, other in pairwise(candidates):
        if one.config.input_size == other.config.input_size:
            raise UsageError(
                f"{one.weights} and {other.weights}: both take crops of {one.config.input_size} px; name one of them"
            )
        if one.config.template != other.config.template:
            names = [template_name(candidate.config.template) for candidate in (one, other)]
            raise UsageError(
                f"{one.weights} and {other.weights}: trained on different crops ({names[0]}, {names[1]}), so they "
                "don't go together; if a file has it wrong, say --template"
            )


def input_size(runtime: CropRuntime, side: float) -> int:
    """The side of the crop for a face whose crop has a side of so many pixels in the photo."""
    return runtime.choose(side) if isinstance(runtime, Selection) else runtime.config.input_size


def weights_used(runtime: CropRuntime, size: int) -> str:
    """The weight file that a crop of a size goes through, if there is a choice; else nothing."""
    return runtime.weights(size) if isinstance(runtime, Selection) else ""
