"""The skeleton of every command: flags, words, --help, errors in one line, exit status."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from experiments.commands import console
from experiments.commands.flags import Parsed, definitions, flags_help, from_text, parse
from experiments.runs.folder import RunFolderError
from experiments.settings import PATH, SWITCH, setting

DISK_ERROR = 1  # exit status


class Command(NamedTuple):
    """What is run by a name."""

    name: str  # first in its errors
    typed: str  # how it is called
    words: str  # behind that, but for flags: "RUN_A RUN_B", "RUN [RUN ...]" or ""
    about: str  # paragraphs
    options: tuple[type, ...]  # dataclasses of settings, which become flags
    run: Callable[[Parsed], int]  # returns the exit status
    groups: Mapping[str, Sequence[str]] = {}  # of --help: heading to flags
    notes: Mapping[str, str] = {}  # what stands for {NAME} in the flags' descriptions
    lists: Callable[[], Mapping[str, Mapping[str, str]]] = dict  # heading to terms to texts
    examples: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class ReadOptions:
    """The flags of what reads runs."""

    accept_edits: bool = setting(
        False, "read what was changed on purpose since it was written; what is made says so", SWITCH
    )


def run(command: Command, argv: Sequence[str]) -> int:
    """Run a command line, argv[0] being the command; returns the exit status."""
    console.settle()
    try:
        parsed = parse(argv, *command.options)
        if parsed is None:
            console.page(help_page(command, console.page_width()))
            return 0
        _check_words(command, parsed.words)
        return command.run(parsed)
    except (ValueError, RunFolderError) as error:
        return console.fail(command.name, error)
    except OSError as error:
        return console.fail(command.name, disk_error(error), DISK_ERROR)


def folders(parsed: Parsed) -> list[Path]:
    """The words as paths of run folders.

    Raises:
      ValueError: one of them can't be one.
    """
    return [from_text("RUN", PATH, word) for word in parsed.words]


def disk_error(error: OSError) -> str:
    """What the system refused, and of which file."""
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)


def help_page(command: Command, width: int) -> str:
    """What --help prints."""
    usage = f"usage: {command.typed} {command.words} [--flag=value ...]"
    return "\n\n".join(
        [
            " ".join(usage.split()),
            *(textwrap.fill(part, width) for part in command.about.split("\n\n")),
            flags_help(command.options, command.groups, command.notes, width),
            *(
                f"{heading}\n{definitions(terms, width)}"
                for heading, terms in command.lists().items()
            ),
            *(["\n  ".join(["Examples", *command.examples])] if command.examples else []),
        ]
    )


def _check_words(command: Command, words: Sequence[str]) -> None:
    least = len(command.words.partition("[")[0].split())
    if len(words) == least or (len(words) > least and "..." in command.words):
        return
    if command.words:
        raise ValueError(f"give {command.words}: {command.typed} {command.words}")
    switches = ("true", "false", "yes", "no", "0", "1")
    hint = "; a switch is --flag, --noflag or --flag=false" * (words[0].lower() in switches)
    raise ValueError(f"stray word {words[0]!r}: flags are written --name=value{hint}")
