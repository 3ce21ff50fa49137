"""Which crops share a batch, when it is launched, and what becomes of each picture; no threads, no network."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from gpen_core.config import PictureFormat
from gpen_core.gather import Gatherer, Landed
from gpen_core.types import Image
from tests.stubs import config_of

CULPRIT = 13


def crops(*levels: int, side: int = 4) -> list[Image]:
    return [np.full((side, side, 3), level, np.uint8) for level in levels]


def levels(pictures: Sequence[Image | None]) -> list[int | None]:
    return [None if picture is None else int(picture[0, 0, 0]) for picture in pictures]


@dataclass(eq=False)
class Flight:
    """A batch that is done when the test says so. Crops become their negative; 255 becomes nothing."""

    crops: Sequence[Image]
    landed: bool = True
    error: Exception | None = None

    def done(self) -> bool:
        return self.landed

    def result(self) -> list[Image | None]:
        if self.error is not None:
            raise self.error
        return [None if crop[0, 0, 0] == 255 else np.bitwise_not(crop) for crop in self.crops]


@dataclass(eq=False)
class Device:
    """Remembers its batches. at_once: what it makes is there when it is asked. refuses: raises for the culprit when
    it is given, else when its result is wanted."""

    max_batch: int = 4
    at_once: bool = True
    refuses: bool = False
    flights: list[Flight] = field(default_factory=list)
    config: PictureFormat = field(default_factory=config_of)
    description: str = "stub"

    def submit(self, crops: Sequence[Image]) -> Flight:
        error = ValueError("culprit") if CULPRIT in levels(crops) else None
        self.flights.append(Flight(crops, self.at_once, error))
        if error is not None and self.refuses:
            raise error
        return self.flights[-1]

    def __call__(self, crops: Sequence[Image]) -> list[Image | None]:
        return self.submit(crops).result()

    @property
    def batches(self) -> list[list[int | None]]:
        return [levels(flight.crops) for flight in self.flights]


@dataclass(eq=False)
class Plain:
    """A runtime of which only the least is known."""

    seen: list[list[int | None]] = field(default_factory=list)
    config: PictureFormat = field(default_factory=config_of)
    description: str = "stub"

    def __call__(self, crops: Sequence[Image]) -> list[Image | None]:
        self.seen.append(levels(crops))
        return [np.bitwise_not(crop) for crop in crops]


@dataclass(eq=False)
class Networks(Device):
    """Several of them: for sides of 4 and 8, of which the last used one is in memory alone. Crops of 8 go in pairs."""

    here: int = 4

    def submit(self, crops: Sequence[Image]) -> Flight:
        (self.here,) = {crop.shape[0] for crop in crops}
        return super().submit(crops)

    def favourite(self, sides: Collection[int]) -> int:
        return self.here if self.here in sides else min(sides)

    def batch_of(self, side: int) -> int:
        return {4: self.max_batch, 8: 2}[side]


def drained(gatherer: Gatherer[str]) -> list[Landed[str]]:
    landed = []
    while gatherer.launch() or gatherer.flying:
        landed += gatherer.collect(wait=True)
    return landed


def test_batches_are_full_and_cross_pictures() -> None:
    device = Device(max_batch=4)
    gatherer: Gatherer[str] = Gatherer(device)
    for key, given in {"a": (1, 2, 3), "b": (4, 5, 6, 7, 8, 9), "c": (10,)}.items():
        gatherer.add(key, crops(*given))
    landed = drained(gatherer)
    assert device.batches == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10]]
    assert [(one.key, levels(one.pictures)) for one in landed] == [
        ("a", [254, 253, 252]),
        ("b", [251, 250, 249, 248, 247, 246]),
        ("c", [245]),
    ]


def test_a_lone_picture_goes_at_once() -> None:
    device = Device(max_batch=16)
    gatherer: Gatherer[str] = Gatherer(device)
    assert not gatherer.launch()
    gatherer.add("a", crops(1, 2))
    assert gatherer.hungry
    assert gatherer.launch()
    assert [one.key for one in gatherer.collect(wait=False)] == ["a"]
    assert device.batches == [[1, 2]]


def test_the_next_batch_is_launched_before_the_last_one_is_read() -> None:
    device = Device(max_batch=2, at_once=False)
    gatherer: Gatherer[str] = Gatherer(device)
    for key, level in {"a": 1, "b": 3, "c": 5}.items():
        gatherer.add(key, crops(level, level + 1))
    assert [gatherer.launch() for _ in range(3)] == [True, True, False], "two on the device, and no more"
    assert not gatherer.hungry
    assert gatherer.collect(wait=False) == []
    device.flights[0].landed = True
    assert [one.key for one in gatherer.collect(wait=False)] == ["a"]
    assert gatherer.launch()
    assert [one.key for one in gatherer.collect(wait=True)] == ["b"], "the oldest is waited for"
    assert gatherer.flying == 1


def test_a_smaller_batch_is_taken_up() -> None:
    device = Device(max_batch=4)
    gatherer: Gatherer[str] = Gatherer(device)
    gatherer.add("a", crops(*range(8)))
    gatherer.launch()
    device.max_batch = 2
    drained(gatherer)
    assert device.batches == [[0, 1, 2, 3], [4, 5], [6, 7]]


def test_pictures_that_are_none_stay_in_their_places() -> None:
    gatherer: Gatherer[str] = Gatherer(Device(max_batch=3))
    gatherer.add("a", crops(1, 255))
    gatherer.add("b", crops(255, 2))
    assert [levels(one.pictures) for one in drained(gatherer)] == [[254, None], [None, 253]]


@pytest.mark.parametrize("refuses", [True, False])
def test_only_the_culprit_of_a_batch_fails(refuses: bool) -> None:
    device = Device(max_batch=4, refuses=refuses)
    gatherer: Gatherer[str] = Gatherer(device)
    # The culprit's last two crops are in the next batch, or still wait when the first one fails.
    for key, given in {"a": (1, 2), "b": (3, CULPRIT, 5, 6), "c": (7, 8), "d": (9,)}.items():
        gatherer.add(key, crops(*given))
    landed = {one.key: one for one in drained(gatherer)}
    assert sorted(landed) == ["a", "b", "c", "d"]
    assert {key: one.error is not None for key, one in landed.items()} == {"a": 0, "b": 1, "c": 0, "d": 0}
    assert {key: levels(one.pictures) for key, one in landed.items()} == {
        "a": [254, 253],
        "b": [],
        "c": [248, 247],
        "d": [246],
    }


def test_a_picture_that_fails_alone_is_not_tried_again() -> None:
    device = Device(max_batch=4)
    gatherer: Gatherer[str] = Gatherer(device)
    gatherer.add("a", crops(CULPRIT, *range(8)))
    (landed,) = drained(gatherer)
    assert str(landed.error) == "culprit"
    assert device.batches[0] == [CULPRIT, 0, 1, 2]
    assert len(device.batches) <= 2, "what waits is dropped"


def test_of_a_runtime_without_batches_each_picture_has_its_own_call() -> None:
    plain = Plain()
    gatherer: Gatherer[str] = Gatherer(plain)
    gatherer.add("a", crops(1, 2, 3))
    assert not gatherer.hungry
    gatherer.add("b", crops(4))
    landed = drained(gatherer)
    assert plain.seen == [[1, 2, 3], [4]]
    assert [levels(one.pictures) for one in landed] == [[254, 253, 252], [251]]


def test_seconds_are_shared_by_the_crops_of_a_batch() -> None:
    gatherer: Gatherer[str] = Gatherer(Device(max_batch=4))
    gatherer.add("a", crops(1, 2, 3))
    gatherer.add("b", crops(4))
    first, second = drained(gatherer)
    assert first.seconds == pytest.approx(3 * second.seconds)
    assert second.seconds > 0


def test_a_batch_is_for_one_of_several_networks() -> None:
    networks = Networks(max_batch=4)
    gatherer: Gatherer[str] = Gatherer(networks)
    small, large = crops(1, 2, 3), crops(11, 12, 14, side=8)
    gatherer.add("a", [large[0], small[0], large[1], small[1], large[2]])
    gatherer.add("b", [small[2]])
    gatherer.add("c", crops(15, side=8))
    landed = drained(gatherer)
    # What "a" needs goes first, in the network that is here, and takes along what the others need from the same.
    assert networks.batches == [[1, 2, 3], [11, 12], [14, 15]]
    assert [(one.key, levels(one.pictures)) for one in landed] == [
        ("b", [252]),
        ("a", [244, 254, 243, 253, 241]),
        ("c", [240]),
    ]
    assert [picture.shape[0] for one in landed for picture in one.pictures if picture is not None] == [
        *[4],
        *[8, 4, 8, 4, 8],
        *[8],
    ]


def test_the_oldest_picture_does_not_wait_for_a_network_that_others_keep_busy() -> None:
    networks = Networks(max_batch=2, at_once=False)
    gatherer: Gatherer[str] = Gatherer(networks)
    gatherer.add("old", [*crops(1), *crops(2, side=8)])
    for level in range(20, 30):
        gatherer.add(str(level), crops(level))
    assert gatherer.launch() and gatherer.launch()
    assert networks.batches == [[1, 20], [2]]


def test_the_next_batch_has_room_for_crops_of_its_network() -> None:
    gatherer: Gatherer[str] = Gatherer(Networks(max_batch=3))
    assert gatherer.hungry
    gatherer.add("a", crops(1))
    gatherer.add("b", crops(2, 3, 5, 6, side=8))
    assert gatherer.hungry, "one of three"
    gatherer.add("c", crops(7, 8))
    assert not gatherer.hungry
    gatherer.launch()
    assert not gatherer.hungry, "two of two"


@pytest.mark.parametrize("refuses", [True, False])
def test_only_the_culprit_of_several_networks_fails(refuses: bool) -> None:
    networks = Networks(max_batch=4, refuses=refuses)
    gatherer: Gatherer[str] = Gatherer(networks)
    gatherer.add("a", [*crops(1), *crops(2, side=8)])
    gatherer.add("b", [*crops(CULPRIT), *crops(3, 4, side=8)])
    gatherer.add("c", [*crops(5), *crops(6, side=8)])
    landed = {one.key: one for one in drained(gatherer)}
    assert {key: one.error is not None for key, one in landed.items()} == {"a": 0, "b": 1, "c": 0}
    assert levels(landed["a"].pictures) == [254, 253]
    assert levels(landed["c"].pictures) == [250, 249]
    assert [4] not in networks.batches, "what waits of the culprit is dropped"
