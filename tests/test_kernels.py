"""The GPU's kernels against their eager twin: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bench.model import published_config, random_generator
from gpen_core.config import GeneratorConfig
from gpen_core.runtime import COMPILES_KERNELS, Runtime, RuntimeOptions, compiles_kernels

TRITON = importlib.metadata.version("triton") if importlib.util.find_spec("triton") else "0.0"
VERSION = tuple(int(part) for part in TRITON.split(".")[:2])
pytestmark = pytest.mark.skipif(COMPILES_KERNELS[0][0] > VERSION, reason="needs Triton 3.2")

# Widths that are no powers of two, an enlarging network, and both ways of a small convolution.
INTERPRETED = """
import torch
from bench.model import random_generator
from gpen_core import kernels
from gpen_core.config import GeneratorConfig

for config in (GeneratorConfig(8, 8, (12, 8), 16, 1), GeneratorConfig(8, 16, (8, 6, 8), 16, 2)):
    generator = random_generator(config)
    image = torch.rand(2, 3, 8, 8) * 2 - 1
    expected = generator(image)
    for kernels.SMALL, kernels.TINY_MAP in ((2048, 256), (0, 0)):
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 1e-2)):
            fused = kernels.FusedGenerator(generator, torch.device("cpu"), dtype)
            result = fused(image)
            torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="the compiled kernels are tested instead")
def test_interpreted_kernels_equal_the_eager_network() -> None:
    if VERSION == (3, 9):
        pytest.skip("Triton 3.9's interpreter makes an int32 of a bool that it broadcasts, and refuses that as a mask")
    path = os.pathsep.join(sys.path)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


class Compiling:
    """A kernel that is compiled for a GPU where it would be launched, and the machine code of all."""

    def __init__(self, kernel: Any, compiled: dict[str, int]) -> None:
        self.kernel, self.compiled = kernel, compiled

    def __getitem__(self, grid: object) -> Callable[..., None]:
        def launch(*arguments: object, **fixed: object) -> None:
            code = self.kernel.warmup(*arguments, grid=(1, 1, 1), **fixed).asm["cubin"]
            self.compiled[self.kernel.fn.__name__] = len(code)

        return launch


@pytest.mark.parametrize(("capability", "dtype"), [(75, torch.float16), (90, torch.float32), (90, torch.bfloat16)])
def test_every_kernel_compiles(capability: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the GPUs of Turing and Hopper, though there is none."""
    if not compiles_kernels(VERSION, divmod(capability, 10)):
        pytest.skip(f"Triton {TRITON} does not compile them for compute capability {capability / 10}")
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    from gpen_core import kernels

    compiled: dict[str, int] = {}
    monkeypatch.setattr(kernels, "launch", lambda kernel: Compiling(kernel, compiled))
    absent = SimpleNamespace(
        # Kernels are kept by device, so that none of these meets another.
        get_current_device=lambda: 1000 + capability,
        get_current_stream=lambda _=0: 0,
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
    )
    monkeypatch.setattr(driver, "_active" if hasattr(driver, "_active") else "active", absent)
    generator = random_generator(GeneratorConfig(32, 64, (32, 32, 24, 16, 8), 16, 2))
    kernels.FusedGenerator(generator, torch.device("cpu"), dtype)(torch.zeros(1, 3, 32, 32))
    written = {name for name, value in vars(kernels).items() if name.endswith("_kernel") and hasattr(value, "warmup")}
    assert set(compiled) == written
    assert min(compiled.values()) > 0


def test_kernels_compute_nothing_in_double_precision() -> None:
    """A package hands numbers over as float64, and one that is not rounded at once makes all it meets float64."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from gpen_core.kernels import merge_kernel, up_kernel

    tiles = {"up_kernel": {"TY": 2, "TX": 2, "UNROLL": 1}, "merge_kernel": {"STORE": True, "SKIP": True, "BP": 4}}
    for kernel in (up_kernel, merge_kernel):
        fixed = {**tiles[kernel.__name__], "RAW": True, "BC": 16}
        tensors = ("x", "out", "rgb", "skip", "features", "bias", "gain", "scale", "features_bias")
        kinds = dict.fromkeys((*tensors, "w_rgb", "b_rgb", "s_rgb"), "*fp32") | {"features_gain": "fp64"}
        signature = {name: "constexpr" if name in fixed else kinds.get(name, "i32") for name in kernel.arg_names}
        code = compile(ASTSource(kernel, signature, fixed), target=GPUTarget("cuda", 90, 32)).asm["ptx"]
        used = {line.split()[0] for line in code.splitlines() if ".f64" in line}
        assert {"cvt.rn.f32.f64"} <= used <= {".param", ".reg", "ld.param.f64", "cvt.rn.f32.f64"}


def test_one_trace_serves_every_batch() -> None:
    """As a package for a GPU needs it. Tracing runs nothing, so it needs none."""
    from gpen_core.kernels import FusedGenerator

    config = GeneratorConfig(32, 64, (32, 32, 24, 16, 8), 16, 2)
    network = FusedGenerator(random_generator(config), torch.device("cpu"), torch.float16, faces=4)
    batches = {0: torch.export.Dim("batch", min=1, max=15)}
    program = torch.export.export(network, (torch.zeros(2, 3, 32, 32),), dynamic_shapes=(batches,), strict=False)
    assert [(limits.lower, limits.upper) for limits in program.range_constraints.values()] == [(1, 15)]
    launched = [node for node in program.graph.nodes if "triton_kernel" in str(node.target)]
    # Colour, latent, mapping, styles, demodulation, and at least one for each level of encoder and decoder.
    assert len(launched) > 5 + 3 + 2 * 4
    output = program.graph_module.graph.output_node().args[0][0].meta["val"]
    assert output.shape[1:] == (3, 64, 64)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "config", [published_config(256, 0.5, 1), GeneratorConfig(64, 128, (128, 128, 96, 64, 32, 16), 64, 2)]
)
@pytest.mark.parametrize(("precision", "limit"), [("fp32", 1), ("fp16", 2), ("bf16", 12)])
def test_compiled_kernels_equal_the_eager_network(config: GeneratorConfig, precision: str, limit: int) -> None:
    generator = random_generator(config)
    random = np.random.default_rng(0)
    size = config.input_size
    crops = [random.integers(0, 256, (size, size, 3), np.uint8) for _ in range(3)]
    exact = Runtime(generator, config, RuntimeOptions("cuda", "fp32"))(crops)
    fast = Runtime(generator, config, RuntimeOptions("cuda", precision, compile=True))
    assert fast.compiler == "kernels"
    for a, b in zip(exact, fast(crops), strict=True):
        assert a is not None and b is not None
        assert np.abs(a.astype(int) - b).max() <= limit


@pytest.mark.gpu
def test_recorded_graphs_give_the_same_bytes_again_and_own_their_results() -> None:
    config = published_config(256, 0.5, 1)
    runtime = Runtime(random_generator(config), config, RuntimeOptions("cuda", compile=True))
    random = np.random.default_rng(1)
    a, b = (random.integers(0, 256, (256, 256, 3), np.uint8) for _ in range(2))
    (first,), (other,), (again,) = runtime([a]), runtime([b]), runtime([a])
    assert first is not None and other is not None and again is not None
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
