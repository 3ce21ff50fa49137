"""Reading and writing photos so that nothing of the file is lost, rotated, tinted or half-written.

`read` decides the format by content, refuses what is damaged or too large, and turns the picture upright;
`write` puts it back with its profile, metadata, depth and transparency, whole or not at all.
"""

import codecs
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import cv2
import numpy as np
from numpy.typing import NDArray

from gpen_core.errors import ImageError
from gpen_core.files import replacing
from gpen_core.image_bmp import BMP_HEADER_SIZES, read_bmp, write_bmp
from gpen_core.image_extras import (
    read_avif,
    read_cmyk_jpeg,
    read_cmyk_tiff,
    read_gif,
    read_heic,
    write_avif,
    write_heic,
)
from gpen_core.image_jpeg import NO_TRANSPARENCY, is_transparent, jpeg_is_cmyk, read_jpeg, write_jpeg
from gpen_core.image_meta import shown
from gpen_core.image_png import PNG_SIGNATURE, read_png, write_png
from gpen_core.image_tiff import read_tiff, tiff_is_cmyk, write_tiff
from gpen_core.image_webp import read_webp, write_webp
from gpen_core.photo import JpegStyle, Photo, Subsampling, straight_alpha

__all__ = [
    "SUFFIXES",
    "WRITABLE",
    "JpegStyle",
    "Photo",
    "format_of",
    "has_quality",
    "is_picture",
    "read",
    "require_room",
    "shown",
    "write",
]

_FORMATS = {
    **dict.fromkeys((".jpg", ".jpeg", ".jpe", ".jfif"), "jpeg"),
    ".png": "png",
    ".webp": "webp",
    **dict.fromkeys((".tif", ".tiff"), "tiff"),
    **dict.fromkeys((".bmp", ".dib"), "bmp"),
    ".avif": "avif",
    **dict.fromkeys((".heic", ".heif", ".hif"), "heic"),
}

WRITABLE = frozenset(_FORMATS)
"""Suffixes, in lower case, that `write` knows."""

SUFFIXES = WRITABLE | {".gif", ".apng", ".mpo"}
"""Suffixes, in lower case, that pictures which `read` knows usually have."""

_AVIF_BRANDS = frozenset((b"avif", b"avis"))
_HEIC_BRANDS = frozenset((b"heic", b"heix", b"hevc", b"heim", b"heis", b"mif1", b"msf1"))
_OTHERS = {
    b"%PDF": "a PDF",
    b"PK\x03\x04": "a ZIP archive",
    b"\x1f\x8b": "a gzip archive",
    b"8BPS": "a Photoshop document",
    b"\0\0\0\x0cJXL ": "a JPEG XL picture",
    b"\xff\x0a": "a JPEG XL picture",
    b"\0\0\0\x0cjP  ": "a JPEG 2000 picture",
    b"v/1\x01": "an OpenEXR picture",
    b"#?RADIANCE": "a Radiance picture",
}


def read(path: Path, *, max_pixels: int = 200_000_000) -> Photo:
    """The photo in that file, upright.

    max_pixels: pictures whose header claims more are refused before anything is decoded.
    Raises ImageError, one line with the path, for a file that is missing, unreadable, not a picture, damaged,
    truncated, too large or of a kind that is not supported.
    """
    try:
        return _upright(*_decoded(_contents(path), max_pixels))
    except ImageError as error:
        raise ImageError(f"{shown(path)}: {error}") from None
    except OSError as error:
        raise ImageError(f"{shown(path)}: {_reason(error)}") from None
    except MemoryError:
        raise ImageError(f"{shown(path)}: not enough memory to decode it") from None


def is_picture(path: Path) -> bool:
    """Whether a file's first bytes are those of a picture that `read` knows; False for one that can't be read."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return _kind(file.read(512)) is not None
    except (OSError, ValueError):
        return False


def write(
    path: Path,
    photo: Photo,
    *,
    format: str | None = None,
    quality: int | None = None,
    subsampling: Subsampling | None = None,
) -> tuple[str, ...]:
    """Write the photo with everything that the format can hold; returns what it could not, one sentence each.

    The file appears whole or not at all. The format is that of the path's suffix unless given by name.
    quality: 1..100; by default that of the source JPEG, 95 for a new JPEG, lossless for a WebP of a lossless
        source, otherwise 90.
    subsampling: of a JPEG's chroma; by default that of the source JPEG, 4:4:4 for a new one.
    Raises ImageError, one line with the path, for an unknown suffix, transparency in a JPEG, and whatever
    the file system refuses.
    """
    try:
        writer = _writer(path, format, quality, subsampling)
        with replacing(path) as temporary, temporary.open("wb") as file:
            return writer(file, photo)
    except ImageError as error:
        raise ImageError(f"{shown(path)}: {error}") from None
    except OSError as error:
        raise ImageError(f"{shown(path)}: {_reason(error)}") from None


def format_of(path: Path) -> str | None:
    """The format that a file's suffix stands for, by the name that `Photo` has for it; None for one that none has."""
    return _FORMATS.get(path.suffix.lower())


def has_quality(path: Path) -> bool:
    """Whether a file of this name may be of a format that is written with a quality."""
    return format_of(path) not in ("png", "tiff", "bmp")


def require_room(path: Path, photo: Photo, *, format: str | None = None) -> None:
    """Raises ImageError, one line with the path, where `write` would refuse the photo for its transparency.

    So it can be refused before work is put into it. path, format: as `write` has them.
    """
    name = format_of(path) if format is None else format
    if name == "jpeg" and is_transparent(photo):
        raise ImageError(f"{shown(path)}: {NO_TRANSPARENCY}")


def _reason(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "no such file or folder"
    if isinstance(error, IsADirectoryError):
        return "is a folder, not a picture"
    return (error.strerror or str(error)).lower()


def _contents(path: Path) -> bytearray:
    """The whole file, once its first bytes look like a picture."""
    try:
        status = path.stat()
    except ValueError:
        raise ImageError("not a possible file name") from None
    if stat.S_ISDIR(status.st_mode):
        raise ImageError("is a folder, not a picture")
    if not stat.S_ISREG(status.st_mode):
        raise ImageError("is not a regular file")
    if status.st_size == 0:
        raise ImageError("the file is empty (0 bytes)")
    with path.open("rb") as file:
        head = file.read(512)
        if _kind(head) is None:
            raise ImageError(_what_it_is(head))
        file.seek(0)
        data = bytearray(status.st_size)
        size = file.readinto(data)
    if size != len(data):
        raise ImageError("the file changed while it was read")
    return data


def _kind(head: bytes | bytearray) -> str | None:
    """The format by the file's first bytes, or None."""
    if head[:3] == b"\xff\xd8\xff":
        return "jpeg"
    if head[:8] == PNG_SIGNATURE:
        return "png"
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "webp"
    if head[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"):
        return "tiff"
    if head[:2] == b"BM" and len(head) > 18 and int.from_bytes(head[14:18], "little") in BMP_HEADER_SIZES:
        return "bmp"
    if head[:6] in (b"GIF87a", b"GIF89a"):
        return "gif"
    if head[4:8] != b"ftyp":
        return None
    size = min(int.from_bytes(head[:4], "big"), len(head))
    brands = {bytes(head[8:12])} | {bytes(head[i : i + 4]) for i in range(16, size - 3, 4)}
    # Both kinds may list mif1, so that AVIF's own brands come first.
    if brands & _AVIF_BRANDS:
        return "avif"
    return "heic" if brands & _HEIC_BRANDS else None


def _what_it_is(head: bytes) -> str:
    name = next((name for magic, name in _OTHERS.items() if head.startswith(magic)), None)
    if name is not None:
        return f"{name}, which is not supported"
    if head[4:8] == b"ftyp":
        return "a video, not a picture"
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype html", b"<html", b"<head")):
        return "an HTML page, not a picture (an error page that was saved?)"
    if text.startswith((b"<?xml", b"<svg")):
        return "an XML or SVG file, not a photo"
    if _is_text(head):
        return "a text file, not a picture"
    if not any(head):
        return "nothing but zero bytes, not a picture"
    return "not a picture of a known format"


def _is_text(head: bytes) -> bool:
    try:
        # Incremental, because the last character may be cut.
        characters = codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return bool(characters) and all(c.isprintable() or c in "\t\r\n\f" for c in characters.lstrip("\ufeff"))


def _decoded(data: bytearray, max_pixels: int) -> tuple[Photo, int]:
    kind = _kind(data[:512])
    if kind == "jpeg":
        return (read_cmyk_jpeg if jpeg_is_cmyk(data) else read_jpeg)(data, max_pixels)
    if kind == "tiff":
        return (read_cmyk_tiff if tiff_is_cmyk(data) else read_tiff)(data, max_pixels)
    readers = {"png": read_png, "webp": read_webp, "bmp": read_bmp, "gif": read_gif, "avif": read_avif}
    return readers.get(kind or "", read_heic)(data, max_pixels)


def _upright(photo: Photo, orientation: int) -> Photo:
    if orientation == 1:
        return photo
    alpha = None if photo.alpha is None else _turned(photo.alpha, orientation)
    dpi = photo.dpi[::-1] if photo.dpi is not None and orientation >= 5 else photo.dpi
    return replace(photo, pixels=_turned(photo.pixels, orientation), alpha=alpha, dpi=dpi, turned=True)


def _turned(stored: NDArray[Any], orientation: int) -> NDArray[Any]:
    """The picture as its orientation tag (2..8) wants it seen."""
    if orientation == 2:
        turned = cv2.flip(stored, 1)
    elif orientation == 3:
        turned = cv2.rotate(stored, cv2.ROTATE_180)
    elif orientation == 4:
        turned = cv2.flip(stored, 0)
    elif orientation == 5:
        turned = cv2.transpose(stored)
    elif orientation == 6:
        turned = cv2.rotate(stored, cv2.ROTATE_90_CLOCKWISE)
    elif orientation == 7:
        turned = cv2.rotate(cv2.transpose(stored), cv2.ROTATE_180)
    else:
        turned = cv2.rotate(stored, cv2.ROTATE_90_COUNTERCLOCKWISE)
    return np.asarray(turned)


def _writer(
    path: Path, format: str | None, quality: int | None, subsampling: Subsampling | None
) -> Callable[[BinaryIO, Photo], tuple[str, ...]]:
    name = _FORMATS.get(path.suffix.lower()) if format is None else format
    if quality is not None and not 1 <= quality <= 100:
        raise ImageError(f"the quality must lie between 1 and 100, not {quality}")
    writers: dict[str, Callable[[BinaryIO, Photo], tuple[str, ...]]] = {
        "jpeg": lambda file, photo: write_jpeg(file, photo, quality, subsampling),
        "png": write_png,
        "webp": lambda file, photo: write_webp(file, photo, quality),
        "tiff": write_tiff,
        "bmp": write_bmp,
        "avif": lambda file, photo: write_avif(file, photo, quality),
        "heic": lambda file, photo: write_heic(file, photo, quality),
    }
    if name is None or name not in writers:
        what = shown(Path(path.suffix)) if format is None else format
        known = " ".join(sorted(WRITABLE))
        raise ImageError(f"can't write {what or 'a name without suffix'}: choose one of {known}")
    writer = writers[name]

    def run(file: BinaryIO, photo: Photo) -> tuple[str, ...]:
        lost = _lost_between_formats(photo, name)
        prepared = photo if name == "tiff" else straight_alpha(photo)
        return (*lost, *writer(file, prepared))

    return run


def _lost_between_formats(photo: Photo, name: str) -> tuple[str, ...]:
    lost = []
    if photo.photoshop is not None and name not in ("jpeg", "tiff"):
        lost.append(f"{name} can't hold the IPTC/Photoshop block")
    if photo.format != name and any(kind in (b"COM", b"tEXt", b"zTXt", b"iTXt", b"cICP") for kind, _ in photo.native):
        lost.append(f"the comments of the {photo.format} file are not kept in {name}")
    return tuple(lost)
