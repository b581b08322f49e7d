"""The skeleton of every command: flags, words, --help, errors in one line, exit status."""

from __future__ import annotations

import signal
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from experiments.commands import console
from experiments.commands.flags import Parsed, flags_help, parse
from experiments.config import PATH
from experiments.runs.folder import RunFolderError

DISK_ERROR = 1  # exit status
INTERRUPTED = 128 + signal.SIGINT


class Command(NamedTuple):
    """What is run by a name."""

    name: str  # first in its errors
    typed: str  # how it is called
    words: str  # behind that, but for flags: "RUN_A RUN_B", "RUN [RUN ...]" or ""
    about: str  # one line
    more: str  # what --help says besides
    options: tuple[type, ...]  # dataclasses of settings, which become flags
    run: Callable[[Parsed], int]  # returns the exit status
    groups: Mapping[str, Sequence[str]] = {}  # heading in --help to flags
    notes: Callable[[], Mapping[str, str]] = dict  # what stands for {NAME} in their descriptions
    examples: Sequence[str] = ()


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
    except KeyboardInterrupt:  # before the first step, or a second one
        return console.fail(command.name, "interrupted", INTERRUPTED)


def folders(parsed: Parsed) -> list[Path]:
    """The words as paths of run folders.

    Raises:
      ValueError: one of them can't be a path.
    """
    try:
        return [PATH.from_text(word) for word in parsed.words]
    except ValueError:
        raise ValueError(f"RUN: {parsed.words}, each must be {PATH.what}") from None


def disk_error(error: OSError) -> str:
    """What the system refused, and of which file."""
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)


def help_page(command: Command, width: int) -> str:
    """What --help prints."""
    paragraphs = [command.about, *command.more.split("\n\n")]
    parts = [
        f"usage: {' '.join(filter(None, [command.typed, command.words, '[--flag=value ...]']))}",
        *(textwrap.fill(paragraph, width) for paragraph in paragraphs if paragraph),
        flags_help(command.options, command.groups, command.notes(), width),
    ]
    if command.examples:
        parts.append("\n".join(["Examples:", *(f"  {example}" for example in command.examples)]))
    return "\n\n".join(parts)


def _check_words(command: Command, words: Sequence[str]) -> None:
    wanted = command.words.replace("[", "").split()
    least = len(command.words.partition("[")[0].split())
    if len(words) < least or (len(words) > least and "..." not in command.words):
        if not wanted:
            switches = ("true", "false", "yes", "no", "0", "1")
            hint = "; a switch is --flag, --noflag or --flag=false"
            raise ValueError(
                f"stray word {words[0]!r}: flags are written --name=value"
                + hint * (words[0].lower() in switches)
            )
        raise ValueError(f"give {command.words}: {command.typed} {command.words}")
