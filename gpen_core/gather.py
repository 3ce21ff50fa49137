"""Crops of several pictures share the batches of a network, which never waits for more of them.

Where there are several networks, a batch is for one of them: for one that the oldest picture needs, with crops of the
pictures behind it that need the same.

A crop's neighbours in a batch don't enter into its result, but their number may: kernels for another batch size can
round differently, which in float32 changes a pixel by a level of 255 at most. With a batch of 1 it can't.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Generic, TypeVar

from gpen_core.backend import Batched, CropRuntime, Pending, Several, submit
from gpen_core.types import Image

IN_FLIGHT = 2
"""Batches on the device at once: one that runs, and the next, which begins without a gap."""

Key = TypeVar("Key")


@dataclass(frozen=True, eq=False)
class Landed(Generic[Key]):
    """What the network made of one picture's crops: a picture or None for each, or the error that left it with none.

    seconds: of the network, its share of each batch's.
    """

    key: Key
    pictures: tuple[Image | None, ...] = ()
    seconds: float = 0.0
    error: Exception | None = None


NOTHING: Landed[None] = Landed(None)
"""For a picture without crops."""


@dataclass(eq=False)
class _Crops(Generic[Key]):
    """One picture's crops: which still wait, what came back by their places, and whether nothing more is wanted."""

    key: Key
    crops: Sequence[Image]
    waiting: tuple[int, ...]
    pictures: dict[int, Image | None] = field(default_factory=dict)
    seconds: float = 0.0
    failed: bool = False

    def side(self, place: int) -> int:
        return self.crops[place].shape[0]

    def waiting_of(self, side: int) -> tuple[int, ...]:
        return tuple(place for place in self.waiting if self.side(place) == side)

    def send(self, places: tuple[int, ...]) -> _Part[Key]:
        self.waiting = tuple(place for place in self.waiting if place not in places)
        return _Part(self, places)


@dataclass(frozen=True, eq=False)
class _Part(Generic[Key]):
    """The crops of one picture in one batch, by their places in it."""

    source: _Crops[Key]
    places: tuple[int, ...]

    @property
    def crops(self) -> list[Image]:
        return [self.source.crops[place] for place in self.places]


@dataclass(frozen=True, eq=False)
class _Flight(Generic[Key]):
    parts: tuple[_Part[Key], ...]
    pending: Pending
    started: float


@dataclass(frozen=True, eq=False)
class _Refused:
    """A batch that could not even be started."""

    error: Exception

    def done(self) -> bool:
        return True

    def result(self) -> list[Image | None]:
        raise self.error


class Gatherer(Generic[Key]):
    """Makes batches of crops, the oldest picture's first, for one thread to drive a runtime with.

    A batch is as large as its network takes, or as what is there; with a runtime that does not say how many crops it
    takes, each picture's go by themselves. If a batch raises, each of its pictures is tried alone, so that the others
    don't share the fate of the one that caused it.
    """

    def __init__(self, runtime: CropRuntime) -> None:
        self._runtime = runtime
        self._waiting: deque[_Crops[Key]] = deque()
        self._flying: deque[_Flight[Key]] = deque()
        self._last_landing = 0.0

    @property
    def flying(self) -> int:
        """Batches that were launched and not collected."""
        return len(self._flying)

    @property
    def limit(self) -> int:
        """Crops of several pictures in one batch at most."""
        return self._runtime.max_batch if isinstance(self._runtime, Batched) else 1

    @property
    def hungry(self) -> bool:
        """Whether the next batch has room for more."""
        if not self._waiting or not isinstance(self._runtime, Batched):
            return not self._waiting
        side, room = self._next_call(self._runtime)
        return sum(len(source.waiting_of(side)) for source in self._waiting) < room

    def add(self, key: Key, crops: Sequence[Image]) -> None:
        """Take one picture's crops, of which there is at least one."""
        self._waiting.append(_Crops(key, crops, tuple(range(len(crops)))))

    def launch(self) -> bool:
        """Start a batch with what waits, unless enough of them are on their way. Whether one was started."""
        if not self._waiting or len(self._flying) >= IN_FLIGHT:
            return False
        parts = self._next_parts()
        started = time.perf_counter()
        pending: Pending
        try:
            pending = submit(self._runtime, [crop for part in parts for crop in part.crops])
        except Exception as error:
            pending = _Refused(error)
        self._flying.append(_Flight(parts, pending, started))
        return True

    def collect(self, wait: bool) -> list[Landed[Key]]:
        """The pictures that are complete by now; with `wait`, the oldest batch is waited for."""
        landed: list[Landed[Key]] = []
        while self._flying and (wait or self._flying[0].pending.done()):
            landed += self._land(self._flying.popleft())
            wait = False
        return landed

    def _next_call(self, runtime: Batched) -> tuple[int, int]:
        """The side of the crops in the next batch, and how many it takes."""
        oldest = self._waiting[0]
        sides = {oldest.side(place) for place in oldest.waiting}
        if not isinstance(runtime, Several):
            return sides.pop(), runtime.max_batch
        side = runtime.favourite(sides)
        return side, runtime.batch_of(side)

    def _next_parts(self) -> tuple[_Part[Key], ...]:
        if not isinstance(self._runtime, Batched):
            source = self._waiting.popleft()
            return (source.send(source.waiting),)
        side, room = self._next_call(self._runtime)
        parts = []
        for source in self._waiting:
            places = source.waiting_of(side)[:room]
            if places:
                parts.append(source.send(places))
                room -= len(places)
        self._waiting = deque(source for source in self._waiting if source.waiting)
        return tuple(parts)

    def _land(self, flight: _Flight[Key]) -> list[Landed[Key]]:
        results = self._results(flight)
        now = time.perf_counter()
        # While it waited behind another batch, the device was busy with that.
        seconds = now - max(flight.started, self._last_landing)
        self._last_landing = now
        total = sum(len(part.places) for part in flight.parts)
        landed = []
        for part, result in zip(flight.parts, results, strict=True):
            source = part.source
            if source.failed:
                continue
            source.seconds += seconds * len(part.places) / total
            if isinstance(result, Exception):
                source.failed = True
                self._waiting = deque(other for other in self._waiting if other is not source)
                landed.append(Landed(source.key, (), source.seconds, result))
                continue
            source.pictures.update(zip(part.places, result, strict=True))
            if len(source.pictures) == len(source.crops):
                pictures = tuple(source.pictures[place] for place in range(len(source.crops)))
                landed.append(Landed(source.key, pictures, source.seconds))
        return landed

    def _results(self, flight: _Flight[Key]) -> list[list[Image | None] | Exception]:
        """For each part its pictures, or why there are none."""
        try:
            pictures = flight.pending.result()
        except Exception as error:
            return [error] if len(flight.parts) == 1 else [self._alone(part) for part in flight.parts]
        ends = list(accumulate(len(part.places) for part in flight.parts))
        return [pictures[end - len(part.places) : end] for part, end in zip(flight.parts, ends, strict=True)]

    def _alone(self, part: _Part[Key]) -> list[Image | None] | Exception:
        try:
            return self._runtime(part.crops)
        except Exception as error:
            return error
