"""Kinds of values: the one way in for what is typed and for what Python passes. Imports no JAX.

A dataclass of settings has a field for each, made by `setting`, which says its kind, its bounds and
what --help says of it. `normalised` puts every value into its kind's own type, whatever NumPy or
JAX type it came in, and refuses what is none.
"""

from __future__ import annotations

import dataclasses
import operator
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from attention.names import unknown


class Kind(NamedTuple):
    """A kind of value: the one way in for what is typed and for what Python passes."""

    what: str  # it must be
    from_text: Callable[[str], Any]
    normalise: Callable[[Any], Any]  # TypeError or ValueError for what is none


def _integer(value: Any) -> int:
    if isinstance(value, bool | np.bool_):
        raise TypeError
    return operator.index(value)


def _number(value: Any) -> float:
    if isinstance(value, bool | np.bool_ | str | bytes) or np.ndim(value):
        raise TypeError
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return str(value)


def _switch(value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise TypeError
    return bool(value)


def _path(value: Any) -> Path:
    text = os.fspath(value)
    if "\0" in text or not text:
        raise ValueError
    text.encode()  # config.json and report.md are UTF-8
    try:
        return Path(text).expanduser()
    except RuntimeError:  # of nobody, or of somebody without a home
        raise ValueError from None


def _scale(value: Any) -> str:
    """A score rule as typed; from Python a number is one too."""
    return value.strip() if isinstance(value, str) else repr(_number(value))


def _listed(kind: Kind) -> Kind:
    def normalise(value: Any) -> tuple:
        alone = isinstance(value, str | bytes) or np.ndim(value) == 0
        return tuple(map(kind.normalise, [value] if alone else value))

    def from_text(text: str) -> tuple:
        return tuple(kind.from_text(word.strip()) for word in text.split(","))

    return Kind(f"a comma list of {kind.what}", from_text, normalise)


INTEGER = Kind("a whole number", int, _integer)
NUMBER = Kind("a number", float, _number)
TEXT = Kind("a word", str, _text)
SWITCH = Kind("true or false", lambda text: {"true": True, "false": False}[text], _switch)
PATH = Kind("a path (UTF-8, no NUL, no unknown ~user)", _path, _path)
NUMBERS = _listed(NUMBER._replace(what="numbers"))
SCALES = _listed(Kind("score rules or numbers", str, _scale))
TEXTS = _listed(TEXT._replace(what="words"))


def setting(
    default: Any,
    description: str,
    kind: Kind = INTEGER,
    default_text: str | None = None,
    *,
    bounds: tuple[float, float] | None = None,
    choices: Iterable[str] | None = None,
) -> Any:
    """A field with its default, its kind, its bounds, and what --help says of it."""
    about = {"help": description, "kind": kind, "default": default_text}
    return dataclasses.field(
        default=default, metadata={**about, "bounds": bounds, "choices": choices}
    )


def normalised(settings: Any) -> Any:
    """A dataclass of settings with every value in its kind's own type, bounds and choices checked.

    Raises:
      ValueError: names the field, the value and what is right.
    """
    return dataclasses.replace(
        settings,
        **{f.name: _normalised(f, getattr(settings, f.name)) for f in dataclasses.fields(settings)},
    )


def _normalised(field: dataclasses.Field, value: Any) -> Any:
    kind, bounds, choices = (field.metadata[name] for name in ("kind", "bounds", "choices"))
    if value is None and field.default is None:
        return None
    try:
        value = kind.normalise(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{field.name}: {value!r}, must be {kind.what}") from None
    if choices is not None and value not in choices:
        raise unknown(field.name, value, choices)
    if bounds is not None and not bounds[0] <= value <= bounds[1]:
        low, high = bounds
        raise ValueError(f"{field.name}: {value}, must be {kind.what} from {low} to {high}")
    return value
