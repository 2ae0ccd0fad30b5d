"""What the build wrote down about itself. Imports nothing but the standard library."""

import json
from pathlib import Path

PACKAGE_DIR = Path(__file__).resolve().parent
LIBRARY = PACKAGE_DIR / "_C.so"


def _read() -> dict:
    try:
        return json.loads((PACKAGE_DIR / "_build_info.json").read_text())
    except (OSError, ValueError):
        return {}


# Empty where nothing was built (a source tree).
BUILD: dict = _read()
