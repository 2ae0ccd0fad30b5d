"""Variables of the environment that switch something on."""

import os


def is_on(name: str) -> bool:
    """Whether it is 1; not when it is 0, empty or not there. All else is a ValueError."""
    value = os.environ.get(name, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{name}: expected 0 or 1 in the environment, got {value!r}")
    return value == "1"
