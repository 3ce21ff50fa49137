"""Networks compiled ahead of time (AOTInductor): compiled, sealed, checked and loaded.

A package is machine code for one PyTorch, one kind of processor and one set of weights, and by itself it takes
anything and answers anything. So a sidecar, PACKAGE.json, says what it is for; both are bound to each other by
hashes, and all of it is checked before any of the code is loaded. Hashes prove that the two belong together, not who
made them: a package is a program, to be loaded only from those who may run programs here.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gpen_core.compile_cache import writing_to
from gpen_core.config import METADATA_KEY, WeightsMetadata
from gpen_core.errors import CheckpointError, DeviceError, ImageError
from gpen_core.files import sha256, why_unreadable
from gpen_core.model import Generator

SIDECAR = ".json"
WHOLE_RANGE, OWN_RANGE = 1, 2
"""Versions of the sidecar: of code for every batch that the package takes, and of code for others than those."""
ONE = (1, 1)
BATCHES = (1, 15)
"""Least and most faces in one call; from 16 on PyTorch was seen to compile for that number alone."""
# What compilers make use of unasked when they build for the processor they run on.
FEATURES = re.compile(r"(avx|sse|ssse|fma|bmi|amx|f16c|movbe|popcnt|abm|adx|sha|vaes|vpclmulqdq|gfni)")
MOST_JSON = 1 << 20
# How PyTorch's loader tells that it could not unpack a package, or not run what it unpacked.
LEFT_BEHIND = re.compile(r"(/\S*/aotinductor_\w{6})/")
UNPACKING = ("Failed to extract", "failed to map segment", "temporary directory")
# Where it does that: the first of these variables that is set, or /tmp.
PLACES = ("TMPDIR", "TMP", "TEMP", "TEMPDIR")
# More than any processor's threads, so that loops over few faces are shared out by rows as well.
THREADS = 64

Network = Callable[[Tensor], Tensor]
"""float32 [B, 3, S, S] to float32 [B, 3, T, T]."""


@dataclass(frozen=True)
class Machine:
    """What machine code depends on.

    torch: version. system, machine: as `platform` has them. device: cpu or cuda. features: instruction sets of the
    processor. compute_capability: of the GPU, "" without one.
    """

    torch: str
    system: str
    machine: str
    device: str
    features: tuple[str, ...]
    compute_capability: str = ""

    def obstacle(self, here: Machine) -> str:
        """Why code for this machine can't run on the machine `here`, or nothing."""
        for name, word in (("torch", "PyTorch"), ("system", "system"), ("machine", "processor")):
            ours, theirs = getattr(here, name), getattr(self, name)
            if ours != theirs:
                return f"compiled for {word} {theirs}; this is {ours}"
        lacking = sorted(set(self.features) - set(here.features))
        if lacking:
            return f"compiled for a processor with {', '.join(lacking)}, which this one lacks"
        if self.compute_capability != here.compute_capability:
            return (
                f"compiled for a GPU of compute capability {self.compute_capability}; "
                f"this one has {here.compute_capability or 'none'}"
            )
        return ""


@dataclass(frozen=True)
class Sidecar:
    """What a package is for. package_sha256 is empty until the package exists.

    batches: least and most faces in one call. compiled_batches: those that the code itself is for: the same, or one
    face, and then a call runs it face by face. checkpoint_sha256: of the weights.
    """

    machine: Machine
    weights: WeightsMetadata
    dtype: str
    batches: tuple[int, int]
    compiled_batches: tuple[int, int]
    checkpoint_sha256: str
    package_sha256: str = ""

    @classmethod
    def describe(
        cls,
        weights: WeightsMetadata,
        machine: Machine,
        dtype: str,
        checkpoint_sha256: str,
        batches: tuple[int, int] = BATCHES,
    ) -> Sidecar:
        """Of a package that is still to be made. On a CPU its code is for one face, which is faster (`one_by_one`)."""
        compiled = ONE if machine.device == "cpu" else batches
        return cls(machine, weights, dtype, batches, compiled, checkpoint_sha256)

    @property
    def face_by_face(self) -> bool:
        """Whether the code takes fewer faces than a call."""
        return self.compiled_batches != self.batches

    def sealed(self, package_sha256: str) -> Sidecar:
        return replace(self, package_sha256=package_sha256)

    def binding(self) -> dict[str, str]:
        """What goes into the package itself: a hash of everything here but the package's own."""
        content = replace(self, package_sha256="").encode()
        return {METADATA_KEY: hashlib.sha256(content.encode()).hexdigest()}

    def encode(self) -> str:
        content: dict[str, Any] = {
            "format_version": OWN_RANGE if self.face_by_face else WHOLE_RANGE,
            "machine": asdict(self.machine),
            "input_size": self.weights.config.input_size,
            "output_size": self.weights.config.output_size,
            "dtype": self.dtype,
            "batches": self.batches,
            "checkpoint_sha256": self.checkpoint_sha256,
            "package_sha256": self.package_sha256,
            "weights": json.loads(self.weights.encode()[METADATA_KEY]),
        }
        if self.face_by_face:
            content["compiled_batches"] = self.compiled_batches
        return json.dumps(content, sort_keys=True, indent=1) + "\n"

    @classmethod
    def decode(cls, text: str) -> Sidecar:
        """Raises CheckpointError if a value is missing, unknown or malformed."""
        try:
            content = json.loads(text)
            version = content["format_version"]
            if type(version) is int and version not in (WHOLE_RANGE, OWN_RANGE):
                raise CheckpointError(
                    f"the sidecar has format {version}, which this version of gpen-core does not know"
                )
            machine = content["machine"]
            low, high = content["batches"]
            first, last = content.get("compiled_batches", (low, high))
            _require_types(content)
            sidecar = cls(
                machine=Machine(**{**machine, "features": tuple(machine["features"])}),
                weights=WeightsMetadata.decode({METADATA_KEY: json.dumps(content["weights"])}),
                dtype=content["dtype"],
                batches=(low, high),
                compiled_batches=(first, last),
                checkpoint_sha256=content["checkpoint_sha256"],
                package_sha256=content["package_sha256"],
            )
        except (ValueError, KeyError, TypeError, RecursionError):
            raise CheckpointError("the sidecar is malformed") from None
        if sidecar.compiled_batches not in (ONE, sidecar.batches):
            raise CheckpointError(f"code for {first} to {last} faces can't make calls of {low} to {high}")
        if json.loads(sidecar.encode()) != content:
            raise CheckpointError("the sidecar contradicts itself")
        return sidecar


def _require_types(content: dict[str, Any]) -> None:
    """Raises TypeError for a sidecar's value of another type than it is written with, KeyError for one missing."""
    machine = content["machine"]
    features = machine["features"]
    ranges = [content["batches"], content.get("compiled_batches", content["batches"])]
    texts = [content[name] for name in ("dtype", "checkpoint_sha256", "package_sha256")]
    texts += [value for name, value in machine.items() if name != "features"]
    numbers = [content[name] for name in ("format_version", "input_size", "output_size")]
    lists = [*ranges, features]
    sound = all(isinstance(value, list) for value in lists) and isinstance(content["weights"], dict)
    # For Python, true is a 1.
    sound = sound and all(type(value) is int for value in (*numbers, *ranges[0], *ranges[1]))
    if not sound or not all(isinstance(value, str) for value in (*texts, *features)):
        raise TypeError


class Fixed(nn.Module):
    """A generator of one argument: noise for levels above the encoder is that of seed 0, a part of the model.

    form: another module that computes the same from the same arguments, to stand for the generator.
    """

    def __init__(self, generator: Generator, form: nn.Module | None = None) -> None:
        super().__init__()
        self.network = form or generator
        self.maps = nn.ParameterList(nn.Parameter(noise, requires_grad=False) for noise in generator.noise())

    def forward(self, image: Tensor) -> Tensor:
        """image: [B, 3, S, S], returns [B, 3, T, T], both float32."""
        result: Tensor = self.network(image, list(self.maps))
        return result


def make_package(network: nn.Module, package: Path, sidecar: Sidecar, device: torch.device) -> None:
    """Compile a network for this machine, and write the package and the sealed sidecar beside it.

    network: float32 [B, 3, S, S] to float32 [B, 3, T, T] on the device, in whatever layout it shall run. Nothing else
    is written. Raises DeviceError for a compiler that does not go with PyTorch, OSError, and what PyTorch's compiler
    raises, which can be anything.
    """
    from torch._inductor.utils import clear_inductor_caches

    size = sidecar.weights.config.input_size
    low, high = sidecar.compiled_batches
    # From a batch of 2 nothing that depends on the batch is taken for a constant 1.
    example = torch.zeros(low if low == high else 2, 3, size, size, device=device)
    dynamic = None if low == high else ({0: torch.export.Dim("batch", min=low, max=high)},)
    settings: dict[str, Any] = {
        "aot_inductor.metadata": sidecar.binding(),
        # Lays a CPU's weights out for its kernels while compiling.
        "freezing": device.type == "cpu",
        # Else the number of this process's threads would be a constant of the code.
        "cpp.dynamic_threads": True,
        "cpp.threads": THREADS,
    }
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="gpen-core-"))
        stack.enter_context(writing_to(Path(folder)))
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        # PyTorch remembers files of its folder, before and after.
        clear_inductor_caches()
        stack.callback(clear_inductor_caches)
        # Export looks at convolutions with cuDNN switched off. The compiler, which asks again with cuDNN, would get the
        # remembered answer, a contiguous result, and copy each map to and from that layout, or read it wrongly.
        stack.enter_context(torch._dynamo.config.patch(fake_tensor_cache_enabled=False))
        stack.enter_context(declared_where_used())
        # What export and the compiler deprecate in themselves.
        warnings.simplefilter("ignore")
        program = torch.export.export(network, (example,), dynamic_shapes=dynamic, strict=False)
        torch._inductor.aoti_compile_and_package(program, package_path=str(package), inductor_configs=settings)
    require_loadable(package)
    sealed = sidecar.sealed(sha256(package))
    Path(f"{package}{SIDECAR}").write_text(sealed.encode(), encoding="utf-8")


@contextmanager
def declared_where_used() -> Iterator[None]:
    """Have PyTorch declare each array of sizes in its C++ code right before it is used.

    Before 2.13 it knows the arrays that a part of the code declares by the address of a bound method, which is soon
    another's. So now and then code used an array that is declared further down, and did not compile.
    """
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu

    declare = getattr(CppWrapperCpu, "_codegen_int_array_var_impl", None)
    if torch.__version__ >= "2.13" or declare is None:
        yield
        return
    remembering = CppWrapperCpu.codegen_int_array_var

    def forgetting(
        wrapper: Any, array: str, writeline: Callable[..., None], known_statically: bool = False, graph: object = None
    ) -> Any:
        return declare(wrapper, array, writeline, known_statically)

    CppWrapperCpu.codegen_int_array_var = forgetting  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        CppWrapperCpu.codegen_int_array_var = remembering  # type: ignore[method-assign]


def why_not_compiled(error: Exception) -> str:
    """What a compiler's exception says, in one line: what it is, and the first error of the C++ compiler in it."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    cause = next((line.strip() for line in lines[1:] if "error:" in line), "")
    return f"{lines[0].strip()}{f': {cause}' if cause else ''}"


def require_loadable(package: Path) -> None:
    """Raises DeviceError if a new package kills a process that loads it, before it can do so to this one.

    It does where the C++ compiler is of a library that PyTorch's own does not mix with. Other troubles are not told
    here: who loads the package meets them.
    """
    code = "import sys, torch; torch._C._aoti.AOTIModelPackageLoader(sys.argv[1], 'model', False, 1, -1)"
    done = subprocess.run([sys.executable, "-I", "-c", code, package], capture_output=True, check=False)
    if done.returncode < 0:
        raise DeviceError(
            f"what the C++ compiler made ends a process that loads it (signal {-done.returncode}): compiler and "
            "PyTorch don't go together; name another compiler in the variable CXX"
        )


def unpacking_place() -> tuple[Path, str]:
    """Where PyTorch's loader unpacks packages, and how another place is named."""
    if torch.__version__ < "2.13":
        return Path("/tmp"), "PyTorch knows no other before 2.13"
    found = next((os.environ[name] for name in PLACES if name in os.environ), "/tmp")
    return Path(found or "/"), "name another in the variable TMPDIR"


def require_unpackable() -> None:
    """Raises DeviceError if PyTorch's loader could not unpack a package here, or not run what it unpacked."""
    if os.name == "nt":  # no other place can be named
        return
    place, other = unpacking_place()
    fault = ""
    if not place.is_dir():
        fault = "is no folder"
    elif not os.access(place, os.W_OK | os.X_OK):
        fault = "can't be written to"
    elif hasattr(os, "ST_NOEXEC") and os.statvfs(place).f_flag & os.ST_NOEXEC:
        fault = "allows no execution (mounted noexec)"
    if fault:
        raise DeviceError(f"{place} {fault}, and PyTorch unpacks compiled networks there: {other}")


def load_package(path: Path, device: torch.device) -> tuple[Sidecar, Network]:
    """The sidecar and the network, which checks each input. Raises CheckpointError and DeviceError before loading."""
    sidecar = read_sidecar(path)
    return sidecar, open_package(path, sidecar, device)


def open_package(path: Path, sidecar: Sidecar, device: torch.device) -> Network:
    """The network of a package whose sidecar was read. Raises DeviceError before loading if this is no machine for it,
    or has no place to unpack it.

    Raises CheckpointError if PyTorch can't load it. The network raises ImageError for an input that it is not for. Any
    number of threads may call it; where `can_record` says so, its calls can be recorded as CUDA graphs, after a first
    one.
    """
    require_machine(path, sidecar, device)
    require_unpackable()
    code = _open(path, device)
    run = one_by_one(code) if sidecar.face_by_face else code
    low, high = sidecar.batches
    size = sidecar.weights.config.input_size

    def network(image: Tensor) -> Tensor:
        shaped = image.ndim == 4 and low <= len(image) <= high and image.shape[1:] == (3, size, size)
        if not shaped or image.dtype != torch.float32 or image.device.type != device.type:
            seen = f"{list(image.shape)} {str(image.dtype).removeprefix('torch.')} on {image.device}"
            raise ImageError(f"expected [{low}..{high}, 3, {size}, {size}] float32 on {device}, got {seen}")
        return run(image.contiguous())

    return network


def one_by_one(network: Network) -> Network:
    """A network of one picture for any number of them.

    A CPU gains nothing from more at once, and for a fixed batch its compiler lays out the weights of the transposed
    convolutions, which are a quarter of the work, as it does all others.
    """
    return lambda image: torch.cat([network(one) for one in image.split(1)])


def can_record(device: torch.device) -> bool:
    """Whether calls of a package can be recorded as CUDA graphs: older loaders wait for events of their own."""
    return device.type == "cuda" and torch.__version__ >= "2.8"


def read_sidecar(path: Path) -> Sidecar:
    """A package's sidecar, which belongs to it and was not changed. Raises CheckpointError."""
    beside = Path(f"{path}{SIDECAR}")
    obstacle = why_unreadable(path)
    if obstacle:
        raise CheckpointError(f"{path}: {obstacle}")
    try:
        if beside.exists() and why_unreadable(beside):
            raise CheckpointError(f"{beside}: {why_unreadable(beside)}")
        if beside.stat().st_size > MOST_JSON:
            raise CheckpointError(f"{beside}: too large for a sidecar")
        sidecar = Sidecar.decode(beside.read_text(encoding="utf-8"))
        digest = sha256(path)
        bound = _read_binding(path)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: its sidecar {beside.name} is missing; without it nothing can be checked"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from None
    except CheckpointError as error:
        raise CheckpointError(f"{beside}: {str(error).removeprefix(f'{beside}: ')}") from None
    except UnicodeDecodeError:
        raise CheckpointError(f"{beside}: the sidecar is not text") from None
    if digest != sidecar.package_sha256:
        raise CheckpointError(
            f"{path}: its sha256 is not the one in {beside.name}: one of the two was changed or swapped"
        )
    if bound != sidecar.binding():
        raise CheckpointError(f"{beside}: not the sidecar that this package was made with; export it again")
    return sidecar


def require_machine(path: Path, sidecar: Sidecar, device: torch.device) -> None:
    """Raises DeviceError if a package was not compiled for this machine, with the given device."""
    obstacle = sidecar.machine.obstacle(describe_machine(device))
    if obstacle:
        raise DeviceError(f"{path}: {obstacle}; export it again here")


def describe_machine(device: torch.device) -> Machine:
    """This machine, with the given device. Needs no compiler."""
    capability = ".".join(map(str, torch.cuda.get_device_capability(device))) if device.type == "cuda" else ""
    return Machine(
        torch=str(torch.__version__),
        system=platform.system(),
        machine=platform.machine(),
        device=device.type,
        features=processor_features(),
        compute_capability=capability,
    )


def processor_features() -> tuple[str, ...]:
    """Instruction sets of this processor, sorted; where the system does not tell, what PyTorch found."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, values = line.partition(":")
        if name.strip() == "flags":
            return tuple(sorted(set(filter(FEATURES.match, values.split()))))
        if name.strip() == "Features":
            return tuple(sorted(set(values.split())))
    return (torch.backends.cpu.get_cpu_capability(),)


def _read_binding(path: Path) -> dict[str, str]:
    """What the exporter put into the package's own metadata; nothing where there is none."""
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                if member.filename.endswith("wrapper_metadata.json") and member.file_size < MOST_JSON:
                    content = json.loads(archive.read(member))
                    return {METADATA_KEY: content[METADATA_KEY]}
    except (zipfile.BadZipFile, ValueError, KeyError, TypeError):
        pass
    return {}


def _open(path: Path, device: torch.device) -> Network:
    """The code of a package, in PyTorch's own loader.

    The public way to that one first compiles a program, to compare what is compared already.
    """
    loader = torch._C._aoti.AOTIModelPackageLoader
    index = -1 if device.index is None else device.index
    alone = can_record(device)
    try:
        opened = loader(str(path), "model", alone, 1, index)
    except TypeError:  # before PyTorch 2.8
        opened = loader(str(path), "model")  # type: ignore[call-arg,unused-ignore]
    except RuntimeError as error:
        first = str(error).strip().splitlines()[0]
        unpacking = any(words in first for words in UNPACKING)
        left = LEFT_BEHIND.search(first)
        if left is not None:
            # PyTorch leaves there what it unpacked.
            shutil.rmtree(left[1], ignore_errors=True)
        hint = "; PyTorch unpacks packages in /tmp, which must have room and allow execution" if unpacking else ""
        raise CheckpointError(f"{path}: PyTorch can't load it ({first}){hint}") from None
    # What can be recorded leaves the order of its calls to others.
    turn = threading.Lock() if alone else nullcontext()
    thread = threading.local()

    def code(image: Tensor) -> Tensor:
        if image.is_cuda and not hasattr(thread, "ready"):
            # A package launches its kernels past the library that gives a thread its GPU at the first use.
            torch.zeros(1, device=image.device)
            thread.ready = True
        with turn:
            result: Tensor = opened.run([image])[0]
        return result

    return code
