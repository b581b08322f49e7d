"""Tuning the learning rate of every arm of a cell, on the same grid, budget and seeds.

What ranks the rates is the loss area: the mean over the budget of min(ℓ, ℓ₀), ℓ the held-out loss
and ℓ₀ its value before training; it rewards speed and a good end alike, and tells rates apart
where none of them reaches the threshold. The grid steps by half a decade and is extended, for all
arms alike, until each arm's best rate has a neighbour on both sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from experiments.analysis.sweeps import clipped_loss_area
from experiments.arms import make_arm
from experiments.studies.convergence.cells import (
    Cell,
    CellRuns,
    LaneKey,
    MakeArm,
    Watch,
    ignore,
    run_cell,
)

# Half-decades n of the learning rate 10^(n/2), before the grid is extended.
GRIDS = {"adam": range(-8, -3), "adamw": range(-8, -3), "sgd": range(-4, 1)}
EXTENSION = 2  # most half-decades that a grid is extended by, on either side
TUNING_SEEDS = (1000, 1001)  # the test seeds start at 0


class Tuning(NamedTuple):
    """A tuned cell: A arms, R rates, S seeds."""

    arms: tuple[str, ...]
    rates: tuple[float, ...]
    seeds: tuple[int, ...]
    area: NDArray[np.float64]  # [A, R, S]: loss area, nats
    loss: NDArray[np.float64]  # [A, R, S]: held-out loss at the end of the budget, nats
    initial_loss: NDArray[np.float64]  # [A, S], nats
    best: dict[str, float]  # each arm's best rate
    interior: dict[str, bool]  # whether it has a neighbour on both sides


def rate(half_decade: int) -> float:
    """10^(n/2), to three digits so that it reads as it is used."""
    return float(f"{10 ** (half_decade / 2):.3g}")


def tune(
    cell: Cell,
    path: Path,
    *,
    seeds: Sequence[int] = TUNING_SEEDS,
    grid: range | None = None,
    arms: MakeArm = make_arm,
    watch: Watch = ignore,
) -> Tuning:
    """Run the grid of a cell, extending it until every arm's best rate is interior.

    Args:
      cell: its arms are tuned.
      path: the cell's file.
      seeds: the tuning seeds.
      grid: half-decades to begin with; default: the optimizer's.
      arms: the table of arms.
      watch: as of `run_cell`.
    """
    first = GRIDS[cell.config.optimizer] if grid is None else grid
    low, high = first.start, first.stop
    done = 0

    def only_new(steps: int) -> None:  # lanes of an earlier round are found in the file again
        nonlocal done
        fresh, done = max(steps - done, 0), max(done - steps, 0)
        if watch:
            watch(fresh)

    while True:
        rates = tuple(map(rate, range(low, high)))
        keys = [LaneKey(arm, r, seed) for arm in cell.arms for r in rates for seed in seeds]
        runs = run_cell(cell, keys, path, arms=arms, watch=watch and only_new)
        done = len(keys) * int(runs.steps[-1])
        tuning = _tuning(cell.arms, rates, tuple(seeds), runs)
        best = [tuning.best[arm] for arm in cell.arms]
        lower = rates[0] in best and low > first.start - EXTENSION
        higher = rates[-1] in best and high < first.stop + EXTENSION
        if not (lower or higher):
            return tuning
        low, high = low - lower, high + higher


def _tuning(
    arms: tuple[str, ...], rates: tuple[float, ...], seeds: tuple[int, ...], runs: CellRuns
) -> Tuning:
    shape = (len(arms), len(rates), len(seeds))
    counted = runs.diverged_as_untrained()
    area = clipped_loss_area(counted.steps, counted.loss, counted.loss[:, 0])
    area = area.reshape(shape)
    place = np.argmin(area.mean(axis=-1), axis=-1)
    return Tuning(
        arms=arms,
        rates=rates,
        seeds=seeds,
        area=area,
        loss=counted.loss[:, -1].reshape(shape).astype(np.float64),
        initial_loss=counted.loss[:, 0].reshape(shape)[:, 0].astype(np.float64),
        best={arm: rates[i] for arm, i in zip(arms, place, strict=True)},
        interior={arm: 0 < i < len(rates) - 1 for arm, i in zip(arms, place.tolist(), strict=True)},
    )
