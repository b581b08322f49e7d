"""`python -m experiments STUDY`: runs a study, or all of them, and shows what was found."""

from __future__ import annotations

import dataclasses
import functools
import re
import shlex
import time
from collections.abc import Iterable
from pathlib import Path

from experiments.commands import console, startup
from experiments.commands.command import Command
from experiments.commands.flags import Parsed, definitions, flags_help
from experiments.settings import PATH, SWITCH, TEXTS, setting
from experiments.studies import STUDIES, load

STUDY_RUNS = Path("runs/studies")
OF_CELLS = ("learning_rate", "convergence")
ALL, EVERY = "all", "every study, each in a folder of its own under --out"


@dataclasses.dataclass(frozen=True)
class StudyOptions:
    """The flags of a study."""

    out: Path | None = setting(None, "folder to write to", PATH, f"{STUDY_RUNS}/NAME")
    quick: bool = setting(False, "a smaller version, in seconds", SWITCH)
    seeds: int | None = setting(
        None, "how many seeds", default_text="the study's own number", bounds=(2, 10**6)
    )
    cells: tuple[str, ...] | None = setting(
        None, f"cells of {' and '.join(OF_CELLS)} to run", TEXTS, "all"
    )


def study_command(name: str) -> Command:
    """The command that runs a study, or ALL."""
    about = EVERY
    if name != ALL:
        about = f"{STUDIES[name].about} (takes {STUDIES[name].takes} on 2 cores)"
    return Command(
        name=name,
        typed=f"python -m experiments {name}",
        words="",
        about=f"{about[0].upper()}{about[1:]}.\n\nPrints its answer and tables, and writes "
        "report.md, summary.json and figures/ to --out.",
        options=(StudyOptions,),
        run=functools.partial(run_studies, name),
    )


def run_studies(name: str, parsed: Parsed) -> int:
    """Run a study, or ALL, one after the other; returns the exit status."""
    options = parsed.pick(StudyOptions)
    if options.cells is not None and name not in OF_CELLS:
        raise ValueError(f"cells: only {' and '.join(OF_CELLS)} have cells")
    if options.out is not None and options.out.exists() and not options.out.is_dir():
        raise ValueError(f"out: {options.out} is a file, must be a folder")
    startup.use_compilation_cache(console.say)
    import jax

    startup.check_machine(jax.devices)
    jax.config.update("jax_default_matmul_precision", "highest")
    typed = shlex.join(["python", "-m", "experiments", name, *parsed.typed])
    for study in STUDIES if name == ALL else [name]:
        folder = options.out or STUDY_RUNS
        if name == ALL or options.out is None:
            folder = folder / study
        _run_study(study, folder, options, typed)
    return 0


def _run_study(study: str, folder: Path, options: StudyOptions, typed: str) -> None:
    from experiments.studies import common

    started = time.monotonic()
    request = common.Request(
        out=folder,
        seeds=options.seeds,
        quick=options.quick,
        cells=options.cells or (),
        say=lambda line: console.say(f"{study}: {line}"),
    )
    findings = load(study)(request)
    common.write(findings, folder, typed, options.quick)
    console.show(common.terminal(findings))
    console.say(f"{study}: {time.monotonic() - started:.0f} s, written to {folder}")


def list_page(tools: Iterable[Command], width: int) -> str:
    """What there is to run: a line and a time for each."""
    named = {name: f"{study.about} ({study.takes})" for name, study in STUDIES.items()}
    named[ALL] = EVERY
    others = {f"{tool.name} {tool.words}": re.split(r"[.:;] ", tool.about)[0] for tool in tools}
    column = max(map(len, named))
    return "\n\n".join(
        [
            "usage: python -m experiments NAME [--flag=value ...]",
            "Studies, with the time that each takes on 2 cores\n"
            f"{definitions(named, width, column)}",
            flags_help((StudyOptions,), {}, {}, width),
            f"Tools (NAME --help says more)\n{definitions(others, width, column)}",
        ]
    )
