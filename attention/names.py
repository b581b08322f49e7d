"""What is said to somebody who mistyped a name; the one place for it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, choices: Iterable[str]) -> str:
    """` (nearest: CHOICE)` if one of the choices is like the name, else nothing."""
    found = difflib.get_close_matches(name.lower(), list(choices), n=1, cutoff=0.4)
    return f" (nearest: {found[0]})" if found else ""


def unknown(what: str, name: str, choices: Iterable[str]) -> ValueError:
    """The error for a name that is none of the choices: one line that lists them."""
    choices = list(choices)
    hint = nearest(name, choices)
    return ValueError(f"{what}: unknown {name!r}{hint}; choose from {', '.join(choices)}")
