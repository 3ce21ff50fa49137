"""A picture in memory together with everything of its file that must survive."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import cv2
import numpy as np
from numpy.typing import NDArray

from gpen_core import image_meta as meta
from gpen_core.errors import ImageError
from gpen_core.types import Canvas, Image

LOSSY_QUALITY = 90
"""What WebP, AVIF and HEIC are written with unless told otherwise."""

AlphaRole = Literal["straight", "premultiplied", "unspecified"]
Subsampling = Literal["4:4:4", "4:2:2", "4:2:0", "4:4:0", "4:1:1"]


@dataclass(frozen=True)
class JpegStyle:
    """How a JPEG was coded: quality 1..100 on libjpeg's scale, chroma subsampling, progressive or not."""

    quality: int
    subsampling: Subsampling
    progressive: bool


@dataclass(frozen=True, eq=False)
class Photo:
    """An upright picture plus everything of its file that must survive.

    pixels: H x W x 3 RGB, uint8 or uint16 as in the file; grey is replicated to three channels.
    grey: the file held grey, and is written as grey again.
    alpha: H x W of the pixels' type, or None. `alpha_role` is what it means: "premultiplied" pixels are
        multiplied by it (TIFF only), "unspecified" is an extra TIFF channel that may be no opacity at all.
    format: "jpeg", "png", "webp", "tiff", "bmp", "gif", "avif" or "heic".
    icc, exif, xmp, photoshop: the raw blocks; EXIF without prefix, with orientation 1 and without thumbnail.
    dpi: dots per inch along x and y, if the file says.
    jpeg: how the file was coded, if it was a JPEG.
    lossless: the file's coding kept every pixel, so a lossy one is not chosen for it unasked.
    compressed: whether the pixels of a TIFF were compressed.
    native: further named blocks that only files of the same format can hold.
    turned: whether the file's orientation tag had the picture turned to make it upright.
    notes: what of the file could not be read or won't be kept, one sentence each, for the user to see.
    """

    pixels: Canvas
    grey: bool
    alpha: NDArray[Any] | None
    format: str
    alpha_role: AlphaRole = "straight"
    icc: bytes | None = None
    exif: bytes | None = None
    xmp: bytes | None = None
    photoshop: bytes | None = None
    dpi: tuple[float, float] | None = None
    jpeg: JpegStyle | None = None
    lossless: bool = True
    compressed: bool = True
    native: tuple[tuple[bytes, bytes], ...] = ()
    turned: bool = False
    notes: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        return int(self.pixels.shape[1])

    @property
    def height(self) -> int:
        return int(self.pixels.shape[0])

    def rgb8(self) -> Image:
        """The pixels in 8 bits, rounded to nearest; the same array (not a copy) if they are 8-bit already."""
        return to_depth(self.pixels, np.uint8)

    def with_pixels(self, pixels: Canvas) -> "Photo":
        """The photo with other pixels, H x W x 3 RGB uint8 or uint16; the alpha follows their size and type.

        Raises ImageError for any other shape or type.
        """
        if pixels.ndim != 3 or pixels.shape[2] != 3 or 0 in pixels.shape or pixels.dtype not in (np.uint8, np.uint16):
            raise ImageError(f"pixels must be H x W x 3 of uint8 or uint16, not {pixels.shape} {pixels.dtype}")
        alpha = self.alpha
        if alpha is not None:
            alpha = to_depth(alpha, pixels.dtype)
        if alpha is not None and alpha.shape != pixels.shape[:2]:
            size = (pixels.shape[1], pixels.shape[0])
            alpha = cv2.resize(alpha, size, interpolation=cv2.INTER_LINEAR)
        return replace(self, pixels=np.ascontiguousarray(pixels), alpha=alpha)


def to_depth(values: NDArray[Any], dtype: Any) -> NDArray[Any]:
    """uint8 or uint16 full-range values as the other type, 255 meaning 65535, rounded to nearest."""
    if values.dtype == dtype:
        return values
    if dtype == np.uint8:
        return np.asarray(cv2.convertScaleAbs(values, alpha=1 / 257)).reshape(values.shape)
    wide = values.astype(np.uint16)
    wide *= 257
    return wide


def grey_of(pixels: Canvas) -> NDArray[Any]:
    """H x W luma (Rec. 601); exactly the common value where the three channels agree."""
    return np.asarray(cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY))


def straight_alpha(photo: Photo) -> Photo:
    """The photo with its colours divided by a premultiplied alpha; the photo itself for any other."""
    if photo.alpha is None or photo.alpha_role != "premultiplied":
        return photo
    top = np.iinfo(photo.pixels.dtype).max
    pixels = photo.pixels.copy()
    for y in range(0, photo.height, 256):
        rows = pixels[y : y + 256]
        opacity = photo.alpha[y : y + 256, :, None].astype(np.float32)
        colour = np.rint(rows * (top / np.maximum(opacity, 1)))
        rows[...] = np.minimum(colour, top).astype(rows.dtype)
    return replace(photo, pixels=pixels, alpha_role="straight")


def from_cv2(decoded: NDArray[Any]) -> tuple[Canvas, NDArray[Any] | None, bool]:
    """RGB pixels, alpha or None, and whether it was grey, of what cv2 decoded; may reuse its memory."""
    if decoded.ndim == 2:
        return cv2.cvtColor(decoded, cv2.COLOR_GRAY2RGB), None, True
    if decoded.shape[2] == 4:
        alpha = np.ascontiguousarray(decoded[..., 3])
        return cv2.cvtColor(decoded, cv2.COLOR_BGRA2RGB), alpha, False
    # In blocks, so that a 100-megapixel picture is not held twice.
    for y in range(0, decoded.shape[0], 256):
        decoded[y : y + 256] = cv2.cvtColor(decoded[y : y + 256], cv2.COLOR_BGR2RGB)
    return decoded, None, False


def to_cv2(pixels: Canvas, alpha: NDArray[Any] | None, grey: bool) -> NDArray[Any]:
    """What cv2 encodes: H x W grey, H x W x 3 BGR or, with alpha, H x W x 4 BGRA."""
    if alpha is not None:
        bgra = np.empty((*alpha.shape, 4), pixels.dtype)
        cv2.mixChannels([pixels, alpha], [bgra], [0, 2, 1, 1, 2, 0, 3, 3])
        return bgra
    if grey:
        return grey_of(pixels)
    return np.asarray(cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR))


def silence() -> None:
    """Keep OpenCV's warnings off stderr: what matters of them is raised. OpenCV 5 has the switch in another place."""
    logging: Any = cv2 if hasattr(cv2, "setLogLevel") else cv2.utils.logging  # type: ignore[attr-defined]
    logging.setLogLevel(0)


def decode(data: Any) -> NDArray[Any]:
    """What cv2 makes of an encoded picture, as stored: neither rotated nor reduced. Raises ImageError."""
    silence()
    try:
        decoded = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
    except cv2.error:
        decoded = None
    if decoded is None:
        raise ImageError("the picture data is damaged or truncated")
    return np.asarray(decoded)


def encode(suffix: str, picture: NDArray[Any], parameters: list[int]) -> memoryview:
    """The encoded file as cv2 writes it. Raises ImageError if it can't."""
    silence()
    height, width = picture.shape[:2]
    try:
        done, data = cv2.imencode(suffix, picture, parameters)
    except cv2.error:
        done = False
    if not done:
        raise ImageError(f"a picture of {width}x{height} can't be encoded as {suffix[1:]}")
    return np.ascontiguousarray(data).reshape(-1).data


def check_size(width: int, height: int, max_pixels: int) -> None:
    """Raise ImageError for an empty picture or one of more than `max_pixels` pixels."""
    if width <= 0 or height <= 0:
        raise ImageError(f"damaged: its header claims {width}x{height} pixels")
    if width * height > max_pixels:
        size, limit = width * height / 1e6, max_pixels / 1e6
        raise ImageError(f"{width}x{height} is {size:.4g} megapixels, over the limit of {limit:.4g} (max pixels)")


def check_decoded(decoded: NDArray[Any], width: int, height: int) -> None:
    """Raise ImageError unless the decoded picture is what the header claims."""
    if decoded.shape[:2] != (height, width):
        found = f"{decoded.shape[1]}x{decoded.shape[0]}"
        raise ImageError(f"damaged: the header claims {width}x{height} pixels, the data holds {found}")


def to_8_bits(photo: Photo, name: str) -> tuple[Photo, tuple[str, ...]]:
    """The photo in 8 bits, and a note if that loses any."""
    if photo.pixels.dtype == np.uint8:
        return photo, ()
    return photo.with_pixels(photo.rgb8()), (f"{name} holds 8 bits a channel: the 16-bit original is rounded",)


def without_extra_channel(photo: Photo, name: str) -> tuple[Photo, tuple[str, ...]]:
    """The photo without an alpha of unspecified meaning, and a note if it had one."""
    if photo.alpha is None or photo.alpha_role != "unspecified":
        return photo, ()
    return replace(photo, alpha=None, alpha_role="straight"), (f"{name} can't hold the unspecified extra channel",)


def read_exif(exif: bytes | None) -> tuple[bytes | None, int, tuple[str, ...]]:
    """The cleaned block, the orientation it gave, and a note if it is damaged."""
    if exif is None:
        return None, 1, ()
    cleaned, orientation = meta.clean_exif(exif)
    return cleaned, orientation, () if cleaned is not None else ("the EXIF block is damaged and is not kept",)


def sized_exif(photo: Photo, *, holds_dpi: bool = True) -> bytes | None:
    """The photo's EXIF block for its present size; made up for the resolution if that has no other place."""
    exif = photo.exif if holds_dpi else meta.exif_with_dpi(photo.exif, photo.dpi)
    return None if exif is None else meta.exif_sized(exif, photo.width, photo.height)


def sized_xmp(photo: Photo) -> bytes | None:
    """The photo's XMP packet for its present size."""
    return None if photo.xmp is None else meta.xmp_sized(photo.xmp, photo.width, photo.height)
