"""Where the time goes on a GPU: each kernel of the network, and each large convolution alone.

python -m bench.profile -o bench/results/profile.json           # then: python -m bench.report
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from bench.measure import images, machine
from bench.model import published_config, random_generator
from gpen_core.config import GeneratorConfig
from gpen_core.runtime import RuntimeOptions, switches

CALLS = 3
# What is short is left out: names of the longest say enough.
LONGEST, NAME = 22, 110
# From this level on a convolution is no matter of a few microseconds.
SMALLEST = 64


@dataclass(frozen=True)
class Convolution:
    """kind: same (keeps the size), up (doubles it, transposed) or down (halves it). side: of its input in pixels."""

    kind: str
    side: int
    inputs: int
    outputs: int

    def flop(self, batch: int) -> int:
        places = (self.side // 2) ** 2 if self.kind == "down" else self.side**2
        return 2 * 9 * batch * places * self.inputs * self.outputs


def convolutions(config: GeneratorConfig) -> Iterator[Convolution]:
    """The large ones of a network whose features are concatenated."""
    width = config.width
    levels = [r for r in config.decoder_levels if r >= SMALLEST]
    for r in levels:
        yield Convolution("same", r, 2 * width(r), width(r))
    for r in levels:
        yield Convolution("up", r // 2, 2 * width(r // 2), width(r))
    for r in reversed(levels):
        yield Convolution("down", r, width(r), width(r // 2))


def prepared(layer: Convolution, batch: int) -> Callable[[], Tensor]:
    """The layer on random float16 maps, channels-last as the network has them."""

    def channels_last(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.float16).contiguous(memory_format=torch.channels_last)

    side = layer.side + (layer.kind == "down")
    x = channels_last(batch, layer.inputs, side, side)
    if layer.kind == "up":
        weight = channels_last(layer.inputs, layer.outputs, 3, 3)
        return lambda: F.conv_transpose2d(x, weight, stride=2)
    weight = channels_last(layer.outputs, layer.inputs, 3, 3)
    if layer.kind == "down":
        return lambda: F.conv2d(x, weight, stride=2)
    return lambda: F.conv2d(x, weight, padding=1)


def milliseconds(call: Callable[[], Any], calls: int = 15) -> float:
    """Median by device events, after a warm-up."""
    for _ in range(4):
        call()
    torch.cuda.synchronize()
    times = []
    for _ in range(calls):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        call()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last))
    return float(statistics.median(times))


def kernels(network: Callable[[Tensor], Tensor], image: Tensor) -> list[dict[str, Any]]:
    """The longest kernels of a call: name, how often it runs, milliseconds in all."""
    network(image)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(CALLS):
            network(image)
        torch.cuda.synchronize()
    rows = [
        {"name": e.key[:NAME], "calls": e.count // CALLS, "ms": round(e.self_device_time_total / CALLS / 1000, 4)}
        for e in found.key_averages()
    ]
    return sorted(rows, key=lambda row: -row["ms"])[:LONGEST]


def measure() -> dict[str, Any]:
    from gpen_core.kernels import FusedGenerator

    device, config = torch.device("cuda"), published_config(512)
    rows = []
    with switches(device, "fp16", RuntimeOptions(device="cuda")), torch.inference_mode():
        network = FusedGenerator(random_generator(config), device, torch.float16)
        for batch in (1, 8):
            found = kernels(network, images(batch, 512, device))
            rows.append({"batch": batch, "kernels": found, "machine": machine()})
        alone = []
        for layer in convolutions(config):
            ms = milliseconds(prepared(layer, 8))
            alone.append({**asdict(layer), "ms": round(ms, 4), "tflops": round(layer.flop(8) / ms / 1e9)})
    return {"suite": "profile", "rows": rows, "convolutions": {"batch": 8, "layers": alone}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True)
    given = parser.parse_args()
    given.output.write_text(json.dumps(measure(), indent=1) + "\n")


if __name__ == "__main__":
    main()
