"""Networks on onnxruntime: opened with the same settings, failing in one line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import onnxruntime

from gpen_core.errors import DeviceError, GpenError, UsageError
from gpen_core.files import why_unreadable
from gpen_core.onnx_file import require_whole

_MAX_THREADS = 8
_LEGACY_STARTS = (b"PK\x03\x04", b"\x80")


def open_session(path: Path, device: str, what: str, failure: type[GpenError]) -> Any:
    """An onnxruntime session for an ONNX file.

    device: "cpu", or "cuda" where onnxruntime has its CUDA provider. what: "detector", say, and `failure`, for the
    message about a file that is no ONNX model, or not all of one. Raises `failure`, DeviceError and UsageError.
    """
    providers = _providers(device, what)
    obstacle = why_unreadable(path)
    if obstacle:
        raise failure(f"{path}: can't read the {what}: {obstacle}")
    try:
        with path.open("rb") as file:
            start = file.read(9)
    except OSError as error:
        raise failure(f"{path}: can't read the {what}: {error.strerror}") from error
    if start.startswith(_LEGACY_STARTS):
        raise failure(f"{path}: a PyTorch checkpoint, not an ONNX {what}: run `gpen-core convert {path}`")
    if start[8:9] == b"{":
        raise failure(f"{path}: a safetensors file, not an ONNX {what}")
    require_whole(path, failure)
    options = onnxruntime.SessionOptions()
    # Left to itself onnxruntime pins threads to cores, and complains where a container forbids it.
    options.intra_op_num_threads = _thread_count()
    # Idle workers that spin would take the cores from the generator that runs next.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # Patterns are kept for each picture size ever seen.
    options.enable_mem_pattern = False
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=providers)
    except Exception as error:  # onnxruntime's exceptions share no narrower base
        reason = first_line(error).rpartition("failed:")[2]
        raise failure(f"{path}: not a usable ONNX model ({reason})") from error
    # A provider whose libraries are missing is left out without an error.
    if session.get_providers()[0] != providers[0]:
        raise DeviceError(f"{what} on cuda: onnxruntime's CUDA provider did not start (CUDA or cuDNN is missing)")
    return session


def first_line(error: Exception) -> str:
    """What an exception says, cut after its first line."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _providers(device: str, what: str) -> list[str]:
    if device == "cpu":
        return ["CPUExecutionProvider"]
    if device != "cuda":
        raise UsageError(f"{what} device {device!r}: choose cpu or cuda")
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        raise DeviceError(f"{what} on cuda needs onnxruntime's CUDA provider: pip install onnxruntime-gpu")
    return ["CUDAExecutionProvider", "CPUExecutionProvider"]


def _thread_count() -> int:
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(allowed, _MAX_THREADS)
