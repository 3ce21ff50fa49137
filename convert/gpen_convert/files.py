"""Converted files appear whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from gpen_core.errors import CheckpointError


def write_atomically(path: Path, content: bytes) -> None:
    """Write beside `path`, sync, then rename onto it; a failure leaves what was there.

    Raises CheckpointError naming the path.
    """
    # Not tempfile: its files stay private to the user after the rename, whatever the umask allows.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)  # noqa: PTH105 (the atomic one on every platform)
    except OSError as error:
        raise CheckpointError(f"{path}: can't be written ({error.strerror or error})") from None
    finally:
        temporary.unlink(missing_ok=True)
