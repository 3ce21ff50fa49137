"""The report of a run: a JSON Lines file with one object for each photo, for programs to read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpen_core.errors import ImageError, UsageError
from gpen_core.files import is_broken_link, require_writable
from gpen_core.ledger import NAME

FIELDS = {"input", "output", "status", "faces", "seconds"}
"""What every line has."""
START = b'{"input": "'
"""What every line begins with."""


def require_report(path: Path) -> None:
    """Raises UsageError if no report can be written there, or if it would replace a file that is none.

    A file that is empty or a report of an earlier run, whole or not, may be replaced; so may what keeps nothing, as a
    pipe or a terminal.
    """
    if path.name == NAME:
        raise UsageError(f"--report {path}: that is the record of a folder")
    try:
        require_writable(path.parent)
        if path.is_dir():
            raise UsageError(f"--report {path}: that is a folder")
        if is_broken_link(path):
            raise UsageError(f"--report {path}: a link that leads nowhere; remove it or choose another name")
        if path.is_file() and not is_report(path):
            raise UsageError(f"--report {path}: a file is there that is no report; remove it or choose another name")
    except ImageError as error:
        raise UsageError(f"--report {path}: {error}") from None
    except OSError as error:
        raise UsageError(f"--report {path}: {(error.strerror or str(error)).lower()}") from None


def is_report(path: Path) -> bool:
    """Whether a file is empty, or the report of a run. Its last line may lack its end, as a full disk leaves it.

    Raises OSError.
    """
    with path.open("rb") as file:
        # Files of any size have no line breaks.
        if not START.startswith(file.read(len(START))):
            return False
        file.seek(0)
        return all(_is_record(line) if line.endswith(b"\n") else _begins_one(line) for line in file)


def _is_record(line: bytes) -> bool:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(record, dict) and record.keys() >= FIELDS


def _begins_one(line: bytes) -> bool:
    return line.startswith(START) or START.startswith(line)


@contextmanager
def report_to(path: Path | None) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A function that appends a record to the report, which is emptied first; each is in the file at once.

    Raises ImageError, one line with the path, for whatever the file system refuses.
    """
    if path is None:
        yield lambda record: None
        return
    with _named(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("wb", buffering=0)

    def write(record: dict[str, Any]) -> None:
        left = json.dumps(record).encode() + b"\n"
        with _named(path):
            # Of what fits only in part, the next piece tells why.
            while left:
                left = left[os.write(file.fileno(), left) :]

    with file:
        yield write


@contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ImageError(f"--report {path}: {(error.strerror or str(error)).lower()}") from None
