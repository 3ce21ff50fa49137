"""Large pictures: the memory of the whole way, from file to file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# A process of its own, whose peak is not that of the tests around it. The picture is made by another one.
MAKE = """
import sys, numpy as np, cv2
width, height, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
rows = (np.arange(width) // 16 % 256).astype(sys.argv[4])
picture = np.broadcast_to(rows[None, :, None], (height, width, 3)).copy()
assert cv2.imwrite(path, picture)
"""
RUN = """
import sys
from pathlib import Path
from gpen_core.batch import Files, run
from gpen_core.plan import plan
from gpen_core.restorer import Options, Restorer
from tests.stubs import FixedDetector, config_of, face_at, without_channel_0

face = face_at(3000, 2000, 400)
restorer = Restorer(without_channel_0, config_of(512), FixedDetector([face]))
options = Options(**eval(sys.argv[3]))
jobs = plan([Path(sys.argv[1])], Path(sys.argv[2]))
summary = run(jobs, lambda: restorer, options, lambda outcome: print(outcome.line(), outcome.error, file=sys.stderr))
assert summary.exit_code == 0, summary
print([line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")][0])
"""


def peak(folder: Path, width: int, height: int, suffix: str, dtype: str, options: str) -> float:
    """Peak memory in GB of restoring one photo."""
    source, target = folder / f"in{suffix}", folder / f"out{suffix}"
    command = [sys.executable, "-c", MAKE, str(width), str(height), str(source), dtype]
    subprocess.run(command, check=True)
    command = [sys.executable, "-c", RUN, str(source), str(target), options]
    environment_path = str(Path(__file__).parent.parent)
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=environment_path)
    assert done.returncode == 0, done.stderr
    assert target.stat().st_size > 1000
    return int(done.stdout) * 1024 / 1e9


needs_proc = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from Linux's /proc")


@needs_proc
def test_24_megapixels(tmp_path: Path) -> None:
    assert peak(tmp_path, 6000, 4000, ".jpg", "uint8", "{}") < 1.5


@pytest.mark.slow
@needs_proc
@pytest.mark.parametrize(
    ("suffix", "dtype", "options"),
    [
        (".jpg", "uint8", "{}"),
        (".png", "uint16", "{}"),
        (".tif", "uint16", "{'grain': 1.0}"),
        (".jpg", "uint8", "{'rotate': 'auto', 'match_color': True}"),
        (".jpg", "uint8", "{'tile': 512, 'stride': 512}"),
    ],
)
def test_100_megapixels(suffix: str, dtype: str, options: str, tmp_path: Path) -> None:
    assert peak(tmp_path, 11_600, 8_700, suffix, dtype, options) < 4
