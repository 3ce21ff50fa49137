"""Packages compiled ahead of time: the same pictures, and a sentence for whatever does not belong together."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.torch_version import TorchVersion

import gpen_weights
from gpen_convert import export
from gpen_convert.export import difference, export_generator, export_package, probe
from gpen_core import ahead, doctor, runtime_pt2
from gpen_core.ahead import (
    BATCHES,
    ONE,
    PLACES,
    SIDECAR,
    Machine,
    Sidecar,
    can_record,
    declared_where_used,
    describe_machine,
    load_package,
    make_package,
    read_sidecar,
    require_loadable,
    unpacking_place,
)
from gpen_core.backend import CropRuntime, survey_weights
from gpen_core.checkpoint import load_generator
from gpen_core.cli import run_command
from gpen_core.errors import CheckpointError, DeviceError, GpenError, ImageError, UsageError
from gpen_core.files import sha256
from gpen_core.restorer import Options, Restorer
from gpen_core.runtime import Compiled, Runtime, RuntimeOptions, compiled_ahead, switches
from gpen_core.runtime_pt2 import PackageRuntime
from gpen_core.types import Image
from tests.exported import PLAIN, SMALL, converted, run_process
from tests.stubs import config_of, doubled, smooth_picture
from tests.test_wrong_input import NO_CROPS

pytestmark = pytest.mark.skipif(not hasattr(torch._inductor, "aoti_load_package"), reason="needs PyTorch 2.6 or newer")
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
NO_EXECUTION = SimpleNamespace(f_flag=getattr(os, "ST_NOEXEC", 0))


@pytest.fixture(scope="module")
def made(small_package: Path) -> Path:
    """A package beside the weights it was made from."""
    return small_package


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


def test_a_cpu_runs_a_batch_face_by_face(made: Path) -> None:
    sidecar, network = load_package(made, CPU)
    assert (sidecar.batches, sidecar.compiled_batches) == (BATCHES, ONE)
    image = probe(SMALL, 5)
    assert torch.equal(network(image), torch.cat([network(one) for one in image.split(1)]))


@pytest.fixture(scope="module")
def dynamic(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package whose code is for every batch, as those for a GPU are, and as those for a CPU once were.

    It is of `doubled`; the generator would take longer to compile.
    """
    package = tmp_path_factory.mktemp("dynamic") / "net.pt2"
    sidecar = replace(read_sidecar(made), compiled_batches=BATCHES, package_sha256="")
    make_package(Doubled(), package, sidecar, CPU)
    return package


class Doubled(torch.nn.Module):
    def forward(self, image: Tensor) -> Tensor:
        return doubled(image)


def test_code_for_every_batch(dynamic: Path) -> None:
    sidecar, network = load_package(dynamic, CPU)
    assert (sidecar.batches, sidecar.compiled_batches) == (BATCHES, BATCHES)
    content = json.loads(Path(f"{dynamic}{SIDECAR}").read_text())
    assert content["format_version"] == 1
    assert "compiled_batches" not in content
    for batch in (1, 3, 15):
        image = probe(SMALL, batch)
        torch.testing.assert_close(network(image), doubled(image))
    with pytest.raises(ImageError, match=r"expected \[1..15, 3, 8, 8\]"):
        network(torch.zeros(16, 3, 8, 8))


def test_what_the_code_is_for_is_said(dynamic: Path, made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for package, said in ((dynamic, "1 to 15 faces at once, "), (made, "1 to 15 faces at once, one after the other")):
        assert run_command(["info", str(package)]) == 0
        assert said in capsys.readouterr().out


def test_code_for_every_batch_is_not_taken_for_code_for_one(dynamic: Path, tmp_path: Path) -> None:
    package = tmp_path / "net.pt2"
    shutil.copyfile(dynamic, package)
    content = json.loads(Path(f"{dynamic}{SIDECAR}").read_text())
    content.update(format_version=2, compiled_batches=[1, 1])
    Path(f"{package}{SIDECAR}").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="not the sidecar that this package was made with"):
        read_sidecar(package)


def test_any_number_of_threads_may_call_it(made: Path, dynamic: Path) -> None:
    images = [probe(SMALL, 1 + seed % 4) for seed in range(32)]
    for package in (made, dynamic):
        _, network = load_package(package, CPU)
        expected = [network(image) for image in images]
        with ThreadPoolExecutor(8) as pool:
            for one, other in zip(pool.map(network, images), expected, strict=True):
                assert torch.equal(one, other)
    runtime = PackageRuntime(made, max_batch=4)
    given = [[smooth_picture(8, 8, 10 * seed + i) for i in range(seed % 7)] for seed in range(32)]
    alone = [runtime(crops) for crops in given]
    with ThreadPoolExecutor(8) as pool:
        for results, expected_results in zip(pool.map(runtime, given), alone, strict=True):
            for a, b in zip(results, expected_results, strict=True):
                np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


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
    with pytest.raises(ImageError, match=r"expected \[1..15, 3, 8, 8\] float32 on cpu, got"):
        network(image)


def test_crops_that_do_not_fit(made: Path) -> None:
    runtime = PackageRuntime(made)
    for crops in NO_CROPS.values():
        for start in (runtime, runtime.submit):
            with pytest.raises(ImageError, match=r"^expected (crops of 8 x 8 x 3 uint8|a sequence of crops)"):
                start(crops)


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
        (lambda c: c.update(format_version=1), "contradicts itself"),
        (lambda c: c.update(format_version=3), "format 3, which this version of gpen-core does not know"),
        (lambda c: c.update(compiled_batches=[1, 15], format_version=1), "contradicts itself"),
        (lambda c: c.update(compiled_batches=[1, 8]), r"code for 1 to 8 faces can't make calls of 1 to 15"),
        (lambda c: c.update(compiled_batches=[2, 2]), r"code for 2 to 2 faces can't make calls of 1 to 15"),
        (lambda c: c.update(compiled_batches=1), "malformed"),
        (lambda c: (c.pop("compiled_batches"), c.update(format_version=1)), "not the sidecar that this package was"),
        (lambda c: c.update(surprise=1), "contradicts itself"),
        (lambda c: c.pop("dtype"), "malformed"),
        *(
            (lambda c, value=value: c.update(format_version=value), "malformed")
            for value in ("2", 2.0, True, None, [2])
        ),
        *((lambda c, value=value: c.update(batches=value), "malformed") for value in ("ab", ["1", "15"], [True, 15])),
        (lambda c: c.update(batches=[1, 15.5]), "malformed"),
        (lambda c: c.update(compiled_batches=[1.0, 1]), "malformed"),
        (lambda c: c.update(input_size="8"), "malformed"),
        (lambda c: c.update(dtype=32), "malformed"),
        (lambda c: c.update(checkpoint_sha256=None), "malformed"),
        (lambda c: c.update(package_sha256=7), "malformed"),
        (lambda c: c.update(weights=[]), "malformed"),
        (lambda c: c.update(machine=[]), "malformed"),
        (lambda c: c["machine"].update(features="avx"), "malformed"),
        (lambda c: c["machine"].update(features=["avx", None]), "malformed"),
        (lambda c: c["machine"].update(torch=2.13), "malformed"),
        (lambda c: c["machine"].update(surprise="a"), "malformed"),
        (lambda c: (c.clear(), c.update(format_version=3)), "format 3, which this version of gpen-core does not know"),
        (lambda c: c["weights"].update(format_version="1"), "format version '1' is not a whole number: .* malformed"),
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


def test_a_batch_that_is_too_large_is_told(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    face = tmp_path / "face.png"
    assert cv2.imwrite(str(face), smooth_picture(8, 8))
    command = ["enhance", str(face), "--aligned", "-o", str(tmp_path / "out.png"), "--weights", str(made)]
    told = "gpen-core: --batch 99 is more than this network takes: it runs 15 faces at once\n"
    for batch, said in (("15", ""), ("99", told)):
        assert run_command([*command, "--batch", batch]) == 0
        assert capsys.readouterr().err == said
    larger = converted(tmp_path, replace(SMALL, input_size=16))
    assert run_command([*command, "--weights", str(larger), "--batch", "99"]) == 0
    assert capsys.readouterr().err == told.replace("--batch", f"{made}: --batch")


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


def test_a_named_package_replaces_another_with_its_sidecar(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "net.pt2"
    for suffix in ("", SIDECAR):
        shutil.copyfile(f"{made}{suffix}", f"{target}{suffix}")

    def reached(*arguments: object) -> None:
        raise DeviceError("the compiler is asked")

    monkeypatch.setattr(export, "export_package", reached)
    with pytest.raises(DeviceError, match="the compiler is asked"):
        export_generator(converted(tmp_path, SMALL), target, format="pt2")


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


# Recording.


@dataclass
class Opened:
    """What PyTorch's loader was asked for."""

    arguments: tuple[Any, ...]

    def run(self, images: Sequence[Tensor]) -> list[Tensor]:
        return [-images[0]]


def test_what_is_recorded_is_loaded_without_its_own_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As PyTorch's loader has it for CUDA graphs; in older ones there is no such choice."""
    asked: list[tuple[Any, ...]] = []

    def loader(*arguments: Any) -> Opened:
        asked.append(arguments)
        if not newer and len(arguments) > 2:
            raise TypeError("incompatible constructor arguments")
        return Opened(arguments)

    monkeypatch.setattr(torch._C._aoti, "AOTIModelPackageLoader", loader)
    for newer in (True, False):
        monkeypatch.setattr(torch, "__version__", TorchVersion("2.10.0+cu128" if newer else "2.7.1"))
        for device in (CPU, torch.device("cuda", 1)):
            assert can_record(device) == (newer and device.type == "cuda")
            assert ahead._open(tmp_path, device)(torch.ones(1)).item() == -1
    path = str(tmp_path)
    assert asked == [
        (path, "model", False, 1, -1),
        (path, "model", True, 1, 1),
        *[(path, "model", False, 1, -1), (path, "model")],
        *[(path, "model", False, 1, 1), (path, "model")],
    ]


def test_how_a_package_runs_on_a_gpu(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sidecar = replace(read_sidecar(made), compiled_batches=BATCHES)
    monkeypatch.setattr(runtime_pt2, "choose_device", torch.device)
    recorded = RuntimeOptions("cuda", compile=True, compiler="ahead", max_batch=8, cuda_graphs=True)
    assert runtime_pt2._options_for(sidecar, "cuda", None) == recorded
    assert runtime_pt2._options_for(sidecar, "cuda", 99).max_batch == 15
    assert runtime_pt2._options_for(replace(sidecar, batches=(1, 3)), "cuda", None).max_batch == 3
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.7.1"))
    assert runtime_pt2._options_for(sidecar, "cuda", None) == replace(recorded, cuda_graphs=False)


def test_a_cpu_fills_up_no_batches() -> None:
    batches = []

    def negative(image: Tensor) -> Tensor:
        batches.append(len(image))
        return -image

    options = RuntimeOptions("cpu", compile=True, compiler="ahead", max_batch=8)
    given = [smooth_picture(64, 64, seed) for seed in range(11)]
    results = Runtime(negative, config_of(64), options)(given)
    assert batches == [8, 3]
    for crop, result in zip(given, results, strict=True):
        np.testing.assert_array_equal(np.asarray(result), np.bitwise_not(crop))


class Replayed(Compiled):
    """Plays a GPU: what is recorded runs the step again on the memory that it was recorded with."""

    def __init__(self, step: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__(step, CPU, True)
        self.recording = True
        self.recorded: list[int] = []

    def _record(self, pixels: Tensor) -> tuple[Any, Tensor, tuple[Tensor, Tensor]]:
        self.recorded.append(len(pixels))
        entering = torch.zeros_like(pixels)
        leaving = tuple(torch.zeros_like(one) for one in self.step(entering))
        return Graph(self, entering, (leaving[0], leaving[1])), entering, (leaving[0], leaving[1])


@dataclass
class Graph:
    owner: Replayed
    entering: Tensor
    leaving: tuple[Tensor, Tensor]

    def replay(self) -> None:
        for target, value in zip(self.leaving, self.owner.step(self.entering), strict=True):
            target.copy_(value)


def test_each_batch_size_is_recorded_once_and_results_outlive_the_next_replay(made: Path) -> None:
    _, network = load_package(made, CPU)
    options = RuntimeOptions("cpu", compile=True, compiler="ahead", max_batch=8)
    plain, runtime = (Runtime(network, SMALL, options) for _ in range(2))
    replayed = Replayed(plain._run)
    runtime._run, runtime._in_buckets = replayed, True
    given = [[smooth_picture(8, 8, 20 * start + i) for i in range(11)] for start in range(3)]
    pending = [runtime.submit(crops) for crops in given]
    # Three are filled up to four.
    assert replayed.recorded == [8, 4]
    for one, crops in zip(pending, given, strict=True):
        for result, expected in zip(one.result(), plain(crops), strict=True):
            np.testing.assert_array_equal(np.asarray(result), np.asarray(expected))
    replayed.forget()
    runtime(given[0][:1])
    assert replayed.recorded == [8, 4, 1]


def test_the_compiler_asks_anew_how_results_lie_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Export looks at convolutions with cuDNN and oneDNN off, and what it saw is no answer for the compiler."""
    kept: list[bool] = []

    def compiler(program: torch.export.ExportedProgram, **options: Any) -> None:
        values = [node.meta["val"] for node in program.graph.nodes if "val" in node.meta]
        kept.extend(value.fake_mode.cache_enabled for value in values if isinstance(value, FakeTensor))
        raise DeviceError("enough")

    monkeypatch.setattr("torch._inductor.aoti_compile_and_package", compiler)
    source = converted(tmp_path, SMALL)
    with pytest.raises(DeviceError, match="enough"):
        export_generator(source, format="pt2")
    assert kept and not any(kept)


def test_the_compilers_code_declares_what_it_uses() -> None:
    """Two parts of a wrapper's code; PyTorch 2.11 took the second for the first."""
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
    from torch._inductor.utils import IndentedBuffer
    from torch.utils._ordered_set import OrderedSet

    parts = [IndentedBuffer() for _ in range(8)]
    wrapper = CppWrapperCpu.__new__(CppWrapperCpu)
    wrapper.int_array_id = itertools.count()
    wrapper.declared_int_array_vars = OrderedSet()
    wrapper.codegen_int_array_var_cache = {}
    before = CppWrapperCpu.codegen_int_array_var
    with declared_where_used():
        names = [wrapper.codegen_int_array_var("{2L, 3L}", part.writeline, known_statically=True) for part in parts]
    for name, part in zip(names, parts, strict=True):
        assert f"{name}[] = {{2L, 3L}};" in part.getvalue()
    assert CppWrapperCpu.codegen_int_array_var is before


# On a GPU.


@pytest.fixture(scope="module", params=["fp32", "fp16"])
def on_gpu(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = converted(tmp_path_factory.mktemp("gpu"), SMALL)
    export_generator(source, format="pt2", dtype=request.param, device="cuda")
    return source.with_suffix(".pt2")


def assert_near(results: Sequence[Image | None], expected: Sequence[Image | None], dtype: str) -> None:
    for one, other in zip(results, expected, strict=True):
        assert np.abs(np.asarray(one).astype(int) - np.asarray(other)).max() <= (1 if dtype == "fp32" else 2)


@pytest.mark.gpu
def test_a_gpu_keeps_a_dynamic_batch(on_gpu: Path) -> None:
    sidecar, network = load_package(on_gpu, CUDA)
    assert (sidecar.batches, sidecar.compiled_batches) == (BATCHES, BATCHES)
    generator = load_generator(on_gpu.with_suffix(".safetensors"))
    for batch in range(1, 16):
        image = probe(SMALL, batch)
        with torch.inference_mode(), switches(CUDA, sidecar.dtype, RuntimeOptions()):
            relative, decibels = difference(generator(image).numpy(), network(image.to(CUDA)).cpu().numpy())
        assert relative <= 1e-4 if sidecar.dtype == "fp32" else decibels >= export.DECIBELS


@pytest.mark.gpu
def test_a_gpu_replays_what_it_recorded(on_gpu: Path) -> None:
    runtime = PackageRuntime(on_gpu, max_batch=8)
    generator = load_generator(on_gpu.with_suffix(".safetensors"))
    exact = Runtime(generator, SMALL, RuntimeOptions("cuda", "fp32"))
    given = [[smooth_picture(8, 8, 20 * start + i) for i in range(11)] for start in range(6)]
    pending = [runtime.submit(crops) for crops in given]
    for one, crops in zip(pending, given, strict=True):
        assert_near(one.result(), exact(crops), runtime.precision)
    compiled = runtime._runtime._run
    assert isinstance(compiled, Compiled)
    assert sorted(compiled.graphs) == ([4, 8] if can_record(CUDA) else [])


@pytest.mark.gpu
def test_threads_share_a_package_on_a_gpu(on_gpu: Path) -> None:
    runtime = PackageRuntime(on_gpu, max_batch=8)
    given = [[smooth_picture(8, 8, 20 * seed + i) for i in range(1 + seed % 8)] for seed in range(24)]
    generator = load_generator(on_gpu.with_suffix(".safetensors"))
    exact = Runtime(generator, SMALL, RuntimeOptions("cuda", "fp32"))
    expected = [exact(crops) for crops in given]
    with ThreadPoolExecutor(4) as pool:
        for results, wanted in zip(pool.map(runtime, given), expected, strict=True):
            assert_near(results, wanted, runtime.precision)
    _, network = load_package(on_gpu, CUDA)
    images = [probe(SMALL, 1 + seed % 4).to(CUDA) for seed in range(32)]
    alone = [network(image) for image in images]
    with ThreadPoolExecutor(8) as pool:
        for one, other in zip(pool.map(network, images), alone, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("code", "dies"), [("import os; os.abort()", True), ("raise SystemExit(3)", False)])
def test_a_package_that_kills_its_process_is_refused(
    code: str, dies: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As packages do that a C++ compiler of another library made."""
    started = subprocess.run

    def instead(command: list[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        return started([sys.executable, "-c", code], **options)

    monkeypatch.setattr("gpen_core.ahead.subprocess.run", instead)
    told = pytest.raises(DeviceError, match=r"signal 6.*CXX") if dies else nullcontext()
    with told:
        require_loadable(tmp_path / "net.pt2")


@pytest.mark.parametrize(
    ("words", "hinted"),
    [
        ("Error in dlopen: /tmp/a/b.so: failed to map segment from shared object", True),
        ("Failed to extract zip file a.so to destination file /tmp/a/a.so, mz_zip error string: write failed", True),
        ("Failed to create temporary directory: Permission denied", True),
        ("file in archive is not in a subdirectory", False),
    ],
)
def test_a_package_that_can_not_be_unpacked(
    words: str, hinted: bool, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: object) -> None:
        raise RuntimeError(f"{words}\nException raised from somewhere")

    monkeypatch.setattr(torch._C._aoti, "AOTIModelPackageLoader", fail)
    with pytest.raises(CheckpointError) as told:
        load_package(made, CPU)
    assert words in str(told.value)
    assert ("/tmp, which must have room and allow execution" in str(told.value)) == hinted
    assert "Exception" not in str(told.value)


@pytest.mark.parametrize(
    ("version", "place"), [("2.13.0", "{folder}/TMPDIR"), ("2.12.1", "/tmp")], ids=["as it is named", "/tmp"]
)
def test_where_packages_are_unpacked(version: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    for name in PLACES:
        monkeypatch.delenv(name, raising=False)
    assert unpacking_place()[0] == Path("/tmp")
    for name in reversed(PLACES):
        monkeypatch.setenv(name, str(tmp_path / name))
    assert str(unpacking_place()[0]) == place.format(folder=tmp_path)


def test_another_place_to_unpack_is_used(made: Path, tmp_path: Path) -> None:
    """As the check expects of this PyTorch."""
    code = (
        "import sys, torch; from pathlib import Path; from gpen_core.ahead import load_package, unpacking_place\n"
        "network = load_package(Path(sys.argv[1]), torch.device('cpu'))\n"
        "assert torch.__version__ < '2.13' or any(unpacking_place()[0].glob('aotinductor_*')), unpacking_place()\n"
    )
    done = run_process(code, [made], {"TMPDIR": str(tmp_path)})
    assert (done.returncode, done.stderr) == (0, "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda patch: patch.setattr(os, "access", lambda *_: False), "can't be written to"),
        (lambda patch: patch.setattr(os, "statvfs", lambda _: NO_EXECUTION), r"allows no execution \(mounted noexec\)"),
        (lambda patch: patch.setattr(Path, "is_dir", lambda _: False), "is no folder"),
    ],
    ids=["unwritable", "noexec", "nowhere"],
)
def test_a_place_that_nothing_can_be_unpacked_in(
    spoil: Callable[[pytest.MonkeyPatch], None], said: str, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told before the package is opened, or anything compiled."""
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.13.0"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    sidecar = read_sidecar(made)
    monkeypatch.setattr(ahead, "require_machine", lambda *_: None)
    monkeypatch.setattr(ahead, "_open", None)
    message = f"^{tmp_path} {said}, and PyTorch unpacks compiled networks there: name another in the variable TMPDIR$"
    generator = load_generator(made.with_suffix(".safetensors"))
    starts: list[Callable[[], object]] = [
        lambda: ahead.open_package(made, sidecar, CPU),
        lambda: compiled_ahead(generator, "fp32", tmp_path / "cache"),
        lambda: export_package(generator, sidecar.weights, tmp_path / "net.pt2", "fp32", CPU, "0" * 64),
    ]
    for start in starts:
        with monkeypatch.context() as patch:
            spoil(patch)
            with pytest.raises(DeviceError, match=message):
                start()
    assert list(tmp_path.iterdir()) == []


def test_a_compiler_that_fails_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object) -> None:
        raise RuntimeError("CppCompileError: C++ compile error\n\nOutput:\ng++: fatal error: no cc1plus\n  more")

    monkeypatch.setattr(export, "make_package", fail)
    source = converted(tmp_path, SMALL)
    with pytest.raises(DeviceError, match=r"compile error: g\+\+: fatal error: no cc1plus\)$"):
        export_generator(source, format="pt2")
    assert sorted(tmp_path.glob("*.pt2*")) == []


def test_what_a_failed_load_unpacked_is_removed(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = tmp_path / "aotinductor_aB3xY9"
    (left / "data").mkdir(parents=True)

    def fail(*given: object) -> None:
        raise RuntimeError(f"Error in dlopen: {left}/data/a.so: failed to map segment from shared object")

    monkeypatch.setattr(torch._C._aoti, "AOTIModelPackageLoader", fail)
    with pytest.raises(CheckpointError, match="failed to map segment"):
        load_package(made, CPU)
    assert list(tmp_path.iterdir()) == []


def test_a_sidecar_that_is_no_file(made: Path, tmp_path: Path) -> None:
    package = tmp_path / "net.pt2"
    shutil.copyfile(made, package)
    beside = Path(f"{package}.json")
    for make in (os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")):
        make(beside)
        with pytest.raises(CheckpointError, match=r"net\.pt2\.json: (not a regular file|a folder)"):
            read_sidecar(package)
        beside.rmdir() if beside.is_dir() else beside.unlink()


def test_a_package_is_known_as_one(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = read_sidecar(made).weights.config
    assert doctor._load_metadata(made) == f"{config.input_size} -> {config.output_size} px"
    shutil.copyfile(made, tmp_path / "net.safetensors")
    assert run_command(["info", str(tmp_path / "net.safetensors")]) == 2
    assert "a package compiled ahead of time, not safetensors" in capsys.readouterr().err
