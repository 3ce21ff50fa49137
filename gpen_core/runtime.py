"""The one address of speed: device, precision, memory format, compilation, batches.

Nothing here changes the process: switches of PyTorch that are global are set for the length of a call and put back.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import logging
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gpen_core.ahead import Fixed, Network, load_package, make_package, one_by_one, require_unpackable, why_not_compiled
from gpen_core.config import GeneratorConfig
from gpen_core.errors import DeviceError, UsageError
from gpen_core.footprint import EAGER_MAPS, KERNEL_MAPS, Footprint, largest_map
from gpen_core.model import Generator
from gpen_core.package_cache import PACKAGE, open_cache, sidecar_for
from gpen_core.pixels import from_network, require_crops, require_picture, to_network
from gpen_core.rrdb import RRDBNet, upscale
from gpen_core.types import Canvas, Image
from gpen_core.winograd import WinogradGenerator

PRECISIONS = ("auto", "fp32", "tf32", "fp16", "bf16")
BUCKETS = (1, 2, 4, 8, 16)
LOW = {"fp16": torch.float16, "bf16": torch.bfloat16}
OUT_OF_MEMORY = ("out of memory", "not enough memory", "can't allocate memory", "ALLOC_FAILED")
# One compilation for each bucket and each runtime of a process; PyTorch's own limit of 8 counts them all together.
COMPILATIONS = 64
# Versions of Triton that compile the kernels, and from which compute capability on; 3.2 has bfloat16 from 8.0 on.
COMPILES_KERNELS = (((3, 2), (8, 0)), ((3, 3), (7, 0)))
# Sides of the up-scaler's tiles, in cells of its grid.
LARGEST_TILE, SMALLEST_TILE = 256, 32
# Batches of one request on their way: the device has the next one before the last one's pictures are read.
ON_THEIR_WAY = 2
# Tiles for two faces cost less than 1 % with one to four, 2 % with eight (H200).
PACKAGED_FACES = 2
# Global switches of PyTorch can't be set for one thread alone.
SWITCHES = threading.RLock()
logger = logging.getLogger(__name__)

Step = Callable[[Tensor], tuple[Tensor, Tensor]]
"""uint8 [B, S, S, 3] to uint8 [B, T, T, 3], and whether each picture was finite [B]."""


@dataclass(frozen=True)
class RuntimeOptions:
    """How to run a network.

    device: auto, cpu, cuda, cuda:N. precision: one of `PRECISIONS`; auto is fp16 on a GPU and fp32 on a CPU.
    compile: prepare the network for each batch size of `BUCKETS` before it runs. compiler: by whom; one of
    "kernels" (this package's Triton kernels, on a GPU), "inductor" or another backend of torch.compile; "auto" takes
    the kernels where they can run; "ahead" says that the network was compiled before.
    cache: a folder that keeps what is compiled for a CPU, named by the user, who trusts whoever can write to it; None
    means a folder of the user's own (`package_cache`).
    max_batch: faces in one call of the network; None means 8 on a GPU and 1 on a CPU, where more gain nothing. What is
    compiled for a GPU takes 16 at most.
    cuda_graphs: record each compiled batch size once and replay it.
    cudnn, cudnn_benchmark, deterministic: cuDNN on, algorithms chosen by trial, reproducible algorithms only.
    upscaler_tile: cells along the side of what an up-scaler enlarges at once; None means the largest.
    threads: of the CPU; None leaves PyTorch's choice.
    expandable_segments, max_split_size_mb: of PyTorch's CUDA allocator; they stay for the rest of the process.
    """

    device: str = "auto"
    precision: str = "auto"
    compile: bool = False
    compiler: str = "auto"
    cache: Path | None = None
    max_batch: int | None = None
    cuda_graphs: bool = True
    cudnn: bool = True
    cudnn_benchmark: bool = True
    deterministic: bool = True
    threads: int | None = None
    upscaler_tile: int | None = None
    expandable_segments: bool | None = None
    max_split_size_mb: int | None = None

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise UsageError(f"unknown precision {self.precision!r}; use one of {', '.join(PRECISIONS)}")
        if self.max_batch is not None and self.max_batch < 1:
            raise UsageError(f"a batch of {self.max_batch} faces is none")
        if self.threads is not None and self.threads < 1:
            raise UsageError(f"{self.threads} threads are none")


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


def choose_precision(name: str, device: torch.device) -> str:
    """Raises DeviceError if the device can't compute in the named precision."""
    if device.type == "cpu":
        if name in ("fp16", "tf32"):
            raise DeviceError(f"--precision {name} needs a CUDA device; a CPU runs fp32 or bf16")
        return "fp32" if name == "auto" else name
    capability = torch.cuda.get_device_capability(device)
    if name in ("tf32", "bf16") and capability < (8, 0):
        found = ".".join(map(str, capability))
        raise DeviceError(f"--precision {name} needs a GPU of compute capability 8.0; {device} has {found}")
    if name == "auto":
        return "fp16" if capability >= (7, 0) else "fp32"
    return name


def largest_batch(options: RuntimeOptions, device: torch.device) -> int:
    """Faces in one call of the network at most: where batch sizes are prepared one by one, the largest of `BUCKETS`."""
    wanted = options.max_batch or (8 if device.type == "cuda" else 1)
    return min(wanted, BUCKETS[-1]) if options.compile and not compiles_ahead(device) else wanted


def estimate_footprint(config: GeneratorConfig, values: int, options: RuntimeOptions) -> Footprint:
    """Memory of a generator whose tensors have so many values, on the device. Raises UsageError and DeviceError."""
    device = choose_device(options.device)
    width = 2 if choose_precision(options.precision, device) in LOW else 4
    batch, face = largest_batch(options, device), width * largest_map(config)
    if options.compile and device.type == "cuda":
        return Footprint(width * values, KERNEL_MAPS * face, batch, keeps=options.cuda_graphs)
    # On a CPU the float32 weights stay beside others, and the compiler stores them once more.
    stored = width if device.type == "cuda" else (4 if width == 4 else 6) * (1 + options.compile)
    return Footprint(stored * values, EAGER_MAPS * face, batch)


def plan_batches(count: int, largest: int) -> list[tuple[int, int]]:
    """(crops, bucket) for each call: together `count` crops, in buckets of at most `largest`.

    A bucket is filled up with copies when a quarter of it or less would be waste; otherwise a smaller one goes first.
    """
    buckets = [b for b in BUCKETS if b <= largest]
    plan = []
    while count:
        enough = next((b for b in buckets if b >= count), None)
        if enough is not None and 4 * (enough - count) <= enough:
            plan.append((count, enough))
            break
        size = max(b for b in buckets if b <= count)
        plan.append((size, size))
        count -= size
    return plan


class Runtime:
    """Runs a generator on aligned 8-bit crops, in batches. Threads may share it.

    generator: a `Generator` (whose float32 weights are left as they are) or any callable from [B, 3, S, S] float32 to
    [B, 3, T, T], which always runs in float32. Raises UsageError and DeviceError.
    """

    def __init__(
        self,
        generator: Callable[[Tensor], Tensor],
        config: GeneratorConfig,
        options: RuntimeOptions = RuntimeOptions(),
    ) -> None:
        self.device = choose_device(options.device)
        self.config = config
        self.options = options
        self.generator = generator
        self.precision = choose_precision(options.precision, self.device)
        if self.precision in LOW and not isinstance(generator, Generator):
            self.precision = "fp32"
        self.max_batch = largest_batch(options, self.device)
        self._lock = threading.RLock()
        self._run: Step
        set_allocator(self.device, options)
        self.compiler = self._choose_compiler() if options.compile else "eager"
        # Whether batch sizes are prepared one by one, so that it pays to fill up a batch to one of them.
        self._in_buckets = options.compile
        if self.compiler == "ahead":
            self._in_buckets = self.device.type == "cuda" and options.cuda_graphs
            self._run = Compiled(self._step(self._prepared(self.precision)), self.device, options.cuda_graphs)
            return
        if self.compiler == "kernels":
            self._run = Compiled(self._step(self._packed()), self.device, options.cuda_graphs)
            return
        if self.compiler == "inductor" and self.device.type == "cpu" and isinstance(generator, Generator):
            if compiles_ahead(self.device):
                self._in_buckets = False
                self._run = self._step(compiled_ahead(generator, self.precision, options.cache))
                return
            step = self._step(form_for_cpu(generator, self.precision))
        else:
            step = self._step(self._prepared(self.precision))
        if options.compile:
            require_compiler(self.device)
            compiled: Step = torch.compile(step, fullgraph=True, dynamic=False, backend=self.compiler)
            freezing = self.device.type == "cpu" and options.cache is None
            step = Compiled(guarded(compiled, freezing), self.device, options.cuda_graphs)
        self._run = step

    @property
    def description(self) -> str:
        """Device, precision and mode in words."""
        name = f"cuda ({torch.cuda.get_device_name(self.device)})" if self.device.type == "cuda" else "cpu"
        return f"{name} {self.precision} {self.compiler}"

    def _choose_compiler(self) -> str:
        wanted = self.options.compiler
        fit = kernels_fit(self.generator, self.config, self.device)
        if wanted == "kernels" and not fit:
            raise DeviceError(
                "the kernels need CUDA (Volta or newer), Triton 3.2 and a generator that concatenates its features"
            )
        if wanted in ("auto", "kernels") and fit:
            return "kernels"
        return "inductor" if wanted == "auto" else wanted

    def _packed(self) -> Callable[[Tensor], Tensor]:
        """The generator in the form of the GPU kernels."""
        from gpen_core.kernels import FusedGenerator

        assert isinstance(self.generator, Generator)
        return FusedGenerator(self.generator, self.device, LOW.get(self.precision, torch.float32))

    def warm_up(self, batches: Sequence[int] = BUCKETS) -> None:
        """Compile and run once for each of the given batch sizes, so that later calls don't wait."""
        size = self.config.input_size
        grey = np.full((size, size, 3), 128, np.uint8)
        for batch in sorted({min(b, self.max_batch) for b in batches}):
            self([grey] * batch)

    def __call__(self, crops: Sequence[Image]) -> list[Image | None]:
        """Restore S x S crops; each result is T x T, or None where the network gave no finite picture.

        Raises ImageError for anything but S x S x 3 uint8, and DeviceError if not even one fits in memory.
        """
        return self.submit(crops).result()

    def submit(self, crops: Sequence[Image]) -> Submitted:
        """Start on S x S crops; what `__call__` returns and raises comes from the result, an ImageError from here.

        On a GPU this returns as soon as the work is queued there, so that the next crops can be queued behind it; on a
        CPU when it is done. Of more crops than a few batches, the first are waited for.
        """
        require_crops(crops, (self.config.input_size,))
        batches: list[Batch] = []
        taken = 0
        while taken < len(crops):
            waiting = crops[taken:]
            count, bucket = min(len(waiting), self.max_batch), 0
            if self._in_buckets:
                count, bucket = plan_batches(len(waiting), self.max_batch)[0]
            batch = self._launch(waiting[:count], bucket)
            if batch is None:
                self._shrink(count)
                continue
            batches.append(batch)
            taken += count
            if len(batches) > ON_THEIR_WAY:
                batches[-1 - ON_THEIR_WAY].result()
        return Submitted(tuple(batches))

    def _launch(self, crops: Sequence[Image], bucket: int) -> Batch | None:
        """One call of the network, or None if memory ran out."""
        padded = [*crops, *[crops[-1]] * (bucket - len(crops))]
        try:
            with self._lock, switches(self.device, self.precision, self.options), torch.inference_mode():
                images, finite, event = self._download(*self._run(self._upload(padded)))
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return None
        return Batch(crops, images, finite, event, self._collect)

    def _collect(self, batch: Batch) -> list[Image | None]:
        """The pictures of a batch, waited for. What went wrong on the device shows here."""
        crops = batch.crops
        try:
            images, finite = batch.fetch()
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self._shrink(len(crops))
            return self(crops)
        pairs = zip(crops, images, finite, strict=False)
        return [image if ok else self._again(crop) for crop, image, ok in pairs]

    def _again(self, crop: Image) -> Image | None:
        """One crop whose result was not finite, in float32 where that is new; None if it still isn't."""
        if self.precision == "fp32":
            return None
        logger.warning("a face was not finite in %s; computing it again in fp32", self.precision)
        with self._lock, switches(self.device, "fp32", self.options), torch.inference_mode():
            images, finite = self._step(self._prepared("fp32"))(self._upload([crop]))
            return images.cpu().numpy()[0] if bool(finite[0]) else None

    def _shrink(self, failed: int) -> None:
        if self.device.type == "cuda":
            with self._lock:
                # Earlier batches may still be on their way through the graphs.
                torch.cuda.synchronize(self.device)
                if isinstance(self._run, Compiled):
                    self._run.forget()
                torch.cuda.empty_cache()
        if failed == 1:
            raise DeviceError(f"out of memory on {self.device} with a single {self.config.output_size} px face")
        self.max_batch = max(1, failed // 2)
        logger.warning("out of memory with %d faces at once; going on with %d", failed, self.max_batch)

    def _upload(self, crops: Sequence[Image]) -> Tensor:
        """[B, S, S, 3] on the device, perhaps still on its way there."""
        if self.device.type == "cpu":
            return torch.from_numpy(np.stack(crops))
        # PyTorch's allocator gives pinned memory out again, but not before the copies from it are made.
        pinned = torch.empty((len(crops), *crops[0].shape), dtype=torch.uint8, pin_memory=True)
        np.stack(crops, out=pinned.numpy())
        return pinned.to(self.device, non_blocking=True)

    def _download(self, images: Tensor, finite: Tensor) -> tuple[Tensor, Tensor, Event | None]:
        """The results on the host, and the event from which on they are there; None if they are there now."""
        if self.device.type == "cpu":
            return images, finite, None
        pictures, flags = (
            torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)
            for value in (images, finite)
        )
        # Blocking: a thread that waits leaves its core to those that prepare the next photos.
        event = torch.cuda.Event(blocking=True)
        event.record()
        return pictures, flags, event

    def _prepared(self, precision: str) -> Callable[[Tensor], Tensor]:
        """The generator on the device in a precision; the given one stays untouched."""
        generator = self.generator
        if not isinstance(generator, nn.Module):
            return generator
        if self.device.type != "cpu" or precision in LOW:
            generator = copy.deepcopy(generator).to(self.device)
        if not isinstance(generator, Generator):
            return generator
        if precision in LOW:
            lower(generator, LOW[precision])
        if self.device.type == "cuda":
            generator = generator.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        noise = generator.noise()
        return lambda image: generator(image, noise)

    def _step(self, network: Callable[[Tensor], Tensor]) -> Step:
        """The network between 8-bit pictures. The result owns its memory."""
        value_range = self.config.value_range
        # A package takes its pictures plane by plane.
        wide = self.device.type == "cuda" and self.compiler != "ahead"
        layout = torch.channels_last if wide else torch.contiguous_format

        def step(pixels: Tensor) -> tuple[Tensor, Tensor]:
            entering = to_network(pixels.permute(0, 3, 1, 2).float(), value_range).contiguous(memory_format=layout)
            leaving = network(entering).float()
            finite = leaving.isfinite().flatten(1).all(1)
            pictures = from_network(leaving, value_range).nan_to_num().to(torch.uint8)
            return pictures.permute(0, 2, 3, 1).contiguous(), finite

        return step


class Event(Protocol):
    """The part of `torch.cuda.Event` that is used here."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class Batch:
    """Crops in one call of the network, on their way through it.

    images, finite: on the host, valid from `event` on, or at once without one; they may be longer than the crops.
    collect: makes the results of a batch.
    """

    def __init__(
        self,
        crops: Sequence[Image],
        images: Tensor,
        finite: Tensor,
        event: Event | None,
        collect: Callable[[Batch], list[Image | None]],
    ) -> None:
        self.crops = crops
        self._sent: tuple[Tensor, Tensor] | None = (images, finite)
        self._event = event
        self._collect = collect
        self._results: list[Image | None] = []

    def done(self) -> bool:
        """Whether the result is there without a wait."""
        return self._sent is None or self._event is None or self._event.query()

    def result(self) -> list[Image | None]:
        """A picture for each crop, or None; waits for them. Frees what only the way needed."""
        if self._sent is not None:
            self._results = self._collect(self)
            self._sent = None
        return self._results

    def fetch(self) -> tuple[Image, NDArray[np.bool_]]:
        """[B, T, T, 3] and [B] that own their memory, waited for."""
        assert self._sent is not None
        images, finite = (value.numpy() for value in self._sent)
        if self._event is None:
            return images, finite
        self._event.synchronize()
        # Pinned memory is scarce, and wanted by the next batch.
        return images.copy(), finite.copy()


@dataclass(frozen=True, eq=False)
class Submitted:
    """Crops on their way through a `Runtime`, in one or several batches."""

    batches: tuple[Batch, ...]

    def done(self) -> bool:
        """Whether the result is there without a wait."""
        return all(batch.done() for batch in self.batches)

    def result(self) -> list[Image | None]:
        """What `Runtime.__call__` returns; waits for it. Raises what the network or the device raised."""
        return [picture for batch in self.batches for picture in batch.result()]


class Upscaler:
    """Runs an up-scaling network on whole pictures in tiles, eagerly. Threads may share it.

    net: its float32 weights are left as they are. Raises UsageError and DeviceError.
    """

    def __init__(self, net: RRDBNet, options: RuntimeOptions = RuntimeOptions()) -> None:
        self.net = net
        self.options = options
        self.device = choose_device(options.device)
        self.precision = choose_precision(options.precision, self.device)
        self.tile = options.upscaler_tile or LARGEST_TILE
        self._lock = threading.RLock()
        self._prepared = self._prepare(self.precision)

    @property
    def scale(self) -> int:
        """How much the network enlarges."""
        return self.net.config.scale

    def __call__(self, picture: Canvas, scale: int) -> Canvas:
        """Enlarge H x W x 3 uint8 or uint16 by `scale`, which divides the network's. Raises ImageError, DeviceError."""
        require_picture(picture, (np.uint8, np.uint16))
        while True:
            try:
                return self._attempt(picture, scale)
            except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            if self.tile <= SMALLEST_TILE:
                raise DeviceError(f"out of memory on {self.device} with the up-scaler's smallest tiles")
            self.tile //= 2
            logger.warning("out of memory; the up-scaler goes on with tiles of %d cells", self.tile)

    def _attempt(self, picture: Canvas, scale: int) -> Canvas:
        try:
            with self._lock, switches(self.device, self.precision, self.options):
                return upscale(self._prepared, picture, scale, tile=self.tile)
        except DeviceError as error:
            if self.precision not in LOW:
                raise
            logger.warning("%s: computing the picture again in fp32", error)
        with self._lock, switches(self.device, "fp32", self.options):
            return upscale(self._prepare("fp32"), picture, scale, tile=self.tile)

    def _prepare(self, precision: str) -> RRDBNet:
        if self.device.type == "cpu" and precision not in LOW:
            return self.net
        return copy.deepcopy(self.net).to(self.device, LOW.get(precision, torch.float32))


class Compiled:
    """A prepared step; on a GPU each batch size is recorded as a CUDA graph and replayed."""

    def __init__(self, step: Step, device: torch.device, cuda_graphs: bool) -> None:
        self.step = step
        self.recording = device.type == "cuda" and cuda_graphs
        self.graphs: dict[int, tuple[Any, Tensor, tuple[Tensor, Tensor]]] = {}

    def __call__(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        if not self.recording:
            return self.step(pixels)
        if len(pixels) not in self.graphs:
            self.graphs[len(pixels)] = self._record(pixels)
        graph, entering, leaving = self.graphs[len(pixels)]
        entering.copy_(pixels)
        graph.replay()
        # The next replay overwrites what the graph returned.
        return leaving[0].clone(), leaving[1].clone()

    def forget(self) -> None:
        """Free the memory that recorded graphs hold."""
        self.graphs.clear()

    def _record(self, pixels: Tensor) -> tuple[Any, Tensor, tuple[Tensor, Tensor]]:
        entering = pixels.clone()
        stream = torch.cuda.Stream(pixels.device)
        stream.wait_stream(torch.cuda.current_stream(pixels.device))
        with torch.cuda.stream(stream):
            # Compilation and the choice of algorithms can't be recorded.
            for _ in range(2):
                self.step(entering)
        torch.cuda.current_stream(pixels.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may wait for earlier batches, or detect faces on the device.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            leaving = self.step(entering)
        return graph, entering, leaving


def compiles_ahead(device: torch.device) -> bool:
    """Whether a generator is compiled as a whole for a device, which later processes can load: on Linux's CPUs."""
    can = hasattr(torch._inductor, "aoti_compile_and_package")  # from PyTorch 2.6 on
    return device.type == "cpu" and sys.platform == "linux" and can


def compiled_ahead(generator: Generator, precision: str, cache: Path | None = None) -> Network:
    """A generator compiled for this CPU: now, or by an earlier process that kept it in the folder `cache`.

    cache: as `RuntimeOptions` has it. Raises DeviceError, also where what is compiled could not be loaded.
    """
    device = torch.device("cpu")
    require_unpackable()
    kept = open_cache(cache)
    wanted = sidecar_for(generator, generator.config, precision)
    found = kept.find(wanted)
    if found is not None:
        return one_by_one(found)
    try:
        require_compiler(device)
    except DeviceError:
        if kept.folder is None:
            raise
        raise DeviceError(kept.lacks()) from None
    writable = kept.writable()
    if kept.folder is not None and not writable:
        logger.warning("%s: can't be written to; the network is compiled for this process alone", kept.folder)
    with tempfile.TemporaryDirectory(prefix="gpen-core-") as folder:
        package = Path(folder) / PACKAGE
        try:
            with SWITCHES:
                make_package(form_for_cpu(generator, precision), package, wanted, device)
            network = load_package(package, device)[1]
        # A compiler raises anything.
        except Exception as error:
            raise DeviceError(
                f"--compile: AOTInductor failed ({why_not_compiled(error)}); leave --compile out"
            ) from error
        if writable:
            try:
                kept.keep(package, wanted)
            except OSError as error:
                logger.warning("%s: the compiled network can't be kept (%s)", kept.folder, error.strerror or error)
    return one_by_one(network)


def form_for_cpu(generator: Generator, precision: str) -> nn.Module:
    """The module that is compiled for a CPU: from float32 [B, 3, S, S] to float32 [B, 3, T, T], as the generator does.

    The one place to choose another form of the network. It may depend on the generator, the precision, the processor
    and the code of this package, and on nothing else, because packages are kept by these (`package_cache`).
    """
    if precision in LOW:
        generator = copy.deepcopy(generator)
        lower(generator, LOW[precision])
        return Fixed(generator)
    return Fixed(generator, WinogradGenerator(generator))


def form_for_gpu(generator: Generator, precision: str, device: torch.device) -> nn.Module:
    """The module that is compiled ahead for a GPU, on it: float32 [B, 3, S, S] to float32 [B, 3, T, T], any batch.

    This package's kernels where they can run, with tiles for `PACKAGED_FACES`; the compiler packs their machine code.
    """
    if kernels_fit(generator, generator.config, device):
        from gpen_core.kernels import FusedGenerator

        return FusedGenerator(generator, device, LOW.get(precision, torch.float32), PACKAGED_FACES)
    generator = copy.deepcopy(generator)
    if precision in LOW:
        lower(generator, LOW[precision])
    return Fixed(generator).to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def kernels_fit(generator: object, config: GeneratorConfig, device: torch.device) -> bool:
    """Whether this package's kernels can run a generator on a device."""
    on_gpu = device.type == "cuda" and importlib.util.find_spec("triton") is not None
    if not (on_gpu and isinstance(generator, Generator) and config.concat):
        return False
    import triton

    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return compiles_kernels(version, torch.cuda.get_device_capability(device))


def compiles_kernels(triton: tuple[int, ...], capability: tuple[int, int]) -> bool:
    """Whether a version of Triton compiles the kernels for GPUs of a compute capability."""
    return any(triton >= oldest and capability >= lowest for oldest, lowest in COMPILES_KERNELS)


def guarded(step: Step, freezing: bool) -> Step:
    """A torch.compile'd step with room for every bucket, whose failure to compile is one line.

    freezing: lets the compiler store weights as a CPU's convolutions want them; PyTorch caches no frozen graphs.
    """

    def run(pixels: Tensor) -> tuple[Tensor, Tensor]:
        from torch._dynamo import config as dynamo
        from torch._dynamo.exc import TorchDynamoException
        from torch._inductor import config as inductor

        limit = "recompile_limit" if hasattr(dynamo, "recompile_limit") else "cache_size_limit"
        try:
            with dynamo.patch({limit: COMPILATIONS}), inductor.patch(freezing=freezing):
                return step(pixels)
        except TorchDynamoException as error:
            if is_out_of_memory(error):
                raise
            first = str(error).strip().splitlines()[0]
            raise DeviceError(f"--compile: torch.compile failed ({first}); leave --compile out") from error

    return run


def lower(generator: Generator, dtype: torch.dtype) -> None:
    """Store the convolutions of a generator in a low precision; latent, styles and demodulation stay float32."""
    for part in (generator.encoder, generator.to_rgb):
        part.to(dtype)
    generator.constant.data = generator.constant.data.to(dtype)
    for layer in generator.styled_layers():
        for parameter in (layer.weight, layer.feature_gain, layer.bias):
            parameter.data = parameter.data.to(dtype)


def is_out_of_memory(error: BaseException) -> bool:
    kinds = (torch.OutOfMemoryError, MemoryError)
    return isinstance(error, kinds) or any(words in str(error) for words in OUT_OF_MEMORY)


def require_compiler(device: torch.device) -> None:
    """Raises DeviceError if what torch.compile needs on a device is not there."""
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            raise DeviceError("--compile on a GPU needs Triton; install it (pip install triton) or leave --compile out")
        return
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise DeviceError("--compile on a CPU needs a C++ compiler (g++); install one or leave --compile out") from None


def set_allocator(device: torch.device, options: RuntimeOptions) -> None:
    """Pass settings to PyTorch's CUDA allocator."""
    wanted = []
    if options.expandable_segments is not None:
        wanted.append(f"expandable_segments:{options.expandable_segments}")
    if options.max_split_size_mb is not None:
        wanted.append(f"max_split_size_mb:{options.max_split_size_mb}")
    if wanted and device.type == "cuda":
        torch.cuda.memory._set_allocator_settings(",".join(wanted))


@contextlib.contextmanager
def switches(device: torch.device, precision: str, options: RuntimeOptions) -> Iterator[None]:
    """PyTorch's global switches for one call, put back afterwards."""
    with contextlib.ExitStack() as stack:
        if device.type == "cuda":
            stack.enter_context(SWITCHES)
            tf32 = precision == "tf32"
            stack.enter_context(torch.cuda.device(device))
            stack.enter_context(
                torch.backends.cudnn.flags(
                    enabled=options.cudnn,
                    benchmark=options.cudnn_benchmark,
                    deterministic=options.deterministic,
                    allow_tf32=tf32,
                )
            )
            before = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision("high" if tf32 else "highest")
            stack.callback(torch.set_float32_matmul_precision, before)
        elif options.threads is not None:
            stack.enter_context(SWITCHES)
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(options.threads)
        yield
