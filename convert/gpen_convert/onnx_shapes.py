"""Free an ONNX graph from the fixed picture size that it was exported with."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from gpen_core.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    import onnx

_SPATIAL_RANK = 4
_SIZED = ("Reshape", "Resize", "Upsample", "Expand")


def make_dynamic(model_bytes: bytes, metadata: Mapping[str, str]) -> bytes:
    """The same network for any batch, height and width, with `metadata` added to its properties.

    model_bytes: an ONNX model whose one true input and whose outputs are NCHW maps, with no operator that
    bakes the size in. Initializers listed as graph inputs (as exporters did before IR version 4) are taken
    off that list, so that a runtime may fold them; weights that no operator reads are dropped. Equal
    arguments give equal bytes.

    Raises CheckpointError if the bytes are not such a model and UsageError if the `onnx` package is missing.
    """
    onnx = import_onnx()
    model = _parse(onnx, model_bytes)
    graph = model.graph
    weights = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in weights]
    if len(inputs) != 1 or not graph.output:
        raise CheckpointError(f"not a network with one input: it has {len(inputs)}")
    _refuse_baked_sizes(graph, weights)

    _keep(graph.input, lambda value: value.name not in weights)
    _free(graph.input[0], ("batch", None, "height", "width"))
    for index, value in enumerate(graph.output):
        _free(value, ("batch", None, f"output{index}_height", f"output{index}_width"))
    used = {name for node in graph.node for name in node.input}
    _keep(graph.initializer, lambda tensor: tensor.name in used)
    # Sizes of inner tensors are hints from the export; stale ones make runtimes warn or refuse.
    del graph.value_info[:]
    # Up to IR version 3 every initializer must also be a graph input.
    model.ir_version = max(model.ir_version, 4)
    properties = {entry.key: entry.value for entry in model.metadata_props} | dict(metadata)
    onnx.helper.set_model_props(model, dict(sorted(properties.items())))
    onnx.checker.check_model(model)
    dynamic: bytes = model.SerializeToString(deterministic=True)
    return dynamic


def verify_dynamic(original: bytes, dynamic: bytes) -> None:
    """Run both on the size that `original` is fixed to, and `dynamic` on two others.

    Raises CheckpointError if the results differ by more than rounding, or the other sizes don't run.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    providers = ["CPUExecutionProvider"]
    fixed = onnxruntime.InferenceSession(original, options, providers=providers)
    free = onnxruntime.InferenceSession(dynamic, options, providers=providers)
    name = fixed.get_inputs()[0].name
    batch, channels, height, width = fixed.get_inputs()[0].shape
    random = np.random.default_rng(0)

    def picture(count: int, rows: int, columns: int) -> dict[str, Any]:
        return {name: random.uniform(0, 255, (count, channels, rows, columns)).astype(np.float32)}

    same = picture(batch, height, width)
    expected, results = fixed.run(None, same), free.run(None, same)
    if not all(np.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(expected, results, strict=True)):
        raise CheckpointError("the rewritten ONNX model does not give what the original gives")
    for count, down, right in ((1, 2, 3), (2, 3, 1)):
        grown = free.run(None, picture(count, down * height, right * width))
        shapes = [(count, r.shape[1], down * r.shape[2], right * r.shape[3]) for r in results]
        if shapes != [r.shape for r in grown]:
            raise CheckpointError("the rewritten ONNX model does not follow the size of its input")


def import_onnx() -> Any:
    """The onnx package, which only the `convert` extra brings. Raises UsageError if it is missing."""
    try:
        import onnx
    except ImportError as error:
        raise UsageError("rewriting an ONNX model needs the onnx package: pip install onnx") from error
    return onnx


def _parse(onnx: Any, model_bytes: bytes) -> Any:
    try:
        model = onnx.load_model_from_string(model_bytes)
    except Exception as error:  # protobuf's DecodeError has no stable public home
        raise CheckpointError("not an ONNX model") from error
    if not model.graph.node:
        raise CheckpointError("not an ONNX model")
    return model


def _refuse_baked_sizes(graph: "onnx.GraphProto", weights: set[str]) -> None:
    for node in graph.node:
        if node.op_type in _SIZED and not weights.isdisjoint(node.input):
            raise CheckpointError(f"{node.op_type} may use a size fixed at export: it can't be made dynamic")


def _keep(messages: Any, wanted: Callable[[Any], bool]) -> None:
    kept = [message for message in messages if wanted(message)]
    del messages[:]
    messages.extend(kept)


def _free(value: "onnx.ValueInfoProto", names: tuple[str | None, ...]) -> None:
    dims = value.type.tensor_type.shape.dim
    if len(dims) != _SPATIAL_RANK:
        raise CheckpointError(f"{value.name!r} has {len(dims)} axes, not the four of N x C x H x W")
    for dim, name in zip(dims, names, strict=True):
        if name is not None:
            dim.dim_param = name
