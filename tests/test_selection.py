"""Several networks at once: which face goes through which, what stays in memory, and what does not go together."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from torch import Tensor

from gpen_convert.export import export_generator
from gpen_convert.generator import convert_generator
from gpen_core import image_io, runtime
from gpen_core.backend import Asynchronous, Batched, CropRuntime, Several, survey_weights
from gpen_core.batch import Files, run
from gpen_core.checkpoint import load_generator
from gpen_core.cli import run_command
from gpen_core.config import FFHQ_TEMPLATE, GeneratorConfig
from gpen_core.errors import CheckpointError, DeviceError, MissingWeightsError, UsageError
from gpen_core.footprint import Footprint
from gpen_core.gather import Gatherer
from gpen_core.plan import Job
from gpen_core.presets import PRESETS
from gpen_core.restorer import Options, Restorer
from gpen_core.runtime import Runtime, RuntimeOptions
from gpen_core.selection import COVERS, Candidate, Selection, find_all, load_weights
from gpen_core.types import Image
from tests.exported import WITHOUT_TORCH, converted, run_process
from tests.legacy import TINY, legacy_state
from tests.stubs import FixedDetector, config_of, face_at, smooth_picture
from tests.test_detect import centerface_stub

SIZES = (256, 512, 1024, 2048)
SMALL = (16, 32, 64)
LIGHT = Footprint(weights=100, face=10, batch=8)


def small_config(size: int, **settings: Any) -> GeneratorConfig:
    return GeneratorConfig(size, size, (8,) * (size.bit_length() - 2), style_dim=16, n_mlp=2, **settings)


class Engine:
    """A runtime that paints what it is given in one colour and remembers how many it got."""

    def __init__(self, size: int, colour: Sequence[int] = (255, 0, 0), failures: int = 0) -> None:
        self.config, self.description = config_of(size), f"stub {size}"
        self.colour, self.calls, self.failures = np.array(colour, np.uint8), [0][:0], failures

    def __call__(self, crops: Sequence[Image]) -> list[Image | None]:
        self.calls.append(len(crops))
        if self.failures:
            self.failures -= 1
            raise DeviceError("out of memory")
        return [np.broadcast_to(self.colour, crop.shape).copy() for crop in crops]


def candidate(engine: Engine, memory: Footprint = LIGHT, loads: list[int] | None = None) -> Candidate:
    def load() -> Engine:
        if loads is not None:
            loads.append(engine.config.input_size)
        return engine

    return Candidate(f"{engine.config.input_size}.safetensors", engine.config, memory, load)


def blank(size: int) -> Image:
    return np.zeros((size, size, 3), np.uint8)


# Which network a face goes through.


@pytest.mark.parametrize(
    ("side", "size"),
    [
        (1, 256),
        (256, 256),
        (256 * COVERS, 256),
        (256 * COVERS + 1, 512),
        (576, 512),
        (577, 1024),
        (1153, 2048),
        (9000, 2048),
    ],
)
def test_the_smallest_that_covers_the_crop(side: float, size: int) -> None:
    assert Selection([candidate(Engine(size)) for size in reversed(SIZES)]).choose(side) == size


def test_a_face_of_90_pixels_never_sees_2048() -> None:
    engines = {size: Engine(size) for size in SIZES}
    detector = FixedDetector([face_at(300, 200, 180)])
    assert detector.faces[0].width == 90
    loads: list[int] = []
    chosen = Selection([candidate(engine, loads=loads) for engine in engines.values()])
    result = Restorer(chosen, chosen.config, detector)(smooth_picture(600, 400))
    assert [len(engines[size].calls) for size in SIZES] == [1, 0, 0, 0]
    assert result.faces[0].weights == "256.safetensors"
    assert loads == [256]


def test_each_face_of_a_photo_has_its_own_and_the_rest_stays() -> None:
    engines = {size: Engine(size) for size in (32, 64, 128)}
    chosen = Selection([candidate(engine) for engine in engines.values()])
    faces = [face_at(400, 300, 150), face_at(60, 60, 30), face_at(200, 60, 60), face_at(60, 200, 35, degrees=30)]
    picture = smooth_picture(600, 400)
    result = Restorer(chosen, chosen.config, FixedDetector(faces))(picture)
    assert [face.weights for face in result.faces] == [f"{size}.safetensors" for size in (128, 32, 64, 32)]
    # Those of one size share a call.
    assert {size: engine.calls for size, engine in engines.items()} == {32: [2], 64: [1], 128: [1]}
    for face in faces:
        x, y = face.box.reshape(2, 2).mean(0).round().astype(int)
        assert result.image[y, x].tolist() == [255, 0, 0]
    assert np.array_equal(result.image[:, 520:], picture[:, 520:])


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_faces_that_overlap_are_pasted_in_the_order_of_detection(order: tuple[int, int]) -> None:
    red, blue = Engine(32, (255, 0, 0)), Engine(128, (0, 0, 255))
    chosen = Selection([candidate(red), candidate(blue)])
    faces = [face_at(150, 150, 35), face_at(150, 150, 140)]
    detector = FixedDetector([faces[i] for i in order])
    result = Restorer(chosen, chosen.config, detector)(smooth_picture(300, 300))
    assert result.image[150, 150].tolist() == ([0, 0, 255] if order == (0, 1) else [255, 0, 0])


def test_the_pictures_are_those_of_each_network_alone() -> None:
    def network(gain: float) -> Callable[[Tensor], Tensor]:
        return lambda x: x * gain

    runtimes = {size: Runtime(network(0.9 - size / 200), config_of(size), RuntimeOptions("cpu")) for size in (32, 64)}
    chosen = Selection(
        [Candidate(str(size), one.config, LIGHT, lambda one=one: one) for size, one in runtimes.items()]  # type: ignore[misc]
    )
    picture = smooth_picture(300, 200)
    faces = [face_at(60, 100, 30), face_at(200, 100, 90)]
    both = Restorer(chosen, chosen.config, FixedDetector(faces))(picture).image
    alone = picture
    for face, size in zip(faces, (32, 64), strict=True):
        alone = Restorer(runtimes[size], runtimes[size].config, FixedDetector([face]))(alone).image
    assert np.array_equal(both, alone)


@pytest.mark.parametrize(
    ("options", "side", "size"),
    [
        (Options(aligned=True), 30, 32),
        (Options(aligned=True), 60, 64),
        (Options(tile=64), 200, 64),
        (Options(tile=36), 200, 32),
    ],
)
def test_pictures_taken_as_a_whole(options: Options, side: int, size: int) -> None:
    engines = {each: Engine(each) for each in (32, 64)}
    chosen = Selection([candidate(engine) for engine in engines.values()])
    result = Restorer(chosen, chosen.config, None)(smooth_picture(side, side), options)
    assert (result.image == [255, 0, 0]).all()
    assert result.faces[0].weights == f"{size}.safetensors"
    assert {each for each, engine in engines.items() if engine.calls} == {size}


def test_no_network_is_named_where_none_was_used() -> None:
    chosen = Selection([candidate(Engine(32)), candidate(Engine(64))])
    restorer = Restorer(chosen, chosen.config, FixedDetector([face_at(100, 100, 50)]))
    assert restorer(smooth_picture(200, 200), Options(strength=0)).faces[0].weights == ""
    single = Restorer(Engine(32), config_of(32), FixedDetector([face_at(100, 100, 50)]))
    assert single(smooth_picture(200, 200)).faces[0].weights == ""


def test_results_come_in_the_order_of_the_crops() -> None:
    chosen = Selection([candidate(Engine(16, (1, 1, 1))), candidate(Engine(32, (2, 2, 2)))])
    sides = [32, 16, 16, 32, 16]
    pictures = chosen([blank(side) for side in sides])
    assert [picture is not None and picture.shape[0] for picture in pictures] == sides
    assert [int(picture.max()) for picture in pictures if picture is not None] == [2, 1, 1, 2, 1]
    assert chosen([]) == []


# What stays in memory.


def test_networks_are_loaded_when_they_are_needed() -> None:
    loads: list[int] = []
    chosen = Selection([candidate(Engine(size), loads=loads) for size in (16, 32, 64)])
    assert loads == [16]
    for side in (32, 16, 32):
        chosen([blank(side)])
    assert loads == [16, 32]
    assert chosen.description == "stub 16, stub 32 16/32/64 px"


def test_the_least_recently_used_network_goes() -> None:
    loads: list[int] = []
    # Two networks with one face in a call of one of them: 100 + 100 + 10.
    chosen = Selection([candidate(Engine(size), loads=loads) for size in (16, 32, 64)], memory=210)
    for side in (32, 16, 64, 16, 32):
        chosen([blank(side)])
    # 64 takes the place of 32, which was used before 16; then 32 that of 64.
    assert loads == [16, 32, 64, 32]
    # The working memory of many faces leaves room for nothing else.
    chosen([blank(32)] * 8)
    chosen([blank(16)])
    assert loads == [16, 32, 64, 32, 16]


def test_a_network_larger_than_the_limit_runs_alone() -> None:
    loads: list[int] = []
    large = candidate(Engine(64), replace(LIGHT, weights=10_000), loads)
    chosen = Selection([candidate(Engine(16), loads=loads), large], memory=500)
    for side in (64, 64, 16, 64):
        assert chosen([blank(side)])[0] is not None
    assert loads == [16, 64, 16, 64]


def test_what_is_in_memory_goes_first() -> None:
    loads: list[int] = []
    chosen = Selection([candidate(Engine(size), loads=loads) for size in (16, 32)], memory=110)
    for _ in range(3):
        chosen([blank(16), blank(32)])
    assert loads == [16, 32, 16, 32]


def test_graphs_of_earlier_calls_count() -> None:
    loads: list[int] = []
    graphs = replace(LIGHT, keeps=True)
    chosen = Selection([candidate(Engine(size), graphs, loads) for size in (16, 32)], memory=100 + 110 + 50)
    chosen([blank(16), blank(32)])
    chosen([blank(16), blank(32)])
    assert loads == [16, 32]
    # 1 + 2 + 4 faces now, and later too.
    chosen([blank(16)] * 4)
    assert loads == [16, 32]
    chosen([blank(32)])
    assert loads == [16, 32, 32]


def test_a_released_network_is_gone(tmp_path: Path) -> None:
    networks: list[Any] = []

    def load(size: int) -> Runtime:
        generator = load_generator(converted(tmp_path, small_config(size)))
        networks.append(weakref.ref(generator))
        return Runtime(generator, generator.config, RuntimeOptions("cpu"))

    candidates = [Candidate(str(s), small_config(s), LIGHT, lambda s=s: load(s)) for s in SMALL]  # type: ignore[misc]
    chosen = Selection(candidates, memory=150)
    for side in (32, 64, 16):
        assert chosen([blank(side)])[0] is not None
        gc.collect()
        assert [network() is not None for network in networks].count(True) == 1


def test_out_of_memory_is_tried_again_alone() -> None:
    loads: list[int] = []
    failing = Engine(32, failures=1)
    chosen = Selection([candidate(Engine(16), loads=loads), candidate(failing, loads=loads)])
    assert chosen([blank(32)])[0] is not None
    assert loads == [16, 32, 32]
    # Alone already: there is nothing left to release.
    failing.failures = 1
    with pytest.raises(DeviceError):
        chosen([blank(32)])
    assert failing.calls == [1, 1, 1]


def test_threads_share_a_selection() -> None:
    loads: list[int] = []
    chosen = Selection([candidate(Engine(size), loads=loads) for size in (16, 32, 64)], memory=150)
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda side: chosen([blank(side)])[0], SMALL * 20))
    assert [result is not None and result.shape[0] for result in results] == list(SMALL * 20)


def test_footprints() -> None:
    eager, graphs = Footprint(100, 10, 4), Footprint(100, 10, 4, keeps=True)
    assert (eager.held(3), eager.working(3, 0), eager.working(9, 9)) == (100, 130, 140)
    assert (graphs.held(0), graphs.held(4), graphs.working(1, 4), graphs.working(9, 1)) == (100, 170, 170, 170)


@pytest.mark.parametrize("size", SIZES)
def test_published_networks_fit_their_presets(size: int) -> None:
    """One face at a time on a CPU; a network of 2048 px runs alone there."""
    multiplier, narrow = (1, 0.5) if size == 256 else (2, 1.0)
    full = {4: 512, 8: 512, 16: 512, 32: 512, **{r: 16384 * multiplier // r for r in (64, 128, 256, 512, 1024, 2048)}}
    channels = tuple(int(width * narrow) for r, width in full.items() if r <= size)
    config = GeneratorConfig(size, size, channels, 512, 8)
    memory = runtime.estimate_footprint(config, 71_000_000, RuntimeOptions("cpu", max_batch=1))
    assert memory.weights == 284_000_000
    # As measured on a CPU, in GB of the process: 0.8, 1.7 and 3.1 from 512 to 2048 px.
    assert memory.face == {256: 8 * 32, 512: 8 * 128, 1024: 8 * 256, 2048: 8 * 512}[size] * 2**20 // (1 + (size == 256))
    fits = memory.working(1, 0) <= PRESETS["laptop"].networks
    assert fits == (size < 2048)


def test_compilers_store_weights_once_more() -> None:
    config = config_of(16)
    plain = runtime.estimate_footprint(config, 1000, RuntimeOptions("cpu"))
    assert (plain.weights, plain.batch) == (4000, 1)
    assert runtime.estimate_footprint(config, 1000, RuntimeOptions("cpu", compile=True)).weights == 8000
    assert runtime.estimate_footprint(config, 1000, RuntimeOptions("cpu", "bf16", max_batch=4)).weights == 6000


# Work that is on its way.


class Late(Engine):
    """An engine on a device that works by itself: what it was given is done when it is waited for.

    log: what all engines were given and waited for. errors: what goes wrong, call by call, when it is waited for;
    refusals: when it is given.
    """

    def __init__(self, size: int, log: list[str], max_batch: int = 4) -> None:
        super().__init__(size)
        self.max_batch, self.log = max_batch, log
        self.errors: list[Exception | None] = []
        self.refusals: list[Exception | None] = []

    def submit(self, crops: Sequence[Image]) -> Errand:
        self.log.append(f"give {self.config.input_size}")
        refusal = self.refusals.pop(0) if self.refusals else None
        if refusal is not None:
            raise refusal
        return Errand(self, crops, self.errors.pop(0) if self.errors else None)


@dataclass(eq=False)
class Errand:
    engine: Late
    crops: Sequence[Image]
    error: Exception | None
    landed: bool = False

    def done(self) -> bool:
        return self.landed

    def result(self) -> list[Image | None]:
        if not self.landed:
            self.engine.log.append(f"wait {self.engine.config.input_size}")
        self.landed = True
        if self.error is not None:
            raise self.error
        # Each crop's own level, so that a mix-up would show.
        return [np.bitwise_not(crop) for crop in self.crops]


def late(*sizes: int, memory: int | None = None) -> tuple[Selection, dict[int, Late], list[str]]:
    log: list[str] = []
    engines = {size: Late(size, log) for size in sizes}

    def noting(engine: Late) -> Callable[[], CropRuntime]:
        def load() -> Late:
            log.append(f"load {engine.config.input_size}")
            return engine

        return load

    light = replace(LIGHT, batch=6)
    chosen = Selection([Candidate(f"{s}", one.config, light, noting(one)) for s, one in engines.items()], memory)
    log.clear()
    return chosen, engines, log


def level(size: int, value: int) -> Image:
    return np.full((size, size, 3), value, np.uint8)


def seen(pictures: Sequence[Image | None]) -> list[tuple[int, int] | None]:
    return [None if picture is None else (picture.shape[0], 255 - int(picture.max())) for picture in pictures]


def test_it_is_what_the_stream_looks_for() -> None:
    chosen, engines, _ = late(16, 32)
    for kind in (CropRuntime, Asynchronous, Batched, Several):
        assert isinstance(chosen, kind)
    # 32 is not loaded yet: its footprint tells.
    assert (chosen.batch_of(16), chosen.batch_of(32), chosen.max_batch) == (4, 6, 6)
    chosen([blank(32)])
    engines[16].max_batch = 1
    assert (chosen.batch_of(16), chosen.batch_of(32), chosen.max_batch) == (1, 4, 4)


def test_engines_that_do_not_say_their_batch() -> None:
    chosen = Selection([candidate(Engine(16)), candidate(Engine(32))])
    assert chosen.batch_of(16) == chosen.batch_of(32) == chosen.max_batch == LIGHT.batch
    pending = chosen.submit([blank(32), blank(16)])
    assert pending.done()
    assert [picture is not None and picture.shape[0] for picture in pending.result()] == [32, 16]


def test_the_next_crops_are_given_before_the_last_are_waited_for() -> None:
    chosen, _, log = late(16, 32)
    first = chosen.submit([level(32, 1), level(16, 2), level(32, 3)])
    second = chosen.submit([level(16, 4)])
    assert log == ["give 16", "load 32", "give 32", "give 16"]
    assert not first.done()
    assert seen(second.result()) == [(16, 4)]
    assert second.done() and not first.done()
    assert seen(first.result()) == seen(first.result()) == [(32, 1), (16, 2), (32, 3)]
    assert first.done()
    assert log[4:] == ["wait 16", "wait 16", "wait 32"]


def test_a_network_stays_until_it_is_done_with_what_it_was_given() -> None:
    # Room for one network and a call.
    chosen, _, log = late(16, 32, memory=150)
    first, second = chosen.submit([level(16, 1), level(16, 2)]), chosen.submit([level(16, 3)])
    third = chosen.submit([level(32, 4)])
    assert sorted(log[2:4]) == ["wait 16", "wait 16"]
    assert log[4:] == ["load 32", "give 32"]
    assert first.done() and second.done() and not third.done()
    assert [seen(one.result()) for one in (first, second, third)] == [[(16, 1), (16, 2)], [(16, 3)], [(32, 4)]]
    assert log[6:] == ["wait 32"]


def test_one_call_through_networks_that_do_not_fit_together() -> None:
    chosen, _, log = late(16, 32, memory=150)
    assert seen(chosen([level(32, 1), level(16, 2), level(32, 3)])) == [(32, 1), (16, 2), (32, 3)]
    assert log == ["give 16", "wait 16", "load 32", "give 32", "wait 32"]


def test_what_nobody_wants_any_more_is_not_waited_for() -> None:
    chosen, _, log = late(16, 32, memory=150)
    chosen.submit([blank(16)])
    chosen.submit([blank(32)])
    assert log == ["give 16", "load 32", "give 32"]


def test_a_released_network_is_gone_though_its_results_are_held(tmp_path: Path) -> None:
    networks: list[Any] = []

    def load(size: int) -> Runtime:
        generator = load_generator(converted(tmp_path, small_config(size)))
        networks.append(weakref.ref(generator))
        return Runtime(generator, generator.config, RuntimeOptions("cpu"))

    candidates = [Candidate(str(s), small_config(s), LIGHT, lambda s=s: load(s)) for s in SMALL]  # type: ignore[misc]
    chosen = Selection(candidates, memory=150)
    pending = []
    for side in (32, 64, 16):
        pending.append(chosen.submit([blank(side)]))
        gc.collect()
        assert [network() is not None for network in networks].count(True) == 1
    assert [one.result()[0] is not None for one in pending] == [True] * 3


def test_memory_that_runs_out_late_is_tried_again_alone() -> None:
    chosen, engines, log = late(16, 32)
    engines[32].errors = [DeviceError("out of memory")]
    first, second = chosen.submit([level(32, 1), level(16, 2)]), chosen.submit([level(16, 3)])
    del log[:]
    assert seen(first.result()) == [(32, 1), (16, 2)]
    # Others are done before they go.
    assert log == ["wait 16", "wait 32", "wait 16", "load 32", "give 32", "wait 32"]
    assert seen(second.result()) == [(16, 3)]
    assert log[6:] == []


def test_memory_that_runs_out_alone_is_not_tried_again() -> None:
    chosen, engines, log = late(16, 32)
    engines[16].errors = [DeviceError("out of memory"), None]
    pending = chosen.submit([blank(16)])
    for _ in range(2):
        with pytest.raises(DeviceError, match="out of memory"):
            pending.result()
    assert log == ["give 16", "wait 16"]
    engines[32].errors = [DeviceError("out of memory"), DeviceError("out of memory, alone")]
    pending = chosen.submit([blank(32)])
    for _ in range(2):
        with pytest.raises(DeviceError, match="alone"):
            pending.result()
    assert log[2:] == ["load 32", "give 32", "wait 32", "load 32", "give 32", "wait 32"]


def test_memory_that_runs_out_while_a_network_has_to_go() -> None:
    """It is known when others make it leave, and tried again when its result is wanted."""
    chosen, engines, log = late(16, 32, memory=150)
    engines[16].errors = [DeviceError("out of memory")]
    first = chosen.submit([level(16, 1)])
    second = chosen.submit([level(32, 2)])
    assert log == ["give 16", "wait 16", "load 32", "give 32"]
    assert seen(first.result()) == [(16, 1)]
    assert log[4:] == ["wait 32", "load 16", "give 16", "wait 16"]
    assert seen(second.result()) == [(32, 2)]


def test_errors_stay_with_the_crops_that_caused_them() -> None:
    chosen, engines, log = late(16, 32, memory=150)
    engines[16].errors = [ValueError("culprit")]
    first, second, third = (chosen.submit([level(size, 1)]) for size in (16, 16, 32))
    assert seen(third.result()) == [(32, 1)]
    for _ in range(2):
        with pytest.raises(ValueError, match="culprit"):
            first.result()
    assert seen(second.result()) == [(16, 1)]
    assert log.count("give 16") == 2


def test_a_refusal_in_the_middle_leaves_nothing_on_its_way() -> None:
    chosen, engines, log = late(16, 32)
    engines[32].refusals = [ValueError("culprit")]
    before = chosen.submit([level(16, 1)])
    del log[:]
    with pytest.raises(ValueError, match="culprit"):
        chosen.submit([level(16, 2), level(32, 3)])
    assert log == ["give 16", "load 32", "give 32", "wait 16"]
    assert seen(before.result()) == [(16, 1)]
    assert seen(chosen([level(32, 4)])) == [(32, 4)]


def test_a_refusal_for_want_of_memory_is_tried_again_alone() -> None:
    chosen, engines, log = late(16, 32)
    engines[32].refusals = [DeviceError("out of memory")]
    pending = chosen.submit([level(16, 1), level(32, 2)])
    assert log == ["give 16", "load 32", "give 32", "wait 16", "load 32", "give 32"]
    assert seen(pending.result()) == [(16, 1), (32, 2)]


@pytest.mark.parametrize(("memory", "shortage"), [(150, None), (None, DeviceError("out of memory"))])
def test_threads_wait_for_results_while_others_change_the_networks(
    memory: int | None, shortage: DeviceError | None
) -> None:
    chosen, engines, _ = late(*SMALL, memory=memory)
    engines[32].errors = [shortage, None, None, ValueError("culprit")]

    def one(place: int) -> list[tuple[int, int] | None] | str:
        given = [level(SMALL[(place + step) % 3], place) for step in range(2)]
        try:
            return seen(chosen.submit(given).result())
        except ValueError as error:
            return str(error)

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(one, range(60)))
    assert results.count("culprit") == 1
    for place, result in enumerate(results):
        assert result in ([(SMALL[(place + step) % 3], place) for step in range(2)], "culprit")


def test_pictures_share_batches_of_each_network() -> None:
    chosen, _, log = late(16, 32)
    gatherer: Gatherer[int] = Gatherer(chosen)
    for key in range(4):
        gatherer.add(key, [level(32, 10 + key), level(16, 20 + key)])
    landed = []
    while gatherer.launch() or gatherer.flying:
        landed += gatherer.collect(wait=gatherer.flying == 2 or not gatherer.launch())
    assert [entry for entry in log if entry.startswith("give")] == ["give 16", "give 32"]
    assert [(one.key, seen(one.pictures)) for one in landed] == [
        (key, [(32, 10 + key), (16, 20 + key)]) for key in range(4)
    ]


@pytest.mark.parametrize("memory", [None, 1])
def test_a_stream_is_the_photos_one_by_one(memory: int | None, tmp_path: Path) -> None:
    """To the byte, on a CPU with a face at a time, whether all networks stay or one."""
    paths = [converted(tmp_path, small_config(size), str(size)) for size in SMALL]
    chosen = load_weights(paths, device="cpu", memory=memory)
    faces = [face_at(50, 60, 17), face_at(150, 80, 60), face_at(60, 110, 33), face_at(220, 120, 16)]
    restorer = Restorer(chosen, chosen.config, FixedDetector(faces))
    jobs = []
    for photo in range(5):
        source = tmp_path / f"{photo}.png"
        noise = np.random.RandomState(photo).randint(0, 256, (160, 280, 3)).astype(np.uint8)
        assert cv2.imwrite(str(source), noise)
        jobs.append(Job(source, tmp_path / "out" / source.name, tmp_path / "out"))
    summary = run(jobs, lambda: restorer, Options(), lambda outcome: None, files=Files(workers=2))
    assert summary.counts == {"restored": 5}
    for job in jobs:
        pixels = image_io.read(job.source).pixels
        alone = restorer(pixels).image
        assert not np.array_equal(alone, pixels)
        assert np.array_equal(image_io.read(job.target).pixels, alone)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("memory", [None, 1])
def test_networks_change_places_on_a_gpu_while_it_works(memory: int | None, compiled: bool, tmp_path: Path) -> None:
    paths = [converted(tmp_path, small_config(size), str(size)) for size in SMALL]
    chosen = load_weights(paths, device="cuda", precision="fp32", compile=compiled, max_batch=4, memory=memory)
    alone = [load_weights(path, device="cuda", precision="fp32") for path in paths]
    given = [[smooth_picture(size, size, 10 * call + i) for i, size in enumerate(SMALL * 2)] for call in range(8)]
    assert isinstance(chosen, Selection)
    pending = [chosen.submit(crops) for crops in given]
    for one, crops in zip(pending, given, strict=True):
        expected = [alone[SMALL.index(crop.shape[0])]([crop])[0] for crop in crops]
        for result, other in zip(one.result(), expected, strict=True):
            assert np.abs(np.asarray(result).astype(int) - np.asarray(other)).max() <= 1


# What does not go together.


@pytest.mark.parametrize(
    ("configs", "message"),
    [
        ([], "no weights"),
        ([small_config(16), small_config(16)], r"0\.safetensors and \S*1\.safetensors: both take crops of 16 px"),
        ([small_config(16), small_config(32, template=FFHQ_TEMPLATE)], r"different crops \(gpen, ffhq\).*--template"),
        ([small_config(32), small_config(16, task="inpainting")], r"1\.s.*for inpainting; only weights for restor"),
        ([small_config(16, task="colorization"), small_config(32, task="colorization")], "for colorization; only"),
    ],
)
def test_mixtures_say_what_is_wrong(configs: list[GeneratorConfig], message: str, tmp_path: Path) -> None:
    paths = [converted(tmp_path, config, str(i)) for i, config in enumerate(configs)]
    with pytest.raises(UsageError, match=message) as caught:
        Restorer.load(paths, None)
    assert "\n" not in str(caught.value)


def test_a_template_of_the_users_is_that_of_all(tmp_path: Path) -> None:
    paths = [
        converted(tmp_path, small_config(16), "a"),
        converted(tmp_path, small_config(32, template=FFHQ_TEMPLATE), "b"),
    ]
    assert Restorer.load(paths, None, template="ffhq").config.template == FFHQ_TEMPLATE
    with pytest.raises(UsageError, match="--template dlib"):
        Restorer.load(paths, None, template="dlib")


def test_weights_that_cannot_be_used_are_known_before_the_first_photo(tmp_path: Path) -> None:
    good, large = converted(tmp_path, small_config(16), "good"), converted(tmp_path, small_config(32), "large")
    content = large.read_bytes()
    for damaged in (content[:-1], content.replace(b'"constant"', b'"constbnt"'), b"<html>"):
        large.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"large\.safetensors"):
            Restorer.load([good, large], None)
    with pytest.raises(MissingWeightsError, match=r"absent\.safetensors"):
        Restorer.load([good, tmp_path / "absent.safetensors"], None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    paths = [converted(tmp_path, small_config(size), str(size)) for size in (16, 32)]
    with pytest.raises(DeviceError, match="no CUDA"):
        Restorer.load(paths, None, device="cuda")


# Files.


def test_exported_files_go_with_converted_ones(tmp_path: Path) -> None:
    paths = [converted(tmp_path, small_config(size), str(size)) for size in SMALL]
    export_generator(paths[1], format="onnx")
    onnx = tmp_path / "32.onnx"
    chosen = load_weights([paths[0], onnx], device="cpu")
    reference = load_weights(onnx, device="cpu")
    assert isinstance(chosen, Selection)
    crop = smooth_picture(32, 32)
    (one,), (other,) = chosen([crop]), reference([crop])
    assert one is not None
    assert np.array_equal(one, other)  # type: ignore[arg-type]
    assert chosen.description == "cpu fp32 eager, cpu fp32 onnxruntime 16/32 px"
    with pytest.raises(UsageError, match=r"32\.onnx: onnxruntime compiles by itself"):
        load_weights([paths[0], onnx], compile=True)
    with pytest.raises(UsageError, match=r"32\.onnx: is fp32, which --precision bf16"):
        load_weights([paths[0], onnx], precision="bf16")
    with pytest.raises(UsageError, match="--backend onnx"):
        load_weights([paths[0], onnx], backend="onnx")


def test_exported_files_need_no_torch(tmp_path: Path) -> None:
    paths = [converted(tmp_path, small_config(size), str(size)) for size in (16, 32)]
    for path in paths:
        export_generator(path, format="onnx")
    face = tmp_path / "face.png"
    assert cv2.imwrite(str(face), smooth_picture(30, 30))
    named = [part for path in paths for part in ("--weights", path.with_suffix(".onnx"))]
    done = run_process(WITHOUT_TORCH, ["enhance", face, "--aligned", *named, "--json"])
    assert (done.returncode, done.stderr) == (0, "")
    assert [Path(used["weights"]).name for used in json.loads(done.stdout)["faces"]] == ["32.onnx"]


def test_options_reach_every_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [converted(tmp_path, small_config(size), str(size)) for size in SMALL]
    seen: list[RuntimeOptions] = []

    class Watched(Runtime):
        def __init__(self, generator: Any, config: GeneratorConfig, options: RuntimeOptions) -> None:
            seen.append(options)
            super().__init__(generator, config, replace(options, compile=False))

    monkeypatch.setattr(runtime, "Runtime", Watched)
    chosen = load_weights(paths, device="cpu", precision="bf16", compile=True, max_batch=3)
    chosen([blank(16), blank(64)])
    assert seen == [RuntimeOptions("cpu", "bf16", compile=True, max_batch=3)] * 2


def test_memory_reaches_the_selection(tmp_path: Path) -> None:
    paths = [converted(tmp_path, small_config(size), str(size)) for size in SMALL]
    assert Restorer.load(paths, None, memory=123).runtime.memory == 123  # type: ignore[attr-defined]
    config, memory = survey_weights(paths[0])
    assert config == small_config(16)
    stored = sum(tensor.numel() for tensor in load_generator(paths[0]).state_dict().values())
    assert memory.weights == 4 * stored or torch.cuda.is_available()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a detector that finds faces of two sizes and photos; an empty folder of weights."""
    work, home = tmp_path / "work", tmp_path / "home"
    for folder in (work, home):
        folder.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("GPEN_CORE_HOME", str(home))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    detector = FixedDetector([face_at(50, 60, 17), face_at(150, 80, 60)])
    monkeypatch.setattr("gpen_core.restorer.load_detector", lambda path, **options: detector)
    (work / "detector.onnx").write_bytes(centerface_stub())
    (work / "in").mkdir()
    assert cv2.imwrite("in/photo.png", smooth_picture(240, 160))
    for size in SMALL:
        converted(work, small_config(size), str(size))
    return home


def enhance(*arguments: str) -> int:
    return run_command(["enhance", "in", "-o", "out", "--detector", "detector.onnx", *arguments])


def named(*sizes: int) -> list[str]:
    return [part for size in sizes for part in ("--weights", f"{size}.safetensors")]


def test_reports_say_which_weights_each_face_went_through(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert enhance(*named(64, 16, 32), "--json") == 0, capsys.readouterr().err
    record = json.loads(capsys.readouterr().out)
    assert [face["weights"] for face in record["faces"]] == ["16.safetensors", "64.safetensors"]
    assert enhance(*named(16, 64, 32), "--report", "report.jsonl", "--device", "cpu") == 0
    assert "2 faces (1 by 16, 1 by 64), cpu fp32 eager 16/32/64 px" in capsys.readouterr().out
    assert [face["weights"] for face in json.loads(Path("report.jsonl").read_text())["faces"]] == [
        "16.safetensors",
        "64.safetensors",
    ]


def test_photos_are_done_again_if_any_of_the_weights_changes(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def skipped(*arguments: str) -> bool:
        assert enhance("--skip-existing", *arguments) == 0, capsys.readouterr().err
        return "skipped, done before" in capsys.readouterr().out

    assert not skipped(*named(16, 64))
    assert skipped(*named(16, 64))
    assert skipped(*named(64, 16))
    assert not skipped(*named(16))
    assert not skipped(*named(16, 32, 64))
    assert not skipped(*named(16, 64))
    converted(Path(), replace(small_config(64), n_mlp=3), "64")
    assert not skipped(*named(16, 64))


def test_auto_takes_what_is_here(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(legacy_state(TINY), "old.pth")
    for name, size in (("GPEN-BFR-256", 16), ("gpen-open-256", 16), ("gpen-open-512", 32), ("GPEN-BFR-2048", 64)):
        converted(home, small_config(size), name)
    convert_generator(Path("old.pth"), home / "GPEN-Inpainting-1024.safetensors", task="inpainting")
    names = ["GPEN-BFR-256", "gpen-open-512", "GPEN-BFR-2048"]
    assert [path.stem for path in find_all("auto")] == names
    assert enhance("--weights", "auto", "--json") == 0, capsys.readouterr().err
    faces = json.loads(capsys.readouterr().out)["faces"]
    assert [Path(face["weights"]).stem for face in faces] == ["GPEN-BFR-256", "GPEN-BFR-2048"]
    # An original counts for more than the bundled one of its size, whatever its kind of file.
    converted(home, small_config(32), "GPEN-BFR-512")
    export_generator(home / "GPEN-BFR-512.safetensors", format="onnx")
    assert [path.name for path in find_all("auto")][1] == "GPEN-BFR-512.safetensors"
    (home / "GPEN-BFR-512.safetensors").unlink()
    assert [path.name for path in find_all("auto")][1] == "GPEN-BFR-512.onnx"
    assert [path.stem for path in find_all("auto", "torch")] == names
    assert [path.name for path in find_all("auto", "onnx")] == ["GPEN-BFR-512.onnx"]


@pytest.mark.parametrize("name", ["GPEN-BFR-2048.safetensors", "gpen-open-512.safetensors", "GPEN-BFR-1024.onnx"])
@pytest.mark.parametrize("content", [b"", b"<html>", b"\x80\x00\x00\x00\x00\x00\x00\x00{", b"\x08\x08"])
def test_a_damaged_file_that_auto_finds(
    content: bytes, name: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line names the file, which nobody did, and says how to go on. Alone or one of several."""
    (home / name).write_bytes(content)
    assert enhance("--weights", "auto") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith(f"gpen-core: {home / name}: ")
    assert "(found by --weights auto: replace it, move it away, or name the weights to use)" in error
    assert not Path("out/photo.png").exists()
    assert enhance("--weights", str(home / name)) == 2
    assert "--weights auto" not in capsys.readouterr().err


def test_a_damaged_file_that_is_needed_late(home: Path) -> None:
    """Its header is sound, so it is found when the first face needs it."""
    for name, size in (("GPEN-BFR-256", 16), ("gpen-open-512", 32)):
        converted(home, small_config(size), name)
    runtime = load_weights("auto", device="cpu")
    (home / "gpen-open-512.safetensors").write_bytes(b"<html>")
    with pytest.raises(CheckpointError, match=r"gpen-open-512\.safetensors: looks like .* \(found by --weights auto"):
        runtime([np.zeros((32, 32, 3), np.uint8)])


def test_auto_with_the_bundled_weights_alone(home: Path) -> None:
    assert find_all("auto") == find_all("gpen-open-512")
    assert isinstance(load_weights("auto", device="cpu"), Runtime)
    with pytest.raises(MissingWeightsError, match=r"gpen-open-512\.onnx is not here"):
        find_all("auto", "onnx")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--weights", "auto", *named(16)], 1, "name no other weights"),
        ([*named(16), "--weights", "none.safetensors"], 2, "none.safetensors"),
        ([*named(16, 16)], 1, "both take crops of 16 px"),
        ([*named(16), "--weights", "detector.onnx"], 2, "detector.onnx"),
        ([*named(16, 32), "--backend", "onnx"], 1, "--backend onnx"),
        ([*named(16, 32), "--precision", "fp16", "--device", "cpu"], 2, "fp16"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], code: int, words: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert enhance(*arguments) == code
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    assert words in error
    assert not Path("out/photo.png").exists()


def test_presets_limit_what_stays(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int | None] = []
    real = Selection.__init__

    def watched(self: Selection, candidates: Sequence[Candidate], memory: int | None = None) -> None:
        seen.append(memory)
        real(self, candidates, memory)

    monkeypatch.setattr(Selection, "__init__", watched)
    assert enhance(*named(16, 32)) == 0
    assert enhance(*named(16, 32), "--preset", "laptop") == 0
    assert seen == [None, PRESETS["laptop"].networks]
