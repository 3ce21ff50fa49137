"""Settings that go together, by the memory of the machine."""

from __future__ import annotations

from dataclasses import dataclass

from gpen_core.errors import UsageError

GIB = 2**30


@dataclass(frozen=True)
class Preset:
    """max_batch: faces in one call of the network. precision, compile: as `RuntimeOptions` takes them.

    long_side: longer side in pixels to which photos are shrunk, or None. tile: side in pixels of what a background
    up-scaler enlarges at once. networks: bytes that several networks may take together, working memory included.
    needs: bytes of GPU memory from which it is chosen; None means that it never is.
    """

    max_batch: int
    precision: str
    compile: bool
    long_side: int | None
    tile: int
    networks: int
    needs: int | None
    summary: str


# On a GPU "auto" is fp16. Measured there with the published widths (MiB of the process, batch 2, 4, 8, 16):
# 512 px 1286, 2132, 4586, 8714; 1024 px 2570, 4130, 7790, 15084. A 2048 px network halves its batch by itself.
PRESETS = {
    "laptop": Preset(1, "auto", False, 6000, 128, 3 * GIB, None, "no GPU, or one too small: one face at a time"),
    "4gb": Preset(2, "auto", False, 6000, 128, 5 * GIB // 2, 3 * GIB, "a GPU of 4 GB: two faces at a time"),
    "8gb": Preset(4, "auto", False, None, 256, 13 * GIB // 2, 7 * GIB, "a GPU of 8 GB: four faces at a time"),
    "12gb": Preset(8, "auto", False, None, 256, 21 * GIB // 2, 11 * GIB, "a GPU of 12 GB: eight faces at a time"),
    "throughput": Preset(16, "auto", True, None, 256, 20 * GIB, None, "24 GB, thousands of faces: sixteen, compiled"),
}


def find_preset(name: str) -> Preset:
    """Raises UsageError for a name that is none."""
    if name not in PRESETS:
        raise UsageError(f"--preset {name}: use auto, {', '.join(PRESETS)}")
    return PRESETS[name]


def choose_preset(gpu_memory: int | None) -> str:
    """The name of the preset for a GPU of so many bytes, or for none.

    Never "throughput": compiling pays only for many faces, which nobody can know beforehand.
    """
    memory = gpu_memory or 0
    fitting = [name for name, preset in PRESETS.items() if preset.needs is not None and preset.needs <= memory]
    return fitting[-1] if fitting else "laptop"
