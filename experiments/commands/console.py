"""The one way out for text: tables and help on standard output, all else on standard error.

What users typed is shown as it is: no markup, no emoji, no wrapped lines. A stream that can't take
text, be it a closed one, a broken pipe or a full disk, is /dev/null from then on: nothing that a
terminal does stops a run or changes its exit status.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.segment import Segment, Segments
from rich.table import Table

USAGE_ERROR = 2  # exit status
WIDTH = 130  # of tables where there is no terminal


class _Stream:
    """sys.stdout or sys.stderr, whichever file that now is; writing to it never fails."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, name: str) -> Any:
        file = getattr(sys, self._name)
        # While rich draws a bar, what others print comes to it first.
        return getattr(getattr(file, "rich_proxied_file", file), name)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            try:
                self.__getattr__("write")(text)
                self.__getattr__("flush")()
            except (OSError, ValueError):
                with Path(os.devnull).open("w") as nowhere:
                    os.dup2(nowhere.fileno(), self.fileno())
        return len(text)

    def flush(self) -> None:
        """Done by `write`."""


def _console(name: str, **options: Any) -> Console:
    stream: Any = _Stream(name)
    return Console(file=stream, markup=False, highlight=False, emoji=False, **options)


ERRORS = _console("stderr", soft_wrap=True)


def settle() -> None:
    """Make the standard streams such that all of a command can rely on them; when it starts.

    A closed one is opened, so that no file of a run gets its number and the words meant for it;
    characters that it can't show are replaced.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
            os.set_inheritable(descriptor, True)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 (it stays)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def say(line: object) -> None:
    """A line on standard error, as it is; above the progress bar, if there is one."""
    ERRORS.print(Segments([Segment(f"{line}\n")]))


def fail(command: str, message: object, status: int = USAGE_ERROR) -> int:
    """Say in one line what is wrong; returns the exit status."""
    say(f"{command}: {' '.join(str(message).splitlines())}")
    return status


def show(*parts: RenderableType) -> None:
    """Text and tables on standard output; a table too wide for the terminal is never cut."""
    console = _console("stdout")
    width = console.width if console.is_terminal else WIDTH
    for part in parts:
        if isinstance(part, Group):
            show(*part.renderables)
        elif isinstance(part, Table):
            wide = _console("stdout", width=10**4)
            width_of_table = max(width, Measurement.get(wide, wide.options, part).maximum)
            _console("stdout", width=width_of_table).print(part)
        else:
            _console("stdout", width=width).print(part)


def page(text: str) -> None:
    """A page of text on standard output, as it is."""
    _Stream("stdout").write(text + "\n")


def page_width() -> int:
    """Columns that a page of help may take."""
    return min(max(shutil.get_terminal_size().columns, 72), 110)
