"""Runs a package of `gpen-core export --format pt2`: no compiler, no Triton, no wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from gpen_core.ahead import Sidecar, can_record, open_package, read_sidecar, require_machine, require_unpackable
from gpen_core.config import GeneratorConfig, describe, megabytes
from gpen_core.errors import DeviceError
from gpen_core.footprint import Footprint, exported_footprint
from gpen_core.runtime import Runtime, RuntimeOptions, Submitted, choose_device, largest_batch
from gpen_core.types import Image


class PackageRuntime:
    """Runs a package of `gpen-core export --format pt2` on aligned 8-bit crops. Threads may share it.

    On a GPU each batch size of `BUCKETS` is recorded once as a CUDA graph and replayed, as `--compile` has it.

    device: auto is the one that it was compiled for. max_batch: faces in one call; more than 15 means 15.
    Raises CheckpointError for a package that is not whole, DeviceError for one that is for another machine.
    """

    def __init__(self, path: str | Path, *, device: str = "auto", max_batch: int | None = None) -> None:
        path = Path(path)
        sidecar = read_sidecar(path)
        wanted = _device_for(path, sidecar, device)
        options = _options_for(sidecar, wanted, max_batch)
        network = open_package(path, sidecar, choose_device(wanted))
        self.config = sidecar.weights.config
        self.metadata = sidecar.weights
        self.precision = sidecar.dtype
        self._runtime = Runtime(network, self.config, options)

    @property
    def description(self) -> str:
        """Device, precision and engine in words."""
        device = self._runtime.device
        name = f"cuda ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else "cpu"
        return f"{name} {self.precision} ahead of time"

    def warm_up(self, batches: Sequence[int] = (1,)) -> None:
        """Run once for each of the given batch sizes, so that later calls don't wait."""
        self._runtime.warm_up(batches)

    @property
    def max_batch(self) -> int:
        """Faces in one call."""
        return self._runtime.max_batch

    def __call__(self, crops: Sequence[Image]) -> list[Image | None]:
        """Restore S x S crops, as `Runtime.__call__` does."""
        return self._runtime(crops)

    def submit(self, crops: Sequence[Image]) -> Submitted:
        """Start on S x S crops, as `Runtime.submit` does."""
        return self._runtime.submit(crops)


def survey(path: Path, device: str = "auto", max_batch: int | None = None) -> tuple[GeneratorConfig, Footprint, str]:
    """The format of a package's pictures, its memory and its precision, without loading it.

    Raises as `PackageRuntime` does.
    """
    sidecar = read_sidecar(path)
    wanted = _device_for(path, sidecar, device)
    chosen = choose_device(wanted)
    require_machine(path, sidecar, chosen)
    require_unpackable()
    batch = largest_batch(_options_for(sidecar, wanted, max_batch), chosen)
    config, width = sidecar.weights.config, 4 if sidecar.dtype == "fp32" else 2
    memory = exported_footprint(config, path.stat().st_size, batch, width)
    return config, replace(memory, keeps=can_record(chosen)), sidecar.dtype


def describe_package(path: Path) -> list[str]:
    """What a package is and for which machine, in lines for people. Raises CheckpointError naming the file."""
    sidecar = read_sidecar(path)
    machine, (low, high) = sidecar.machine, sidecar.batches
    order = ", one after the other" if sidecar.face_by_face else ""
    gpu = f", compute capability {machine.compute_capability}" if machine.compute_capability else ""
    return [
        *describe(sidecar.weights),
        f"compiled for {machine.device}{gpu}, PyTorch {machine.torch}, {machine.system} {machine.machine}",
        f"{sidecar.dtype}, {low} to {high} faces at once{order}, {megabytes(path.stat().st_size)}, "
        f"of weights with sha256 {sidecar.checkpoint_sha256}",
    ]


def _options_for(sidecar: Sidecar, device: str, max_batch: int | None) -> RuntimeOptions:
    """How a package runs on a device."""
    chosen = choose_device(device)
    most = min(largest_batch(RuntimeOptions(max_batch=max_batch), chosen), sidecar.batches[1])
    return RuntimeOptions(device, compile=True, compiler="ahead", max_batch=most, cuda_graphs=can_record(chosen))


def _device_for(path: Path, sidecar: Sidecar, device: str) -> str:
    """The device that a package runs on. Raises DeviceError if another one is asked for."""
    wanted = sidecar.machine.device if device == "auto" else device
    if choose_device(wanted).type != sidecar.machine.device:
        raise DeviceError(f"{path}: compiled for {sidecar.machine.device}, not for {device}")
    return wanted
