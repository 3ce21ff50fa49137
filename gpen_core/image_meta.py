"""The metadata around the pixels: EXIF (a TIFF structure), ICC, XMP and Photoshop (IPTC) blocks.

Sources: TIFF 6.0, BigTIFF, EXIF 2.32, ICC.1:2010, Adobe's XMP and Photoshop file format specifications.
Nothing in here raises for a malformed block: what can't be read is reported as absent.
"""

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from gpen_core.errors import printable

ITEM_SIZES = {
    1: 1,
    2: 1,
    3: 2,
    4: 4,
    5: 8,
    6: 1,
    7: 1,
    8: 2,
    9: 4,
    10: 8,
    11: 4,
    12: 8,
    13: 4,
    16: 8,
    17: 8,
    18: 8,
}
"""Bytes of one item of each TIFF field type."""

_SWAP_UNITS = {3: 2, 8: 2, 4: 4, 5: 4, 9: 4, 10: 4, 11: 4, 13: 4, 12: 8, 16: 8, 17: 8, 18: 8}
_CHILD_TAGS = (0x8769, 0x8825, 0xA005)
_EXIF_IFD = 0x8769
_MAX_DEPTH = 3
_MAX_ENTRIES = 1024


def shown(path: Path) -> str:
    """The path as one printable line, whatever its name holds."""
    return printable(str(path))


@dataclass(frozen=True)
class Entry:
    """One field of a TIFF directory: `slot` is where it stands in the table, `at` where its value lies."""

    tag: int
    kind: int
    count: int
    slot: int
    at: int

    @property
    def size(self) -> int:
        return ITEM_SIZES[self.kind] * self.count


@dataclass(frozen=True)
class Layout:
    """Byte order ("<" or ">") and flavour of a TIFF structure."""

    order: str
    big: bool
    first: int

    @property
    def slot_size(self) -> int:
        return 20 if self.big else 12

    @property
    def count_size(self) -> int:
        return 8 if self.big else 2

    @property
    def pointer(self) -> str:
        return self.order + ("Q" if self.big else "I")

    @property
    def pointer_size(self) -> int:
        return 8 if self.big else 4


def tiff_layout(data: bytes | bytearray) -> Layout | None:
    """What the header says, or None if this is no TIFF structure."""
    order = {b"II": "<", b"MM": ">"}.get(bytes(data[:2]))
    if order is None or len(data) < 8:
        return None
    magic = struct.unpack_from(order + "H", data, 2)[0]
    if magic == 42:
        return Layout(order, False, struct.unpack_from(order + "I", data, 4)[0])
    if magic == 43 and len(data) >= 16 and struct.unpack_from(order + "HH", data, 4) == (8, 0):
        return Layout(order, True, struct.unpack_from(order + "Q", data, 8)[0])
    return None


def entries(data: bytes | bytearray, layout: Layout, offset: int) -> Iterator[Entry]:
    """The directory's fields, but for those of unknown type or whose value lies outside the data."""
    start = offset + layout.count_size
    if offset < 8 or start > len(data):
        return
    count = struct.unpack_from(layout.order + ("Q" if layout.big else "H"), data, offset)[0]
    fits = (len(data) - start) // layout.slot_size
    inline = layout.pointer_size
    for index in range(min(count, fits, _MAX_ENTRIES)):
        slot = start + index * layout.slot_size
        tag, kind = struct.unpack_from(layout.order + "HH", data, slot)
        items = struct.unpack_from(layout.pointer, data, slot + 4)[0]
        if kind not in ITEM_SIZES:
            continue
        at = slot + 4 + inline
        if ITEM_SIZES[kind] * items > inline:
            at = struct.unpack_from(layout.pointer, data, at)[0]
        if at + ITEM_SIZES[kind] * items <= len(data):
            yield Entry(tag, kind, items, slot, at)


def is_whole(data: bytes | bytearray, layout: Layout, offset: int) -> bool:
    """Whether the directory's table and all values that it refers to lie inside the data."""
    _, pointer_at = next_directory(data, layout, offset)
    if pointer_at == 0:
        return False
    slots = range(offset + layout.count_size, pointer_at, layout.slot_size)
    known = sum(struct.unpack_from(layout.order + "H", data, slot + 2)[0] in ITEM_SIZES for slot in slots)
    return known == sum(1 for _ in entries(data, layout, offset))


def next_directory(data: bytes | bytearray, layout: Layout, offset: int) -> tuple[int, int]:
    """Offset of the following directory (0: none), and where that offset is written (0: nowhere)."""
    if offset < 8 or offset + layout.count_size > len(data):
        return 0, 0
    count = struct.unpack_from(layout.order + ("Q" if layout.big else "H"), data, offset)[0]
    at = offset + layout.count_size + count * layout.slot_size
    if at + layout.pointer_size > len(data):
        return 0, 0
    return struct.unpack_from(layout.pointer, data, at)[0], at


def integers(data: bytes | bytearray, layout: Layout, entry: Entry) -> list[int]:
    """The values of an integer field (empty for other types)."""
    code = {1: "B", 3: "H", 4: "I", 13: "I", 16: "Q", 18: "Q"}.get(entry.kind)
    if code is None:
        return []
    return list(struct.unpack_from(f"{layout.order}{entry.count}{code}", data, entry.at))


@dataclass(frozen=True)
class Field:
    """A value on its own, in little-endian bytes."""

    kind: int
    count: int
    value: bytes


@dataclass(frozen=True)
class Directory:
    """A TIFF directory with the directories it points to (EXIF, GPS, interoperability)."""

    fields: dict[int, Field] = field(default_factory=dict)
    children: dict[int, "Directory"] = field(default_factory=dict)


def read_directory(data: bytes | bytearray, layout: Layout, offset: int, depth: int = 0) -> Directory:
    """The directory at `offset` with its children, its values turned little-endian."""
    fields: dict[int, Field] = {}
    children: dict[int, Directory] = {}
    budget = len(data)
    for entry in entries(data, layout, offset):
        budget -= entry.size
        if budget < 0 or entry.tag in fields or entry.tag in children:
            continue
        if entry.tag in _CHILD_TAGS:
            values = integers(data, layout, entry)
            if values and depth < _MAX_DEPTH:
                children[entry.tag] = read_directory(data, layout, values[0], depth + 1)
            continue
        raw = bytes(data[entry.at : entry.at + entry.size])
        unit = _SWAP_UNITS.get(entry.kind, 1)
        if layout.order == ">" and unit > 1:
            raw = np.frombuffer(raw, f"u{unit}").byteswap().tobytes()
        fields[entry.tag] = Field(entry.kind, entry.count, raw)
    return Directory(fields, children)


def directory_bytes(directory: Directory, offset: int) -> bytes:
    """A classic little-endian directory that will lie at `offset`, then its values and its children."""
    tags = sorted([*directory.fields, *directory.children])
    table_size = 2 + 12 * len(tags) + 4
    table = bytearray(struct.pack("<H", len(tags)))
    tail = bytearray()
    for tag in tags:
        place = offset + table_size + len(tail)
        if tag in directory.children:
            table += struct.pack("<HHII", tag, 4, 1, place)
            tail += _even(directory_bytes(directory.children[tag], place))
            continue
        value = directory.fields[tag]
        table += struct.pack("<HHI", tag, value.kind, value.count)
        if len(value.value) <= 4:
            table += value.value.ljust(4, b"\0")
            continue
        table += struct.pack("<I", place)
        tail += _even(value.value)
    return bytes(table + b"\0\0\0\0" + tail)


def _even(data: bytes) -> bytes:
    return data + b"\0" * (len(data) % 2)


def exif_bytes(directory: Directory) -> bytes | None:
    """A little-endian EXIF block of that directory, or None if it is empty."""
    if not directory.fields and not directory.children:
        return None
    return b"II*\0\x08\0\0\0" + directory_bytes(directory, 8)


def exif_directory(exif: bytes | None) -> Directory:
    """The main directory of an EXIF block (empty without one)."""
    layout = tiff_layout(exif or b"")
    if exif is None or layout is None:
        return Directory()
    return read_directory(exif, layout, layout.first)


def clean_exif(exif: bytes) -> tuple[bytes | None, int]:
    """The block with orientation 1 and without its thumbnail, and the orientation it had (1..8).

    Values stay where they are, because maker notes point into the block. None if it is no EXIF block.
    """
    data = bytearray(exif[6:] if exif[:6] == b"Exif\0\0" else exif)
    layout = tiff_layout(data)
    if layout is None or layout.big or not list(entries(data, layout, layout.first)):
        return None, 1
    orientation = 1
    for entry in entries(data, layout, layout.first):
        if entry.tag == 0x112:
            values = integers(data, layout, entry)
            orientation = values[0] if len(values) == 1 and 1 <= values[0] <= 8 else 1
            upright = struct.pack(layout.order + "HHI", 0x112, 3, 1) + struct.pack(layout.order + "HH", 1, 0)
            data[entry.slot : entry.slot + 12] = upright
    if orientation >= 5:
        _swap_resolutions(data, layout)
    return bytes(_without_thumbnail(data, layout)), orientation


def _swap_resolutions(data: bytearray, layout: Layout) -> None:
    slots = {e.tag: e.slot for e in entries(data, layout, layout.first) if e.tag in (0x11A, 0x11B) and e.kind == 5}
    if len(slots) == 2:
        x, y = slots[0x11A] + 8, slots[0x11B] + 8
        data[x : x + 4], data[y : y + 4] = data[y : y + 4], data[x : x + 4]


def _spans(data: bytearray, layout: Layout, first: int) -> list[tuple[int, int]]:
    spans: list[tuple[int, int]] = []
    waiting = {first}
    seen: set[int] = set()
    while waiting and len(seen) <= len(_CHILD_TAGS):
        offset = waiting.pop()
        seen.add(offset)
        _, pointer_at = next_directory(data, layout, offset)
        spans.append((offset, pointer_at + layout.pointer_size))
        for entry in entries(data, layout, offset):
            spans.append((entry.at, entry.at + entry.size))
            if entry.tag in _CHILD_TAGS:
                waiting.update(set(integers(data, layout, entry)[:1]) - seen)
    return spans


def _without_thumbnail(data: bytearray, layout: Layout) -> bytearray:
    second, pointer_at = next_directory(data, layout, layout.first)
    if second == 0:
        return data
    data[pointer_at : pointer_at + 4] = b"\0\0\0\0"
    needed = _spans(data, layout, layout.first)
    doomed = _spans(data, layout, second)
    found = {e.tag: integers(data, layout, e) for e in entries(data, layout, second)}
    for places, sizes in ((0x201, 0x202), (0x111, 0x117)):
        pairs = zip(found.get(places, [])[:64], found.get(sizes, [])[:64], strict=False)
        doomed += [(place, min(place + size, len(data))) for place, size in pairs]
    doomed = [(a, b) for a, b in doomed if 8 <= a < b and all(b <= c or d <= a for c, d in needed)]
    if not doomed:
        return data
    for start, stop in doomed:
        data[start:stop] = bytes(stop - start)
    end = max(stop for _, stop in needed)
    first_doomed, last_doomed = min(doomed)[0], max(b for _, b in doomed)
    if end <= first_doomed and last_doomed + 4 >= len(data):
        return data[:first_doomed]
    return data


def exif_sized(exif: bytes, width: int, height: int) -> bytes:
    """The block with those pixel dimensions wherever it names any."""
    data = bytearray(exif)
    layout = tiff_layout(data)
    if layout is None:
        return exif
    wanted = {0x100: width, 0x101: height, 0xA002: width, 0xA003: height}
    offsets = [layout.first]
    for entry in entries(data, layout, layout.first):
        if entry.tag == _EXIF_IFD:
            offsets += integers(data, layout, entry)[:1]
    for offset in offsets:
        for entry in list(entries(data, layout, offset)):
            if entry.tag in wanted and entry.kind in (3, 4) and entry.count == 1:
                struct.pack_into(layout.order + "HII", data, entry.slot + 2, 4, 1, wanted[entry.tag])
    return bytes(data)


def exif_with_dpi(exif: bytes | None, dpi: tuple[float, float] | None) -> bytes | None:
    """An EXIF block that names the resolution, for files that have no other place for it."""
    if exif is not None or dpi is None:
        return exif
    return exif_bytes(Directory(resolution_fields(dpi)))


def resolution_fields(dpi: tuple[float, float]) -> dict[int, Field]:
    """XResolution, YResolution and ResolutionUnit (inches)."""
    x, y = (Field(5, 1, struct.pack("<II", *_rational(value))) for value in dpi)
    return {0x11A: x, 0x11B: y, 0x128: Field(3, 1, struct.pack("<H", 2))}


def _rational(value: float) -> tuple[int, int]:
    for denominator in (1, 100, 10000):
        if abs(value * denominator - round(value * denominator)) < 1e-6:
            return round(value * denominator), denominator
    return round(value * 10000), 10000


def resolution(directory: Directory) -> tuple[float, float] | None:
    """Dots per inch by the resolution fields, or None if they give none."""
    factor = {1: 0.0, 2: 1.0, 3: 2.54}
    unit = directory.fields.get(0x128)
    scale = factor.get(int.from_bytes(unit.value, "little"), 0.0) if unit else 1.0
    values = []
    for tag in (0x11A, 0x11B):
        value = directory.fields.get(tag)
        if value is None or value.kind != 5 or value.count != 1:
            return None
        above, below = struct.unpack("<II", value.value)
        values.append(above / below * scale if below else 0.0)
    return usable_dpi(values[0], values[1])


def usable_dpi(x: float, y: float) -> tuple[float, float] | None:
    """The pair, or None where it is no resolution that other formats could hold."""
    return (x, y) if 0.1 < x < 1e5 and 0.1 < y < 1e5 else None


def usable_icc(icc: bytes | None, grey: bool) -> tuple[bytes | None, tuple[str, ...]]:
    """The profile if it describes such pixels; else None and a note."""
    if icc is None:
        return None, ()
    if len(icc) < 132 or icc[36:40] != b"acsp" or int.from_bytes(icc[:4], "big") != len(icc):
        return None, ("the colour profile is damaged and is not kept",)
    space = icc[16:20]
    if space == b"RGB " or (space == b"GRAY" and grey):
        return icc, ()
    name = space.decode("ascii", "replace").strip()
    return None, (f"the colour profile is for {name} and does not fit the pixels; it is not kept",)


_XMP_ORIENTATION = re.compile(rb"""(tiff:Orientation\s*(?:=\s*["']|>)\s*)[1-8]""")
_XMP_THUMBNAILS = re.compile(rb"<xmp:Thumbnails>.*?</xmp:Thumbnails>", re.DOTALL)
_XMP_WIDTH = re.compile(rb"""((?:tiff:ImageWidth|exif:PixelXDimension)\s*(?:=\s*["']|>)\s*)\d+""")
_XMP_HEIGHT = re.compile(rb"""((?:tiff:ImageLength|exif:PixelYDimension)\s*(?:=\s*["']|>)\s*)\d+""")
_XMP_PARTS = re.compile(rb"MotionPhoto|MicroVideo|Container:Directory|hdrgm:|GDepth:|xmpNote:HasExtendedXMP")


def clean_xmp(xmp: bytes | None) -> tuple[bytes | None, tuple[str, ...]]:
    """The packet with orientation 1 and no thumbnails; None if it speaks of parts that a new file lacks."""
    if xmp is None:
        return None, ()
    if _XMP_PARTS.search(xmp):
        return None, ("the XMP packet describes further parts of the file (motion, depth, gain map); it is not kept",)
    return _XMP_THUMBNAILS.sub(b"", _XMP_ORIENTATION.sub(rb"\g<1>1", xmp)), ()


def xmp_sized(xmp: bytes, width: int, height: int) -> bytes:
    """The packet with those pixel dimensions wherever it names any."""
    return _XMP_HEIGHT.sub(rb"\g<1>%d" % height, _XMP_WIDTH.sub(rb"\g<1>%d" % width, xmp))


def clean_photoshop(block: bytes | None) -> tuple[bytes | None, tuple[str, ...]]:
    """The Photoshop resources (IPTC among them) without thumbnails; none and a note if they are damaged."""
    if not block:
        return None, ()
    kept = bytearray()
    pos = 0
    while pos + 12 <= len(block):
        name_size = (block[pos + 6] + 2) // 2 * 2
        size_at = pos + 6 + name_size
        if block[pos : pos + 4] not in (b"8BIM", b"MeSa", b"AgHg", b"PHUT", b"DCSR") or size_at + 4 > len(block):
            break
        size = int.from_bytes(block[size_at : size_at + 4], "big")
        end = size_at + 4 + size
        if end > len(block):
            break
        if int.from_bytes(block[pos + 4 : pos + 6], "big") not in (1033, 1036):
            kept += _even(block[pos:end])
        pos = end + size % 2
    if block[pos:].strip(b"\0"):
        return None, ("the IPTC/Photoshop block is damaged and is not kept",)
    return bytes(kept) or None, ()
