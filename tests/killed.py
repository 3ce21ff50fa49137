"""Kill a run at random moments. Started as a process of its own that imports once and forks.

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

import gpen_core.batch
import gpen_core.restorer  # noqa: F401  (what the command imports, so that the children start at once)
from gpen_core.cli import run_command


def start(arguments: list[str]) -> int:
    """The process id of a child that runs one command in silence."""
    child = os.fork()
    if child:
        return child
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


def wait_for(count: int, folder: Path, child: int) -> None:
    """Until so many photos are in the folder, or the child has ended."""
    while len(contents(folder)) < count and os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        time.sleep(0.002)


def kill(child: int) -> bool:
    """Whether the child was still running."""
    os.kill(child, signal.SIGKILL)
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
        child = start(command(out))
        if i % 2:
            # A load on the machine moves the start of the work, so half of the moments follow its progress.
            wait_for(moments.randrange(1, len(expected)), out, child)
            time.sleep(moments.uniform(0, 0.03))
        else:
            time.sleep(moments.uniform(0, length))
        killed = kill(child)
        seen = contents(out)
        left = unfinished(out)
        report = scratch / f"{i}.jsonl"
        code = finish([*command(out), "--report", str(report)])
        states = [json.loads(line)["status"] for line in report.read_text().splitlines()]
        result = {
            "killed": killed,
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
