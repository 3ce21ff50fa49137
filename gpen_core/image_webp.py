"""WebP: cv2 codes the picture, the RIFF container around it is taken apart and rebuilt here.

Source: RFC 9649.
"""

import io
import struct
from typing import Any, BinaryIO

import cv2
import numpy as np
from numpy.typing import NDArray

from gpen_core import image_meta as meta
from gpen_core.errors import ImageError
from gpen_core.photo import (
    LOSSY_QUALITY,
    Photo,
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
from gpen_core.types import Canvas

_MAX_SIDE = 16383
_ICC_FLAG, _ALPHA_FLAG, _EXIF_FLAG, _XMP_FLAG = 0x20, 0x10, 0x08, 0x04
_PICTURE_CHUNKS = (b"ALPH", b"VP8 ", b"VP8L")


def _chunks(data: memoryview, pos: int) -> list[tuple[bytes, memoryview]]:
    """Kind and payload of each chunk from there on."""
    chunks = []
    while pos + 8 <= len(data):
        size = int.from_bytes(data[pos + 4 : pos + 8], "little")
        if pos + 8 + size > len(data):
            raise ImageError("truncated: a WebP chunk runs past the end of the file")
        chunks.append((bytes(data[pos : pos + 4]), data[pos + 8 : pos + 8 + size]))
        pos += 8 + size + size % 2
    return chunks


def _chunk(kind: bytes, payload: bytes | memoryview) -> bytes:
    return kind + len(payload).to_bytes(4, "little") + bytes(payload) + b"\0" * (len(payload) % 2)


def _extension(flags: int, width: int, height: int) -> bytes:
    size = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return _chunk(b"VP8X", bytes((flags, 0, 0, 0)) + size)


def _file(chunks: list[bytes]) -> list[bytes]:
    size = 4 + sum(len(chunk) for chunk in chunks)
    return [b"RIFF" + size.to_bytes(4, "little") + b"WEBP", *chunks]


def _picture_size(kind: bytes, payload: memoryview) -> tuple[int, int]:
    if kind == b"VP8 " and len(payload) >= 10 and bytes(payload[3:6]) == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", payload, 6)
        return width & 0x3FFF, height & 0x3FFF
    if kind == b"VP8L" and len(payload) >= 5 and payload[0] == 0x2F:
        bits = int.from_bytes(payload[1:5], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    raise ImageError("damaged: the WebP picture has no valid header")


def _first_frame(found: dict[bytes, memoryview]) -> dict[bytes, memoryview]:
    """The chunks of an animation's first picture, which must cover the whole canvas."""
    frame, canvas = found.get(b"ANMF"), found.get(b"VP8X")
    if frame is None or canvas is None or len(frame) < 16 or len(canvas) < 10:
        raise ImageError("damaged: this animated WebP holds no picture")
    if bytes(frame[:6]) != bytes(6) or frame[6:12] != canvas[4:10]:
        raise ImageError("the first picture of this animated WebP covers only a part of it")
    return dict(reversed(_chunks(frame, 16)))


def read_webp(data: bytearray, max_pixels: int) -> tuple[Photo, int]:
    size = int.from_bytes(data[4:8], "little") + 8
    if size > len(data):
        raise ImageError("truncated: the file is shorter than its WebP header says")
    # Reversed, so that the first of several chunks of a kind stays.
    found = dict(reversed(_chunks(memoryview(data)[:size], 12)))
    notes: tuple[str, ...] = ()
    if b"ANIM" in found or b"ANMF" in found:
        found |= _first_frame(found)
        notes = ("only the first picture of the animation is kept",)
    kind = b"VP8L" if b"VP8L" in found else b"VP8 "
    if kind not in found:
        raise ImageError("damaged: this WebP holds no picture")
    width, height = _picture_size(kind, found[kind])
    check_size(width, height, max_pixels)
    still = [_chunk(kind, found[kind])]
    if kind == b"VP8 " and b"ALPH" in found:
        still = [_extension(_ALPHA_FLAG, width, height), _chunk(b"ALPH", found[b"ALPH"]), *still]
    decoded = decode(b"".join(_file(still)))
    check_decoded(decoded, width, height)
    pixels, alpha, _ = from_cv2(decoded)
    blocks = {name: bytes(found[name]) for name in (b"ICCP", b"EXIF", b"XMP ") if name in found}
    exif, orientation, exif_notes = read_exif(blocks.get(b"EXIF"))
    icc, icc_notes = meta.usable_icc(blocks.get(b"ICCP"), False)
    xmp, xmp_notes = meta.clean_xmp(blocks.get(b"XMP "))
    photo = Photo(
        pixels,
        False,
        alpha,
        "webp",
        icc=icc,
        exif=exif,
        xmp=xmp,
        dpi=meta.resolution(meta.exif_directory(exif)),
        lossless=kind == b"VP8L",
        notes=(*notes, *exif_notes, *icc_notes, *xmp_notes),
    )
    return photo, orientation


def write_webp(file: BinaryIO, photo: Photo, quality: int | None) -> tuple[str, ...]:
    photo, extra_notes = without_extra_channel(photo, "WebP")
    photo, depth_notes = to_8_bits(photo, "WebP")
    if max(photo.width, photo.height) > _MAX_SIDE:
        raise ImageError(f"{photo.width}x{photo.height} is too large for WebP ({_MAX_SIDE} a side)")
    coded, exact_notes = _picture(photo, quality)
    picture = [(kind, payload) for kind, payload in _chunks(coded, 12) if kind in _PICTURE_CHUNKS]
    blocks = (
        (b"ICCP", _ICC_FLAG, photo.icc),
        (b"EXIF", _EXIF_FLAG, sized_exif(photo, holds_dpi=False)),
        (b"XMP ", _XMP_FLAG, sized_xmp(photo)),
    )
    present = [(kind, flag, block) for kind, flag, block in blocks if block is not None]
    chunks = [_chunk(kind, payload) for kind, payload in picture]
    if present or len(picture) > 1:
        flags = sum(flag for _, flag, _ in present) | (_ALPHA_FLAG if photo.alpha is not None else 0)
        before = [_chunk(kind, block) for kind, _, block in present if kind == b"ICCP"]
        after = [_chunk(kind, block) for kind, _, block in present if kind != b"ICCP"]
        chunks = [_extension(flags, photo.width, photo.height), *before, *chunks, *after]
    file.writelines(_file(chunks))
    return (*extra_notes, *depth_notes, *exact_notes)


def _picture(photo: Photo, quality: int | None) -> tuple[memoryview, tuple[str, ...]]:
    lossless = photo.lossless and quality is None
    notes: tuple[str, ...] = ()
    if lossless and photo.alpha is not None and bool((photo.alpha == 0).any()):
        # cv2 has no switch that keeps colours where the alpha is 0.
        if (exact := _exact(photo.pixels, photo.alpha)) is not None:
            return memoryview(exact), ()
        notes = ('colours under full transparency are not kept: pip install "gpen-core[formats]" keeps them',)
    # Above 100 means lossless to cv2.
    level = 101 if lossless else quality or LOSSY_QUALITY
    return encode(".webp", to_cv2(photo.pixels, photo.alpha, False), [cv2.IMWRITE_WEBP_QUALITY, level]), notes


def _exact(pixels: Canvas, alpha: NDArray[Any]) -> bytes | None:
    """A lossless file that keeps every colour; None without Pillow."""
    try:
        from PIL import Image
    except ImportError:
        return None
    buffer = io.BytesIO()
    Image.fromarray(np.dstack([pixels, alpha])).save(buffer, "WEBP", lossless=True, exact=True)
    return buffer.getvalue()
