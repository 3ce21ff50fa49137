"""What the name of a file tells: which published file it is, or at least what its weights are for.

Only the file's own name counts, never its folders.
"""

from __future__ import annotations

import re
import unicodedata

from gpen_core.config import GeneratorConfig
from gpen_weights import Entry, catalog

SUFFIXES = (".pth", ".pt", ".pt2", ".ckpt", ".bin", ".onnx", ".safetensors", ".tar", ".pkl", ".th")
STRUCTURE = ("input_size", "output_size", "channel_multiplier", "narrow", "style_dim", "n_mlp")
# What systems and browsers add to the name of a copy.
COPY = re.compile(r"^copy of\s+|[\s_-]*\((?:\d+|copy)\)$|[\s_-]+copy(?:[\s_-]+\d+)?$", re.IGNORECASE)
CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
TASK_WORDS = {
    "colorization": r"colou?ri[sz](?:ation|e|ed|er|ing)",
    "inpainting": r"inpaint(?:ing|ed|er)?",
    "seg2face": r"seg(?:mentation)? ?(?:2|to) ?face",
    "restoration": r"bfr|restor(?:ation|e|ed|er|ing)|enhanc(?:ement|e|ed|er|ing)|selfie",
}


def stem_of(name: str) -> str:
    """A file's name without the suffixes of checkpoints; what follows any other dot stays."""
    head, _, tail = name.rpartition(".")
    if not head or f".{tail.lower()}" not in SUFFIXES:
        return name
    return stem_of(head)


def task_of(name: str) -> str | None:
    """The task that the words of a file's name tell, or None where they tell none, or several."""
    stem = unicodedata.normalize("NFKC", stem_of(name))
    texts = [" ".join(_words(text)) for text in (stem, CAMEL.sub(" ", stem))]
    found = {task for task, words in TASK_WORDS.items() if any(_holds(text, words) for text in texts)}
    return found.pop() if len(found) == 1 else None


def published_as(name: str, config: GeneratorConfig) -> Entry | None:
    """The catalog's generator with a file's name, whatever case, separators and marks of a copy, if the structure is
    that entry's too."""
    for entry in _named(name):
        facts = entry.generator
        if facts and all(getattr(facts, field) == getattr(config, field) for field in STRUCTURE):
            return entry
    return None


def published_network(name: str, kind: str) -> Entry | None:
    """The catalog's entry of a kind (detector, parser, upscaler) with a file's name, as `published_as` compares it."""
    return next((entry for entry in _named(name) if entry.kind == kind), None)


def _named(name: str) -> list[Entry]:
    words = _words(_without_marks(stem_of(name)))
    return [entry for entry in catalog() if words in (_words(entry.name), _words(stem_of(entry.published_file)))]


def _without_marks(stem: str) -> str:
    shorter = COPY.sub("", stem)
    return stem if shorter == stem else _without_marks(shorter)


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", unicodedata.normalize("NFKC", text).casefold())


def _holds(text: str, words: str) -> bool:
    return re.search(rf"(?<![^\W\d_])(?:gpen|face)*(?:{words})(?![^\W\d_])", text) is not None
