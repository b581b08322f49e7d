"""Contenders measured in turn: each in processes of its own, round by round, one at a time.

The machine may be shared and its clock may move, so a time alone says little. What counts is the
ratio within a round, whose median and range over rounds are reported.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from experiments.engine.devices import num_cores

# Works for about so many seconds; says how much it did and how long it took: (units, seconds).
Work = Callable[[float], tuple[float, float]]

_SPAWN: Any = multiprocessing.get_context("spawn")


class Contender(NamedTuple):
    """Who takes part."""

    prepare: Callable[..., Work]  # of a module; prepares and warms up, in a process of its own
    arguments: tuple
    processes: int = 1  # alike, all at work at once, each on a share of the cores of its own


class Team(contextlib.AbstractContextManager):
    """A contender's processes, which stay until the end."""

    def __init__(self, contender: Contender):
        self._processes, self._connections = [], []
        barrier = _SPAWN.Barrier(contender.processes)
        for number in range(contender.processes):
            ours, theirs = _SPAWN.Pipe()
            arguments = (theirs, barrier, contender.prepare, contender.arguments)
            process = _SPAWN.Process(target=_serve, args=arguments)
            with share_of_cores(number, contender.processes):
                process.start()
            theirs.close()  # so that its death is heard of here
            self._processes.append(process)
            self._connections.append(ours)
        self._replies()

    def rate(self, seconds: float) -> float:
        """Units per second of all processes together, at work at once for about so many seconds."""
        for connection in self._connections:
            connection.send(seconds)
        return sum(units / seconds for units, seconds in self._replies())

    def _replies(self) -> list[Any]:
        try:
            return [connection.recv() for connection in self._connections]
        except EOFError:
            raise SystemExit("a contender died; what it said is above") from None

    def __exit__(self, *exception) -> None:
        self.close()

    def close(self) -> None:
        """The processes leave; a second time does nothing."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join()


@contextlib.contextmanager
def share_of_cores(number: int, shares: int) -> Generator[None]:
    """A process that is started here has this share of the cores to itself, from its first line.

    Libraries look once, when they are loaded, how many threads there should be. Where a process
    can't choose its cores (macOS), all have all of them.
    """
    if shares == 1 or not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[number::shares])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def _serve(connection: Any, barrier: Any, prepare: Callable[..., Work], arguments: tuple) -> None:
    work = prepare(*arguments)
    connection.send(True)
    with contextlib.suppress(EOFError):
        while True:
            seconds = connection.recv()
            barrier.wait()
            connection.send(work(seconds))


def measure(
    contenders: Mapping[str, Contender], rounds: int, seconds: float = 2.0
) -> dict[str, list[float]]:
    """Units per second of each contender in each round.

    Args:
      contenders: by name.
      rounds: how often each of them works, after it has warmed up.
      seconds: how long each time, about.
    """
    with contextlib.ExitStack() as stack:
        return take_turns(start(stack, contenders), rounds, seconds)


def start(stack: contextlib.ExitStack, contenders: Mapping[str, Contender]) -> dict[str, Team]:
    """Their teams, prepared one after the other; they leave when the stack is closed."""
    teams = {}
    with _progress() as progress:
        for name in progress.track(contenders, description="preparing"):
            teams[name] = stack.enter_context(Team(contenders[name]))
    return teams


def take_turns(teams: Mapping[str, Team], rounds: int, seconds: float) -> dict[str, list[float]]:
    """Units per second of each team in each round; one is at work at a time."""
    rates: dict[str, list[float]] = {name: [] for name in teams}
    with _progress() as progress:
        bar = progress.add_task("measuring", total=len(teams) * rounds)
        for _ in range(rounds):
            for name, team in teams.items():
                rates[name].append(team.rate(seconds))
                time.sleep(0.3)  # thread pools spin for a while
                progress.advance(bar)
    return rates


def _progress() -> Progress:
    return Progress(console=Console(stderr=True), transient=True)


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
    versions = [
        f"{package} {importlib.metadata.version(package)}"
        for package in ("jax", "torch")
        if importlib.util.find_spec(package)
    ]
    return (
        f"{num_cores()} cores of {model or platform.machine()}, "
        f"Python {platform.python_version()}, {', '.join(versions)}"
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
