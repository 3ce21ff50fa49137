"""Pictures of the results for README.md and bench/README.md: `python -m bench.plots`. Needs matplotlib (extra `bench`).

Each SVG carries the sha256 of the numbers that it shows, so that a test can tell whether they are those of
bench/results. The same numbers give the same bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.cases import NETWORKS
from bench.report import RESULTS, ROOT, at_512, per_image, steps

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FOLDER = ROOT / "docs" / "images"
BATCHES = (1, 8)
BAR = 0.38
COLOURS = ("#9ecae1", "#2171b5")
MARKERS = {"fp32": "D", "tf32": "s", "fp16": "o", "bf16": "^"}

Numbers = list[dict[str, Any]]


def waterfall(results: Path = RESULTS) -> Numbers:
    """Milliseconds an image on the GPU, from the original to the kernels."""
    return [
        {"title": row["title"], "machine": row["machine"]["gpu"], "ms": [per_image(row, batch) for batch in BATCHES]}
        for row in steps(results)
    ]


def fidelity(results: Path = RESULTS) -> Numbers:
    """Milliseconds at batch 1 and the lowest PSNR over the inputs, in dB, of every row that was compared at 512 px."""
    found = []
    for name in ("h200", "cpu"):
        for row in at_512(name, results):
            pictures = list(row.get("fidelity", {}).values())
            if not pictures or not all(picture["finite"] for picture in pictures):
                continue
            machine = row["machine"].get("gpu") or f"{row['machine']['threads']} CPU cores"
            psnr = min(picture["psnr_db"] for picture in pictures)
            case = {key: row["case"][key] for key in ("network", "precision")}
            found.append({**case, "machine": machine, "ms": per_image(row, 1), "psnr_db": psnr})
    return found


def digest(numbers: Numbers) -> str:
    """The sha256 of what a picture shows."""
    return hashlib.sha256(json.dumps(numbers, sort_keys=True).encode()).hexdigest()


def draw_waterfall(figure: Figure, numbers: Numbers) -> None:
    axes = figure.subplots()
    for i, (batch, colour) in enumerate(zip(BATCHES, COLOURS, strict=True)):
        places = [place + (i - 0.5) * BAR for place in range(len(numbers))]
        bars = axes.barh(places, [row["ms"][i] for row in numbers], BAR, color=colour, label=f"batch {batch}")
        axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
    axes.set_yticks(range(len(numbers)), [row["title"] for row in numbers])
    axes.invert_yaxis()
    axes.set_xlabel(f"ms an image, 512 px, {numbers[0]['machine']}")
    axes.margins(x=0.1)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")


def draw_fidelity(figure: Figure, numbers: Numbers) -> None:
    machines = list(dict.fromkeys(row["machine"] for row in numbers))
    networks = [network for network in NETWORKS if any(row["network"] == network for row in numbers)]
    for axes, machine in zip(figure.subplots(1, len(machines), squeeze=False)[0], machines, strict=True):
        for row in numbers:
            if row["machine"] == machine:
                colour = f"C{networks.index(row['network'])}"
                axes.plot(row["ms"], row["psnr_db"], MARKERS[row["precision"]], color=colour, markersize=8)
        axes.margins(0.2)
        axes.set_xlim(left=0)
        axes.grid(color="#e5e5e5")
        axes.set_xlabel(f"ms at batch 1, {machine}")
        axes.set_ylabel("lowest PSNR against float32, dB")
    handles: list[Any] = []
    for i, network in enumerate(networks):
        handles += axes.plot([], [], "_", color=f"C{i}", markersize=12, markeredgewidth=4, label=NETWORKS[network])
    for precision, marker in MARKERS.items():
        if any(row["precision"] == precision for row in numbers):
            handles += axes.plot([], [], marker, color="#777777", label=precision)
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize=8)


@dataclass(frozen=True)
class Picture:
    """An SVG in docs/images. size: width and height in inches."""

    name: str
    numbers: Callable[[], Numbers]
    draw: Callable[[Figure, Numbers], None]
    size: tuple[float, float]

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.svg"

    @property
    def identifier(self) -> str:
        """What the file says of the numbers in it."""
        return f"sha256:{digest(self.numbers())}"

    def write(self) -> None:
        import matplotlib
        from matplotlib.figure import Figure

        with matplotlib.rc_context({"svg.hashsalt": "gpen-core", "svg.fonttype": "none", "font.size": 9}):
            figure = Figure(self.size, layout="constrained")
            self.draw(figure, self.numbers())
            figure.savefig(self.path, metadata={"Identifier": self.identifier, "Date": None, "Creator": None})


PICTURES: Sequence[Picture] = (
    Picture("waterfall", waterfall, draw_waterfall, (7.5, 3.6)),
    Picture("fidelity", fidelity, draw_fidelity, (7.5, 4.2)),
)


if __name__ == "__main__":
    for picture in PICTURES:
        picture.write()
