"""Batches that are on their way: what is launched before what is read, and failures that show late.

A GPU is played by events that the tests control; with `-m gpu` the real one has its turn.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from bench.model import random_generator
from gpen_core.backend import Asynchronous, Batched, CropRuntime
from gpen_core.config import GeneratorConfig
from gpen_core.errors import DeviceError
from gpen_core.runtime import ON_THEIR_WAY, Event, Runtime, RuntimeOptions
from gpen_core.types import Image

CONFIG = GeneratorConfig(32, 32, (16, 16, 12, 8), style_dim=16, n_mlp=2)


def crops(count: int, seed: int = 0) -> list[Image]:
    random = np.random.default_rng(seed)
    return [random.integers(0, 256, (32, 32, 3), np.uint8) for _ in range(count)]


def assert_same(results: Sequence[Image | None], expected: Sequence[Image | None]) -> None:
    for result, other in zip(results, expected, strict=True):
        assert result is not None and other is not None
        np.testing.assert_array_equal(result, other)


@dataclass(eq=False)
class LateEvent:
    """Happens when it is waited for, unless it fails then."""

    number: int
    log: list[str]
    error: Exception | None = None
    happened: bool = False

    def query(self) -> bool:
        return self.happened

    def synchronize(self) -> None:
        self.log.append(f"wait {self.number}")
        if self.error is not None:
            raise self.error
        self.happened = True


@dataclass(eq=False)
class Gpu:
    """Makes a runtime on the CPU behave like one on a GPU. fails: which batch, and how, when it is waited for."""

    fails: dict[int, Exception] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)

    def attach(self, runtime: Runtime) -> Runtime:
        runtime._download = self.download  # type: ignore[method-assign]
        return runtime

    def download(self, images: Tensor, finite: Tensor) -> tuple[Tensor, Tensor, Event | None]:
        number = sum(entry.startswith("launch") for entry in self.log)
        self.log.append(f"launch {len(images)}")
        return images, finite, LateEvent(number, self.log, self.fails.get(number))


def negative(image: Tensor) -> Tensor:
    return -image


def runtime_on(gpu: Gpu, max_batch: int = 4) -> Runtime:
    return gpu.attach(Runtime(negative, CONFIG, RuntimeOptions("cpu", max_batch=max_batch)))


def negatives(given: Sequence[Image]) -> list[Image | None]:
    return [np.bitwise_not(crop) for crop in given]


def test_a_runtime_is_what_the_stream_looks_for() -> None:
    runtime = Runtime(negative, CONFIG, RuntimeOptions("cpu"))
    assert isinstance(runtime, CropRuntime)
    assert isinstance(runtime, Asynchronous)
    assert isinstance(runtime, Batched)


def test_on_a_cpu_what_is_submitted_is_done() -> None:
    given = crops(3)
    pending = Runtime(negative, CONFIG, RuntimeOptions("cpu")).submit(given)
    assert pending.done()
    assert_same(pending.result(), negatives(given))
    assert_same(pending.result(), negatives(given))


def test_the_next_batch_is_launched_before_the_last_is_read() -> None:
    gpu = Gpu()
    runtime, first, second = runtime_on(gpu), crops(4, 1), crops(2, 2)
    one, other = runtime.submit(first), runtime.submit(second)
    assert gpu.log == ["launch 4", "launch 2"]
    assert not one.done()
    assert_same(other.result(), negatives(second))
    assert_same(one.result(), negatives(first))
    assert one.done()
    assert gpu.log == ["launch 4", "launch 2", "wait 1", "wait 0"]


def test_results_own_their_memory() -> None:
    gpu = Gpu()
    runtime, given = runtime_on(gpu), crops(2)
    pending = runtime.submit(given)
    (batch,) = pending.batches
    assert batch._sent is not None
    images = batch._sent[0]
    results = pending.result()
    # As the next batch does with pinned memory.
    images.numpy()[:] = 0
    assert_same(results, negatives(given))


def test_many_crops_are_not_all_on_their_way_at_once() -> None:
    gpu = Gpu()
    given = crops(50)
    pending = runtime_on(gpu, max_batch=4).submit(given)
    flying = most = 0
    for entry in gpu.log:
        flying += 1 if entry.startswith("launch") else -1
        most = max(most, flying)
    assert most == ON_THEIR_WAY + 1
    assert_same(pending.result(), negatives(given))


MEMORY = [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED")]


@pytest.mark.parametrize("error", MEMORY, ids=["allocator", "cudnn"])
def test_memory_that_runs_out_late_halves_the_batch(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    gpu = Gpu({0: error})
    runtime, given, others = runtime_on(gpu, max_batch=8), crops(8, 1), crops(3, 2)
    first, second = runtime.submit(given), runtime.submit(others)
    with caplog.at_level(logging.WARNING):
        assert_same(first.result(), negatives(given))
    assert_same(second.result(), negatives(others))
    assert "out of memory with 8 faces" in caplog.text
    assert [entry for entry in gpu.log if entry.startswith("launch")] == [
        "launch 8",
        "launch 3",
        "launch 4",
        "launch 4",
    ]
    assert runtime.max_batch == 4


def test_memory_for_a_single_face_runs_out_late() -> None:
    pending = runtime_on(Gpu({0: MEMORY[0]})).submit(crops(1))
    with pytest.raises(DeviceError, match="single 32 px face"):
        pending.result()


def test_other_errors_show_with_the_result() -> None:
    pending = runtime_on(Gpu({0: RuntimeError("CUDA error: an illegal memory access")})).submit(crops(2))
    with pytest.raises(RuntimeError, match="illegal"):
        pending.result()


def test_a_face_that_is_not_finite_is_computed_again_when_it_is_read() -> None:
    generator, given, gpu = random_generator(CONFIG), crops(3), Gpu()
    runtime = gpu.attach(Runtime(generator, CONFIG, RuntimeOptions("cpu", "bf16", max_batch=4)))
    honest = runtime._run

    def spoiled(pixels: Tensor) -> tuple[Tensor, Tensor]:
        images, _ = honest(pixels)
        return torch.zeros_like(images), torch.tensor([False, True, True])

    runtime._run = spoiled
    pending = runtime.submit(given)
    first, second, _ = pending.result()
    (exact,) = Runtime(generator, CONFIG, RuntimeOptions("cpu"))(given[:1])
    assert_same([first], [exact])
    assert second is not None and not second.any()


def test_padding_is_not_returned() -> None:
    options = RuntimeOptions("cpu", compile=True, compiler="eager", max_batch=4)
    gpu, given = Gpu(), crops(3)
    pending = gpu.attach(Runtime(negative, CONFIG, options)).submit(given)
    assert gpu.log == ["launch 4"]
    assert_same(pending.result(), negatives(given))


def test_the_number_of_neighbours_matters_by_a_level_at_most() -> None:
    runtime, given = Runtime(random_generator(CONFIG), CONFIG, RuntimeOptions("cpu", max_batch=8)), crops(8)
    together = runtime(given)
    for crop, result in zip(given, together, strict=True):
        (alone,) = runtime([crop])
        assert alone is not None and result is not None
        assert np.abs(alone.astype(int) - result).max() <= 1


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "limit"), [("fp32", 1), ("fp16", 2)])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_number_of_neighbours_matters_little(precision: str, limit: int, compiled: bool) -> None:
    options = RuntimeOptions("cuda", precision, compile=compiled, max_batch=8)
    runtime, given = Runtime(random_generator(CONFIG), CONFIG, options), crops(8)
    together = runtime(given)
    for crop, result in zip(given, together, strict=True):
        (alone,) = runtime([crop])
        assert alone is not None and result is not None
        assert np.abs(alone.astype(int) - result).max() <= limit


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_batches_on_their_way_do_not_meet(compiled: bool) -> None:
    """More of them than there are recorded graphs: each has its own memory when it leaves."""
    runtime = Runtime(random_generator(CONFIG), CONFIG, RuntimeOptions("cuda", "fp32", compile=compiled, max_batch=4))
    given = [crops(4, seed) for seed in range(12)]
    alone = [runtime(one) for one in given]
    pending = [runtime.submit(one) for one in given]
    for one, expected in reversed(list(zip(pending, alone, strict=True))):
        for result, other in zip(one.result(), expected, strict=True):
            assert result is not None and other is not None
            assert np.abs(result.astype(int) - other).max() <= 1


@pytest.mark.gpu
def test_a_result_is_not_waited_for_when_it_is_submitted() -> None:
    cycles = 1

    def slow(image: Tensor) -> Tensor:
        torch.cuda._sleep(cycles)
        return -image

    runtime, given = Runtime(slow, CONFIG, RuntimeOptions("cuda", max_batch=4)), crops(4)
    # Loading code for the device waits for it.
    runtime(given)
    cycles = 2_000_000_000
    pending = runtime.submit(given)
    assert not pending.done()
    assert_same(pending.result(), negatives(given))
    assert pending.done()


@pytest.mark.gpu
def test_results_leave_through_pinned_memory_and_own_theirs() -> None:
    runtime, given = Runtime(negative, CONFIG, RuntimeOptions("cuda", max_batch=4)), crops(4)
    pending = runtime.submit(given)
    (batch,) = pending.batches
    assert batch._sent is not None
    images, finite = batch._sent
    assert images.is_pinned() and finite.is_pinned()
    results = pending.result()
    images.numpy()[:] = 0
    assert_same(results, negatives(given))


@pytest.mark.gpu
def test_memory_that_runs_out_while_others_are_on_their_way() -> None:
    def hungry(image: Tensor) -> Tensor:
        if len(image) > 2:
            torch.empty(1 << 50, dtype=torch.uint8, device=image.device)
        return -image

    runtime = Runtime(hungry, CONFIG, RuntimeOptions("cuda", max_batch=2))
    small, large = crops(2, 1), crops(8, 2)
    first = runtime.submit(small)
    runtime.max_batch = 8
    second = runtime.submit(large)
    assert_same(second.result(), negatives(large))
    assert_same(first.result(), negatives(small))
    assert runtime.max_batch == 2


@pytest.mark.gpu
def test_threads_record_graphs_while_others_wait() -> None:
    from concurrent.futures import ThreadPoolExecutor

    runtime = Runtime(random_generator(CONFIG), CONFIG, RuntimeOptions("cuda", "fp32", compile=True, max_batch=8))
    exact = Runtime(random_generator(CONFIG), CONFIG, RuntimeOptions("cuda", "fp32", max_batch=8))
    given = [crops(1 + seed % 8, seed) for seed in range(24)]
    expected = [exact(one) for one in given]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(runtime, given))
    for one, other in zip(results, expected, strict=True):
        for a, b in zip(one, other, strict=True):
            assert a is not None and b is not None
            assert np.abs(a.astype(int) - b).max() <= 1
