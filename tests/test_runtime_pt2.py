"""Packages compiled ahead of time: the same pictures, and a sentence for whatever does not belong together."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

import gpen_weights
from gpen_convert import export
from gpen_convert.export import difference, export_generator, probe
from gpen_core import ahead, runtime_pt2
from gpen_core.ahead import SIDECAR, Machine, Sidecar, describe_machine, load_package
from gpen_core.backend import CropRuntime, survey_weights
from gpen_core.checkpoint import load_generator
from gpen_core.cli import run_command
from gpen_core.config import GeneratorConfig
from gpen_core.errors import CheckpointError, DeviceError, GpenError, UsageError
from gpen_core.files import sha256
from gpen_core.restorer import Options, Restorer
from gpen_core.runtime import Runtime, RuntimeOptions
from gpen_core.runtime_pt2 import PackageRuntime
from tests.exported import PLAIN, converted, run_process
from tests.stubs import smooth_picture

# Compiling takes seconds for each level, and noise is of interest.
SMALL = GeneratorConfig(input_size=8, output_size=16, channels=(8, 8, 4), style_dim=8, n_mlp=1)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package beside the weights it was made from."""
    source = converted(tmp_path_factory.mktemp("made"), SMALL)
    export_generator(source, format="pt2")
    return source.with_suffix(".pt2")


@pytest.fixture
def package(made: Path, tmp_path: Path) -> Path:
    """A copy to be spoiled."""
    for path in (made, Path(f"{made}.json")):
        shutil.copyfile(path, tmp_path / path.name)
    return tmp_path / made.name


def edit(package: Path, change: Callable[[dict[str, Any]], object]) -> None:
    beside = Path(f"{package}.json")
    content = json.loads(beside.read_text())
    change(content)
    beside.write_text(json.dumps(content, sort_keys=True, indent=1) + "\n")


def test_the_same_values_at_every_batch(made: Path) -> None:
    generator = load_generator(made.with_suffix(".safetensors"))
    sidecar, network = load_package(made, CPU)
    assert sidecar.weights.config == SMALL
    for batch in (1, 2, 3, 8, 15):
        image = probe(SMALL, batch)
        with torch.inference_mode():
            assert difference(generator(image).numpy(), network(image).numpy())[0] <= 1e-4


def test_the_same_pictures_as_pytorch(made: Path) -> None:
    generator = load_generator(made.with_suffix(".safetensors"))
    reference = Runtime(generator, SMALL, RuntimeOptions(device="cpu"))
    runtime = PackageRuntime(made, max_batch=16)
    assert isinstance(runtime, CropRuntime)
    assert runtime.description == "cpu fp32 ahead of time"
    crops = [smooth_picture(8, 8, seed) for seed in range(17)]
    for one, other in zip(runtime(crops), reference(crops), strict=True):
        assert np.abs(np.asarray(one).astype(int) - np.asarray(other)).max() <= 1


def test_restorer(made: Path) -> None:
    restorer = Restorer.load(made, None)
    restored = restorer(smooth_picture(8, 8), Options(aligned=True))
    assert [face.status for face in restored.faces] == ["restored"]


@pytest.mark.slow
def test_the_bundled_weights(tmp_path: Path) -> None:
    source = gpen_weights.resolve("gpen-open-512", suffixes=(".safetensors",))
    target = tmp_path / "net.pt2"
    export_generator(source, target, format="pt2")
    generator = load_generator(source)
    _, network = load_package(target, CPU)
    for batch in (1, 3, 8):
        image = probe(generator.config, batch)
        with torch.inference_mode():
            assert difference(generator(image).numpy(), network(image).numpy())[0] <= 1e-4


@pytest.mark.parametrize(
    "image",
    [
        torch.zeros(1, 3, 16, 16),
        torch.zeros(1, 1, 8, 8),
        torch.zeros(3, 8, 8),
        torch.zeros(0, 3, 8, 8),
        torch.zeros(16, 3, 8, 8),
        torch.zeros(1, 3, 8, 8, dtype=torch.float64),
        torch.zeros(1, 3, 8, 8, device="meta"),
    ],
    ids=lambda image: f"{list(image.shape)} {image.dtype} {image.device}",
)
def test_inputs_that_do_not_fit(image: torch.Tensor, made: Path) -> None:
    _, network = load_package(made, CPU)
    with pytest.raises(ValueError, match=r"expected \[1..15, 3, 8, 8\] float32 on cpu, got"):
        network(image)


def test_inputs_of_any_layout(made: Path) -> None:
    _, network = load_package(made, CPU)
    image = probe(SMALL, 3)
    strided = image.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    assert not strided.is_contiguous()
    assert torch.equal(network(strided), network(image))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(batches=[1, 99]), "not the sidecar that this package was made with"),
        (lambda c: c.update(checkpoint_sha256="1" * 64), "not the sidecar that this package was made with"),
        (lambda c: c.update(dtype="fp16"), "not the sidecar that this package was made with"),
        (lambda c: c["machine"].update(features=[]), "not the sidecar that this package was made with"),
        (lambda c: c["weights"]["config"].update(task="inpainting"), "not the sidecar that this package was made with"),
        (lambda c: c.update(package_sha256="1" * 64), "one of the two was changed or swapped"),
        (lambda c: c.update(input_size=16), "contradicts itself"),
        (lambda c: c.update(format_version=2), "contradicts itself"),
        (lambda c: c.update(surprise=1), "contradicts itself"),
        (lambda c: c.pop("dtype"), "malformed"),
        (lambda c: c["machine"].pop("torch"), "malformed"),
        (lambda c: c["weights"]["config"].update(input_size=7), "input_size 7 is"),
    ],
)
def test_a_sidecar_that_was_changed(
    change: Callable[[dict[str, Any]], object], message: str, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(package, change)
    assert_refused(package, CheckpointError, message, monkeypatch)


def assert_refused(
    package: Path, error: type[GpenError], message: str, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> None:
    """Refused in one line that names the package, before any of its code is loaded."""
    monkeypatch.setattr(ahead, "_open", None)
    with pytest.raises(error, match=message) as caught:
        PackageRuntime(package, **options)
    assert str(package) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b" " * (2 << 20)])
def test_a_sidecar_that_is_none(content: bytes, package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(f"{package}.json").write_bytes(content)
    assert_refused(package, CheckpointError, "sidecar", monkeypatch)


def test_a_missing_sidecar_and_a_missing_package(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(f"{package}.json").unlink()
    assert_refused(package, CheckpointError, "its sidecar net.pt2.json is missing", monkeypatch)
    package.unlink()
    assert_refused(package, CheckpointError, "no such file", monkeypatch)


def test_a_package_that_was_changed(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytearray(package.read_bytes())
    content[len(content) // 2] ^= 1
    package.write_bytes(content)
    assert_refused(package, CheckpointError, "one of the two was changed or swapped", monkeypatch)


def test_a_sidecar_forged_for_another_file(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package.write_bytes(b"not a package")
    digest = sha256(package)
    edit(package, lambda c: c.update(package_sha256=digest))
    assert_refused(package, CheckpointError, "not the sidecar that this package was made with", monkeypatch)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"torch": "2.6.0"}, r"compiled for PyTorch \S+; this is 2\.6\.0"),
        ({"system": "Windows"}, "compiled for system .+; this is Windows"),
        ({"machine": "riscv64"}, "compiled for processor .+; this is riscv64"),
        ({"features": ()}, "compiled for a processor with .+, which this one lacks"),
    ],
)
def test_another_machine(change: dict[str, Any], message: str, package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = replace(describe_machine(CPU), **change)
    monkeypatch.setattr(ahead, "describe_machine", lambda device: here)
    assert_refused(package, DeviceError, message, monkeypatch)


def test_obstacles() -> None:
    made = Machine("2.9", "Linux", "x86_64", "cuda", ("avx2",), "9.0")
    assert made.obstacle(made) == ""
    assert made.obstacle(replace(made, features=("avx2", "avx512f"))) == ""
    assert "lacks" in replace(made, features=("avx2", "avx512f")).obstacle(made)
    assert "capability 9.0; this one has 8.6" in made.obstacle(replace(made, compute_capability="8.6"))


def test_another_device(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError, match="no CUDA device"):
            PackageRuntime(package, device="cuda")
    monkeypatch.setattr(runtime_pt2, "choose_device", torch.device)
    assert_refused(package, DeviceError, "compiled for cpu, not for cuda", monkeypatch, device="cuda")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch": 0}, "a batch of 0 faces"),
        ({"compile": True}, "compiled already"),
        ({"precision": "bf16"}, "is fp32, which --precision bf16 can't change"),
        ({"backend": "onnx"}, r"--backend onnx runs \.onnx files"),
    ],
)
def test_contradictions(options: dict[str, Any], message: str, made: Path) -> None:
    with pytest.raises(UsageError, match=message):
        Restorer.load(made, None, **options)


def test_it_goes_with_other_sizes(made: Path, tmp_path: Path) -> None:
    larger = replace(SMALL, input_size=16)
    restorer = Restorer.load([converted(tmp_path, larger), made], None)
    assert restorer.runtime.description == "cpu fp32 ahead of time 8/16 px"
    for side, used in ((8, made), (16, tmp_path / "net.safetensors")):
        restored = restorer(smooth_picture(side, side), Options(aligned=True))
        assert [face.weights for face in restored.faces] == [str(used)]
    assert restorer.runtime.description == "cpu fp32 ahead of time, cpu fp32 eager 8/16 px"


def test_obstacles_show_before_it_is_loaded(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, memory = survey_weights(package, max_batch=99)
    assert config == SMALL
    assert (memory.weights, memory.batch) == (package.stat().st_size, 15)
    with pytest.raises(UsageError, match="compiled already"):
        survey_weights(package, compile=True)
    with pytest.raises(UsageError, match="--precision bf16"):
        survey_weights(package, precision="bf16")
    here = replace(describe_machine(CPU), torch="1.0")
    monkeypatch.setattr(ahead, "describe_machine", lambda device: here)
    with pytest.raises(DeviceError, match=r"compiled for PyTorch .*; this is 1\.0"):
        survey_weights(package)


def test_running_needs_no_compiler_and_no_settings(made: Path, tmp_path: Path) -> None:
    face = tmp_path / "face.png"
    assert cv2.imwrite(str(face), smooth_picture(8, 8))
    arguments = ["enhance", face, "--aligned", "--weights", made, "-o", tmp_path / "out.png"]
    done = run_process(PLAIN, arguments, {"PATH": str(tmp_path / "nothing")})
    assert (done.returncode, done.stderr) == (0, "")
    assert "cpu fp32 ahead of time" in done.stdout
    assert (tmp_path / "out.png").is_file()


def test_info(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["info", str(made)]) == 0
    out = capsys.readouterr().out
    for part in ("8 -> 16 px", "compiled for cpu", torch.__version__, "1 to 15 faces", "CC0-1.0"):
        assert part in out


def test_exporting_needs_a_compiler(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(device: torch.device) -> None:
        raise DeviceError("--compile on a CPU needs a C++ compiler")

    monkeypatch.setattr(export, "require_compiler", absent)
    with pytest.raises(DeviceError, match=r"needs a C\+\+ compiler \(g\+\+\) to write, though not to run"):
        export_generator(made.with_suffix(".safetensors"), tmp_path / "net.pt2", format="pt2")
    assert list(tmp_path.iterdir()) == []


def test_a_package_of_other_weights_is_not_written(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = converted(tmp_path, SMALL)

    def take_copy(network: torch.nn.Module, package: Path, sidecar: Sidecar, device: torch.device) -> None:
        shutil.copyfile(made, package)
        shutil.copyfile(f"{made}{SIDECAR}", f"{package}{SIDECAR}")

    monkeypatch.setattr(export, "make_package", take_copy)
    monkeypatch.setattr(export, "load_generator", lambda path: shifted(source))
    with pytest.raises(CheckpointError, match="not written, the package and PyTorch disagree"):
        export_generator(source, format="pt2")
    assert [path.name for path in tmp_path.iterdir()] == [source.name]


def shifted(source: Path) -> torch.nn.Module:
    generator = load_generator(source)
    generator.constant.data += 1
    return generator
