"""Folders of photos as a user has them: what is found, what is left out, what is done again, what a kill leaves."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from gpen_core import image_io, ledger
from gpen_core.batch import WORKERS
from gpen_core.cli import run_command
from gpen_core.errors import UsageError
from gpen_core.files import replacing
from gpen_core.ledger import Ledger, settings_fingerprint
from gpen_core.plan import plan
from gpen_core.restorer import Restorer
from tests.leftovers import abandoned
from tests.legacy import TINY, legacy_state
from tests.stubs import FixedDetector, config_of, face_at, smooth_picture, without_channel_0

PICTURE = smooth_picture(120, 100)
ROOT = Path(__file__).resolve().parents[1]


def encoded(suffix: str = ".png", seed: int = 0) -> bytes:
    return cv2.imencode(suffix, smooth_picture(120, 100, seed))[1].tobytes()


def fill(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def tree(folder: Path) -> list[str]:
    """What a user sees in a folder, and unfinished files."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ledger.NAME]
    return sorted(path.relative_to(folder).as_posix() for path in files)


@pytest.fixture
def album(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with `in`, five photos and a file that is none."""
    monkeypatch.chdir(tmp_path)
    files = {f"in/{name}": encoded(".jpg" if "jpg" in name.lower() else ".png", i) for i, name in enumerate(NAMES)}
    return fill(tmp_path, {**files, "in/notes.txt": b"none"})


NAMES = ["a.png", "b.JPG", "sub/c.Png", "sub/deep er/d.jpeg", "sub/ä.png"]


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """`enhance` with a network that removes red from one face; one entry for each photo restored."""
    seen: list[Any] = []
    detector: Any = FixedDetector([face_at(60, 50, 64)])

    class Counted(Restorer):
        def finish(self, prepared: Any, *results: Any) -> Any:
            seen.append(prepared.image)
            return super().finish(prepared, *results)

    monkeypatch.setattr(
        Restorer, "load", classmethod(lambda *a, **k: Counted(without_channel_0, config_of(), detector))
    )
    monkeypatch.chdir(tmp_path)
    fill(tmp_path, {"weights.safetensors": b"weights", "detector.onnx": b"detector"})
    return seen


def enhance(*arguments: str, weights: str = "weights.safetensors") -> int:
    return run_command(["enhance", *arguments, "--weights", weights, "--detector", "detector.onnx"])


def statuses(path: str) -> dict[str, int]:
    found = [json.loads(line)["status"] for line in Path(path).read_text().splitlines()]
    return {status: found.count(status) for status in set(found)}


# What is found, and where it goes.


def test_a_tree_is_mirrored(album: Path, calls: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in album.rglob("in/**/*") if path.is_file()}
    assert enhance("in", "-o", "out", "--recursive") == 0
    assert tree(Path("out")) == sorted(NAMES)
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 5
    assert captured.err.startswith("gpen-core: 5 restored, 0 no face, 0 failed, 0 skipped in ")
    assert captured.err.count("\n") == 1
    assert {path: path.read_bytes() for path in before} == before


def test_what_counts_as_a_photo(tmp_path: Path) -> None:
    links = {"link.jpg": "photo.jpg", "broken.jpg": "nowhere.jpg"}
    folder = fill(
        tmp_path / "in",
        {
            "photo.jpg": encoded(".jpg"),
            "IMG_0001": encoded(".jpg"),
            "README": b"no photo",
            "raw.cr2": b"II*\0 camera data",
            "._photo.jpg": b"left by macOS",
            ".hidden/photo.jpg": encoded(".jpg"),
            "page.jpg": b"<html>",
            "empty": b"",
        },
    )
    (folder / "folder.jpg").mkdir()
    for name, target in links.items():
        (folder / name).symlink_to(target)
    found = [job.source.name for job in plan([folder], tmp_path / "out", recursive=True)]
    assert found == ["IMG_0001", "broken.jpg", "link.jpg", "page.jpg", "photo.jpg"]


def test_names_and_formats_are_kept(tmp_path: Path, calls: list[Any]) -> None:
    from PIL import Image

    fill(tmp_path / "in", {"IMG_0001": encoded(".jpg"), "really_webp.jpg": encoded(".webp"), "x.png": encoded()})
    Image.fromarray(PICTURE).save("in/x.gif")
    assert enhance("in", "-o", "out") == 0
    formats = {name: image_io.read(Path("out") / name).format for name in tree(Path("out"))}
    assert formats == {"IMG_0001": "jpeg", "really_webp.jpg": "webp", "x.png": "png", "x.gif.png": "png"}


def test_the_output_folder_is_no_input(album: Path, calls: list[Any]) -> None:
    for _ in range(2):
        assert enhance("in", "-o", "in/sub/out", "--recursive") == 0
    assert tree(Path("in/sub/out")) == sorted(NAMES)
    assert len(calls) == 10


def test_results_beside_their_sources_are_no_input(album: Path, calls: list[Any]) -> None:
    fill(album, {"in/other_restored.png": encoded()})
    for _ in range(2):
        assert enhance("in", "--recursive") == 0
    assert len(calls) == 12
    assert "other_restored_restored.png" in tree(Path("in"))
    assert "a_restored_restored.png" not in tree(Path("in"))


def test_results_that_are_left_out_are_told_of(
    album: Path, calls: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    fill(album, {"in/a_restored.png": encoded()})
    assert enhance("in", "-o", "out") == 0
    assert "left out" not in capsys.readouterr().err
    assert enhance("in", "--recursive") == 0
    line = f"in: a result of earlier runs left out, by name: {Path('in/a_restored.png')}\n"
    assert capsys.readouterr().err.startswith(line)
    assert enhance("in", "--recursive") == 0
    assert capsys.readouterr().err.startswith("in: 5 results of earlier runs left out, by name: in/a_restored.png, in/")
    fill(album, {f"in/a_face{i}_crop.png": encoded() for i in range(9)})
    fill(album, {f"in/a.png_face{i}_crop.png": encoded() for i in range(9)})
    assert enhance("in", "--recursive") == 0
    told = capsys.readouterr().err.splitlines()[0]
    assert told.startswith("in: 14 results of earlier runs left out, by name: in/a.png_face0_crop.png, ")
    assert told.endswith(", in/a.png_face4_crop.png and 9 more")


REPLACED = "gpen-core: a file is replaced that no record of an earlier run names: "


@pytest.mark.parametrize(
    ("arguments", "replaced"),
    [
        (["in"], "in/a_restored.png"),
        (["in/a.png"], "in/a_restored.png"),
        (["in", "-o", "out"], "out/a.png"),
        (["in", "-o", "out", "--skip-existing"], "out/a.png"),
        (["in/a.png", "-o", "out/"], "out/a.png"),
        (["in/a.png", "-o", "out/other.png", "--compare"], "out/other_compare.png"),
    ],
)
def test_a_file_that_is_replaced_and_was_not_named(
    arguments: list[str], replaced: str, album: Path, calls: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    fill(album, {replaced: encoded(".png", 9)})
    assert enhance(*arguments) == 0
    assert f"{REPLACED}{Path(replaced)}\n" in capsys.readouterr().err
    # Recorded now, unless single photos were named.
    if arguments[0] == "in":
        assert enhance(*arguments) == 0
        assert "replaced" not in capsys.readouterr().err


def test_what_is_named_is_replaced_in_silence(
    album: Path, calls: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    fill(album, {"out/other.png": encoded(".png", 9), f"out/{ledger.NAME}/x": b""})
    assert enhance("in/a.png", "-o", "out/other.png") == 0
    assert capsys.readouterr().err == ""
    for _ in range(2):
        assert enhance("in/a.png", "-o", "out/") == 0
    assert capsys.readouterr().err == f"{REPLACED}{Path('out/a.png')}\n"


def test_gifs_beside_pictures_of_the_same_stem(tmp_path: Path, calls: list[Any]) -> None:
    from PIL import Image

    fill(tmp_path, {"in/x.png": encoded()})
    Image.fromarray(PICTURE).save("in/x.gif")
    for _ in range(2):
        assert enhance("in") == 0
    assert tree(Path("in")) == ["x.gif", "x.gif_restored.png", "x.png", "x_restored.png"]


def test_links_to_folders_are_not_followed(album: Path, calls: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    Path("in/sub/loop").symlink_to("..")
    Path("in/self.png").symlink_to("self.png")
    assert enhance("in", "-o", "out", "--recursive") == 3
    assert tree(Path("out")) == sorted(NAMES)
    err = capsys.readouterr().err
    assert "in/sub/loop: a link to a folder is not followed" in err
    assert "in/self.png: too many levels of symbolic links" in err
    assert enhance("in/sub/loop", "-o", "other") == 3
    assert tree(Path("other")) == ["a.png", "b.JPG"]


def test_a_folder_that_cannot_be_read(album: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listing = Path.iterdir

    def iterdir(self: Path) -> Iterator[Path]:
        if self.name == "sub":
            raise PermissionError(13, "Permission denied", str(self))
        return listing(self)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    jobs = plan([Path("in")], Path("out"), recursive=True)
    assert [job.problem for job in jobs] == ["", "", f"{Path('in/sub')}: permission denied"]


@pytest.mark.parametrize(
    ("inputs", "output"),
    [(["in"], "in"), (["in/a.png", "in/sub/c.Png"], "in"), (["in/a.png", "a_restored.png"], None), (["in", "x"], "y")],
)
def test_no_source_is_replaced(inputs: list[str], output: str | None, album: Path) -> None:
    fill(album, {"a_restored.png": encoded(), "x/a.png": encoded()})
    if output is None:
        shutil.move("in/a.png", "a.png")
        inputs = ["a.png", "a_restored.png"]
    with pytest.raises(UsageError):
        plan([Path(name) for name in inputs], None if output is None else Path(output), recursive=True)


def test_a_folder_without_photos(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    fill(tmp_path, {"in/sub/a.png": encoded(), "in/b.txt": b""})
    assert run_command(["enhance", "in", "-o", "out"]) == 4
    assert "no photos found (--recursive" in capsys.readouterr().err
    assert not Path("out").exists()


def test_a_folder_of_bad_files(album: Path, calls: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    whole = encoded(".jpg")
    bad = {
        "empty.jpg": b"",
        "page.jpg": b"<!DOCTYPE html>",
        "text.jpg": b"hello",
        "cut.jpg": whole[: len(whole) // 2],
        # The header of a PNG of 20000 x 12000.
        "bomb.png": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0N \0\0.\xe0\x08\2\0\0\0" + b"\x8b\xd1\x1c\x9d",
    }
    fill(album / "in", bad)
    assert enhance("in", "-o", "out", "--recursive", "--report", "report.jsonl") == 3
    assert tree(Path("out")) == sorted(NAMES)
    captured = capsys.readouterr()
    assert "5 restored, 0 no face, 5 failed" in captured.err
    for name in bad:
        assert name in captured.err
    assert "Traceback" not in captured.err
    assert statuses("report.jsonl") == {"restored": 5, "failed": 5}


# Reports and limits.


def test_the_report(album: Path, calls: list[Any]) -> None:
    assert enhance("in", "-o", "out", "--recursive", "--report", "report.jsonl") == 0
    records = [json.loads(line) for line in Path("report.jsonl").read_text().splitlines()]
    assert [record["input"] for record in records] == [str(Path("in") / name) for name in NAMES]
    assert all(Path(record["output"]).is_file() for record in records)
    assert all(record["status"] == "restored" and record["seconds"] and record["faces"] for record in records)


def test_a_report_in_a_new_folder(album: Path, calls: list[Any]) -> None:
    assert enhance("in/a.png", "-o", "out/", "--report", "out/logs/report.jsonl") == 0
    assert statuses("out/logs/report.jsonl") == {"restored": 1}


@pytest.mark.parametrize("path", ["in/a.png", "out/a.png", "in/a.png/report.jsonl", "in"])
def test_a_report_that_would_do_harm(
    path: str, album: Path, calls: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    before = Path("in/a.png").read_bytes()
    assert enhance("in", "-o", "out", "--report", path) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert Path("in/a.png").read_bytes() == before
    assert calls == []


FOREIGN = {
    "text": b"my notes\n",
    "a photo": encoded(),
    "objects of another kind": b'{"input": "a.png"}\n{"input": "b.png"}\n',
    "one object": b'{"input": "a.png", "output": null, "status": "failed", "faces": [], "seconds": {}, \n',
    "more than a report": b"%smy notes\n",
    "notes at its end": b"%smy notes",
    "a line that is no object": b"%s[]\n",
}
LEFT = {"nothing": b"", "a report": b"%s", "a line cut short": b'%s{"input": "in/b', "a first line cut short": b'{"inp'}


def earlier_report() -> bytes:
    assert enhance("in", "-o", "earlier", "--report", "earlier.jsonl") == 0
    return Path("earlier.jsonl").read_bytes()


@pytest.mark.parametrize("content", FOREIGN)
def test_a_report_replaces_no_other_file(
    content: str, album: Path, calls: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    before = FOREIGN[content].replace(b"%s", earlier_report())
    Path("mine").write_bytes(before)
    capsys.readouterr()
    calls.clear()
    assert enhance("in", "-o", "out", "--report", "mine") == 1
    line = "gpen-core: --report mine: a file is there that is no report; remove it or choose another name\n"
    assert capsys.readouterr().err == line
    assert Path("mine").read_bytes() == before
    assert calls == []
    assert not Path("out").exists()


@pytest.mark.parametrize("content", LEFT)
def test_a_report_replaces_an_earlier_one(content: str, album: Path, calls: list[Any]) -> None:
    Path("report").write_bytes(LEFT[content].replace(b"%s", earlier_report()))
    assert enhance("in", "-o", "out", "--recursive", "--report", "report") == 0
    assert statuses("report") == {"restored": 5}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-o", "link.png"], "link.png: a link that leads nowhere; remove it or choose another name"),
        (["-o", "link"], "link: link is a link that leads nowhere"),
        (["-o", "link/out"], "link/out: link is a link that leads nowhere"),
        (["-o", "link/out.png"], "link: link is a link that leads nowhere"),
        (["-o", "out/", "--save-faces", "link"], "link: link is a link that leads nowhere"),
        (
            ["-o", "out/", "--report", "link"],
            "--report link: a link that leads nowhere; remove it or choose another name",
        ),
    ],
)
def test_a_link_that_leads_nowhere(
    arguments: list[str], said: str, album: Path, calls: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("link", "link.png"):
        Path(name).symlink_to("nowhere/else.png")
    assert enhance("in/a.png", *arguments) in (1, 2)
    assert capsys.readouterr().err == f"gpen-core: {said}\n"
    assert calls == []
    assert Path("link.png").is_symlink()
    assert not Path("out").exists()


def test_a_link_among_outputs_is_told_of(album: Path, calls: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    Path("out").mkdir()
    Path("out/a.png").symlink_to("nowhere/else.png")
    assert enhance("in", "-o", "out") == 0
    assert f"{REPLACED}{Path('out/a.png')}\n" in capsys.readouterr().err


def test_max_pixels(album: Path, calls: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert enhance("in/a.png", "-o", "out", "--max-pixels", "11999") == 2
    assert "over the limit" in capsys.readouterr().err
    assert enhance("in/a.png", "-o", "out", "--max-pixels", "12000") == 0


def test_quality(album: Path, calls: list[Any]) -> None:
    sizes = []
    for quality in ("30", "90"):
        assert enhance("in/b.JPG", "-o", "out", "--quality", quality) == 0
        photo = image_io.read(Path("out/b.JPG"))
        assert photo.jpeg is not None
        assert photo.jpeg.quality == int(quality)
        sizes.append(Path("out/b.JPG").stat().st_size)
    assert sizes[0] < sizes[1]


@pytest.mark.parametrize("options", [["--quality", "0"], ["--quality", "101"], ["--max-pixels", "0"], ["--batch", "0"]])
def test_numbers_out_of_range(options: list[str], album: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["enhance", "in/a.png", *options]) == 1
    assert options[0] in capsys.readouterr().err


# What is done again.


def test_the_same_command_does_nothing_again(album: Path, calls: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    # Not asked to skip, a run of a folder still records what it does.
    assert enhance("in", "-o", "out", "--recursive") == 0
    before = {path: path.stat().st_mtime_ns for path in Path("out").rglob("*")}
    capsys.readouterr()
    assert enhance("in", "-o", "out", "--recursive", "--skip-existing", "--report", "report.jsonl") == 0
    assert len(calls) == 5
    assert statuses("report.jsonl") == {"skipped": 5}
    assert "0 restored, 0 no face, 0 failed, 5 skipped" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in Path("out").rglob("*")} == before
    assert enhance("in", "-o", "out", "--recursive") == 0
    assert len(calls) == 10


def test_single_photos_are_skipped_too(album: Path, calls: list[Any]) -> None:
    for _ in range(2):
        assert enhance("in/a.png", "-o", "out/new.png", "--skip-existing") == 0
    assert len(calls) == 1


CHANGES = {
    "content of the same size and age": lambda: replaced("in/a.png", flipped(Path("in/a.png").read_bytes())),
    "output cut short": lambda: replaced("out/a.png", Path("out/a.png").read_bytes()[:-1]),
    "output gone": lambda: Path("out/a.png").unlink(),
    "output of another program": lambda: replaced("out/a.png", encoded(".png", 9)),
    "ledger line torn": lambda: replaced("out/.gpen-core.jsonl", ledger_without_end("a.png")),
}


def replaced(name: str, content: bytes) -> None:
    """Other content; times as they were."""
    status = Path(name).stat()
    Path(name).write_bytes(content)
    os.utime(name, ns=(status.st_atime_ns, status.st_mtime_ns))


def flipped(png: bytes) -> bytes:
    """Another picture's file, made as long as this one by a comment at its end."""
    other = encoded(".png", 7)
    return other + bytes(max(0, len(png) - len(other)))


def ledger_without_end(name: str) -> bytes:
    lines = Path("out/.gpen-core.jsonl").read_bytes().splitlines(keepends=True)
    mine = [line for line in lines if json.loads(line)["file"] == name]
    return b"".join([line for line in lines if line not in mine]) + mine[0][:-5]


@pytest.mark.parametrize("change", CHANGES)
def test_one_photo_is_done_again(change: str, album: Path, calls: list[Any]) -> None:
    assert enhance("in", "-o", "out", "--recursive") == 0
    CHANGES[change]()
    for expected in ({"restored": 1, "skipped": 4}, {"skipped": 5}):
        assert enhance("in", "-o", "out", "-r", "--skip-existing", "--report", "report.jsonl") == 0
        assert statuses("report.jsonl") == expected
    assert len(calls) == 6


def test_a_copy_with_another_age_is_not_done_again(album: Path, calls: list[Any]) -> None:
    assert enhance("in", "-o", "out", "--recursive") == 0
    shutil.copytree("in", "moved", copy_function=shutil.copyfile)
    shutil.copytree("out", "copy", copy_function=shutil.copyfile)
    assert enhance("moved", "-o", "copy", "--recursive", "--skip-existing") == 0
    assert len(calls) == 5


@pytest.mark.parametrize(
    "options",
    [["--strength", "0.5"], ["--only", "largest"], ["--min-face", "9"], ["--quality", "50"], ["--precision", "fp32"]],
)
def test_other_settings_do_all_again(options: list[str], album: Path, calls: list[Any]) -> None:
    for _ in range(2):
        assert enhance("in", "-o", "out", "--recursive", "--skip-existing") == 0
    assert len(calls) == 5
    for _ in range(2):
        assert enhance("in", "-o", "out", "--recursive", "--skip-existing", *options) == 0
    assert len(calls) == 10


@pytest.mark.parametrize("file", ["weights.safetensors", "detector.onnx"])
def test_other_networks_do_all_again(file: str, album: Path, calls: list[Any]) -> None:
    assert enhance("in", "-o", "out", "--recursive") == 0
    Path(file).write_bytes(b"other content")
    assert enhance("in", "-o", "out", "--recursive", "--skip-existing") == 0
    assert len(calls) == 10


def test_another_version_does_all_again(monkeypatch: pytest.MonkeyPatch) -> None:
    before = settings_fingerprint({"a": 1, "b": 2})
    assert settings_fingerprint({"b": 2, "a": 1}) == before
    monkeypatch.setattr(ledger, "__version__", "99")
    assert settings_fingerprint({"a": 1, "b": 2}) != before


def test_failed_photos_are_tried_again(album: Path, calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    fill(album, {"in/z.png": b"<html>"})
    assert enhance("in", "-o", "out", "--recursive") == 3
    fill(album, {"in/z.png": encoded(".png", 8)})
    assert enhance("in", "-o", "out", "--recursive", "--skip-existing") == 0
    assert len(calls) == 6


def test_missing_weights_end_the_run_at_once(album: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["enhance", "in", "-o", "out", "--weights", "absent.safetensors", "--aligned"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not Path("out").exists()


# The ledger itself.


def test_a_ledger_survives_what_a_kill_leaves(tmp_path: Path) -> None:
    target = fill(tmp_path, {"a.png": b"a", "b.png": b"b"}) / "a.png"
    first = Ledger(tmp_path)
    first.add(target, "source", "settings")
    first.close()
    with (tmp_path / ledger.NAME).open("ab") as file:
        file.write(b'{"file": "b.png", "sha2')
    second = Ledger(tmp_path)
    second.add(tmp_path / "b.png", "source", "settings")
    second.close()
    third = Ledger(tmp_path)
    assert third.holds(target, "source", "settings")
    assert third.holds(tmp_path / "b.png", "source", "settings")
    assert not third.holds(target, "other", "settings")
    assert not third.holds(target, "source", "other")
    third.close()


def test_garbage_in_a_ledger(tmp_path: Path) -> None:
    lines = [b"\xff\xfe", b"[]", b"null", b'{"file": 3}', b'{"file":1,"sha256":1,"source_sha256":1,"settings":1}', b""]
    lines += [
        b'{"file":"a.png","sha256":"","source_sha256":"source","settings":"settings","beside":%s}' % beside
        for beside in (b"3", b"[3]", b"null", b'"a"')
    ]
    (tmp_path / ledger.NAME).write_bytes(b"\n".join(lines))
    found = Ledger(tmp_path)
    assert not found.holds(tmp_path / "a.png", "source", "settings")
    found.close()


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut short": lambda good: good[:-40],
    "junk": lambda good: np.random.RandomState(0).bytes(5000) + b"\n" + good,
    "nothing but zeros": lambda good: bytes(4096),
    "deeply nested": lambda good: b"[" * 100_000 + b"\n" + good,
    "wrong types": lambda good: b'{"file":{},"sha256":[],"source_sha256":null,"settings":1e999}\n[1]\n' + good,
    "numbers without end": lambda good: b"9" * 5000 + b"\n" + good,
    "empty": lambda good: b"",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_record(damage: str, album: Path, calls: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert enhance("in", "-o", "out", "--recursive") == 0
    record = Path("out") / ledger.NAME
    record.write_bytes(DAMAGE[damage](record.read_bytes()))
    lost = {"cut short": 1, "nothing but zeros": 5, "empty": 5}.get(damage, 0)
    capsys.readouterr()
    assert enhance("in", "-o", "out", "--recursive", "--skip-existing") == 0
    assert f"{lost} restored, 0 no face, 0 failed, {5 - lost} skipped" in capsys.readouterr().err
    assert enhance("in", "-o", "out", "--recursive", "--skip-existing") == 0
    assert "0 restored, 0 no face, 0 failed, 5 skipped" in capsys.readouterr().err


def test_a_record_that_is_no_file(album: Path, calls: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    record = Path("out") / ledger.NAME
    record.mkdir(parents=True)
    for options in ([], ["--skip-existing"]):
        assert enhance("in", "-o", "out", *options) == 1
        line = f"gpen-core: {record}: what was done is recorded there, but it is no file; remove it\n"
        assert capsys.readouterr().err == line
    record.rmdir()
    if hasattr(os, "mkfifo"):
        # Nobody writes to it: reading it would take for ever.
        os.mkfifo(record)
        assert enhance("in", "-o", "out") == 1
        assert capsys.readouterr().err == line
    assert calls == []


def test_a_record_that_may_not_be_read(
    album: Path, calls: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = fill(album, {f"out/{ledger.NAME}": b""}) / "out" / ledger.NAME
    opened = os.open

    def refused(path: Any, *flags: Any, **options: Any) -> int:
        if Path(path).name == ledger.NAME:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *flags, **options)

    monkeypatch.setattr(os, "open", refused)
    assert enhance("in", "-o", str(album / "out")) == 2
    assert capsys.readouterr().err == f"gpen-core: {record}: Permission denied\n"
    assert calls == []


def test_leftovers_go_and_what_another_run_writes_stays(album: Path, calls: list[Any]) -> None:
    pytest.importorskip("fcntl", reason="unfinished files are locked with fcntl")
    Path("out").mkdir()
    left = abandoned(Path("out/a.png"))
    with replacing(Path("out/a.png")) as part:
        assert enhance("in", "-o", "out") == 0
        assert part.exists()
        assert not left.exists()
        part.write_bytes(b"of the other run")
    assert Path("out/a.png").read_bytes() == b"of the other run"


# Rude ends.


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
@pytest.mark.parametrize("times", [5, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_in_the_middle(times: int, tmp_path: Path) -> None:
    torch.save(legacy_state(TINY), tmp_path / "old.pth")
    assert run_command(["convert", str(tmp_path / "old.pth"), "-o", str(tmp_path / "w.safetensors")]) == 0
    count = 24
    for i in range(count):
        name = f"in/{'sub/' * (i % 3)}{i:02}.png"
        fill(tmp_path, {name: cv2.imencode(".png", smooth_picture(128, 128, i))[1].tobytes()})
    command = [
        sys.executable,
        "-m",
        "tests.killed",
        str(tmp_path / "in"),
        str(tmp_path),
        str(tmp_path / "w.safetensors"),
        str(times),
        "0",
    ]
    path = os.pathsep.join([str(ROOT), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == times
    for result in results:
        message = str(result)
        assert result["wrong"] == [], message
        assert (result["code"], result["whole"], result["left in the end"]) == (0, True, 0), message
        assert result["done"] == count, message
        # Only what is written but not yet recorded when the process dies is done twice: one photo for each writer.
        assert result["seen"] - result["writers"] <= result["skipped"] <= result["seen"], message
        assert result["killed"] or not result["for certain"], message
    # The later ones of those that die for certain had finished some photos.
    assert sum(result["skipped"] for result in results if result["for certain"]) > 0


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_disk_full(album: Path, calls: list[Any], tmpfs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    noise = np.random.RandomState(0).randint(0, 256, (180, 180, 3), np.uint8)
    fill(album, {f"noise/{i:02}.png": cv2.imencode(".png", noise)[1].tobytes() for i in range(80)})
    assert enhance("noise", "-o", str(tmpfs / "out")) == 3
    err = capsys.readouterr().err
    *failures, stopped, summary = err.splitlines()
    assert all(line.endswith(": no space left on device") for line in failures)
    # Those in hand when the first one failed: as many as there are workers and faces in a batch, twice.
    assert len(failures) == len(set(failures)) <= 2 * (WORKERS + 1)
    assert stopped == "gpen-core: stopped: the photos that are left would meet the same"
    assert f"{len(failures)} failed" in summary
    found = tree(tmpfs)
    # Ten fit. Those being written when the disk is full, one for each writer, take the room of others.
    assert 10 - WORKERS <= len(found) <= 10
    assert f"{len(found)} restored" in summary
    for name in found:
        assert image_io.read(tmpfs / name).pixels.shape == (180, 180, 3)
    assert len(calls) <= len(found) + 1 + 2 * (WORKERS + 1)


def test_one_photo_for_a_full_disk(
    album: Path, calls: list[Any], tmpfs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmpfs / "filler").write_bytes(bytes((1 << 20) - 8192))
    noise = np.random.RandomState(0).randint(0, 256, (180, 180, 3), np.uint8)
    fill(album, {"noise.png": cv2.imencode(".png", noise)[1].tobytes()})
    assert enhance("noise.png", "-o", str(tmpfs / "noise.png")) == 2
    assert capsys.readouterr().err == f"gpen-core: {tmpfs / 'noise.png'}: no space left on device\n"


def test_a_full_disk_for_the_report(
    album: Path, calls: list[Any], tmpfs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmpfs / "report.jsonl"
    # A page is left, which takes a few lines and a part of another.
    (tmpfs / "filler").write_bytes(bytes((1 << 20) - 4096))
    fill(album, {f"many/{i:02}.png": encoded() for i in range(30)})
    for _ in range(2):
        assert enhance("many", "-o", "out", "--report", str(report)) == 2
        (line,) = [line for line in capsys.readouterr().err.splitlines() if "record" not in line]
        assert line == f"gpen-core: --report {report}: no space left on device"
        assert report.stat().st_size == 4096


def test_a_full_disk_for_the_record(
    album: Path, calls: list[Any], tmpfs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = Path("out") / ledger.NAME
    record.parent.mkdir()
    (tmpfs / "record").touch()
    record.symlink_to(tmpfs / "record")
    (tmpfs / "filler").write_bytes(bytes(1 << 20))
    assert enhance("in/a.png", "-o", "out/a.png", "--skip-existing") == 3
    assert capsys.readouterr().err == f"in/a.png: not written: {record}: no space left on device\n"
    assert image_io.read(Path("out/a.png")).pixels.shape == PICTURE.shape


def test_unwritable_output_folder(
    album: Path, calls: list[Any], tmpfs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(tmpfs)], check=True)
    assert enhance("in", "-o", str(tmpfs / "out")) == 2
    assert capsys.readouterr().err == f"gpen-core: {tmpfs / 'out'}: no permission to write there\n"
    assert calls == []


# The terminal.


def test_a_reader_that_goes_away_ends_nothing(album: Path) -> None:
    torch.save(legacy_state(TINY), "old.pth")
    assert run_command(["convert", "old.pth", "-o", "w.safetensors"]) == 0
    fill(album, {f"faces/{i}.png": cv2.imencode(".png", smooth_picture(16, 16))[1].tobytes() for i in range(30)})
    command = [sys.executable, "-c", "from gpen_core.cli import main; main()", "enhance", "faces", "-o", "out"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ours, theirs = os.pipe()
    os.close(ours)
    arguments = [*command, "--aligned", "--weights", "w.safetensors", "--device", "cpu"]
    done = subprocess.run(arguments, check=False, stdout=theirs, stderr=subprocess.PIPE, text=True, env=environment)
    os.close(theirs)
    assert done.returncode == 0
    assert done.stderr.startswith("gpen-core: 30 restored")
    assert done.stderr.count("\n") == 1
    assert len(tree(Path("out"))) == 30


ENHANCE = 'exec "$0" -m gpen_core enhance faces -o out --aligned --weights w.safetensors --device cpu '


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs the shell of Unix")
@pytest.mark.parametrize(
    ("shell", "code", "told"),
    [
        (f"{ENHANCE} 2>&-", 3, None),
        (f"{ENHANCE} >&- 2>&-", 3, None),
        (f"{ENHANCE} <&- >&-", 3, "faces/0.png"),
        (f"(({ENHANCE}); echo $? >code) 2>&1 >/dev/null | true; exit $(cat code)", 3, None),
        (f"{ENHANCE} 2>/dev/full", 3, None),
        (f"{ENHANCE} >/dev/full", 3, "gpen-core: standard output: No space left on device"),
        ('exec "$0" -m gpen_core info w.safetensors >/dev/full', 3, "gpen-core: standard output: No space left"),
    ],
)
def test_what_cannot_be_told_ends_nothing(album: Path, shell: str, code: int, told: str | None) -> None:
    torch.save(legacy_state(TINY), "old.pth")
    assert run_command(["convert", "old.pth", "-o", "w.safetensors"]) == 0
    faces = {f"faces/{i}.png": cv2.imencode(".png", smooth_picture(16, 16))[1].tobytes() for i in range(4)}
    fill(album, {**faces, "faces/0.png": b"no picture"})
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        ["sh", "-c", shell, sys.executable], check=False, capture_output=True, text=True, env=environment
    )
    assert done.returncode == code
    assert "Traceback" not in done.stdout + done.stderr
    assert told is None or told in done.stderr
    if "enhance" in shell:
        # What libraries write to standard error is in none of them.
        assert [cv2.imread(str(path)) is not None for path in sorted(Path("out").glob("*.png"))] == [True] * 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="pseudo-terminals are a thing of Unix")
def test_a_bar_on_a_terminal_only(album: Path) -> None:
    import pty

    code = (
        "import sys\n"
        "from gpen_core.console import say_json\n"
        "from gpen_core.progress import bar\n"
        "with bar(int(sys.argv[1])) as advance:\n"
        "    for i in range(3):\n"
        "        say_json({'line': i, 'text': '[b]ä[/b] :smile: ' * 20})\n"
        "        advance()\n"
    )
    inherited = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    environment = {**inherited, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm", "COLUMNS": "100"}

    def seen(total: str, *, terminal: bool, both: bool = False) -> tuple[str | None, str]:
        """What is written to stdout, a pipe unless it is the same as stderr, and to stderr."""
        ours, theirs = pty.openpty() if terminal else os.pipe()
        command = [sys.executable, "-c", code, total]
        pipe = theirs if both else subprocess.PIPE
        process = subprocess.Popen(command, stdout=pipe, stderr=theirs, env=environment, text=True)
        os.close(theirs)
        # While it runs: a terminal holds a few kB, and waits for somebody to read them.
        written = b""
        try:
            while block := os.read(ours, 4096):
                written += block
        except OSError:  # a pseudo-terminal whose other end is closed
            pass
        os.close(ours)
        out, _ = process.communicate()
        assert process.returncode == 0
        return out, written.decode()

    # Longer than the terminal is wide, and with what could be taken for markup.
    objects = [json.dumps({"line": i, "text": "[b]ä[/b] :smile: " * 20}) for i in range(3)]
    lines = "".join(f"{line}\n" for line in objects)
    out, bar = seen("3", terminal=True)
    assert out == lines
    assert "3/3" in bar
    assert "photos/s" in bar
    _, both = seen("3", terminal=True, both=True)
    # Each line takes the place of the bar, which is drawn again below it.
    assert [f"\x1b[2K{line}\r\n" in both for line in objects] == [True] * 3, both
    assert "3/3" in both
    assert seen("1", terminal=True) == (lines, "")
    assert seen("3", terminal=False) == (lines, "")
