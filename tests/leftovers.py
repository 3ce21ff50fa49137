"""What processes leave that are killed while they write a file."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from gpen_core.files import replacing


def abandoned(target: Path) -> Path:
    """The unfinished file that a process leaves beside `target`."""
    with suppress(KeyboardInterrupt), replacing(target) as part:
        raise KeyboardInterrupt
    part.write_bytes(b"half")
    return part
