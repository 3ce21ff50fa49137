"""The tar format that PyTorch wrote before its release 0.1.10, read with an allow-list.

Three members: `storages` (count, then for each: key, device and type; element count; raw values; then views),
`tensors` (count, then for each: key, storage and type; dimensions, sizes, strides, offset), and `pickle`, the object
itself, which refers to tensors by key.
"""

from __future__ import annotations

import pickle
import struct
import tarfile
from collections import OrderedDict
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpen_convert.pickle_check import check_pickle
from gpen_core.errors import CheckpointError

TAR_MAGIC = b"ustar"
MEMBERS = ("storages", "tensors", "pickle")
DTYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
}


class _Named:
    """Stands for a class of the file that is needed by name only."""

    def __init__(self, name: str) -> None:
        self.name = name


class _Restricted(pickle.Unpickler):
    """Resolves nothing but ordered dictionaries, and the names of tensor and storage types."""

    def __init__(self, file: BytesIO, tensors: Mapping[int, Tensor]) -> None:
        super().__init__(file, encoding="latin1")
        self._tensors = tensors

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module in ("torch", "torch.cuda") and name.endswith(("Storage", "Tensor")):
            return _Named(name)
        raise CheckpointError(f"refused, because it holds the Python object {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        return self._tensors[int(pid)]


def load_tar(path: Path) -> Any:
    """The object in a tar checkpoint. Raises CheckpointError if a member is missing, damaged or not allowed."""
    try:
        with tarfile.open(path, mode="r:") as archive:
            members = {name: BytesIO(_member(archive, name)) for name in MEMBERS}
        storages = _storages(members["storages"])
        tensors = _tensors(members["tensors"], storages)
        return _unpickled(members["pickle"], tensors)
    except (CheckpointError, OSError, MemoryError):
        raise
    except Exception as error:
        # Damaged bytes surface in any of the readers above, as any type.
        raise CheckpointError(f"truncated or damaged tar checkpoint ({type(error).__name__})") from None


def _unpickled(file: BytesIO, tensors: Mapping[int, Tensor] | None = None) -> Any:
    start = file.tell()
    check_pickle(file)
    file.seek(start)
    return _Restricted(file, tensors or {}).load()


def _member(archive: tarfile.TarFile, name: str) -> bytes:
    try:
        file = archive.extractfile(name)
    except KeyError:
        file = None
    if file is None:
        raise CheckpointError(f"a tar archive, not a checkpoint (it has no member {name!r}); unpack it first")
    return file.read()


def _storages(file: BytesIO) -> dict[int, Tensor]:
    storages: dict[int, Tensor] = {}
    for _ in range(_unpickled(file)):
        key, _location, kind = _unpickled(file)
        dtype = DTYPES.get(kind.name)
        if dtype is None:
            raise CheckpointError(f"refused, because it holds values of the type {kind.name}")
        (count,) = struct.unpack("<q", file.read(8))
        raw = file.read(count * dtype.itemsize)
        if len(raw) != count * dtype.itemsize:
            raise CheckpointError("truncated: a storage is shorter than it says")
        storages[key] = torch.frombuffer(bytearray(raw), dtype=dtype) if count else torch.empty(0, dtype=dtype)
    for target, root, offset, count in _unpickled(file):
        storages[target] = storages[root][offset : offset + count]
    return storages


def _tensors(file: BytesIO, storages: Mapping[int, Tensor]) -> dict[int, Tensor]:
    tensors: dict[int, Tensor] = {}
    for _ in range(_unpickled(file)):
        key, storage, _kind = _unpickled(file)
        # The number of dimensions is followed by four bytes of padding.
        (dimensions,) = struct.unpack("<i4x", file.read(8))
        sizes = struct.unpack(f"<{dimensions}q", file.read(8 * dimensions))
        strides = struct.unpack(f"<{dimensions}q", file.read(8 * dimensions))
        (offset,) = struct.unpack("<q", file.read(8))
        # as_strided checks the bounds of the storage.
        tensors[key] = torch.as_strided(storages[storage], sizes, strides, offset)
    return tensors
