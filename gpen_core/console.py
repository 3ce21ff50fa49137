"""What is said to people, on standard output and standard error."""

from __future__ import annotations

import io
import json
import os
import sys
from contextlib import suppress
from typing import Any, TextIO

import typer

from gpen_core.errors import printable


class Silence(io.TextIOBase):
    """Stands in for an output that can't be written to any more. reason: why, or nothing where its reader has gone."""

    def __init__(self, reason: str = "") -> None:
        self.reason = reason

    def write(self, text: str) -> int:
        return len(text)


def say(line: str) -> None:
    """A line on standard output. Where that can't be written, the work goes on, and `spoilt` tells of it."""
    reason = _write(line, sys.stdout)
    if reason is not None:
        sys.stdout = Silence(reason)
    if reason:
        complain(f"gpen-core: standard output: {reason}")


def say_json(record: Any) -> None:
    say(json.dumps(record))


def complain(line: str) -> None:
    """A line on standard error. Where that can't be written, there is nobody to tell."""
    if _write(line, sys.stderr) is not None:
        sys.stderr = Silence()


def spoilt() -> bool:
    """Whether a part of standard output could not be written, though somebody was there to read it."""
    return isinstance(sys.stdout, Silence) and bool(sys.stdout.reason)


def open_closed() -> None:
    """Put nothing in the place of standard streams that were closed when the process began.

    Otherwise the first file that is opened would take their number, and what libraries write there.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            with suppress(OSError):
                os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or Silence()
    sys.stderr = sys.stderr or Silence()


def _write(line: str, stream: TextIO) -> str | None:
    """Why a line could not be written, in words; nothing in them where the reader has gone; None if it was written."""
    try:
        # Named, because a progress bar may stand in for it, which Typer's own look-up goes past.
        typer.echo(printable(line), file=stream)
    except BrokenPipeError:
        return ""
    except (OSError, ValueError) as error:  # a ValueError where it was closed
        return getattr(error, "strerror", None) or str(error)
    return None
