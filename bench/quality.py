"""What restoring gains: degraded photos against the originals, before and after, in the detected face's box.

python -m bench.quality            # measure and show
python -m bench.quality --write    # also into bench/results/quality.json and the model card
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import cv2
import numpy as np
from skimage import data

from gpen_core import Restorer
from gpen_core.types import Image
from tests.degrade import degrade, psnr, ssim

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results" / "quality.json"
CARD = ROOT / "weights" / "gpen_weights" / "MODEL_CARD.md"
PORTRAITS = ROOT / "tests" / "golden" / "portraits_512"
START, END = "<!-- quality -->", "<!-- /quality -->"
DEGRADATIONS: dict[str, dict[str, float]] = {
    "mild": {"blur": 1.0, "noise": 6.0, "quality": 50},
    "stronger": {"blur": 2.0, "noise": 10.0, "quality": 30},
}

Row = dict[str, str | float | int]


def photos() -> Iterator[tuple[str, Image]]:
    """The astronaut, never seen in training, and six portraits of the set that the weights were trained on."""
    yield "astronaut", np.ascontiguousarray(data.astronaut())
    for path in sorted(PORTRAITS.glob("*.jpg")):
        yield path.stem, np.ascontiguousarray(cv2.imread(str(path), cv2.IMREAD_COLOR)[..., ::-1], dtype=np.uint8)


def measure(restorer: Restorer, name: str, photo: Image, degradation: str) -> Row:
    """PSNR in dB and SSIM of the most confident face's box, before and after."""
    settings = DEGRADATIONS[degradation]
    before = degrade(photo, blur=settings["blur"], noise=settings["noise"], quality=int(settings["quality"]))
    restored = restorer(before)
    row: Row = {"photo": name, "degradation": degradation, "faces": len(restored.faces)}
    if not restored.faces:
        return row
    x0, y0, x1, y1 = (max(0, round(float(v))) for v in restored.faces[0].box)
    part = np.s_[y0:y1, x0:x1]
    for label, picture in (("before", before), ("after", restored.image)):
        row[f"psnr_{label}"] = round(psnr(picture[part], photo[part]), 3)
        row[f"ssim_{label}"] = round(ssim(picture[part], photo[part]), 4)
    return row


def gains(rows: Sequence[Row]) -> tuple[float, float]:
    """Mean gain in PSNR (dB) and in SSIM."""
    changes = [
        [float(row[f"{measure}_after"]) - float(row[f"{measure}_before"]) for measure in ("psnr", "ssim")]
        for row in rows
    ]
    mean_psnr, mean_ssim = np.mean(changes, axis=0)
    return float(mean_psnr), float(mean_ssim)


def table(rows: Sequence[Row]) -> str:
    """Rows as Markdown."""
    lines = ["| photo | degradation | PSNR before | after | SSIM before | after |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {r['photo']} | {r['degradation']} | {r['psnr_before']:.2f} | {r['psnr_after']:.2f} "
        f"| {r['ssim_before']:.3f} | {r['ssim_after']:.3f} |"
        for r in rows
    ]
    for name in DEGRADATIONS:
        mean_psnr, mean_ssim = gains([r for r in rows if r["degradation"] == name])
        lines.append(f"| **mean gain** | {name} | | **{mean_psnr:+.2f} dB** | | **{mean_ssim:+.3f}** |")
    return "\n".join(lines)


def filled(card: str, rows: Sequence[Row]) -> str:
    """The model card with its table made anew."""
    head, rest = card.split(START)
    return f"{head}{START}\n{table(rows)}\n{END}{rest.split(END)[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="store the results and render the model card")
    write = parser.parse_args().write
    restorer = Restorer.load(device="cpu")
    rows = [measure(restorer, name, photo, kind) for kind in DEGRADATIONS for name, photo in photos()]
    print(table(rows))
    if write:
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(json.dumps({"weights": "gpen-open-512", "rows": rows}, indent=2) + "\n")
        CARD.write_text(filled(CARD.read_text(), rows))


if __name__ == "__main__":
    main()
