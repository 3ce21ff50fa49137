"""Small converted files to export, and processes as a user without PyTorch or a compiler has them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from gpen_convert.generator import write_verified
from gpen_convert.keymap import fold
from gpen_core.config import GeneratorConfig, Provenance, WeightsMetadata
from tests.legacy import legacy_state

PROVENANCE = Provenance(source_name="net.pth", source_sha256="0" * 64, licence="CC0-1.0", tool_version="gpen-core 0")
ENLARGING = GeneratorConfig(input_size=16, output_size=32, channels=(8, 8, 4, 4), style_dim=16, n_mlp=2)
# Compiling takes seconds for each level, and noise is of interest.
SMALL = GeneratorConfig(input_size=8, output_size=16, channels=(8, 8, 4), style_dim=8, n_mlp=1)
SEG2FACE = GeneratorConfig(
    input_size=16, output_size=16, channels=(8, 8, 4), style_dim=16, n_mlp=2, value_range=(0, 1), task="seg2face"
)
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from gpen_core.cli import main; main()"
PLAIN = "from gpen_core.cli import main; main()"


def converted(folder: Path, config: GeneratorConfig, name: str = "net") -> Path:
    """Stand-in weights in a converted file."""
    path = folder / f"{name}.safetensors"
    write_verified(path, WeightsMetadata(config, PROVENANCE), fold(config, legacy_state(config), torch.float32))
    return path


def run_process(
    code: str, arguments: Sequence[object], environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """A new Python that finds the packages, with this environment alone or that of the tests."""
    inherited = os.environ if environment is None else environment
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        check=False,
        capture_output=True,
        text=True,
        # The packages may be importable through pytest's paths alone.
        env={**inherited, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
