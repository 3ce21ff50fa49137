"""Which engine runs a weight file: PyTorch, onnxruntime, or a package compiled ahead of time.

Each engine is imported when a file needs it; nothing else of the package needs PyTorch to restore a photo.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from gpen_core.config import PictureFormat
from gpen_core.errors import MissingWeightsError, UsageError
from gpen_core.footprint import Footprint
from gpen_core.types import Image

BACKENDS = ("auto", "torch", "onnx")
ONNX, PACKAGE = ".onnx", ".pt2"
NO_TORCH = "PyTorch is not installed: pip install torch, or run an exported file: --weights MODEL.onnx"


@runtime_checkable
class CropRuntime(Protocol):
    """Restores aligned crops: what every engine offers. Threads may share it."""

    @property
    def config(self) -> PictureFormat:
        """Sizes, value range and crop template of the network."""
        ...

    @property
    def description(self) -> str:
        """Device, precision and engine in words."""
        ...

    def __call__(self, crops: Sequence[Image]) -> list[Image | None]:
        """Restore S x S x 3 uint8 crops; each result is T x T x 3 uint8, or None where it was not finite.

        Raises ImageError for other crops.
        """
        ...


class Pending(Protocol):
    """Crops on their way through a network."""

    def done(self) -> bool:
        """Whether the result is there without a wait."""
        ...

    def result(self) -> list[Image | None]:
        """What the runtime returns for the crops, waited for. Raises what it raises."""
        ...


@runtime_checkable
class Asynchronous(Protocol):
    """A `CropRuntime` that can be given the next crops before it is done with the last."""

    def submit(self, crops: Sequence[Image]) -> Pending:
        """Start on crops; on a device that works by itself, this returns before it is done."""
        ...


@runtime_checkable
class Batched(Protocol):
    """A `CropRuntime` that says how many crops it takes at once, so that several pictures can share a call."""

    @property
    def max_batch(self) -> int:
        """Crops in one call of the network at most; it shrinks when memory runs out."""
        ...


@runtime_checkable
class Several(Protocol):
    """A `Batched` of several networks with batches of their own; the side of a crop says which one it is for."""

    def favourite(self, sides: Collection[int]) -> int:
        """With which of these sides to go on, so that networks change places in memory as seldom as they can."""
        ...

    def batch_of(self, side: int) -> int:
        """Crops of a side in one call of their network at most."""
        ...


@dataclass(frozen=True, eq=False)
class Finished:
    """Crops that a network is done with."""

    pictures: list[Image | None]

    def done(self) -> bool:
        return True

    def result(self) -> list[Image | None]:
        return self.pictures


def submit(runtime: CropRuntime, crops: Sequence[Image]) -> Pending:
    """Start on crops with any runtime; one that can't wait is done when this returns."""
    return runtime.submit(crops) if isinstance(runtime, Asynchronous) else Finished(runtime(crops))


def load_runtime(
    weights: str | Path,
    *,
    backend: str = "auto",
    device: str = "auto",
    precision: str = "auto",
    compile: bool = False,
    cache: Path | None = None,
    max_batch: int | None = None,
) -> CropRuntime:
    """A weight file, given by path or name, in the engine it is for.

    backend: torch, onnx, or auto: the one that the file's suffix asks for. device, precision, compile, cache,
    max_batch: as `RuntimeOptions` has them. Raises MissingWeightsError, CheckpointError, DeviceError, and UsageError
    for choices that the file or the engine does not have.
    """
    path = find_weights(weights, backend)
    suffix = path.suffix.lower()
    _refuse_compile(path, compile)
    if suffix == ONNX:
        from gpen_core.runtime_onnx import OnnxRuntime

        runtime = OnnxRuntime(path, device=device, max_batch=max_batch)
        _refuse_precision(path, precision, runtime.precision)
        return runtime
    require_torch()
    if suffix == PACKAGE:
        from gpen_core.runtime_pt2 import PackageRuntime

        package = PackageRuntime(path, device=device, max_batch=max_batch)
        _refuse_precision(path, precision, package.precision)
        return package
    from gpen_core.checkpoint import load_generator
    from gpen_core.runtime import Runtime, RuntimeOptions

    options = RuntimeOptions(device=device, precision=precision, compile=compile, cache=cache, max_batch=max_batch)
    generator = load_generator(path)
    return Runtime(generator, generator.config, options)


def survey_weights(
    path: Path,
    *,
    device: str = "auto",
    precision: str = "auto",
    compile: bool = False,
    max_batch: int | None = None,
) -> tuple[PictureFormat, Footprint]:
    """The format of a weight file's pictures and the memory of its network, which is not kept.

    Raises what `load_runtime` does with the same choices, as far as that shows before the tensors are read.
    """
    suffix = path.suffix.lower()
    _refuse_compile(path, compile)
    if suffix == ONNX:
        from gpen_core import runtime_onnx

        pictures, memory, found = runtime_onnx.survey(path, device, max_batch)
        _refuse_precision(path, precision, found)
        return pictures, memory
    require_torch()
    if suffix == PACKAGE:
        from gpen_core import runtime_pt2

        config, memory, found = runtime_pt2.survey(path, device, max_batch)
        _refuse_precision(path, precision, found)
        return config, memory
    from gpen_core.checkpoint import survey
    from gpen_core.runtime import RuntimeOptions, estimate_footprint

    metadata, values = survey(path)
    options = RuntimeOptions(device=device, precision=precision, compile=compile, max_batch=max_batch)
    return metadata.config, estimate_footprint(metadata.config, values, options)


def find_weights(weights: str | Path, backend: str = "auto") -> Path:
    """The file that a path or a name means for a backend.

    Without PyTorch, auto looks for ONNX files only. Raises MissingWeightsError, and UsageError if the backend can't
    run that file.
    """
    from gpen_weights import resolve

    suffixes = choose_suffixes(backend)
    try:
        path = resolve(weights, suffixes=suffixes)
    except MissingWeightsError as error:
        raise _advised(error, weights) if suffixes == (ONNX,) else error from None
    is_onnx = path.suffix.lower() == ONNX
    if backend == "onnx" and not is_onnx:
        source = "the weights it was made from" if path.suffix.lower() == PACKAGE else path
        raise UsageError(
            f"{path}: --backend onnx runs .onnx files; make one with: gpen-core export {source} --format onnx"
        )
    if backend == "torch" and is_onnx:
        raise UsageError(f"{path}: --backend torch can't run an ONNX file; leave it out or say --backend onnx")
    return path


def choose_suffixes(backend: str) -> tuple[str, ...]:
    """How files that a backend can run end, best first. Raises UsageError for an unknown backend."""
    if backend not in BACKENDS:
        raise UsageError(f"unknown backend {backend!r}; use one of {', '.join(BACKENDS)}")
    if backend == "onnx" or (backend == "auto" and not has_torch()):
        return (ONNX,)
    return (".safetensors", PACKAGE) if backend == "torch" else (".safetensors", ONNX, PACKAGE)


def describe_weights(path: Path) -> list[str]:
    """What a converted or exported file is, in lines for people. Raises CheckpointError naming the file."""
    suffix = path.suffix.lower()
    if suffix == ONNX:
        from gpen_core.runtime_onnx import describe_file

        return describe_file(path)
    require_torch()
    if suffix == PACKAGE:
        from gpen_core.runtime_pt2 import describe_package

        return describe_package(path)
    from gpen_core import checkpoint, rrdb

    if checkpoint.kind_of(path) == rrdb.KIND:
        return rrdb.describe_file(path)
    return checkpoint.describe_file(path)


def has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def require_torch() -> None:
    """Raises UsageError if PyTorch is not installed."""
    if not has_torch():
        raise UsageError(NO_TORCH)


def _advised(error: MissingWeightsError, weights: str | Path) -> MissingWeightsError:
    """The error, with the way to an ONNX file where a name of the catalog was meant."""
    from gpen_weights import find, search_folders

    entry = find(str(weights))
    if entry is None or entry.kind != "generator":
        return error
    target = search_folders()[0] / f"{entry.name}{ONNX}"
    return MissingWeightsError(
        f"{entry.name}{ONNX} is not here: where PyTorch is installed run "
        f"`gpen-core export {entry.name} --format onnx -o {entry.name}{ONNX}`, and put it at {target}"
    )


def _refuse_compile(path: Path, asked: bool) -> None:
    reasons = {ONNX: "onnxruntime compiles by itself", PACKAGE: "it is compiled already"}
    reason = reasons.get(path.suffix.lower())
    if asked and reason:
        raise UsageError(f"{path}: {reason}; leave --compile out, or add --no-compile to --preset throughput")


def _refuse_precision(path: Path, asked: str, found: str) -> None:
    if asked not in ("auto", found):
        raise UsageError(f"{path}: is {found}, which --precision {asked} can't change; export it again")
