"""Every format, orientation and mode, as an independent reader sees what comes out."""

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from numpy.typing import NDArray
from PIL import Image

from gpen_core.image_io import read, write
from tests.test_image_io import srgb

HEIGHT, WIDTH = 22, 35
FORMATS = {"JPEG": ".jpg", "PNG": ".png", "WEBP": ".webp", "TIFF": ".tif"}
MODES = {
    "JPEG": ("grey", "rgb"),
    "PNG": ("grey", "grey-alpha", "rgb", "rgba", "grey16", "grey-alpha16", "rgb16", "rgba16"),
    "WEBP": ("rgb", "rgba"),
    "TIFF": ("grey", "grey-alpha", "rgb", "rgba", "grey16", "grey-alpha16", "rgb16", "rgba16"),
}
CASES = [(form, mode) for form in FORMATS for mode in MODES[form]]
COLOUR_TYPES = {1: 0, 2: 4, 3: 2, 4: 6}
DPI = (300.0, 300.0)


def profile(space: str) -> bytes:
    if space == "RGB":
        return srgb()
    icc = bytearray(profile("RGB"))
    icc[16:20] = b"GRAY"
    return bytes(icc)


def stored_picture(mode: str) -> NDArray[Any]:
    """H x W x channels: smooth, so that JPEG keeps it nearly, and without any symmetry."""
    channels = {"grey": 1, "grey-alpha": 2, "rgb": 3, "rgba": 4}[mode.removesuffix("16")]
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH]
    planes = [x * 6 + y, y * 11, 240 - x * 3 - y * 4, np.where(x < 12, 0, x * 7)][:channels]
    if channels == 2:
        planes[1] = np.where(x < 12, 0, x * 7)
    picture = np.stack(planes, axis=2)
    if mode.endswith("16"):
        # Low bytes that no 8-bit path could invent.
        return np.asarray((picture * 257 - picture // 2).clip(0, 65535), np.uint16)
    return np.asarray(picture.clip(0, 255), np.uint8)


def exif_block(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x112] = orientation
    exif[0x10F] = "Maker"
    exif.get_ifd(0x8769).update({0xA002: WIDTH, 0xA003: HEIGHT, 0x9003: "2024:05:06 07:08:09"})
    return exif.tobytes()


def png_file(picture: NDArray[Any], chunks: dict[bytes, bytes]) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width, channels = picture.shape
    depth = 8 * picture.dtype.itemsize
    header = struct.pack(">IIBBBBB", width, height, depth, COLOUR_TYPES[channels], 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(row.dtype.newbyteorder(">")).tobytes() for row in picture)
    parts = [chunk(b"IHDR", header), *(chunk(kind, data) for kind, data in chunks.items())]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def png_pixels(data: bytes) -> NDArray[Any]:
    """H x W x channels of a PNG without interlacing, by the specification: Pillow would make 16-bit RGB 8-bit."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    pos, packed, header = 8, b"", (0, 0, 0, 0, 0, 0, 0)
    while pos < len(data):
        size = int.from_bytes(data[pos : pos + 4], "big")
        kind, body = data[pos + 4 : pos + 8], data[pos + 8 : pos + 8 + size]
        if kind == b"IHDR":
            header = struct.unpack(">IIBBBBB", body)
        if kind == b"IDAT":
            packed += body
        pos += 12 + size
    width, height, depth, colour = header[:4]
    channels = {kind: count for count, kind in COLOUR_TYPES.items()}[colour]
    step = channels * depth // 8
    row_size = width * step
    raw = zlib.decompress(packed)
    above = [0] * row_size
    rows = []
    for y in range(height):
        filter_type, *row = raw[y * (row_size + 1) : (y + 1) * (row_size + 1)]
        for i in range(row_size):
            a, b = row[i - step] if i >= step else 0, above[i]
            c = above[i - step] if i >= step else 0
            paeth = min((abs(b - c), 0, a), (abs(a - c), 1, b), (abs(a + b - 2 * c), 2, c))[2]
            row[i] = (row[i] + (0, a, b, (a + b) // 2, paeth)[filter_type]) % 256
        rows.append(bytes(row))
        above = row
    return np.frombuffer(b"".join(rows), f">u{depth // 8}").reshape(height, width, channels)


def make_file(path: Path, form: str, picture: NDArray[Any], orientation: int) -> bytes:
    icc = profile("GRAY" if picture.shape[2] < 3 else "RGB")
    exif = exif_block(orientation)
    if form == "PNG":
        density = struct.pack(">IIB", 11811, 11811, 1)
        compressed = b"profile\0\0" + zlib.compress(icc)
        path.write_bytes(png_file(picture, {b"iCCP": compressed, b"pHYs": density, b"eXIf": exif[6:]}))
    elif form == "TIFF":
        channels = picture.shape[2]
        tifffile.imwrite(
            path,
            picture[..., 0] if channels == 1 else picture,
            photometric="rgb" if channels > 2 else "minisblack",
            planarconfig="contig" if channels > 1 else None,
            extrasamples=["unassalpha"] if channels in (2, 4) else None,
            resolution=DPI,
            resolutionunit="INCH",
            iccprofile=icc,
            extratags=[(274, "H", 1, orientation, True), (271, "s", 0, "Maker", True)],
            metadata=None,
        )
    else:
        options: dict[str, Any] = {"exif": exif, "icc_profile": icc}
        if form == "JPEG":
            options |= {"quality": 98, "subsampling": 0, "dpi": DPI}
        else:
            options |= {"lossless": True, "exact": True}
        Image.fromarray(picture.squeeze()).save(path, form, **options)
    return icc


def independent_pixels(path: Path, form: str) -> NDArray[Any]:
    """H x W x channels as another reader has them, not turned by any orientation tag."""
    if form == "PNG":
        return png_pixels(path.read_bytes())
    picture = tifffile.imread(path) if form == "TIFF" else np.asarray(Image.open(path))
    return picture.reshape(*picture.shape[:2], -1)


def turned(picture: NDArray[Any], orientation: int) -> NDArray[Any]:
    """The picture as a viewer shows it: where EXIF says that its row 0 and its column 0 lie."""
    return {
        1: picture,
        2: picture[:, ::-1],
        3: picture[::-1, ::-1],
        4: picture[::-1],
        5: picture.transpose(1, 0, 2),
        6: np.rot90(picture, -1),
        7: np.rot90(picture, 2).transpose(1, 0, 2),
        8: np.rot90(picture, 1),
    }[orientation]


def check_metadata(path: Path, form: str, icc: bytes, size: tuple[int, int]) -> None:
    with Image.open(path) as image:
        assert image.format == form and image.size == size
        assert image.info["icc_profile"] == icc
        exif = image.getexif()
        assert exif.get(0x112, 1) == 1
        assert exif[0x10F] == "Maker"
        details = exif.get_ifd(0x8769)
        assert (details[0xA002], details[0xA003]) == size
        assert details[0x9003] == "2024:05:06 07:08:09"
        if form != "WEBP":
            assert image.info["dpi"] == pytest.approx(DPI, rel=1e-4)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(("form", "mode"), CASES)
def test_upright_and_complete(tmp_path: Path, form: str, mode: str, orientation: int) -> None:
    source, target = tmp_path / f"in{FORMATS[form]}", tmp_path / f"out{FORMATS[form]}"
    picture = stored_picture(mode)
    icc = make_file(source, form, picture, orientation)
    expected = turned(picture, orientation)
    height, width, channels = expected.shape
    tolerance = 12 if form == "JPEG" else 0

    photo = read(source)
    assert photo.pixels.dtype == picture.dtype and photo.pixels.shape == (height, width, 3)
    assert photo.pixels.flags.c_contiguous
    assert photo.grey == mode.startswith("grey")
    colours = expected[..., :1] if photo.grey else expected[..., :3]
    assert np.abs(photo.pixels.astype(int) - colours).max() <= tolerance
    assert (photo.alpha is not None) == (channels in (2, 4))
    if photo.alpha is not None:
        assert np.array_equal(photo.alpha, expected[..., -1])
    assert photo.notes == ()

    assert write(target, photo) == ()
    written = independent_pixels(target, form)
    assert written.shape == expected.shape and written.dtype.itemsize == picture.dtype.itemsize
    if form == "JPEG":
        assert np.abs(written.astype(int) - expected).max() <= 2 * tolerance
    else:
        assert np.array_equal(written, expected)

    if form == "TIFF":
        # Pillow can't open grey with alpha in 16 bits.
        page: Any = tifffile.TiffFile(target).pages[0]
        tags = {tag.code: tag.value for tag in page.tags}
        assert (tags[274], tags[271], bytes(tags[34675])) == (1, "Maker", icc)
        assert tags[282][0] / tags[282][1] == tags[283][0] / tags[283][1] == DPI[0]
    else:
        check_metadata(target, form, icc, (width, height))

    again = read(target)
    assert (again.grey, again.icc, again.dpi) == (photo.grey, photo.icc, photo.dpi)
    if form != "JPEG":
        assert np.array_equal(again.pixels, photo.pixels)


@pytest.mark.parametrize("target_suffix", [".png", ".tif", ".webp", ".bmp"])
@pytest.mark.parametrize("mode", ["grey", "rgb", "rgba", "grey-alpha"])
def test_eight_bits_survive_every_lossless_format(tmp_path: Path, mode: str, target_suffix: str) -> None:
    picture = stored_picture(mode)
    make_file(tmp_path / "in.png", "PNG", picture, 1)
    target = tmp_path / f"out{target_suffix}"
    write(target, read(tmp_path / "in.png"))
    with Image.open(target) as image:
        has_alpha = mode.endswith("a") or mode.endswith("alpha")
        seen = np.asarray(image.convert("RGBA" if has_alpha else "RGB"))
    colours = picture[..., :1] if mode.startswith("grey") else picture[..., :3]
    assert np.array_equal(seen[..., :3], np.broadcast_to(colours, (*picture.shape[:2], 3)))
    if has_alpha:
        assert np.array_equal(seen[..., 3], picture[..., -1])


@pytest.mark.parametrize("mode", ["rgba16", "grey16"])
def test_sixteen_bits_survive_between_png_and_tiff(tmp_path: Path, mode: str) -> None:
    picture = stored_picture(mode)
    make_file(tmp_path / "in.png", "PNG", picture, 6)
    write(tmp_path / "out.tif", read(tmp_path / "in.png"))
    assert np.array_equal(independent_pixels(tmp_path / "out.tif", "TIFF"), turned(picture, 6))
    write(tmp_path / "back.png", read(tmp_path / "out.tif"))
    assert np.array_equal(independent_pixels(tmp_path / "back.png", "PNG"), turned(picture, 6))
    with Image.open(tmp_path / "back.png") as image:
        assert image.getexif()[0x10F] == "Maker"
        assert image.getexif().get_ifd(0x8769)[0x9003] == "2024:05:06 07:08:09"


def test_the_png_decoder_of_these_tests_agrees_with_pillow() -> None:
    picture = stored_picture("rgba")
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "PNG")
    assert np.array_equal(png_pixels(buffer.getvalue()), picture)
