"""Flags made from the settings of config.py, with errors and a --help that read well.

absl parses them, so that its own flags (--flagfile, --undefok) work; its habits of accepting stray
words and of leaving with status 1 are put right. Parsing touches no global state.
"""

from __future__ import annotations

import dataclasses
import shlex
import sys
import textwrap
import types
import typing
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

from absl import flags

USAGE_ERROR = 2  # exit status


class Parsed(NamedTuple):
    """What was asked for on the command line."""

    values: dict[str, Any]  # flag to value, defaults included
    given: frozenset[str]  # the flags that were typed

    def pick(self, settings: type) -> Any:
        """The values that belong to one dataclass of settings, as that dataclass."""
        return settings(**{f.name: self.values[f.name] for f in dataclasses.fields(settings)})


class _Setting(NamedTuple):
    name: str
    kind: Any  # int, float, str, bool, Path or tuple: the field's type without its None
    item: Any  # what a tuple is made of
    default: Any
    description: str
    default_text: str


def parse(argv: Sequence[str], *settings: type) -> Parsed | None:
    """Parse argv[1:] into the fields of dataclasses; None when --help was asked for.

    Raises:
      ValueError: one line that says what is wrong and what is right.
    """
    fields = _settings(settings)
    defined = flags.FlagValues()
    for field in fields:
        _define(field, defined)
    flags.DEFINE_bool("help", False, "", short_name="h", flag_values=defined)
    try:
        stray = defined(list(argv))[1:]
    except flags.IllegalFlagValueError as error:  # of a switch: the others are text to absl
        raise ValueError(f"{str(error).split(': (')[0]}, must be true or false") from None
    except flags.Error as error:
        raise ValueError(str(error)) from None
    except UnicodeDecodeError:
        raise ValueError("flagfile: holds something else than flags, one a line") from None
    if defined["help"].value:
        return None
    if stray:
        switches = ("true", "false", "yes", "no", "0", "1")
        hint = "; a switch is --flag, --noflag or --flag=false" * (stray[0].lower() in switches)
        raise ValueError(f"stray word {stray[0]!r}: flags are written --name=value{hint}")
    values = {field.name: _value(field, defined[field.name].value) for field in fields}
    return Parsed(values, frozenset(f.name for f in fields if defined[f.name].present))


def typed(argv: Sequence[str], *without: str) -> str:
    """The flags of argv as they were typed, but for some."""
    return shlex.join(word for word in argv[1:] if word.lstrip("-").split("=")[0] not in without)


def help_text(command: str, about: str, notes: dict[str, str], *settings: type) -> str:
    """A page of help: a line or two for each flag, and its default."""
    lines = [f"usage: {command} [--flag=value ...]", "", about, ""]
    for field in _settings(settings):
        name = f"--[no]{field.name}" if field.kind is bool else f"--{field.name}"
        text = field.description.format(**notes)
        lines += _entry(name, f"{text} (default: {field.default_text})")
    lines += _entry("--flagfile", "a file of flags, one a line")
    return "\n".join(lines)


def fail(command: str, message: object, status: int = USAGE_ERROR) -> NoReturn:
    """Leave with one line on standard error."""
    print(f"{command}: {' '.join(str(message).split())}", file=sys.stderr)
    raise SystemExit(status)


def disk_error(error: OSError) -> str:
    """What the system refused, and of which file."""
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)


def terminal_width() -> int | None:
    """What tables may take: a terminal's own width (None), or enough of it where there is none."""
    return None if sys.stdout.isatty() else 130


def _settings(classes: Sequence[type]) -> list[_Setting]:
    settings = []
    for cls in classes:
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            kind = hints[field.name]
            if isinstance(kind, types.UnionType):  # X | None
                kind = next(part for part in typing.get_args(kind) if part is not type(None))
            item = next(iter(typing.get_args(kind)), None)
            text = field.metadata["default"] or _as_typed(field.default)
            settings.append(
                _Setting(
                    name=field.name,
                    kind=typing.get_origin(kind) or kind,
                    item=item,
                    default=field.default,
                    description=field.metadata["help"],
                    default_text=text,
                )
            )
    return settings


def _define(field: _Setting, defined: flags.FlagValues) -> None:
    if field.kind is bool:
        flags.DEFINE_bool(field.name, field.default, "", flag_values=defined)
    else:
        default = None if field.default is None else _as_typed(field.default)
        flags.DEFINE_string(field.name, default, "", flag_values=defined)


def _value(field: _Setting, text: Any) -> Any:
    """A flag's text as a value of the field's type; ValueError names the flag."""
    if text is None or field.kind is bool:
        return text
    if not text.strip():
        raise ValueError(f"{field.name}: empty, give a value")
    if "\0" in text:
        raise ValueError(f"{field.name}: {text!r}, must not hold a NUL")
    numbers = {int: "a whole number", float: "a number"}
    try:
        if field.kind is tuple:
            return tuple(field.item(word.strip()) for word in text.split(","))
        return field.kind(text)
    except ValueError:
        what = numbers.get(field.kind, "a comma list of numbers")
        raise ValueError(f"{field.name}: {text!r}, must be {what}") from None


def _as_typed(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _entry(name: str, text: str) -> list[str]:
    indent = " " * 22
    lines = textwrap.wrap(text, 100 - len(indent))
    return [f"  {name:<20}{lines[0]}", *(indent + line for line in lines[1:])]
