"""What several test files share."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpen_core.errors import MissingWeightsError
from gpen_weights import pull, resolve


@pytest.fixture(scope="session")
def centerface_path() -> Path:
    """The real face detector, fetched once into the user's folder for weights."""
    try:
        return resolve("centerface")
    except MissingWeightsError:
        pass
    try:
        return pull("centerface")
    except MissingWeightsError as error:
        pytest.skip(f"needs the face detector: {error}")
