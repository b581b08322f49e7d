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
from experiments.config import RecordOptions, TrainConfig
from experiments.figures import style
from experiments.runs import run

BASE = TrainConfig(scale=("none", "sqrt"), steps=200, num_seeds=2, batch_size=32, eval_every=10**6)


class Sweep(NamedTuple):
    """One thing that grows."""

    name: str
    sizes: dict[int, TrainConfig]


SWEEPS = (
    Sweep("steps", {n: dataclasses.replace(BASE, steps=n) for n in (200, 400, 1000, 2000)}),
    Sweep("lanes", {2 * n: dataclasses.replace(BASE, num_seeds=n) for n in (1, 2, 5, 10)}),
    Sweep(
        "tokens per batch",
        {16 * n: dataclasses.replace(BASE, batch_size=n) for n in (16, 32, 64, 160)},
    ),
)


def seconds(config: TrainConfig) -> float:
    """From the first step of a run to its end."""
    times: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        options = RecordOptions(Path(folder) / "run", figures=False)
        run.record(config, options, watch=lambda result: times.append(time.perf_counter()))
    return times[-1] - times[0]


def main() -> None:
    """Measure, draw, print a table."""
    parser = argparse.ArgumentParser(description="How the time of a run grows.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"))
    options = parser.parse_args()
    measured = {sweep.name: {size: [] for size in sweep.sizes} for sweep in SWEEPS}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        count = sum(len(sweep.sizes) for sweep in SWEEPS)
        bar = progress.add_task("measuring", total=count * (options.rounds + 1))
        for number in range(options.rounds + 1):
            for sweep in SWEEPS:
                for size, config in sweep.sizes.items():
                    if number == 0:  # compiles
                        seconds(dataclasses.replace(config, steps=20))
                    else:
                        measured[sweep.name][size].append(seconds(config))
                    progress.advance(bar)
    figure, axes = style.new_figure(1, len(SWEEPS), width=4.0, height=3.2)
    rows = []
    for ax, (name, times) in zip(axes.flat, measured.items(), strict=True):
        sizes = np.array(list(times))
        medians = np.array([statistics.median(values) for values in times.values()])
        slope = np.polyfit(np.log(sizes), np.log(medians), 1)[0]
        for size, values in times.items():
            ax.plot([size] * len(values), values, "o", color=style.ARM_COLOURS["sqrt"], ms=4)
            per_unit = 1e3 * statistics.median(values) / size
            rows.append((name, str(size), spread(values), f"{per_unit:.3g}"))
        ax.plot(sizes, medians[-1] * sizes / sizes[-1], color=style.GREY, linewidth=1)
        ax.set(xscale="log", yscale="log", xlabel=name, title=f"slope {slope:.2f}")
        ax.set_xticks(sizes, [str(size) for size in sizes])
        ax.minorticks_off()
    axes.flat[0].set_ylabel("seconds")
    style.save(figure, options.out / "growth")
    publish(
        options.out / "growth.md",
        "Growth of a run's time",
        ("grows", "to", "seconds", "ms per unit"),
        rows,
        f"Median (range) of {options.rounds} rounds; {len(BASE.scale) * BASE.num_seeds} lanes of "
        f"{BASE.steps} steps with {BASE.batch_size} × 16 tokens where nothing else is said.\n\n"
        "![Seconds against steps, lanes and tokens, with proportional growth](growth.png)",
    )


if __name__ == "__main__":
    main()
