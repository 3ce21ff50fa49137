"""A bar on the terminal for runs of many photos."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def bar(total: int) -> Iterator[Callable[[], None]]:
    """A function to call after each photo; it moves a bar on stderr if that is a terminal and there are several."""
    if total < 2 or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    started = time.monotonic()
    # What goes to a pipe or a file must stay there; on the same terminal it has to pass above the bar, in whole lines.
    console = Console(stderr=True, soft_wrap=True)
    progress = Progress(*columns, console=console, redirect_stdout=sys.stdout.isatty(), transient=True)
    with progress:
        task = progress.add_task("", total=total, rate="")
        done = 0

        def advance() -> None:
            nonlocal done
            done += 1
            rate = done / max(time.monotonic() - started, 1e-6)
            progress.update(task, advance=1, rate=f"{rate:.2f} photos/s")

        yield advance
