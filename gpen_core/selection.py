"""Several networks at once: each face goes through the one whose size suits it.

A crop's side says which network it is for, so that crops of several sizes can be handed over together; those of one
size share batches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TypeVar
from weakref import WeakSet

from gpen_core.backend import (
    Batched,
    CropRuntime,
    Pending,
    choose_suffixes,
    find_weights,
    load_runtime,
    submit,
    survey_weights,
)
from gpen_core.config import PictureFormat, template_name, template_named
from gpen_core.errors import CheckpointError, DeviceError, UsageError
from gpen_core.footprint import Footprint
from gpen_core.pixels import require_crops
from gpen_core.types import Image

WeightFiles = str | Path | Sequence[str | Path]
"""A path or name of weights, several of them, or "auto": one file for each size that is on this machine."""

Result = TypeVar("Result")

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


class _Flight:
    """Crops of one size on their way through its network.

    crowded: other networks were in memory beside it. shortage: what the device said if the network could not run.
    """

    def __init__(self, size: int, crops: Sequence[Image], pending: Pending, crowded: bool) -> None:
        self.size, self.crops, self.crowded = size, crops, crowded
        self.shortage = ""
        self._pending: Pending | None = pending
        self._pictures: list[Image | None] = []
        self._error: Exception | None = None
        self._lock = threading.Lock()

    def done(self) -> bool:
        """Whether it would land without a wait."""
        pending = self._pending
        return pending is None or pending.done()

    def land(self) -> None:
        """Wait for the network, and let go of it, whatever came of the crops."""
        with self._lock:
            if self._pending is None:
                return
            try:
                self._pictures = self._pending.result()
            except DeviceError as error:
                # The error itself would hold the network that has to go before it is tried again.
                self.shortage = str(error)
            except Exception as error:
                self._error = error
            self._pending = None

    def replace(self, other: _Flight) -> None:
        """Take what came of another attempt."""
        other.land()
        self.shortage, self._pictures, self._error = other.shortage, other._pictures, other._error

    def result(self) -> list[Image | None]:
        """A picture for each crop, or None; it has landed. Raises what the network raised."""
        if self._error is not None:
            raise self._error
        if self.shortage:
            raise DeviceError(self.shortage)
        return self._pictures


@dataclass(frozen=True, eq=False)
class Submitted:
    """Crops on their way through the networks of a `Selection`.

    flights: those of each size, with their places among all crops. land: waits for one, and tries it again if need be.
    """

    flights: tuple[tuple[list[int], _Flight], ...]
    land: Callable[[_Flight], None]

    def done(self) -> bool:
        """Whether the result is there without a wait."""
        return all(flight.done() for _, flight in self.flights)

    def result(self) -> list[Image | None]:
        """What `Selection.__call__` returns; waits for it. Raises what a network or the device raised."""
        results: dict[int, Image | None] = {}
        for places, flight in self.flights:
            self.land(flight)
            results.update(zip(places, flight.result(), strict=True))
        return [results[place] for place in range(len(results))]


@dataclass(eq=False)
class _Loaded:
    """A network in memory. most: faces in its largest call so far. flights: whose results somebody may still want."""

    runtime: CropRuntime
    most: int = 0
    flights: WeakSet[_Flight] = field(default_factory=WeakSet)


class Selection:
    """Networks of several sizes behind the interface of one. Threads may share it; they start one call at a time.

    The smallest is loaded at once, each other when the first crop needs it. Where all that are loaded would take more
    than `memory` bytes, those that have not been used for longest are released, once they are done with what they were
    given; None keeps them all.

    config: of the smallest network; crop template and task are those of all. Raises UsageError for networks that do not
    go together.
    """

    def __init__(self, candidates: Sequence[Candidate], memory: int | None = None) -> None:
        ordered = sorted(candidates, key=lambda candidate: candidate.config.input_size)
        require_company(ordered)
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

    @property
    def max_batch(self) -> int:
        """Crops of one size in one call at most, in the network that takes most."""
        return max(map(self.batch_of, self.sizes))

    def batch_of(self, side: int) -> int:
        """Crops of a side in one call at most; before their network is loaded, by its footprint."""
        loaded = self._loaded.get(side)
        if loaded is not None and isinstance(loaded.runtime, Batched):
            return loaded.runtime.max_batch
        return self._candidates[side].memory.batch

    def favourite(self, sides: Collection[int]) -> int:
        """The side to go on with: what is in memory goes first, before others take its place."""
        return min(sides, key=lambda side: (side not in self._loaded, side))

    def __call__(self, crops: Sequence[Image]) -> list[Image | None]:
        """Restore square uint8 crops, each in the network of its size; results as of any `CropRuntime`.

        Raises ImageError for a crop that no network is for.
        """
        return self.submit(crops).result()

    def submit(self, crops: Sequence[Image]) -> Submitted:
        """Start on square uint8 crops; what `__call__` returns and most of what it raises comes from the result.

        This waits as the networks' own `submit` does, and for those that have to leave the memory first.
        """
        require_crops(crops, self.sizes)
        places: dict[int, list[int]] = {}
        for place, crop in enumerate(crops):
            places.setdefault(crop.shape[0], []).append(place)
        flights: list[tuple[list[int], _Flight]] = []
        with self._lock:
            try:
                while places:
                    size = self.favourite(places)
                    mine = places.pop(size)
                    flights.append((mine, self._start(size, [crops[place] for place in mine])))
            except Exception:
                # Nobody will ask for what was started.
                for _, flight in flights:
                    flight.land()
                raise
        return Submitted(tuple(flights), self._land)

    def _land(self, flight: _Flight) -> None:
        flight.land()
        if not flight.shortage:
            return
        with self._lock:
            # Another thread may have been here.
            if flight.shortage and (flight.crowded or self._crowded(flight.size)):
                flight.crowded = False
                flight.replace(self._start_alone(flight.size, flight.crops))

    def _start(self, size: int, crops: Sequence[Image]) -> _Flight:
        try:
            return self._launch(size, crops)
        except DeviceError:
            if not self._crowded(size):
                raise
        return self._start_alone(size, crops)

    def _start_alone(self, size: int, crops: Sequence[Image]) -> _Flight:
        """Once more, because estimates can be too low, and others use the device too."""
        while self._loaded:
            self._release()
        return self._launch(size, crops)

    def _launch(self, size: int, crops: Sequence[Image]) -> _Flight:
        loaded = self._ready(size, len(crops))
        flight = _Flight(size, crops, submit(loaded.runtime, crops), self._crowded(size))
        loaded.flights.add(flight)
        return flight

    def _crowded(self, size: int) -> bool:
        """Whether others are in memory."""
        return not self._loaded.keys() <= {size}

    def _ready(self, size: int, count: int) -> _Loaded:
        """The network of a size, with room for a call with `count` faces."""
        candidate = self._candidates[size]
        loaded = self._loaded.pop(size, None)
        most = loaded.most if loaded else 0
        self._make_room(candidate.memory.working(count, most))
        loaded = loaded or _Loaded(candidate.load())
        loaded.most = max(count, most)
        self._loaded[size] = loaded
        self._descriptions = {**self._descriptions, size: loaded.runtime.description}
        return loaded

    def _make_room(self, needed: int) -> None:
        while self.memory is not None and self._loaded:
            held = sum(self._candidates[size].memory.held(one.most) for size, one in self._loaded.items())
            if held + needed <= self.memory:
                return
            self._release()

    def _release(self) -> None:
        """Let go of the network that has not been used for longest, done with what it was given."""
        for flight in list(self._loaded.pop(next(iter(self._loaded))).flights):
            flight.land()


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
    load: Callable[..., CropRuntime] = partial(
        load_runtime,
        backend=backend,
        device=device,
        precision=precision,
        compile=compile,
        cache=cache,
        max_batch=max_batch,
    )
    if weights == AUTO:
        load = _of_auto(load)
    if len(paths) == 1:
        return load(paths[0])
    survey = _of_auto(survey_weights) if weights == AUTO else survey_weights
    survey = partial(survey, device=device, precision=precision, compile=compile, max_batch=max_batch)
    return Selection(survey_all(paths, survey, load, template), memory)


def survey_all(
    paths: Sequence[Path],
    survey: Callable[..., tuple[PictureFormat, Footprint]] = survey_weights,
    load: Callable[..., CropRuntime] = load_runtime,
    template: str | None = None,
) -> list[Candidate]:
    """What networks there are to choose from, none of which is loaded. Raises what `survey_weights` does.

    template: as `load_weights` has it.
    """
    candidates = []
    for path in paths:
        config, footprint = survey(path)
        if template is not None:
            config = replace(config, template=template_named(template))  # type: ignore[type-var]
        candidates.append(Candidate(str(path), config, footprint, partial(load, path)))
    return candidates


def _of_auto(open: Callable[..., Result]) -> Callable[..., Result]:
    """The same, whose complaint about a file that nobody named says how it came in, and how it goes."""

    def opened(path: Path, **options: object) -> Result:
        try:
            return open(path, **options)
        except CheckpointError as error:
            cure = "replace it, move it away, or name the weights to use"
            raise CheckpointError(f"{error} (found by --weights auto: {cure})") from None

    return opened


def require_company(candidates: Sequence[Candidate]) -> None:
    """Raises UsageError if networks can't be used together."""
    candidates = sorted(candidates, key=lambda candidate: candidate.config.input_size)
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


def beyond(runtime: CropRuntime, batch: int) -> list[str]:
    """Where so many faces in one call are more than a network takes, in lines for people."""
    if isinstance(runtime, Selection):
        found = [(f"{runtime.weights(size)}: ", runtime.batch_of(size)) for size in runtime.sizes]
    else:
        found = [("", runtime.max_batch)] if isinstance(runtime, Batched) else []
    return [
        f"{name}--batch {batch} is more than this network takes: it runs {most} face{'' if most == 1 else 's'} at once"
        for name, most in found
        if most < batch
    ]


def weights_used(runtime: CropRuntime, size: int) -> str:
    """The weight file that a crop of a size goes through, if there is a choice; else nothing."""
    return runtime.weights(size) if isinstance(runtime, Selection) else ""
