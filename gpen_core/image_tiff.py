"""TIFF: cv2 (libtiff) only unpacks the pixels; what they mean is decided here.

cv2 multiplies 8-bit colours by the alpha, drops the alpha of grey, flips by the orientation tag and knows no
metadata. So the first directory is read here, and cv2 gets one that describes the same strips in the plainest
way that it returns unchanged. Writing needs nothing but zlib.
Sources: TIFF 6.0, BigTIFF, Adobe's TIFF technical notes 1 and 2 (SubIFDs, deflate).
"""

import struct
import zlib
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from gpen_core import image_meta as meta
from gpen_core.errors import ImageError
from gpen_core.image_meta import Directory, Entry, Field, Layout
from gpen_core.photo import (
    AlphaRole,
    Photo,
    check_decoded,
    check_size,
    decode,
    from_cv2,
    grey_of,
    sized_exif,
    sized_xmp,
)

_WIDTH, _LENGTH, _BITS, _COMPRESSION, _PHOTOMETRIC = 256, 257, 258, 259, 262
_FILL_ORDER = 266
_STRIPS, _ORIENTATION, _SAMPLES, _ROWS, _STRIP_SIZES = 273, 274, 277, 278, 279
_PLANAR, _PREDICTOR, _TILE_WIDTH, _TILE_LENGTH, _TILES, _TILE_SIZES = 284, 317, 322, 323, 324, 325
_SUB_DIRECTORIES, _EXTRA_SAMPLES, _SAMPLE_FORMAT = 330, 338, 339
_XMP, _IPTC_PHOTOSHOP, _ICC, _LAYERS, _DNG_VERSION = 700, 34377, 34675, 37724, 50706

_PACKING = (
    _COMPRESSION,
    _FILL_ORDER,
    _STRIPS,
    _ROWS,
    _STRIP_SIZES,
    292,
    293,
    _PREDICTOR,
    *range(322, 326),
    347,
)
"""How the strips are packed: what any directory for the same strips repeats."""

_COLOUR_MODEL = (320, 529, 530, 531, 532)
_STRUCTURE = frozenset(
    (
        *(
            254,
            255,
            *range(256, 270),
            *range(273, 282),
            *range(284, 294),
            297,
            301,
            *range(317, 327),
            330,
            332,
        ),
        *(*range(333, 348), *range(512, 522), *range(529, 533), _XMP, _IPTC_PHOTOSHOP, _ICC, _LAYERS),
    )
)
"""Fields about the old pixels' layout, and blocks that the photo keeps on their own."""

_BLACK_IS_ZERO, _RGB, _PALETTE, _SEPARATED, _YCBCR = 1, 2, 3, 5, 6
_NAMES = {4: "a transparency mask", 8: "CIE Lab", 9: "ICC Lab", 10: "ITU Lab"}
_JPEG_LIKE = frozenset((6, 7, 34892, 34712, 50001, 50002))
_ROLES: dict[int, AlphaRole] = {0: "unspecified", 1: "premultiplied", 2: "straight"}
_STRIP_BYTES = 1 << 20


@dataclass(frozen=True)
class _Page:
    """The first directory: what its pixels mean, and its fields."""

    layout: Layout
    fields: dict[int, Entry]
    values: dict[int, list[int]]

    def one(self, tag: int, default: int) -> int:
        values = self.values.get(tag)
        return values[0] if values else default

    @property
    def width(self) -> int:
        return self.one(_WIDTH, 0)

    @property
    def height(self) -> int:
        return self.one(_LENGTH, 0)

    @property
    def samples(self) -> int:
        return self.one(_SAMPLES, 1)

    @property
    def depth(self) -> int:
        return self.one(_BITS, 1)

    @property
    def photometric(self) -> int:
        return self.one(_PHOTOMETRIC, -1)

    @property
    def compression(self) -> int:
        return self.one(_COMPRESSION, 1)

    @property
    def unpacked(self) -> bool:
        """Whether the samples lie in the file as they are: not compressed, their bits in the usual order."""
        return self.compression == 1 and self.one(_FILL_ORDER, 1) == 1

    @property
    def tiled(self) -> bool:
        return _TILE_WIDTH in self.values


def _first_page(data: bytearray) -> _Page:
    layout = meta.tiff_layout(data)
    if layout is None:
        raise ImageError("damaged: the TIFF header is incomplete")
    if not meta.is_whole(data, layout, layout.first):
        raise ImageError("truncated or damaged: the TIFF directory runs past the end of the file")
    found = {entry.tag: entry for entry in meta.entries(data, layout, layout.first)}
    values = {
        tag: meta.integers(data, layout, entry)
        for tag, entry in found.items()
        if tag in _STRUCTURE and tag not in (_XMP, _IPTC_PHOTOSHOP, _ICC, _LAYERS)
    }
    return _Page(layout, found, {tag: numbers for tag, numbers in values.items() if numbers})


def _check(page: _Page, data: bytearray, max_pixels: int) -> None:
    if _DNG_VERSION in page.fields or data[8:10] == b"CR" or (page.one(254, 0) & 1 and 330 in page.fields):
        raise ImageError("a camera raw file: develop it to a TIFF, PNG or JPEG first")
    check_size(page.width, page.height, max_pixels)
    if page.photometric in _NAMES:
        raise ImageError(f"{_NAMES[page.photometric]} pixels in a TIFF are not supported: save it as RGB")
    if page.photometric not in (0, _BLACK_IS_ZERO, _RGB, _PALETTE, _SEPARATED, _YCBCR):
        raise ImageError(f"a TIFF of photometric interpretation {page.photometric} is not supported: save it as RGB")
    kinds = set(page.values.get(_SAMPLE_FORMAT, [1]))
    if 3 in kinds:
        raise ImageError(f"{page.depth}-bit floating-point samples are not supported: save it with 8 or 16 bits")
    if not kinds <= {1, 4}:
        raise ImageError("signed or complex samples are not supported: save it with 8 or 16 unsigned bits")
    if len(set(page.values.get(_BITS, [1]))) != 1 or page.depth not in (1, 2, 4, 8, 16):
        depths = "/".join(str(bits) for bits in page.values.get(_BITS, [1])[:4])
        raise ImageError(f"{depths}-bit samples are not supported: save it with 8 or 16 bits")
    colours = 3 if page.photometric in (_RGB, _YCBCR) else 1
    if not colours <= page.samples <= 16 or (page.depth < 8 and page.samples > 1):
        raise ImageError(f"{page.samples} samples of {page.depth} bits a pixel are not supported")
    _check_strips(page, len(data))


def _check_strips(page: _Page, file_size: int) -> None:
    offsets = page.values.get(_TILES if page.tiled else _STRIPS, [])
    sizes = page.values.get(_TILE_SIZES if page.tiled else _STRIP_SIZES, [])
    if page.tiled:
        tile_width, tile_length = page.one(_TILE_WIDTH, 0), page.one(_TILE_LENGTH, 0)
        check_size(tile_width, tile_length, 1 << 28)
        expected = -(-page.width // tile_width) * -(-page.height // tile_length)
    else:
        rows = min(page.one(_ROWS, page.height), page.height)
        check_size(page.width, rows, 1 << 40)
        expected = -(-page.height // rows)
    if page.one(_PLANAR, 1) == 2:
        expected *= page.samples
    if len(offsets) < expected:
        raise ImageError("truncated or damaged: the TIFF lists fewer strips than its size needs")
    if any(offset + size > file_size for offset, size in zip(offsets, sizes, strict=False)):
        raise ImageError("truncated: the pixel data runs past the end of the file")


def _entry_bytes(page: _Page, data: bytearray, tag: int) -> tuple[int, int, bytes]:
    entry = page.fields[tag]
    return entry.kind, entry.count, bytes(data[entry.at : entry.at + entry.size])


def _decode_as(page: _Page, data: bytearray, changes: dict[int, list[int]], keep: tuple[int, ...]) -> NDArray[Any]:
    """What cv2 makes of the file with a directory of the `keep` fields and of `changes`."""
    layout = page.layout
    wanted = {tag: _entry_bytes(page, data, tag) for tag in keep if tag in page.fields and tag not in changes}
    for tag, numbers in changes.items():
        wanted[tag] = (4, len(numbers), struct.pack(f"{layout.order}{len(numbers)}I", *numbers))
    start = len(data) + len(data) % 2
    table = bytearray(struct.pack(layout.order + ("Q" if layout.big else "H"), len(wanted)))
    tail_at = start + layout.count_size + len(wanted) * layout.slot_size + layout.pointer_size
    tail = bytearray()
    for tag in sorted(wanted):
        kind, count, value = wanted[tag]
        table += struct.pack(layout.order + "HH", tag, kind) + struct.pack(layout.pointer, count)
        if len(value) <= layout.pointer_size:
            table += value.ljust(layout.pointer_size, b"\0")
            continue
        table += struct.pack(layout.pointer, tail_at + len(tail))
        tail += value + b"\0" * (len(value) % 2)
    if not layout.big and tail_at + len(tail) >= 1 << 32:
        raise ImageError("the TIFF is too large")
    size = len(data)
    header = bytes(data[:16])
    # The directory is appended and taken off again, because a copy could be hundreds of megabytes.
    data += b"\0" * (start - size) + table + bytes(layout.pointer_size) + tail
    struct.pack_into(layout.pointer, data, 8 if layout.big else 4, start)
    try:
        return decode(data)
    finally:
        del data[size:]
        data[: len(header)] = header


def _samples(page: _Page, data: bytearray) -> NDArray[Any]:
    """H x W x samples of 8 or 16 bits as stored."""
    if page.unpacked:
        return _copied(page, data)
    if page.one(_PLANAR, 1) == 2 and page.samples > 1:
        return _separate_planes(page, data)
    if page.compression in _JPEG_LIKE:
        raise ImageError(
            f"{page.samples} samples a pixel in a TIFF of compression {page.compression} are not supported"
        )
    return _widened(page, data)


def _plain(page: _Page) -> dict[int, list[int]]:
    return {
        _WIDTH: [page.width],
        _LENGTH: [page.height],
        _BITS: [page.depth],
        _PHOTOMETRIC: [_BLACK_IS_ZERO],
        _SAMPLES: [1],
        _PLANAR: [1],
    }


def _copied(page: _Page, data: bytearray) -> NDArray[Any]:
    """The samples of a file without compression (cv2 fails on several rows of such tiles)."""
    pixels = np.empty((page.height, page.width, page.samples), f"u{page.depth // 8}")
    stored = np.dtype(f"{page.layout.order}u{page.depth // 8}")
    separate = page.one(_PLANAR, 1) == 2
    each = 1 if separate else page.samples
    block_width = page.one(_TILE_WIDTH, page.width)
    block_rows = page.one(_TILE_LENGTH, 0) if page.tiled else min(page.one(_ROWS, page.height), page.height)
    places = iter(page.values[_TILES if page.tiled else _STRIPS])
    for first in range(page.samples if separate else 1):
        for y in range(0, page.height, block_rows):
            rows = block_rows if page.tiled else min(block_rows, page.height - y)
            for x in range(0, page.width, block_width):
                place, count = next(places), rows * block_width * each
                if place + count * stored.itemsize > len(data):
                    raise ImageError("truncated: the pixel data runs past the end of the file")
                block = np.frombuffer(data, stored, count, place).reshape(rows, block_width, each)
                target = pixels[y : y + rows, x : x + block_width, first : first + each]
                target[...] = block[: target.shape[0], : target.shape[1]]
    return pixels


def _separate_planes(page: _Page, data: bytearray) -> NDArray[Any]:
    places, sizes = (_TILES, _TILE_SIZES) if page.tiled else (_STRIPS, _STRIP_SIZES)
    each = len(page.values[places]) // page.samples
    planes = np.empty((page.height, page.width, page.samples), f"u{page.depth // 8}")
    for index in range(page.samples):
        part = slice(index * each, (index + 1) * each)
        changes = {tag: page.values[tag][part] for tag in (places, sizes) if tag in page.values}
        plane = _one_channel(_decode_as(page, data, _plain(page) | changes, _PACKING))
        check_decoded(plane, page.width, page.height)
        planes[..., index] = plane
    return planes


def _widened(page: _Page, data: bytearray) -> NDArray[Any]:
    """Interleaved samples read as a grey picture that many times as wide."""
    changes = _plain(page) | {_WIDTH: [page.width * page.samples]}
    if page.tiled:
        changes[_TILE_WIDTH] = [page.one(_TILE_WIDTH, 0) * page.samples]
    predicted = page.one(_PREDICTOR, 1) == 2
    if predicted:
        changes[_PREDICTOR] = [1]
    wide = _one_channel(_decode_as(page, data, changes, _PACKING))
    check_decoded(wide, page.width * page.samples, page.height)
    pixels = wide.reshape(page.height, page.width, page.samples)
    if predicted:
        step = page.one(_TILE_WIDTH, page.width)
        for x in range(0, page.width, step):
            tile = pixels[:, x : x + step]
            np.cumsum(tile, axis=1, dtype=tile.dtype, out=tile)
    return pixels


def _one_channel(decoded: NDArray[Any]) -> NDArray[Any]:
    """The decoded picture, which must have one channel."""
    if decoded.ndim != 2:
        raise ImageError("the picture data is damaged or truncated")
    return decoded


def _pixels(page: _Page, data: bytearray) -> tuple[NDArray[Any], NDArray[Any] | None, bool]:
    """RGB pixels, the first extra sample or None, and whether it is grey."""
    grey = page.photometric in (0, _BLACK_IS_ZERO)
    interleaved = page.one(_PLANAR, 1) == 1 or page.samples == 1
    plain_rgb = page.photometric == _RGB and page.samples == 3 and interleaved and not page.unpacked
    if page.depth < 8 or page.photometric in (_PALETTE, _YCBCR) or plain_rgb:
        changes = {tag: page.values[tag] for tag in (_WIDTH, _LENGTH, _BITS, _PHOTOMETRIC, _SAMPLES, _PLANAR)
                   if tag in page.values}  # fmt: skip
        pixels, _, _ = from_cv2(_decode_as(page, data, changes, _PACKING + _COLOUR_MODEL))
        return pixels, None, grey
    if page.samples == 1 and not page.unpacked:
        decoded = _one_channel(_decode_as(page, data, _plain(page), _PACKING))
        pixels, _, _ = from_cv2(_positive(page, decoded))
        return pixels, None, True
    samples = _samples(page, data)
    colours = 1 if grey else 3
    alpha = np.ascontiguousarray(samples[..., colours]) if page.samples > colours else None
    if grey:
        pixels, _, _ = from_cv2(_positive(page, np.ascontiguousarray(samples[..., 0])))
        return pixels, alpha, True
    return samples if page.samples == 3 else np.ascontiguousarray(samples[..., :3]), alpha, False


def _positive(page: _Page, samples: NDArray[Any]) -> NDArray[Any]:
    return samples if page.photometric == _BLACK_IS_ZERO else np.invert(samples, out=samples)


def tiff_is_cmyk(data: bytearray) -> bool:
    """Whether the first picture holds four printing inks, which need a conversion that cv2 can't do."""
    return _first_page(data).photometric == _SEPARATED


def read_tiff(data: bytearray, max_pixels: int) -> tuple[Photo, int]:
    page = _first_page(data)
    _check(page, data, max_pixels)
    pixels, alpha, grey = _pixels(page, data)
    check_decoded(pixels, page.width, page.height)
    # A fourth sample that nothing is said of is what many writers, OpenCV among them, mean as opacity.
    extra = page.one(_EXTRA_SAMPLES, 2)
    photo = Photo(
        pixels,
        grey,
        alpha,
        "tiff",
        alpha_role="straight" if alpha is None else _ROLES.get(extra, "unspecified"),
    )
    return _with_metadata(photo, page, data)


def tiff_metadata_of(photo: Photo, data: bytearray) -> tuple[Photo, int]:
    """The photo with the metadata of that TIFF file, and the orientation it gives."""
    return _with_metadata(photo, _first_page(data), data)


def check_tiff_size(data: bytearray, max_pixels: int) -> None:
    """Raise ImageError if the first picture is too large."""
    page = _first_page(data)
    check_size(page.width, page.height, max_pixels)


def _with_metadata(photo: Photo, page: _Page, data: bytearray) -> tuple[Photo, int]:
    layout = page.layout

    def block(tag: int) -> bytes | None:
        return _entry_bytes(page, data, tag)[2] if tag in page.fields else None

    icc, icc_notes = meta.usable_icc(block(_ICC), photo.grey)
    xmp, xmp_notes = meta.clean_xmp(block(_XMP))
    photoshop, photoshop_notes = meta.clean_photoshop(block(_IPTC_PHOTOSHOP))
    directory = meta.read_directory(data, layout, layout.first)
    kept = {t: f for t, f in directory.fields.items() if t not in _STRUCTURE and f.kind <= 13}
    notes = [*icc_notes, *xmp_notes, *photoshop_notes]
    if meta.next_directory(data, layout, layout.first)[0]:
        notes.append("only the first of several pages is kept")
    if page.samples > (2 if photo.grey else 4):
        notes.append("further extra channels are not kept")
    if _LAYERS in page.fields:
        notes.append("the Photoshop layers are not kept")
    if _SUB_DIRECTORIES in page.fields:
        notes.append("further pictures inside the TIFF are not kept")
    orientation = page.one(_ORIENTATION, 1)
    dpi = meta.resolution(directory)
    complete = replace(
        photo,
        icc=icc,
        exif=meta.exif_bytes(Directory(kept, directory.children)),
        xmp=xmp,
        photoshop=photoshop,
        dpi=dpi,
        compressed=page.compression != 1,
        lossless=page.compression not in _JPEG_LIKE,
        notes=(*photo.notes, *notes),
    )
    return complete, orientation if 1 <= orientation <= 8 else 1


# --- Writing


def write_tiff(file: BinaryIO, photo: Photo) -> tuple[str, ...]:
    """One picture, deflated with horizontal differences unless the source was a TIFF without compression."""
    channels = (1 if photo.grey else 3) + (photo.alpha is not None)
    row_bytes = photo.width * channels * photo.pixels.dtype.itemsize
    rows = max(1, min(photo.height, _STRIP_BYTES // row_bytes))
    file.write(b"II*\0\0\0\0\0")
    offsets, sizes = [], []
    position = 8
    for y in range(0, photo.height, rows):
        strip = _strip(photo, y, rows)
        offsets.append(position)
        sizes.append(len(strip))
        file.write(strip)
        position += len(strip)
    file.write(b"\0" * (position % 2))
    position += position % 2
    directory = meta.directory_bytes(_directory(photo, channels, rows, offsets, sizes), position)
    if position + len(directory) >= 1 << 32:
        raise ImageError("the picture is too large for TIFF (4 GiB)")
    file.write(directory)
    file.seek(4)
    file.write(struct.pack("<I", position))
    return ()


def _strip(photo: Photo, y: int, rows: int) -> bytes:
    colours = photo.pixels[y : y + rows]
    strip = grey_of(colours)[..., None] if photo.grey else colours
    if photo.alpha is not None:
        strip = np.concatenate([strip, photo.alpha[y : y + rows, :, None]], axis=2)
    little = strip.astype(strip.dtype.newbyteorder("<"), copy=False)
    if not photo.compressed:
        return little.tobytes()
    differences = little.copy()
    differences[:, 1:] -= little[:, :-1]
    return zlib.compress(differences.tobytes(), 4)


def _directory(photo: Photo, channels: int, rows: int, offsets: list[int], sizes: list[int]) -> Directory:
    exif = meta.exif_directory(sized_exif(photo))
    fields = {tag: value for tag, value in exif.fields.items() if tag not in _STRUCTURE}
    if photo.dpi is not None:
        fields |= meta.resolution_fields(photo.dpi)
    fields |= {
        _WIDTH: _longs(photo.width),
        _LENGTH: _longs(photo.height),
        _BITS: _shorts(*[8 * photo.pixels.dtype.itemsize] * channels),
        _COMPRESSION: _shorts(8 if photo.compressed else 1),
        _PHOTOMETRIC: _shorts(_BLACK_IS_ZERO if photo.grey else _RGB),
        _STRIPS: _longs(*offsets),
        _ORIENTATION: _shorts(1),
        _SAMPLES: _shorts(channels),
        _ROWS: _longs(rows),
        _STRIP_SIZES: _longs(*sizes),
        _PLANAR: _shorts(1),
        _PREDICTOR: _shorts(2 if photo.compressed else 1),
        _SAMPLE_FORMAT: _shorts(*[1] * channels),
    }
    if photo.alpha is not None:
        fields[_EXTRA_SAMPLES] = _shorts({role: code for code, role in _ROLES.items()}[photo.alpha_role])
    blocks = {_ICC: photo.icc, _IPTC_PHOTOSHOP: photo.photoshop}
    fields |= {tag: Field(7, len(block), block) for tag, block in blocks.items() if block is not None}
    if (xmp := sized_xmp(photo)) is not None:
        fields[_XMP] = Field(1, len(xmp), xmp)
    return Directory(fields, exif.children)


def _shorts(*values: int) -> Field:
    return Field(3, len(values), struct.pack(f"<{len(values)}H", *values))


def _longs(*values: int) -> Field:
    return Field(4, len(values), struct.pack(f"<{len(values)}I", *values))
