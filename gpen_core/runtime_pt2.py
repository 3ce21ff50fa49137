"""Runs a generator compiled ahead of time (AOTInductor): no compiler, no Triton, no wait.

A package is machine code for one PyTorch, one kind of processor and one set of weights, and by itself it takes
anything and answers anything. So a sidecar, PACKAGE.json, says what it is for; both are bound to each other by
hashes, and all of it is checked before any of the code is loaded. Hashes prove that the two belong together, not who
made them: a package is a program, to be loaded only from those who may run programs here.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpen_core.config import METADATA_KEY, GeneratorConfig, WeightsMetadata, describe, megabytes
from gpen_core.errors import CheckpointError, DeviceError
from gpen_core.files import sha256
from gpen_core.footprint import Footprint, exported_footprint
from gpen_core.runtime import Runtime, RuntimeOptions, Submitted, choose_device, largest_batch
from gpen_core.types import Image

SIDECAR = ".json"
FORMAT_VERSION = 1
BATCHES = (1, 15)
"""Least and most faces in one call; at 16, PyTorch specialises the CPU's code."""
# What compilers make use of unasked when they build for the processor they run on.
FEATURES = re.compile(r"(avx|sse|ssse|fma|bmi|amx|f16c|movbe|popcnt|abm|adx|sha|vaes|vpclmulqdq|gfni)")
MOST_JSON = 1 << 20

Network = Callable[[Tensor], Tensor]
"""float32 [B, 3, S, S] to float32 [B, 3, T, T]."""


@dataclass(frozen=True)
class Machine:
    """What machine code depends on.

    torch: version. system, machine: as `platform` has them. device: cpu or cuda. features: instruction sets of the
    processor. compute_capability: of the GPU, "" without one.
    """

    torch: str
    system: str
    machine: str
    device: str
    features: tuple[str, ...]
    compute_capability: str = ""

    def obstacle(self, here: Machine) -> str:
        """Why code for this machine can't run on the machine `here`, or nothing."""
        for name, word in (("torch", "PyTorch"), ("system", "system"), ("machine", "processor")):
            ours, theirs = getattr(here, name), getattr(self, name)
            if ours != theirs:
                return f"compiled for {word} {theirs}; this is {ours}"
        lacking = sorted(set(self.features) - set(here.features))
        if lacking:
            return f"compiled for a processor with {', '.join(lacking)}, which this one lacks"
        if self.compute_capability != here.compute_capability:
            return (
                f"compiled for a GPU of compute capability {self.compute_capability}; "
                f"this one has {here.compute_capability or 'none'}"
            )
        return ""


@dataclass(frozen=True)
class Sidecar:
    """What a package is for. package_sha256 is empty until the package exists."""

    machine: Machine
    weights: WeightsMetadata
    dtype: str
    batches: tuple[int, int]
    checkpoint_sha256: str
    package_sha256: str = ""

    @classmethod
    def describe(cls, weights: WeightsMetadata, machine: Machine, dtype: str, checkpoint_sha256: str) -> Sidecar:
        return cls(machine, weights, dtype, BATCHES, checkpoint_sha256)

    def sealed(self, package_sha256: str) -> Sidecar:
        return replace(self, package_sha256=package_sha256)

    def binding(self) -> dict[str, str]:
        """What goes into the package itself: a hash of everything here but the package's own."""
        content = replace(self, package_sha256="").encode()
        return {METADATA_KEY: hashlib.sha256(content.encode()).hexdigest()}

    def encode(self) -> str:
        content = {
            "format_version": FORMAT_VERSION,
            "machine": asdict(self.machine),
            "input_size": self.weights.config.input_size,
            "output_size": self.weights.config.output_size,
            "dtype": self.dtype,
            "batches": self.batches,
            "checkpoint_sha256": self.checkpoint_sha256,
            "package_sha256": self.package_sha256,
            "weights": json.loads(self.weights.encode()[METADATA_KEY]),
        }
        return json.dumps(content, sort_keys=True, indent=1) + "\n"

    @classmethod
    def decode(cls, text: str) -> Sidecar:
        """Raises CheckpointError if a value is missing, unknown or malformed."""
        try:
            content = json.loads(text)
            machine = content["machine"]
            low, high = content["batches"]
            sidecar = cls(
                machine=Machine(**{**machine, "features": tuple(machine["features"])}),
                weights=WeightsMetadata.decode({METADATA_KEY: json.dumps(content["weights"])}),
                dtype=content["dtype"],
                batches=(low, high),
                checkpoint_sha256=content["checkpoint_sha256"],
                package_sha256=content["package_sha256"],
            )
        except (ValueError, KeyError, TypeError, RecursionError):
            raise CheckpointError("the sidecar is malformed") from None
        if json.loads(sidecar.encode()) != content:
            raise CheckpointError("the sidecar contradicts itself")
        return sidecar


class PackageRuntime:
    """Runs a package of `gpen-core export --format pt2` on aligned 8-bit crops. Threads may share it.

    device: auto is the one that it was compiled for. max_batch: faces in one call; more than 15 means 15.
    Raises CheckpointError for a package that is not whole, DeviceError for one that is for another machine.
    """

    def __init__(self, path: str | Path, *, device: str = "auto", max_batch: int | None = None) -> None:
        path = Path(path)
        wanted = _device_for(path, read_sidecar(path), device)
        sidecar, network = load_package(path, choose_device(wanted))
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

    @property
    def max_batch(self) -> int:
        """Faces in one call."""
        return self._runtime.max_batch

    def __call__(self, crops: Sequence[Image]) -> list[Image | None]:
        """Restore S x S crops; each result is T x T, or None where the network gave no finite picture."""
        return self._runtime(crops)

    def submit(self, crops: Sequence[Image]) -> Submitted:
        """Start on S x S crops, as `Runtime.submit` does."""
        return self._runtime.submit(crops)


def load_package(path: Path, device: torch.device) -> tuple[Sidecar, Network]:
    """The sidecar and the network, which checks each input. Raises CheckpointError and DeviceError before loading."""
    sidecar = read_sidecar(path)
    _require_machine(path, sidecar, device)
    loader = _open(path, device)
    low, high = sidecar.batches
    size = sidecar.weights.config.input_size

    def network(image: Tensor) -> Tensor:
        shaped = image.ndim == 4 and low <= len(image) <= high and image.shape[1:] == (3, size, size)
        if not shaped or image.dtype != torch.float32 or image.device.type != device.type:
            seen = f"{list(image.shape)} {str(image.dtype).removeprefix('torch.')} on {image.device}"
            raise ValueError(f"expected [{low}..{high}, 3, {size}, {size}] float32 on {device}, got {seen}")
        result: Tensor = loader.run([image.contiguous()])[0]
        return result

    return sidecar, network


def survey(path: Path, device: str = "auto", max_batch: int | None = None) -> tuple[GeneratorConfig, Footprint, str]:
    """The format of a package's pictures, its memory and its precision, without loading it.

    Raises as `PackageRuntime` does.
    """
    sidecar = read_sidecar(path)
    chosen = choose_device(_device_for(path, sidecar, device))
    _require_machine(path, sidecar, chosen)
    batch = min(largest_batch(RuntimeOptions(max_batch=max_batch), chosen), sidecar.batches[1])
    config, width = sidecar.weights.config, 4 if sidecar.dtype == "fp32" else 2
    return config, exported_footprint(config, path.stat().st_size, batch, width), sidecar.dtype


def read_sidecar(path: Path) -> Sidecar:
    """A package's sidecar, which belongs to it and was not changed. Raises CheckpointError."""
    beside = Path(f"{path}{SIDECAR}")
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    try:
        if beside.stat().st_size > MOST_JSON:
            raise CheckpointError(f"{beside}: too large for a sidecar")
        sidecar = Sidecar.decode(beside.read_text(encoding="utf-8"))
        digest = sha256(path)
        bound = _read_binding(path)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: its sidecar {beside.name} is missing; without it nothing can be checked"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from None
    except CheckpointError as error:
        raise CheckpointError(f"{beside}: {str(error).removeprefix(f'{beside}: ')}") from None
    except UnicodeDecodeError:
        raise CheckpointError(f"{beside}: the sidecar is not text") from None
    if digest != sidecar.package_sha256:
        raise CheckpointError(
            f"{path}: its sha256 is not the one in {beside.name}: one of the two was changed or swapped"
        )
    if bound != sidecar.binding():
        raise CheckpointError(f"{beside}: not the sidecar that this package was made with; export it again")
    return sidecar


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


def describe_machine(device: torch.device) -> Machine:
    """This machine, with the given device. Needs no compiler."""
    capability = ".".join(map(str, torch.cuda.get_device_capability(device))) if device.type == "cuda" else ""
    return Machine(
        torch=str(torch.__version__),
        system=platform.system(),
        machine=platform.machine(),
        device=device.type,
        features=processor_features(),
        compute_capability=capability,
    )


def processor_features() -> tuple[str, ...]:
    """Instruction sets of this processor, sorted; where the system does not tell, what PyTorch found."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, values = line.partition(":")
        if name.strip() == "flags":
            return tuple(sorted(set(filter(FEATURES.match, values.split()))))
        if name.strip() == "Features":
            return tuple(sorted(set(values.split())))
    return (torch.backends.cpu.get_cpu_capability(),)


def _device_for(path: Path, sidecar: Sidecar, device: str) -> str:
    """The device that a package runs on. Raises DeviceError if another one is asked for."""
    wanted = sidecar.machine.device if device == "auto" else device
    if choose_device(wanted).type != sidecar.machine.device:
        raise DeviceError(f"{path}: compiled for {sidecar.machine.device}, not for {device}")
    return wanted


def _require_machine(path: Path, sidecar: Sidecar, device: torch.device) -> None:
    obstacle = sidecar.machine.obstacle(describe_machine(device))
    if obstacle:
        raise DeviceError(f"{path}: {obstacle}; export it again here")


def _read_binding(path: Path) -> dict[str, str]:
    """What the exporter put into the package's own metadata; nothing where there is none."""
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                if member.filename.endswith("wrapper_metadata.json") and member.file_size < MOST_JSON:
                    content = json.loads(archive.read(member))
                    return {METADATA_KEY: content[METADATA_KEY]}
    except (zipfile.BadZipFile, ValueError, KeyError, TypeError):
        pass
    return {}


def _open(path: Path, device: torch.device) -> Any:
    """PyTorch's own loader. The public way to it first compiles a program, to compare what is compared already."""
    loader = torch._C._aoti.AOTIModelPackageLoader
    index = -1 if device.index is None else device.index
    try:
        return loader(str(path), "model", False, 1, index)
    except TypeError:  # before PyTorch 2.8
        return loader(str(path), "model")  # type: ignore[call-arg,unused-ignore]
    except RuntimeError as error:
        first = str(error).strip().splitlines()[0]
        raise CheckpointError(f"{path}: PyTorch can't load it ({first})") from None
