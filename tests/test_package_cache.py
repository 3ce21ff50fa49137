"""Networks compiled for a CPU are kept for later processes; what is damaged or foreign is compiled anew."""

from __future__ import annotations

import copy
import errno
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gpen_core import ahead, package_cache, runtime
from gpen_core.ahead import SIDECAR, Sidecar
from gpen_core.checkpoint import load_generator
from gpen_core.cli import run_command
from gpen_core.config import GeneratorConfig
from gpen_core.errors import DeviceError, UsageError
from gpen_core.model import Generator
from gpen_core.package_cache import (
    ABANDONED_SECONDS,
    FOLDER,
    MOST_BYTES,
    PACKAGE,
    PackageCache,
    default_folder,
    distrust,
    name_of,
    open_cache,
    sidecar_for,
)
from gpen_core.runtime import Runtime, RuntimeOptions, compiled_ahead, compiles_ahead
from tests.exported import PLAIN, converted, run_process
from tests.stubs import smooth_picture

# Compiling takes seconds for each level, and noise is of interest.
SMALL = GeneratorConfig(input_size=8, output_size=16, channels=(8, 8, 4), style_dim=8, n_mlp=1)
CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(not compiles_ahead(CPU), reason="needs Linux and PyTorch 2.6 or newer")


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with converted weights, and a cache that the command filled with their network."""
    folder = tmp_path_factory.mktemp("filled")
    source = converted(folder, SMALL)
    assert run_command(["compile", str(source), "--cache", str(folder / "cache"), "--device", "cpu"]) == 0
    return folder


@pytest.fixture(scope="module")
def generator(filled: Path) -> Generator:
    return load_generator(filled / "net.safetensors")


@pytest.fixture(scope="module")
def wanted(generator: Generator) -> Sidecar:
    return sidecar_for(generator, SMALL, "fp32")


@pytest.fixture
def cache(filled: Path, tmp_path: Path) -> Path:
    """A copy of the cache, to be spoiled."""
    return Path(shutil.copytree(filled / "cache", tmp_path / "cache"))


@pytest.fixture
def made(filled: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Every package that is made; a copy stands in for the compiler's work."""
    packages: list[Path] = []

    def take_copy(network: nn.Module, package: Path, sidecar: Sidecar, device: torch.device) -> None:
        packages.append(package)
        source = only_entry(filled / "cache") / PACKAGE
        shutil.copyfile(source, package)
        shutil.copyfile(f"{source}{SIDECAR}", f"{package}{SIDECAR}")

    monkeypatch.setattr(runtime, "make_package", take_copy)
    return packages


def only_entry(cache: Path) -> Path:
    (entry,) = cache.iterdir()
    return entry


def options(cache: Path | None) -> RuntimeOptions:
    return RuntimeOptions("cpu", compile=True, cache=cache, max_batch=16)


def as_eager(runtime: Runtime, generator: Generator) -> bool:
    crops = [smooth_picture(8, 8, seed) for seed in range(17)]
    eager = Runtime(generator, SMALL, RuntimeOptions("cpu"))
    pairs = zip(runtime(crops), eager(crops), strict=True)
    return all(np.abs(np.asarray(one).astype(int) - np.asarray(other)).max() <= 1 for one, other in pairs)


def changed(generator: Generator) -> Generator:
    other = copy.deepcopy(generator)
    other.constant.data += 1
    return other


def test_what_was_kept_gives_the_same_pictures(filled: Path, generator: Generator, made: list[Path]) -> None:
    runtime = Runtime(generator, SMALL, options(filled / "cache"))
    assert runtime.description == "cpu fp32 inductor"
    assert as_eager(runtime, generator)
    assert made == []


def test_a_later_process_needs_no_compiler(filled: Path, tmp_path: Path) -> None:
    face = tmp_path / "face.png"
    assert cv2.imwrite(str(face), smooth_picture(8, 8))
    arguments = ["enhance", face, "--aligned", "--compile", "--weights", filled / "net.safetensors"]
    arguments += ["--cache", filled / "cache", "--device", "cpu", "-o", tmp_path / "out.png"]
    done = run_process(PLAIN, arguments, {"PATH": str(tmp_path / "nothing")})
    assert (done.returncode, done.stderr) == (0, "")
    assert "cpu fp32 inductor" in done.stdout


@pytest.mark.slow
def test_a_low_precision_is_kept_too(generator: Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    low = replace(options(tmp_path), precision="bf16")
    Runtime(generator, SMALL, low)
    monkeypatch.setattr(runtime, "make_package", None)
    later, eager = Runtime(generator, SMALL, low), Runtime(generator, SMALL, RuntimeOptions("cpu", "bf16"))
    crops = [smooth_picture(8, 8, seed) for seed in range(3)]
    for one, other in zip(later(crops), eager(crops), strict=True):
        assert np.abs(np.asarray(one).astype(int) - np.asarray(other)).mean() < 1


def test_nothing_else_is_left(filled: Path) -> None:
    assert sorted(path.name for path in filled.iterdir()) == ["cache", "net.safetensors"]
    assert sorted(path.name for path in only_entry(filled / "cache").iterdir()) == [PACKAGE, f"{PACKAGE}{SIDECAR}"]


def test_what_is_not_finite_is_computed_again(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(*_: object) -> Callable[[Tensor], Tensor]:
        return lambda image: torch.full((len(image), 3, 16, 16), torch.nan)

    monkeypatch.setattr(runtime, "compiled_ahead", spoiled)
    crop = smooth_picture(8, 8)
    assert Runtime(generator, SMALL, options(None))([crop]) == [None]
    (again,) = Runtime(generator, SMALL, replace(options(None), precision="bf16"))([crop])
    (expected,) = Runtime(generator, SMALL, RuntimeOptions("cpu"))([crop])
    np.testing.assert_array_equal(np.asarray(again), np.asarray(expected))


def damage(entry: Path) -> None:
    content = bytearray((entry / PACKAGE).read_bytes())
    content[len(content) // 2] ^= 1
    (entry / PACKAGE).write_bytes(content)


def truncate(entry: Path) -> None:
    (entry / PACKAGE).write_bytes((entry / PACKAGE).read_bytes()[:1000])


def lose_the_sidecar(entry: Path) -> None:
    (entry / f"{PACKAGE}{SIDECAR}").unlink()


def change_the_sidecar(entry: Path) -> None:
    beside = entry / f"{PACKAGE}{SIDECAR}"
    beside.write_text(beside.read_text().replace('"fp32"', '"bf16"'))


def lose_everything(entry: Path) -> None:
    shutil.rmtree(entry)
    entry.mkdir()


@pytest.mark.parametrize("spoil", [damage, truncate, lose_the_sidecar, change_the_sidecar, lose_everything])
def test_a_spoiled_entry_is_compiled_anew(
    spoil: Callable[[Path], None], cache: Path, generator: Generator, made: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    entry = only_entry(cache)
    spoil(entry)
    runtime = Runtime(generator, SMALL, options(cache))
    (warning,) = caplog.messages
    assert str(entry) in warning
    assert "\n" not in warning
    assert len(made) == 1
    assert as_eager(runtime, generator)
    Runtime(generator, SMALL, options(cache))
    assert len(made) == len(caplog.messages) == 1, "the entry was not replaced"
    assert only_entry(cache) == entry


def test_an_entry_under_a_false_name_is_not_loaded(
    cache: Path, generator: Generator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = sidecar_for(changed(generator), SMALL, "fp32")
    only_entry(cache).rename(cache / name_of(wanted))
    monkeypatch.setattr(package_cache, "open_package", None)
    assert PackageCache(cache).find(wanted) is None
    assert "made for something else than its name says" in caplog.text


def test_all_that_decides_is_in_the_name(
    generator: Generator, wanted: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [
        name_of(wanted),
        name_of(sidecar_for(changed(generator), SMALL, "fp32")),
        name_of(sidecar_for(generator, replace(SMALL, concat=False), "fp32")),
        name_of(sidecar_for(generator, SMALL, "bf16")),
    ]
    for change in ({"torch": "2.6.0"}, {"system": "Windows"}, {"machine": "riscv64"}, {"features": ("sse",)}):
        names.append(name_of(replace(wanted, machine=replace(wanted.machine, **change))))
    monkeypatch.setattr(package_cache, "code_sha256", lambda: "0" * 64)
    names.append(name_of(sidecar_for(generator, SMALL, "fp32")))
    assert len(set(names)) == len(names)
    assert name_of(wanted.sealed("1" * 64)) == names[0]


@pytest.mark.parametrize("writable", [True, False])
def test_another_processor(
    writable: bool, filled: Path, wanted: Sidecar, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A better one compiles for itself, unless it can't keep the result; a lesser one never runs what it can't."""
    monkeypatch.setattr(package_cache, "writable", lambda *_: writable)
    for features, fits in (((*wanted.machine.features, "zmm9"), True), (wanted.machine.features[1:], False)):
        machine = replace(wanted.machine, features=features)
        monkeypatch.setattr(ahead, "describe_machine", lambda device, machine=machine: machine)
        found = PackageCache(filled / "cache").find(replace(wanted, machine=machine))
        assert (found is not None) == (fits and not writable)
    assert caplog.text == ""


def test_a_folder_that_can_not_be_written_to(
    tmp_path: Path,
    generator: Generator,
    made: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(package_cache, "writable", lambda *_: False)
    assert as_eager(Runtime(generator, SMALL, options(tmp_path)), generator)
    (warning,) = caplog.messages
    assert warning == f"{tmp_path}: can't be written to; the network is compiled for this process alone"
    assert len(made) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk(
    tmp_path: Path,
    generator: Generator,
    made: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(PackageCache, "keep", full)
    assert as_eager(Runtime(generator, SMALL, options(tmp_path)), generator)
    (warning,) = caplog.messages
    assert warning == f"{tmp_path}: the compiled network can't be kept (No space left on device)"


def test_what_is_half_written_has_no_name(
    tmp_path: Path, filled: Path, wanted: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    package = only_entry(filled / "cache") / PACKAGE
    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(OSError, match="No space"):
        PackageCache(tmp_path).keep(package, wanted)
    assert list(tmp_path.iterdir()) == []


def test_many_at_once(tmp_path: Path, filled: Path, wanted: Sidecar) -> None:
    package = only_entry(filled / "cache") / PACKAGE
    kept = PackageCache(tmp_path)
    with ThreadPoolExecutor(4) as pool:
        entries = set(pool.map(lambda _: kept.keep(package, wanted), range(80)))
    assert entries == {tmp_path / name_of(wanted)}
    assert only_entry(tmp_path).name == name_of(wanted)
    assert kept.find(wanted) is not None


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("C++ compile error\n\nCommand:\ng++"), "C++ compile error"),
        (MemoryError(), "MemoryError"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "[Errno 28] No space left on device"),
    ],
)
def test_a_failing_compiler_is_one_line(
    error: Exception, said: str, tmp_path: Path, generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(runtime, "make_package", fail)
    with pytest.raises(DeviceError) as caught:
        compiled_ahead(generator, "fp32", tmp_path)
    assert str(caught.value) == f"--compile: AOTInductor failed ({said}); leave --compile out"
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_is_a_file(
    filled: Path, generator: Generator, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = filled / "net.safetensors"
    with pytest.raises(UsageError, match="not a folder"):
        Runtime(generator, SMALL, options(source))
    assert run_command(["compile", str(source), "--cache", str(source), "--device", "cpu"]) == 1
    assert "not a folder" in capsys.readouterr().err


def test_the_command_says_when_nothing_is_kept(
    filled: Path, tmp_path: Path, made: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["compile", str(filled / "net.safetensors"), "--cache", str(tmp_path), "--device", "cpu"]

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(PackageCache, "keep", full)
        assert run_command(command) == 1
    assert "could not be kept" in capsys.readouterr().err
    monkeypatch.setattr("gpen_core.compile_cache.writable", lambda *_: False)
    assert run_command(command) == 1
    assert f"{tmp_path}: can't be written to" in capsys.readouterr().err
    assert len(made) == 1


def test_the_default_folder(
    tmp_path: Path, generator: Generator, wanted: Sidecar, made: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPEN_CORE_HOME", str(tmp_path / "home"))
    assert default_folder() == tmp_path / "home" / FOLDER
    assert open_cache(None) == PackageCache(tmp_path / "home" / FOLDER, MOST_BYTES)
    Runtime(generator, SMALL, options(None))
    assert only_entry(tmp_path / "home" / FOLDER).name == name_of(wanted)
    assert (tmp_path / "home" / FOLDER).stat().st_mode & 0o777 == 0o700
    Runtime(generator, SMALL, options(None))
    assert len(made) == 1


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder that holds the user's own cache: what it lies in itself does not count."""
    folder = tmp_path / "home"
    folder.mkdir(0o755)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("GPEN_CORE_HOME", str(folder / "gpen"))
    return folder


@pytest.fixture
def own(home: Path, filled: Path) -> Path:
    """The user's own cache, filled; nobody else may write to anything of it."""
    folder = home / "gpen" / FOLDER
    shutil.copytree(filled / "cache", folder)
    for path in (home / "gpen", folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder


LEVELS: dict[str, Callable[[Path], Path]] = {
    "home": lambda own: own.parent.parent,
    "the folder above": lambda own: own.parent,
    "the cache": lambda own: own,
    "an entry": only_entry,
    "a package": lambda own: only_entry(own) / PACKAGE,
    "a sidecar": lambda own: only_entry(own) / f"{PACKAGE}{SIDECAR}",
}


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o1777], ids=oct)
@pytest.mark.parametrize("level", LEVELS.values(), ids=LEVELS)
def test_what_others_can_write_to_is_not_run(
    level: Callable[[Path], Path],
    mode: int,
    own: Path,
    generator: Generator,
    made: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    place = level(own)
    place.chmod(mode if place.is_dir() else mode & 0o666)
    if mode & 0o1000 and place in own.parents:
        # There others can't touch what is not theirs.
        assert open_cache(None) == PackageCache(own, MOST_BYTES)
        return
    with monkeypatch.context() as patch:
        patch.setattr(package_cache, "open_package", None)
        runtime = Runtime(generator, SMALL, options(None))
    (warning,) = caplog.messages
    assert "others may write to " in warning
    assert str(place) in warning
    assert "chmod go-w" in warning
    assert len(made) == 1
    assert as_eager(runtime, generator)
    if own not in place.parents:
        return
    Runtime(generator, SMALL, options(None))
    assert len(made) == len(caplog.messages) == 1, "the entry was not replaced"
    assert only_entry(own).name == place.relative_to(own).parts[0]


def test_what_belongs_to_others_is_not_run(
    own: Path, generator: Generator, made: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    strange = Path()
    real = Path.lstat

    def lstat(path: Path) -> os.stat_result:
        status = real(path)
        return os.stat_result([*status[:4], 12345, *status[5:10]]) if path == strange else status

    monkeypatch.setattr(Path, "lstat", lstat)
    monkeypatch.setattr(package_cache, "open_package", None)
    for level in LEVELS.values():
        strange = level(own)
        caplog.clear()
        Runtime(generator, SMALL, options(None))
        (warning,) = caplog.messages
        assert "belongs to another user" in warning
        assert str(strange) in warning
    assert len(made) == len(LEVELS)


def test_links_on_the_way_count_and_so_does_what_they_lead_to(tmp_path: Path, home: Path) -> None:
    shared, inner, target = tmp_path / "shared", tmp_path / "shared" / "inner", home / "target"
    for folder in (shared, inner, target):
        folder.mkdir(0o755)
    (inner / "link").symlink_to(target)
    (home / "way").symlink_to("../shared/inner/link")
    assert distrust(home / "way") == distrust(home / "way" / "nowhere") == ""
    inner.chmod(0o777)
    assert distrust(home / "way") == f"others may write to {inner} (chmod go-w)"
    inner.chmod(0o755)
    target.chmod(0o1777)
    assert distrust(home / "way") == "others may write to it (chmod go-w)"
    (home / "circle").symlink_to(home / "circle")
    assert distrust(home / "circle") == os.strerror(errno.ELOOP)


def occupy_by_a_file(entry: Path) -> None:
    entry.write_text("mine")


def occupy_by_a_fifo(entry: Path) -> None:
    os.mkfifo(entry)


def occupy_by_a_link_to_nowhere(entry: Path) -> None:
    entry.symlink_to("nowhere")


def occupy_by_a_link_to_a_folder(entry: Path) -> None:
    entry.symlink_to(entry.with_name("elsewhere"))


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize(
    "occupy",
    [occupy_by_a_file, occupy_by_a_fifo, occupy_by_a_link_to_nowhere, occupy_by_a_link_to_a_folder],
)
def test_an_entry_that_is_no_folder_is_replaced(
    occupy: Callable[[Path], None],
    named: bool,
    own: Path,
    generator: Generator,
    made: list[Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    entry = only_entry(own)
    elsewhere = entry.rename(entry.with_name("elsewhere"))
    occupy(entry)
    cache = own if named else None
    for _ in range(2):
        Runtime(generator, SMALL, options(cache))
        assert caplog.messages == [f"{entry}: not a folder; not used"]
        assert len(made) == 1
    assert sorted(path.name for path in own.iterdir()) == sorted([entry.name, "elsewhere"])
    assert (entry.is_dir(), entry.is_symlink()) == (True, False)
    assert (elsewhere / PACKAGE).is_file(), "what a link led to is not ours"


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("put", [fifo, device, Path.mkdir])
@pytest.mark.parametrize("name", [PACKAGE, f"{PACKAGE}{SIDECAR}"])
def test_what_is_no_file_in_an_entry_is_not_read(
    name: str,
    put: Callable[[Path], None],
    named: bool,
    own: Path,
    generator: Generator,
    made: list[Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    file = only_entry(own) / name
    file.unlink()
    put(file)
    for _ in range(2):
        Runtime(generator, SMALL, options(own if named else None))
        obstacle = "a folder, not a file" if named and put is Path.mkdir else "not a regular file"
        assert caplog.messages == [f"{file}: {obstacle}; not used"]
        assert len(made) == 1
    assert only_entry(own) == file.parent


def test_an_entry_that_can_not_be_removed_stays(
    own: Path, generator: Generator, made: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    entry = only_entry(own)
    damage(entry)
    access, inode = os.access, entry.stat().st_ino

    def denied(path: str | Path, mode: int, *, dir_fd: int | None = None) -> bool:
        return os.stat(path, dir_fd=dir_fd).st_ino != inode and access(path, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "access", denied)
    Runtime(generator, SMALL, options(own))
    assert caplog.messages[1:] == [f"{own}: the compiled network can't be kept (Permission denied)"]
    assert only_entry(own) == entry


@pytest.mark.parametrize("mask", [0, 0o002, 0o077])
def test_what_is_kept_can_be_used_whatever_the_umask(
    mask: int, home: Path, generator: Generator, made: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    before = os.umask(mask)
    try:
        for _ in range(2):
            Runtime(generator, SMALL, options(None))
    finally:
        os.umask(before)
    assert caplog.messages == []
    assert len(made) == 1


@pytest.mark.parametrize("place", ["cache", "new/cache"])
def test_a_failed_compilation_leaves_no_folder(
    place: str, tmp_path: Path, filled: Path, generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise DeviceError("no compiler")

    monkeypatch.setenv("GPEN_CORE_HOME", str(tmp_path / place))
    command = ["compile", str(filled / "net.safetensors"), "--cache", str(tmp_path / place), "--device", "cpu"]
    for name in ("require_compiler", "make_package"):
        with monkeypatch.context() as patch:
            patch.setattr(runtime, name, fail)
            for cache in (tmp_path / place, None):
                with pytest.raises(DeviceError):
                    compiled_ahead(generator, "fp32", cache)
            assert run_command(command) == 2
        assert list(tmp_path.iterdir()) == []


def test_without_an_entry_and_a_compiler(
    home: Path, filled: Path, tmp_path: Path, generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line says why there is nothing, and how there would be."""

    def absent(device: torch.device) -> None:
        raise DeviceError("--compile on a CPU needs a C++ compiler")

    monkeypatch.setattr(runtime, "require_compiler", absent)
    cache, own = filled / "cache", home / "gpen" / FOLDER
    reason = "holds nothing that was compiled for these weights, this processor and these versions"
    with pytest.raises(DeviceError) as caught:
        compiled_ahead(changed(generator), "fp32", cache)
    assert str(caught.value).startswith(f"{cache}: {reason}, and --compile needs a C++ compiler (g++): install one")
    assert f"(gpen-core compile MODEL --cache {cache}), or leave --compile out" in str(caught.value)
    with pytest.raises(DeviceError) as caught:
        compiled_ahead(generator, "fp32")
    assert str(caught.value).startswith(f"{own}: {reason}")
    assert "(gpen-core compile MODEL --cache DIR) and give it to --cache" in str(caught.value)
    monkeypatch.setattr(package_cache, "default_folder", lambda: None)
    with pytest.raises(DeviceError, match=r"^--compile on a CPU needs a C\+\+ compiler$"):
        compiled_ahead(generator, "fp32")


def test_a_default_folder_that_others_can_write_to(
    filled: Path,
    tmp_path: Path,
    generator: Generator,
    made: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("GPEN_CORE_HOME", str(tmp_path))
    folder = Path(shutil.copytree(filled / "cache", tmp_path / FOLDER))
    folder.chmod(0o777)
    before = only_entry(folder).stat().st_mtime_ns
    Runtime(generator, SMALL, options(None))
    (warning,) = caplog.messages
    assert "others may write to it (chmod go-w)" in warning
    assert len(made) == 1
    assert only_entry(folder).stat().st_mtime_ns == before
    Runtime(generator, SMALL, options(folder))
    assert len(made) == 1, "a folder that was named is trusted"


def test_whom_a_folder_belongs_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert distrust(tmp_path / "nowhere") == distrust(tmp_path) == ""
    (tmp_path / "file").touch()
    assert distrust(tmp_path / "file") == "not a folder"
    if os.getuid() == 0:
        os.chown(tmp_path, 12345, -1)
    else:
        monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert distrust(tmp_path) == "belongs to another user"


def test_a_user_without_a_folder(
    generator: Generator, made: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(package_cache, "default_folder", lambda: None)
    Runtime(generator, SMALL, options(None))
    (warning,) = caplog.messages
    assert "set GPEN_CORE_HOME" in warning
    assert len(made) == 1


def stored(cache: Path, name: str, size: int, used: int) -> Path:
    path = cache / name
    path.mkdir()
    (path / PACKAGE).write_bytes(bytes(size))
    os.utime(path, (used, used))
    return path


@pytest.mark.parametrize(("most", "left"), [(None, "abcd"), (10**9, "abcd"), (3000, "abd"), (2999, "bd"), (10, "d")])
def test_the_least_recently_used_go_first(
    most: int | None, left: str, tmp_path: Path, filled: Path, wanted: Sidecar
) -> None:
    for letter, used in zip("abc", (2, 3, 1), strict=True):
        stored(tmp_path, f"{letter * 32}-00000000", 1000, used)
    stored(tmp_path, "mine", 10**4, 0)
    package = tmp_path / PACKAGE
    package.write_bytes(bytes(1000))
    Path(f"{package}{SIDECAR}").touch()
    newest = PackageCache(tmp_path, most).keep(package, replace(wanted, dtype="newest"))
    expected = {f"{letter * 32}-00000000" for letter in left} - {f"{'d' * 32}-00000000"} | {"mine", newest.name}
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == expected


def test_use_counts(cache: Path, wanted: Sidecar) -> None:
    entry = only_entry(cache)
    os.utime(entry, (1, 1))
    assert PackageCache(cache).find(wanted) is not None
    assert entry.stat().st_mtime > 1


def test_what_killed_processes_left_is_removed(tmp_path: Path, filled: Path, wanted: Sidecar) -> None:
    package = only_entry(filled / "cache") / PACKAGE
    now = int(time.time())
    stored(tmp_path, f".{'a' * 16}.part", 1, now - ABANDONED_SECONDS - 100)
    stored(tmp_path, f".{'b' * 16}.part", 1, now)
    stored(tmp_path, ".mine.part", 1, 0)
    (tmp_path / f".{'c' * 16}.part").touch()
    os.utime(tmp_path / f".{'c' * 16}.part", (0, 0))
    (tmp_path / f".{'d' * 16}.part").symlink_to("nowhere")
    os.utime(tmp_path / f".{'d' * 16}.part", (0, 0), follow_symlinks=False)
    PackageCache(tmp_path, MOST_BYTES).keep(package, wanted)
    assert {path.name for path in tmp_path.iterdir()} == {name_of(wanted), f".{'b' * 16}.part", ".mine.part"}
