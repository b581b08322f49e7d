"""Studies and tools: `python -m experiments` lists them, `python -m experiments NAME` runs one."""

from __future__ import annotations

import sys
from collections.abc import Sequence

# Imports are late: Ctrl-C during them is one line, too.


def main(argv: Sequence[str]) -> int:
    """Run the command line; returns the exit status."""
    from attention.names import unknown
    from experiments.commands import compare, console, evaluate, plot, studies
    from experiments.commands.command import run
    from experiments.studies import STUDIES

    tools = {c.COMMAND.name: c.COMMAND for c in (compare, evaluate, plot)}
    name = argv[1] if len(argv) > 1 else "--help"
    if name in tools:
        return run(tools[name], argv[1:])
    if name in STUDIES or name == studies.ALL:
        return run(studies.study_command(name), argv[1:])
    console.settle()
    if name in ("--help", "-h", "help"):
        console.page(studies.list_page(tools.values(), console.page_width()))
        return 0
    if name.startswith("-"):
        return console.fail("experiments", f"{name} comes too early: the NAME of a study is first")
    return console.fail("experiments", unknown("study", name, [*STUDIES, studies.ALL, *tools]))


if __name__ == "__main__":
    from experiments.commands.startup import end_at_interrupt

    end_at_interrupt("experiments")
    sys.exit(main(sys.argv))
