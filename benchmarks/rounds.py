"""Contenders measured in turn: each in a process of its own, round by round, one at a time.

The machine may be shared and its clock may move, so a time alone says little. What counts is the
ratio within a round, whose median and range over rounds are reported.
"""

from __future__ import annotations

import multiprocessing
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from experiments.engine.lanes import num_cores

# Does its work once and says how much it was and how long it took: (units, seconds).
Work = Callable[[], tuple[float, float]]
# Prepares and warms up, in its own process.
Contender = Callable[..., Work]


def measure(
    contenders: Mapping[str, tuple[Contender, tuple]], rounds: int
) -> dict[str, list[float]]:
    """Units per second of each contender in each round.

    Args:
      contenders: name to a function of a module, and its arguments.
      rounds: how often each of them works, after once to warm up.
    """
    context = multiprocessing.get_context("spawn")
    workers: dict[str, Any] = {}
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    try:
        with Progress(console=Console(stderr=True), transient=True) as progress:
            bar = progress.add_task("preparing", total=len(contenders) * (rounds + 1))
            for name, (contender, arguments) in contenders.items():
                progress.update(bar, description=f"preparing {name}")
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs, contender, arguments))
                process.start()
                theirs.close()  # so that its death is heard of here
                workers[name] = (process, ours)
                ours.recv()
                progress.advance(bar)
            for _ in range(rounds):
                for name, (_, connection) in workers.items():
                    progress.update(bar, description=name)
                    connection.send(True)
                    units, seconds = connection.recv()
                    rates[name].append(units / seconds)
                    time.sleep(0.3)  # thread pools spin for a while
                    progress.advance(bar)
    except EOFError:
        raise SystemExit("a contender died; what it said is above") from None
    finally:
        for process, connection in workers.values():
            connection.close()
            process.join()
    return rates


def _serve(connection: Any, contender: Contender, arguments: tuple) -> None:
    work = contender(*arguments)
    work()
    connection.send(True)
    while True:
        try:
            connection.recv()
        except EOFError:
            return
        connection.send(work())


def ratios(rates: Mapping[str, Sequence[float]], of: str, to: str) -> list[float]:
    """The ratio of two contenders in each round."""
    return [a / b for a, b in zip(rates[of], rates[to], strict=True)]


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """Median and range."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:{form}} ({low:{form}}–{high:{form}})"


def machine() -> str:
    """What the figures were measured on."""
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [x for x in cpuinfo.read_text().splitlines() if x.startswith("model name")]
        model = names[0].split(": ", 1)[1] if names else model
    return (
        f"{num_cores()} cores of {model or platform.machine()}, "
        f"Python {platform.python_version()}, jax {jax.__version__}"
    )


def publish(
    path: Path | None, title: str, header: Sequence[str], rows: Sequence[Sequence[str]], notes: str
) -> None:
    """Print a table, and write it as a page of markdown if a path is given."""
    table = Table(title=title, title_justify="left", caption=notes, caption_justify="left")
    for i, name in enumerate(header):
        table.add_column(name, justify="right" if i else "left")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 130).print(table)
    if path is None:
        return
    command = " ".join(["python -m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]])
    lines = [
        f"# {title}",
        f"```sh\n{command}\n```",
        f"Measured on {machine()}.",
        "\n".join(
            f"| {' | '.join(row)} |"
            for row in (header, ["---", *["---:"] * (len(header) - 1)], *rows)
        ),
        notes,
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join(lines) + "\n")
