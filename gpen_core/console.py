"""What is said to people, on standard output and standard error."""

from __future__ import annotations

import json
import sys
from typing import Any

import typer

from gpen_core.errors import printable


def say(line: str) -> None:
    try:
        # Named, because a progress bar may stand in for it, which Typer's own look-up goes past.
        typer.echo(printable(line), file=sys.stdout)
    except BrokenPipeError:
        # The reader of our output has gone: the work goes on in silence. Python would complain while closing it.
        sys.stdout = None


def say_json(record: Any) -> None:
    say(json.dumps(record))


def complain(line: str) -> None:
    typer.echo(printable(line), file=sys.stderr)
