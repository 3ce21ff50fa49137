"""Where a conversion or an export writes, and what it may replace there."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors import SafetensorError

from gpen_convert.names import stem_of
from gpen_core.ahead import SIDECAR, Sidecar
from gpen_core.checkpoint import open_safetensors
from gpen_core.config import METADATA_KEY
from gpen_core.errors import CheckpointError, UsageError
from gpen_core.files import NOT_UTF8, Stamp, exists, is_folder, is_utf8, same_file, sha256, stamp, why_unreadable


def output_path(source: Path, output: Path | None, suffix: str, name: str | None = None) -> Path:
    """Where a conversion writes: `output`, or `name` in it if it is a folder, by default beside the source.

    name: by default the source's, with `suffix` in the place of a checkpoint's suffix.
    Raises UsageError if that is the source itself or no place for a file.
    """
    own = name or f"{stem_of(source.name)}{suffix}"
    target = source.parent / own if output is None else output
    if "\0" in str(target):
        raise UsageError(f"{target}: no file name holds a NUL character")
    if output is not None and is_folder(target):
        target = target / own
    if same_file(source, target):
        raise UsageError(f"{target}: the output would replace its source; name another file with -o")
    if suffix != ".pt2" and not is_utf8(target):
        raise UsageError(f"{target}: {NOT_UTF8}, or name another with -o")
    if target.suffix != suffix:
        raise UsageError(f"{target}: the output must be named *{suffix}")
    if is_folder(target):
        raise UsageError(f"{target}: a folder is there; name the output with -o")
    if not is_folder(target.parent):
        raise UsageError(f"{target}: the folder {target.parent} does not exist")
    return target


def may_replace(target: Path, output: Path | None, source: Path, same: Callable[[Path], bool]) -> list[str]:
    """Raises UsageError if a file that the user did not name would be replaced by something else.

    same: whether a file is there for the same source. Returns a line for people if it is, and nothing if there is no
    file, or if `output` names it.
    """
    named = output is not None and not is_folder(output)
    if named or not (exists(target) or target.is_symlink()):
        return []
    if not same(target):
        raise UsageError(
            f"{target}: a file is there that was not made from {source}; name the output with -o (-o replaces a file)"
        )
    return ["replaced what was there from the same source"]


def may_replace_sidecar(package: Path) -> None:
    """Raises UsageError if a package's sidecar, which no user names, would replace something that is none."""
    note = Path(f"{package}{SIDECAR}")
    if not (exists(note) or note.is_symlink()):
        return
    try:
        Sidecar.decode(note.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, CheckpointError):
        raise UsageError(
            f"{note}: a file is there that describes no package; remove it, or name another output with -o"
        ) from None


def digest_of(source: Path, before: Stamp | None) -> str:
    """The sha256 of a source, to be recorded in what was made of it.

    before: its stamp before it was read. Raises CheckpointError if it is not what was read any more.
    """
    digest = sha256(source)
    if stamp(source) != before:
        raise CheckpointError(f"{source}: it was changed while it was read; nothing is written")
    return digest


def origin_of(path: Path) -> str:
    """The sha256 of the original that a converted or exported file names, or "" if it names none. Raises nothing."""
    properties = _properties(path)
    try:
        content = json.loads(properties.get(METADATA_KEY, "{}"))
        origin = properties.get("source_sha256") or content["provenance"]["source_sha256"]
    except (ValueError, RecursionError, KeyError, TypeError):
        return ""
    return origin if isinstance(origin, str) else ""


def _properties(path: Path) -> Mapping[str, str]:
    sidecar = Path(f"{path}{SIDECAR}")
    if why_unreadable(path) or (path.suffix == ".pt2" and why_unreadable(sidecar)):
        return {}
    try:
        if path.suffix == ".safetensors":
            with open_safetensors(path) as opened:
                return dict(opened.metadata() or {})
        if path.suffix == ".pt2":
            note = json.loads(sidecar.read_text(encoding="utf-8"))
            return {METADATA_KEY: json.dumps(note["weights"])}
        if importlib.util.find_spec("onnx") is None:
            return {}
        import onnx

        model = onnx.load_model(str(path), load_external_data=False)
        return {entry.key: entry.value for entry in model.metadata_props}
    except (OSError, ValueError, RecursionError, KeyError, TypeError, SafetensorError, CheckpointError):
        return {}
    except Exception:  # protobuf's DecodeError has no stable public home
        return {}
