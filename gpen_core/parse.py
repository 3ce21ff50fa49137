"""Face parsing: which pixels of a crop are face, for a paste mask that follows it.

ParseNet tells 19 classes apart; the face is all of them but background, hat and cloth, as GPEN has it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from gpen_core.errors import CheckpointError
from gpen_core.masks import PARSED_SIZE, Weights, parsed_mask
from gpen_core.pixels import require_picture
from gpen_core.sessions import first_line, open_session
from gpen_core.types import Image

CLASSES = 19
BACKGROUND, HAT, CLOTH = 0, 14, 18
_UNKNOWN = "not a face parser: that takes one picture of 512 x 512 and gives 19 classes of its size"


@dataclass(frozen=True, eq=False)
class Parser:
    """Paste weights for a face crop, from a parsing network. Safe to share between threads."""

    session: Any
    path: Path

    def __call__(self, face: Image) -> Weights:
        """Paste weights [512, 512] in 0..1 for an aligned face (S x S x 3 uint8 RGB); all 0 if there is no face."""
        return parsed_mask(~np.isin(self.labels(face), (BACKGROUND, HAT, CLOTH)))

    def labels(self, face: Image) -> NDArray[np.intp]:
        """The class [512, 512] of each pixel of a crop of any size, in float32 whatever the generator runs in.

        Raises ImageError for anything but H x W x 3 uint8.
        """
        require_picture(face)
        shrinks = face.shape[0] > PARSED_SIZE
        how = cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR
        seen = face if face.shape[0] == PARSED_SIZE else cv2.resize(face, (PARSED_SIZE, PARSED_SIZE), interpolation=how)
        values = seen.astype(np.float32).transpose(2, 0, 1)[None] / np.float32(127.5) - 1
        return np.asarray(_run(self.session, values, self.path)[0].argmax(axis=0))


def load_parser(path: str | os.PathLike[str]) -> Parser:
    """Open a face parser, an ONNX file as `gpen-core convert` makes it of ParseNet, on the CPU.

    It is known by what it takes and gives, not by the file's name. Raises CheckpointError for another file.
    """
    place = Path(path)
    session = open_session(place, "cpu", "face parser", CheckpointError)
    inputs = session.get_inputs()
    shape = inputs[0].shape if len(inputs) == 1 and inputs[0].type == "tensor(float)" else []
    if len(shape) != 4 or shape[1] != 3:
        raise CheckpointError(f"{place}: {_UNKNOWN}")
    logits = _run(session, np.zeros((1, 3, PARSED_SIZE, PARSED_SIZE), np.float32), place)
    if logits.shape != (1, CLASSES, PARSED_SIZE, PARSED_SIZE):
        raise CheckpointError(f"{place}: {_UNKNOWN}; this gives {'x'.join(map(str, logits.shape))}")
    return Parser(session, place)


def _run(session: Any, values: NDArray[np.float32], path: Path) -> NDArray[Any]:
    try:
        outputs = session.run(None, {session.get_inputs()[0].name: np.ascontiguousarray(values)})
    except Exception as error:  # onnxruntime's exceptions share no narrower base
        raise CheckpointError(f"{path}: {_UNKNOWN}: {first_line(error)}") from error
    return np.asarray(outputs[0])
