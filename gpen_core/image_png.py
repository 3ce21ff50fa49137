"""PNG: cv2 codes the pixels, the chunks around them are checked, taken apart and rebuilt here.

Sources: PNG specification, third edition; ImageMagick's "raw profiles" as text.
"""

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import cv2
import numpy as np
from numpy.typing import NDArray

from gpen_core import image_meta as meta
from gpen_core.errors import ImageError
from gpen_core.photo import (
    Photo,
    check_decoded,
    check_size,
    decode,
    encode,
    from_cv2,
    grey_of,
    read_exif,
    sized_exif,
    sized_xmp,
    to_cv2,
    without_extra_channel,
)

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"

_GREY, _RGB, _PALETTE, _GREY_ALPHA, _RGBA = 0, 2, 3, 4, 6
_DEPTHS = {
    _GREY: (1, 2, 4, 8, 16),
    _RGB: (8, 16),
    _PALETTE: (1, 2, 4, 8),
    _GREY_ALPHA: (8, 16),
    _RGBA: (8, 16),
}
_CRITICAL = (b"IHDR", b"PLTE", b"IDAT", b"IEND")
_TEXTS = (b"tEXt", b"zTXt", b"iTXt")
_NATIVE = (b"gAMA", b"cHRM", b"sRGB", b"cICP", *_TEXTS)
_ANIMATION = (b"acTL", b"fcTL", b"fdAT")
_XMP_KEY = b"XML:com.adobe.xmp\0"
_RAW_PROFILE_KEYS = (b"Raw profile type exif\0", b"Raw profile type APP1\0")
_MAX_INFLATED = 64 << 20
_HEADER_END = 33


@dataclass(frozen=True)
class _Png:
    """The file taken apart; `needed` are the spans that a decoder needs, `chunks` the rest but animation."""

    width: int
    height: int
    depth: int
    colour: int
    chunks: tuple[tuple[bytes, bytes], ...]
    needed: tuple[tuple[int, int], ...]
    notes: tuple[str, ...]

    def first(self, kind: bytes) -> bytes | None:
        return next((data for name, data in self.chunks if name == kind), None)


def _chunk_spans(data: bytearray) -> Iterator[tuple[bytes, int, int]]:
    """Kind, start and end of each whole chunk up to and with IEND."""
    pos = len(PNG_SIGNATURE)
    while True:
        if pos + 12 > len(data):
            raise ImageError("truncated: this PNG has no end chunk")
        kind = bytes(data[pos + 4 : pos + 8])
        end = pos + 12 + int.from_bytes(data[pos : pos + 4], "big")
        if end > len(data):
            raise ImageError("truncated: a PNG chunk runs past the end of the file")
        yield kind, pos, end
        if kind == b"IEND":
            return
        pos = end


def _parse(data: bytearray, max_pixels: int) -> _Png:
    if len(data) < _HEADER_END:
        raise ImageError("truncated: the PNG header is incomplete")
    width, height, depth, colour = struct.unpack_from(">IIBB", data, 16)
    if data[8:16] != b"\0\0\0\x0dIHDR" or depth not in _DEPTHS.get(colour, ()):
        raise ImageError("damaged: the PNG header is not valid")
    check_size(width, height, max_pixels)
    view = memoryview(data)
    chunks: list[tuple[bytes, bytes]] = []
    needed = [(0, len(PNG_SIGNATURE))]
    notes: set[str] = set()
    for kind, start, end in _chunk_spans(data):
        critical = kind in _CRITICAL
        if zlib.crc32(view[start + 4 : end - 4]) != int.from_bytes(view[end - 4 : end], "big"):
            if critical:
                raise ImageError(f"damaged: the checksum of a PNG {kind.decode()} chunk is wrong")
            notes.add("a damaged PNG chunk is not kept")
        elif kind in _ANIMATION:
            notes.add("only the first picture of the animation is kept")
        elif critical or (kind == b"tRNS" and colour == _PALETTE):
            needed.append((start, end))
        elif not kind[0] & 0x20:
            raise ImageError(f"this PNG needs the unknown chunk {kind!r}")
        else:
            chunks.append((kind, bytes(view[start + 8 : end - 4])))
    return _Png(width, height, depth, colour, tuple(chunks), tuple(needed), tuple(sorted(notes)))


def _inflate(data: bytes) -> bytes | None:
    inflater = zlib.decompressobj()
    try:
        inflated = inflater.decompress(data, _MAX_INFLATED)
    except zlib.error:
        return None
    return inflated if inflater.eof else None


def _text(kind: bytes, data: bytes, key: bytes) -> bytes | None:
    """The text stored under that zero-ended keyword, if this chunk holds it."""
    if kind not in _TEXTS or not data.startswith(key):
        return None
    rest = data[len(key) :]
    if kind == b"tEXt":
        return rest
    if kind == b"zTXt":
        return _inflate(rest[1:])
    parts = rest[2:].split(b"\0", 2)
    if len(parts) != 3:
        return None
    return _inflate(parts[2]) if rest[0] else parts[2]


def _raw_profile(text: bytes) -> bytes | None:
    """ImageMagick's way to store a block as text: its name, its size, then hexadecimal digits."""
    words = text.split(None, 2)
    if len(words) != 3:
        return None
    try:
        return bytes.fromhex(words[2].decode("ascii"))
    except ValueError:
        return None


def _exif(png: _Png) -> bytes | None:
    if (exif := png.first(b"eXIf")) is not None:
        return exif
    texts = (_text(kind, data, key) for kind, data in png.chunks for key in _RAW_PROFILE_KEYS)
    profiles = (_raw_profile(text) for text in texts if text is not None)
    return next((profile for profile in profiles if profile is not None and profile[:4] == b"Exif"), None)


def _xmp(png: _Png) -> bytes | None:
    texts = (_text(kind, data, _XMP_KEY) for kind, data in png.chunks)
    return next((text for text in texts if text is not None), None)


def _dpi(png: _Png) -> tuple[float, float] | None:
    density = png.first(b"pHYs")
    if density is None or len(density) != 9 or density[8] != 1:
        return None
    x, y = struct.unpack_from(">II", density)
    return meta.usable_dpi(x * 0.0254, y * 0.0254)


def _profile(png: _Png) -> tuple[bytes | None, tuple[str, ...]]:
    chunk = png.first(b"iCCP")
    if chunk is None:
        return None, ()
    profile = _inflate(chunk.partition(b"\0")[2][1:])
    return profile, () if profile is not None else ("the colour profile is damaged and is not kept",)


def _key_alpha(png: _Png, pixels: NDArray[Any]) -> NDArray[Any] | None:
    """The alpha of a grey or RGB picture with one transparent colour (cv2 would ignore it in grey)."""
    key = png.first(b"tRNS")
    channels = {_GREY: 1, _RGB: 3}.get(png.colour, 0)
    if key is None or channels == 0 or len(key) != 2 * channels:
        return None
    values = np.array(struct.unpack(f">{channels}H", key)) & ((1 << png.depth) - 1)
    if png.depth < 8:
        values = values * (255 // ((1 << png.depth) - 1))
    alpha = np.full(pixels.shape[:2], np.iinfo(pixels.dtype).max, pixels.dtype)
    alpha[(pixels == values.astype(pixels.dtype)).all(2)] = 0
    return alpha


def _native(png: _Png) -> tuple[tuple[bytes, bytes], ...]:
    elsewhere = (_XMP_KEY, *_RAW_PROFILE_KEYS)
    return tuple((kind, data) for kind, data in png.chunks if kind in _NATIVE and not data.startswith(elsewhere))


def read_png(data: bytearray, max_pixels: int) -> tuple[Photo, int]:
    png = _parse(data, max_pixels)
    view = memoryview(data)
    decoded = decode(b"".join(view[start:stop] for start, stop in png.needed))
    check_decoded(decoded, png.width, png.height)
    pixels, alpha, _ = from_cv2(decoded)
    del decoded
    grey = png.colour in (_GREY, _GREY_ALPHA)
    exif, orientation, exif_notes = read_exif(_exif(png))
    whole_icc, icc_notes = _profile(png)
    icc, space_notes = meta.usable_icc(whole_icc, grey)
    xmp, xmp_notes = meta.clean_xmp(_xmp(png))
    photo = Photo(
        pixels,
        grey,
        _key_alpha(png, pixels) if alpha is None else alpha,
        "png",
        icc=icc,
        exif=exif,
        xmp=xmp,
        dpi=_dpi(png) or meta.resolution(meta.exif_directory(exif)),
        native=_native(png),
        notes=(*png.notes, *exif_notes, *icc_notes, *space_notes, *xmp_notes),
    )
    return photo, orientation


def _chunk(kind: bytes, data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")


def _metadata(photo: Photo) -> Iterator[bytes]:
    if photo.icc is not None:
        yield _chunk(b"iCCP", b"ICC profile\0\0" + zlib.compress(photo.icc))
    for kind, data in photo.native:
        if photo.format == "png" and (photo.icc is None or kind != b"sRGB"):
            yield _chunk(kind, data)
    if photo.dpi is not None:
        x, y = (round(value / 0.0254) for value in photo.dpi)
        yield _chunk(b"pHYs", struct.pack(">IIB", x, y, 1))
    if (exif := sized_exif(photo)) is not None:
        yield _chunk(b"eXIf", exif)
    if (xmp := sized_xmp(photo)) is not None:
        yield _chunk(b"iTXt", _XMP_KEY + b"\0\0\0\0" + xmp)


def write_png(file: BinaryIO, photo: Photo) -> tuple[str, ...]:
    photo, notes = without_extra_channel(photo, "PNG")
    metadata = list(_metadata(photo))
    if photo.grey and photo.alpha is not None:
        _write_grey_alpha(file, photo, photo.alpha, metadata)
        return notes
    # cv2's own choice (run-length coding) makes files several times larger and saves no time.
    parameters = [cv2.IMWRITE_PNG_STRATEGY, cv2.IMWRITE_PNG_STRATEGY_DEFAULT, cv2.IMWRITE_PNG_COMPRESSION, 4]
    coded = encode(".png", to_cv2(photo.pixels, photo.alpha, photo.grey), parameters)
    file.write(coded[:_HEADER_END])
    file.writelines(metadata)
    file.write(coded[_HEADER_END:])
    return notes


def _write_grey_alpha(file: BinaryIO, photo: Photo, alpha: NDArray[Any], metadata: list[bytes]) -> None:
    """Colour type 4, which cv2 can't write. Every row is stored as its difference from the one above."""
    depth = 8 * photo.pixels.dtype.itemsize
    header = struct.pack(">IIBBBBB", photo.width, photo.height, depth, _GREY_ALPHA, 0, 0, 0)
    file.write(PNG_SIGNATURE + _chunk(b"IHDR", header))
    file.writelines(metadata)
    deflater = zlib.compressobj(4)
    row_bytes = 2 * photo.width * photo.pixels.dtype.itemsize
    above = np.zeros((1, row_bytes), np.uint8)
    for y in range(0, photo.height, 64):
        block = np.dstack([grey_of(photo.pixels[y : y + 64]), alpha[y : y + 64]])
        rows = block.astype(block.dtype.newbyteorder(">")).view(np.uint8).reshape(-1, row_bytes)
        filtered = np.full((len(rows), 1 + row_bytes), 2, np.uint8)
        filtered[:, 1:] = rows - np.vstack([above, rows[:-1]])
        above = rows[-1:]
        file.write(_chunk(b"IDAT", deflater.compress(filtered.tobytes())))
    file.write(_chunk(b"IDAT", deflater.flush()) + _chunk(b"IEND", b""))
