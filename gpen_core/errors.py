"""Every failure a user can cause, each with the exit code that a command ends with."""

from enum import IntEnum


class ExitCode(IntEnum):
    """What the process of a `gpen-core` command returns."""

    OK = 0
    USAGE = 1
    BAD_INPUT = 2
    SOME_FAILED = 3
    NOTHING_DONE = 4
    INTERRUPTED = 130


class GpenError(Exception):
    """A failure explained in one line; `str(error)` is what the user reads."""

    exit_code = ExitCode.BAD_INPUT


class UsageError(GpenError):
    """Arguments that contradict each other or the file."""

    exit_code = ExitCode.USAGE


class CheckpointError(GpenError):
    """A weight file that can't be read, recognised or trusted."""


class MissingWeightsError(GpenError):
    """A weight file that is not on this machine; the message says where to get it."""


class ImageError(GpenError):
    """A picture that can't be read or written, or that a network does not take."""


class DetectorError(GpenError):
    """A detector model of an unknown kind, or one that can't run."""


class DeviceError(GpenError):
    """A device or precision that this machine does not have."""


def one_line(error: BaseException) -> str:
    """What an error says, as one printable line.

    Nothing of this project's own errors is left out. Other packages break their messages into lines, which are joined.
    """
    text = str(error)
    if not isinstance(error, GpenError):
        text = " ".join(filter(None, map(str.strip, text.split("\n"))))
    return printable(text)


def printable(text: str) -> str:
    """Text as one line, whatever a file's name in it holds: line breaks and control characters escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)
