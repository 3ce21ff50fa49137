"""Runs an exported generator on onnxruntime, without PyTorch: the same calls and results as `runtime.Runtime`."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from gpen_core.config import METADATA_KEY, InferredFormat, PictureFormat, WeightsMetadata, describe, megabytes
from gpen_core.errors import CheckpointError, DeviceError, UsageError
from gpen_core.files import why_unreadable
from gpen_core.footprint import Footprint, exported_footprint
from gpen_core.onnx_file import require_whole
from gpen_core.pixels import from_network, require_crops, to_network
from gpen_core.types import Image

PRECISION_KEY = "gpen_core_precision"
CPU, CUDA, TENSORRT = "CPUExecutionProvider", "CUDAExecutionProvider", "TensorrtExecutionProvider"
DEVICES = {CPU: "cpu", CUDA: "cuda", TENSORRT: "tensorrt"}
FLOATS = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
OUT_OF_MEMORY = ("out of memory", "Failed to allocate memory", "bad_alloc", "bad allocation")
# What else is converted to ONNX, by the family in its metadata, and the options that take it.
FAMILIES = {"parsenet": "--mask parse --parser", **dict.fromkeys(("retinaface", "centerface", "yunet"), "--detector")}
logger = logging.getLogger(__name__)


class OnnxRuntime:
    """Runs a generator in an ONNX file on aligned 8-bit crops, in batches. Threads may share it.

    path: a file of `gpen-core export`, which describes itself, or any other with one input [B or 1, 3, S, S] and one
    output [B or 1, 3, T, T]; for such a one the crop template and the value range [-1, 1] of GPEN are taken.
    device: auto (CUDA where onnxruntime has it, else the CPU), cpu, cuda, cuda:N or tensorrt, which builds its engine
    for minutes and is therefore never chosen unasked.
    max_batch: faces in one call; None means 8 on a GPU and 1 on a CPU. threads: of the CPU; None means all cores.

    Raises CheckpointError for a file that is no such network or keeps its weights in other files, DeviceError for a
    device that onnxruntime can't use and UsageError for a device that does not exist.
    """

    def __init__(
        self, path: str | Path, *, device: str = "auto", max_batch: int | None = None, threads: int | None = None
    ) -> None:
        if max_batch is not None and max_batch < 1:
            raise UsageError(f"a batch of {max_batch} faces is none")
        self.path = Path(path)
        self.session = open_session(self.path, device, threads)
        self.metadata, self.config = describe_session(self.session, self.path)
        entering = self.session.get_inputs()[0]
        self._input, self._dtype = entering.name, FLOATS[entering.type]
        self._fixed = entering.shape[0] == 1
        self.device = DEVICES.get(self.session.get_providers()[0], self.session.get_providers()[0])
        self.precision = precision_of(self.session)
        self.max_batch = 1 if self._fixed else max_batch or (1 if self.device == "cpu" else 8)
        self._lock = threading.Lock()

    @property
    def description(self) -> str:
        """Device, precision and engine in words."""
        return f"{self.device} {self.precision} onnxruntime"

    def warm_up(self, batches: Sequence[int] = (1,)) -> None:
        """Run once for each of the given batch sizes, so that later calls don't wait."""
        size = self.config.input_size
        grey = np.full((size, size, 3), 128, np.uint8)
        for batch in sorted({min(b, self.max_batch) for b in batches}):
            self([grey] * batch)

    def __call__(self, crops: Sequence[Image]) -> list[Image | None]:
        """Restore S x S crops; each result is T x T, or None where the network gave no finite picture.

        Raises ImageError for anything but S x S x 3 uint8, and DeviceError if onnxruntime fails.
        """
        require_crops(crops, (self.config.input_size,))
        results: list[Image | None] = []
        while len(results) < len(crops):
            batch = crops[len(results) : len(results) + self.max_batch]
            values = self._attempt(batch)
            if values is None:
                self._shrink(len(batch))
                continue
            results += [self._picture(value) for value in values]
        return results

    def _attempt(self, crops: Sequence[Image]) -> NDArray[Any] | None:
        """[B, 3, T, T] for one batch, or None if memory ran out."""
        pixels = np.stack(crops).transpose(0, 3, 1, 2).astype(np.float32)
        values = np.ascontiguousarray(to_network(pixels, self.config.value_range), self._dtype)
        try:
            # One picture at a time uses all cores already; two would double the memory.
            with self._lock:
                found: list[NDArray[Any]] = self.session.run(None, {self._input: values})
        except Exception as error:  # onnxruntime's exceptions share no narrower base
            if any(words in str(error) for words in OUT_OF_MEMORY):
                return None
            raise DeviceError(f"{self.path}: onnxruntime failed on {self.device} ({first_line(error)})") from error
        return found[0]

    def _picture(self, value: NDArray[Any]) -> Image | None:
        if not np.isfinite(value).all():
            return None
        pixels = from_network(value.astype(np.float32), self.config.value_range)
        return np.ascontiguousarray(pixels.astype(np.uint8).transpose(1, 2, 0))

    def _shrink(self, failed: int) -> None:
        if failed == 1:
            raise DeviceError(f"out of memory on {self.device} with a single {self.config.output_size} px face")
        self.max_batch = max(1, failed // 2)
        logger.warning("out of memory with %d faces at once; going on with %d", failed, self.max_batch)


def open_session(path: Path, device: str = "auto", threads: int | None = None) -> onnxruntime.InferenceSession:
    """A session on a device. Raises CheckpointError, DeviceError and UsageError as `OnnxRuntime` does."""
    providers = choose_providers(device, onnxruntime.get_available_providers())
    obstacle = why_unreadable(path)
    if obstacle:
        raise CheckpointError(f"{path}: {obstacle}")
    require_whole(path, CheckpointError)
    options = onnxruntime.SessionOptions()
    # Left to itself onnxruntime pins threads to cores, and complains where a container forbids it.
    options.intra_op_num_threads = threads or core_count()
    # Workers that spin between calls would take the cores from the rest of the program.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=providers)
    except Exception as error:  # onnxruntime's exceptions share no narrower base
        reason = first_line(error).rpartition("failed:")[2].strip()
        raise CheckpointError(f"{path}: not a usable ONNX model ({reason})") from error
    wanted = providers[0][0]
    if device != "auto" and session.get_providers()[0] != wanted:
        raise DeviceError(f"--device {device}: onnxruntime has {wanted} but can't start it on this machine")
    return session


def choose_providers(device: str, available: Sequence[str]) -> list[tuple[str, dict[str, str]]]:
    """onnxruntime's execution providers for a device, best first.

    Raises DeviceError if they are not among the available ones, UsageError for an unknown device.
    """
    kind, _, index = device.partition(":")
    known = kind in ("auto", "cpu", "cuda", "tensorrt") and (not index or (kind == "cuda" and index.isdecimal()))
    if not known or device.endswith(":"):
        raise UsageError(f"unknown device {device!r} for ONNX; use auto, cpu, cuda, cuda:N or tensorrt")
    cpu: tuple[str, dict[str, str]] = (CPU, {})
    # TF32 would round what is called fp32 to 10 bits.
    cuda = (CUDA, {"device_id": index or "0", "use_tf32": "0"})
    if kind == "cpu" or (kind == "auto" and CUDA not in available):
        return [cpu]
    needed = TENSORRT if kind == "tensorrt" else CUDA
    if needed not in available:
        raise DeviceError(f"--device {device}: this onnxruntime has no {needed}; pip install onnxruntime-gpu")
    if kind == "tensorrt":
        return [(TENSORRT, {"trt_fp16_enable": "0"}), cuda, cpu]
    return [cuda, cpu]


def describe_session(session: onnxruntime.InferenceSession, path: Path) -> tuple[WeightsMetadata | None, PictureFormat]:
    """What a file says about itself, None if nothing, and the format of its pictures. Raises CheckpointError."""
    entering, leaving = session.get_inputs(), session.get_outputs()
    if len(entering) != 1 or len(leaving) != 1:
        raise CheckpointError(f"{path}: not a generator: it has {len(entering)} inputs and {len(leaving)} outputs")
    sides = [_side(value, path) for value in (entering[0], leaving[0])]
    if entering[0].shape[0] != 1 and isinstance(entering[0].shape[0], int):
        raise CheckpointError(
            f"{path}: takes batches of {entering[0].shape[0]} faces only; export it with a free batch"
        )
    found: Mapping[str, str] = session.get_modelmeta().custom_metadata_map
    if METADATA_KEY not in found:
        return None, InferredFormat(sides[0], sides[1])
    try:
        metadata = WeightsMetadata.decode(found)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    stated = [metadata.config.input_size, metadata.config.output_size]
    if stated != sides:
        raise CheckpointError(
            f"{path}: says {stated[0]} -> {stated[1]} px, but the network has {sides[0]} -> {sides[1]}"
        )
    return metadata, metadata.config


def survey(path: Path, device: str = "auto", max_batch: int | None = None) -> tuple[PictureFormat, Footprint, str]:
    """The format of a network's pictures, its memory and its precision, without keeping it.

    Raises as `OnnxRuntime` does.
    """
    on_cpu = choose_providers(device, onnxruntime.get_available_providers())[0][0] == CPU
    session = open_session(path, "cpu")
    _, pictures = describe_session(session, path)
    fixed = session.get_inputs()[0].shape[0] == 1
    batch = 1 if fixed else max_batch or (1 if on_cpu else 8)
    return pictures, exported_footprint(pictures, path.stat().st_size, batch), precision_of(session)


def precision_of(session: onnxruntime.InferenceSession) -> str:
    """As its file says."""
    found: Mapping[str, str] = session.get_modelmeta().custom_metadata_map
    return found.get(PRECISION_KEY, "of unknown precision")


def describe_file(path: Path) -> list[str]:
    """What an ONNX generator, or a converted detector or parser, is, in lines for people.

    Raises CheckpointError naming the file.
    """
    session = open_session(path, "cpu")
    about = session.get_modelmeta()
    if about.custom_metadata_map.get("family") in FAMILIES:
        return [*_describe_other(about.custom_metadata_map), f"ONNX, {megabytes(path.stat().st_size)}"]
    metadata, pictures = describe_session(session, path)
    precision = precision_of(session)
    lines = describe(metadata) if metadata else []
    if not metadata:
        lines = [f"a network of {pictures.input_size} -> {pictures.output_size} px that does not describe itself"]
    batch = "one face at a time" if session.get_inputs()[0].shape[0] == 1 else "any number of faces at once"
    made = f", made by {about.producer_name}" if about.producer_name else ""
    return [*lines, f"ONNX, {precision}, {batch}, {megabytes(path.stat().st_size)}{made}"]


def _describe_other(said: Mapping[str, str]) -> list[str]:
    """A network beside the generator, as its conversion wrote it down."""
    family, option = said["family"], FAMILIES[said["family"]]
    origin = {key: said.get(key) or "not stated" for key in ("source_name", "source_sha256", "licence")}
    return [
        f"a {family} network, for {option}",
        f"source {origin['source_name']}, sha256 {origin['source_sha256']}, licence: {origin['licence']}",
    ]


def _side(value: Any, path: Path) -> int:
    shape = value.shape
    square = len(shape) == 4 and shape[1] == 3 and isinstance(shape[2], int) and shape[2] == shape[3]
    if not square or value.type not in FLOATS:
        seen = " x ".join(map(str, shape))
        raise CheckpointError(f"{path}: not a generator: {value.name} is {value.type} {seen}, not B x 3 x size x size")
    return int(shape[2])


def core_count() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
