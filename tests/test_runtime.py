"""Devices, precisions, batches, and what happens when a network or the memory fails."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from bench.model import random_generator
from gpen_core import runtime
from gpen_core.config import GeneratorConfig
from gpen_core.errors import DeviceError, UsageError
from gpen_core.model import Generator
from gpen_core.runtime import (
    BUCKETS,
    Runtime,
    RuntimeOptions,
    choose_device,
    choose_precision,
    compiles_kernels,
    lower,
    plan_batches,
)
from gpen_core.types import Image

CONFIG = GeneratorConfig(32, 32, (16, 16, 12, 8), style_dim=16, n_mlp=2)
ENLARGING = GeneratorConfig(16, 32, (16, 16, 12, 8), style_dim=16, n_mlp=2)
# Compiling takes seconds for each level.
SMALL = GeneratorConfig(8, 8, (8, 8), style_dim=8, n_mlp=1)
CPU = RuntimeOptions(device="cpu")


def crops(count: int, size: int = 32) -> list[Image]:
    random = np.random.default_rng(count)
    return [random.integers(0, 256, (size, size, 3), np.uint8) for _ in range(count)]


def assert_same(result: object, expected: object) -> None:
    """Equal pictures; None equals nothing."""
    assert isinstance(result, np.ndarray)
    np.testing.assert_array_equal(result, np.asarray(expected))


@pytest.fixture(scope="module")
def generator() -> Generator:
    return random_generator(CONFIG)


class Recorder:
    """An identity network that remembers its batches and fails above a size."""

    def __init__(self, limit: int = 99, error: Exception | None = None) -> None:
        self.batches: list[int] = []
        self.limit, self.error = limit, error or torch.OutOfMemoryError("CUDA out of memory")

    def __call__(self, image: Tensor) -> Tensor:
        self.batches.append(len(image))
        if len(image) > self.limit:
            raise self.error
        return image


def test_identity_returns_every_level_unchanged() -> None:
    levels = np.repeat(np.arange(256, dtype=np.uint8), 12).reshape(32, 32, 3)
    (result,) = Runtime(lambda x: x, CONFIG, CPU)([levels])
    assert result is not None
    assert_same(result, levels)
    assert result.flags.c_contiguous


def test_zeroing_channel_0_removes_red_and_only_red() -> None:
    def without_red(x: Tensor) -> Tensor:
        x = x.clone()
        x[:, 0] = -1
        return x

    (crop,) = crops(1)
    (result,) = Runtime(without_red, CONFIG, CPU)([crop])
    assert result is not None
    assert_same(result[..., 0], 0)
    assert_same(result[..., 1:], crop[..., 1:])


def test_no_crops_give_no_results() -> None:
    assert Runtime(lambda x: x, CONFIG, CPU)([]) == []


def test_batches_are_at_most_max_batch_and_keep_the_order() -> None:
    network, given = Recorder(), crops(7)
    results = Runtime(network, CONFIG, RuntimeOptions("cpu", max_batch=3))(given)
    assert network.batches == [3, 3, 1]
    for result, crop in zip(results, given, strict=True):
        assert_same(result, crop)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: not enough memory"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        MemoryError(),
    ],
)
def test_out_of_memory_halves_the_batch_and_restores_every_face(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    network, given = Recorder(limit=3, error=error), crops(90)
    runtime = Runtime(network, CONFIG, RuntimeOptions("cpu", max_batch=16))
    with caplog.at_level(logging.WARNING):
        results = runtime(given)
    for result, crop in zip(results, given, strict=True):
        assert_same(result, crop)
    assert network.batches[:4] == [16, 8, 4, 2]
    assert set(network.batches[4:]) == {2}
    assert "out of memory with 16 faces" in caplog.text
    network.batches.clear()
    runtime(given[:4])
    assert network.batches == [2, 2], "the smaller batch is remembered"


def test_one_face_that_does_not_fit_is_a_device_error() -> None:
    with pytest.raises(DeviceError, match="single 32 px face"):
        Runtime(Recorder(limit=0), CONFIG, CPU)(crops(2))


def test_other_errors_are_not_taken_for_memory() -> None:
    with pytest.raises(RuntimeError, match="shape"):
        Runtime(Recorder(limit=0, error=RuntimeError("bad shape")), CONFIG, CPU)(crops(1))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_face_that_is_not_finite_fails_alone(value: float) -> None:
    def spoils_second(x: Tensor) -> Tensor:
        x = x.clone()
        x[1, 0, 0, 0] = value
        return x

    first, second, third = Runtime(spoils_second, CONFIG, RuntimeOptions("cpu", max_batch=3))(crops(3))
    assert first is not None
    assert second is None
    assert third is not None


def test_a_low_precision_failure_is_computed_again_in_float32(
    generator: Generator, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = Runtime(generator, CONFIG, RuntimeOptions("cpu", "bf16", max_batch=4))
    given, honest = crops(3), runtime._run

    def spoiled(pixels: Tensor) -> tuple[Tensor, Tensor]:
        images, _ = honest(pixels)
        return images, torch.tensor([True, False, True])

    runtime._run = spoiled
    with caplog.at_level(logging.WARNING):
        results = runtime(given)
    (expected,) = Runtime(generator, CONFIG, CPU)(given[1:2])
    assert_same(results[1], expected)
    assert "again in fp32" in caplog.text


def test_not_finite_even_in_float32_is_no_picture() -> None:
    spoiled = random_generator(CONFIG)
    spoiled.get_parameter("to_rgb.3.bias").data.fill_(float("inf"))
    assert Runtime(spoiled, CONFIG, RuntimeOptions("cpu", "bf16"))(crops(1)) == [None]


def test_bf16_is_near_fp32_and_leaves_the_given_weights_alone(generator: Generator) -> None:
    given = crops(4)
    exact = Runtime(generator, CONFIG, CPU)(given)
    low = Runtime(generator, CONFIG, RuntimeOptions("cpu", "bf16"))(given)
    for a, b in zip(exact, low, strict=True):
        assert a is not None and b is not None
        assert 0 < np.abs(a.astype(int) - b).mean() < 1
    assert {p.dtype for p in generator.parameters()} == {torch.float32}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("picture", ["black", "white", "checkerboard"])
def test_extreme_inputs_are_finite_and_near_float32(generator: Generator, precision: str, picture: str) -> None:
    board = np.indices((32, 32)).sum(0) % 2 * 255
    flat = {"black": np.zeros((32, 32)), "white": np.full((32, 32), 255), "checkerboard": board}[picture]
    crop = np.repeat(flat[..., None], 3, 2).astype(np.uint8)
    (exact,) = Runtime(generator, CONFIG, CPU)([crop])
    (result,) = Runtime(generator, CONFIG, RuntimeOptions("cpu", precision))([crop])
    assert exact is not None and result is not None
    assert result.std() > 1
    assert np.abs(exact.astype(int) - result).mean() < 1


def test_styles_and_demodulation_stay_in_float32(generator: Generator) -> None:
    low = random_generator(CONFIG)
    lower(low, torch.float16)
    assert low.layers[0].weight.dtype == low.encoder[0].weight.dtype == torch.float16
    for name in ("to_latent.weight", "mapping.0.weight", "styles.weight"):
        assert low.get_parameter(name).dtype == torch.float32
    styles, gains = low.modulation(torch.full((1, 16, 4, 4), 300.0, dtype=torch.float16))
    assert {t.dtype for t in (*styles, *gains)} == {torch.float32}


def test_the_same_picture_twice_gives_the_same_bytes(generator: Generator) -> None:
    a, b = crops(2)
    runtime = Runtime(generator, CONFIG, RuntimeOptions("cpu", max_batch=2))
    first, again, alone = runtime([a, b]), runtime([a, a]), runtime([a, b])
    assert_same(first[0], again[0])
    assert_same(first[0], alone[0])


def test_noise_of_an_enlarging_network_is_the_same_in_every_call() -> None:
    runtime = Runtime(random_generator(ENLARGING), ENLARGING, CPU)
    (crop,) = crops(1, 16)
    (first,), (second,) = runtime([crop]), runtime([crop])
    assert first is not None and first.shape == (32, 32, 3)
    assert_same(first, second)


def test_two_threads_with_two_pictures_never_meet(generator: Generator) -> None:
    runtime, given = Runtime(generator, CONFIG, RuntimeOptions("cpu", threads=1)), crops(6)
    # One by one: a batch of another size may be rounded otherwise.
    expected = [runtime([crop])[0] for crop in given]
    results: dict[int, list[Image | None]] = {}

    def work(i: int) -> None:
        results[i] = [runtime([given[i]])[0] for _ in range(3)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(given))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, face in enumerate(expected):
        for result in results[i]:
            assert_same(result, face)


def test_global_switches_are_put_back(generator: Generator) -> None:
    def state() -> tuple[object, ...]:
        cudnn = torch.backends.cudnn
        return (
            torch.get_num_threads(),
            torch.get_float32_matmul_precision(),
            cudnn.enabled,
            cudnn.benchmark,
            cudnn.deterministic,
        )

    before = state()
    Runtime(generator, CONFIG, RuntimeOptions("cpu", threads=1))(crops(1))
    assert state() == before
    with pytest.raises(RuntimeError, match="bad"):
        Runtime(Recorder(0, RuntimeError("bad")), CONFIG, RuntimeOptions("cpu", threads=1))(crops(1))
    assert state() == before


def test_threads_hold_during_the_call() -> None:
    seen = []

    def network(x: Tensor) -> Tensor:
        seen.append(torch.get_num_threads())
        return x

    Runtime(network, CONFIG, RuntimeOptions("cpu", threads=1))(crops(1))
    assert seen == [1]


@pytest.mark.parametrize(
    ("count", "largest", "plan"),
    [
        (1, 8, [(1, 1)]),
        (2, 8, [(2, 2)]),
        (3, 8, [(3, 4)]),
        (5, 8, [(4, 4), (1, 1)]),
        (6, 8, [(6, 8)]),
        (7, 8, [(7, 8)]),
        (9, 8, [(8, 8), (1, 1)]),
        (13, 16, [(13, 16)]),
        (3, 1, [(1, 1)] * 3),
        (7, 3, [(2, 2), (2, 2), (2, 2), (1, 1)]),
    ],
)
def test_batches_of_compiled_networks(count: int, largest: int, plan: list[tuple[int, int]]) -> None:
    assert plan_batches(count, largest) == plan


@pytest.mark.parametrize("largest", BUCKETS)
def test_every_crop_is_planned_once_and_buckets_bound_the_sizes(largest: int) -> None:
    for count in range(40):
        plan = plan_batches(count, largest)
        assert sum(taken for taken, _ in plan) == count
        assert all(taken <= bucket <= largest and bucket in BUCKETS for taken, bucket in plan)


def compiled_runtime() -> Runtime:
    options = RuntimeOptions("cpu", compile=True, compiler="aot_eager", max_batch=4)
    return Runtime(random_generator(SMALL), SMALL, options)


@pytest.fixture(scope="module")
def compiled() -> Runtime:
    return compiled_runtime()


def test_recompilations_are_bounded_by_the_buckets() -> None:
    from torch._dynamo.utils import counters

    # Nothing that other tests compiled counts.
    torch._dynamo.reset()
    counters.clear()
    compiled = compiled_runtime()
    eager = Runtime(random_generator(SMALL), SMALL, CPU)
    for faces in (1, 2, 3, 4, 5, 6, 7, 8, 9):
        given = crops(faces, 8)
        for a, b in zip(compiled(given), eager(given), strict=True):
            assert a is not None and b is not None
            assert np.abs(a.astype(int) - b).max() <= 1
    assert counters["stats"]["unique_graphs"] == 3, "one graph for each of the buckets 1, 2, 4"
    assert not counters["graph_break"]


def test_padding_does_not_change_a_result(compiled: Runtime) -> None:
    given = crops(4, 8)
    full, padded = compiled(given), compiled(given[:3])
    for a, b in zip(full, padded, strict=False):
        assert_same(a, b)


def test_compiling_an_enlarging_network_keeps_the_noise() -> None:
    config = GeneratorConfig(8, 16, (8, 8, 8), style_dim=8, n_mlp=1)
    generator, given = random_generator(config), crops(1, 8)
    (expected,) = Runtime(generator, config, CPU)(given)
    (result,) = Runtime(generator, config, RuntimeOptions("cpu", compile=True, compiler="aot_eager"))(given)
    assert expected is not None and result is not None
    assert np.abs(expected.astype(int) - result).max() <= 1


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [True, False])
def test_inductor_computes_the_same(ahead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not ahead:
        monkeypatch.setattr(runtime, "compiles_ahead", lambda device: False)
    generator, given = random_generator(CONFIG), crops(2)
    eager = Runtime(generator, CONFIG, CPU)(given)
    result = Runtime(generator, CONFIG, RuntimeOptions("cpu", compile=True, cache=tmp_path))(given)
    for a, b in zip(result, eager, strict=True):
        assert a is not None and b is not None
        assert np.abs(a.astype(int) - b).max() <= 1


def test_compiling_without_a_compiler_is_one_line(
    generator: Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler

    def none() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    with pytest.raises(DeviceError, match=r"C\+\+ compiler") as caught:
        Runtime(generator, CONFIG, RuntimeOptions("cpu", compile=True, cache=tmp_path))
    assert "\n" not in str(caught.value)


def test_the_kernels_need_a_gpu(generator: Generator) -> None:
    with pytest.raises(DeviceError, match="CUDA"):
        Runtime(generator, CONFIG, RuntimeOptions("cpu", compile=True, compiler="kernels"))


@pytest.mark.parametrize("name", ["gpu", "tpu", "cuda:x", "mps", ""])
def test_unknown_devices_are_usage_errors(name: str) -> None:
    with pytest.raises(UsageError, match="unknown device"):
        choose_device(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_without_cuda_is_an_error_and_never_the_cpu() -> None:
    with pytest.raises(DeviceError, match="sees no CUDA device"):
        choose_device("cuda")
    assert choose_device("auto").type == "cpu"


@pytest.mark.parametrize("name", ["fp16", "tf32"])
def test_precisions_that_need_a_gpu(name: str) -> None:
    with pytest.raises(DeviceError, match=name):
        choose_precision(name, torch.device("cpu"))


@pytest.mark.parametrize(
    "make",
    [
        lambda: RuntimeOptions(precision="int8"),
        lambda: RuntimeOptions(max_batch=0),
        lambda: RuntimeOptions(threads=0),
    ],
)
def test_senseless_options_are_usage_errors(make: Callable[[], RuntimeOptions]) -> None:
    with pytest.raises(UsageError):
        make()


def test_the_description_names_device_precision_and_mode(generator: Generator, compiled: Runtime) -> None:
    assert Runtime(generator, CONFIG, RuntimeOptions("cpu", "bf16")).description == "cpu bf16 eager"
    assert compiled.description == "cpu fp32 aot_eager"
    assert Runtime(lambda x: x, CONFIG, RuntimeOptions("cpu", "bf16")).description == "cpu fp32 eager"


def test_warm_up_compiles_every_bucket_up_to_the_batch() -> None:
    network = Recorder()
    Runtime(network, CONFIG, RuntimeOptions("cpu", max_batch=4)).warm_up()
    assert network.batches == [1, 2, 4]


def test_which_triton_compiles_the_kernels() -> None:
    assert compiles_kernels((3, 2), (8, 0)) and compiles_kernels((3, 10), (7, 0)) and compiles_kernels((4, 0), (12, 0))
    for version, capability in (((3, 1), (9, 0)), ((3, 2), (7, 5)), ((3, 6), (6, 1))):
        assert not compiles_kernels(version, capability)


def test_importing_is_silent_and_changes_no_setting() -> None:
    code = (
        "import torch; f = lambda: (torch.get_num_threads(), torch.get_float32_matmul_precision(),"
        " torch.backends.cudnn.benchmark); a = f(); import gpen_core.runtime; assert a == f()"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
