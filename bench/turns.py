"""Networks of one precision on a CPU, called in turns in one process, so that a machine's moods hit all alike.

`python -m bench.turns -o bench/results/cpu_turns.json`
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

from bench.cases import Case
from bench.measure import build, images, machine, summary

NETWORKS = ("original", "onnxruntime", "openvino", "shared", "inductor")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--networks", default=",".join(NETWORKS), help="separated by commas")
    arguments = parser.parse_args()
    device = torch.device("cpu")
    image = images(1, 512, device)
    cases = [Case(name, "fp32", "cpu", batches=(1,), fidelity=False) for name in arguments.networks.split(",")]
    times: dict[Case, list[float]] = {case: [] for case in cases}
    first = {}
    with torch.inference_mode():
        networks = {}
        for case in cases:
            networks[case] = build(case, device)
            started = time.perf_counter()
            networks[case](image)
            first[case] = round(time.perf_counter() - started, 2)
        for _ in range(arguments.rounds):
            for case, network in networks.items():
                started = time.perf_counter()
                network(image)
                times[case].append(1000 * (time.perf_counter() - started))
    rows = [
        {
            "case": case.to_dict(),
            "title": case.title,
            "batches": {"1": {"first_s": first[case], **summary(found, 1)}},
            "machine": machine(),
        }
        for case, found in times.items()
    ]
    arguments.output.write_text(json.dumps({"suite": "turns", "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
