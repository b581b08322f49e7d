"""Studies and tools: `python -m experiments` lists them, `python -m experiments NAME` runs one."""

from __future__ import annotations

import dataclasses
import difflib
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from experiments.commands import compare, evaluate, plot, startup
from experiments.commands.flags import fail, parse
from experiments.studies import STUDIES, load

COMMAND = "python -m experiments"
STUDY_RUNS = Path("runs/studies")


@dataclasses.dataclass(frozen=True)
class StudyOptions:
    """The flags of a study."""

    out: Path | None = dataclasses.field(
        default=None, metadata={"help": "folder to write to", "default": f"{STUDY_RUNS}/NAME"}
    )
    quick: bool = dataclasses.field(
        default=False, metadata={"help": "a smaller version, in seconds", "default": None}
    )
    seeds: int | None = dataclasses.field(
        default=None, metadata={"help": "how many seeds", "default": "the study's own number"}
    )
    cells: tuple[str, ...] | None = dataclasses.field(
        default=None,
        metadata={"help": "cells of learning_rate and convergence to run", "default": "all"},
    )


class Command(NamedTuple):
    """A tool that is no study."""

    usage: str  # after the name
    about: str  # one line
    run: Callable[[Sequence[str]], int]  # gets argv from the name on, returns the exit status


COMMANDS = {
    "compare": Command(compare.USAGE, compare.ABOUT, compare.compare_command),
    "evaluate": Command(evaluate.USAGE, evaluate.ABOUT, evaluate.evaluate_command),
    "plot": Command(plot.USAGE, plot.ABOUT, plot.plot_command),
}


def main(argv: Sequence[str]) -> int:
    """Run the command line; returns the exit status."""
    if len(argv) == 1 or argv[1] in ("--help", "-h", "help"):
        print(help_text())
        return 0
    name = argv[1]
    if name in COMMANDS:
        return COMMANDS[name].run(argv[1:])
    if name.startswith("-"):
        fail(COMMAND, f"{name} comes too early: {COMMAND} NAME [--flag=value ...]")
    choices = [*STUDIES, "all", *COMMANDS]
    if name != "all" and name not in STUDIES:
        nearest = difflib.get_close_matches(name.lower(), choices, n=1, cutoff=0.4)
        hint = f" (nearest: {nearest[0]})" if nearest else ""
        fail(COMMAND, f"unknown study {name!r}{hint}; choose from {', '.join(choices)}")
    try:
        parsed = parse(argv[1:], StudyOptions)
        if parsed is None:
            print(help_text())
            return 0
        options = parsed.pick(StudyOptions)
        if options.seeds is not None and not 2 <= options.seeds <= 10**6:
            raise ValueError(f"seeds: {options.seeds}, must be from 2 to 1000000")
        if options.cells is not None and name not in ("learning_rate", "convergence"):
            raise ValueError("cells: only learning_rate and convergence have cells")
        if options.out is not None and options.out.exists() and not options.out.is_dir():
            raise ValueError(f"out: {options.out} is a file, must be a folder")
    except ValueError as error:
        fail(COMMAND, error)
    return _run_studies(name, options, " ".join([COMMAND, *argv[1:]]))


def help_text() -> str:
    """What there is to run: a line and a time for each."""
    width = max(map(len, (*STUDIES, *COMMANDS, "all"))) + 2
    lines = [
        f"usage: {COMMAND} NAME [--out=DIR] [--quick] [--seeds=N] [--cells=CELL,...]",
        "",
        "Studies, with the time each takes on 2 cores:",
        *(f"  {name:<{width}}{s.about} ({s.takes})" for name, s in STUDIES.items()),
        f"  {'all':<{width}}every study, each in a folder of its own under --out",
        "",
        *textwrap.wrap(
            "A study prints its answer and tables, and writes report.md, summary.json and figures/ "
            f"to --out (default: {STUDY_RUNS}/NAME). --quick is a smaller version, in seconds; "
            "--seeds=N sets the number of seeds; --cells runs some cells of learning_rate or "
            "convergence, which go on where they stopped.",
            100,
        ),
    ]
    if COMMANDS:
        lines += ["", "Tools (NAME --help says more):"]
        lines += [f"  {f'{name} {c.usage}':<36}{c.about}" for name, c in COMMANDS.items()]
    return "\n".join(lines)


def _run_studies(name: str, options: StudyOptions, command: str) -> int:
    import jax
    from rich.console import Console

    from experiments.studies import common

    startup.use_compilation_cache(startup.default_cache())
    jax.config.update("jax_default_matmul_precision", "highest")
    out = Console(highlight=False, width=None if sys.stdout.isatty() else 130)
    err = Console(stderr=True, highlight=False, soft_wrap=True)
    names = list(STUDIES) if name == "all" else [name]
    for study in names:
        folder = options.out or STUDY_RUNS
        if name == "all" or options.out is None:
            folder = folder / study
        started = time.monotonic()
        request = common.Request(
            out=folder,
            seeds=options.seeds,
            quick=options.quick,
            cells=options.cells or (),
            say=lambda line, study=study: err.print(f"{study}: {line}", markup=False),
        )
        try:
            findings = load(study)(request)
            common.write(findings, folder, command, options.quick)
        except ValueError as error:
            fail(COMMAND, f"{study}: {error}")
        except OSError as error:
            fail(COMMAND, f"{error.filename}: {error.strerror}", status=1)
        out.print(common.terminal(findings))
        err.print(f"{study}: {time.monotonic() - started:.0f} s, written to {folder}", markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
