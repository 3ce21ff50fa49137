"""Which engine runs a weight file: PyTorch, onnxruntime, or a package compiled ahead of time.

Each engine is imported when a file needs it; nothing else of the package needs PyTorch to restore a photo.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from gpen_core.config import PictureFormat
from gpen_core.errors import MissingWeightsError, UsageError
from gpen_core.types import Image

BACKENDS = ("auto", "torch", "onnx")
ONNX, PACKAGE = ".onnx", ".pt2"


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
        """Restore S x S x 3 uint8 crops; each result is T x T x 3 uint8, or None where it was not finite."""
        ...


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
    if suffix == ONNX:
        from gpen_core.runtime_onnx import OnnxRuntime

        _refuse(path, compile, "onnxruntime compiles by itself; leave --compile out")
        runtime = OnnxRuntime(path, device=device, max_batch=max_batch)
        _refuse_precision(path, precision, runtime.precision)
        return runtime
    require_torch()
    if suffix == PACKAGE:
        from gpen_core.runtime_pt2 import PackageRuntime

        _refuse(path, compile, "it is compiled already; leave --compile out")
        package = PackageRuntime(path, device=device, max_batch=max_batch)
        _refuse_precision(path, precision, package.precision)
        return package
    from gpen_core.checkpoint import load_generator
    from gpen_core.runtime import Runtime, RuntimeOptions

    options = RuntimeOptions(device=device, precision=precision, compile=compile, cache=cache, max_batch=max_batch)
    generator = load_generator(path)
    return Runtime(generator, generator.config, options)


def find_weights(weights: str | Path, backend: str = "auto") -> Path:
    """The file that a path or a name means for a backend.

    Without PyTorch, auto looks for ONNX files only. Raises MissingWeightsError, and UsageError if the backend can't
    run that file.
    """
    from gpen_weights import resolve

    if backend not in BACKENDS:
        raise UsageError(f"unknown backend {backend!r}; use one of {', '.join(BACKENDS)}")
    onnx_only = backend == "onnx" or (backend == "auto" and not has_torch())
    suffixes = (ONNX,) if onnx_only else (".safetensors", PACKAGE) if backend == "torch" else None
    try:
        path = resolve(weights) if suffixes is None else resolve(weights, suffixes=suffixes)
    except MissingWeightsError as error:
        raise _advised(error, weights) if onnx_only else error from None
    is_onnx = path.suffix.lower() == ONNX
    if backend == "onnx" and not is_onnx:
        raise UsageError(
            f"{path}: --backend onnx runs .onnx files; make one with: gpen-core export {path} --format onnx"
        )
    if backend == "torch" and is_onnx:
        raise UsageError(f"{path}: --backend torch can't run an ONNX file; leave it out or say --backend onnx")
    return path


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
        raise UsageError("PyTorch is not installed: pip install torch, or run an exported file: --weights MODEL.onnx")


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


def _refuse(path: Path, asked: bool, reason: str) -> None:
    if asked:
        raise UsageError(f"{path}: {reason}")


def _refuse_precision(path: Path, asked: str, found: str) -> None:
    if asked not in ("auto", found):
        raise UsageError(f"{path}: is {found}, which --precision {asked} can't change; export it again")
