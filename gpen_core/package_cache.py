"""Networks that `--compile` compiled for this processor, kept for the next process.

An entry is a folder with a package and its sidecar as `ahead` makes them; its name follows from everything that
decides what the package computes. Whatever can't be read or does not belong there is ignored and compiled anew.

A package is a program. The default folder is used only if it, all that it lies in from the user's home on, and all that
is in an entry belong to this user (or root) and nobody else may write to them; a folder that the user names is trusted
as it is, so name none that others can write to. The default folder is kept below `MOST_BYTES`, the least recently used
entries going first; a named one is left to whoever named it.
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
from collections.abc import Iterator
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
from gpen_core.files import is_folder, made, remove

FOLDER = "compiled"
PACKAGE = "model.pt2"
MOST_BYTES = 2 * 10**9
"""Five networks of the size of GPEN-BFR-512, or hundreds as small as gpen-open-512."""
# Longer than any compilation takes.
ABANDONED_SECONDS = 24 * 3600
CPU = torch.device("cpu")
# As many as Linux follows.
MOST_LINKS = 40
OTHERS = stat.S_IWGRP | stat.S_IWOTH
ENTRY = re.compile(r"[0-9a-f]{32}-[0-9a-f]{8}")
PART = re.compile(r"\.[0-9a-f]{16}\.part")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PackageCache:
    """Entries in a folder.

    folder: None keeps nothing. most_bytes: None sets no limit, and is for a folder that the user named and trusts; of
    any other, each entry is looked at before it is used.
    """

    folder: Path | None
    most_bytes: int | None = None

    @property
    def named(self) -> bool:
        """Whether the user named the folder."""
        return self.most_bytes is None

    def writable(self) -> bool:
        """Whether entries can be kept. Raises UsageError if the folder is none."""
        return self.folder is not None and writable(self.folder)

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
            if not os.path.lexists(entry):
                continue
            try:
                require_entry(entry, trusted=self.named)
                return _open(entry, wanted)
            except (CheckpointError, DeviceError) as error:
                # A stranger's processor is no fault of an entry that says so.
                if name == names[0] or isinstance(error, CheckpointError):
                    logger.warning("%s; not used", error)
        return None

    def holds(self, wanted: Sidecar) -> bool:
        """Whether there is an entry for an unsealed sidecar, good or bad."""
        return self.folder is not None and _is_entry(self.folder / name_of(wanted))

    def lacks(self) -> str:
        """Why a network can neither be taken from the folder nor compiled here, and what to do, in one line."""
        fill, use = (self.folder, "") if self.named else ("DIR", " and give it to --cache")
        return (
            f"{self.folder}: holds nothing that was compiled for these weights, this processor and these versions, and "
            f"--compile needs a C++ compiler (g++): install one, or fill a folder where there is one (gpen-core "
            f"compile MODEL --cache {fill}){use}, or leave --compile out"
        )

    def keep(self, package: Path, wanted: Sidecar) -> Path:
        """Copy a package and its sidecar into the entry for them, in the place of what is there. Raises OSError."""
        if self.folder is None:
            raise FileNotFoundError("no folder to keep compiled networks in")
        entry = self.folder / name_of(wanted)
        mode, above = (0o777, 0o777) if self.named else (0o700, 0o755)
        with made(self.folder, mode, above):
            self._replace(entry, package, mode)
        self._shrink()
        return entry

    def _replace(self, entry: Path, package: Path, mode: int) -> None:
        # It could be moved away, but not removed.
        _require_removable(entry)
        temporary, old = (entry.with_name(f".{secrets.token_hex(8)}.part") for _ in range(2))
        try:
            temporary.mkdir(mode)
            for name in (PACKAGE, f"{PACKAGE}{SIDECAR}"):
                shutil.copyfile(package.with_name(name), temporary / name)
                if not self.named:
                    (temporary / name).chmod(0o600)
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
                remove(path)

    def entries(self) -> list[tuple[float, int, Path]]:
        """When it was last used, bytes and folder of each entry, the least recently used first."""
        found = []
        for path in _folders(self.folder):
            with suppress(OSError):
                if ENTRY.fullmatch(path.name):
                    found.append((path.stat().st_mtime, sum(file.lstat().st_size for file in path.iterdir()), path))
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
        for path in _listed(self.folder):
            with suppress(OSError):
                if PART.fullmatch(path.name) and time.time() - path.lstat().st_mtime > ABANDONED_SECONDS:
                    remove(path)


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
    """Why nothing in a folder may be run, or nothing. A folder that is not there is no danger.

    Whoever may write to a folder on the way can put another one in the place of this one, so all of them count, and
    links too; but none that the user's home lies in, because who may write there can do anything as this user.
    """
    folder = folder.absolute()
    home = _home()
    try:
        meant = (folder, folder.resolve())
        for step, status in _way(folder):
            if not (home and home != step and home.is_relative_to(step)):
                obstacle = _obstacle(step, status, last=step in meant)
                if obstacle:
                    return obstacle
        return "" if folder.is_dir() else "not a folder"
    except FileNotFoundError:
        return ""
    # What `resolve` raises for links in a circle.
    except RuntimeError:
        return os.strerror(errno.ELOOP)
    except OSError as error:
        return error.strerror or str(error)


def require_entry(entry: Path, *, trusted: bool) -> None:
    """Raises CheckpointError for an entry that is no folder, or, if not trusted, one that others may have written.

    Then its files must be files, no links, and belong to this user or root, with nobody else to write to them.
    """
    if not _is_entry(entry):
        raise CheckpointError(f"{entry}: not a folder")
    for path in () if trusted else (entry, entry / PACKAGE, entry / f"{PACKAGE}{SIDECAR}"):
        try:
            status = path.lstat()
        except OSError:
            # What is missing is told when it is opened.
            continue
        if path != entry and not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path}: not a regular file")
        obstacle = _obstacle(path, status, last=True)
        if obstacle:
            raise CheckpointError(f"{path}: {obstacle}")


def _way(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Every folder and link that an absolute path leads through, and what it leads to, each as it is itself.

    Raises OSError.
    """
    place, left, links = Path(path.anchor), list(reversed(path.parts[1:])), 0
    yield place, place.lstat()
    while left:
        name = left.pop()
        if name == "..":
            place = place.parent
            continue
        step = place / name
        status = step.lstat()
        yield step, status
        if not stat.S_ISLNK(status.st_mode):
            place = step
            continue
        links += 1
        if links > MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        target = step.readlink()
        place = Path(target.anchor) if target.is_absolute() else place
        left += reversed(target.parts[1:] if target.is_absolute() else target.parts)


def _obstacle(path: Path, status: os.stat_result, *, last: bool) -> str:
    """Why what others do could change what is found under a path, or nothing. last: the path itself was asked for."""
    if not hasattr(os, "getuid"):  # Windows, where the folder lies among the user's own
        return ""
    if status.st_uid not in (0, os.getuid()):
        return "belongs to another user" if last else f"{path} belongs to another user"
    # In a folder like /tmp others can't touch what is not theirs.
    shared = not last and status.st_mode & stat.S_ISVTX
    if stat.S_ISLNK(status.st_mode) or shared or not status.st_mode & OTHERS:
        return ""
    return f"others may write to {'it' if last else path} (chmod go-w)"


def _home() -> Path | None:
    """The user's home folder, with all links resolved."""
    try:
        return Path.home().resolve()
    except (OSError, RuntimeError):
        return None


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


def _require_removable(entry: Path) -> None:
    """Raises PermissionError for a folder that this user can't empty.

    Asked of the folder that is open, because another process may put a new one in its place in between.
    """
    try:
        opened = os.open(entry, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except PermissionError:
        raise
    except OSError:
        return
    try:
        if not os.access(".", os.W_OK | os.X_OK, dir_fd=opened):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    finally:
        os.close(opened)


def _is_entry(path: Path) -> bool:
    return is_folder(path) and not path.is_symlink()


def _folders(folder: Path | None) -> list[Path]:
    return [path for path in _listed(folder) if _is_entry(path)]


def _listed(folder: Path | None) -> list[Path]:
    try:
        return [] if folder is None else list(folder.iterdir())
    except OSError:
        return []
