"""Flags made from dataclasses of settings: parsing, errors of one line, a --help that reads well.

absl parses them, so that its own flags (--flagfile, --undefok) work; its habits of stopping at the
first stray word and of leaving with status 1 are put right. Parsing touches no global state.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from absl import flags

from attention.names import nearest
from experiments.settings import SWITCH, Kind, normalised

# What other projects call a flag.
ALSO_CALLED = {
    "batch_size": "batch bs",
    "clip_norm": "clip grad_clip",
    "d_k": "head_dim dim_head",
    "d_model": "dim hidden_size",
    "dropout_rate": "dropout",
    "learning_rate": "lr rate",
    "matmul_precision": "precision",
    "num_heads": "heads",
    "num_layers": "layers depth",
    "num_seeds": "seeds repeats",
    "out": "output dir",
    "scale": "arm arms scaling",
    "seeds": "num_seeds",
    "sequence_length": "length seq_len",
    "steps": "epochs iterations num_steps",
    "warmup_steps": "warmup",
}


class Parsed(NamedTuple):
    """What was asked for on the command line."""

    values: dict[str, Any]  # flag to value, defaults included
    given: frozenset[str]  # the flags that were typed
    words: tuple[str, ...]  # those that are no flags
    typed: tuple[str, ...]  # all of it, as it was

    def pick(self, settings: type) -> Any:
        """The values that belong to one dataclass of settings, as that dataclass.

        Raises:
          ValueError: one of them is out of bounds or none of the choices.
        """
        names = (field.name for field in dataclasses.fields(settings))
        return normalised(settings(**{name: self.values[name] for name in names}))


def parse(argv: Sequence[str], *settings: type) -> Parsed | None:
    """Parse argv[1:] into the fields of dataclasses; None when --help was asked for.

    Raises:
      ValueError: one line that says what is wrong and what is right.
    """
    fields = {field.name: field for cls in settings for field in dataclasses.fields(cls)}
    defined = flags.FlagValues()
    defined.set_gnu_getopt(True)
    for name, field in fields.items():
        define = flags.DEFINE_bool if field.metadata["kind"] is SWITCH else flags.DEFINE_string
        define(name, None, "", flag_values=defined)
    flags.DEFINE_bool("help", False, "", short_name="h", flag_values=defined)
    try:
        words = tuple(defined(list(argv))[1:])
    except flags.UnrecognizedFlagError as error:
        raise ValueError(
            f"unknown flag --{error.flagname}{_meant(error.flagname, fields)}"
        ) from None
    except flags.IllegalFlagValueError as error:  # of a switch: the others are text to absl
        raise ValueError(f"{str(error).split(': (')[0]}, must be true or false") from None
    except flags.Error as error:
        raise ValueError(str(error).removeprefix("ERROR:: ")) from None
    except UnicodeDecodeError:
        raise ValueError("flagfile: holds something else than flags, one a line") from None
    if defined["help"].value:
        return None
    given = [name for name in fields if defined[name].present]
    values = {name: field.default for name, field in fields.items()}
    for name in given:
        kind: Kind = fields[name].metadata["kind"]
        value: Any = defined[name].value
        values[name] = value if kind is SWITCH else from_text(name, kind, value)
    return Parsed(values, frozenset(given), words, tuple(argv[1:]))


def _meant(name: str, known: Iterable[str]) -> str:
    """` (nearest: --FLAG)`, if there is one that is like it."""
    called = [flag for flag in known if name.lower() in ALSO_CALLED.get(flag, "").split()]
    return nearest(called[0] if called else name, known).replace(": ", ": --")


def from_text(name: str, kind: Kind, text: str) -> Any:
    """What was typed as a value of a kind.

    Raises:
      ValueError: it is none; names what it was typed for.
    """
    if not text.strip():
        raise ValueError(f"{name}: empty, give a value")
    try:
        return kind.from_text(text)
    except ValueError:
        raise ValueError(f"{name}: {text!r}, must be {kind.what}") from None


# --help ---------------------------------------------------------------------------------------


def flags_help(
    settings: Sequence[type],
    groups: Mapping[str, Sequence[str]],
    notes: Mapping[str, str],
    width: int,
) -> str:
    """What --help says of each flag: a line or two, and its default.

    Args:
      settings: the dataclasses.
      groups: heading to the flags below it; without any, all stand below one.
      notes: what stands for {NAME} in a description.
      width: columns.
    """
    fields = [field for cls in settings for field in dataclasses.fields(cls)]
    entries = {field.name: _entry(field, notes) for field in fields}
    entries["flagfile"] = ("--flagfile", "a file of flags, one a line")
    column = max(len(flag) for flag, _ in entries.values())
    return "\n\n".join(
        f"{heading}\n{definitions(dict(entries[name] for name in names), width, column)}"
        for heading, names in (groups or {"Flags": tuple(entries)}).items()
    )


def _entry(field: dataclasses.Field, notes: Mapping[str, str]) -> tuple[str, str]:
    """A flag as it is typed, and what it is."""
    switch = "[no]" * (field.metadata["kind"] is SWITCH)
    default = field.metadata["default"]
    if default is None:
        values = field.default if isinstance(field.default, tuple) else (field.default,)
        default = ",".join(map(str, values)).lower()
    description = field.metadata["help"].format_map(notes)
    return f"--{switch}{field.name}", f"{description} (default: {default})"


def definitions(entries: Mapping[str, str], width: int, column: int = 0) -> str:
    """Terms and their texts, in two columns of which the first is `column` wide or more."""
    column = max(column, *map(len, entries)) + 4
    lines = []
    for term, text in entries.items():
        first, *rest = textwrap.wrap(text, width - column)
        lines += [f"  {term:<{column - 2}}{first}", *(" " * column + line for line in rest)]
    return "\n".join(lines)
