"""Does scaling train faster, and why? The tuned, paired comparison, cell by cell.

Protocol, fixed before the results:

A cell is a task, an optimizer and a d_k, at a budget of steps; model width, value width, length,
batch size and everything else are the same in all cells. Its arms differ in what q·k is multiplied
by and in how W_q and W_k start (`arms.py`); on a seed they share weights (but for that factor)
and batches, so seeds pair them.

(i) Tuning, on two seeds (1000, 1001) that are not used again: the learning rate of each arm, as in
    the study `learning_rate`. Same grid, same budget, same seeds for every arm.
(ii) Test, on 12 fresh seeds (0 to 11): every arm at the common rate (1e-3 for Adam, 0.1 for SGD
    with momentum) and at its own best rate of (i).

Primary metric: steps until the held-out accuracy is at least 90 % at three evaluations in a row,
the first of them counting. A lane that does not get there is censored at the budget; one that
diverges (a loss or gradient that is not finite) counts as untrained from there on; none is dropped.
Every arm is compared with `sqrt`, at the common rate and each at its own best rate: mean difference
of the times cut at the budget, 95 % BCa bootstrap interval, two-sided sign-flip permutation test
(exact; the smallest p for 12 pairs is 2/4096), Wilcoxon's signed-rank test as a second opinion,
Holm's correction over all these comparisons of all cells. The log-rank test ignores the pairing and
is shown beside them. Equivalence is claimed only by two one-sided t tests at 5 % within margins of
5 % of the budget for the times and 1 percentage point for the final accuracy.
Secondary: accuracy and loss at the end of the budget, loss area, entropy at the end, gradient
spikes per 1000 steps (a gradient norm above 5 times the median of the 50 before it, or not finite).

The plane (`recall-adam-64` only): `sqrt` with W_q and W_k started d_k^a larger and their learning
rate d_k^b larger, a and b from -1/4 to 1/4, at the common rate on three of the test seeds. Up to
Adam's ε every arm is a point of it (see `PLANE_POINTS`): the two exponents are all that a scale
changes.
"""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from attention.scale import score_rule
from experiments.arms import Arm, make_arm
from experiments.config import LEARNING_RATES, TrainConfig
from experiments.studies.common import Findings, Request
from experiments.studies.convergence.cells import (
    ARMS,
    Cell,
    CellRuns,
    LaneKey,
    Watch,
    cell_path,
    ignore,
    load_cell,
    make_cell,
    progress,
    run_cell,
)
from experiments.studies.convergence.figures import Plane
from experiments.studies.convergence.outcomes import CellResult, choices, outcome
from experiments.studies.convergence.report import report
from experiments.studies.convergence.tuning import GRIDS, TUNING_SEEDS, tune

STEPS = {"recall": 1000, "sort": 4000, "histogram": 3000}  # long enough for the slow arm
D_K = (64, 4, 256, 16)
FIRST_ARMS = ("sqrt", "none", "fold", "hot")
ALL_ARMS = (*FIRST_ARMS, "mup")

# Task, optimizer, d_k, steps, arms; in the order they are run.
CELLS = (
    *(("recall", "adam", d_k, 1000, FIRST_ARMS) for d_k in (64, 256, 4)),
    *(("sort", "adam", d_k, 4000, FIRST_ARMS) for d_k in (64, 4, 256)),
    *(("histogram", "adam", d_k, 3000, ALL_ARMS) for d_k in (64, 4, 256)),
    *((task, "adam", 16, steps, ALL_ARMS) for task, steps in STEPS.items()),
    *((task, "sgd", d_k, steps, ALL_ARMS) for task, steps in STEPS.items() for d_k in D_K),
)
QUICK_CELLS = (
    ("recall", "adam", 64, 200, FIRST_ARMS),
    ("recall", "adam", 4, 200, FIRST_ARMS),
    ("sort", "adam", 64, 200, FIRST_ARMS),
)

PLANE = "plane"  # its name among the cells to run
PLANE_CELL = "recall-adam-64"
PLANE_POWERS = (-0.25, -0.125, 0.0, 0.125, 0.25)


def _plane_point(name: str, d_k: int) -> tuple[float, float]:
    """Where an arm lies in the plane: (power of the initial scale, power of the learning rate).

    A multiplier d_k^m is the same as 1/√d_k with W_q and W_k times d_k^(m/2 + 1/4), which makes
    them start, and Adam's steps move them, by that much further.
    """
    arm = make_arm(name, d_k)
    multiplier, init = (
        round(math.log(number, d_k), 12) for number in (arm.rule.multiplier, arm.query_key_init)
    )
    return multiplier / 2 + 0.25 + init, multiplier / 2 + 0.25


PLANE_POINTS = {name: _plane_point(name, 64) for name in ARMS}


def plane_arm(init: float, rate: float) -> str:
    """The name of a point of the plane."""
    return f"plane {init:+g} {rate:+g}"


def make_plane_arm(name: str, d_k: int) -> Arm:
    """The arm at the point of the plane that has this name."""
    init, rate = map(float, name.split()[1:])
    sqrt = score_rule("sqrt", d_k)
    return Arm(name, "a point of the plane", "", sqrt, d_k**init, d_k**rate)


class Protocol(NamedTuple):
    """What is run: everything of the docstring that `--quick` makes smaller."""

    cells: tuple[Cell, ...]  # in the order they are run
    seeds: int  # test seeds, from 0
    tuning_seeds: tuple[int, ...]
    grids: dict[str, range]  # by optimizer: half-decades
    plane_powers: tuple[float, ...]
    plane_seeds: int  # the first ones of the test seeds
    quick: bool


def protocol(*, quick: bool = False, seeds: int | None = None) -> Protocol:
    """The protocol, or the small one that shows every part of it in a few minutes.

    Args:
      quick: the small one.
      seeds: test seeds; default 12, or 3 when quick.
    """
    cells = QUICK_CELLS if quick else CELLS
    return Protocol(
        cells=tuple(
            make_cell(
                TrainConfig(
                    task=task,
                    optimizer=optimizer,
                    d_k=d_k,
                    steps=steps,
                    eval_every=max(10, steps // 200),
                    eval_size=128,
                ),
                arms,
            )
            for task, optimizer, d_k, steps, arms in cells
        ),
        seeds=seeds or (3 if quick else 12),
        tuning_seeds=TUNING_SEEDS[:1] if quick else TUNING_SEEDS,
        grids={name: range(g.start + quick, g.stop - quick) for name, g in GRIDS.items()},
        plane_powers=PLANE_POWERS[::2] if quick else PLANE_POWERS,
        plane_seeds=1 if quick else 3,
        quick=quick,
    )


def test_keys(arms: Sequence[str], rates: dict[str, float], seeds: int) -> list[LaneKey]:
    """The test lanes of arms, each at its rate."""
    return [LaneKey(arm, rates[arm], seed) for arm in arms for seed in range(seeds)]


def run_protocol_cell(cell: Cell, plan: Protocol, out: Path, watch: Watch = ignore) -> CellResult:
    """Run what is missing of a cell: the common rate, the tuning, each arm's own best rate."""
    path, optimizer = cell_path(out, cell), cell.config.optimizer

    def by_arm(rates: dict[str, float]) -> dict[str, CellRuns]:
        runs = run_cell(cell, test_keys(cell.arms, rates, plan.seeds), path, watch=watch)
        return {arm: runs.select(test_keys([arm], rates, plan.seeds)) for arm in cell.arms}

    result = CellResult(
        cell, by_arm(dict.fromkeys(cell.arms, LEARNING_RATES[optimizer])), None, None
    )
    try:
        grid = plan.grids[optimizer]
        tuning = tune(cell, path, seeds=plan.tuning_seeds, grid=grid, watch=watch)
        return result._replace(tuning=tuning, own=by_arm(tuning.best))
    except LookupError:  # nothing was to be run
        return result


def stored_results(plan: Protocol, out: Path) -> list[CellResult]:
    """What the folder has of the protocol's cells: those with `sqrt` and another arm, sorted."""
    results = []
    for cell in plan.cells:
        runs, _ = load_cell(cell_path(out, cell))
        have = set(runs.lane_keys()) if runs else set()
        rate = LEARNING_RATES[cell.config.optimizer]
        arms = tuple(
            arm for arm in ALL_ARMS if have.issuperset(test_keys([arm], {arm: rate}, plan.seeds))
        )
        if arms[:1] == ("sqrt",) and len(arms) > 1:
            results.append(run_protocol_cell(cell._replace(arms=arms), plan, out, watch=None))
    tasks = list(STEPS)
    return sorted(
        results,
        key=lambda r: (r.cell.config.optimizer, tasks.index(r.cell.config.task), r.cell.config.d_k),
    )


def run_plane(cell: Cell, plan: Protocol, out: Path, watch: Watch = ignore) -> CellRuns:
    """Run what is missing of the plane around a cell, power by power, seed by seed."""
    rate = LEARNING_RATES[cell.config.optimizer]
    points = itertools.product(plan.plane_powers, plan.plane_powers, range(plan.plane_seeds))
    keys = [LaneKey(plane_arm(init, speed), rate, seed) for init, speed, seed in points]
    path = cell_path(out, cell).with_stem(f"{cell.name}-plane")
    return run_cell(cell, keys, path, arms=make_plane_arm, watch=watch)


def run(request: Request) -> Findings:
    """Run the protocol, or the cells of it that are asked for, and report all that has been run."""
    plan = protocol(quick=request.quick, seeds=request.seeds)
    plane_too = not request.cells or PLANE in request.cells
    names = [name for name in request.cells if name != PLANE]
    wanted = choose_cells(plan.cells, names) if names or not request.cells else []
    with progress(_model_steps(plan, wanted, plane_too)) as watch:
        for cell in wanted:
            run_protocol_cell(cell, plan, request.out, watch)
        if plane_too:
            run_plane(_plane_cell(plan), plan, request.out, watch)
    results = stored_results(plan, request.out)
    if not results:
        raise ValueError(f"cells: none of them is finished in {request.out}")
    write_csv(request.out / "results.csv", results, quick=request.quick)
    done = [result.cell.name for result in results]
    not_run = [cell.name for cell in plan.cells if cell.name not in done]
    return report(results, not_run, _stored_plane(plan, request.out), request.quick)


def _stored_plane(plan: Protocol, out: Path) -> Plane | None:
    try:
        runs = run_plane(_plane_cell(plan), plan, out, watch=None)
    except LookupError:
        return None
    return Plane(runs, plan.plane_powers, PLANE_POINTS)


CSV_HEADER = (
    "cell",
    "budget",
    "rate",
    "arm",
    "learning_rate",
    "seed",
    "steps_to_90",
    "final_accuracy",
    "final_loss",
    "loss_area",
    "normalized_entropy_at_end",
    "dead_rows_at_start",
    "spikes_per_1000_steps",
    "diverged_at",
)


def write_csv(path: Path, results: Sequence[CellResult], *, quick: bool) -> None:
    """One line a test lane; steps_to_90 is empty where it never got there.

    A quick run's file says so in its first line.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        if quick:
            file.write("# a quick run\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(CSV_HEADER)
        for result in results:
            for choice, arms in choices(result).items():
                for arm, runs in arms.items():
                    own = outcome(runs)
                    for i, seed in enumerate(runs.seed):
                        numbers = (
                            own.accuracy,
                            own.loss,
                            own.loss_area,
                            own.entropy,
                            own.dead_rows,
                            own.spikes,
                        )
                        time = int(own.times.time[i]) if own.times.reached[i] else ""
                        writer.writerow(
                            (
                                result.cell.name,
                                result.cell.config.steps,
                                choice,
                                arm,
                                own.learning_rate,
                                seed,
                                time,
                                *(f"{values[i]:.6g}" for values in numbers),
                                runs.diverged_at[i],
                            )
                        )


def choose_cells(cells: Sequence[Cell], names: Sequence[str]) -> list[Cell]:
    """The cells of these names, all of them where none is named.

    Raises:
      ValueError: an unknown name; lists the choices.
    """
    known = {cell.name: cell for cell in cells}
    for name in names:
        if name not in known:
            raise ValueError(f"cells: unknown {name!r}; choose from {', '.join(known)}")
    return [known[name] for name in names or known]


def _model_steps(plan: Protocol, cells: Sequence[Cell], plane_too: bool) -> int:
    total = 0
    for cell in cells:
        steps = cell.config.steps
        rates = len(plan.grids[cell.config.optimizer]) * len(plan.tuning_seeds)
        total += steps * len(cell.arms) * (2 * plan.seeds + rates)
    steps = _plane_cell(plan).config.steps
    return total + plane_too * steps * len(plan.plane_powers) ** 2 * plan.plane_seeds


def _plane_cell(plan: Protocol) -> Cell:
    return next(cell for cell in plan.cells if cell.name == PLANE_CELL)
