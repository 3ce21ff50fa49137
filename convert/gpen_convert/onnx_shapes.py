"""Free an ONNX graph from the fixed picture size that it was exported with."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

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
    onnx = _import_onnx()
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


def _import_onnx() -> Any:
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
