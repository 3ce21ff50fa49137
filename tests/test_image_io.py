"""Reading and writing photos: hostile files, odd kinds of each format, and what must survive."""

from __future__ import annotations

import builtins
import io
import os
import struct
import subprocess
import sys
import textwrap
import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tifffile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image, ImageCms

from gpen_core import photo
from gpen_core.errors import ImageError
from gpen_core.image_io import SUFFIXES, WRITABLE, Photo, read, write

HEIGHT, WIDTH = 40, 60


def picture() -> NDArray[np.uint8]:
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH]
    return np.asarray(np.stack([x * 4, y * 6, 255 - x - y], axis=2), np.uint8)


def noisy_picture() -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)


def encoded(form: str, image: Any = None, **options: Any) -> bytes:
    buffer = io.BytesIO()
    source = Image.fromarray(picture()) if image is None else image
    source.save(buffer, form, **options)
    return buffer.getvalue()


def placed(folder: Path, data: bytes, name: str = "photo.jpg") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def reason(path: Path, **options: Any) -> str:
    """What `read` says about a bad file, without the path that it must begin with."""
    with pytest.raises(ImageError) as caught:
        read(path, **options)
    text = str(caught.value)
    assert "\n" not in text and text.startswith(f"{path}: ")
    return text[len(str(path)) + 2 :]


def srgb() -> bytes:
    icc = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    # The second in which it was made.
    icc[24:36] = struct.pack(">6H", 2024, 1, 2, 3, 4, 5)
    return bytes(icc)


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_with(chunk: bytes, data: bytes | None = None) -> bytes:
    """A PNG with one more chunk after its header."""
    plain = encoded("PNG") if data is None else data
    return plain[:33] + chunk + plain[33:]


# --- Files that are no pictures, each with its own reason.


def test_missing_file(tmp_path: Path) -> None:
    assert reason(tmp_path / "absent.jpg") == "no such file or folder"


def test_folder(tmp_path: Path) -> None:
    assert reason(tmp_path) == "is a folder, not a picture"


def test_empty_file(tmp_path: Path) -> None:
    assert reason(placed(tmp_path, b"")) == "the file is empty (0 bytes)"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"hello, this is no photo\n", "a text file"),
        (b"\xef\xbb\xbf\n<!DOCTYPE html><html>404</html>", "an HTML page"),
        (b"<html><body>Sign in</body></html>", "an HTML page"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG"),
        (b"%PDF-1.7\n", "a PDF"),
        (b"PK\x03\x04\x00\x00", "a ZIP archive"),
        (b"\0\0\0\x18ftypisom\0\0\0\0isommp42", "a video"),
        (bytes(1000), "nothing but zero bytes"),
        (bytes(range(256)) * 4, "not a picture of a known format"),
        (b"\xff\xd8", "not a picture of a known format"),
    ],
)
def test_other_content_is_named(tmp_path: Path, data: bytes, expected: str) -> None:
    assert expected in reason(placed(tmp_path, data))


def test_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    if not hasattr(os, "mkfifo"):
        pytest.skip("this system has no named pipes")
    os.mkfifo(tmp_path / "pipe.jpg")
    assert reason(tmp_path / "pipe.jpg") == "is not a regular file"


@contextmanager
def ordinary_user() -> Iterator[None]:
    """Permissions don't bind root: become somebody else for a moment."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.skipif(not hasattr(os, "seteuid"), reason="this system has no such permissions")
def test_unreadable_and_unwritable(tmp_path: Path) -> None:
    path = placed(tmp_path, encoded("JPEG"))
    photo = read(path)
    for folder in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        if folder.stat().st_uid == tmp_path.stat().st_uid:
            folder.chmod(0o755)
    path.chmod(0)
    tmp_path.chmod(0o555)
    try:
        with ordinary_user():
            assert reason(path) == "permission denied"
            with pytest.raises(ImageError, match=r"out\.png: permission denied"):
                write(tmp_path / "out.png", photo)
    finally:
        tmp_path.chmod(0o755)
    assert [p.name for p in tmp_path.iterdir()] == ["photo.jpg"]


def test_a_line_break_in_the_name_does_not_break_the_message(tmp_path: Path) -> None:
    with pytest.raises(ImageError) as caught:
        read(placed(tmp_path, b"", "a\nb.jpg"))
    assert "\n" not in str(caught.value) and "a\\nb.jpg" in str(caught.value)


@pytest.mark.parametrize("name", ["smörgås 写真.png", "a b  c.png", "new\nline.png", "😀" * 50 + ".png", "-o.png"])
def test_any_file_name(tmp_path: Path, name: str) -> None:
    photo = read(placed(tmp_path, encoded("PNG"), name))
    assert write(tmp_path / name, photo) == ()
    assert np.array_equal(read(tmp_path / name).pixels, picture())


def test_a_name_that_is_not_unicode(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.png")
    try:
        path = placed(tmp_path, encoded("PNG"), name)
    except (OSError, UnicodeError):
        pytest.skip("this file system takes Unicode names only")
    write(path, read(path))
    path.write_bytes(b"")
    with pytest.raises(ImageError) as caught:
        read(path)
    assert str(caught.value).encode()


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF", "BMP", "GIF", "AVIF"])
def test_content_decides_not_the_suffix(tmp_path: Path, form: str) -> None:
    photo = read(placed(tmp_path, encoded(form), "wrong.xyz"))
    assert photo.format == form.lower()


# --- Damage.


@cache
def samples() -> dict[str, bytes]:
    exif = Image.Exif()
    exif[0x112] = 6
    exif.get_ifd(0x8769)[0xA002] = WIDTH
    meta: dict[str, Any] = {"exif": exif.tobytes(), "icc_profile": srgb()}
    rgb = Image.fromarray(noisy_picture())
    grey16 = Image.fromarray(noisy_picture()[..., 0].astype(np.uint16) * 257)
    tiff16 = io.BytesIO()
    tifffile.imwrite(tiff16, noisy_picture().astype(np.uint16), tile=(16, 32), photometric="rgb", byteorder=">")
    return {
        "jpeg": encoded("JPEG", rgb, **meta),
        "jpeg progressive": encoded("JPEG", rgb, progressive=True, restart_marker_blocks=2),
        "jpeg grey": encoded("JPEG", rgb.convert("L")),
        "jpeg cmyk": encoded("JPEG", rgb.convert("CMYK")),
        "png": encoded("PNG", rgb, **meta),
        "png palette": encoded("PNG", rgb.quantize(16), transparency=3),
        "png bilevel": encoded("PNG", rgb.convert("1")),
        "png 16": encoded("PNG", grey16),
        "webp": encoded("WEBP", rgb, **meta),
        "webp alpha": encoded("WEBP", rgba_image(), quality=70),
        "webp lossless": encoded("WEBP", rgb, lossless=True),
        "webp animated": encoded("WEBP", rgb, save_all=True, append_images=[rgb.rotate(90)]),
        "tiff": encoded("TIFF", rgb, **meta),
        "tiff lzw": encoded("TIFF", rgba_image(), compression="tiff_lzw"),
        "tiff deflate": encoded("TIFF", rgb.convert("LA"), compression="tiff_adobe_deflate"),
        "tiff packbits": encoded("TIFF", rgb.convert("1"), compression="packbits"),
        "tiff jpeg": encoded("TIFF", rgb, compression="jpeg"),
        "tiff 16": tiff16.getvalue(),
        "bmp": encoded("BMP", rgb),
        "bmp palette": encoded("BMP", rgb.quantize(16)),
        "gif": encoded("GIF", rgb.quantize(16)),
        "avif": encoded("AVIF", rgb),
    }


def rgba_image() -> Image.Image:
    alpha = np.where(np.arange(WIDTH) < 20, 0, 200).astype(np.uint8)
    return Image.fromarray(np.dstack([noisy_picture(), np.broadcast_to(alpha, (HEIGHT, WIDTH))]))


@pytest.mark.parametrize("kind", samples())
def test_every_truncation_is_an_error(tmp_path: Path, kind: str) -> None:
    whole = samples()[kind]
    read(placed(tmp_path, whole))
    cuts = sorted({*range(1, 40), *range(40, len(whole), max(1, len(whole) // 60)), len(whole) - 2, len(whole) - 1})
    # The end of the pixels is in the file before the two bytes that end a GIF.
    harmless = 2 if kind == "gif" else 0
    for cut in cuts:
        if cut < len(whole) - harmless:
            with pytest.raises(ImageError):
                read(placed(tmp_path, whole[:cut]))


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    kind=st.sampled_from(sorted(samples())),
    cut=st.none() | st.floats(0, 1),
    changes=st.lists(st.tuples(st.floats(0, 1), st.booleans(), st.integers(0, 255)), max_size=6),
)
def test_damage_gives_a_photo_or_an_image_error(
    tmp_path: Path, kind: str, cut: float | None, changes: list[tuple[float, bool, int]]
) -> None:
    data = bytearray(samples()[kind])
    for where, in_header, value in changes:
        data[int(where * (min(len(data), 400) - 1 if in_header else len(data) - 1))] = value
    path = placed(tmp_path, bytes(data if cut is None else data[: int(cut * len(data))]))
    try:
        photo = read(path, max_pixels=1_000_000)
    except ImageError as error:
        assert str(error).startswith(f"{path}: ") and "\n" not in str(error)
        return
    assert photo.pixels.dtype in (np.uint8, np.uint16) and photo.pixels.flags.c_contiguous
    write(tmp_path / "out.png", photo)
    write(tmp_path / "out.tif", photo)


def test_jpeg_cut_in_its_scan_but_ended_by_a_marker(tmp_path: Path) -> None:
    whole = encoded("JPEG", Image.fromarray(noisy_picture()), quality=90)
    cut = whole[: len(whole) * 2 // 3].rstrip(b"\xff") + b"\xff\xd9"
    assert "the JPEG data ends before the picture does" in reason(placed(tmp_path, cut))


def test_jpeg_that_ends_in_mid_grey_is_whole(tmp_path: Path) -> None:
    grey = picture()
    grey[24:] = 128
    photo = read(placed(tmp_path, encoded("JPEG", Image.fromarray(grey))))
    assert np.all(photo.pixels[-4:] == 128)


def test_the_end_marker_of_the_thumbnail_does_not_count(tmp_path: Path) -> None:
    exif = Image.Exif().tobytes() + encoded("JPEG")
    whole = encoded("JPEG", exif=exif)
    assert whole.count(b"\xff\xd9") == 2
    assert "no end marker" in reason(placed(tmp_path, whole[:-2]))


def test_png_with_a_wrong_checksum(tmp_path: Path) -> None:
    data = bytearray(encoded("PNG"))
    data[data.index(b"IDAT") + 20] ^= 1
    assert "checksum of a PNG IDAT chunk" in reason(placed(tmp_path, bytes(data)))


def bomb(width: int, height: int) -> bytes:
    deflater = zlib.compressobj(9)
    row = bytes(1 + width)
    body = b"".join(deflater.compress(row) for _ in range(height)) + deflater.flush()
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + png_chunk(b"IDAT", body) + png_chunk(b"IEND", b"")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells a process's peak memory")
def test_a_bomb_is_refused_from_its_header(tmp_path: Path) -> None:
    path = placed(tmp_path, bomb(20000, 12000), "bomb.png")
    assert path.stat().st_size < 400_000
    code = textwrap.dedent(
        """
        import re, sys
        from pathlib import Path
        from gpen_core.errors import ImageError
        from gpen_core.image_io import read

        # Not ru_maxrss, which a child takes over from its parent.
        def peak():
            return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

        before = peak()
        try:
            read(Path(sys.argv[1]))
        except ImageError as error:
            print(error)
        print(peak() - before)
        """
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    message, growth = done.stdout.splitlines()
    assert "20000x12000 is 240 megapixels, over the limit of 200" in message
    assert int(growth) < 20_000, "kilobytes"


@pytest.mark.parametrize("kind", samples())
def test_the_pixel_limit_holds_for_every_format(tmp_path: Path, kind: str) -> None:
    path = placed(tmp_path, samples()[kind])
    assert "60x40" in reason(path, max_pixels=HEIGHT * WIDTH - 1)
    read(path, max_pixels=HEIGHT * WIDTH)


def test_sound_pictures_and_truncated_ones_print_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for data in samples().values():
        write(tmp_path / "out.png", read(placed(tmp_path, data)))
        with pytest.raises(ImageError):
            read(placed(tmp_path, data[: len(data) // 2]))
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


# --- JPEG


@pytest.mark.parametrize("quality", [1, 10, 49, 50, 51, 75, 90, 95, 100])
@pytest.mark.parametrize(("number", "name"), [(0, "4:4:4"), (1, "4:2:2"), (2, "4:2:0")])
def test_jpeg_style_follows_the_source(tmp_path: Path, quality: int, number: int, name: str) -> None:
    source = encoded("JPEG", quality=quality, subsampling=number, progressive=quality > 60)
    photo = read(placed(tmp_path, source))
    assert photo.jpeg is not None
    assert (photo.jpeg.quality, photo.jpeg.subsampling, photo.jpeg.progressive) == (quality, name, quality > 60)
    write(tmp_path / "out.jpg", photo)
    with Image.open(io.BytesIO(source)) as before, Image.open(tmp_path / "out.jpg") as after:
        assert before.quantization == after.quantization
        assert before.layer == after.layer
        assert ("progressive" in after.info) == (quality > 60)


def test_jpeg_style_can_be_told(tmp_path: Path) -> None:
    photo = read(placed(tmp_path, encoded("JPEG", quality=90, subsampling=0)))
    write(tmp_path / "out.jpg", photo, quality=40, subsampling="4:2:0")
    style = read(tmp_path / "out.jpg").jpeg
    assert style is not None and (style.quality, style.subsampling) == (40, "4:2:0")


def test_quality_of_foreign_tables_is_near(tmp_path: Path) -> None:
    tables = [[max(1, v * 2 // 10) for v in range(10, 74)], [max(1, v * 2 // 10) for v in range(20, 84)]]
    photo = read(placed(tmp_path, encoded("JPEG", qtables=tables)))
    assert photo.jpeg is not None and 85 <= photo.jpeg.quality <= 95


def test_jpeg_with_bytes_after_its_end(tmp_path: Path) -> None:
    photo = read(placed(tmp_path, encoded("JPEG") + b"\0" * 100 + b"ftypmp42"))
    assert photo.notes == ("108 bytes after the picture (motion photo or the like) are not kept",)


def test_mpo_gives_its_first_picture(tmp_path: Path) -> None:
    second = Image.fromarray(picture()[::-1].copy())
    photo = read(placed(tmp_path, encoded("MPO", save_all=True, append_images=[second])))
    assert photo.notes == ("further pictures in the file (MPO, gain map, depth) are not kept",)
    assert np.abs(photo.pixels.astype(int) - picture()).max() < 30


def test_rgb_jpeg_of_adobe(tmp_path: Path) -> None:
    data = encoded("JPEG", keep_rgb=True, quality=95)
    photo = read(placed(tmp_path, data))
    assert np.abs(photo.pixels.astype(int) - picture()).max() < 12
    assert photo.jpeg is not None and photo.jpeg.subsampling == "4:4:4"


def test_cmyk_jpeg_with_a_profile_that_is_not_for_inks(tmp_path: Path) -> None:
    data = encoded("JPEG", Image.fromarray(picture()).convert("CMYK"), icc_profile=srgb(), quality=95)
    photo = read(placed(tmp_path, data))
    assert photo.icc is None and not photo.grey
    assert any("CMYK profile is damaged" in note for note in photo.notes)
    assert np.abs(photo.pixels.astype(int) - picture()).max() < 12


def ink_profile(cyan: tuple[int, int, int]) -> bytes:
    """A printer's profile by ICC.1:2010 whose full cyan has that 8-bit Lab value; paper is white, all else black."""
    grid = bytearray(16 * 3)
    for index in range(16):
        grid[3 * index : 3 * index + 3] = bytes((0, 128, 128))
    grid[0:3] = bytes((255, 128, 128))
    grid[3 * 8 : 3 * 8 + 3] = bytes(cyan)
    one, ramp = 1 << 16, bytes(range(256))
    table = b"mft1" + bytes(4) + bytes((4, 3, 2, 0)) + struct.pack(">9i", one, 0, 0, 0, one, 0, 0, 0, one)
    table += ramp * 4 + grid + ramp * 3
    table += bytes(-len(table) % 4)
    size = 128 + 4 + 12 + len(table)
    head = struct.pack(">I4sI4s4s4s", size, b"lcms", 0x02400000, b"prtr", b"CMYK", b"Lab ") + bytes(12) + b"acsp"
    white = struct.pack(">3I", 0xF6D6, 0x10000, 0xD32D)
    head = (head + bytes(28) + white).ljust(128, b"\0")
    return head + struct.pack(">I4sII", 1, b"A2B0", 144, len(table)) + table


@pytest.mark.parametrize("form", ["JPEG", "TIFF"])
def test_cmyk_is_converted_by_its_profile(tmp_path: Path, form: str) -> None:
    lab = (153, 96, 88)
    inks = np.zeros((HEIGHT, WIDTH, 4), np.uint8)
    inks[:, WIDTH // 2 :, 0] = 255
    options = {"quality": 95} if form == "JPEG" else {}
    data = encoded(form, Image.fromarray(inks, "CMYK"), icc_profile=ink_profile(lab), **options)
    photo = read(placed(tmp_path, data))
    assert photo.icc is None and photo.notes == ("converted from CMYK to sRGB by its profile",)
    # Pillow's Lab has a signed zero point in a and b.
    patch = Image.frombytes("LAB", (1, 1), bytes((lab[0], (lab[1] - 128) % 256, (lab[2] - 128) % 256)))
    to_srgb = ImageCms.profileToProfile(
        patch, ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB"), outputMode="RGB"
    )
    assert to_srgb is not None
    assert np.abs(photo.pixels[HEIGHT // 2, 5].astype(int) - 255).max() <= 3
    assert np.abs(photo.pixels[HEIGHT // 2, -5].astype(int) - np.asarray(to_srgb)[0, 0]).max() <= 6


def test_cmyk_without_a_profile_is_said_aloud(tmp_path: Path) -> None:
    for form in ("JPEG", "TIFF"):
        photo = read(placed(tmp_path, encoded(form, Image.fromarray(picture()).convert("CMYK"))))
        assert any("CMYK without a profile" in note for note in photo.notes)
        write(tmp_path / "out.jpg", photo)
        with Image.open(tmp_path / "out.jpg") as image:
            assert image.mode == "RGB"


def test_comments_iptc_and_xmp_of_a_jpeg(tmp_path: Path) -> None:
    iptc = b"8BIM\x04\x04\0\0" + struct.pack(">I", 5) + b"\x1c\x02\x78\0\0" + b"\0"
    thumbnail = b"8BIM\x04\x0c\0\0" + struct.pack(">I", 4) + b"oldp"
    block = b"Photoshop 3.0\0" + thumbnail + iptc
    app13 = b"\xff\xed" + struct.pack(">H", len(block) + 2) + block
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><a tiff:Orientation="6" exif:PixelXDimension="60"/></x:xmpmeta>'
    exif = Image.Exif()
    exif[0x112] = 6
    data = encoded("JPEG", comment=b"hello", xmp=xmp, exif=exif.tobytes())
    photo = read(placed(tmp_path, data[:20] + app13 + data[20:]))
    assert photo.notes == ()
    write(tmp_path / "out.jpg", photo)
    written = (tmp_path / "out.jpg").read_bytes()
    assert iptc in written and b"oldp" not in written
    with Image.open(tmp_path / "out.jpg") as image:
        assert image.info["comment"] == b"hello"
        assert b'tiff:Orientation="1" exif:PixelXDimension="40"' in image.info["xmp"]
    lost = write(tmp_path / "out.png", photo)
    assert len(lost) == 2 and "IPTC" in lost[0] and "comments" in lost[1]


def test_motion_photo_xmp_is_not_kept(tmp_path: Path) -> None:
    photo = read(placed(tmp_path, encoded("JPEG", xmp=b'<a GCamera:MotionPhoto="1"/>') + b"video"))
    assert photo.xmp is None and len(photo.notes) == 2


def test_a_large_profile_is_split_and_joined(tmp_path: Path) -> None:
    icc = bytearray(srgb()) + np.random.default_rng(0).bytes(150_000)
    icc[:4] = len(icc).to_bytes(4, "big")
    photo = read(placed(tmp_path, encoded("JPEG", icc_profile=bytes(icc))))
    assert photo.icc == bytes(icc)
    write(tmp_path / "out.jpg", photo)
    with Image.open(tmp_path / "out.jpg") as image:
        assert image.info["icc_profile"] == bytes(icc)


@pytest.mark.parametrize("unit", [1, 2])
def test_jfif_density_keeps_its_unit(tmp_path: Path, unit: int) -> None:
    data = bytearray(encoded("JPEG"))
    data[13:18] = struct.pack(">BHH", unit, 118, 119)
    write(tmp_path / "out.jpg", read(placed(tmp_path, bytes(data))))
    assert (tmp_path / "out.jpg").read_bytes()[13:18] == data[13:18]


# --- EXIF and profiles


def exif_with_thumbnail(order: str) -> bytes:
    """Orientation 8, a maker note at the end of the main part, then a directory with a thumbnail."""
    note = b"MAKERNOTE-WITH-OFFSETS"
    main = struct.pack(
        order + "H HHIHH HHII I",
        *(2, 0x112, 3, 1, 8, 0, 0x927C, 7, len(note), 38, 60),
    )
    assert 8 + len(main) == 38
    thumbnail = encoded("JPEG", Image.fromarray(picture()).resize((8, 8)))
    second = struct.pack(order + "H HHII HHII I", 2, 0x201, 4, 1, 90, 0x202, 4, 1, len(thumbnail), 0)
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "I", 8)
    return b"Exif\0\0" + head + main + note + second + thumbnail


@pytest.mark.parametrize("order", "<>")
def test_thumbnail_goes_and_the_rest_stays_in_place(tmp_path: Path, order: str) -> None:
    source = exif_with_thumbnail(order)
    write(tmp_path / "out.jpg", read(placed(tmp_path, encoded("JPEG", exif=source))))
    with Image.open(tmp_path / "out.jpg") as image:
        written = image.info["exif"]
        assert image.getexif()[0x112] == 1
        assert image.getexif().get_ifd(1) == {}
    assert written[6 + 38 :] == b"MAKERNOTE-WITH-OFFSETS"
    assert len(written) == 6 + 60 and b"\xff\xd8" not in written


def test_damaged_exif_is_said_aloud(tmp_path: Path) -> None:
    photo = read(placed(tmp_path, encoded("JPEG", exif=b"Exif\0\0garbage!")))
    assert photo.exif is None and photo.notes == ("the EXIF block is damaged and is not kept",)


def test_sizes_in_the_exif_follow_the_pixels(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x100], exif[0x101] = WIDTH, HEIGHT
    exif.get_ifd(0x8769).update({0xA002: WIDTH, 0xA003: HEIGHT})
    photo = read(placed(tmp_path, encoded("JPEG", exif=exif.tobytes())))
    write(tmp_path / "out.jpg", photo.with_pixels(np.zeros((80, 70, 3), np.uint8)))
    with Image.open(tmp_path / "out.jpg") as image:
        found = image.getexif()
        assert (found[0x100], found[0x101]) == (70, 80)
        assert (found.get_ifd(0x8769)[0xA002], found.get_ifd(0x8769)[0xA003]) == (70, 80)


@pytest.mark.parametrize(("space", "grey", "kept"), [("RGB ", False, True), ("GRAY", False, False),
                                                     ("GRAY", True, True), ("CMYK", False, False)])  # fmt: skip
@pytest.mark.parametrize("form", ["JPEG", "PNG", "TIFF"])
def test_only_fitting_profiles_are_kept(tmp_path: Path, form: str, space: str, grey: bool, kept: bool) -> None:
    icc = bytearray(srgb())
    icc[16:20] = space.encode()
    image = Image.fromarray(picture()).convert("L" if grey else "RGB")
    photo = read(placed(tmp_path, encoded(form, image, icc_profile=bytes(icc))))
    assert photo.icc == (bytes(icc) if kept else None)
    assert any("colour profile" in note for note in photo.notes) != kept


def test_a_damaged_profile_is_said_aloud(tmp_path: Path) -> None:
    photo = read(placed(tmp_path, encoded("PNG", icc_profile=b"junk" * 50)))
    assert photo.icc is None and photo.notes == ("the colour profile is damaged and is not kept",)


# --- PNG


@pytest.mark.parametrize("mode", ["1", "L", "P", "LA", "RGB", "RGBA", "I;16"])
def test_png_modes(tmp_path: Path, mode: str) -> None:
    if mode == "I;16":
        image = Image.fromarray(picture()[..., 0].astype(np.uint16) * 257)
    else:
        image = Image.fromarray(picture()).convert(mode)
    photo = read(placed(tmp_path, encoded("PNG", image)))
    assert photo.grey == (mode in ("1", "L", "LA", "I;16"))
    assert (photo.alpha is not None) == (mode in ("LA", "RGBA"))
    expected = picture()[..., :1].repeat(3, 2) if mode == "I;16" else np.asarray(image.convert("RGB"))
    assert np.array_equal(photo.rgb8(), expected)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_shallow_grey_with_a_transparent_level(tmp_path: Path, depth: int) -> None:
    top = (1 << depth) - 1
    levels = np.arange(16) % (top + 1)
    bits = "".join(f"{level:0{depth}b}" for level in levels)
    row = int(bits, 2).to_bytes(len(bits) // 8, "big")
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", len(levels), 1, depth, 0, 0, 0, 0))
    body = png_chunk(b"tRNS", struct.pack(">H", top)) + png_chunk(b"IDAT", zlib.compress(b"\0" + row))
    photo = read(placed(tmp_path, b"\x89PNG\r\n\x1a\n" + header + body + png_chunk(b"IEND", b"")))
    assert photo.grey and photo.alpha is not None
    assert np.array_equal(photo.pixels[0, :, 0], levels * (255 // top))
    assert np.array_equal(photo.alpha[0] == 0, levels == top)


@pytest.mark.parametrize("mode", ["P", "L", "RGB"])
def test_transparent_colour(tmp_path: Path, mode: str) -> None:
    image = Image.fromarray(picture())
    image = image.quantize(16) if mode == "P" else image.convert(mode)
    key = {"P": 3, "L": int(np.asarray(image)[7, 9].max()), "RGB": tuple(int(v) for v in picture()[7, 9])}[mode]
    data = encoded("PNG", image, transparency=key)
    photo = read(placed(tmp_path, data))
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGBA"))
    assert photo.alpha is not None and (photo.alpha == 0).any() and (photo.alpha == 255).any()
    assert np.array_equal(photo.alpha, expected[..., 3])
    assert np.array_equal(photo.pixels, expected[..., :3])


def test_interlaced_png(tmp_path: Path) -> None:
    passes = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
    parts = [picture()[y::step_y, x::step_x] for x, y, step_x, step_y in passes]
    rows = b"".join(b"\0" + row.tobytes() for part in parts for row in part)
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", WIDTH, HEIGHT, 8, 2, 0, 0, 1))
    data = header + png_chunk(b"IDAT", zlib.compress(rows)) + png_chunk(b"IEND", b"")
    photo = read(placed(tmp_path, b"\x89PNG\r\n\x1a\n" + data))
    assert np.array_equal(photo.pixels, picture())


def test_animated_png_and_webp_give_their_first_picture(tmp_path: Path) -> None:
    more = [Image.fromarray(noisy_picture())]
    for form, options in (("PNG", {}), ("WEBP", {"lossless": True}), ("GIF", {})):
        image = Image.fromarray(picture())
        if form == "GIF":
            image = image.quantize(64)
        photo = read(placed(tmp_path, encoded(form, image, save_all=True, append_images=more, **options)))
        assert photo.notes == ("only the first picture of the animation is kept",)
        assert np.array_equal(photo.pixels, np.asarray(image.convert("RGB")))


def test_png_texts_and_colour_chunks_stay(tmp_path: Path) -> None:
    text = png_chunk(b"tEXt", b"Author\0me") + png_chunk(b"gAMA", struct.pack(">I", 45455))
    photo = read(placed(tmp_path, png_with(text)))
    write(tmp_path / "out.png", photo)
    with Image.open(tmp_path / "out.png") as image:
        assert image.info["Author"] == "me" and image.info["gamma"] == pytest.approx(0.45455)
    assert write(tmp_path / "out.jpg", photo) == ("the comments of the png file are not kept in jpeg",)


def test_exif_in_a_text_chunk_of_a_png(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x112] = 3
    block = exif.tobytes()
    text = b"Raw profile type exif\0\0" + zlib.compress(b"\nexif\n%8d\n" % len(block) + block.hex().encode() + b"\n")
    photo = read(placed(tmp_path, png_with(png_chunk(b"zTXt", text))))
    assert np.array_equal(photo.pixels, picture()[::-1, ::-1])
    write(tmp_path / "out.png", photo)
    assert np.array_equal(read(tmp_path / "out.png").pixels, photo.pixels)


def test_a_text_bomb_in_a_png_is_ignored(tmp_path: Path) -> None:
    text = b"Raw profile type exif\0\0" + zlib.compress(bytes(400 << 20), 1)
    path = placed(tmp_path, png_with(png_chunk(b"zTXt", text)))
    tracemalloc.start()
    try:
        photo = read(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert photo.exif is None
    assert peak < 200 << 20


# --- WebP


def test_webp_stays_lossless_or_lossy(tmp_path: Path) -> None:
    for lossless in (True, False):
        photo = read(placed(tmp_path, encoded("WEBP", lossless=lossless)))
        write(tmp_path / "out.webp", photo)
        assert photo.lossless == lossless == (b"VP8L" in (tmp_path / "out.webp").read_bytes()[:64])
    write(tmp_path / "out.webp", read(placed(tmp_path, encoded("PNG"))), quality=60)
    assert b"VP8 " in (tmp_path / "out.webp").read_bytes()[:64]


def test_colours_under_transparency_without_pillow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photo = read(placed(tmp_path, encoded("PNG", rgba_image())))
    without(monkeypatch, "PIL")
    (note,) = write(tmp_path / "out.webp", photo)
    assert 'pip install "gpen-core[formats]"' in note
    assert np.array_equal(read(tmp_path / "out.webp").pixels[photo.alpha != 0], photo.pixels[photo.alpha != 0])


def test_lossy_webp_with_alpha_and_metadata(tmp_path: Path) -> None:
    data = encoded("WEBP", rgba_image(), quality=80, icc_profile=srgb(), xmp=b"<x/>")
    photo = read(placed(tmp_path, data))
    write(tmp_path / "out.webp", photo)
    with Image.open(tmp_path / "out.webp") as image:
        assert image.mode == "RGBA" and image.info["icc_profile"] == srgb() and image.info["xmp"] == b"<x/>"
        assert np.array_equal(np.asarray(image)[..., 3], np.asarray(rgba_image())[..., 3])


# --- TIFF


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("big", [False, True])
@pytest.mark.parametrize("packing", ["none", "none tiled", "zlib", "zlib predictor", "zlib predictor tiled"])
@pytest.mark.parametrize("planar", ["contig", "separate"])
@pytest.mark.parametrize(("dtype", "channels"), [("u1", 1), ("u1", 2), ("u1", 3), ("u1", 4), ("u1", 5),
                                                 ("u2", 1), ("u2", 2), ("u2", 3), ("u2", 4)])  # fmt: skip
def test_tiff_layouts(
    tmp_path: Path, dtype: str, channels: int, planar: str, packing: str, big: bool, order: Any
) -> None:
    if channels == 1 and planar == "separate":
        return
    stored = np.random.default_rng(1).integers(0, np.iinfo(dtype).max + 1, (50, 70, channels)).astype(dtype)
    colours = 1 if channels < 3 else 3
    tifffile.imwrite(
        tmp_path / "in.tif",
        stored[..., 0] if channels == 1 else stored.transpose(2, 0, 1) if planar == "separate" else stored,
        byteorder=order,
        bigtiff=big,
        compression="zlib" if "zlib" in packing else None,
        predictor="predictor" in packing,
        tile=(32, 48) if "tiled" in packing else None,
        rowsperstrip=None if "tiled" in packing else 16,
        planarconfig=planar if channels > 1 else None,
        photometric="rgb" if colours == 3 else "minisblack",
        extrasamples=["unassalpha"] * (channels - colours) or None,
        metadata=None,
    )
    photo = read(tmp_path / "in.tif")
    assert np.array_equal(photo.pixels, np.broadcast_to(stored[..., :colours], (50, 70, 3)))
    assert photo.pixels.dtype == stored.dtype
    if channels > colours:
        assert photo.alpha is not None and np.array_equal(photo.alpha, stored[..., colours])
    write(tmp_path / "out.tif", photo)
    assert np.array_equal(tifffile.imread(tmp_path / "out.tif").reshape(50, 70, -1), stored[..., : colours + 1])


@pytest.mark.parametrize("compression", ["tiff_lzw", "tiff_adobe_deflate", "packbits", "group4", "jpeg", None])
@pytest.mark.parametrize("mode", ["1", "L", "P", "LA", "RGB", "RGBA", "YCbCr"])
def test_tiff_modes(tmp_path: Path, mode: str, compression: str | None) -> None:
    image = Image.fromarray(picture()).convert(mode)
    if (compression == "group4") != (mode == "1" and compression is not None) or (
        compression == "jpeg" and mode not in ("L", "RGB")
    ):
        return
    data = encoded("TIFF", image, compression=compression)
    photo = read(placed(tmp_path, data))
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int)
    assert np.abs(photo.pixels - expected).max() <= (1 if mode == "YCbCr" else 0)
    assert photo.grey == (mode in ("1", "L", "LA"))


@pytest.mark.parametrize("dtype", ["u1", "u2"])
def test_tiff_where_white_is_zero(tmp_path: Path, dtype: str) -> None:
    stored = np.random.default_rng(1).integers(0, np.iinfo(dtype).max + 1, (50, 70)).astype(dtype)
    tifffile.imwrite(tmp_path / "in.tif", stored, photometric="miniswhite")
    assert np.array_equal(read(tmp_path / "in.tif").pixels[..., 0], ~stored)


@pytest.mark.parametrize("dtype", ["f4", "f2", "u4", "i2", "f8"])
def test_deep_tiffs_are_refused_clearly(tmp_path: Path, dtype: str) -> None:
    tifffile.imwrite(tmp_path / "in.tif", np.zeros((50, 70), dtype))
    assert "save it with 8 or 16" in reason(tmp_path / "in.tif")


def test_lab_tiff_is_refused_clearly(tmp_path: Path) -> None:
    assert "CIE Lab" in reason(placed(tmp_path, encoded("TIFF", Image.fromarray(picture()).convert("LAB"))))


def test_raw_files_are_not_taken_for_their_thumbnail(tmp_path: Path) -> None:
    version = [(50706, "B", 4, b"\1\4\0\0", True)]
    tifffile.imwrite(tmp_path / "in.dng", picture(), photometric="rgb", extratags=version)
    assert "camera raw" in reason(tmp_path / "in.dng")


def test_first_page_of_several(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "in.tif", np.stack([picture(), noisy_picture()]), photometric="rgb")
    photo = read(tmp_path / "in.tif")
    assert photo.notes == ("only the first of several pages is kept",)
    assert np.array_equal(photo.pixels, picture())


@pytest.mark.parametrize("role", ["assocalpha", "unspecified"])
def test_other_extra_channels_of_a_tiff(tmp_path: Path, role: str) -> None:
    rgba = np.dstack([picture() // 2, np.full((HEIGHT, WIDTH), 128, np.uint8)])
    tifffile.imwrite(tmp_path / "in.tif", rgba, photometric="rgb", extrasamples=[role], planarconfig="contig")
    photo = read(tmp_path / "in.tif")
    write(tmp_path / "out.tif", photo)
    page: Any = tifffile.TiffFile(tmp_path / "out.tif").pages[0]
    assert np.array_equal(page.asarray(), rgba)
    assert page.extrasamples == {"assocalpha": (1,), "unspecified": (0,)}[role]
    lost = write(tmp_path / "out.png", photo)
    with Image.open(tmp_path / "out.png") as image:
        if role == "unspecified":
            assert image.mode == "RGB" and lost == ("PNG can't hold the unspecified extra channel",)
        else:
            straight = np.rint(rgba[..., :3] * (255 / 128)).clip(0, 255)
            assert image.mode == "RGBA" and np.array_equal(np.asarray(image)[..., :3], straight)


def test_tiff_without_compression_stays_so(tmp_path: Path) -> None:
    for compression, code in ((None, 1), ("tiff_lzw", 8)):
        write(tmp_path / "out.tif", read(placed(tmp_path, encoded("TIFF", compression=compression))))
        with Image.open(tmp_path / "out.tif") as image:
            assert image.tag_v2[259] == code


def test_tiff_fields_survive_into_jpeg_and_back(tmp_path: Path) -> None:
    source = tmp_path / "in.tif"
    fields = [(270, "s", 0, "A caption", True), (315, "s", 0, "The artist", True)]
    tifffile.imwrite(source, picture(), photometric="rgb", extratags=fields, byteorder=">", metadata=None)
    write(tmp_path / "out.jpg", read(source))
    write(tmp_path / "back.tif", read(tmp_path / "out.jpg"))
    for path in (tmp_path / "out.jpg", tmp_path / "back.tif"):
        with Image.open(path) as image:
            assert (image.getexif()[270], image.getexif()[315]) == ("A caption", "The artist")


# --- BMP, extras


def test_bmp_kinds(tmp_path: Path) -> None:
    for mode in ("1", "L", "P", "RGB"):
        image = Image.fromarray(picture()).convert(mode)
        photo = read(placed(tmp_path, encoded("BMP", image, dpi=(200, 200))))
        assert np.array_equal(photo.pixels, np.asarray(image.convert("RGB")))
        assert photo.grey == (mode in ("1", "L"))
        write(tmp_path / "out.bmp", photo)
        with Image.open(tmp_path / "out.bmp") as written:
            assert written.info["dpi"] == pytest.approx((200, 200), rel=1e-3)


def test_bmp_with_alpha_from_both_ends(tmp_path: Path) -> None:
    photo = read(placed(tmp_path, encoded("PNG", rgba_image())))
    write(tmp_path / "out.bmp", photo)
    assert np.array_equal(np.asarray(Image.open(tmp_path / "out.bmp").convert("RGBA")), np.asarray(rgba_image()))
    data = bytearray((tmp_path / "out.bmp").read_bytes())
    data[22:26] = struct.pack("<i", -HEIGHT)
    flipped = read(placed(tmp_path, bytes(data)))
    assert np.array_equal(flipped.pixels, photo.pixels[::-1]) and flipped.alpha is not None


def test_avif_keeps_profile_exif_and_alpha(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x112], exif[0x10F] = 6, "Maker"
    data = encoded("AVIF", rgba_image(), quality=95, exif=exif.tobytes(), icc_profile=srgb())
    photo = read(placed(tmp_path, data))
    assert photo.pixels.shape == (WIDTH, HEIGHT, 3) and photo.alpha is not None
    write(tmp_path / "out.avif", photo)
    with Image.open(tmp_path / "out.avif") as image:
        assert image.size == (HEIGHT, WIDTH) and image.mode == "RGBA"
        assert image.getexif().get(0x112, 1) == 1 and image.getexif()[0x10F] == "Maker"
        assert image.info["icc_profile"] == srgb()


def test_heic(tmp_path: Path) -> None:
    pillow_heif = pytest.importorskip("pillow_heif", reason="pillow-heif, an extra with GPL parts, is not installed")
    exif = Image.Exif()
    exif[0x112], exif[0x10F] = 6, "Maker"
    image = Image.fromarray(picture())
    pillow_heif.from_pillow(image).save(tmp_path / "plain.heic", quality=95, chroma=444)
    photo = read(tmp_path / "plain.heic")
    assert photo.format == "heic" and np.abs(photo.pixels.astype(int) - picture()).max() < 20
    write(tmp_path / "out.heic", photo)
    assert np.abs(read(tmp_path / "out.heic").pixels.astype(int) - picture()).max() < 25
    source = read(placed(tmp_path, encoded("JPEG", exif=exif.tobytes(), icc_profile=srgb(), quality=95)))
    write(tmp_path / "out.heic", source)
    again = read(tmp_path / "out.heic")
    assert again.pixels.shape == (WIDTH, HEIGHT, 3) and again.icc == srgb() and again.exif is not None


def without(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Make the package look as if it were not installed."""
    real = builtins.__import__

    def refusing(name: str, *rest: Any, **options: Any) -> Any:
        if name.split(".")[0] == package:
            raise ImportError(name)
        return real(name, *rest, **options)

    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(builtins, "__import__", refusing)


@pytest.mark.parametrize("kind", ["gif", "avif", "jpeg cmyk"])
def test_a_missing_extra_is_named(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = placed(tmp_path, samples()[kind])
    plain = read(placed(tmp_path, encoded("PNG"), "plain.png"))
    without(monkeypatch, "PIL")
    assert 'pip install "gpen-core[formats]"' in reason(path)
    with pytest.raises(ImageError, match=r"gpen-core\[formats\]"):
        write(tmp_path / "out.avif", plain)


def test_a_missing_heic_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = placed(tmp_path, b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(100))
    plain = read(placed(tmp_path, encoded("PNG"), "plain.png"))
    without(monkeypatch, "pillow_heif")
    assert 'pip install "gpen-core[heic]"' in reason(path)
    with pytest.raises(ImageError, match=r"gpen-core\[heic\]"):
        write(tmp_path / "out.heic", plain)


def test_the_common_formats_need_no_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {kind: samples()[kind] for kind in ("jpeg", "png", "webp", "tiff", "bmp")}
    without(monkeypatch, "PIL")
    for kind, data in files.items():
        path = placed(tmp_path, data, f"in.{kind}")
        write(tmp_path / f"out.{kind}", read(path))


# --- Writing


def photo_of(pixels: NDArray[Any], **options: Any) -> Photo:
    return Photo(pixels, options.pop("grey", False), options.pop("alpha", None), "png", **options)


def test_transparency_does_not_vanish_in_a_jpeg(tmp_path: Path) -> None:
    alpha = np.full((HEIGHT, WIDTH), 255, np.uint8)
    write(tmp_path / "opaque.jpg", photo_of(picture(), alpha=alpha))
    alpha[3, 3] = 254
    with pytest.raises(ImageError, match=r"JPEG can't hold its transparency"):
        write(tmp_path / "out.jpg", photo_of(picture(), alpha=alpha))
    assert [p.name for p in tmp_path.iterdir()] == ["opaque.jpg"]


@pytest.mark.parametrize("suffix", [".jpg", ".webp", ".bmp", ".avif"])
def test_losing_sixteen_bits_is_said_aloud(tmp_path: Path, suffix: str) -> None:
    (note,) = write(tmp_path / f"out{suffix}", photo_of(picture().astype(np.uint16) * 257))
    assert "16-bit original is rounded" in note


@pytest.mark.parametrize("name", ["out", "out.xyz", "out.gif"])
def test_unknown_suffix(tmp_path: Path, name: str) -> None:
    with pytest.raises(ImageError, match=r"can't write .*choose one of"):
        write(tmp_path / name, photo_of(picture()))
    assert not list(tmp_path.iterdir())


def test_format_can_be_named(tmp_path: Path) -> None:
    write(tmp_path / "out.data", photo_of(picture()), format="png")
    assert np.array_equal(np.asarray(Image.open(tmp_path / "out.data")), picture())
    with pytest.raises(ImageError, match="quality must lie between"):
        write(tmp_path / "out.jpg", photo_of(picture()), quality=0)


@pytest.mark.parametrize("suffix", [".jpg", ".webp"])
def test_too_large_for_the_format(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(ImageError, match="70000x1 is too large for"):
        write(tmp_path / f"out{suffix}", photo_of(np.zeros((1, 70000, 3), np.uint8)))


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    old = placed(tmp_path, b"old", "out.jpg")
    with pytest.raises(ImageError):
        write(old, photo_of(picture(), alpha=np.zeros((HEIGHT, WIDTH), np.uint8)))
    assert old.read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 1
    with pytest.raises(ImageError, match="no such file or folder"):
        write(tmp_path / "absent" / "out.jpg", photo_of(picture()))
    (tmp_path / "folder.jpg").mkdir()
    with pytest.raises(ImageError, match="folder"):
        write(tmp_path / "folder.jpg", photo_of(picture()))


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ImageError, match=r"out\.png: no space left on device"):
        write(tmp_path / "out.png", photo_of(picture()))
    assert not list(tmp_path.iterdir())


# --- The photo itself


def test_eight_bit_view_is_rounded() -> None:
    levels = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    photo = photo_of(np.repeat(levels[..., None], 3, 2))
    assert np.array_equal(photo.rgb8()[..., 1], (levels.astype(int) + 128) // 257)
    plain = photo_of(picture())
    assert plain.rgb8() is plain.pixels


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_other_pixels_take_the_alpha_along(dtype: Any) -> None:
    alpha = np.full((HEIGHT, WIDTH), 51, np.uint8)
    larger = photo_of(picture(), alpha=alpha).with_pixels(np.zeros((2 * HEIGHT, 2 * WIDTH, 3), dtype))
    assert larger.alpha is not None and larger.alpha.shape == (2 * HEIGHT, 2 * WIDTH)
    assert larger.alpha.dtype == dtype and np.all(larger.alpha == (51 if dtype == np.uint8 else 51 * 257))


@pytest.mark.parametrize("pixels", [np.zeros((4, 4), np.uint8), np.zeros((4, 4, 3), np.float32)])
def test_other_pixels_must_fit(pixels: NDArray[Any]) -> None:
    with pytest.raises(ImageError, match="pixels must be"):
        photo_of(picture()).with_pixels(pixels)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_grey_survives_exactly(tmp_path: Path, dtype: Any) -> None:
    levels = np.arange(np.iinfo(dtype).max + 1).astype(dtype).reshape(-1, 256)
    for suffix in (".png", ".tif"):
        write(tmp_path / f"out{suffix}", photo_of(np.repeat(levels[..., None], 3, 2), grey=True))
        assert np.array_equal(read(tmp_path / f"out{suffix}").pixels[..., 2], levels)


def test_suffixes() -> None:
    assert WRITABLE < SUFFIXES
    assert all(suffix == suffix.lower() and suffix[0] == "." for suffix in SUFFIXES)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells a process's peak memory")
@pytest.mark.parametrize(("suffix", "limit"), [(".jpg", 1.3e6), (".png", 1.3e6), (".tif", 1.3e6), (".webp", 2.8e6)])
def test_memory_of_a_hundred_megapixels(tmp_path: Path, suffix: str, limit: float) -> None:
    """In kilobytes; libwebp alone takes 2 GB for a lossless picture of this size."""
    height, width = (10000, 10000)
    row = (np.arange(width * 3) % 251).astype(np.uint8).reshape(1, width, 3)
    write(tmp_path / f"in{suffix}", photo_of(np.repeat(row, height, 0)))
    code = textwrap.dedent(
        """
        import re, sys
        from pathlib import Path
        from gpen_core.image_io import read, write
        source, target = map(Path, sys.argv[1:])
        write(target, read(source))
        # Not ru_maxrss, which a child takes over from its parent.
        print(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
        """
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, str(tmp_path / f"in{suffix}"), str(tmp_path / f"out{suffix}")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert int(done.stdout) < limit


def test_opencv_keeps_quiet_wherever_it_has_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    levels: list[int] = []
    switch = SimpleNamespace(setLogLevel=levels.append)
    monkeypatch.setattr(photo, "cv2", switch)
    photo.silence()
    monkeypatch.setattr(photo, "cv2", SimpleNamespace(utils=SimpleNamespace(logging=switch)))
    photo.silence()
    assert levels == [0, 0]
