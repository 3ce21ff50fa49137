"""JPEG: cv2 codes the pixels, the segments around them are taken apart and rebuilt here.

A reader takes a whole file and the pixel limit, and returns the picture as stored with its orientation
(1..8); a writer writes an upright photo to an open file and returns what the format could not hold. A failure
is an ImageError that gives the reason alone; the caller adds the path. So it is in every image_* file.
Sources: ITU T.81, JFIF 1.02, EXIF 2.32, ICC.1:2010 annex B.4, Adobe's XMP specification part 3.
"""

import re
import struct
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

import cv2
import numpy as np
from numpy.typing import NDArray

from gpen_core import image_meta as meta
from gpen_core.errors import ImageError
from gpen_core.photo import (
    JpegStyle,
    Photo,
    Subsampling,
    check_decoded,
    check_size,
    decode,
    encode,
    from_cv2,
    read_exif,
    sized_exif,
    sized_xmp,
    to_8_bits,
    to_cv2,
    without_extra_channel,
)

DEFAULT_JPEG = JpegStyle(95, "4:4:4", False)
NO_TRANSPARENCY = "JPEG can't hold its transparency: choose .png, .webp or .tiff"

# Tables K.1 and K.2 of ITU T.81, in zigzag order.
_LUMA_TABLE = (
    *(16, 11, 12, 14, 12, 10, 16, 14, 13, 14, 18, 17, 16, 19, 24, 40, 26, 24, 22, 22, 24, 49, 35, 37, 29, 40),
    *(
        58,
        51,
        61,
        60,
        57,
        51,
        56,
        55,
        64,
        72,
        92,
        78,
        64,
        68,
        87,
        69,
        55,
        56,
        80,
        109,
        81,
        87,
        95,
        98,
        103,
        104,
    ),
    *(103, 62, 77, 113, 121, 112, 100, 120, 92, 101, 103, 99),
)
_CHROMA_TABLE = (17, 18, 18, 24, 21, 24, 47, 26, 26, 47, 99, 66, 56, 66, *(99,) * 50)

_FRAME_MARKERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_PROGRESSIVE_MARKERS = (0xC2, 0xCA)
_NEXT_MARKER = re.compile(rb"\xff+([^\x00\xd0-\xd7\xff])", re.DOTALL)
_SAMPLING: dict[tuple[int, int], tuple[Subsampling, int]] = {
    (1, 1): ("4:4:4", cv2.IMWRITE_JPEG_SAMPLING_FACTOR_444),
    (2, 1): ("4:2:2", cv2.IMWRITE_JPEG_SAMPLING_FACTOR_422),
    (2, 2): ("4:2:0", cv2.IMWRITE_JPEG_SAMPLING_FACTOR_420),
    (1, 2): ("4:4:0", cv2.IMWRITE_JPEG_SAMPLING_FACTOR_440),
    (4, 1): ("4:1:1", cv2.IMWRITE_JPEG_SAMPLING_FACTOR_411),
}
_EXIF_HEAD = b"Exif\0\0"
_XMP_HEAD = b"http://ns.adobe.com/xap/1.0/\0"
_XMP_MORE_HEAD = b"http://ns.adobe.com/xmp/extension/\0"
_ICC_HEAD = b"ICC_PROFILE\0"
_PHOTOSHOP_HEAD = b"Photoshop 3.0\0"
_SEGMENT_ROOM = 65533
_MAX_SIDE = 65500


@dataclass(frozen=True)
class _Frame:
    """The frame header; a component is its horizontal and vertical sampling and its quantisation table."""

    marker: int
    depth: int
    width: int
    height: int
    components: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class _Jpeg:
    """The file taken apart; `needed` are the spans that a decoder needs, `end` is where the picture ends."""

    frame: _Frame
    segments: tuple[tuple[int, bytes], ...]
    needed: tuple[tuple[int, int], ...]
    end: int

    def all(self, marker: int, head: bytes) -> list[bytes]:
        return [data[len(head) :] for found, data in self.segments if found == marker and data.startswith(head)]

    def first(self, marker: int, head: bytes) -> bytes | None:
        return next(iter(self.all(marker, head)), None)


def _parse(data: bytearray) -> _Jpeg:
    frame: _Frame | None = None
    segments: list[tuple[int, bytes]] = []
    needed = [(0, 2)]
    pos = 2
    while True:
        start, pos, marker = _next_marker(data, pos)
        if marker == 0xD9:
            needed.append((start, pos))
            break
        if marker in (0x01, 0xD8):
            continue
        size = int.from_bytes(data[pos : pos + 2], "big")
        if size < 2 or pos + size > len(data):
            raise ImageError("truncated or damaged: a JPEG segment runs past the end of the file")
        payload = bytes(data[pos + 2 : pos + size])
        pos += size
        if marker == 0xDA:
            pos = _next_marker(data, pos)[0]
        else:
            segments.append((marker, payload))
        if marker in _FRAME_MARKERS:
            if frame is not None:
                raise ImageError("a JPEG with several frames (hierarchical) is not supported")
            frame = _parse_frame(marker, payload)
        if _decoder_needs(marker, payload):
            needed.append((start, pos))
    if frame is None:
        raise ImageError("damaged: this JPEG holds no picture")
    return _Jpeg(frame, tuple(segments), tuple(needed), pos)


def _next_marker(data: bytearray, pos: int) -> tuple[int, int, int]:
    """Start, end and code of the next marker that is not a part of entropy-coded data."""
    found = _NEXT_MARKER.search(data, pos)
    if found is None:
        raise ImageError("truncated: this JPEG has no end marker")
    return found.end() - 2, found.end(), found.group(1)[0]


def _decoder_needs(marker: int, payload: bytes) -> bool:
    if marker == 0xE0:
        return payload.startswith(b"JFIF\0")
    # The Adobe segment (0xEE) says whether the channels are RGB or YCbCr.
    return marker == 0xEE or not (0xE0 <= marker <= 0xEF or marker == 0xFE)


def _parse_frame(marker: int, payload: bytes) -> _Frame:
    if len(payload) < 6 or len(payload) < 6 + 3 * payload[5]:
        raise ImageError("damaged: the JPEG frame header is too short")
    depth, height, width, count = struct.unpack_from(">BHHB", payload)
    parts = [payload[6 + 3 * i : 9 + 3 * i] for i in range(count)]
    return _Frame(marker, depth, width, height, tuple((p[1] >> 4, p[1] & 15, p[2]) for p in parts))


def _quantisation_tables(jpeg: _Jpeg) -> dict[int, tuple[int, ...]]:
    tables: dict[int, tuple[int, ...]] = {}
    for payload in jpeg.all(0xDB, b""):
        pos = 0
        while pos < len(payload):
            wide = payload[pos] >> 4
            size = 128 if wide else 64
            if pos + 1 + size > len(payload):
                break
            values = struct.unpack_from(">64H" if wide else ">64B", payload, pos + 1)
            tables.setdefault(payload[pos] & 15, values)
            pos += 1 + size
    return tables


def _estimated_quality(jpeg: _Jpeg) -> int:
    """The libjpeg quality whose scaled standard tables are nearest to the file's."""
    tables = _quantisation_tables(jpeg)
    pairs = zip(jpeg.frame.components, (_LUMA_TABLE, _CHROMA_TABLE), strict=False)
    known = [(tables[part[2]], standard) for part, standard in pairs if part[2] in tables]
    if not known:
        return DEFAULT_JPEG.quality
    wanted = np.array([table for table, _ in known])
    quality = np.arange(1, 101)
    scale = np.where(quality < 50, 5000 // quality, 200 - 2 * quality)[:, None, None]
    scaled = np.clip((np.array([standard for _, standard in known]) * scale + 50) // 100, 1, 255)
    distance = np.abs(scaled - wanted).sum((1, 2))
    # Where several qualities fit alike, the best of them loses nothing.
    return int(quality[np.flatnonzero(distance == distance.min())[-1]])


def _style(jpeg: _Jpeg) -> JpegStyle:
    luma, *chroma = jpeg.frame.components
    known = chroma and all(part[:2] == (1, 1) for part in chroma)
    subsampling = _SAMPLING.get(luma[:2], _SAMPLING[1, 1])[0] if known else DEFAULT_JPEG.subsampling
    return JpegStyle(_estimated_quality(jpeg), subsampling, jpeg.frame.marker in _PROGRESSIVE_MARKERS)


def _profile(jpeg: _Jpeg) -> tuple[bytes | None, tuple[str, ...]]:
    parts = jpeg.all(0xE2, _ICC_HEAD)
    if not parts:
        return None, ()
    by_number = {part[0]: part[2:] for part in parts if len(part) > 2}
    if sorted(by_number) != list(range(1, len(parts) + 1)) or any(part[1] != len(parts) for part in parts):
        return None, ("the colour profile is incomplete and is not kept",)
    return b"".join(by_number[number] for number in sorted(by_number)), ()


def _jfif_dpi(jpeg: _Jpeg) -> tuple[float, float] | None:
    jfif = jpeg.first(0xE0, b"JFIF\0")
    if jfif is None or len(jfif) < 7:
        return None
    scale = {1: 1.0, 2: 2.54}.get(jfif[2], 0.0)
    x, y = struct.unpack_from(">HH", jfif, 3)
    return meta.usable_dpi(x * scale, y * scale)


def jpeg_is_cmyk(data: bytearray) -> bool:
    """Whether the file holds four colour channels, which need a conversion that cv2 can't do."""
    return len(_parse(data).frame.components) == 4


def check_jpeg_size(data: bytearray, max_pixels: int) -> None:
    """Raise ImageError if the picture is too large."""
    frame = _parse(data).frame
    check_size(frame.width, frame.height, max_pixels)


def read_jpeg(data: bytearray, max_pixels: int) -> tuple[Photo, int]:
    jpeg = _parse(data)
    frame = jpeg.frame
    check_size(frame.width, frame.height, max_pixels)
    if frame.depth != 8:
        raise ImageError(f"a {frame.depth}-bit JPEG is not supported: save it as a 16-bit PNG or TIFF")
    if len(frame.components) not in (1, 3):
        raise ImageError(f"a JPEG with {len(frame.components)} channels is not supported")
    view = memoryview(data)
    stripped = b"".join(view[start:stop] for start, stop in jpeg.needed)
    decoded = decode(stripped)
    check_decoded(decoded, frame.width, frame.height)
    _refuse_short_scan(decoded, stripped)
    pixels, _, grey = from_cv2(decoded)
    return _with_metadata(Photo(pixels, grey, None, "jpeg", lossless=False), jpeg, len(data))


def jpeg_metadata_of(photo: Photo, data: bytearray) -> tuple[Photo, int]:
    """The photo with the metadata of that JPEG file, and the orientation it gives."""
    return _with_metadata(photo, _parse(data), len(data))


def _with_metadata(photo: Photo, jpeg: _Jpeg, file_size: int) -> tuple[Photo, int]:
    exif, orientation, exif_notes = read_exif(jpeg.first(0xE1, _EXIF_HEAD))
    whole_icc, icc_notes = _profile(jpeg)
    icc, space_notes = meta.usable_icc(whole_icc, photo.grey)
    xmp, xmp_notes = meta.clean_xmp(jpeg.first(0xE1, _XMP_HEAD))
    photoshop, photoshop_notes = meta.clean_photoshop(b"".join(jpeg.all(0xED, _PHOTOSHOP_HEAD)))
    notes = [*exif_notes, *icc_notes, *space_notes, *xmp_notes, *photoshop_notes]
    if jpeg.first(0xE1, _XMP_MORE_HEAD) is not None:
        notes.append("the extended XMP packet is not kept")
    if jpeg.first(0xE2, b"MPF\0") is not None:
        notes.append("further pictures in the file (MPO, gain map, depth) are not kept")
    elif file_size > jpeg.end:
        notes.append(f"{file_size - jpeg.end} bytes after the picture (motion photo or the like) are not kept")
    complete = replace(
        photo,
        icc=icc,
        exif=exif,
        xmp=xmp,
        photoshop=photoshop,
        dpi=_jfif_dpi(jpeg) or meta.resolution(meta.exif_directory(exif)),
        jpeg=_style(jpeg),
        native=tuple((b"COM", comment) for comment in jpeg.all(0xFE, b"")),
        notes=(*photo.notes, *notes),
    )
    return complete, orientation


def _refuse_short_scan(decoded: NDArray[Any], stripped: bytes) -> None:
    """Raise ImageError if the scan ended early although an end marker follows.

    libjpeg paints what is missing in mid grey without failing, so only a grey corner is suspicious. With more
    bytes before the end marker a complete picture stays the same; one that lacked data changes.
    """
    if not np.all(decoded[-4:, -4:] == 128):
        return
    filler = b"\x5a\xa5\x3c\xc3" * 1024
    fuller = decode(stripped[:-2] + filler + stripped[-2:])
    if not np.array_equal(fuller, decoded):
        raise ImageError("truncated or damaged: the JPEG data ends before the picture does")


def is_transparent(photo: Photo) -> bool:
    """Whether any pixel is less than opaque; an extra channel of unspecified meaning does not count."""
    if photo.alpha is None or photo.alpha_role == "unspecified":
        return False
    return int(photo.alpha.min()) < np.iinfo(photo.alpha.dtype).max


def write_jpeg(file: BinaryIO, photo: Photo, quality: int | None, subsampling: Subsampling | None) -> tuple[str, ...]:
    if is_transparent(photo):
        raise ImageError(NO_TRANSPARENCY)
    photo, extra_notes = without_extra_channel(photo, "JPEG")
    photo, depth_notes = to_8_bits(photo, "JPEG")
    if max(photo.width, photo.height) > _MAX_SIDE:
        raise ImageError(f"{photo.width}x{photo.height} is too large for JPEG ({_MAX_SIDE} a side)")
    style = photo.jpeg or DEFAULT_JPEG
    factors = dict(_SAMPLING.values())
    parameters = [
        *(cv2.IMWRITE_JPEG_QUALITY, style.quality if quality is None else quality),
        *(cv2.IMWRITE_JPEG_SAMPLING_FACTOR, factors[subsampling or style.subsampling]),
        *(cv2.IMWRITE_JPEG_PROGRESSIVE, int(style.progressive)),
        *(cv2.IMWRITE_JPEG_OPTIMIZE, 1),
    ]
    coded = encode(".jpg", to_cv2(photo.pixels, None, photo.grey), parameters)
    segments, notes = _segments(photo)
    file.write(b"\xff\xd8" + _jfif_segment(photo.dpi))
    file.writelines(segments)
    file.write(coded[_after_jfif(coded) :])
    return (*extra_notes, *depth_notes, *notes)


def _after_jfif(coded: memoryview) -> int:
    has_jfif = bytes(coded[2:4]) == b"\xff\xe0"
    return 4 + int.from_bytes(coded[4:6], "big") if has_jfif else 2


def _jfif_segment(dpi: tuple[float, float] | None) -> bytes:
    unit, x, y = _jfif_density(dpi)
    return b"\xff\xe0" + struct.pack(">H5sHBHHBB", 16, b"JFIF\0", 0x0101, unit, x, y, 0, 0)


def _jfif_density(dpi: tuple[float, float] | None) -> tuple[int, int, int]:
    """Unit (0 none, 1 inch, 2 cm) and dots along x and y; by the centimetre where that alone is exact."""
    if dpi is None or max(dpi) > 65000:
        return 0, 1, 1
    inch_x, inch_y = (round(value) for value in dpi)
    cm_x, cm_y = (round(value / 2.54) for value in dpi)
    off_inch = abs(inch_x - dpi[0]) + abs(inch_y - dpi[1])
    off_cm = abs(cm_x * 2.54 - dpi[0]) + abs(cm_y * 2.54 - dpi[1])
    if off_cm < 1e-6 < off_inch:
        return 2, cm_x, cm_y
    return 1, max(1, inch_x), max(1, inch_y)


def _segments(photo: Photo) -> tuple[list[bytes], list[str]]:
    """The segments of the photo's metadata, and notes on blocks that are too large for them."""
    payloads: list[tuple[int, bytes, str]] = []
    notes: list[str] = []
    if (exif := sized_exif(photo)) is not None:
        payloads.append((0xE1, _EXIF_HEAD + exif, "EXIF block"))
    if (xmp := sized_xmp(photo)) is not None:
        payloads.append((0xE1, _XMP_HEAD + xmp, "XMP packet"))
    for part in _parts(photo.photoshop, _SEGMENT_ROOM - len(_PHOTOSHOP_HEAD)):
        payloads.append((0xED, _PHOTOSHOP_HEAD + part, "IPTC block"))
    profile = _parts(photo.icc, _SEGMENT_ROOM - len(_ICC_HEAD) - 2)
    if len(profile) > 255:
        notes.append("the colour profile is too large for JPEG and is not kept")
        profile = []
    for number, part in enumerate(profile, 1):
        payloads.append((0xE2, _ICC_HEAD + bytes((number, len(profile))) + part, "colour profile"))
    if photo.format == "jpeg":
        payloads += [(0xFE, comment, "comment") for _, comment in photo.native]
    segments = []
    for marker, payload, name in payloads:
        if len(payload) > _SEGMENT_ROOM:
            notes.append(f"the {name} is too large for JPEG and is not kept")
            continue
        segments.append(bytes((0xFF, marker)) + (len(payload) + 2).to_bytes(2, "big") + payload)
    return segments, notes


def _parts(data: bytes | None, size: int) -> list[bytes]:
    return [data[i : i + size] for i in range(0, len(data), size)] if data else []
