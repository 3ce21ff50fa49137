"""Plain networks to ONNX: the same bytes every time, checked against PyTorch before anything is written."""

from __future__ import annotations

import importlib.util
import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gpen_core.config import Provenance
from gpen_core.errors import CheckpointError, UsageError
from gpen_core.files import replacing

OPSET = 17
TOLERANCE = 1e-4
INPUT = "input"

Axes = Mapping[int, str]
"""Names of the axes whose length is free."""


def properties(family: str, provenance: Provenance) -> dict[str, str]:
    """What an exported model says about itself in `metadata_props`."""
    return {
        "family": family,
        "licence": provenance.licence,
        "source_key": provenance.kept,
        "source_name": provenance.source_name,
        "source_sha256": provenance.source_sha256,
        "tool_version": provenance.tool_version,
    }


def export(
    net: nn.Module,
    path: Path,
    *,
    outputs: Mapping[str, Axes],
    free: Axes,
    probes: Sequence[Tensor],
    metadata: Mapping[str, str],
) -> float:
    """Write `net` as ONNX (opset 17), its one input named `input`.

    outputs: names in order, each with its free axes. free: the input's free axes. probes: inputs [B, C, H, W] of
    several sizes; the first one is traced and onnxruntime must agree with PyTorch on each of them.
    Returns the largest difference between the two, relative to the largest value of an output.
    Raises CheckpointError if it exceeds 1e-4 or the file can't be written, UsageError if onnx is not installed.
    """
    model = trace(net, probes[0], outputs, free)
    difference = max(_difference(net, model, probe) for probe in probes)
    if not difference <= TOLERANCE:
        raise CheckpointError(f"{path}: not written, onnxruntime and PyTorch disagree by {difference:.1e}")
    try:
        with replacing(path) as temporary:
            temporary.write_bytes(_describe(model, metadata))
    except OSError as error:
        raise CheckpointError(f"{path}: can't be written ({error.strerror or error})") from None
    return difference


def trace(net: nn.Module, example: Tensor, outputs: Mapping[str, Axes], free: Axes) -> bytes:
    """`net` as a serialised ONNX model, traced with one example, its one input named `input`.

    outputs: names in order, each with its free axes. free: the input's free axes. Raises UsageError without onnx.
    """
    if importlib.util.find_spec("onnx") is None:
        raise UsageError("writing ONNX needs the onnx package: pip install onnx")
    buffer = io.BytesIO()
    axes = {INPUT: dict(free), **{name: dict(named) for name, named in outputs.items()}}
    with quiet(), torch.no_grad():
        torch.onnx.export(
            net,
            (example,),
            buffer,  # type: ignore[arg-type,unused-ignore]
            input_names=[INPUT],
            output_names=list(outputs),
            dynamic_axes={name: named for name, named in axes.items() if named},
            opset_version=OPSET,
            dynamo=False,
        )
    return buffer.getvalue()


def _describe(model: bytes, metadata: Mapping[str, str]) -> bytes:
    import onnx

    proto = onnx.load_from_string(model)
    onnx.checker.check_model(proto)
    proto.producer_name, _, proto.producer_version = metadata["tool_version"].partition(" ")
    onnx.helper.set_model_props(proto, dict(metadata))
    content: bytes = proto.SerializeToString(deterministic=True)
    return content


def _difference(net: nn.Module, model: bytes, probe: Tensor) -> float:
    with torch.no_grad():
        expected = net(probe)
    expected = expected if isinstance(expected, tuple) else (expected,)
    found = run(model, probe.numpy())
    pairs = zip((tensor.numpy() for tensor in expected), found, strict=True)
    return max(_relative(ours, theirs) for ours, theirs in pairs)


def _relative(expected: NDArray[np.float32], found: NDArray[np.float32]) -> float:
    if expected.shape != found.shape:
        return float("inf")
    return float(np.abs(expected - found).max() / max(float(np.abs(expected).max()), 1e-12))


def run(model: bytes, values: NDArray[np.float32]) -> list[NDArray[np.float32]]:
    """All outputs of a serialised model on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    found: list[Any] = session.run(None, {INPUT: values})
    return found


@contextmanager
def quiet() -> Iterator[None]:
    """The exporter announces its own deprecation and every shape it traces, none of which a user can act on."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
