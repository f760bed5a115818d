"""Arguments of any kind: read as numbers, and shown in messages, without an error of their own."""

from __future__ import annotations

import operator

LONGEST = 200  # characters of a value in a message


def shown(value) -> str:
    """repr(), shortened; the type where there is none, as of an integer of more than 4300 digits."""
    try:
        text = repr(value)
    except Exception:  # the value's own, whatever that is
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def as_integer(value) -> int | None:
    """As Python's own; None for a bool and for what is no single integer, such as an array of two."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except (TypeError, RuntimeError):  # the latter of a tensor without memory
        return None
