"""What an ONNX file keeps in other files, found without opening those or loading the network.

An ONNX file may name any path of the machine as the home of its weights, and onnxruntime opens it, some versions
wherever it leads. So such files are refused before onnxruntime sees them. This reads the file as what it is, a message
of protocol buffers, and looks only at the fields below.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

from gpen_core.errors import GpenError
from gpen_core.files import NOT_UTF8, is_utf8

# By kind of message: the fields that hold further ones, and of which kind.
NESTED = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {13: "place"},
    "place": {},
}
DATA_LOCATION, KEY, VALUE = 14, 1, 2
VARINT, EIGHT_BYTES, MESSAGE, FOUR_BYTES = 0, 1, 2, 5
LONGEST = 10
"""Bytes of a varint at most."""


def require_whole(path: Path, failure: type[GpenError]) -> None:
    """Raises `failure` for an ONNX file that keeps weights in other files, or is no ONNX file. Opens no other file."""
    if not is_utf8(path):
        raise failure(f"{path}: {NOT_UTF8}")
    try:
        if path.exists() and not path.is_file():
            raise failure(f"{path}: not a file")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            elsewhere = outside(content)
    except OSError as error:
        raise failure(f"{path}: {error.strerror or error}") from None
    except ValueError:
        raise failure(f"{path}: not a usable ONNX model (it can't be read as one)") from None
    if elsewhere is not None:
        named = f" ({elsewhere})" if elsewhere else ""
        raise failure(
            f"{path}: its weights are in another file{named}, which is not opened; "
            f"save it as one file (onnx.load and onnx.save_model do)"
        )


def outside(content: bytes | mmap.mmap) -> str | None:
    """The first path that a model gives for its weights; "" if it gives none but should, None if all are inside.

    Raises ValueError for what is no model.
    """
    waiting = [("model", 0, len(content))]
    named = None
    while waiting:
        kind, start, end = waiting.pop()
        texts = {}
        for field, wire, first, last in _fields(content, start, end):
            if kind == "tensor" and field == DATA_LOCATION and wire == VARINT and first:
                named = named or ""
            if wire != MESSAGE:
                continue
            if kind == "place":
                texts[field] = bytes(content[first:last]).decode("utf-8", "replace")
            elif field in NESTED[kind]:
                waiting.append((NESTED[kind][field], first, last))
        if kind == "place":
            named = named or (texts.get(VALUE, "") if texts.get(KEY) == "location" else "")
    return named


def _fields(content: bytes | mmap.mmap, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """(number, wire type, first byte, end) of each field of a message; of a number, its value is in the third place."""
    while start < end:
        tag, start = _varint(content, start, end)
        # As the readers of protocol buffers have it, whatever else is set.
        tag &= 0xFFFFFFFF
        number, wire = tag >> 3, tag & 7
        if wire == VARINT:
            value, start = _varint(content, start, end)
            yield number, wire, value & 0xFFFFFFFF, start
            continue
        if wire == MESSAGE:
            size, start = _varint(content, start, end)
        elif wire in (EIGHT_BYTES, FOUR_BYTES):
            size = 8 if wire == EIGHT_BYTES else 4
        else:
            raise ValueError("a field of unknown type")
        if number == 0 or start + size > end:
            raise ValueError("a field beyond its message")
        yield number, wire, start, start + size
        start += size


def _varint(content: bytes | mmap.mmap, start: int, end: int) -> tuple[int, int]:
    """A number and where it ends."""
    value = 0
    for place in range(start, min(end, start + LONGEST)):
        value |= (content[place] & 0x7F) << (7 * (place - start))
        if content[place] < 0x80:
            return value, place + 1
    raise ValueError("a number that does not end")
