"""Ending a long run when the user or the system asks for it, without leaving anything half done."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from gpen_core.errors import ExitCode

SECOND_THOUGHTS = 1.0


class Stop:
    """Whether the run is to end. Only inside `at_once` does a request interrupt; elsewhere it has to be asked for."""

    def __init__(self) -> None:
        self.requested = False
        self._since = 0.0
        self._at_once = False

    def request(self, signum: int = 0, frame: FrameType | None = None) -> None:
        """The signal handler. Asked again after a second, the process ends on the spot."""
        if self.requested and time.monotonic() - self._since > SECOND_THOUGHTS:
            os._exit(ExitCode.INTERRUPTED)
        if not self.requested:
            self._since = time.monotonic()
        self.requested = True
        if self._at_once:
            self._at_once = False
            raise KeyboardInterrupt

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """A block that may be given up anywhere: a request raises KeyboardInterrupt in it."""
        self._at_once = True
        try:
            if self.requested:
                raise KeyboardInterrupt
            yield
        finally:
            self._at_once = False


@contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """SIGINT and SIGTERM request a stop. Handlers belong to the main thread; in others signals are left alone."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before: dict[signal.Signals, Any] = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, stop.request)
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
