"""Runs a package of `gpen-core export --format pt2`: no compiler, no Triton, no wait."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from gpen_core.ahead import open_package, read_sidecar
from gpen_core.config import describe, megabytes
from gpen_core.errors import DeviceError
from gpen_core.runtime import Runtime, RuntimeOptions, choose_device
from gpen_core.types import Image


class PackageRuntime:
    """Runs a package of `gpen-core export --format pt2` on aligned 8-bit crops. Threads may share it.

    device: auto is the one that it was compiled for. max_batch: faces in one call; more than 15 means 15.
    Raises CheckpointError for a package that is not whole, DeviceError for one that is for another machine.
    """

    def __init__(self, path: str | Path, *, device: str = "auto", max_batch: int | None = None) -> None:
        path = Path(path)
        sidecar = read_sidecar(path)
        wanted = sidecar.machine.device if device == "auto" else device
        found = choose_device(wanted)
        if found.type != sidecar.machine.device:
            raise DeviceError(f"{path}: compiled for {sidecar.machine.device}, not for {device}")
        network = open_package(path, sidecar, found)
        most = None if max_batch is None else min(max_batch, sidecar.batches[1])
        self.config = sidecar.weights.config
        self.metadata = sidecar.weights
        self.precision = sidecar.dtype
        self._runtime = Runtime(network, self.config, RuntimeOptions(device=wanted, max_batch=most))

    @property
    def description(self) -> str:
        """Device, precision and engine in words."""
        device = self._runtime.device
        name = f"cuda ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else "cpu"
        return f"{name} {self.precision} ahead of time"

    def warm_up(self, batches: Sequence[int] = (1,)) -> None:
        """Run once for each of the given batch sizes, so that later calls don't wait."""
        self._runtime.warm_up(batches)

    def __call__(self, crops: Sequence[Image]) -> list[Image | None]:
        """Restore S x S crops; each result is T x T, or None where the network gave no finite picture."""
        return self._runtime(crops)


def describe_package(path: Path) -> list[str]:
    """What a package is and for which machine, in lines for people. Raises CheckpointError naming the file."""
    sidecar = read_sidecar(path)
    machine, (low, high) = sidecar.machine, sidecar.batches
    gpu = f", compute capability {machine.compute_capability}" if machine.compute_capability else ""
    return [
        *describe(sidecar.weights),
        f"compiled for {machine.device}{gpu}, PyTorch {machine.torch}, {machine.system} {machine.machine}",
        f"{sidecar.dtype}, {low} to {high} faces at once, {megabytes(path.stat().st_size)}, "
        f"of weights with sha256 {sidecar.checkpoint_sha256}",
    ]
