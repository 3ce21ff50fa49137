"""What cv2 can't read or write: AVIF, GIF, HEIC and CMYK, where Pillow or pillow-heif is installed."""

import io
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from gpen_core import image_meta as meta
from gpen_core.errors import ImageError, one_line
from gpen_core.image_jpeg import check_jpeg_size, jpeg_metadata_of
from gpen_core.image_tiff import check_tiff_size, tiff_metadata_of
from gpen_core.photo import (
    LOSSY_QUALITY,
    Photo,
    check_size,
    grey_of,
    read_exif,
    sized_exif,
    sized_xmp,
    to_8_bits,
    without_extra_channel,
)
from gpen_core.types import Canvas


def _missing(what: str, extra: str) -> ImageError:
    return ImageError(f'{what} needs an extra: pip install "gpen-core[{extra}]"')


def _plugin(module: str, name: str, what: str) -> Any:
    """A Pillow plugin's image class: unlike `Image.open` it brings no pixel limit or warning of its own."""
    import importlib

    try:
        return getattr(importlib.import_module(f"PIL.{module}"), name)
    except ImportError:
        raise _missing(what, "formats") from None


def _guarded(action: Callable[[], Any]) -> Any:
    try:
        return action()
    # Pillow's plugins raise almost anything for damaged data: OSError, SyntaxError, struct.error, IndexError.
    except Exception as error:
        raise ImageError(
            f"the picture data is damaged or truncated ({one_line(error) or type(error).__name__})"
        ) from None


def _opened(open_image: Callable[[], Any], max_pixels: int) -> Any:
    """The picture, not decoded yet, unless its header claims too many pixels."""
    image = _guarded(open_image)
    width, height = _guarded(lambda: image.size)
    check_size(width, height, max_pixels)
    return image


def _loaded(open_image: Callable[[], Any], max_pixels: int) -> Any:
    """The decoded Pillow image, unless its header claims too many pixels."""
    image = _opened(open_image, max_pixels)
    _guarded(image.load)
    return image


def _split(image: Any) -> tuple[Canvas, NDArray[Any] | None, bool]:
    """RGB pixels, alpha or None, and whether it is grey, of a Pillow image of any 8-bit mode."""
    has_alpha = image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info
    grey = image.mode in ("1", "L", "LA")
    if not has_alpha:
        return np.array(image.convert("RGB")), None, grey
    rgba = np.array(image.convert("RGBA"))
    return np.ascontiguousarray(rgba[..., :3]), np.ascontiguousarray(rgba[..., 3]), grey


def _animation_notes(image: Any) -> tuple[str, ...]:
    return ("only the first picture of the animation is kept",) if getattr(image, "n_frames", 1) > 1 else ()


def read_gif(data: bytearray, max_pixels: int) -> tuple[Photo, int]:
    width, height = struct.unpack_from("<HH", data.ljust(10, b"\0"), 6)
    check_size(width, height, max_pixels)
    opener = _plugin("GifImagePlugin", "GifImageFile", "reading GIF")
    image = _loaded(lambda: opener(io.BytesIO(data)), max_pixels)
    pixels, alpha, grey = _split(image)
    return Photo(pixels, grey, alpha, "gif", notes=_animation_notes(image)), 1


def read_avif(data: bytearray, max_pixels: int) -> tuple[Photo, int]:
    opener = _plugin("AvifImagePlugin", "AvifImageFile", "reading AVIF (with Pillow 11.3 or newer)")
    image = _loaded(lambda: opener(io.BytesIO(data)), max_pixels)
    pixels, alpha, grey = _split(image)
    # Pillow hands the container's rotation over as the EXIF orientation.
    exif, orientation, notes = read_exif(image.info.get("exif"))
    icc, icc_notes = meta.usable_icc(image.info.get("icc_profile"), grey)
    xmp, xmp_notes = meta.clean_xmp(image.info.get("xmp"))
    photo = Photo(
        pixels,
        grey,
        alpha,
        "avif",
        icc=icc,
        exif=exif,
        xmp=xmp,
        dpi=meta.resolution(meta.exif_directory(exif)),
        lossless=False,
        notes=(*_animation_notes(image), *_avif_depth_notes(data), *notes, *icc_notes, *xmp_notes),
    )
    return photo, orientation


def _avif_depth_notes(data: bytearray) -> tuple[str, ...]:
    """Pillow reduces deeper AVIF to 8 bits in silence; the codec configuration box says how deep it is."""
    at = data.find(b"av1C")
    deep = at >= 0 and at + 7 <= len(data) and data[at + 6] & 0x40
    return ("this AVIF has more than 8 bits a channel: it is reduced to 8",) if deep else ()


def read_heic(data: bytearray, max_pixels: int) -> tuple[Photo, int]:
    try:
        import pillow_heif
    except ImportError:
        raise _missing("reading HEIC", "heic") from None

    image = _opened(lambda: pillow_heif.open_heif(io.BytesIO(data), convert_hdr_to_8bit=False), max_pixels)
    samples = _guarded(lambda: np.array(image))
    info = image.info
    grey = image.mode.startswith(("L", "I"))
    if samples.ndim == 2:
        samples = samples[..., None]
    colours = 1 if grey else 3
    alpha = np.ascontiguousarray(samples[..., colours]) if samples.shape[2] > colours else None
    pixels = np.ascontiguousarray(np.repeat(samples, 3, axis=2) if grey else samples[..., :3])
    # libheif has turned the picture upright already; the EXIF orientation only repeats what it did.
    exif, _, notes = read_exif(info.get("exif"))
    icc, icc_notes = meta.usable_icc(info.get("icc_profile"), grey)
    xmp, xmp_notes = meta.clean_xmp(info.get("xmp"))
    more = ("further pictures in the file are not kept",) if len(image) > 1 else ()
    photo = Photo(
        pixels,
        grey,
        alpha,
        "heic",
        icc=icc,
        exif=exif,
        xmp=xmp,
        dpi=meta.resolution(meta.exif_directory(exif)),
        lossless=False,
        notes=(*more, *notes, *icc_notes, *xmp_notes),
    )
    return photo, 1


def read_cmyk_jpeg(data: bytearray, max_pixels: int) -> tuple[Photo, int]:
    check_jpeg_size(data, max_pixels)
    opener = _plugin("JpegImagePlugin", "JpegImageFile", "reading a CMYK JPEG")
    image = _loaded(lambda: opener(io.BytesIO(data)), max_pixels)
    pixels, notes = _cmyk_to_rgb(image)
    photo, orientation = jpeg_metadata_of(Photo(pixels, False, None, "jpeg", lossless=False), data)
    return _without_ink_profile(photo, notes), orientation


def read_cmyk_tiff(data: bytearray, max_pixels: int) -> tuple[Photo, int]:
    check_tiff_size(data, max_pixels)
    opener = _plugin("TiffImagePlugin", "TiffImageFile", "reading a CMYK TIFF")
    image = _loaded(lambda: opener(io.BytesIO(data)), max_pixels)
    pixels, notes = _cmyk_to_rgb(image)
    photo, orientation = tiff_metadata_of(Photo(pixels, False, None, "tiff"), data)
    return _without_ink_profile(photo, notes), orientation


def _cmyk_to_rgb(image: Any) -> tuple[Canvas, tuple[str, ...]]:
    if image.mode != "CMYK":
        raise ImageError(f"a {image.mode} picture where CMYK was expected")
    profile = image.info.get("icc_profile")
    if not profile:
        return np.array(image.convert("RGB")), ("CMYK without a profile: its colours are approximate, written as RGB",)
    from PIL import ImageCms

    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        converted = ImageCms.profileToProfile(image, source, ImageCms.createProfile("sRGB"), outputMode="RGB")
    except (OSError, ImageCms.PyCMSError):
        note = "the CMYK profile is damaged: the colours are approximate, written as RGB"
        return np.array(image.convert("RGB")), (note,)
    return np.array(converted), ("converted from CMYK to sRGB by its profile",)


def _without_ink_profile(photo: Photo, notes: tuple[str, ...]) -> Photo:
    kept = tuple(note for note in photo.notes if "colour profile" not in note)
    return replace(photo, icc=None, notes=(*notes, *kept))


def _pillow_image(photo: Photo, *, grey_allowed: bool) -> Any:
    from PIL import Image

    if photo.alpha is not None:
        return Image.fromarray(np.dstack([photo.pixels, photo.alpha]))
    return Image.fromarray(grey_of(photo.pixels) if photo.grey and grey_allowed else photo.pixels)


def _blocks(photo: Photo) -> dict[str, bytes]:
    blocks = {"icc_profile": photo.icc, "exif": sized_exif(photo, holds_dpi=False), "xmp": sized_xmp(photo)}
    return {name: block for name, block in blocks.items() if block is not None}


def write_avif(file: BinaryIO, photo: Photo, quality: int | None) -> tuple[str, ...]:
    _plugin("AvifImagePlugin", "AvifImageFile", "writing AVIF (with Pillow 11.3 or newer)")
    photo, extra_notes = without_extra_channel(photo, "AVIF")
    photo, depth_notes = to_8_bits(photo, "AVIF")
    try:
        image = _pillow_image(photo, grey_allowed=True)
        image.save(file, "AVIF", quality=quality or LOSSY_QUALITY, subsampling="4:4:4", **_blocks(photo))
    except (OSError, ValueError, KeyError) as error:
        raise ImageError(f"can't be encoded as AVIF: {one_line(error) or type(error).__name__}") from None
    return (*extra_notes, *depth_notes)


def write_heic(file: BinaryIO, photo: Photo, quality: int | None) -> tuple[str, ...]:
    try:
        import pillow_heif
    except ImportError:
        raise _missing("writing HEIC", "heic") from None
    photo, extra_notes = without_extra_channel(photo, "HEIC")
    photo, depth_notes = to_8_bits(photo, "HEIC")
    blocks = _blocks(photo)
    buffer = io.BytesIO()
    try:
        image = pillow_heif.from_pillow(_pillow_image(photo, grey_allowed=True))
        if "icc_profile" in blocks:
            image.info["icc_profile"] = blocks.pop("icc_profile")
            image.info["icc_profile_type"] = "prof"
        image.save(buffer, quality=quality or LOSSY_QUALITY, chroma=444, **blocks)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ImageError(f"can't be encoded as HEIC: {one_line(error) or type(error).__name__}") from None
    file.write(buffer.getbuffer())
    return (*extra_notes, *depth_notes)
