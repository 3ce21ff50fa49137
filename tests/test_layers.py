"""A file imports only from lower layers, and importing is silent and cheap."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import gpen_convert
import gpen_core

# Each group imports only from groups above it; inside a group, only from names further left.
LAYERS = (
    ("errors", "types"),
    (
        "config",
        "ops",
        "pixels",
        "files",
        "onnx_file",
        "apart",
        "ledger",
        "report",
        "memory",
        "presets",
        "footprint",
        "stopping",
        "progress",
    ),
    ("align", "finish", "blend", "masks", "tiling", "sessions"),
    ("image_meta", "photo", "image_bmp", "image_jpeg", "image_png", "image_tiff", "image_webp", "image_extras"),
    ("image_io", "plan"),
    ("model", "detect", "parse"),
    ("checkpoint", "rrdb"),
    ("kernels", "winograd"),
    ("compile_cache", "ahead", "package_cache"),
    ("runtime", "runtime_onnx", "runtime_pt2"),
    ("backend", "gather"),
    ("find", "selection", "restorer", "tasks"),
    ("gallery", "batch", "doctor", "service"),
    ("console", "usage", "verbs", "cli", "__main__"),
)
ORDER = [name for group in LAYERS for name in group]
CORE = Path(gpen_core.__file__).parent


def imports(path: Path, package: str) -> set[str]:
    """Modules of `package` that a file imports anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            parts = node.module.split(".")
            if parts[0] == package:
                found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        if isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith(f"{package}.")}
    return found


@pytest.mark.parametrize("path", sorted(CORE.glob("*.py")), ids=lambda p: p.stem)
def test_imports_point_down(path: Path) -> None:
    if path.stem == "__init__":
        return
    for name in imports(path, "gpen_core") - {"__version__"}:
        assert ORDER.index(name) < ORDER.index(path.stem), f"{path.stem} imports {name}"


@pytest.mark.parametrize("path", sorted(CORE.glob("*.py")), ids=lambda p: p.stem)
def test_the_runtime_never_imports_the_converter(path: Path) -> None:
    if path.stem != "cli":
        assert not imports(path, "gpen_convert")


def test_only_the_runtime_knows_about_compilation() -> None:
    for path in [*CORE.glob("*.py"), *Path(gpen_convert.__file__).parent.glob("*.py")]:
        if path.stem != "runtime":
            assert "torch.compile(" not in path.read_text(), path.name


def run_python(code: str, **variables: str) -> str:
    # The packages may be importable through pytest's paths alone.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables}
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_onnxruntime_gathers_nothing(tmp_path: Path) -> None:
    """It would write a device id and queued events into the home folder from its import on."""
    run_python("import gpen_core.detect", HOME=str(tmp_path), XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert list(tmp_path.rglob("*")) == []


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys\n"
        "from gpen_core.cli import run_command\n"
        "import contextlib, io\n"
        "import typer.main\n"
        "from gpen_core.cli import app\n"
        "def every(command, *names):\n"
        "    yield [*names, '--help']\n"
        "    for name, inner in getattr(command, 'commands', {}).items():\n"
        "        yield from every(inner, *names, name)\n"
        "known = list(every(typer.main.get_command(app)))\n"
        "assert ['seg2face', '--help'] in known and ['weights', 'list', '--help'] in known\n"
        "for arguments in known:\n"
        "    with contextlib.redirect_stdout(io.StringIO()):\n"
        "        assert run_command(arguments) == 0\n"
        "heavy = {'torch', 'cv2', 'onnxruntime', 'numpy', 'onnx', 'PIL'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    assert run_python(code) == ""


@pytest.mark.parametrize("options", ["", "--preset auto", "--compile --cache compiled"])
def test_a_photo_that_is_not_there_is_told_without_torch(options: str, tmp_path: Path) -> None:
    code = (
        "import contextlib, io, sys\n"
        "from gpen_core.cli import run_command\n"
        "with contextlib.redirect_stderr(io.StringIO()) as told:\n"
        f"    assert run_command(['enhance', 'absent.jpg', *{options.split()}]) == 2\n"
        "assert told.getvalue() == 'gpen-core: absent.jpg: no such file or folder\\n', told.getvalue()\n"
        "assert 'torch' not in sys.modules\n"
    )
    assert run_python(f"import os; os.chdir({str(tmp_path)!r})\n{code}") == ""


@pytest.mark.parametrize(
    "module", ["gpen_core", "gpen_core.runtime", "gpen_core.restorer", "gpen_convert.generator", "gpen_weights"]
)
def test_importing_is_silent(module: str) -> None:
    assert run_python(f"import {module}") == ""


def test_onnxruntime_reports_to_nobody() -> None:
    code = (
        "import os, sys\n"
        "os.environ.pop('ORT_DISABLE_TELEMETRY', None)\n"
        "import gpen_core\n"
        "assert 'onnxruntime' not in sys.modules\n"
        "assert os.environ['ORT_DISABLE_TELEMETRY'] == '1'\n"
    )
    assert run_python(code) == ""
