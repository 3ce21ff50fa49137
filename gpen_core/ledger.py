"""What has been done in an output folder: which content, with which settings, became which file.

A JSON Lines file in that folder. A line is appended and synced after each photo, so a process that is killed loses
nothing but a last line, which is then ignored.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpen_core import __version__
from gpen_core.errors import UsageError
from gpen_core.files import sha256

NAME = ".gpen-core.jsonl"


@dataclass(frozen=True)
class Entry:
    """One output: sha256 of the source's and the output's content, and of the settings between them.

    beside: further files that were written with it, by their paths from the folder.
    """

    source: str
    settings: str
    output: str
    beside: tuple[str, ...] = ()


class Ledger:
    """The record of one output folder. Threads may share it, and so may processes."""

    def __init__(self, folder: Path) -> None:
        """Reads what there is; a folder or file that does not exist is an empty record, and lines that make no sense
        are none.

        Raises OSError, and UsageError where something else than a file has its name.
        """
        self.folder = folder
        self.path = folder / NAME
        self._lock = threading.Lock()
        self._descriptor: int | None = None
        self._entries: dict[str, Entry] = {}
        if self.path.exists():
            if not self.path.is_file():
                raise UsageError(f"{self.path}: what was done is recorded there, but it is no file; remove it")
            self.open()
            self._entries = dict(filter(None, map(_parsed, self.path.read_bytes().splitlines())))

    def open(self) -> None:
        """Make the file, if need be, and open it. Raises OSError."""
        with self._lock:
            if self._descriptor is not None:
                return
            self.folder.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)

    def close(self) -> None:
        """Release the file."""
        with self._lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None

    def holds(self, target: Path, source: str, settings: str) -> bool:
        """Whether the file `target` is there, as it was made from content `source` with these settings, and so is all
        that was written with it, in whatever state."""
        entry = self._entries.get(self._key(target))
        if entry is None or (entry.source, entry.settings) != (source, settings):
            return False
        try:
            return sha256(target) == entry.output and all((self.folder / name).is_file() for name in entry.beside)
        except OSError:
            return False

    def names(self, target: Path) -> bool:
        """Whether the file `target` was written by an earlier run, whatever became of it since."""
        return self._key(target) in self._entries

    def add(self, target: Path, source: str, settings: str, beside: Sequence[Path] = ()) -> None:
        """Record a file that has just been written, and those that were written with it. Raises OSError."""
        key, entry = self._key(target), Entry(source, settings, sha256(target), tuple(map(self._key, beside)))
        record: dict[str, Any] = {"file": key, "sha256": entry.output, "source_sha256": source, "settings": settings}
        record |= {"beside": entry.beside} if entry.beside else {}
        self.open()
        with self._lock:
            assert self._descriptor is not None
            try:
                _append(self._descriptor, json.dumps(record).encode() + b"\n")
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self.path)) from None
            self._entries[key] = entry

    def _key(self, target: Path) -> str:
        try:
            return Path(os.path.relpath(target, self.folder)).as_posix()
        except ValueError:  # on another drive of Windows
            return str(target.absolute())


def settings_fingerprint(settings: Mapping[str, Any]) -> str:
    """The sha256 of everything that decides what becomes of a photo; the version of this program is part of it."""
    text = json.dumps({**settings, "version": __version__}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _append(descriptor: int, line: bytes) -> None:
    size = os.fstat(descriptor).st_size
    if size:
        os.lseek(descriptor, size - 1, os.SEEK_SET)
        # The line that a killed process left unfinished must not swallow this one.
        line = line if os.read(descriptor, 1) == b"\n" else b"\n" + line
    if os.write(descriptor, line) != len(line):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.fsync(descriptor)


def _parsed(line: bytes) -> tuple[str, Entry] | None:
    try:
        record = json.loads(line)
        fields = [record[name] for name in ("file", "source_sha256", "settings", "sha256")]
        beside = record.get("beside", [])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if not isinstance(beside, list) or not all(isinstance(value, str) for value in (*fields, *beside)):
        return None
    return fields[0], Entry(fields[1], fields[2], fields[3], tuple(beside))
