"""A converted generator becomes an ONNX file or a package compiled ahead of time, each compared with PyTorch first."""

from __future__ import annotations

import copy
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gpen_convert import to_onnx
from gpen_convert.targets import may_replace, may_replace_sidecar, origin_of, output_path
from gpen_core import __version__
from gpen_core.ahead import (
    SIDECAR,
    Fixed,
    Sidecar,
    describe_machine,
    load_package,
    make_package,
    require_unpackable,
    why_not_compiled,
)
from gpen_core.checkpoint import load_generator, read_metadata
from gpen_core.config import GeneratorConfig, WeightsMetadata, megabytes
from gpen_core.errors import CheckpointError, DeviceError, GpenError, UsageError
from gpen_core.files import replacing, sha256
from gpen_core.model import Generator
from gpen_core.runtime import (
    RuntimeOptions,
    choose_device,
    form_for_cpu,
    form_for_gpu,
    lower,
    require_compiler,
    switches,
)
from gpen_core.runtime_onnx import PRECISION_KEY, describe_session, first_line, open_session

FORMATS = {"onnx": ".onnx", "pt2": ".pt2"}
DTYPES = ("fp32", "fp16")
OUTPUT = "output"
TOLERANCE = 1e-4
"""Largest difference in fp32, relative to the largest value of the output."""
DECIBELS = 55.0
"""Least ratio in fp16 of the largest value of the output to the root mean square of the differences."""
CHECKED = (1, 3, 8)
# Eight faces of 1024 pixels fit in the memory of most machines.
MOST_PIXELS = 8 * 1024**2


@dataclass(frozen=True)
class Agreement:
    """How an exported network compares with the float32 one in PyTorch.

    relative: largest difference over the largest value. decibels: largest value over root mean square difference.
    """

    batches: tuple[int, ...]
    relative: float
    decibels: float

    def good(self, dtype: str) -> bool:
        return self.relative <= TOLERANCE if dtype == "fp32" else self.decibels >= DECIBELS

    def __str__(self) -> str:
        sizes = ", ".join(map(str, self.batches))
        return f"largest difference {self.relative:.1e} of the largest value, {self.decibels:.0f} dB, at batch {sizes}"


def export_generator(
    source: Path, output: Path | None = None, *, format: str, dtype: str = "fp32", device: str = "cpu"
) -> list[str]:
    """Export converted weights; returns the report, line by line.

    output: by default beside the source, with the format's suffix; there, and in a folder, a file that does not come
    from the same original is not replaced, and nowhere is a file that is no sidecar by that of a pt2 package.
    dtype: fp32, or fp16 for the convolutions (latent, styles and demodulation stay float32, and so do input and
    output). device: of a pt2 package, which fits it alone.
    Raises CheckpointError, DeviceError and UsageError, and writes nothing then.
    """
    if format not in FORMATS:
        raise UsageError(f"--format {format}: use {' or '.join(FORMATS)}")
    if dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype}: use {' or '.join(DTYPES)}")
    if format == "onnx" and device != "cpu":
        raise UsageError("--device is for --format pt2; an ONNX file runs on every device")
    metadata = read_metadata(source)
    target = output_path(source, output, FORMATS[format])
    origin = metadata.provenance.source_sha256
    replaced = may_replace(target, output, source, lambda there: origin_of(there) == origin)
    if format == "pt2":
        note = Path(f"{target}{SIDECAR}")
        may_replace(note, output, source, lambda _: origin_of(target) == origin)
        may_replace_sidecar(target)
    generator = load_generator(source)
    try:
        if format == "onnx":
            agreement = export_onnx(generator, metadata, target, dtype)
        else:
            agreement = export_package(generator, metadata, target, dtype, choose_device(device), sha256(source))
    except OSError as error:
        raise CheckpointError(f"{target}: can't be written ({error.strerror or error})") from None
    config = metadata.config
    what = f"{format}, {dtype}, {config.input_size} -> {config.output_size} px, {megabytes(target.stat().st_size)}"
    return [*replaced, f"wrote {target}: {what}", f"compared with PyTorch in fp32: {agreement}"]


def export_onnx(generator: Generator, metadata: WeightsMetadata, target: Path, dtype: str = "fp32") -> Agreement:
    """Write an ONNX file: `input` [batch, 3, S, S] to `output` [batch, 3, T, T], float32, any batch.

    The same bytes every time. onnxruntime must agree with PyTorch before the file takes its name.
    """
    config = generator.config
    network = Fixed(generator if dtype == "fp32" else lowered(generator))
    # From a batch of 2 nothing that depends on the batch is taken for a constant 1.
    model = to_onnx.trace(network, probe(config, 2), {OUTPUT: {0: "batch"}}, {0: "batch"})
    content = _described(model, metadata, dtype)
    with replacing(target) as temporary:
        temporary.write_bytes(content)
        session = open_session(temporary, "cpu")
        if describe_session(session, temporary)[0] != metadata:
            raise CheckpointError(f"{target}: what was read back differs from what was written; nothing is kept")
        agreement = compare(generator, lambda x: _run(session, x, target))
        _require_good(agreement, dtype, target, "onnxruntime")
    return agreement


def export_package(
    generator: Generator,
    metadata: WeightsMetadata,
    target: Path,
    dtype: str,
    device: torch.device,
    checkpoint_sha256: str,
) -> Agreement:
    """Compile ahead of time (AOTInductor) for this machine, and write the package and its sidecar TARGET.json.

    Raises DeviceError if the compiler that this needs is not there, or no place to unpack what it makes.
    """
    if not hasattr(torch._inductor, "aoti_load_package"):
        raise UsageError(f"--format pt2 needs PyTorch 2.6 or newer; this is {torch.__version__}")
    if dtype == "fp16" and device.type == "cpu":
        raise DeviceError("--format pt2 --dtype fp16 needs --device cuda; a CPU runs fp32")
    try:
        require_compiler(device)
    except DeviceError:
        tool = "Triton (pip install triton)" if device.type == "cuda" else "a C++ compiler (g++)"
        raise DeviceError(f"--format pt2 needs {tool} to write, though not to run; install one") from None
    require_unpackable()
    facts = Sidecar.describe(metadata, describe_machine(device), dtype, checkpoint_sha256)
    if device.type == "cpu":
        network = form_for_cpu(generator, dtype)
    else:
        network = form_for_gpu(generator, dtype, device)
    with tempfile.TemporaryDirectory(prefix="gpen-core-") as folder:
        package = Path(folder) / f"package{FORMATS['pt2']}"
        try:
            make_package(network, package, facts, device)
        except GpenError:
            raise
        # A compiler raises anything.
        except Exception as error:
            raise DeviceError(f"--format pt2: AOTInductor failed ({why_not_compiled(error)})") from error
        run = load_package(package, device)[1]
        # As it will run: on a GPU, PyTorch left to itself rounds float32 to TF32.
        with switches(device, dtype, RuntimeOptions()):
            agreement = compare(generator, lambda x: run(x.to(device)).cpu().numpy())
        _require_good(agreement, dtype, target, "the package")
        with replacing(Path(f"{target}{SIDECAR}")) as note, replacing(target) as temporary:
            shutil.copyfile(package, temporary)
            shutil.copyfile(f"{package}{SIDECAR}", note)
    return agreement


def lowered(generator: Generator) -> Generator:
    """A copy whose convolutions are float16."""
    generator = copy.deepcopy(generator)
    lower(generator, torch.float16)
    return generator


def probe(config: GeneratorConfig, batch: int) -> Tensor:
    """Pictures [B, 3, S, S] in the network's range: smooth colours with noise, the same for the same batch."""
    random = torch.Generator().manual_seed(batch)
    black, white = config.value_range
    size = config.input_size
    coarse = torch.rand(batch, 3, max(2, size // 16), max(2, size // 16), generator=random)
    smooth = nn.functional.interpolate(coarse, size=(size, size), mode="bilinear", align_corners=False)
    noisy = smooth + 0.05 * torch.randn(batch, 3, size, size, generator=random)
    return noisy.clamp(0, 1) * (white - black) + black


def compare(generator: Generator, run: Any) -> Agreement:
    """A network ([B, 3, S, S] tensor to [B, 3, T, T] array) against the float32 generator on the CPU."""
    side = generator.config.output_size
    batches = tuple(b for b in CHECKED if b == 1 or b * side**2 <= MOST_PIXELS)
    relative, decibels = 0.0, float("inf")
    for batch in batches:
        image = probe(generator.config, batch)
        with torch.inference_mode():
            expected = torch.cat([generator(one[None]) for one in image]).numpy()
        one, other = difference(expected, run(image))
        relative, decibels = max(relative, one), min(decibels, other)
    return Agreement(batches, relative, decibels)


def difference(expected: NDArray[Any], found: NDArray[Any]) -> tuple[float, float]:
    """Largest difference over the largest expected value, and their ratio to the root mean square in decibels."""
    if expected.shape != found.shape or not np.isfinite(found).all():
        return float("inf"), -float("inf")
    errors = np.abs(expected.astype(np.float64) - found)
    largest = max(float(np.abs(expected).max()), 1e-12)
    root = max(float(np.sqrt(np.mean(errors**2))), largest * 1e-12)
    return float(errors.max()) / largest, 20 * float(np.log10(largest / root))


def _run(session: Any, image: Tensor, target: Path) -> Any:
    try:
        return session.run(None, {to_onnx.INPUT: image.numpy()})[0]
    except Exception as error:  # onnxruntime's exceptions share no narrower base
        reason = f"onnxruntime fails at batch {len(image)} ({first_line(error)})"
        raise CheckpointError(f"{target}: not written, {reason}") from error


def _described(model: bytes, metadata: WeightsMetadata, dtype: str) -> bytes:
    import onnx

    proto = onnx.load_from_string(model)
    proto.producer_name, proto.producer_version = "gpen-core", __version__
    side = metadata.config.output_size
    leaving = onnx.helper.make_tensor_value_info(OUTPUT, onnx.TensorProto.FLOAT, ["batch", 3, side, side])
    proto.graph.output[0].CopyFrom(leaving)
    onnx.helper.set_model_props(proto, {**metadata.encode(), PRECISION_KEY: dtype})
    onnx.checker.check_model(proto)
    content: bytes = proto.SerializeToString(deterministic=True)
    return content


def _require_good(agreement: Agreement, dtype: str, target: Path, engine: str) -> None:
    if not agreement.good(dtype):
        raise CheckpointError(f"{target}: not written, {engine} and PyTorch disagree: {agreement}")
