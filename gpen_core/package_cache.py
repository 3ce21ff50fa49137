"""Networks that `--compile` compiled for this processor, kept for the next process.

An entry is a folder with a package and its sidecar as `ahead` makes them; its name follows from everything that
decides what the package computes. Whatever can't be read or does not belong there is ignored and compiled anew.

A package is a program. The default folder is used only if it belongs to this user (or root) and nobody else may write
to it; a folder that the user names is trusted as it is, so name none that others can write to. The default folder is
kept below `MOST_BYTES`, the least recently used entries going first; a named one is left to whoever named it.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import secrets
import shutil
import stat
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from gpen_core import __version__
from gpen_core.ahead import SIDECAR, Network, Sidecar, describe_machine, open_package, read_sidecar
from gpen_core.compile_cache import writable
from gpen_core.config import METADATA_KEY, GeneratorConfig, Provenance, WeightsMetadata
from gpen_core.errors import CheckpointError, DeviceError, MissingWeightsError
from gpen_core.files import is_folder

FOLDER = "compiled"
PACKAGE = "model.pt2"
MOST_BYTES = 2 * 10**9
"""Five networks of the size of GPEN-BFR-512, or hundreds as small as gpen-open-512."""
# Longer than any compilation takes.
ABANDONED_SECONDS = 24 * 3600
CPU = torch.device("cpu")
ENTRY = re.compile(r"[0-9a-f]{32}-[0-9a-f]{8}")
PART = re.compile(r"\.[0-9a-f]{16}\.part")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PackageCache:
    """Entries in a folder. folder: None keeps nothing. most_bytes: None sets no limit."""

    folder: Path | None
    most_bytes: int | None = None

    def writable(self) -> bool:
        """Whether entries can be kept; makes the folder. Raises UsageError if it is a file."""
        if self.folder is None:
            return False
        return writable(self.folder, 0o777 if self.most_bytes is None else 0o700)

    def find(self, wanted: Sidecar) -> Network | None:
        """The network of the entry for an unsealed sidecar.

        In a folder that can't be written to, as in an image, also one that was compiled for a lesser processor.
        """
        if self.folder is None:
            return None
        names = [name_of(wanted)]
        if not self.writable():
            names += self._siblings(names[0])
        for name in names:
            entry = self.folder / name
            if not is_folder(entry):
                continue
            try:
                return _open(entry, wanted)
            except (CheckpointError, DeviceError) as error:
                # A stranger's processor is no fault of an entry that says so.
                if name == names[0] or isinstance(error, CheckpointError):
                    logger.warning("%s; not used", error)
        return None

    def holds(self, wanted: Sidecar) -> bool:
        """Whether there is an entry for an unsealed sidecar, good or bad."""
        return self.folder is not None and is_folder(self.folder / name_of(wanted))

    def keep(self, package: Path, wanted: Sidecar) -> Path:
        """Copy a package and its sidecar into the entry for them, in the place of what is there. Raises OSError."""
        if self.folder is None:
            raise FileNotFoundError("no folder to keep compiled networks in")
        entry = self.folder / name_of(wanted)
        temporary, old = (self.folder / f".{secrets.token_hex(8)}.part" for _ in range(2))
        try:
            temporary.mkdir()
            for name in (PACKAGE, f"{PACKAGE}{SIDECAR}"):
                shutil.copyfile(package.with_name(name), temporary / name)
            # A folder can't replace one that holds something. Whoever looks in between compiles once more.
            with suppress(FileNotFoundError):
                entry.rename(old)
            try:
                temporary.rename(entry)
            except OSError as error:
                # Another process was quicker. That entry may be away already, for the next one.
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
        finally:
            for path in (temporary, old):
                shutil.rmtree(path, ignore_errors=True)
        self._shrink()
        return entry

    def entries(self) -> list[tuple[float, int, Path]]:
        """When it was last used, bytes and folder of each entry, the least recently used first."""
        found = []
        for path in _folders(self.folder):
            with suppress(OSError):
                if ENTRY.fullmatch(path.name):
                    found.append((path.stat().st_mtime, sum(file.stat().st_size for file in path.iterdir()), path))
        return sorted(found)

    def _siblings(self, name: str) -> list[str]:
        """Names of entries that differ in the processor alone."""
        general = name.partition("-")[0]
        found = [path.name for path in _folders(self.folder) if ENTRY.fullmatch(path.name)]
        return sorted(other for other in found if other.startswith(f"{general}-") and other != name)

    def _shrink(self) -> None:
        if self.most_bytes is None:
            return
        entries = self.entries()
        total = sum(size for _, size, _ in entries)
        for _, size, path in entries[:-1]:
            if total <= self.most_bytes:
                break
            shutil.rmtree(path, ignore_errors=True)
            total -= size
        for path in _folders(self.folder):
            with suppress(OSError):
                if PART.fullmatch(path.name) and time.time() - path.stat().st_mtime > ABANDONED_SECONDS:
                    shutil.rmtree(path, ignore_errors=True)


def open_cache(folder: Path | None) -> PackageCache:
    """The cache in a folder that the user named, or the user's own."""
    if folder is not None:
        return PackageCache(folder)
    own = default_folder()
    if own is None:
        logger.warning("no folder to keep compiled networks in: set GPEN_CORE_HOME to one, or use --cache")
        return PackageCache(None)
    obstacle = distrust(own)
    if obstacle:
        logger.warning("%s: %s; compiled networks are neither taken from it nor kept in it", own, obstacle)
        return PackageCache(None)
    return PackageCache(own, MOST_BYTES)


def default_folder() -> Path | None:
    """$GPEN_CORE_HOME/compiled, or in the user's cache folder; None for a user who has neither."""
    from gpen_weights import storage_folder

    try:
        return storage_folder() / FOLDER
    except MissingWeightsError:
        return None


def distrust(folder: Path) -> str:
    """Why nothing in a folder may be run, or nothing. A folder that is not there is no danger."""
    try:
        status = folder.stat()
    except FileNotFoundError:
        return ""
    except OSError as error:
        return error.strerror or str(error)
    if not stat.S_ISDIR(status.st_mode):
        return "not a folder"
    if not hasattr(os, "getuid"):  # Windows, where the folder lies among the user's own
        return ""
    if status.st_uid not in (0, os.getuid()):
        return "belongs to another user"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "others may write to it (chmod go-w)"
    return ""


def sidecar_for(generator: nn.Module, config: GeneratorConfig, dtype: str) -> Sidecar:
    """The unsealed sidecar of a network for this CPU: all that decides what its package computes."""
    digest = tensors_sha256(generator)
    made_by = f"gpen-core {__version__}, code {code_sha256()[:32]}"
    origin = Provenance("weights in memory", digest, tool_version=made_by)
    return Sidecar.describe(WeightsMetadata(config, origin), describe_machine(CPU), dtype, digest, (1, 1))


def name_of(sidecar: Sidecar) -> str:
    """The name of an entry: a hash of everything but the processor's instruction sets, and one of those."""
    features = hashlib.sha256(" ".join(sidecar.machine.features).encode()).hexdigest()
    return f"{_general(sidecar)[:32]}-{features[:8]}"


def tensors_sha256(module: nn.Module) -> str:
    """A hash of the names, types, shapes and values of a module's weights."""
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        values: Tensor = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {values.dtype} {list(values.shape)}\n".encode())
        digest.update(values.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def code_sha256() -> str:
    """A hash of this package's source, any of which may decide what is compiled."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _general(sidecar: Sidecar) -> str:
    machine = replace(sidecar.machine, features=())
    return replace(sidecar, machine=machine).binding()[METADATA_KEY]


def _open(entry: Path, wanted: Sidecar) -> Network:
    package = entry / PACKAGE
    found = read_sidecar(package)
    if _general(found) != _general(wanted):
        raise CheckpointError(f"{package}: made for something else than its name says")
    network = open_package(package, found, CPU)
    with suppress(OSError):
        os.utime(entry)
    return network


def _folders(folder: Path | None) -> list[Path]:
    if folder is None:
        return []
    try:
        return [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]
    except OSError:
        return []
