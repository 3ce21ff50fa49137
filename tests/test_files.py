"""Unfinished files: whose they are, and which of them may be removed."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from gpen_convert.generator import convert_generator
from gpen_core import files
from gpen_core.files import remove_leftovers, replacing
from tests.leftovers import abandoned
from tests.legacy import TINY, legacy_state

LONG = "n" * 60


@pytest.fixture(autouse=True)
def locks() -> None:
    pytest.importorskip("fcntl", reason="unfinished files are locked with fcntl")


def unfinished(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix == ".part")


def test_those_of_the_targets_alone_are_removed(tmp_path: Path) -> None:
    targets = [tmp_path / name for name in ("a.png", f"{LONG}.png")]
    mine = [abandoned(target) for target in targets]
    others = [abandoned(tmp_path / name) for name in ("b.png", f"{LONG}.jpg", "a.png_face1_crop.png")]
    strange = [tmp_path / name for name in (".a.png.part", "a.png.0123456789ab.part", ".a.png.0123456789ab.part")]
    for path in strange:
        path.touch()
    assert remove_leftovers([*targets, tmp_path / "absent" / "a.png"]) == len(mine)
    assert unfinished(tmp_path) == sorted([*others, *strange])


def test_those_of_names_that_begin_alike_are_removed(tmp_path: Path) -> None:
    mine = [abandoned(tmp_path / f"{name}_face1_crop.png") for name in ("a.png", LONG)]
    other = abandoned(tmp_path / "b.png_face1_crop.png")
    assert remove_leftovers([], [tmp_path / f"{name}_face" for name in ("a.png", LONG)]) == len(mine)
    assert unfinished(tmp_path) == [other]


def test_what_somebody_is_at_work_on_stays(tmp_path: Path) -> None:
    targets = [tmp_path / f"{LONG}{i}.png" for i in range(3)]
    with ExitStack() as stack:
        parts = [stack.enter_context(replacing(target)) for target in (*targets, *targets)]
        assert remove_leftovers(targets, [tmp_path / LONG]) == 0
        assert all(part.exists() for part in parts)
    assert [target.exists() for target in targets] == [True] * 3
    assert unfinished(tmp_path) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
def test_a_process_that_is_killed_is_no_longer_at_work(tmp_path: Path) -> None:
    target = tmp_path / "a.png"
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        with replacing(target):
            os.write(theirs, b"!")
            signal.pause()
        os._exit(0)
    try:
        assert os.read(ours, 1) == b"!"
        meanwhile = remove_leftovers([target])
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert (meanwhile, remove_leftovers([target])) == (0, 1)
    assert unfinished(tmp_path) == []


def test_one_that_was_taken_for_a_leftover_is_begun_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "a.png"
    lock, removed = files._locked, []

    def meddle(path: Path, *, wait: bool) -> int | None:
        monkeypatch.setattr(files, "_locked", lock)
        removed.append(remove_leftovers([target]))
        return lock(path, wait=wait)

    monkeypatch.setattr(files, "_locked", meddle)
    with replacing(target) as part:
        part.write_bytes(b"whole")
    assert removed == [1]
    assert target.read_bytes() == b"whole"
    assert list(tmp_path.iterdir()) == [target]


def test_a_conversion_is_at_work_until_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(legacy_state(TINY), tmp_path / "old.pth")
    sync, removed = os.fsync, []

    def synced(descriptor: int) -> None:
        removed.append(remove_leftovers([tmp_path / "old.safetensors"]))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    convert_generator(tmp_path / "old.pth")
    assert removed == [0]
