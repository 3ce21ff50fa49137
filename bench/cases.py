"""What is measured: one case is one network in one precision on one device, in a process of its own."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

NETWORKS = {
    "original": "original formulation, eager",
    "shared": "shared weights, eager",
    "inductor": "shared weights, torch.compile (on a GPU with CUDA graphs)",
    "ahead": "minimal filters in fp32, compiled ahead of time, as --compile does on a CPU",
    "package": "a package of export --format pt2, Triton hidden (on a GPU with CUDA graphs)",
    "kernels-eager": "our kernels, eager",
    "kernels": "our kernels and CUDA graphs",
    "reference": "the real original ($GPEN_REFERENCE), eager",
    "reference-compiled": "the real original ($GPEN_REFERENCE), torch.compile",
    "onnxruntime": "ONNX Runtime on the original's graph",
    "openvino": "OpenVINO on the original's graph",
    "openvino-shared": "OpenVINO on the graph of our ONNX export",
}


@dataclass(frozen=True)
class Case:
    """network: a key of `NETWORKS`. size: S = T in pixels. fidelity: compare with float32 as well.

    warm: a second process is started with the first one's caches, to see how soon it answers. keeps_memory: freed
    memory stays with the process, as the command line has it (`keep_freed_memory`); matters on a CPU.
    """

    network: str
    precision: str
    device: str
    size: int = 512
    batches: tuple[int, ...] = (1, 8)
    fidelity: bool = True
    warm: bool = False
    keeps_memory: bool = True

    @property
    def title(self) -> str:
        return f"{NETWORKS[self.network]}, {self.precision}{'' if self.keeps_memory else ', freed memory given back'}"

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
# What `export --format pt2` makes, right after what `--compile` runs.
EXPORTED = tuple(
    Case(network, "fp16", "cuda", size, (1, 4, 8), fidelity=network == "package")
    for size in (256, 512)
    for network in ("kernels", "package")
)
ON_CPU = (
    Case("ahead", "fp32", "cpu", batches=(1,), warm=True),
    Case("package", "fp32", "cpu", batches=(1,), fidelity=False),
    Case("onnxruntime", "fp32", "cpu", batches=(1,), fidelity=False),
    Case("openvino", "fp32", "cpu", batches=(1,), fidelity=False),
    Case("openvino-shared", "fp32", "cpu", batches=(1,), fidelity=False),
    Case("ahead", "bf16", "cpu", batches=(1,)),
    Case("inductor", "fp32", "cpu", batches=(1,), fidelity=False),
    Case("inductor", "fp32", "cpu", batches=(1,), fidelity=False, keeps_memory=False),
    Case("shared", "fp32", "cpu", batches=(1,), fidelity=False),
    Case("shared", "fp32", "cpu", batches=(1,), fidelity=False, keeps_memory=False),
    Case("original", "fp32", "cpu", batches=(1,), fidelity=False),
)
# Where $GPEN_REFERENCE is set. Its weights are its own: there is nothing to compare its pictures with.
REFERENCES = {
    "gpu": (
        Case("reference", "tf32", "cuda", fidelity=False),
        Case("reference", "fp16", "cuda", fidelity=False),
        Case("reference-compiled", "fp16", "cuda", fidelity=False),
    ),
    "cpu": (
        Case("reference", "fp32", "cpu", batches=(1,), fidelity=False),
        Case("reference-compiled", "fp32", "cpu", batches=(1,), fidelity=False),
    ),
}
SUITES = {"gpu": WATERFALL[:-1] + SIZES + WATERFALL[-1:], "packages": EXPORTED, "cpu": ON_CPU}
