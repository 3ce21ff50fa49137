"""Measure a suite, one fresh process a case: `python -m bench.run gpu -o bench/results/h200.json`."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.cases import REFERENCES, SUITES, Case


def run_case(case: Case, timeout: float, cache: str) -> dict[str, Any]:
    """The row of a case, or what kept it from having one."""
    row = run_process(case, timeout, cache)
    if case.warm and "error" not in row:
        again = run_process(replace(case, batches=case.batches[:1], fidelity=False), timeout, cache)
        first = again.get("batches", {}).get(str(case.batches[0]), {}).get("first_s")
        row["warm"] = {"first_s": first, "process_s": again.get("process_s")}
    return row


def run_process(case: Case, timeout: float, cache: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.measure", json.dumps(case.to_dict())]
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor",
        "TRITON_CACHE_DIR": f"{cache}/triton",
        "GPEN_CORE_HOME": f"{cache}/gpen-core",
    }
    started = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout, env=environment)
    except subprocess.TimeoutExpired:
        return {"case": case.to_dict(), "title": case.title, "error": f"no result within {timeout:.0f} s"}
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"case": case.to_dict(), "title": case.title, "error": reason[:300]}
    row: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return {**row, "process_s": round(time.perf_counter() - started, 1)}


def suite(name: str) -> tuple[Case, ...]:
    """The cases of a suite, with the real original where there is one."""
    return SUITES[name] + (REFERENCES.get(name, ()) if os.environ.get("GPEN_REFERENCE") else ())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suite", choices=sorted(SUITES))
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--only", help="cases whose network is one of these, separated by commas")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one case")
    arguments = parser.parse_args()
    wanted = arguments.only.split(",") if arguments.only else None
    cases = [case for case in suite(arguments.suite) if wanted is None or case.network in wanted]
    rows = []
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    # Compilers start with empty caches, and keep them for the later cases.
    with tempfile.TemporaryDirectory() as cache:
        for case in cases:
            rows.append(run_case(case, arguments.timeout, cache))
            print(json.dumps(rows[-1]), flush=True)
            arguments.output.write_text(json.dumps({"suite": arguments.suite, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
