"""What `doctor` tells of a machine, also of one where nothing works; and the presets it chooses from."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch

from gpen_core import doctor
from gpen_core.cli import run_command
from gpen_core.doctor import Finding, examine, works
from gpen_core.errors import DeviceError, UsageError
from gpen_core.presets import GIB, PRESETS, choose_preset, find_preset
from gpen_core.restorer import Restorer
from gpen_core.runtime import PRECISIONS, RuntimeOptions
from tests.exported import PLAIN, run_process
from tests.legacy import TINY, legacy_state
from tests.stubs import config_of, without_channel_0


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Small converted weights, the only ones on the machine but for the bundled ones."""
    monkeypatch.setenv("GPEN_CORE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    torch.save(legacy_state(TINY), tmp_path / "old.pth")
    path = tmp_path / "tiny.safetensors"
    assert run_command(["convert", str(tmp_path / "old.pth"), "-o", str(path)]) == 0
    return str(path)


def by_name(found: list[Finding], name: str) -> Finding:
    return next(finding for finding in found if finding.name == name)


def blind(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`gpen-core doctor` in a process where importing fails as `code`, the body of `find_spec(name)`, says."""
    script = (
        "import sys\n"
        "class Blocker:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        {code}\n"
        "sys.meta_path.insert(0, Blocker())\n"
        "from gpen_core.cli import main\n"
        "main(['doctor', *sys.argv[1:]])\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, env=environment)


def test_a_machine_where_enhance_works(weights: str, centerface_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["doctor", "--weights", weights, "--detector", str(centerface_path)]
    assert run_command(arguments) == 0
    out = capsys.readouterr().out
    for part in (
        "gpen-core",
        "Python",
        torch.__version__,
        onnxruntime.__version__,
        "cores",
        "GiB",
        "preset",
        "16 -> 16",
    ):
        assert part in out
    assert "one face restored in" in out
    assert "!!" not in out
    assert out.endswith("enhance works on this machine\n")


def test_all_weights_of_auto(
    weights: str, centerface_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["doctor", "--weights", "auto", "--detector", str(centerface_path)]
    (tmp_path / "home").mkdir()
    small = tmp_path / "home" / "GPEN-BFR-256.safetensors"
    small.write_bytes(Path(weights).read_bytes())
    assert run_command(arguments) == 0
    out = capsys.readouterr().out
    assert f"{small} (16 -> 16 px)" in out
    assert "gpen-open-512.safetensors (512 -> 512 px)" in out
    (tmp_path / "home" / "GPEN-BFR-2048.safetensors").write_bytes(b"<html>")
    assert run_command(arguments) == 4
    assert "GPEN-BFR-2048.safetensors: looks like an HTML" in capsys.readouterr().out


@pytest.mark.parametrize("task", ["colorization", "inpainting", "seg2face"])
@pytest.mark.parametrize("suffix", [".safetensors", ".onnx"])
def test_weights_of_another_task(task: str, suffix: str, tmp_path: Path, weights: str) -> None:
    path = tmp_path / f"other{suffix}"
    torch.save(legacy_state(TINY), tmp_path / "other.pth")
    assert run_command(["convert", str(tmp_path / "other.pth"), "--task", task]) == 0
    if suffix == ".onnx":
        assert run_command(["export", str(tmp_path / "other.safetensors"), "--format", "onnx"]) == 0
    found = examine(str(path), "centerface")
    finding = by_name(found, "weights")
    assert finding.state == "missing"
    assert finding.text.startswith(f"{path}: these weights are for {task}, not restoration: use gpen-core ")
    assert not works(found)
    assert "trial" not in [finding.name for finding in found]


def test_weights_of_auto_that_enhance_would_refuse(weights: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    path = home / "GPEN-BFR-256.safetensors"
    assert run_command(["convert", str(tmp_path / "old.pth"), "-o", str(path), "--task", "inpainting"]) == 0
    found = [finding.text for finding in examine("auto", "centerface") if finding.state == "missing"]
    assert len(found) == 1
    assert f"{path}: these weights are for inpainting" in found[0]
    for name in ("256", "1024"):
        (home / f"GPEN-BFR-{name}.safetensors").write_bytes(Path(weights).read_bytes())
    found = [finding.text for finding in examine("auto", "centerface") if finding.state == "missing"]
    assert len(found) == 1
    assert "GPEN-BFR-1024.safetensors: both take crops of 16 px" in found[0]


def test_auto_of_an_onnx_only_installation(weights: str, tmp_path: Path, centerface_path: Path) -> None:
    (tmp_path / "home").mkdir()
    exported = tmp_path / "home" / "GPEN-BFR-256.onnx"
    assert run_command(["export", weights, "--format", "onnx", "-o", str(exported)]) == 0
    done = onnx_only("--weights", "auto", "--detector", centerface_path)
    assert f"{exported} (16 -> 16 px)" in done.stdout
    assert done.stdout.endswith("enhance works on this machine\n")


def test_a_torch_that_does_not_work(weights: str) -> None:
    done = blind("if name == 'torch': raise ImportError('libtorch_cpu.so: cannot open')", "--weights", weights)
    assert done.returncode == 4
    assert done.stderr == ""
    assert "!!  torch        torch can't be imported" in done.stdout
    assert "cure: pip install torch" in done.stdout
    assert "ok  cv2" in done.stdout
    assert done.stdout.endswith("enhance does not work on this machine\n")


def onnx_only(*arguments: object) -> subprocess.CompletedProcess[str]:
    """`gpen-core doctor` where only requirements-onnx.txt is installed."""
    code = "import sys; sys.modules |= dict.fromkeys(('torch', 'safetensors', 'einops', 'onnx')); "
    return run_process(f"{code}{PLAIN}", ["doctor", *arguments])


def test_an_onnx_only_installation_works(weights: str, tmp_path: Path, centerface_path: Path) -> None:
    exported = tmp_path / "tiny.onnx"
    assert run_command(["export", weights, "--format", "onnx", "-o", str(exported)]) == 0
    done = onnx_only("--weights", exported, "--detector", centerface_path)
    assert done.stderr == ""
    assert "--  torch        not installed: an ONNX-only installation" in done.stdout
    assert "!!" not in done.stdout
    for absent in ("safetensors  ", "einops  ", "--compile   "):
        assert absent not in done.stdout
    assert "(16 -> 16 px)" in done.stdout
    assert "one face restored in" in done.stdout
    assert "fp32 onnxruntime" in done.stdout
    assert done.stdout.endswith("enhance works on this machine\n")
    assert done.returncode == 0


@pytest.mark.parametrize(("name", "reason"), [("", "gpen-open-512.onnx is not here"), ("tiny", "PyTorch is not")])
def test_an_onnx_only_installation_needs_exported_weights(
    name: str, reason: str, weights: str, centerface_path: Path
) -> None:
    done = onnx_only("--detector", centerface_path, *(["--weights", weights] if name else []))
    assert done.returncode == 4
    assert done.stderr == ""
    assert done.stdout.count("!!") == 1
    assert "!!  weights" in done.stdout
    assert reason in done.stdout


def test_without_libgl(weights: str) -> None:
    code = (
        "if name == 'cv2': raise ImportError('libGL.so.1: cannot open shared object file: No such file or directory')"
    )
    done = blind(code, "--weights", weights)
    assert done.returncode == 4
    assert done.stderr == ""
    assert "!!  cv2          opencv-python can't be imported (ImportError: libGL.so.1" in done.stdout
    assert "apt-get install libgl1" in done.stdout
    assert "opencv-python-headless" in done.stdout
    assert "ok  torch" in done.stdout


def test_without_anything() -> None:
    names = "'torch', 'cv2', 'numpy', 'onnxruntime', 'safetensors', 'einops'"
    done = blind(f"if name.split('.')[0] in ({names}): raise ImportError('gone')")
    assert done.returncode == 4
    assert done.stderr == ""
    assert done.stdout.count("!!") == 6


def test_enhance_without_libgl_says_so_in_one_line(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "class Blocker:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'cv2': raise ImportError('libGL.so.1: cannot open shared object file')\n"
        "sys.meta_path.insert(0, Blocker())\n"
        "from gpen_core.cli import main\n"
        "main(['enhance', 'photo.jpg'])\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "gpen-core: libGL.so.1: cannot open shared object file (see: gpen-core doctor)\n"


@pytest.mark.parametrize(
    ("error", "cure"),
    [
        (ModuleNotFoundError("No module named 'cv2'"), "pip install 'opencv-python<4.12'"),
        (ImportError("libgthread-2.0.so.0: cannot open"), "apt-get install libgl1"),
        (ImportError("numpy.core.multiarray failed to import"), "--force-reinstall"),
    ],
)
def test_cures_for_cv2(
    error: Exception, cure: str, weights: str, centerface_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = importlib.import_module

    def import_module(name: str) -> Any:
        if name == "cv2":
            raise error
        return load(name)

    monkeypatch.setattr(importlib, "import_module", import_module)
    found = examine(weights, str(centerface_path))
    assert not works(found)
    assert cure in by_name(found, "cv2").cure


def test_weights_that_are_not_here(weights: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["doctor", "--weights", "gpen-bfr-512"]) == 4
    assert "!!  weights" in capsys.readouterr().out


def test_weights_that_are_none(weights: str, tmp_path: Path) -> None:
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(b"<html>")
    finding = by_name(examine(str(bad), "centerface"), "weights")
    assert finding.state == "missing"
    assert "bad.safetensors" in finding.text


def test_a_detector_that_will_be_fetched(weights: str) -> None:
    found = examine(weights, "centerface")
    finding = by_name(found, "detector")
    assert finding.state == "optional"
    assert finding.cure == "gpen-core weights pull centerface"
    assert works(found)


def test_a_detector_that_cannot_be_fetched(weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnx" else find(name))
    assert by_name(examine(weights, "centerface"), "detector").cure == "pip install onnx"
    assert by_name(examine(weights, "absent.onnx"), "detector").state == "missing"


def test_no_provider(weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["AzureExecutionProvider"])
    found = examine(weights, "centerface")
    assert not works(found)
    assert "onnxruntime" in by_name(found, "detection").cure


def test_a_gpu_without_its_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    finding = doctor._providers(True)
    assert finding.state == "optional"
    assert "onnxruntime-gpu" in finding.cure
    assert doctor._providers(False).state == "ok"


def test_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        name, total_memory, major, minor = "Some GPU", 8 * GIB, 8, 6

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (2 * GIB, 8 * GIB))
    (finding,), memory = doctor._gpus()
    assert finding.text == "Some GPU, 8.0 GiB, 2.0 GiB free, compute capability 8.6"
    assert choose_preset(memory) == "8gb"


def test_a_compiler_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(device: torch.device) -> None:
        raise DeviceError("--compile on a CPU needs a C++ compiler")

    monkeypatch.setattr("gpen_core.runtime.require_compiler", absent)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    finding = doctor._compiler()
    assert (finding.state, finding.cure) == ("optional", "apt-get install g++")


def test_where_compiled_networks_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPEN_CORE_HOME", str(tmp_path))
    folder = tmp_path / "compiled"
    assert doctor._compiled().lines() == [
        f"ok  compiled     {folder} keeps 0 networks for the CPU, 0.0 kB of at most 2000.0 MB"
    ]
    entry = folder / f"{'0' * 32}-{'0' * 8}"
    entry.mkdir(parents=True)
    (entry / "model.pt2").write_bytes(bytes(1_500_000))
    assert "keeps 1 network for the CPU, 1.5 MB of" in doctor._compiled().text
    folder.chmod(0o777)
    assert (doctor._compiled().state, "others may write" in doctor._compiled().text) == ("optional", True)
    monkeypatch.setattr("gpen_core.package_cache.default_folder", lambda: None)
    assert doctor._compiled().cure == "set GPEN_CORE_HOME to a folder"


def test_a_network_that_does_not_work(weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpen_core.runtime.Runtime.__call__", lambda self, crops: [None] * len(crops))
    assert "not finite" in by_name(examine(weights, "centerface"), "trial").text


# Presets.


@pytest.mark.parametrize(
    ("memory", "name"),
    [
        (None, "laptop"),
        (2 * GIB, "laptop"),
        (4 * GIB - 300 * 2**20, "4gb"),
        (6 * GIB, "4gb"),
        (8 * GIB - 300 * 2**20, "8gb"),
        (12 * GIB - 300 * 2**20, "12gb"),
        (80 * GIB, "12gb"),
    ],
)
def test_the_preset_for_a_memory(memory: int | None, name: str) -> None:
    assert choose_preset(memory) == name


def test_presets_are_possible() -> None:
    assert set(PRESETS) == {"laptop", "4gb", "8gb", "12gb", "throughput"}
    for preset in PRESETS.values():
        RuntimeOptions(precision=preset.precision, compile=preset.compile, max_batch=preset.max_batch)
        assert preset.precision in PRECISIONS
        assert preset.needs is None or preset.networks < preset.needs
    batches = [preset.max_batch for preset in PRESETS.values()]
    assert batches == sorted(batches)


def test_an_unknown_preset() -> None:
    with pytest.raises(UsageError, match="--preset 16gb: use auto, laptop"):
        find_preset("16gb")
    assert run_command(["enhance", "absent.jpg", "--preset", "16gb"]) == 1


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], {"precision": "auto", "compile": False, "max_batch": None}),
        (["--preset", "4gb"], {"precision": "auto", "compile": False, "max_batch": 2}),
        (["--preset", "throughput"], {"precision": "auto", "compile": True, "max_batch": 16}),
        (
            ["--preset", "throughput", "--no-compile", "--batch", "3", "--precision", "fp32"],
            {"precision": "fp32", "compile": False, "max_batch": 3},
        ),
        (["--preset", "auto", "--device", "cpu"], {"precision": "auto", "compile": False, "max_batch": 1}),
    ],
)
def test_options_win_over_the_preset(
    options: list[str], expected: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cv2

    from tests.stubs import smooth_picture

    asked: dict[str, Any] = {}

    def load(cls: object, weights: object, detector: object, **options: Any) -> Restorer:
        asked.update(options)
        return Restorer(without_channel_0, config_of(), None)

    monkeypatch.setattr(Restorer, "load", classmethod(load))  # type: ignore[arg-type]
    photo = tmp_path / "face.png"
    assert cv2.imwrite(str(photo), smooth_picture(64, 64))
    assert run_command(["enhance", str(photo), "--aligned", *options]) == 0
    assert {name: asked[name] for name in expected} == expected
