"""Tables, numbers and pages for people: said once, drawn on a terminal or in markdown.

What a user named, such as a folder or an arm, is shown as it is: never markup, never an emoji.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, SupportsFloat

import numpy as np
from numpy.typing import ArrayLike
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

NOTHING = "–"  # where there is no number

Form = Callable[..., str]  # how a quantity is written; some take a sign, see `fixed`


class Table(NamedTuple):
    """A table, before it is known what it is drawn with."""

    title: str
    header: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()  # what its reader must know, a sentence or more each


# Numbers --------------------------------------------------------------------------------------


def number(value: SupportsFloat | None, digits: int = 3) -> str:
    """`digits` significant ones, no exponent between 1e-3 and 1e4; NOTHING for None and NaN."""
    if value is None or math.isnan(value := float(value)):
        return NOTHING
    if value == 0:
        return "0"
    if math.isinf(value):
        return f"{value:g}"
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])
    if -3 <= exponent < 4:
        return f"{value:.{max(digits - 1 - exponent, 0)}f}"
    mantissa, _, exponent = f"{value:.{max(digits - 2, 0)}e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


def fixed(value: SupportsFloat | None, places: int, sign: str = "") -> str:
    """So many places after the point, no minus before a zero; NOTHING for what is not finite.

    Args:
      value: the number.
      places: after the point.
      sign: "+" to write one before positive numbers too.
    """
    if value is None or not math.isfinite(value := float(value)):
        return NOTHING
    return f"{value:{sign}z.{places}f}"


def whole(value: SupportsFloat | None, sign: str = "") -> str:
    """A count, such as steps."""
    return fixed(value, 0, sign)


def percent(share: SupportsFloat | None, sign: str = "") -> str:
    """A share of 1 in per cent, without that word."""
    return fixed(None if share is None else 100 * float(share), 1, sign)


def nats(value: SupportsFloat | None, sign: str = "") -> str:
    """A loss that is to be compared with others."""
    return fixed(value, 3, sign)


def p_value(p: float, *, exact: bool = True) -> str:
    """A p value, with a word where it was drawn rather than counted."""
    return f"{p:.3g}" + " (drawn)" * (not exact)


def interval(low: float, high: float, form: Form) -> str:
    """[low, high]."""
    return f"[{form(low)}, {form(high)}]"


def with_range(values: ArrayLike, form: Form, middle: Callable[[Any], Any] = np.median) -> str:
    """Median, or another middle, and (least–largest) where there are several values."""
    values = np.asarray(values, float)
    text = form(float(middle(values)))
    return text + f" ({form(values.min())}–{form(values.max())})" * (values.size > 1)


# Drawing --------------------------------------------------------------------------------------


def on_terminal(*tables: Table) -> RenderableType:
    """Tables for a rich console, each under its title and above its notes."""
    parts: list[RenderableType] = []
    for table in tables:
        parts += [Text()] if parts else []
        parts += [Text(table.title, style="italic"), _grid(table)]
        parts += [Text(), *map(Text, table.notes)] if table.notes else []
    return Group(*parts)


def _grid(table: Table) -> RichTable:
    grid = RichTable(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    for i, name in enumerate(table.header):
        grid.add_column(Text(name), justify="right" if i else "left", vertical="bottom")
    for row in table.rows:
        grid.add_row(*map(Text, row))
    return grid


def markdown(table: Table) -> str:
    """A table in markdown, under its title and above its notes."""
    alignment = ["---", *["---:"] * (len(table.header) - 1)]
    lines = [map(_cell, table.header), alignment, *(map(_cell, row) for row in table.rows)]
    grid = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    notes = "\n".join(f"- {_line(note)}" for note in table.notes)
    return "\n\n".join(filter(None, [f"**{_line(table.title)}**", grid, notes]))


def page(
    title: str,
    *,
    opening: Sequence[str] = (),
    tables: Sequence[Table] = (),
    figures: Mapping[str, str] | None = None,
    closing: Sequence[str] = (),
    command: str,
    environment: Mapping[str, Any],
) -> str:
    """A page of markdown: what was found first, how it was made last.

    Args:
      title: of the page.
      opening: paragraphs before the tables, in markdown; empty ones are left out.
      tables: each with its notes.
      figures: path, relative to the page, to what it shows.
      closing: paragraphs after the figures.
      command: what made it, as typed.
      environment: as environment.json has it.
    """
    shown = [
        f"![{_line(caption)}]({path})\n\n{caption}" for path, caption in (figures or {}).items()
    ]
    parts = [
        f"# {_line(title)}",
        *opening,
        *map(markdown, tables),
        *shown,
        *closing,
        f"```sh\n{command}\n```",
        made_with(environment),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def made_with(environment: Mapping[str, Any]) -> str:
    """A sentence on what numbers depend on besides the settings."""
    versions = environment.get("versions")
    about = ("platform", "cores", "matmul_precision", "git_revision")
    parts = [f"{n} {v}" for n, v in versions.items()] if isinstance(versions, Mapping) else []
    parts += [f"{x.replace('_', ' ')} {environment[x]}" for x in about if environment.get(x)]
    return f"Made with {', '.join(parts)}." if parts else ""


def _line(text: str) -> str:
    return " ".join(text.split())


def _cell(text: str) -> str:
    """A cell of markdown: on one line, and no character of it ends the cell or begins HTML."""
    return _line(text).replace("|", r"\|").replace("<", r"\<")
