"""Tables of README.md and bench/README.md from bench/results/*.json: `python -m bench.report [--check]`.

A table stands between `<!-- bench:NAME -->` and `<!-- /bench:NAME -->`; NAME is a key of `TABLES`.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.cases import NETWORKS

Row = dict[str, Any]
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
# What lies between the convolutions of a large level.
PASSES = ("up_kernel", "merge_kernel", "blur_kernel")
PAGES = (ROOT / "README.md", ROOT / "bench" / "README.md")


def load(name: str, results: Path = RESULTS) -> list[Row]:
    """The rows of one results file, without those that have no numbers."""
    rows: list[Row] = json.loads((results / f"{name}.json").read_text())["rows"]
    return [row for row in rows if "batches" in row]


def at_512(name: str, results: Path = RESULTS) -> list[Row]:
    return [row for row in load(name, results) if row["case"]["size"] == 512]


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def per_image(row: Row, batch: int) -> float | None:
    found: float | None = row["batches"].get(str(batch), {}).get("ms_per_image")
    return found


def milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def factor(slow: float | None, fast: float | None) -> str:
    return "-" if slow is None or fast is None else f"{slow / fast:.1f}x"


def step(row: Row) -> tuple[int, int]:
    """Order of the waterfall: from the original to the kernels, full precision first."""
    case = row["case"]
    return list(NETWORKS).index(case["network"]), ["fp32", "tf32", "bf16", "fp16"].index(case["precision"])


def steps(results: Path = RESULTS) -> list[Row]:
    """The rows of the waterfall in its order."""
    return sorted(at_512("h200", results), key=step)


def waterfall(results: Path = RESULTS) -> str:
    rows = steps(results)
    start = next(row for row in rows if row["case"]["network"] == "original")
    lines = [
        [
            row["title"],
            *(milliseconds(per_image(row, batch)) for batch in (1, 8)),
            *(factor(per_image(start, batch), per_image(row, batch)) for batch in (1, 8)),
            f"{row['batches']['1']['peak_mb']:.0f}",
        ]
        for row in rows
    ]
    return table(
        ["step", "batch 1, ms", "batch 8, ms an image", "gain, 1", "gain, 8", "MB above weights, batch 1"], lines
    )


def batches(results: Path = RESULTS) -> str:
    lines = []
    for row in load("h200", results):
        if row["case"]["network"] != "kernels" or row["case"]["precision"] != "fp16":
            continue
        for batch, found in row["batches"].items():
            cells = [f"{row['case']['size']}", batch, f"{found['median_ms']:.3f}", f"{found['p90_ms']:.3f}"]
            lines.append([*cells, f"{found['ms_per_image']:.3f}", f"{found['peak_mb']:.0f}", f"{found['first_s']:.1f}"])
    return table(["size", "batch", "median, ms", "p90, ms", "ms an image", "MB above weights", "first call, s"], lines)


def packages(results: Path = RESULTS) -> str:
    """A package on a GPU beside the kernels that `--compile` runs there."""
    rows = load("packages", results)
    kernels = {row["case"]["size"]: row["batches"] for row in rows if row["case"]["network"] == "kernels"}
    lines = []
    for row in rows:
        size = row["case"]["size"]
        if row["case"]["network"] != "package":
            continue
        for batch in sorted(row["batches"].keys() & kernels[size].keys(), key=int):
            ours, compiled = row["batches"][batch]["median_ms"], kernels[size][batch]["median_ms"]
            cells = [f"{size}", batch, f"{compiled:.3f}", f"{ours:.3f}", f"{100 * (ours / compiled - 1):+.1f} %"]
            lowest = min(found["psnr_db"] for found in row["fidelity"].values())
            lines.append([*cells, f"{row['batches'][batch]['first_s']:.1f}", f"{lowest:.1f}"])
    header = ["size", "batch", "`--compile`, ms", "package, ms", "difference", "first call, s", "lowest PSNR, dB"]
    return table(header, lines)


def fidelity(results: Path = RESULTS) -> str:
    lines = []
    for name in ("h200", "cpu"):
        if not (results / f"{name}.json").exists():
            continue
        for row in at_512(name, results):
            for picture, found in row.get("fidelity", {}).items():
                cells = [row["case"]["device"], row["title"], picture]
                if not found["finite"]:
                    lines.append([*cells, "not finite", "", "", ""])
                    continue
                numbers = [f"{found['psnr_db']:.1f}", f"{found['ssim']:.5f}", f"{found['ciede2000']:.4f}"]
                lines.append([*cells, f"{found['max_abs']:.5f}", *numbers])
    return table(["device", "network", "input", "max abs. difference", "PSNR, dB", "SSIM", "mean CIEDE2000"], lines)


def worst(results: Path = RESULTS) -> str:
    """The fidelity of each network at its lowest over the inputs."""
    lines = []
    for row in at_512("h200", results):
        found = list(row.get("fidelity", {}).values())
        if not found:
            continue
        low = [min(picture[name] for picture in found) for name in ("psnr_db", "ssim")]
        high = [max(picture[name] for picture in found) for name in ("max_abs", "ciede2000")]
        lines.append([row["title"], f"{low[0]:.1f}", f"{low[1]:.5f}", f"{high[0]:.5f}", f"{high[1]:.3f}"])
    return table(["network", "PSNR, dB", "SSIM", "max abs. difference", "mean CIEDE2000"], lines)


def cpu(results: Path = RESULTS) -> str:
    lines = []
    for row in load("cpu", results):
        found = row["batches"]["1"]
        warm = row.get("warm", {}).get("first_s")
        cells = [row["title"], f"{found['median_ms'] / 1000:.2f}", f"{found['p90_ms'] / 1000:.2f}"]
        lines.append([*cells, f"{found['first_s']:.1f}", "-" if warm is None else f"{warm:.1f}"])
    return table(["network", "median, s", "p90, s", "first call, s", "first call of a second process, s"], lines)


def stream(results: Path = RESULTS) -> str:
    path = results / "stream.json"
    if not path.exists():
        return "Not measured yet."
    lines = [
        [
            row["network"],
            f"{row['case']['batch']}",
            row["detector"],
            row["title"],
            f"{row['photos_per_s']:.1f}",
            f"{row['faces_per_batch']:.1f}",
            f"{100 * row['busy_share']:.0f} %",
        ]
        for row in json.loads(path.read_text())["rows"]
    ]
    header = ["network", "batch at most", "detector", "photos", "photos a second", "faces in a batch", "device busy"]
    return table(header, lines)


def kind(kernel: str) -> str:
    """Whose a kernel is."""
    if kernel.endswith("_kernel"):
        return f"`{kernel}`" if kernel in PASSES else "our other kernels"
    if "fprop" in kernel or "dgrad" in kernel:
        return "convolutions (cuDNN)"
    return "matrix products (cuBLAS)" if "nvjet" in kernel or "cublas" in kernel else "else"


def profile(results: Path = RESULTS) -> str:
    """Milliseconds of each kind of kernel, for each batch."""
    rows = json.loads((results / "profile.json").read_text())["rows"]
    sums = [Counter[str]() for _ in rows]
    for row, found in zip(rows, sums, strict=True):
        for kernel in row["kernels"]:
            found[kind(kernel["name"])] += kernel["ms"]
    names = sorted({name for found in sums for name in found}, key=lambda name: -sums[-1][name])
    lines = [[name, *(f"{found[name]:.2f}" for found in sums)] for name in names]
    return table(["kernels", *(f"batch {row['batch']}, ms" for row in rows)], lines)


def convolutions(results: Path = RESULTS) -> str:
    """The large convolutions alone."""
    found = json.loads((results / "profile.json").read_text())["convolutions"]
    words = {"same": "keeps the size", "up": "doubles it", "down": "halves it"}
    lines = [
        [
            words[one["kind"]],
            f"{one['side']}",
            f"{one['inputs']} to {one['outputs']}",
            f"{one['ms']:.3f}",
            f"{one['tflops']}",
        ]
        for one in found["layers"]
    ]
    total = sum(one["ms"] for one in found["layers"])
    lines.append(["all", "", "", f"{total:.2f}", ""])
    return table(["3x3 convolution", "side, px", "channels", f"ms at batch {found['batch']}", "TFLOP/s"], lines)


def machines(results: Path = RESULTS) -> str:
    lines = []
    for path in sorted(results.glob("*.json")):
        content = json.loads(path.read_text())
        if "suite" not in content:
            continue
        found = next(row["machine"] for row in content["rows"] if "machine" in row)
        lines.append(
            [path.name, found.get("gpu", found["cpu"]), found["torch"], found.get("cudnn", "-"), found["threads"]]
        )
    return table(["file", "processor", "PyTorch", "cuDNN", "CPU threads"], lines)


TABLES: dict[str, Callable[[], str]] = {
    "waterfall": waterfall,
    "batches": batches,
    "packages": packages,
    "fidelity": fidelity,
    "worst": worst,
    "cpu": cpu,
    "stream": stream,
    "profile": profile,
    "convolutions": convolutions,
    "machines": machines,
}


def render(text: str) -> str:
    """The page with every marked table made anew."""

    def fresh(found: re.Match[str]) -> str:
        name = found.group(1)
        return f"<!-- bench:{name} -->\n{TABLES[name]()}\n<!-- /bench:{name} -->"

    return re.sub(r"<!-- bench:(\w+) -->.*?<!-- /bench:\1 -->", fresh, text, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a page is out of date")
    check = parser.parse_args().check
    for page in PAGES:
        if not page.exists():
            continue
        text = page.read_text(encoding="utf-8")
        if check and render(text) != text:
            raise SystemExit(f"{page.name} is out of date: python -m bench.report")
        if not check:
            page.write_text(render(text), encoding="utf-8")


if __name__ == "__main__":
    main()
