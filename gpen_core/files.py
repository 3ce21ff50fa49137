"""Files that appear whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gpen_core.errors import ImageError

NOT_UTF8 = "its name or that of a folder is not UTF-8, which the readers of such files need; rename it"
_TEMPORARY = re.compile(r"\.(.{1,40})\.([0-9a-f]{12})\.[0-9a-f]{12}\.part", re.DOTALL)
"""The beginning of the final name, which is for people and may be that of many; the whole of it, hashed; chance."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new empty file beside `path`; it takes the name `path` when the block ends, and vanishes if the block fails.

    The block writes into that file and puts no other in its place: it is locked, so that `remove_leftovers` of any
    process knows that somebody is at work on it. What was at `path` stays until the block ends, also if the process is
    killed. Raises OSError as the file system does.
    """
    temporary, lock = _begun(path)
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if lock is not None:
            os.close(lock)


def _begun(path: Path) -> tuple[Path, int | None]:
    """A new empty file beside `path`, and what holds its lock; None where files can't be locked."""
    while True:
        temporary = path.with_name(f".{path.name[:40]}.{_hashed(path.name)}.{secrets.token_hex(6)}.part")
        temporary.touch(mode=0o666, exist_ok=False)
        lock = _locked(temporary, wait=True)
        # Between the two, another process may have taken it for a leftover, and removed it.
        if exists(temporary):
            return temporary, lock
        if lock is not None:
            os.close(lock)


def _hashed(name: str) -> str:
    return hashlib.sha256(os.fsencode(name)).hexdigest()[:12]


def _locked(path: Path, *, wait: bool) -> int | None:
    """The descriptor of a file, which nobody else can lock until it is closed; None if that is not possible.

    wait: until somebody else has closed it.
    """
    try:
        import fcntl
    except ImportError:  # Windows, where an open file could not be renamed either
        return None
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def sha256(path: Path) -> str:
    """The sha256 of a file's content, in hexadecimal. Raises OSError."""
    # Not hashlib.file_digest, which came with Python 3.11.
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def copy(source: Path, target: Path) -> None:
    """A file's bytes to another name, whole or not at all. Raises OSError."""
    with replacing(target) as temporary:
        shutil.copyfile(source, temporary)


@contextmanager
def made(folder: Path, mode: int = 0o777, above: int = 0o777) -> Iterator[None]:
    """A folder for a block, made if need be; if nothing is in it in the end, whatever was made is removed again.

    mode: of a new folder. above: of new folders that it lies in. Raises OSError.
    """
    new: list[Path] = []
    try:
        for step in [path for path in (*reversed(folder.parents), folder) if not path.is_dir()]:
            with suppress(FileExistsError):
                step.mkdir(mode if step == folder else above)
                new.append(step)
        yield
    finally:
        if folder in new and not any(files for _, _, files in os.walk(folder)):
            _prune(folder)
        for step in reversed(new):
            with suppress(OSError):
                step.rmdir()


def _prune(folder: Path) -> None:
    """Remove the folders inside, of which none holds a file."""
    for place, names, _ in os.walk(folder, topdown=False):
        for name in names:
            with suppress(OSError):
                Path(place, name).rmdir()


def remove(path: Path) -> None:
    """Remove a file, a link or a folder with all it holds, as far as that is allowed."""
    if is_folder(path) and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with suppress(OSError):
        path.unlink()


def remove_leftovers(targets: Iterable[Path], begins: Iterable[Path] = ()) -> int:
    """Remove what killed processes left of `replacing(target)` for any of the targets; how many files that were.

    begins: each stands for all targets beside it whose names begin with its own. What a living process is at work on
    stays, and so does everything where files can't be locked.
    """
    names: dict[Path, set[str]] = {}
    for target in targets:
        names.setdefault(target.parent, set()).add(_hashed(target.name))
    starts: dict[Path, set[str]] = {}
    for begin in begins:
        starts.setdefault(begin.parent, set()).add(begin.name[:40])
    removed = 0
    for folder in names.keys() | starts.keys():
        with suppress(OSError):
            for path in folder.iterdir():
                match = _TEMPORARY.fullmatch(path.name)
                if match is None:
                    continue
                begun = any(match[1].startswith(start) for start in starts.get(folder, ()))
                if begun or match[2] in names.get(folder, ()):
                    removed += _removed_if_dead(path)
    return removed


def _removed_if_dead(path: Path) -> bool:
    lock = _locked(path, wait=False)
    if lock is None:
        return False
    try:
        path.unlink()
        return True
    except OSError:
        return False
    finally:
        os.close(lock)


def is_folder(path: Path) -> bool:
    """Whether a path leads to a folder; False also for what this user may not look at, and for impossible names."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def same_file(one: Path, other: Path) -> bool:
    """Whether two paths lead to one existing file."""
    try:
        return one.samefile(other)
    except (OSError, ValueError):
        return False


def identity(path: Path) -> tuple[int, int] | None:
    """What a file's names and links have in common; None where there is none, and for impossible names."""
    try:
        status = path.stat()
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino


Stamp = tuple[int, int, int, int]
"""What changes with a file's content: device, number, bytes, and when it was written."""


def stamp(path: Path) -> Stamp | None:
    """The stamp of a file, by which a change shows; None where there is none."""
    try:
        status = path.stat()
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def exists(path: Path) -> bool:
    """Whether there is something; False also for what this user may not look at, and for impossible names."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def is_broken_link(path: Path) -> bool:
    """Whether a path is a link to something that is not there, or that this user may not look at."""
    return os.path.lexists(path) and not exists(path)


def is_utf8(path: Path) -> bool:
    """Whether a path is UTF-8; that of a file from another system may not be."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def why_unreadable(path: Path) -> str:
    """Why there is no file to read at a path, or nothing: what is no regular file could block for ever when opened."""
    try:
        if path.is_file():
            return ""
        path.stat()
    except OSError as error:
        return (error.strerror or str(error)).lower()
    except ValueError as error:
        return str(error)
    return "a folder, not a file" if is_folder(path) else "not a regular file"


def require_writable(folder: Path) -> None:
    """Raises ImageError if nothing can be written to a folder, which need not exist yet."""
    existing = require_possible_folder(folder)
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ImageError(f"{folder}: no permission to write there")


def require_possible_folder(folder: Path) -> Path:
    """The part of a folder's path that exists. Raises ImageError if that is no folder, a link leads nowhere or a
    name is too long."""
    existing = folder
    while not exists(existing) and existing != existing.parent:
        if is_broken_link(existing):
            raise ImageError(f"{folder}: {existing} is a link that leads nowhere")
        existing = existing.parent
    if not is_folder(existing):
        raise ImageError(f"{folder}: {existing} is no folder")
    try:
        folder.stat()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise ImageError(f"{folder}: {os.strerror(error.errno).lower()}") from None
    return existing
