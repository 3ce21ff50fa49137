"""One case in this process: `python -m bench.measure '{"network": ..., ...}'` prints its row as JSON."""

from __future__ import annotations

import functools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import fidelity
from bench.cases import Case
from bench.model import legacy_tensors, published_config, random_generator
from bench.original import Original
from gpen_convert.export import export_package
from gpen_core.ahead import Fixed, load_package
from gpen_core.config import GeneratorConfig, Provenance, WeightsMetadata
from gpen_core.memory import keep_freed_memory
from gpen_core.model import Generator
from gpen_core.runtime import LOW, RuntimeOptions, compiled_ahead, lower, switches

Network = Callable[[Tensor], Tensor]
PRECISION_HINTS = {"fp32": "f32", "bf16": "bf16"}


def build(case: Case, device: torch.device) -> Network:
    """The network of a case."""
    config = config_of(case)
    dtype = LOW.get(case.precision, torch.float32)
    if case.network == "original":
        return Original(config, legacy_tensors(config), device, dtype)
    if case.network in ("onnxruntime", "openvino", "openvino-shared"):
        return foreign(case)
    if case.network.startswith("reference"):
        return reference(case, device, dtype)
    if case.network == "package":
        return exported(case)
    generator = random_generator(config)
    if case.network.startswith("kernels"):
        from gpen_core.kernels import FusedGenerator

        return FusedGenerator(generator, device, dtype)
    if case.network == "ahead":
        return first_compiled(generator, case.precision)
    generator = generator.to(device)
    if device.type == "cuda":
        generator = generator.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if case.precision in LOW:
        lower(generator, dtype)
    if case.network == "inductor":
        from torch._inductor import config as inductor

        # Weights in the layout the convolutions want, once: what a CPU gains most from.
        freezing = inductor.patch(freezing=device.type == "cpu")
        compiled: Network = freezing(torch.compile(generator, fullgraph=True, dynamic=False))
        return compiled
    plain: Network = generator
    return plain


def first_compiled(generator: Generator, precision: str) -> Network:
    """What `--compile` runs on a CPU, compiled or loaded by the first call, as torch.compile does it."""
    made = functools.cache(lambda: compiled_ahead(generator, precision))

    def network(image: Tensor) -> Tensor:
        return made()(image)

    return network


def exported(case: Case) -> Network:
    """What is in a package of `export --format pt2`, made by another process: this one has no compiler, no Triton."""
    package = Path(tempfile.mkdtemp()) / "network.pt2"
    command = [sys.executable, "-m", "bench.measure", json.dumps(case.to_dict()), str(package)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit((done.stderr.strip().splitlines() or ["no package was made"])[-1])
    os.environ["PATH"] = ""
    if sys.modules.setdefault("triton", None) is not None:  # type: ignore[arg-type]
        raise SystemExit("Triton is imported already: it can't be hidden")
    return load_package(package, torch.device(case.device))[1]


def export(case: Case, package: Path) -> None:
    """Make the package of a case."""
    generator = random_generator(config_of(case))
    metadata = WeightsMetadata(generator.config, Provenance("random weights", "0" * 64))
    export_package(generator, metadata, package, case.precision, torch.device(case.device), "0" * 64)


def config_of(case: Case) -> GeneratorConfig:
    """GPEN-BFR of the case's size; the published 256 is a narrow one."""
    return published_config(256, 0.5, 1) if case.size == 256 else published_config(case.size)


def foreign(case: Case) -> Network:
    """A graph in another engine, exported for batch 1: the original's grouped convolutions fit no other."""
    config = config_of(case)
    if case.network == "openvino-shared":
        module: torch.nn.Module = Fixed(random_generator(config))
    else:
        module = Wrapped(Original(config, legacy_tensors(config), torch.device("cpu"), torch.float32))
    path = Path(tempfile.mkdtemp()) / "network.onnx"
    example = torch.zeros(1, 3, case.size, case.size)
    torch.onnx.export(module, (example,), str(path), dynamo=False, opset_version=17, input_names=["input"])
    if case.network.startswith("openvino"):
        import openvino

        # Left to itself it computes in bfloat16 where the processor can.
        hints = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": PRECISION_HINTS[case.precision]}
        model = openvino.Core().compile_model(str(path), "CPU", hints)
        return lambda image: torch.from_numpy(model(image.numpy())[0])
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda image: torch.from_numpy(session.run(None, {"input": image.numpy()})[0])


class Wrapped(torch.nn.Module):
    """A network as the module that an exporter wants."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def forward(self, image: Tensor) -> Tensor:
        return self.network(image)


def reference(case: Case, device: torch.device, dtype: torch.dtype) -> Network:
    """The real original where the user has it: $GPEN_REFERENCE names a file with a function
    `build(size) -> nn.Module`."""
    path = os.environ.get("GPEN_REFERENCE")
    if not path:
        raise SystemExit("set GPEN_REFERENCE to a Python file with a function build(size) that returns the network")
    space: dict[str, Any] = {}
    exec(compile(Path(path).read_text(), path, "exec"), space)
    module = space["build"](case.size).to(device, dtype).eval()
    run = torch.compile(module, dynamic=False) if case.network == "reference-compiled" else module

    def network(image: Tensor) -> Tensor:
        output = run(image.to(dtype))
        picture: Tensor = output[0] if isinstance(output, tuple) else output
        return picture.float()

    return network


def record(network: Network, image: Tensor) -> Network:
    """The network as a CUDA graph for one shape."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            network(image)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        output = network(image)

    def replay(_: Tensor) -> Tensor:
        graph.replay()
        return output

    return replay


def time_gpu(network: Network, image: Tensor, seconds: float = 1.5) -> list[float]:
    """Milliseconds of single calls by device events, after a warm-up."""
    for _ in range(5):
        network(image)
    torch.cuda.synchronize()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 10:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        network(image)
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last))
    return times


def time_cpu(network: Network, image: Tensor, calls: int = 5) -> list[float]:
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        network(image)
        times.append(1000 * (time.perf_counter() - start))
    return times


def summary(times: list[float], batch: int) -> dict[str, float]:
    ordered = sorted(times)
    median = statistics.median(ordered)
    return {
        "median_ms": round(median, 4),
        "p90_ms": round(ordered[int(0.9 * (len(ordered) - 1))], 4),
        "ms_per_image": round(median / batch, 4),
        "calls": len(times),
    }


def images(batch: int, size: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(batch)
    return (torch.rand(batch, 3, size, size, generator=generator) * 2 - 1).to(device)


def measure(case: Case) -> dict[str, Any]:
    """The row of a case."""
    device = torch.device(case.device)
    gpu = device.type == "cuda"
    options = RuntimeOptions(device=case.device)
    row: dict[str, Any] = {"case": case.to_dict(), "title": case.title, "batches": {}}
    with switches(device, case.precision, options), torch.inference_mode():
        started = time.perf_counter()
        network = build(case, device)
        row["build_s"] = round(time.perf_counter() - started, 2)
        if gpu:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            row["weights_mb"] = round(torch.cuda.memory_allocated() / 1e6, 1)
        for batch in case.batches:
            row["batches"][str(batch)] = _one_batch(case, network, images(batch, case.size, device))
        if case.fidelity:
            row["fidelity"] = _fidelity(case, network, device)
    return row


def _one_batch(case: Case, network: Network, image: Tensor) -> dict[str, float]:
    gpu = image.is_cuda
    started = time.perf_counter()
    network(image)
    if gpu:
        torch.cuda.synchronize()
    first = round(time.perf_counter() - started, 2)
    if not gpu:
        return {"first_s": first, **summary(time_cpu(network, image), len(image))}
    # The first call tried algorithms and took memory for that.
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    network(image)
    torch.cuda.synchronize()
    peak = round((torch.cuda.max_memory_allocated() - before) / 1e6, 1)
    run = record(network, image) if case.network in ("inductor", "kernels", "package") else network
    return {"first_s": first, "peak_mb": peak, **summary(time_gpu(run, image), len(image))}


def _fidelity(case: Case, network: Network, device: torch.device) -> dict[str, dict[str, float]]:
    exact = random_generator(config_of(case)).to(device)
    rows = {}
    for name, image in fidelity.inputs(case.size).items():
        result = network(image.to(device)).clone()
        with switches(device, "fp32", RuntimeOptions(device=case.device, cudnn_benchmark=False)):
            rows[name] = fidelity.compare(result, exact(image.to(device)))
    return rows


def machine() -> dict[str, str]:
    """What the numbers depend on."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "cpu": cpu_name()}
    found["threads"] = str(torch.get_num_threads())
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["cuda"] = str(torch.version.cuda)
        found["cudnn"] = str(torch.backends.cudnn.version())
    return found


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    asked = Case.from_dict(json.loads(sys.argv[1]))
    if sys.argv[2:]:
        export(asked, Path(sys.argv[2]))
        raise SystemExit
    if asked.keeps_memory:
        keep_freed_memory()
    print(json.dumps({**measure(asked), "machine": machine()}))
