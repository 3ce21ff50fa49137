"""What torch.compile and Triton compiled, kept in a folder: a later process starts in seconds instead of a minute.

On a CPU whole networks are kept instead (`package_cache`), where PyTorch can. A cache fits one PyTorch and one kind of
device; elsewhere its entries are ignored and compiled anew. It holds machine code and pickles: like any program, take
one only from those who may run programs here.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from gpen_core.errors import ImageError, UsageError
from gpen_core.files import exists, is_folder, made, replacing, require_possible_folder

ARTEFACT = "artefacts.bin"
VARIABLES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


@contextmanager
def cached_in(folder: Path) -> Iterator[None]:
    """Compilations of the block read from `folder` and, where it is writable, write to it.

    A folder that can't be written to, as in an image, serves through its single file (`keep_artefact`). PyTorch takes
    the place from environment variables, so they are set meanwhile, for the whole process. Raises UsageError.
    """
    with ExitStack() as stack:
        place = folder
        if not writable(folder):
            if not (folder / ARTEFACT).is_file():
                raise UsageError(f"{folder}: can't be written to, and there is no {ARTEFACT} in it to start from")
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpen-core-")))
        stack.enter_context(made(place))
        stack.enter_context(writing_to(place))
        if place is not folder and hasattr(torch.compiler, "load_cache_artifacts"):
            torch.compiler.load_cache_artifacts((folder / ARTEFACT).read_bytes())
        yield


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """PyTorch's compilers read from and write to a folder, meanwhile, in the whole process."""
    before = {name: os.environ.get(name) for name in VARIABLES}
    _set({name: str(folder.absolute() / part) for name, part in VARIABLES.items()})
    try:
        yield
    finally:
        _set(before)


def keep_artefact(folder: Path) -> bool:
    """Write all that this process compiled or read into a single file of `folder`, which it can be carried in.

    Returns whether there is one: PyTorch makes it from 2.7 on, and only of what its own compiler made.
    """
    if not hasattr(torch.compiler, "save_cache_artifacts"):
        return False
    found = torch.compiler.save_cache_artifacts()
    if found is None:
        return False
    with replacing(folder / ARTEFACT) as temporary:
        temporary.write_bytes(found[0])
    return True


def writable(folder: Path) -> bool:
    """Whether files can be written to a folder, which need not exist yet. Raises UsageError if it can't be one."""
    if exists(folder) and not is_folder(folder):
        raise UsageError(f"{folder}: not a folder")
    if folder.is_symlink() and not exists(folder):
        raise UsageError(f"{folder}: a link that leads nowhere, not a folder")
    try:
        existing = require_possible_folder(folder)
    except ImageError as error:
        raise UsageError(str(error)) from None
    if existing != folder:
        return os.access(existing, os.W_OK | os.X_OK)
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
