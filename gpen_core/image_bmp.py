"""BMP: cv2 codes all but pictures with an alpha, whose rows are plain enough to be copied."""

import struct
from typing import Any, BinaryIO

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
    to_8_bits,
    to_cv2,
    without_extra_channel,
)

BMP_HEADER_SIZES = (12, 40, 52, 56, 64, 108, 124)

_MASKS = (0xFF0000, 0xFF00, 0xFF, 0xFF000000)
_UNPACKED = (0, 3, 6)
_BITFIELDS = (3, 6)
_V4_SIZE = 108


def _header(data: bytearray) -> tuple[int, int, int, int]:
    """Width, height (negative: the first row is the top one), bits a pixel and compression."""
    size = int.from_bytes(data[14:18], "little")
    if len(data) < 14 + size:
        raise ImageError("truncated: the BMP header is incomplete")
    if size == 12:
        width, height, _, bits = struct.unpack_from("<HHHH", data, 18)
        return width, height, bits, 0
    width, height, _, bits, compression = struct.unpack_from("<iiHHI", data, 18)
    return width, height, bits, compression


def read_bmp(data: bytearray, max_pixels: int) -> tuple[Photo, int]:
    width, height, bits, compression = _header(data)
    check_size(width, abs(height), max_pixels)
    size = int.from_bytes(data[14:18], "little")
    offset = int.from_bytes(data[10:14], "little")
    row_bytes = (width * bits + 31) // 32 * 4
    if compression in _UNPACKED and offset + row_bytes * abs(height) > len(data):
        raise ImageError("truncated: the file is shorter than its BMP header says")
    has_alpha = bits == 32 and compression in _BITFIELDS and size >= 56
    if has_alpha and struct.unpack_from("<4I", data, 54) == _MASKS:
        decoded = _with_alpha(data, width, height, offset)
    else:
        decoded = decode(data)
    check_decoded(decoded, width, abs(height))
    pixels, alpha, grey = from_cv2(decoded)
    dpi = None
    if size >= 40:
        x, y = struct.unpack_from("<ii", data, 38)
        dpi = meta.usable_dpi(x * 0.0254, y * 0.0254)
    has_profile = size >= 124 and bytes(data[70:74]) in (b"DEBM", b"KNIL")
    notes = ("the colour profile of the BMP is not kept",) if has_profile else ()
    return Photo(pixels, grey, alpha, "bmp", dpi=dpi, notes=notes), 1


def _with_alpha(data: bytearray, width: int, height: int, offset: int) -> NDArray[Any]:
    shape = (abs(height), width, 4)
    rows = np.frombuffer(data, np.uint8, 4 * width * abs(height), offset).reshape(shape)
    return np.ascontiguousarray(rows[::-1] if height > 0 else rows)


def write_bmp(file: BinaryIO, photo: Photo) -> tuple[str, ...]:
    photo, extra_notes = without_extra_channel(photo, "BMP")
    photo, depth_notes = to_8_bits(photo, "BMP")
    blocks = {"colour profile": photo.icc, "EXIF block": photo.exif, "XMP packet": photo.xmp}
    notes = [f"BMP can't hold the {name}" for name, block in blocks.items() if block is not None]
    density = struct.pack("<ii", *(round(value / 0.0254) for value in photo.dpi or (0.0, 0.0)))
    picture = to_cv2(photo.pixels, photo.alpha, photo.grey)
    if photo.alpha is None:
        coded = encode(".bmp", picture, [])
        file.write(coded[:38])
        file.write(density)
        file.write(coded[46:])
        return (*extra_notes, *depth_notes, *notes)
    start = 14 + _V4_SIZE
    if start + picture.size >= 1 << 32:
        raise ImageError("the picture is too large for BMP (4 GiB)")
    file.write(b"BM" + struct.pack("<IHHI", start + picture.size, 0, 0, start))
    file.write(struct.pack("<IiiHHII", _V4_SIZE, photo.width, photo.height, 1, 32, 3, picture.size))
    file.write(density + bytes(8) + struct.pack("<4I", *_MASKS) + b"BGRs" + bytes(48))
    file.writelines(picture[y].data for y in range(photo.height - 1, -1, -1))
    return (*extra_notes, *depth_notes, *notes)
