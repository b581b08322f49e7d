"""How the time of a run grows: with its steps, its lanes and its tokens, over a decade each.

    python -m benchmarks.growth --out=results/benchmarks

Runs as `train.py` makes them, every row written, without evaluations; the time is that from the
first step on, without compiling. All sizes take turns, round by round; dots are rounds, the line is
proportional growth through the median of the largest.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import Progress

from benchmarks.rounds import publish, spread
from experiments.config import RecordOptions, RunConfig, TrainConfig, resolve
from experiments.figures import style
from experiments.runs.record import record

BASE = resolve(
    TrainConfig(scale=("none", "sqrt"), steps=200, num_seeds=2, batch_size=32, eval_every=10**6)
)


class Sweep(NamedTuple):
    """One thing that grows."""

    name: str
    sizes: dict[int, RunConfig]


SWEEPS = (
    Sweep("steps", {n: dataclasses.replace(BASE, steps=n) for n in (200, 400, 1000, 2000)}),
    Sweep("lanes", {2 * n: dataclasses.replace(BASE, num_seeds=n) for n in (1, 2, 5, 10)}),
    Sweep(
        "tokens per batch",
        {16 * n: dataclasses.replace(BASE, batch_size=n) for n in (16, 32, 64, 160)},
    ),
)


Times = dict[int, list[float]]  # seconds of each round, by size


def seconds(config: RunConfig) -> float:
    """From the first step of a run to its end."""
    times: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        options = RecordOptions(Path(folder) / "run", figures=False)
        record(
            config,
            options,
            watch=lambda result: times.append(time.perf_counter()),
            say=lambda line: None,
        )
    return times[-1] - times[0]


def measure(rounds: int) -> dict[str, Times]:
    """All sizes in turn, round by round, after once to compile."""
    measured: dict[str, Times] = {sweep.name: {n: [] for n in sweep.sizes} for sweep in SWEEPS}
    configs = [(sweep.name, *pair) for sweep in SWEEPS for pair in sweep.sizes.items()]
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("measuring", total=len(configs) * (rounds + 1))
        for number in range(rounds + 1):
            for name, size, config in configs:
                if number == 0:
                    seconds(dataclasses.replace(config, steps=20))
                else:
                    measured[name][size].append(seconds(config))
                progress.advance(bar)
    return measured


def draw(measured: dict[str, Times], path: Path) -> None:
    """Seconds of every round against size, beside proportional growth."""
    figure, axes = style.new_figure(1, len(measured), width=4.0, height=3.2)
    for ax, (name, times) in zip(axes.flat, measured.items(), strict=True):
        sizes = np.array(list(times))
        medians = np.array([statistics.median(values) for values in times.values()])
        slope = np.polyfit(np.log(sizes), np.log(medians), 1)[0]
        for size, values in times.items():
            ax.plot([size] * len(values), values, "o", color=style.BLUE, ms=4)
        ax.plot(sizes, medians[-1] * sizes / sizes[-1], color=style.GREY, linewidth=1)
        ax.set(xscale="log", yscale="log", xlabel=name, title=f"slope {slope:.2f}")
        ax.set_xticks(sizes, [str(size) for size in sizes])
        ax.minorticks_off()
    axes.flat[0].set_ylabel("seconds")
    style.save(figure, path)


def main() -> None:
    """Measure, draw, print a table."""
    parser = argparse.ArgumentParser(description="How the time of a run grows.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"))
    options = parser.parse_args()
    measured = measure(options.rounds)
    draw(measured, options.out / "growth")
    publish(
        options.out / "growth.md",
        "Growth of a run's time",
        ("grows", "to", "seconds", "ms per unit"),
        [
            (name, str(size), spread(values), f"{1e3 * statistics.median(values) / size:.3g}")
            for name, times in measured.items()
            for size, values in times.items()
        ],
        f"Median (range) of {options.rounds} rounds; {len(BASE.lane_names())} lanes of "
        f"{BASE.steps} steps with {BASE.batch_size} × 16 tokens where nothing else is said.\n\n"
        "![Seconds against steps, lanes and tokens, with proportional growth](growth.png)",
    )


if __name__ == "__main__":
    main()
