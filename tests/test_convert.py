"""Legacy files in, verified files out; and everything that people hand in instead."""

from __future__ import annotations

import argparse
import errno
import gzip
import importlib
import io
import json
import os
import pickle
import struct
import tarfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from safetensors.torch import save as serialized
from torch import Tensor

from gpen_convert.convert import convert
from gpen_convert.export import export_generator
from gpen_convert.generator import Claims, convert_generator
from gpen_convert.infer import infer_config
from gpen_convert.keymap import RULES, find_rule, fold, legacy_shapes
from gpen_convert.names import published_as
from gpen_convert.tarball import load_tar
from gpen_convert.unpickle import load_tree
from gpen_core.checkpoint import load_generator, read_metadata
from gpen_core.config import GeneratorConfig
from gpen_core.errors import CheckpointError, GpenError, UsageError
from tests import reference
from tests.leftovers import abandoned
from tests.legacy import TINY, golden_case, image_for, legacy_state
from tests.test_rrdb import far_sighted

Wrap = Callable[[dict[str, Tensor]], Any]


@pytest.fixture
def state() -> dict[str, Tensor]:
    return legacy_state(TINY)


def save(tree: Any, path: Path, **options: Any) -> Path:
    torch.save(tree, path, **options)
    return path


def assert_faithful(path: Path, state: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    """The converted file computes what the legacy tensors say."""
    model = load_generator(path)
    image = image_for(model.config)
    expected = reference.generate({k: v.double() for k, v in state.items()}, image.double())
    with torch.inference_mode():
        output = model(image).double()
    assert (output - expected).abs().max() <= tolerance * expected.abs().max()


# The key table.


def test_every_legacy_key_has_one_rule_and_every_rule_is_used(state: dict[str, Tensor]) -> None:
    matches = {key: [rule for rule in RULES if rule.match(key) is not None] for key in state}
    # `ecd0` stands apart from `ecd{i}`, whose layers have other numbers inside.
    assert {key: len(rules) for key, rules in matches.items()} == dict.fromkeys(state, 1)
    assert {rule.legacy for rules in matches.values() for rule in rules} == {rule.legacy for rule in RULES}


def test_no_rule_for_a_foreign_key() -> None:
    for key in ("ecd1.0.1.weights", "generator.convs.01.noise.weight", "x.generator.input.input", "generator.style.1"):
        assert find_rule(key) is None


# Inference of the configuration.

PUBLISHED = {
    "bfr-256": (256, 256, 1, 0.5),
    "bfr-512": (512, 512, 2, 1),
    "bfr-1024": (1024, 1024, 2, 1),
    "bfr-2048": (2048, 2048, 2, 1),
    "sr-64-to-256": (64, 256, 1, 0.125),
    "tiny-64": (64, 64, 1, 0.125),
}


def golden_entry(name: str) -> dict[str, Any]:
    entry: dict[str, Any] = json.loads((Path(__file__).parent / "golden" / "generators.json").read_text())[name]
    return entry


def golden_shapes(name: str) -> dict[str, tuple[int, ...]]:
    entry = golden_entry(name)
    return {key: tuple(shape) for key, shape in {**entry["parameters"], **entry["buffers"]}.items()}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shapes(name: str) -> None:
    entry = golden_entry(name)
    config = infer_config(golden_shapes(name))
    found = (config.input_size, config.output_size, config.channel_multiplier, config.narrow)
    assert found == PUBLISHED[name]
    assert (config.style_dim, config.n_mlp, config.concat) == (entry["case"]["style_dim"], 8, True)


configs = st.builds(
    lambda s, t, widths, style_dim, n_mlp, concat: GeneratorConfig(
        input_size=8 << s,
        output_size=8 << t,
        channels=tuple(widths[: max(s, t) + 2]),
        style_dim=style_dim,
        n_mlp=n_mlp,
        concat=concat,
    ),
    st.integers(0, 8),
    st.integers(0, 8),
    st.lists(st.integers(1, 700), min_size=10, max_size=10),
    st.integers(1, 600),
    st.integers(1, 12),
    st.booleans(),
)


@settings(max_examples=60)
@given(configs)
def test_widths_and_depths_that_nobody_published(config: GeneratorConfig) -> None:
    assert infer_config(legacy_shapes(config)) == config


@pytest.mark.parametrize("narrow", [1.0, 0.5, 0.3, 0.77])
@pytest.mark.parametrize("multiplier", [1, 2, 3])
def test_multiplier_survives_truncated_widths(narrow: float, multiplier: int) -> None:
    channels = (*(int(512 * narrow),) * 4, int(256 * multiplier * narrow), int(128 * multiplier * narrow))
    config = GeneratorConfig(input_size=128, output_size=128, channels=channels, style_dim=8, n_mlp=1)
    assert config.channel_multiplier == pytest.approx(multiplier, abs=0.02)
    assert config.narrow == pytest.approx(narrow, abs=0.002)


def test_multiplier_is_undetermined_below_64() -> None:
    assert TINY.channel_multiplier is None


# Every way in which a checkpoint is wrapped.


def shared_storage(state: dict[str, Tensor]) -> dict[str, Tensor]:
    storage = torch.cat([tensor.reshape(-1) for tensor in state.values()])
    parts = storage.split([tensor.numel() for tensor in state.values()])
    return {key: part.view(tensor.shape) for (key, tensor), part in zip(state.items(), parts, strict=True)}


def channels_last(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: v.to(memory_format=torch.channels_last) if v.dim() == 4 else v for k, v in state.items()}


WRAPPINGS: dict[str, Wrap] = {
    "flat": lambda s: s,
    "ordered": OrderedDict,
    "module": lambda s: {f"module.{k}": v for k, v in s.items()},
    "params_ema": lambda s: {"params_ema": s},
    "params": lambda s: {"params": s},
    "state_dict": lambda s: {"state_dict": s, "epoch": 3},
    "state_dict with module": lambda s: {"state_dict": {f"module.{k}": v for k, v in s.items()}},
    "list": lambda s: [s, {"epoch": 1}],
    "deep": lambda s: {"a": {"b": [{"c": {"d": s}}]}},
    "two by prefix": lambda s: {
        **{f"netG.{k}": v if k.endswith("kernel") else v + 1 for k, v in s.items()},
        **{f"netG_ema.{k}": v for k, v in s.items()},
    },
    "lightning": lambda s: {"state_dict": {**{f"netG.{k}": v for k, v in s.items()}, "netD.a": torch.zeros(1)}},
    "parameters": lambda s: {k: torch.nn.Parameter(v) for k, v in s.items()},
    "shared storage": shared_storage,
    "channels last": channels_last,
    "double": lambda s: {k: v.double() for k, v in s.items()},
    "namespace": lambda s: {"g_ema": s, "args": argparse.Namespace(size=16, path="somewhere", rate=np.float64(0.002))},
    "numpy scalars": lambda s: {"g_ema": s, "loss": np.float32(0.5), "step": np.int64(7), "flag": np.bool_(True)},
}


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before 1.6"])
@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_wrappings(wrapping: str, zipped: bool, state: dict[str, Tensor], tmp_path: Path) -> None:
    source = save(WRAPPINGS[wrapping](state), tmp_path / "old.pth", _use_new_zipfile_serialization=zipped)
    report = convert_generator(source)
    assert report.output == tmp_path / "old.safetensors"
    assert_faithful(report.output, state)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_sources(dtype: torch.dtype, state: dict[str, Tensor], tmp_path: Path) -> None:
    stored = {k: v.to(dtype) for k, v in state.items()}
    assert_faithful(convert_generator(save(stored, tmp_path / "old.pth")).output, stored)


def test_safetensors_with_legacy_keys(state: dict[str, Tensor], tmp_path: Path) -> None:
    save_file(state, tmp_path / "old.safetensors")
    assert_faithful(convert_generator(tmp_path / "old.safetensors", tmp_path / "new.safetensors").output, state)


def write_tar(state: dict[str, Tensor], path: Path) -> Path:
    """What PyTorch wrote before 0.1.10, from the description of its format."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> str | None:
            return str(id(value)) if isinstance(value, Tensor) else None

        def reducer_override(self, value: Any) -> Any:
            return value if value in (torch.FloatTensor, torch.FloatStorage) else NotImplemented

    def named(kind: str) -> bytes:
        return b"ctorch\n" + kind.encode() + b"\n"

    def triple(key: int, middle: bytes, kind: str) -> bytes:
        return b"\x80\x02" + b"(" + pickle.dumps(key, 2)[2:-1] + middle + named(kind) + b"t."

    storages, tensors, tree = io.BytesIO(), io.BytesIO(), io.BytesIO()
    storages.write(pickle.dumps(len(state), 2))
    tensors.write(pickle.dumps(len(state), 2))
    for value in state.values():
        raw = value.contiguous().numpy()
        storages.write(triple(id(value), pickle.dumps("cpu", 2)[2:-1], "FloatStorage"))
        storages.write(struct.pack("<q", raw.size) + raw.tobytes())
        tensors.write(triple(id(value), pickle.dumps(id(value), 2)[2:-1], "FloatTensor"))
        tensors.write(struct.pack("<i4x", raw.ndim) + struct.pack(f"<{raw.ndim}q", *raw.shape))
        tensors.write(struct.pack(f"<{raw.ndim}q", *value.contiguous().stride()) + struct.pack("<q", 0))
    storages.write(pickle.dumps([], 2))
    Pickler(tree, 2).dump(OrderedDict(state))
    with tarfile.open(path, "w") as archive:
        for name, content in {
            "sys_info": io.BytesIO(pickle.dumps({}, 2)),
            "pickle": tree,
            "storages": storages,
            "tensors": tensors,
        }.items():
            member = tarfile.TarInfo(name)
            member.size = len(content.getvalue())
            archive.addfile(member, io.BytesIO(content.getvalue()))
    return path


def test_tar_files(state: dict[str, Tensor], tmp_path: Path) -> None:
    path = write_tar(state, tmp_path / "old.pth")
    loaded = load_tar(path)
    assert all(torch.equal(loaded[key], tensor) for key, tensor in state.items())
    assert_faithful(convert_generator(path).output, state)


def training_file(state: dict[str, Tensor], path: Path) -> tuple[Path, dict[str, Tensor]]:
    other = {k: v if k.endswith("kernel") else v + 0.25 for k, v in state.items()}
    discriminator = {
        "convs.0.0.weight": torch.zeros(1),
        "final_conv.0.weight": torch.zeros(1),
        "final_linear.1.weight": torch.zeros(1),
    }
    optimiser = {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    tree = {"g": other, "d": discriminator, "g_ema": state, "g_optim": optimiser, "d_optim": optimiser}
    return save(tree, path), other


def test_training_files_give_the_averaged_weights(state: dict[str, Tensor], tmp_path: Path) -> None:
    source, _ = training_file(state, tmp_path / "train.pt")
    report = convert_generator(source)
    text = "\n".join(report.lines())
    origin = read_metadata(report.output).provenance
    assert (origin.kept, origin.others, origin.dropped) == ("g_ema", ("g",), ("d", "g_optim", "d_optim"))
    assert "kept g_ema" in text
    assert "--key g" in text
    assert_faithful(report.output, state)


def test_an_average_that_is_empty_is_not_called_superfluous(state: dict[str, Tensor], tmp_path: Path) -> None:
    tree = {"g": state, "g_ema": {}, "d": {"x": torch.zeros(1)}, "args": {}}
    report = convert_generator(save(tree, tmp_path / "train.pt"))
    lines = report.lines()
    assert "kept g; g_ema holds no weights" in lines
    assert "dropped d, args: not needed to restore" in lines
    assert_faithful(report.output, state)
    flat = convert_generator(save({"params_ema": {}, "params": state}, tmp_path / "two.pth"))
    assert "kept params; params_ema holds no weights" in flat.lines()
    assert not any(line.endswith("not needed to restore") for line in flat.lines())


def test_key_takes_the_other_weights_bit_for_bit(state: dict[str, Tensor], tmp_path: Path) -> None:
    source, other = training_file(state, tmp_path / "train.pt")
    picked = convert_generator(source, tmp_path / "g.safetensors", key="g").output
    plain = convert_generator(save(other, tmp_path / "flat.pth")).output
    one, two = load_file(picked), load_file(plain)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize(
    ("key", "message"), [("x", "no such state dict; there is d, g, g_ema"), ("d", "discriminator, not a generator")]
)
def test_wrong_key(key: str, message: str, state: dict[str, Tensor], tmp_path: Path) -> None:
    source, _ = training_file(state, tmp_path / "train.pt")
    with pytest.raises(GpenError, match=message):
        convert_generator(source, key=key)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["train.pt"]


# What is written.


def test_converting_twice_gives_the_same_bytes(state: dict[str, Tensor], tmp_path: Path) -> None:
    source = save(state, tmp_path / "old.pth")
    first = convert_generator(source, tmp_path / "a.safetensors").output.read_bytes()
    assert convert_generator(source, tmp_path / "b.safetensors").output.read_bytes() == first


def test_metadata_tells_everything(state: dict[str, Tensor], tmp_path: Path) -> None:
    source = save(state, tmp_path / "old.pth")
    report = convert_generator(source, task="seg2face", licence="CC0-1.0")
    metadata = read_metadata(report.output)
    assert metadata == report.metadata
    assert metadata.config == replace(TINY, task="seg2face", value_range=(0.0, 1.0))
    assert metadata.provenance.source_name == "old.pth"
    assert metadata.provenance.licence == "CC0-1.0"
    assert len(metadata.provenance.source_sha256) == 64


@pytest.mark.parametrize(
    ("name", "structure", "task"),
    [
        ("GPEN-Colorization-1024.pth", "bfr-1024", "colorization"),
        ("gpen-inpainting-1024.pth", "bfr-1024", "inpainting"),
        ("GPEN-Seg2face-512.pth", "bfr-512", "seg2face"),
        ("GPEN-BFR-512.pth", "bfr-512", "restoration"),
        ("GPEN-Seg2face-512.pth", "bfr-256", None),
        ("mine.pth", "bfr-512", None),
    ],
)
def test_published_files_are_known_by_name_and_structure(name: str, structure: str, task: str | None) -> None:
    entry = published_as(name, infer_config(golden_shapes(structure)))
    assert (entry.generator.task if entry and entry.generator else None) == task


def test_a_name_tells_the_task_but_no_licence_of_another_structure(state: dict[str, Tensor], tmp_path: Path) -> None:
    metadata = convert_generator(save(state, tmp_path / "GPEN-Seg2face-512.pth")).metadata
    assert (metadata.config.task, metadata.provenance.licence) == ("seg2face", "not stated")


def test_half_precision_output(state: dict[str, Tensor], tmp_path: Path) -> None:
    source = save(state, tmp_path / "old.pth")
    half = convert_generator(source, tmp_path / "half.safetensors", dtype="fp16")
    full = convert_generator(source, tmp_path / "full.safetensors")
    stored = load_file(half.output)
    assert {tensor.dtype for tensor in stored.values()} == {torch.float16}
    assert all(torch.equal(stored[name], tensor.half()) for name, tensor in load_file(full.output).items())
    assert_faithful(half.output, state, tolerance=1e-2)


def test_golden_case_through_the_file(tmp_path: Path) -> None:
    case = golden_case("tiny-64")
    model = load_generator(convert_generator(save(case.state, tmp_path / "tiny.pth")).output)
    with torch.inference_mode():
        assert np.abs(model(case.image).numpy() - case.output).max() <= 1e-4 * case.absmax


@pytest.mark.parametrize(
    ("claims", "message"),
    [
        (Claims(input_size=32), "--size 32 contradicts the file, which says 16"),
        (Claims(narrow=0.5), "--narrow 0.5 contradicts the file, which says 0.015625"),
        (Claims(channel_multiplier=2), "--channel-multiplier 2 contradicts the file, which says undetermined"),
        (Claims(n_mlp=8), "--n-mlp 8 contradicts the file, which says 2"),
    ],
)
def test_contradicting_claims(claims: Claims, message: str, state: dict[str, Tensor], tmp_path: Path) -> None:
    source = save(state, tmp_path / "old.pth")
    with pytest.raises(UsageError, match=message):
        convert_generator(source, claims=claims)
    assert list(tmp_path.iterdir()) == [source]


def test_the_source_is_never_replaced(state: dict[str, Tensor], tmp_path: Path) -> None:
    source = save(state, tmp_path / "disguised.safetensors")
    before = source.read_bytes()
    with pytest.raises(UsageError, match="would replace its source"):
        convert_generator(source)
    assert source.read_bytes() == before
    assert_faithful(convert_generator(source, tmp_path / "new.safetensors").output, state)


def test_nothing_is_left_when_writing_fails(
    state: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(tensors: dict[str, Tensor], metadata: dict[str, str]) -> bytes:
        return serialized({name: t + (name == "constant") for name, t in tensors.items()}, metadata)

    monkeypatch.setattr("gpen_convert.generator.save", damaged)
    source = save(state, tmp_path / "old.pth")
    with pytest.raises(CheckpointError, match="constant was read back differently"):
        convert_generator(source)
    assert list(tmp_path.iterdir()) == [source]


# Structures that are not quite a generator.


def without(key: str) -> Wrap:
    return lambda s: {k: v for k, v in s.items() if k != key}


BROKEN: dict[str, tuple[Wrap, str]] = {
    "missing": (without("generator.convs.1.noise.weight"), "1 missing: generator.convs.1.noise.weight"),
    "missing encoder": (without("ecd1.0.1.weight"), "ecd|missing|unknown"),
    "unknown": (lambda s: {**s, "generator.extra": torch.zeros(1)}, "1 unknown: generator.extra"),
    "misshapen": (
        lambda s: {**s, "final_linear.0.bias": torch.zeros(3)},
        r"final_linear.0.bias \[3\] instead of \[16\]",
    ),
    "scalar": (lambda s: {**s, "generator.style.1.weight": torch.zeros(())}, r"the shape \[\]"),
    "other filter": (lambda s: {**s, "ecd1.0.0.kernel": torch.ones(4, 4) / 16}, "is not the filter"),
    "NaN": (
        lambda s: {**s, "generator.input.input": torch.full((1, 8, 4, 4), torch.nan)},
        "constant holds values that are not finite",
    ),
    "integers": (
        lambda s: {**s, "final_linear.0.bias": torch.zeros(16, dtype=torch.int64)},
        "final_linear.0.bias is int64",
    ),
    "sparse": (lambda s: {**s, "final_linear.0.bias": torch.zeros(16).to_sparse()}, "final_linear.0.bias is sparse"),
    "empty": (lambda s: {}, "holds no tensors by name"),
    "list": (lambda s: list(s.values()), "holds no tensors by name"),
    "tensor": (lambda s: torch.zeros(3), "holds an object of the type Tensor, not a state dict"),
    "text": (lambda s: "hello", "holds an object of the type str, not a state dict"),
    "incomplete average": (
        lambda s: {"g_ema": {k: v for k, v in s.items() if k != "final_linear.0.bias"}, "g": s},
        "g_ema: 1 missing: final_linear.0.bias; g is there too",
    ),
    "expanded": (
        lambda s: {**s, "final_linear.0.weight": torch.zeros(1).expand(1 << 16, 1 << 24)},
        "misshapen|memory",
    ),
    "discriminator": (
        lambda s: {
            "convs.0.0.weight": torch.zeros(1),
            "final_conv.0.weight": torch.zeros(1),
            "final_linear.1.weight": torch.zeros(1),
        },
        "a GPEN discriminator, not a generator",
    ),
    "anything": (lambda s: {"fc.weight": torch.zeros(1)}, "generator.input.input is missing"),
    "StyleGAN2": (
        lambda s: {
            k.removeprefix("generator."): v for k, v in s.items() if k.startswith("generator.") and "input" not in k
        },
        "a StyleGAN2 generator without GPEN's encoder",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_structures(case: str, state: dict[str, Tensor], tmp_path: Path) -> None:
    change, message = BROKEN[case]
    source = save(change(state), tmp_path / "old.pth")
    with pytest.raises(CheckpointError, match=message) as caught:
        convert_generator(source)
    assert str(source) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == [source]


# Files that are no checkpoint, or a dangerous one.


class Exploit:
    """Writes a file when it is unpickled by a careless reader."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.write_text, (self.mark, "the pickle ran")


def test_the_exploit_works_on_a_careless_reader(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Exploit(tmp_path / "mark")))  # noqa: S301
    assert (tmp_path / "mark").exists()


@pytest.mark.parametrize("name", ["evil.pth", "evil.safetensors", "evil.jpg"])
@pytest.mark.parametrize("form", ["zip", "before 1.6", "plain", "tar"])
def test_pickles_that_run_code_are_refused(name: str, form: str, state: dict[str, Tensor], tmp_path: Path) -> None:
    mark, source = tmp_path / "mark", tmp_path / name
    tree = {**state, "extra": Exploit(mark)}
    if form == "plain":
        source.write_bytes(pickle.dumps(tree))
    elif form == "tar":
        write_tar(state, source)
        with tarfile.open(source) as archive:
            members = {m.name: archive.extractfile(m).read() for m in archive.getmembers()}  # type: ignore[union-attr]
        members["pickle"] = pickle.dumps(Exploit(mark), 2)
        with tarfile.open(source, "w") as archive:
            for member, content in members.items():
                info = tarfile.TarInfo(member)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    else:
        save(tree, source, _use_new_zipfile_serialization=form == "zip")
    with pytest.raises(CheckpointError, match="refused") as caught:
        convert_generator(source, tmp_path / "out.safetensors")
    with pytest.raises(CheckpointError):
        load_generator(source)
    assert "weights_only" not in str(caught.value)
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before 1.6"])
def test_pickle_protocols(
    protocol: int, zipped: bool, state: dict[str, Tensor], tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    source = save(state, tmp_path / "old.pth", pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    if protocol <= 3:
        assert_faithful(convert_generator(source).output, state)
    else:
        with pytest.raises(CheckpointError, match=f"saved with pickle protocol {protocol}"):
            convert_generator(source)
    assert not list(recwarn)


def test_a_flipped_bit_is_found(state: dict[str, Tensor], tmp_path: Path) -> None:
    source = save(state, tmp_path / "old.pth")
    content = bytearray(source.read_bytes())
    content[content.find(state["final_linear.0.weight"].numpy().tobytes()) + 9] ^= 4
    source.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"damaged: the checksum of .* is wrong"):
        convert_generator(source)


def test_key_takes_a_generator_by_its_prefix(state: dict[str, Tensor], tmp_path: Path) -> None:
    source = save(WRAPPINGS["two by prefix"](state), tmp_path / "old.pth")
    report = convert_generator(source)
    assert (report.metadata.provenance.kept, report.metadata.provenance.others) == ("netG_ema", ("netG",))
    other = convert_generator(source, tmp_path / "other.safetensors", key="netG")
    assert not torch.equal(load_file(other.output)["constant"], load_file(report.output)["constant"])


def test_a_full_disk_is_told(state: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    source = save(state, tmp_path / "old.pth")
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(CheckpointError, match=r"can't be written .*No space left"):
        convert_generator(source)
    assert list(tmp_path.iterdir()) == [source]


def test_what_a_killed_conversion_left_is_removed(state: dict[str, Tensor], tmp_path: Path) -> None:
    abandoned(tmp_path / "old.safetensors")
    convert_generator(save(state, tmp_path / "old.pth"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["old.pth", "old.safetensors"]


@pytest.mark.parametrize("name", ["again.safetensors", "again.pth"])
def test_what_is_converted_already_is_refused(name: str, state: dict[str, Tensor], tmp_path: Path) -> None:
    made = convert_generator(save(state, tmp_path / "old.pth")).output.rename(tmp_path / name)
    with pytest.raises(CheckpointError, match="already converted; use it as it is"):
        convert_generator(made, tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for read in (convert_generator, load_generator):
        with pytest.raises(CheckpointError, match="not a regular file"):
            read(tmp_path / "pipe")


def test_offending_object_is_named(state: dict[str, Tensor], tmp_path: Path) -> None:
    import fractions

    source = save({"g_ema": state, "extra": fractions.Fraction(1, 3)}, tmp_path / "old.pth")
    with pytest.raises(CheckpointError, match=r"fractions\.Fraction"):
        convert_generator(source)


def shared(width: int, levels: int = 40) -> list[Any]:
    """Lists in lists: few, but with very many paths through them."""
    inner: list[Any] = []
    for _ in range(levels):
        inner = [inner] * width
    return inner


def cyclic(state: dict[str, Tensor]) -> dict[str, Any]:
    tree: dict[str, Any] = {"g_ema": state}
    tree["self"] = tree
    return tree


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before 1.6"])
def test_shared_lists_are_looked_into_once(zipped: bool, state: dict[str, Tensor], tmp_path: Path) -> None:
    tree = {"before": shared(100), "g_ema": state, "after": [shared(100), shared(2, 100)]}
    source = save(tree, tmp_path / "old.pth", _use_new_zipfile_serialization=zipped)
    assert_faithful(convert_generator(source).output, state)
    with pytest.raises(CheckpointError, match="holds no tensors by name"):
        convert_generator(save({"x": shared(100)}, tmp_path / "none.pth"))


def test_a_file_that_holds_itself(state: dict[str, Tensor], tmp_path: Path) -> None:
    assert_faithful(convert_generator(save(cyclic(state), tmp_path / "old.pth")).output, state)


@pytest.mark.parametrize("key", ["g", "g_ema"])
def test_one_state_dict_under_two_names(key: str, state: dict[str, Tensor], tmp_path: Path) -> None:
    source = save({"g": state, "g_ema": state}, tmp_path / "old.pth")
    found = convert_generator(source, key=key).metadata.provenance
    assert (found.kept, set(found.others)) == (key, {"g", "g_ema"} - {key})


# Each level is a pair of the one below; the dictionary of one entry, whose key it is, hashes all of it.
DOUBLED = b"\x80\x02})q\x01" + b"".join(bytes([*b"h", n, *b"\x86q", n + 1]) for n in range(1, 24)) + b"K\x01s."
NESTED = b"\x80\x02})" + 200 * b"\x85" + b"K\x01s."
NUMBERS = b"cnumpy\ndtype\n(](X\x01\x00\x00\x00aX\x02\x00\x00\x00f4tatR"
ENDLESS = {
    "a tuple of pairs": (DOUBLED, "expand to too many"),
    "a deep tuple": (NESTED, "expand to too many"),
    "a numpy type of others": (b"\x80\x02" + NUMBERS + b".", "numpy type made of others"),
    "what is called is no function": (b"\x80\x02](](]ee)R.", "calls what is no function"),
    "a list as a key": (b"\x80\x02}]K\x01s.", "as a key"),
    "an unknown instruction": (b"\x80\x02\x82\x01.", "instruction EXT1"),
}


@pytest.mark.parametrize("form", ["zip", "before 1.6", "tar"])
@pytest.mark.parametrize("case", ENDLESS)
def test_pickles_without_an_end(case: str, form: str, tmp_path: Path) -> None:
    content, message = ENDLESS[case]
    source = tmp_path / "old.pth"
    if form == "zip":
        with zipfile.ZipFile(source, "w") as archive:
            archive.writestr("archive/data.pkl", content)
            archive.writestr("archive/version", "3\n")
    elif form == "tar":
        with tarfile.open(source, "w") as archive:
            none = pickle.dumps(0, 2)
            for name, part in {"storages": none + pickle.dumps([], 2), "tensors": none, "pickle": content}.items():
                info = tarfile.TarInfo(name)
                info.size = len(part)
                archive.addfile(info, io.BytesIO(part))
    else:
        save({}, source, _use_new_zipfile_serialization=False)
        source.write_bytes(source.read_bytes().replace(pickle.dumps({}, 2), content))
    with pytest.raises(CheckpointError, match=message):
        load_tree(source)


def test_a_date_is_no_type_made_of_others(state: dict[str, Tensor], tmp_path: Path) -> None:
    tree = {"g_ema": state, "when": np.datetime64("2021-04-01"), "pair": {(1, "a"): 2, torch.float32: 1}}
    assert_faithful(convert_generator(save(tree, tmp_path / "old.pth")).output, state)


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_compressed_members_are_not_read(method: int, state: dict[str, Tensor], tmp_path: Path) -> None:
    stored, packed = save(state, tmp_path / "old.pth"), tmp_path / "packed.pth"
    with zipfile.ZipFile(stored) as source, zipfile.ZipFile(packed, "w", method) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    with pytest.raises(CheckpointError, match=r"compressed members \(old/data.pkl\), which PyTorch never writes"):
        load_tree(packed)


def test_members_larger_than_the_file_are_not_read(
    state: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save(state, tmp_path / "old.pth")
    content = source.read_bytes()
    # Every entry of the directory at the end leads to the same bytes at the begin, which are many.
    with zipfile.ZipFile(source) as archive:
        first = archive.infolist()[0]
    with zipfile.ZipFile(tmp_path / "bomb.pth", "w") as archive:
        archive.writestr("old/data.pkl", content)
        for number in range(3):
            again = zipfile.ZipInfo(f"old/{number}")
            again.file_size = again.compress_size = len(content)
            again.header_offset, again.CRC = first.header_offset, archive.infolist()[0].CRC
            archive.filelist.append(again)
    monkeypatch.setattr(zipfile.ZipFile, "testzip", lambda archive: pytest.fail("it was read"))
    with pytest.raises(CheckpointError, match="larger than the file"):
        load_tree(tmp_path / "bomb.pth")


@pytest.mark.parametrize("kind", ["generator", "upscaler", "onnx"])
def test_a_source_that_changes_is_not_recorded_as_another(
    kind: str, state: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save({"params_ema": far_sighted(2, blocks=1)} if kind == "upscaler" else state, tmp_path / "old.pth")
    if kind == "onnx":
        source = tmp_path / "net.onnx"
        export_generator(convert_generator(tmp_path / "old.pth").output, source, format="onnx")
        (tmp_path / "old.safetensors").unlink()
    read = "from_onnx.recover" if kind == "onnx" else "convert.load_tree"
    load = importlib.import_module(f"gpen_convert.{read.split('.')[0]}").__dict__[read.split(".")[1]]

    def replaced(path: Path) -> Any:
        found = load(path)
        path.unlink()
        path.write_bytes(b"another file")
        return found

    monkeypatch.setattr(f"gpen_convert.{read}", replaced)
    with pytest.raises(CheckpointError, match=f"{source.name}: it was changed while it was read; nothing is written"):
        convert(source)
    assert {path.name for path in tmp_path.iterdir()} == {"old.pth", source.name}


def html(path: Path) -> None:
    path.write_text("\n<!DOCTYPE html><html><body>404</body></html>")


def archive_of_junk(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "hello")


def compressed(path: Path) -> None:
    with gzip.open(path, "wb") as file:
        file.write(b"weights")


FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda p: p.write_bytes(b""), "the file is empty"),
    "html": (html, "looks like an HTML"),
    "html with a mark": (lambda p: p.write_text("<html>é</html>", encoding="utf-8-sig"), "looks like an HTML"),
    "html in UTF-16": (lambda p: p.write_text("<html>é</html>", encoding="utf-16"), "looks like an HTML"),
    "lines of text": (lambda p: p.write_text("not\nfound: ü\n", encoding="utf-8"), "looks like text"),
    "gzip": (compressed, "a gzip archive; unpack it first"),
    "json": (lambda p: p.write_text('{"error": "not found"}'), "looks like text"),
    "text": (lambda p: p.write_text("Not found"), "looks like text"),
    "git lfs": (
        lambda p: p.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        "Git LFS pointer",
    ),
    "random": (lambda p: p.write_bytes(bytes(range(200, 256)) * 9), "neither a PyTorch checkpoint nor safetensors"),
    "zip of junk": (archive_of_junk, "a zip archive, not a checkpoint"),
    "folder": (lambda p: p.mkdir(), "a folder, not a file"),
    "absent": (lambda p: None, "No such file"),
}


@pytest.mark.parametrize("case", FILES)
def test_files_that_are_no_checkpoint(case: str, tmp_path: Path) -> None:
    source = tmp_path / "old.pth"
    FILES[case][0](source)
    with pytest.raises(CheckpointError, match=FILES[case][1]) as caught:
        convert_generator(source)
    assert str(source) in str(caught.value)
    assert not (tmp_path / "old.safetensors").exists()


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before 1.6"])
@pytest.mark.parametrize("part", [0.02, 0.5, 0.999])
def test_truncated_downloads(zipped: bool, part: float, state: dict[str, Tensor], tmp_path: Path) -> None:
    source = save(state, tmp_path / "old.pth", _use_new_zipfile_serialization=zipped)
    source.write_bytes(source.read_bytes()[: int(source.stat().st_size * part)])
    with pytest.raises(CheckpointError, match=rf"old\.pth \({source.stat().st_size:,} bytes\): truncated"):
        convert_generator(source)
    assert list(tmp_path.iterdir()) == [source]


@settings(max_examples=40)
@given(data=st.data(), kind=st.sampled_from(["zip", "legacy", "tar", "safetensors"]))
def test_damaged_files_never_surprise(data: st.DataObject, kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    source, state = folder / "old.pth", legacy_state(TINY)
    if kind == "tar":
        write_tar(state, source)
    elif kind == "safetensors":
        save_file(state, source)
    else:
        save(state, source, _use_new_zipfile_serialization=kind == "zip")
    content = bytearray(source.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, min(len(content), 4000) - 1))] = data.draw(st.integers(0, 255))
    source.write_bytes(content)
    try:
        convert_generator(source, folder / "new.safetensors")
    except GpenError as error:
        assert "\n" not in str(error)
        assert [p.name for p in folder.iterdir()] == ["old.pth"]


def test_fold_rejects_what_fp16_cannot_hold(state: dict[str, Tensor]) -> None:
    state["generator.input.input"] = torch.full((1, 8, 4, 4), 1e6)
    with pytest.raises(CheckpointError, match="not finite in float16"):
        fold(TINY, state, torch.float16)
