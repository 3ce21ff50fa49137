"""GPEN generators that others exported as ONNX: their weights, recovered from the graph.

A graph keeps no reliable names and no reliable order of operators, so weights are known by what reads them, by their
shapes, and by how far it is from there to the picture that comes out. Whatever depends on weights alone is computed
first; then it makes no difference whether the exporter did so. What was recovered is run beside the given graph and
must give the same picture.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpen_convert.generator import SUFFIX, Report, Wanted, renamed, write_verified
from gpen_convert.onnx_shapes import import_onnx
from gpen_convert.precision import DTYPES, rounded
from gpen_convert.targets import digest_of, may_replace, origin_of, output_path
from gpen_core import __version__
from gpen_core.checkpoint import build_generator, load_tensors
from gpen_core.config import METADATA_KEY, GeneratorConfig, Provenance, WeightsMetadata
from gpen_core.errors import CheckpointError, UsageError
from gpen_core.files import stamp
from gpen_core.runtime_onnx import FAMILIES

TOLERANCE = 1e-3
# A graph that computes in half precision is that far from float32 by itself.
HALF_TOLERANCE = 1e-2
# A protobuf message whose first field is number 1, a varint: every ONNX file, and nothing that PyTorch writes.
START = b"\x08"
# What else is folded into the weights or stands in the graph: StyleGAN2's activation gain, which is in the graph as
# published and in the weights as ours are; and the sum of the filter's taps, which optimisers push into the encoder.
CONVENTIONS = tuple((gain, taps) for taps in (1.0, 64.0) for gain in (math.sqrt(2), 1.0))
_PASSED_ON = ("Cast", "Expand", "Identity", "Reshape", "Squeeze", "Tile", "Unsqueeze")
_CONVOLUTIONS = ("Conv", "FusedConv", "ConvTranspose")
_PRODUCTS = ("Gemm", "MatMul", "FusedGemm", "FusedMatMul")

Array = NDArray[np.float32]


@dataclass(frozen=True)
class Recovered:
    """A generator's structure and tensors in our layout, and how far its pictures are from the graph's.

    half: whether the graph keeps weights in float16. stated: what the file says about itself, None if nothing.
    """

    config: GeneratorConfig
    tensors: dict[str, Tensor]
    error: float
    half: bool
    stated: WeightsMetadata | None


@dataclass(frozen=True)
class Linear:
    """weight: [out, in] of a matrix product, or [O, I, k, k] of a convolution. bias: [out], or None."""

    weight: Array
    bias: Array | None


@dataclass(frozen=True)
class Modulated:
    """A modulated kernel [O, I, k, k], and the product that its style comes from where it has one of its own."""

    kernel: Array
    style: Linear | None


@dataclass(frozen=True)
class Parts:
    """The weights of a graph, each list in the order of the network.

    encoder: its convolutions. layers, colours: the modulated convolutions of the layers and to-RGBs. products: all
    that are no layer's own. layer_biases, colour_biases: of those. gains: of the features. constants: [1, C, 4, 4].
    """

    encoder: list[Linear]
    layers: list[Modulated]
    colours: list[Modulated]
    products: list[Linear]
    layer_biases: list[Array]
    colour_biases: list[Array]
    gains: list[float]
    constants: list[Array]


def is_onnx(path: Path) -> bool:
    """Whether a file starts like an ONNX model. False if it can't be read."""
    try:
        # Looking into a pipe would take from it.
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(1) == START
    except OSError:
        return False


def convert_onnx(source: Path, output: Path | None, wanted: Wanted) -> list[str]:
    """Convert a generator in an ONNX file to safetensors; returns the report, line by line.

    A file of `gpen-core export` keeps all that it says about itself, but for what the user says.
    Raises CheckpointError if it can't be recovered and UsageError for contradictions, and writes nothing then.
    """
    if output is not None:
        output_path(source, output, SUFFIX)
    before = stamp(source)
    try:
        recovered = recover(source)
        described = wanted.apply(recovered.config, source.name, recovered.stated)
        tensors = rounded(recovered.tensors, DTYPES[wanted.dtype])
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from None
    except CheckpointError as error:
        raise CheckpointError(f"{source}: {error}") from None
    target = output_path(source, output, SUFFIX, described.file_name)
    digest = digest_of(source, before)
    own = Provenance(source_name=source.name, source_sha256=digest, tool_version=f"gpen-core {__version__}")
    provenance = recovered.stated.provenance if recovered.stated else own
    metadata = WeightsMetadata(described.config, replace(provenance, licence=described.licence))

    def same(there: Path) -> bool:
        # An exported file and the one that it was exported from have one origin; only equal ones may stand in.
        return _holds(there, metadata, tensors) if recovered.stated else origin_of(there) == digest

    replaced = may_replace(target, output, source, same)
    write_verified(target, metadata, tensors)
    notes = (*_about(recovered), *described.notes, *renamed(source, target), *replaced)
    report = Report(source, target, metadata, wanted.dtype, len(tensors), target.stat().st_size, notes)
    return [*report.lines(), f"gives the ONNX file's picture to {recovered.error:.0e} of its largest value"]


def _about(recovered: Recovered) -> list[str]:
    notes = ["task, values, crops and source are what the ONNX file says about itself"] if recovered.stated else []
    return [*notes, *(["the ONNX file keeps weights in fp16, so they come back rounded"] if recovered.half else [])]


def _holds(path: Path, metadata: WeightsMetadata, tensors: Mapping[str, Tensor]) -> bool:
    """Whether a converted file says and holds just this."""
    try:
        found, stored = load_tensors(path)
    except CheckpointError:
        return False
    same = found == metadata and stored.keys() == tensors.keys()
    return same and all(t.dtype == tensors[name].dtype and torch.equal(t, tensors[name]) for name, t in stored.items())


def recover(path: Path) -> Recovered:
    """The generator in an ONNX file. Raises CheckpointError, in one line, if the graph does not allow it.

    Nothing but the file itself is read: weights kept in other files are refused, wherever they are said to be.
    """
    onnx = import_onnx()
    content = _read(path)
    try:
        model = onnx.load_model_from_string(content)
    except Exception:  # protobuf's DecodeError has no stable public home
        raise CheckpointError("not a whole ONNX model") from None
    _refuse_outside(onnx, model)
    stated = _stated({entry.key: entry.value for entry in model.metadata_props})
    try:
        size = _input_size(model.graph)
        parts = _collect(onnx, model)
        config = _infer(parts, size)
    except CheckpointError:
        raise
    except Exception as error:  # a graph can be unsound in more ways than there are names for
        raise CheckpointError(f"not a sound ONNX model: {_first_line(error)}") from error
    _check_stated(stated, config)
    half = any(tensor.data_type == onnx.TensorProto.FLOAT16 for tensor in _tensors(model.graph))
    image = np.random.default_rng(0).uniform(-1, 1, (1, 3, size, size)).astype(np.float32)
    expected = _picture(content, image)
    errors = []
    for gain, taps in CONVENTIONS:
        tensors = _assemble(parts, config, gain, taps)
        errors.append(_difference(config, tensors, image, expected))
        if errors[-1] < (HALF_TOLERANCE if half else TOLERANCE):
            return Recovered(config, tensors, errors[-1], half, stated)
    raise CheckpointError(
        f"its weights are a GPEN generator's, but the graph computes something else: relative error {min(errors):.0e}"
    )


def _stated(properties: Mapping[str, str]) -> WeightsMetadata | None:
    """What a file says about itself, None if nothing. Raises CheckpointError if that is damaged, or no generator."""
    family = properties.get("family", "")
    if family in FAMILIES:
        raise CheckpointError(f"no GPEN generator, and already converted: use it with {FAMILIES[family]}")
    if METADATA_KEY not in properties:
        return None
    try:
        return WeightsMetadata.decode(properties)
    except CheckpointError as error:
        raise CheckpointError(f"what it says about itself is damaged ({error}); export it again") from None


def _check_stated(stated: WeightsMetadata | None, config: GeneratorConfig) -> None:
    if stated is None:
        return
    for name in ("input_size", "output_size", "channels", "style_dim", "n_mlp", "concat"):
        said, found = getattr(stated.config, name), getattr(config, name)
        if said != found:
            raise CheckpointError(f"it says {name} {said}, but the graph has {found}; export it again")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(error.strerror or str(error)) from None


def _refuse_outside(onnx: Any, model: Any) -> None:
    """An ONNX file may name any path of the machine as the home of its weights."""
    functions = (tensor for function in model.functions for tensor in _attributes(function.node))
    for tensor in (*_tensors(model.graph), *functions):
        if tensor.data_location == onnx.TensorProto.EXTERNAL or tensor.external_data:
            raise CheckpointError("its weights are in another file; save it as one file (onnx.save_model does)")


def _tensors(graph: Any) -> Iterator[Any]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    yield from _attributes(graph.node)


def _attributes(nodes: Any) -> Iterator[Any]:
    for node in nodes:
        for attribute in node.attribute:
            yield from (attribute.t, *attribute.tensors)
            for sparse in (attribute.sparse_tensor, *attribute.sparse_tensors):
                yield from (sparse.values, sparse.indices)
            for inner in (attribute.g, *attribute.graphs):
                yield from _tensors(inner)


def _input_size(graph: Any) -> int:
    stored = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in stored]
    dims = [axis.dim_value for axis in inputs[0].type.tensor_type.shape.dim] if len(inputs) == 1 else []
    if len(dims) != 4 or dims[1] != 3 or dims[2] != dims[3] or dims[2] < 8 or len(graph.output) != 1:
        shapes = "; ".join(f"{v.name} {[a.dim_value for a in v.type.tensor_type.shape.dim]}" for v in inputs)
        raise CheckpointError(
            f"no GPEN generator: that turns one square picture into one, this takes {shapes or 'none'}"
        )
    return int(dims[2])


class _Graph:
    """What depends on the picture in a graph, and what it reads beside it."""

    def __init__(self, onnx: Any, model: Any) -> None:
        self.onnx = onnx
        self.values = _constants(onnx, model)
        self.makers = {name: node for node in model.graph.node for name in node.output}
        live = [node for node in model.graph.node if not all(name in self.values for name in node.output)]
        self.nodes = _first_ones_first(live)
        self.added = dict(filter(None, map(self._addition, live)))

    def known(self, node: Any) -> list[NDArray[Any] | None]:
        return [self.values.get(name) for name in node.input]

    def origin(self, name: str, *, over_additions: bool = False) -> Any:
        """The node that a value comes from, past those that only rearrange it; None for the picture."""
        maker = self.makers.get(name)
        while maker is not None:
            known = self.known(maker)
            adds = over_additions and maker.op_type == "Add" and any(value is not None for value in known)
            if maker.op_type not in _PASSED_ON and not adds:
                return maker
            # What rearranges has its data first; an addition's other part is constant.
            before = next((name for name, value in zip(maker.input, known, strict=True) if value is None), "")
            maker = self.makers.get(before)
        return None

    def linear(self, node: Any) -> Linear | None:
        """A product or convolution with fixed weights; None for others."""
        known = self.known(node)
        weight = known[1] if len(known) > 1 else None
        if weight is None or weight.ndim != (2 if node.op_type in _PRODUCTS else 4):
            return None
        matrix = _as_float(weight)
        settings = {a.name: self.onnx.helper.get_attribute_value(a) for a in node.attribute}
        if node.op_type in _PRODUCTS:
            matrix = (matrix if settings.get("transB") else matrix.T) * np.float32(settings.get("alpha", 1))
        if node.op_type == "ConvTranspose":
            matrix = matrix.transpose(1, 0, 2, 3)
        return Linear(matrix, self.bias(node))

    def bias(self, node: Any) -> Array | None:
        """What is added to a node's result, by itself or right after."""
        known = self.known(node)
        own = known[2] if len(known) > 2 and node.op_type in (*_CONVOLUTIONS, *_PRODUCTS) else None
        return self.added.get(node.output[0]) if own is None else _as_float(own).reshape(-1)

    def _addition(self, node: Any) -> tuple[str, Array] | None:
        """The value to which an Add adds a vector, and the vector."""
        if node.op_type != "Add":
            return None
        for name, value in zip(node.input[::-1], self.known(node), strict=True):
            maker = self.origin(name)
            if value is not None and value.size > 1 and maker is not None:
                return maker.output[0], _as_float(value).reshape(-1)
        return None


def _first_ones_first(nodes: Sequence[Any]) -> list[Any]:
    """Nodes by the longest way to the end, longest first: a network's layers come in their order."""
    readers: dict[str, int] = {}
    heights = []
    for node in reversed(nodes):
        height = 1 + max((readers.get(name, 0) for name in node.output), default=0)
        heights.append(height)
        for name in node.input:
            readers[name] = max(readers.get(name, 0), height)
    order = sorted(range(len(nodes)), key=lambda i: -heights[len(nodes) - 1 - i])
    return [nodes[i] for i in order]


def _collect(onnx: Any, model: Any) -> Parts:
    """Sort what the graph's operators read beside the picture."""
    graph = _Graph(onnx, model)
    parts = Parts([], [], [], [], [], [], [], [])
    own = [style for node in graph.nodes if (style := _style_of(graph, node)) is not None]
    for node in graph.nodes:
        if node.op_type in _PRODUCTS and not any(node is other for other in own):
            product = graph.linear(node)
            parts.products.extend([product] if product else [])
        elif node.op_type in _CONVOLUTIONS:
            _take_convolution(parts, graph, node)
        elif node.op_type == "Mul":
            _take_kernel(parts, graph, node)
        elif node.op_type == "Concat":
            gain, bias = _feature_gain(graph, node), graph.bias(node)
            parts.gains.extend([] if gain is None else [gain])
            parts.layer_biases.extend([] if bias is None else [bias])
        fixed = (_as_float(v) for v in graph.known(node) if v is not None and v.dtype.kind == "f")
        parts.constants.extend(v for v in fixed if v.ndim == 4 and v.shape[0] == 1 and v.shape[2:] == (4, 4))
    return parts


def _take_convolution(parts: Parts, graph: _Graph, node: Any) -> None:
    bias = graph.bias(node)
    fixed = graph.linear(node)
    # The latent separates the encoder from the decoder.
    if parts.products and bias is not None and bias.size == 3:
        parts.colour_biases.append(bias)
    if fixed is None or fixed.weight.shape[2] == 4:
        return
    if not parts.products:
        parts.encoder.append(fixed)
        return
    modulated = Modulated(fixed.weight, None)
    (parts.colours if fixed.weight.shape[2] == 1 else parts.layers).append(modulated)


def _take_kernel(parts: Parts, graph: _Graph, node: Any) -> None:
    kernel = next((value for value in graph.known(node) if value is not None and _is_kernel(value)), None)
    if kernel is None:
        return
    style = _style_of(graph, node)
    modulated = Modulated(_as_float(kernel).reshape(kernel.shape[-4:]), style and graph.linear(style))
    (parts.colours if kernel.shape[-1] == 1 else parts.layers).append(modulated)


def _style_of(graph: _Graph, node: Any) -> Any:
    """The product by whose result a fixed kernel is multiplied, if a node does that."""
    if node.op_type != "Mul":
        return None
    for name, value in zip(node.input[::-1], graph.known(node), strict=True):
        if value is not None and _is_kernel(value):
            maker = graph.origin(name, over_additions=True)
            return maker if maker is not None and maker.op_type in _PRODUCTS else None
    return None


def _is_kernel(value: NDArray[Any]) -> bool:
    """[1, O, I, k, k] or [O, I, k, k], 3x3, or 1x1 to three channels."""
    if value.ndim not in (4, 5) or (value.ndim == 5 and value.shape[0] != 1):
        return False
    outputs, _, rows, columns = value.shape[-4:]
    return rows == columns == 3 or (rows == columns == 1 and outputs == 3)


def _feature_gain(graph: _Graph, node: Any) -> float | None:
    """The number by which one of the joined maps is multiplied, if it is."""
    for name in node.input:
        maker = graph.origin(name)
        if maker is None or maker.op_type != "Mul":
            continue
        for value in graph.known(maker):
            if value is not None and value.size == 1 and value.dtype.kind == "f":
                return float(value.reshape(-1)[0])
    return None


def _constants(onnx: Any, model: Any) -> dict[str, NDArray[Any]]:
    """Every value that does not depend on the picture and is read by something that does."""
    graph = model.graph
    fixed = {tensor.name for tensor in graph.initializer}
    steps = []
    for node in graph.node:
        draws = node.op_type.startswith("Random") or node.op_type in ("Bernoulli", "Multinomial")
        nested = any(attribute.HasField("g") or attribute.graphs for attribute in node.attribute)
        if not draws and not nested and all(not name or name in fixed for name in node.input):
            fixed.update(node.output)
            steps.append(node)
    outputs = {name for node in steps for name in node.output}
    wanted = sorted({name for node in graph.node for name in node.input if name in outputs})
    values = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    if not wanted:
        return values
    computing = onnx.helper.make_graph(
        steps, "constants", [], [onnx.ValueInfoProto(name=name) for name in wanted], graph.initializer
    )
    shell = onnx.helper.make_model(computing, opset_imports=model.opset_import, ir_version=max(model.ir_version, 4))
    found = _session(shell.SerializeToString()).run(None, {})
    return values | dict(zip(wanted, found, strict=True))


def _session(content: bytes) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exceptions share no narrower base
        raise CheckpointError(f"onnxruntime can't run it: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _as_float(value: NDArray[Any]) -> Array:
    return np.asarray(value, np.float32)


def _infer(parts: Parts, size: int) -> GeneratorConfig:
    """The structure that all shapes agree on. Raises CheckpointError naming what does not fit."""
    blocks = int(math.log2(size)) - 1
    first = parts.encoder[0].weight.shape if parts.encoder else ()
    _require(first[1:] == (3, 1, 1), "it does not begin with GPEN's 1x1 convolution")
    _require(len(parts.encoder) == blocks, f"{len(parts.encoder)} encoder convolutions for {size} px")
    _require(len(parts.products) >= 2, "there is no mapping network")
    levels = len(parts.colours)
    output = 4 << max(levels - 1, 0)
    _require(output >= size, f"{levels} to-RGB convolutions are too few for {size} px")
    _require(output == size, f"it turns {size} into {output} px, where features are noise that is not kept apart")
    widths = tuple(convolution.weight.shape[0] for convolution in parts.encoder[::-1])
    style_dim = parts.products[0].weight.shape[0]
    trial = GeneratorConfig(size, size, widths, style_dim, 1)
    # One product for all styles, or one for each layer.
    heights = [product.weight.shape[0] for product in parts.products]
    total = sum(slot.width for slot in trial.style_slots())
    n_mlp = (heights.index(total) if total in heights else len(heights)) - 1
    config = GeneratorConfig(size, size, widths, style_dim, n_mlp)
    _check_shapes(parts, config)
    return config


def _check_shapes(parts: Parts, config: GeneratorConfig) -> None:
    dim, width, both = config.style_dim, config.width, config.layer_width
    descending = config.encoder_levels[::-1]
    encoder = [(width(descending[0]), 3, 1, 1), *((width(r // 2), width(r), 3, 3) for r in descending[:-1])]
    _compare("encoder convolution", [c.weight for c in parts.encoder], encoder)
    _compare("encoder bias", [c.bias for c in parts.encoder], [shape[:1] for shape in encoder])
    products = [(dim, 16 * width(4)), *[(dim, dim)] * config.n_mlp]
    chain = parts.products[: len(products)]
    _compare("matrix product", [p.weight for p in chain], products)
    _compare("product's bias", [p.bias for p in chain], [(dim,)] * len(products))
    kernels = [(width(4), width(4), 3, 3)]
    for r in config.decoder_levels[1:]:
        kernels += [(width(r), both(r // 2), 3, 3), (width(r), both(r), 3, 3)]
    _compare("modulated convolution", [m.kernel for m in parts.layers], kernels)
    colours = [(3, both(r), 1, 1) for r in config.decoder_levels]
    _compare("to-RGB convolution", [m.kernel for m in parts.colours], colours)
    _compare("layer's bias", parts.layer_biases, [(2 * shape[0],) for shape in kernels])
    _compare("to-RGB bias", parts.colour_biases, [(3,)] * len(colours))
    _require(len(parts.gains) == len(kernels), "features are not concatenated in every layer")
    styles = _styles(parts, config)
    _compare("modulation", [style.weight for style in styles], [(style.weight.shape[0], dim) for style in styles])
    _compare("modulation's bias", [style.bias for style in styles], [style.weight.shape[:1] for style in styles])
    found = sum(style.weight.shape[0] for style in styles)
    _require(found == sum(slot.width for slot in config.style_slots()), "its modulations have other widths")
    _require(any(c.shape[1] == width(4) for c in parts.constants), "the constant that the decoder begins with is gone")


def _compare(what: str, found: Sequence[Array | None], expected: Sequence[tuple[int, ...]]) -> None:
    _require(len(found) == len(expected), f"{len(found)} times {what} instead of {len(expected)}")
    for number, (array, shape) in enumerate(zip(found, expected, strict=True)):
        shown = "none" if array is None else list(array.shape)
        _require(array is not None and array.shape == shape, f"{what} {number} is {shown} instead of {list(shape)}")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise CheckpointError(f"no GPEN generator that can be recovered: {message}")


def _styles(parts: Parts, config: GeneratorConfig) -> list[Linear]:
    """The modulations, in the order of the style slots."""
    if len(parts.products) > config.n_mlp + 1:
        return [parts.products[config.n_mlp + 1]]
    by_layer = {f"layers.{i}": modulated.style for i, modulated in enumerate(parts.layers)}
    by_layer |= {f"to_rgb.{i}": modulated.style for i, modulated in enumerate(parts.colours)}
    styles = [by_layer[slot.layer] for slot in config.style_slots()]
    found = [style for style in styles if style is not None]
    _require(len(found) == len(styles), "a modulated convolution's style comes from no matrix product")
    return found


def _assemble(parts: Parts, config: GeneratorConfig, gain: float, taps: float) -> dict[str, Tensor]:
    """Our tensors, float32.

    gain: what the graph multiplies its activations by. taps: what the encoder's kernels are divided by.
    """
    tensors: dict[str, Array | None] = {
        "constant": next(c for c in parts.constants if c.shape[1] == config.width(4)),
    }
    active = {f"encoder.{i}": linear for i, linear in enumerate(parts.encoder)}
    active["to_latent"] = parts.products[0]
    active |= {f"mapping.{i}": parts.products[i + 1] for i in range(config.n_mlp)}
    for name, linear in active.items():
        filtered = linear.weight.shape[2:] == (3, 3)
        tensors[f"{name}.weight"] = linear.weight * np.float32(gain * (taps if filtered else 1))
        tensors[f"{name}.bias"] = None if linear.bias is None else linear.bias * np.float32(gain)
    styles = _styles(parts, config)
    tensors["styles.weight"] = np.concatenate([style.weight for style in styles])
    tensors["styles.bias"] = np.concatenate([style.bias for style in styles if style.bias is not None])
    for i, modulated in enumerate(parts.layers):
        # Doubling layers, every other one, keep the input axis first.
        tensors[f"layers.{i}.weight"] = modulated.kernel.transpose(1, 0, 2, 3) if i % 2 else modulated.kernel
        tensors[f"layers.{i}.feature_gain"] = np.array([parts.gains[i] * gain], np.float32)
        tensors[f"layers.{i}.bias"] = parts.layer_biases[i] * np.float32(gain)
    for i, modulated in enumerate(parts.colours):
        tensors[f"to_rgb.{i}.weight"] = modulated.kernel
        tensors[f"to_rgb.{i}.bias"] = parts.colour_biases[i]
    return {name: torch.from_numpy(np.array(value, np.float32, order="C")) for name, value in sorted(tensors.items())}


def _picture(content: bytes, image: Array) -> Array:
    """What a graph makes of a picture [1, 3, S, S]."""
    session = _session(content)
    entry = session.get_inputs()[0]
    kind = np.float16 if entry.type == "tensor(float16)" else np.float32
    batch = entry.shape[0] if isinstance(entry.shape[0], int) else 1
    try:
        (output,) = session.run(None, {entry.name: np.repeat(image, batch, axis=0).astype(kind)})
    except Exception as error:  # onnxruntime's exceptions share no narrower base
        raise CheckpointError(f"onnxruntime can't run it: {_first_line(error)}") from None
    return _as_float(output)[:1]


def _difference(config: GeneratorConfig, tensors: dict[str, Tensor], image: Array, expected: Array) -> float:
    """Largest difference between our picture and the expected one, relative to the largest value of that."""
    metadata = WeightsMetadata(config, Provenance(source_name="", source_sha256=""))
    with torch.no_grad():
        ours = build_generator(metadata, tensors)(torch.from_numpy(image)).numpy()
    if expected.shape != ours.shape or not np.isfinite(expected).all():
        return math.inf
    return float(np.abs(ours - expected).max() / max(float(np.abs(expected).max()), 1e-12))
