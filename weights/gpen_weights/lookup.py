"""Where weight files lie on this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpen_core.errors import MissingWeightsError
from gpen_weights.entries import Entry, catalog, find

SUFFIXES = (".safetensors", ".onnx", ".pt2")
DEFAULT_GENERATOR = "gpen-open-512"
"""The name of the bundled weights."""
_FILE_SUFFIXES = (*SUFFIXES, ".pth", ".pt", ".ckpt", ".bin")


@dataclass(frozen=True)
class Presence:
    """A catalog entry and where it lies here, or None."""

    entry: Entry
    path: Path | None

    def __str__(self) -> str:
        place = str(self.path) if self.path else f"not here ({self.entry.way}); {self.entry.source}"
        return f"{self.entry.name:24} {self.entry.kind:10} {place}"


def storage_folder() -> Path:
    """The folder that new weight files go to: $GPEN_CORE_HOME, else the user's cache folder.

    Raises MissingWeightsError where there is neither.
    """
    home = _home()
    if home is None:
        raise MissingWeightsError("this user has no home folder to keep weights in: set GPEN_CORE_HOME to a folder")
    return home


def search_folders() -> list[Path]:
    """Folders that hold weight files, first one first: $GPEN_CORE_HOME, the user's cache, this package."""
    folders = [_environment_home(), _cache_folder(), Path(__file__).parent]
    return [folder for folder in folders if folder is not None]


def resolve(name_or_path: str | os.PathLike[str], *, suffixes: Sequence[str] = SUFFIXES) -> Path:
    """The file meant by a path, or by a name as the catalog has it.

    A path (anything with a folder in it, or that ends like a weight file) is taken as it is, relative to the
    working folder; a bare file name that is not there is looked for in `search_folders`. A name is looked for
    as name + suffix, in `search_folders` only. `suffixes` are the file types that the caller can use, best
    first.

    Raises MissingWeightsError naming the expected file, where it is published, where to put it and the
    command.
    """
    text = os.fspath(name_or_path)
    path = _expand(text)
    is_bare = path.name == text
    if isinstance(name_or_path, os.PathLike) or not is_bare or path.suffix.lower() in _FILE_SUFFIXES:
        return _resolve_path(path, is_bare)
    entry = find(text)
    names = [f"{entry.name if entry else text}{suffix}" for suffix in suffixes]
    found = _first_file([*names, *(name for name in _published(entry) if name.endswith(tuple(suffixes)))])
    if found:
        return found
    raise MissingWeightsError(_how_to_get(entry) if entry else _unknown(text))


def list_entries() -> list[Presence]:
    """Every entry of the catalog, with its place on this machine."""
    return [Presence(entry, _first_file([entry.file, *_published(entry)])) for entry in catalog()]


def find_restorers(suffixes: Sequence[str] = SUFFIXES) -> list[Path]:
    """The generators for restoration that "auto" means: one for each input size that is here, ascending.

    Of several of one size, that with the larger weights; so the original's are preferred to the bundled ones.
    `suffixes` as for `resolve`.
    """
    found: dict[int, Path] = {}
    for entry in sorted(catalog(), key=lambda entry: -(entry.tensor_bytes or 0)):
        facts = entry.generator
        if facts is None or facts.task != "restoration" or facts.input_size in found:
            continue
        path = _first_file([f"{entry.name}{suffix}" for suffix in suffixes])
        if path:
            found[facts.input_size] = path
    return [found[size] for size in sorted(found)]


def default_detector() -> str:
    """The name of the detector meant by "auto".

    RetinaFace-R50, with which GPEN was published, where its converted file is on this machine, else centerface.
    """
    name = "RetinaFace-R50"
    entry = find(name)
    return name if entry and _first_file([entry.file]) else "centerface"


def _published(entry: Entry | None) -> list[str]:
    """Under what other name a file that is used as published may lie here."""
    return [entry.published_file] if entry and entry.way == "place" else []


def _resolve_path(path: Path, is_bare: bool) -> Path:
    if is_file(path):
        return path
    if _holds(path.is_dir):
        raise MissingWeightsError(f"{path}: a folder, not a weight file")
    found = _first_file([path.name]) if is_bare else None
    if found:
        return found
    entry = find(path.stem) if is_bare else None
    found = _first_file([entry.file]) if entry else None
    if found:
        return found
    if _holds(path.exists):
        raise MissingWeightsError(f"{path}: not a regular file")
    raise MissingWeightsError(f"{path}: no such file" + (f"; {_how_to_get(entry)}" if entry else ""))


def _first_file(names: Sequence[str]) -> Path | None:
    paths = (folder / name for folder in search_folders() for name in names)
    return next((path for path in paths if is_file(path)), None)


def is_file(path: Path) -> bool:
    """Whether there is a file; False also where this user may not look."""
    return _holds(path.is_file)


def _holds(test: Callable[[], bool]) -> bool:
    try:
        return test()
    except (OSError, ValueError):  # an unreadable folder, or a name that no file system takes
        return False


def _unknown(name: str) -> str:
    known = ", ".join(entry.name for entry in catalog())
    return f"no weights called {name!r} (a file in this folder: ./{name}); known are {known}"


def _how_to_get(entry: Entry) -> str:
    folder = _home() or Path("$GPEN_CORE_HOME")
    target = folder / entry.file
    if entry.way == "pull":
        return f"{entry.file} is not here: run `gpen-core weights pull {entry.name}`, or put it at {target}"
    if entry.way == "place":
        return f"{entry.file} is not here: get {entry.published_file} from {entry.source} and put it at {target}"
    if entry.way == "bundled":
        return f"{entry.file} is not in this installation: reinstall gpen-core, or put it at {target}"
    legacy = next((path for f in search_folders() if is_file(path := f / entry.published_file)), None)
    if legacy:
        return f"{entry.file} is not here, its source is: run `gpen-core convert {legacy} -o {target}`"
    return (
        f"{entry.file} is not here: get {entry.published_file} from {entry.source} "
        f"and run `gpen-core convert {entry.published_file} -o {target}`"
    )


def _expand(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError:  # ~ of a user without a home folder
        return Path(text)


def _home() -> Path | None:
    return _environment_home() or _cache_folder()


def _environment_home() -> Path | None:
    value = os.environ.get("GPEN_CORE_HOME")
    return _expand(value).absolute() if value else None


def _cache_folder() -> Path | None:
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return Path(local) / "gpen-core" if local else None
    try:
        home = Path.home()
    except RuntimeError:  # a user that the system has no home for, as in many containers
        home = None
    if sys.platform == "darwin":
        return home and home / "Library" / "Caches" / "gpen-core"
    # The XDG specification says to ignore a relative path.
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if Path(cache).is_absolute():
        return Path(cache) / "gpen-core"
    return home and home / ".cache" / "gpen-core"
