"""Tensors out of a file that a stranger made, without running anything in it.

What a file is follows from its first bytes, never from its name. Pickles are read by PyTorch's restricted unpickler
with an allow-list, which grows by argparse namespaces and numpy scalars: old training scripts left them in their files.
"""

from __future__ import annotations

import argparse
import re
import warnings
import zipfile
import zlib
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from safetensors import SafetensorError

from gpen_convert.pickle_check import check_pickle
from gpen_convert.tarball import TAR_MAGIC, load_tar
from gpen_core.checkpoint import describe_foreign, open_safetensors, read_start
from gpen_core.config import METADATA_KEY
from gpen_core.errors import CheckpointError

ZIP_MAGIC = b"PK\x03\x04"
# Before 1.6 a file began with five pickles: magic number, protocol, machine, the object, and its storages' names.
LEGACY_PICKLES = 5
# The magic number of PyTorch's format before 1.6, a long, behind the protocol and, from protocol 4 on, a frame.
LEGACY_MAGIC = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
PROTOCOLS = (b"\x02", b"\x03")
DAMAGED = "truncated or damaged: what it holds does not fit together"
CLASS = re.compile(r"<class '([\w.]+)'>")
GLOBAL = re.compile(r"\bGLOBAL ([A-Za-z_][\w.]*)")


def load_tree(path: Path) -> Any:
    """What a checkpoint file holds: nested dictionaries and lists with tensors on the CPU.

    Raises CheckpointError, in one line that names the file and its size, for a file that is missing, cut short, no
    checkpoint, or that refers to any Python object outside the allow-list.
    """
    try:
        size = path.stat().st_size
        start = read_start(path)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    try:
        return _load(path, start)
    except CheckpointError as error:
        raise CheckpointError(f"{path} ({size:,} bytes): {error}") from None
    except MemoryError:
        raise CheckpointError(f"{path} ({size:,} bytes): does not fit into memory") from None
    except OSError as error:
        raise CheckpointError(f"{path} ({size:,} bytes): {error.strerror or error}") from None


def _load(path: Path, start: bytes) -> Any:
    if start.startswith(ZIP_MAGIC):
        _check_zip(path)
        return _torch_load(path)
    if start[:1] == b"\x80" and LEGACY_MAGIC in start[:32]:
        _check_protocol(start)
        _check_legacy(path)
        return _torch_load(path)
    if start[257:262] == TAR_MAGIC:
        return load_tar(path)
    if start[8:9] == b"{":
        return _load_safetensors(path)
    if start[:1] == b"\x80" and start[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        raise CheckpointError("a plain Python pickle, not a PyTorch checkpoint; refused, because it could run code")
    raise CheckpointError(describe_foreign(start))


def _check_zip(path: Path) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            pickles = [name for name in names if re.fullmatch(r"([^/]+/)?data\.pkl", name)]
            if pickles:
                _refuse_expanding(archive.infolist(), path.stat().st_size)
            pickle = archive.read(pickles[0]) if pickles else b""
            broken = archive.testzip() if pickles else None
    except (zipfile.BadZipFile, zlib.error, ValueError, NotImplementedError, RuntimeError, EOFError):
        raise CheckpointError(
            "truncated or damaged: the zip archive can't be read to its end; download it again"
        ) from None
    if any(re.fullmatch(r"[^/]+/(code/.*|constants\.pkl)", name) for name in names):
        raise CheckpointError("a TorchScript archive, which carries code; the original checkpoint is needed")
    if any("/aotinductor/" in name for name in names):
        raise CheckpointError("a package compiled ahead of time (.pt2), which is used as it is; convert the original")
    if not pickles:
        inside = ", ".join(names[:3])
        raise CheckpointError(f"a zip archive, not a checkpoint (it holds {inside}); unpack it first")
    if broken is not None:
        raise CheckpointError(f"damaged: the checksum of {broken} is wrong; download it again")
    _check_protocol(pickle[:2])
    _check_pickles(BytesIO(pickle), 1)


def _refuse_expanding(members: Sequence[zipfile.ZipInfo], size: int) -> None:
    """PyTorch stores what it writes. Raises CheckpointError for members that take more bytes than the file has."""
    packed = next((member.filename for member in members if member.compress_type != zipfile.ZIP_STORED), None)
    if packed is not None:
        raise CheckpointError(
            f"a zip archive with compressed members ({packed}), which PyTorch never writes; unpack it, or if it is a "
            "checkpoint that was packed again, pack it without compression"
        )
    if sum(member.file_size for member in members) > size:
        raise CheckpointError("damaged: its members say that they are larger than the file")


def _check_legacy(path: Path) -> None:
    with path.open("rb") as file:
        _check_pickles(file, LEGACY_PICKLES)


def _check_pickles(file: IO[bytes], count: int) -> None:
    try:
        for _ in range(count):
            check_pickle(file)
    except (CheckpointError, MemoryError, OSError):
        raise
    except Exception:
        # Damaged instructions surface as any type.
        raise CheckpointError(DAMAGED) from None


def _check_protocol(start: bytes) -> None:
    """The restricted unpickler knows pickles as torch.save writes them unless told otherwise."""
    if start[:1] == b"\x80" and start[1:2] not in PROTOCOLS:
        raise CheckpointError(
            f"saved with pickle protocol {start[1]}, which the restricted reader does not know; "
            "save it again with torch.save's own protocol, 2"
        )


def _torch_load(path: Path) -> Any:
    try:
        # An open file, because PyTorch would judge a path by its suffix.
        with torch.serialization.safe_globals(list(_allowed())), path.open("rb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(file, map_location="cpu", weights_only=True)
    except (CheckpointError, MemoryError, OSError):
        raise
    except Exception as error:
        # The restricted unpickler and the readers below it raise many types for a damaged file.
        raise CheckpointError(_explain(str(error))) from None


def _allowed() -> list[Callable[..., Any] | tuple[Callable[..., Any], str]]:
    scalar = np.float64(0).__reduce__()[0]
    kinds = [type(np.dtype(code)) for code in "?bBhHiIlLqQefdgFDGSUMm"]
    allowed: list[Any] = [argparse.Namespace, np.dtype, *dict.fromkeys(kinds)]
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 6):
        return [*allowed, scalar]
    # One function, stored under its numpy 1 or its numpy 2 name.
    return [*allowed, (scalar, "numpy.core.multiarray.scalar"), (scalar, "numpy._core.multiarray.scalar")]


def _explain(message: str) -> str:
    found = GLOBAL.search(message)
    if found:
        return (
            f"refused, because it holds the Python object {found.group(1)}, which is not on the list of harmless ones; "
            "only tensors, plain containers, argparse namespaces and numpy scalars are read"
        )
    named = CLASS.search(message)
    if named:
        return f"refused, because it holds an object of the type {named.group(1)}, which is not known to be harmless"
    return DAMAGED


def _load_safetensors(path: Path) -> dict[str, Any]:
    try:
        with open_safetensors(path) as opened:
            if METADATA_KEY in (opened.metadata() or {}):
                raise CheckpointError("already converted; use it as it is")
            names = list(opened.keys())
            return {name: opened.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise CheckpointError(f"truncated or damaged safetensors ({error})") from None
