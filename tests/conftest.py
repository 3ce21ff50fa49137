"""What several test files share."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from gpen_core.errors import MissingWeightsError
from gpen_weights import pull, resolve

# The same cases on every run, whatever the machine's speed: --hypothesis-profile exploring looks for new ones.
settings.register_profile(
    "repeatable", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("exploring", database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")


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


@pytest.fixture(scope="session")
def small_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pt2 package of small weights, which lie beside it. Not to be changed."""
    from gpen_convert.export import export_generator
    from tests.exported import SMALL, converted

    source = converted(tmp_path_factory.mktemp("package"), SMALL)
    export_generator(source, format="pt2")
    return source.with_suffix(".pt2")
