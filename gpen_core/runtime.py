"""The one address of speed: device, precision, memory format, compilation, batches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from einops import rearrange
from torch import Tensor

from gpen_core.config import GeneratorConfig
from gpen_core.errors import DeviceError, UsageError
from gpen_core.pixels import from_network, to_network
from gpen_core.types import Image

PRECISIONS = ("auto", "fp32", "tf32", "fp16", "bf16")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RuntimeOptions:
    """device: auto, cpu, cuda, cuda:N. precision: one of `PRECISIONS`. max_batch: faces in one call of the network."""

    device: str = "auto"
    precision: str = "auto"
    compile: bool = False
    max_batch: int = 8


def choose_device(name: str) -> torch.device:
    """Raises DeviceError if the named device is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"unknown device {name!r}; use auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"unknown device {name!r}; use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise DeviceError(f"--device {name}: this PyTorch ({torch.__version__}) sees no CUDA device")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise DeviceError(f"--device {name}: there are only {torch.cuda.device_count()} CUDA devices")
    return device


class Runtime:
    """Runs a generator on aligned 8-bit crops, in batches."""

    def __init__(
        self,
        generator: Callable[[Tensor], Tensor],
        config: GeneratorConfig,
        options: RuntimeOptions = RuntimeOptions(),
    ) -> None:
        if options.precision not in PRECISIONS:
            raise UsageError(f"unknown precision {options.precision!r}; use one of {', '.join(PRECISIONS)}")
        self.device = choose_device(options.device)
        self.config = config
        self.max_batch = options.max_batch
        self.generator = generator

    @property
    def description(self) -> str:
        """Device and precision in words."""
        return f"{self.device.type} fp32"

    def __call__(self, crops: Sequence[Image]) -> list[Image | None]:
        """Restore S x S crops; each result is T x T, or None where the network gave no finite picture."""
        results: list[Image | None] = []
        for start in range(0, len(crops), self.max_batch):
            results += self._batch(crops[start : start + self.max_batch])
        return results

    def _batch(self, crops: Sequence[Image]) -> list[Image | None]:
        stacked = torch.from_numpy(np.stack(crops)).to(self.device)
        with torch.inference_mode():
            entering = to_network(rearrange(stacked, "b h w c -> b c h w").float(), self.config.value_range)
            leaving = self.generator(entering.contiguous())
            finite = leaving.isfinite().flatten(1).all(1).tolist()
            pictures = rearrange(from_network(leaving, self.config.value_range), "b c h w -> b h w c")
            images = pictures.nan_to_num().to(torch.uint8).cpu().numpy()
        return [np.ascontiguousarray(image) if ok else None for image, ok in zip(images, finite, strict=True)]
