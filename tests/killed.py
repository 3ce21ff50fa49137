"""Kill a run in the middle. Started as a process of its own that imports once and forks.

Half of the times at a random moment, half at a certain step with a file of the output folder, whatever the machine's
speed.

Arguments: photos, a folder for outputs, weights, how many times, a seed. Prints one JSON object for each time.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import gpen_core.restorer  # noqa: F401  (what the command imports, so that the children start at once)
from gpen_core.batch import WORKERS
from gpen_core.cli import run_command


class Death:
    """An audit hook by which the process kills itself when it opens or renames a file in a folder the n-th time."""

    def __init__(self, folder: Path, step: int) -> None:
        self.folder, self.left = str(folder), step

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("open", "os.rename") and str(arguments[0]).startswith(self.folder):
            self.left -= 1
            if not self.left:
                os.kill(os.getpid(), signal.SIGKILL)


def start(arguments: list[str], death: Death | None = None) -> int:
    """The process id of a child that runs one command in silence."""
    child = os.fork()
    if child:
        return child
    if death is not None:
        sys.addaudithook(death)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    code = 99
    try:
        code = run_command(arguments)
    finally:
        os._exit(code)


def finish(arguments: list[str]) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(start(arguments), 0)[1])


def killed(child: int) -> bool:
    """Whether the child was still running when it was killed."""
    return os.waitpid(child, 0)[1] == signal.SIGKILL


def contents(folder: Path) -> dict[str, bytes]:
    """What a user sees in a folder."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def unfinished(folder: Path) -> int:
    return sum(path.suffix == ".part" for path in folder.rglob(".*"))


def main(photos: str, scratch: Path, weights: str, times: int, seed: int) -> None:
    def command(out: Path) -> list[str]:
        options = ["--recursive", "--skip-existing", "--aligned", "--device", "cpu", "--weights", weights]
        return ["enhance", photos, "-o", str(out), *options]

    assert finish(command(scratch / "whole")) == 0
    # Timed the second time, when everything is warm.
    started = time.monotonic()
    assert finish(command(scratch / "again")) == 0
    length = time.monotonic() - started
    expected = contents(scratch / "whole")
    assert contents(scratch / "again") == expected
    moments = random.Random(seed)
    for i in range(times):
        out = scratch / str(i)
        if i % 2:
            # Each photo takes five steps: a name, pixels, the sync, the right name, and its hash for the record.
            step = moments.randrange(5 * i * len(expected) // times, 5 * len(expected))
            died = killed(start(command(out), Death(out, step)))
        else:
            child = start(command(out))
            time.sleep(moments.uniform(0, length))
            os.kill(child, signal.SIGKILL)
            died = killed(child)
        seen = contents(out)
        left = unfinished(out)
        report = scratch / f"{i}.jsonl"
        code = finish([*command(out), "--report", str(report)])
        states = [json.loads(line)["status"] for line in report.read_text().splitlines()]
        result = {
            "killed": died,
            "for certain": bool(i % 2),
            "writers": WORKERS,
            "seen": len(seen),
            "wrong": sorted(name for name in seen if seen[name] != expected.get(name)),
            "left": left,
            "code": code,
            "skipped": states.count("skipped"),
            "done": len(states),
            "whole": contents(out) == expected,
            "left in the end": unfinished(out),
        }
        sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
