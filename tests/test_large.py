"""Large pictures: the memory of the whole way, from file to file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest

from bench.detectors import PORTRAITS, groups
from tests.exported import run_process

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


# The peak of this process alone; that of `getrusage` would begin with the process that started it.
GROUP = """
import sys
from gpen_core.cli import run_command
code = run_command(sys.argv[1:])
peak = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")][0]
print(peak, file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.slow
@needs_proc
def test_a_group_of_90(centerface_path: Path, tmp_path: Path) -> None:
    """Every face of a group picture is found and restored, with the bundled weights, in 4 GB."""
    *_, group = groups(PORTRAITS)
    assert len(group.tiles) == 90
    # Brighter and darker, so that no two of the few portraits are alike.
    picture = group.picture.astype(np.float32)
    for index, (x0, y0, x1, y1) in enumerate(group.tiles):
        picture[y0:y1, x0:x1] *= 0.8 + 0.4 * index / 89
    assert cv2.imwrite(str(tmp_path / "group.png"), np.clip(picture, 0, 255).astype(np.uint8)[..., ::-1])
    options = ["--detector", centerface_path, "--weights", "gpen-open-512", "--device", "cpu", "--json"]
    done = run_process(GROUP, ["enhance", tmp_path / "group.png", "-o", tmp_path / "out.png", *options])
    assert done.returncode == 0, done.stderr
    faces = json.loads(done.stdout)["faces"]
    boxes = [np.array(face["box"]).round().astype(int) for face in faces if face["status"] == "restored"]
    assert len(boxes) == len(faces) == 90
    middles = [(box[:2] + box[2:]) / 2 for box in boxes]
    for x0, y0, x1, y1 in group.tiles:
        assert sum(bool(x0 <= x < x1 and y0 <= y < y1) for x, y in middles) == 1
    before, after = (cv2.imread(str(tmp_path / name)) for name in ("group.png", "out.png"))
    for x0, y0, x1, y1 in boxes:
        assert (before[y0:y1, x0:x1] != after[y0:y1, x0:x1]).any(2).mean() > 0.9
    assert int(done.stderr) * 1024 / 1e9 < 4
