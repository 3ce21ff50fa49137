"""Compilations kept in a folder: read again by a new process, from the folder or from its single file."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import cv2
import pytest

from gpen_core import compile_cache
from gpen_core.cli import run_command
from gpen_core.compile_cache import ARTEFACT, VARIABLES, cached_in
from gpen_core.config import GeneratorConfig
from gpen_core.errors import UsageError
from tests.exported import PLAIN, converted, run_process
from tests.stubs import smooth_picture

SMALL = GeneratorConfig(input_size=8, output_size=8, channels=(8, 8), style_dim=8, n_mlp=1)
# As on a GPU, or before PyTorch 2.6.
BY_PARTS = "import gpen_core.runtime as runtime; runtime.compiles_ahead = lambda device: False\n"
# Also counts what had to be compiled.
COUNTING = (
    f"{BY_PARTS}import sys; from gpen_core.cli import run_command; code = run_command(sys.argv[1:])\n"
    "from torch._dynamo.utils import counters; print(counters['inductor']['fxgraph_cache_miss'])\n"
    "sys.exit(code)"
)
READ_ONLY = "import gpen_core.compile_cache as cache; cache.writable = lambda folder: False; "


@pytest.mark.slow
def test_a_later_process_compiles_nothing(tmp_path: Path) -> None:
    source, face, cache = converted(tmp_path, SMALL), tmp_path / "face.png", tmp_path / "cache"
    assert cv2.imwrite(str(face), smooth_picture(8, 8))
    options = ["--device", "cpu"]
    done = run_process(BY_PARTS + PLAIN, ["compile", source, "--cache", cache, *options])
    assert (done.returncode, done.stderr) == (0, "")
    assert (cache / ARTEFACT).is_file()
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    (shipped / ARTEFACT).write_bytes((cache / ARTEFACT).read_bytes())
    command = ["enhance", face, "--aligned", "--compile", "--weights", source, "-o", tmp_path / "out.png", *options]
    missed = []
    for code, folder in ((COUNTING, tmp_path / "new"), (COUNTING, cache), (READ_ONLY + COUNTING, shipped)):
        done = run_process(code, [*command, "--cache", folder])
        assert (done.returncode, done.stderr) == (0, "")
        missed.append(int(done.stdout.splitlines()[-1]))
    assert missed[0] > 0
    assert missed[1:] == [0, 0]
    assert [path.name for path in shipped.iterdir()] == [ARTEFACT]


def test_the_environment_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/before")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    with cached_in(tmp_path / "new"):
        assert {Path(os.environ[name]).parent for name in VARIABLES} == {tmp_path / "new"}
    assert os.environ["TRITON_CACHE_DIR"] == "/before"
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


def test_a_new_folder_stays_only_if_there_is_something_in_it(tmp_path: Path) -> None:
    for leave in (False, True):
        with suppress(RuntimeError), cached_in(tmp_path / "new" / "cache"):
            (tmp_path / "new" / "cache" / "inductor" / "ab").mkdir(parents=True)
            if leave:
                (tmp_path / "new" / "cache" / "inductor" / "ab" / "file").touch()
            raise RuntimeError("the compiler failed")
        assert (tmp_path / "new").exists() == leave
    with cached_in(tmp_path / "new"):
        pass
    assert (tmp_path / "new" / "cache" / "inductor" / "ab" / "file").exists()


def test_folders_that_are_no_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("file", "file/inside", "link"):
        with pytest.raises(UsageError, match=r"(is no|not a) folder"), cached_in(tmp_path / name):
            pass
    monkeypatch.setattr(compile_cache, "writable", lambda folder: False)
    with pytest.raises(UsageError, match=r"no artefacts\.bin in it"), cached_in(tmp_path):
        pass


def test_a_cache_is_for_compiling(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    face = tmp_path / "face.png"
    assert cv2.imwrite(str(face), smooth_picture(8, 8))
    assert run_command(["enhance", str(face), "--aligned", "--cache", str(tmp_path / "cache")]) == 1
    assert "--cache is for --compile" in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()
