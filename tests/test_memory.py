"""Freed memory stays with the process that asked for that, and with no other."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

FAULTS = """
import os, resource, sys
import numpy as np
from gpen_core.memory import keep_freed_memory

os.environ.update(dict(pair.split("=") for pair in sys.argv[2:]))
print(keep_freed_memory() if sys.argv[1] == "keep" else None)

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(64 * 2**20, np.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
print(faults())
"""


def run(*arguments: str) -> tuple[str, int]:
    """What was answered, and page faults of the second of two arrays of 64 MB, of which the first was freed."""
    environment = {"PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", FAULTS, *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    answer, faults = done.stdout.split()
    return answer, int(faults)


glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such setting")


@glibc
def test_freed_memory_is_used_again() -> None:
    answer, faults = run("keep")
    assert answer == "True"
    assert faults < 100


@glibc
def test_without_it_every_array_is_new() -> None:
    # Pages of 4 kB, or of 2 MB where the system gives them unasked.
    assert run("leave")[1] >= 32


@glibc
def test_settings_of_the_users_stay() -> None:
    answer, faults = run("keep", "MALLOC_ARENA_MAX=2")
    assert answer == "False"
    assert faults >= 32


def test_other_systems_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpen_core.memory import keep_freed_memory

    monkeypatch.setattr(sys, "platform", "darwin")
    assert not keep_freed_memory()
