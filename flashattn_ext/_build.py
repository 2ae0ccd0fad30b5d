"""What the build wrote down about itself. Imports nothing but the standard library."""

import json
from pathlib import Path
from typing import Any

PACKAGE_DIR = Path(__file__).resolve().parent
LIBRARY = PACKAGE_DIR / "_C.so"


def _read() -> dict[str, Any]:
    try:
        info: dict[str, Any] = json.loads((PACKAGE_DIR / "_build_info.json").read_text())
        return info
    except (OSError, ValueError):
        return {}


# Empty where nothing was built (a source tree).
BUILD: dict[str, Any] = _read()
