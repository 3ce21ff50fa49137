"""gpen-core: a slim, fast GPEN. Importing this package is cheap; torch loads with `Restorer`."""

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpen_core.restorer import Restored, Restorer

# onnxruntime's Linux wheels (1.29 and newer) report what they run to their maker unless this is set before the import.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

__version__ = "0.1.0"
__all__ = ["Restored", "Restorer", "__version__"]


def __getattr__(name: str) -> Any:
    if name not in ("Restored", "Restorer"):
        raise AttributeError(f"module 'gpen_core' has no attribute {name!r}")
    from gpen_core import restorer

    return getattr(restorer, name)
