"""Nothing is written over what is read, and nothing twice: every file of a run, known before the first is opened."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gpen_core.errors import UsageError
from gpen_core.files import exists, identity, same_file


@dataclass(frozen=True)
class Read:
    """A file that is read. what: it is, as in "the weights"."""

    path: Path
    what: str


@dataclass(frozen=True)
class Written:
    """A file that is written. what: it is, as in "the report". source: the photo that it is the output of.

    names: for files whose number is not known, a pattern of their names, of which the first group is the path's name.
    """

    path: Path
    what: str
    source: Path | None = None
    names: re.Pattern[str] | None = None


def require_apart(read: Iterable[Read], written: Iterable[Written]) -> None:
    """Raises UsageError if a file would be written over one that is read, or over another one that is written.

    Neither another way to a file hides it, nor a link of either kind, nor another case where that means nothing.
    """
    spelling = _Spelling()
    inputs = list(read)
    outputs = list(written)
    files = [one for one in outputs if one.names is None]
    families = [one for one in outputs if one.names is not None]
    by_spelling = {spelling.of(one.path): one for one in reversed(inputs)}
    by_identity = {found: one for one in reversed(inputs) if (found := identity(one.path)) is not None}
    taken: dict[str, Written] = {}
    for one in files:
        spelled = spelling.of(one.path)
        replaced = by_spelling.get(spelled) or by_identity.get(identity(one.path) or (0, 0))
        if replaced is not None:
            raise _replacing(one, replaced)
        if spelled in taken:
            raise UsageError(f"{one.path}: {_both(taken[spelled].what, one.what)}")
        taken[spelled] = one
    for folder in spelling.folders(one.path for one in (*files, *families)):
        if folder in taken:
            raise UsageError(f"{taken[folder].path}: {taken[folder].what} can't stand where a folder is needed")
    patterns = {one.names for one in families if one.names is not None}
    begins = {spelling.named(one.path): one for one in families}

    def family(folder: str, name: str) -> Written | None:
        """Which of many files a path may be one of."""
        matches = (pattern.fullmatch(name) for pattern in patterns)
        return next((begins[folder, match[1]] for match in matches if match and (folder, match[1]) in begins), None)

    for spelled, replaced in by_spelling.items():
        if (many := family(*os.path.split(spelled))) is not None:
            raise _replacing(Written(replaced.path, many.what), replaced)
    for spelled, other in taken.items():
        if (many := family(*os.path.split(spelled))) is not None:
            raise UsageError(f"{other.path}: {_both(other.what, many.what)}; choose another folder")
    for place in {one.path.parent for one in families}:
        for path in _entries(place):
            linked = by_identity.get(identity(path) or (0, 0))
            if linked is not None and (many := family(*spelling.named(path))) is not None:
                raise _replacing(Written(path, many.what), linked)


class _Spelling:
    """Absolute paths with all links resolved, in lower case where case means nothing."""

    def __init__(self) -> None:
        self._ignores: dict[Path, bool] = {}

    def of(self, path: Path) -> str:
        real = _real(path)
        return self._folded(real.parent, str(real))

    def named(self, path: Path) -> tuple[str, str]:
        """Of a path's folder, and the path's name, which is no link."""
        folder = _real(path.parent)
        return self.of(folder), self._folded(folder, path.name)

    def folders(self, paths: Iterable[Path]) -> set[str]:
        """Of all folders that files lie in."""
        found: set[str] = set()
        for path in {_real(path).parent for path in paths}:
            for folder in (path, *path.parents):
                spelled = self.of(folder)
                if spelled in found:
                    break
                found.add(spelled)
        return found

    def _folded(self, folder: Path, text: str) -> str:
        if folder not in self._ignores:
            self._ignores[folder] = ignores_case(folder)
        return text.casefold() if self._ignores[folder] else text


def ignores_case(folder: Path) -> bool:
    """Whether names that differ in case alone mean one file in a folder, which need not exist yet."""
    for path in (folder, *folder.parents):
        other = path.with_name(path.name.swapcase()) if path.name else path
        if other != path and exists(path):
            return same_file(path, other)
    return False


def _real(path: Path) -> Path:
    try:
        return Path(os.path.realpath(path))
    except (OSError, ValueError):  # a name that no file system takes
        return path.absolute()


def _entries(folder: Path) -> Iterator[Path]:
    try:
        yield from folder.iterdir()
    except OSError:
        return


def _replacing(written: Written, read: Read) -> UsageError:
    if read.path == written.source:
        return UsageError(f"{written.path}: the output would replace its source; choose another with -o")
    which = "" if read.path == written.path else f", {read.path}"
    return UsageError(f"{written.path}: {written.what} would replace {read.what}{which}")


def _both(one: str, other: str) -> str:
    """What is wrong with two things in one place. The same twice is a photo that was named twice."""
    if one == other:
        return f"{one} would be written there twice"
    return f"both {one} and {other} would be written there"
