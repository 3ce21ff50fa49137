"""What is measured: one case is one network in one precision on one device, in a process of its own."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

NETWORKS = {
    "original": "original formulation, eager",
    "shared": "shared weights, eager",
    "inductor": "shared weights, compiled by PyTorch (ahead of time on a CPU, with CUDA graphs on a GPU)",
    "kernels-eager": "our kernels, eager",
    "kernels": "our kernels and CUDA graphs",
    "reference": "the real original ($GPEN_REFERENCE), eager",
    "onnxruntime": "ONNX Runtime on the original's graph",
    "openvino": "OpenVINO on the original's graph",
}


@dataclass(frozen=True)
class Case:
    """network: a key of `NETWORKS`. size: S = T in pixels. fidelity: compare with float32 as well.

    warm: a second process is started with the first one's caches, to see how soon it answers.
    """

    network: str
    precision: str
    device: str
    size: int = 512
    batches: tuple[int, ...] = (1, 8)
    fidelity: bool = True
    warm: bool = False

    @property
    def title(self) -> str:
        return f"{NETWORKS[self.network]}, {self.precision}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Case:
        return cls(**{**values, "batches": tuple(values["batches"])})


# The case with the cold caches comes first.
WATERFALL = (
    Case("kernels", "fp16", "cuda", batches=(1, 4, 8, 32), warm=True),
    Case("original", "tf32", "cuda"),
    Case("original", "fp16", "cuda"),
    Case("shared", "fp16", "cuda"),
    Case("kernels", "bf16", "cuda"),
    Case("kernels", "tf32", "cuda"),
    Case("inductor", "fp16", "cuda"),
)
SIZES = tuple(Case("kernels", "fp16", "cuda", size, (1, 4), fidelity=False) for size in (256, 1024, 2048))
ON_CPU = (
    Case("inductor", "fp32", "cpu", batches=(1,), warm=True),
    Case("onnxruntime", "fp32", "cpu", batches=(1,), fidelity=False),
    Case("openvino", "fp32", "cpu", batches=(1,), fidelity=False),
    Case("inductor", "bf16", "cpu", batches=(1,)),
    Case("shared", "fp32", "cpu", batches=(1,), fidelity=False),
    Case("original", "fp32", "cpu", batches=(1,), fidelity=False),
)
SUITES = {"gpu": WATERFALL[:-1] + SIZES + WATERFALL[-1:], "cpu": ON_CPU}
