"""Seconds from the start of a process to its first restored photo, and its peak memory, for each way to run.

    python -m bench.startup [--quick]        measures this machine into bench/results/startup.json
    python -m bench.startup --render         puts the numbers into docs/embedding.md

The Python examples measured are the ones in docs/embedding.md, word for word. --quick leaves out compiling.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gpen_weights
from gpen_core import __version__

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "docs" / "embedding.md"
MODEL = "gpen-open-512"
RUNS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--render", action="store_true")
    arguments = parser.parse_args()
    if not arguments.render:
        with tempfile.TemporaryDirectory() as folder:
            results = measure(Path(folder), arguments.quick)
        (RESULTS / "startup.json").write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(rendered(PAGE.read_text()))


def measure(folder: Path, quick: bool) -> dict[str, Any]:
    core = [sys.executable, "-m", "gpen_core"]
    photo = ROOT / "examples" / "astronaut_degraded.jpg"
    (folder / "photo.jpg").write_bytes(photo.read_bytes())
    (folder / "centerface.onnx").write_bytes(gpen_weights.resolve("centerface").read_bytes())
    for kind in ("onnx", "pt2"):
        timed([*core, "export", MODEL, "--format", kind, "-o", f"model.{kind}"], folder)
    enhance = [*core, "enhance", "photo.jpg", "-o", "out.png", "--device", "cpu"]
    ways = {
        "`enhance`, PyTorch": [*enhance, "--weights", MODEL],
        "`enhance`, ONNX": [*enhance, "--weights", "model.onnx"],
        "`enhance`, pt2": [*enhance, "--weights", "model.pt2"],
        **{f"`{name}`": [sys.executable, "-c", code] for name, code in examples(PAGE.read_text()).items()},
    }
    found = [record(name, [timed(command, folder) for _ in range(RUNS)]) for name, command in ways.items()]
    if not quick:
        compiling = [*enhance, "--weights", MODEL, "--compile", "--cache", "cache"]
        found.append(record("`enhance --compile`, cache empty", [timed(compiling, folder)]))
        warm = [timed(compiling, folder) for _ in range(RUNS)]
        found.append(record("`enhance --compile`, cache filled", warm))
    return {"machine": machine(), "version": __version__, "model": MODEL, "ways": found}


def examples(page: str) -> dict[str, str]:
    """The Python blocks of the page by the names in their first lines."""
    blocks = re.findall(r"^```python\n# (\S+)\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    return dict(blocks)


def timed(command: list[str], folder: Path) -> tuple[float, float]:
    """Seconds of a process, and its peak memory in 10^6 bytes. It must succeed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "convert", ROOT / "weights")))}
    started = time.perf_counter()
    process = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{' '.join(command)} ended with {process.returncode}")
    return seconds, usage.ru_maxrss * 1024 / 1e6


def record(name: str, runs: list[tuple[float, float]]) -> dict[str, Any]:
    seconds, memory = (statistics.median(values) for values in zip(*runs, strict=True))
    return {"way": name, "seconds": round(seconds, 2), "megabytes": round(memory), "runs": len(runs)}


def machine() -> str:
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    isa = torch.backends.cpu.get_cpu_capability()
    return f"{platform.machine()} with {isa}, {cores} cores, PyTorch {torch.__version__}"


def rendered(page: str) -> str:
    """The page with the tables of the stored results."""
    startup = json.loads((RESULTS / "startup.json").read_text())
    lines = [f"{startup['model']} (512 px, fp32) on {startup['machine']}, median of {RUNS}:", "", *table_of(startup)]
    page = filled(page, "startup", lines)
    stored = RESULTS / "containers.json"
    if not stored.exists():
        return page
    trees = json.loads(stored.read_text())
    rows = [
        "| tree | all, MB | packages, MB | weights, MB | `--help`, s | one photo, s |",
        "|---|---|---|---|---|---|",
        *(
            f"| {tree['variant']} | {tree['megabytes']['all']:.0f} | {tree['megabytes']['packages']:.0f} "
            f"| {tree['megabytes']['weights']:.0f} | {tree['help_seconds']} | {tree['photo_seconds']} |"
            for tree in trees
        ),
    ]
    return filled(page, "containers", rows)


def table_of(startup: dict[str, Any]) -> list[str]:
    rows = [f"| {way['way']} | {way['seconds']} | {way['megabytes']} |" for way in startup["ways"]]
    return ["| way | process, s | memory, MB |", "|---|---|---|", *rows]


def filled(page: str, name: str, lines: list[str]) -> str:
    """The page with these lines between the two marks of a name."""
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, rest = page.split(start)
    return "\n".join([f"{before}{start}", *lines, end]) + rest.split(end)[1]


if __name__ == "__main__":
    main()
