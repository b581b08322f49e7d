"""What the test lanes of a cell came to, and every arm against `sqrt`, seed by seed.

The rules are those of the protocol in `convergence`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from experiments.analysis import paired, sweeps
from experiments.analysis.paired import Equivalence, PairedComparison
from experiments.analysis.times import (
    CensoredTimes,
    LogRank,
    log_rank,
    paired_times,
    steps_to_threshold,
)
from experiments.studies.convergence.cells import Cell, CellRuns
from experiments.studies.convergence.tuning import Tuning

ACCURACY_MARGIN = 0.01  # for equivalence of the final accuracies
TIME_MARGIN = 0.05  # of the budget, for equivalence of the times


class CellResult(NamedTuple):
    """A cell, as far as it has been run."""

    cell: Cell  # its arms are those that were run
    common: dict[str, CellRuns]  # by arm: the test seeds at the common rate
    tuning: Tuning | None
    own: dict[str, CellRuns] | None  # by arm: the test seeds at the arm's own best rate


class Outcome(NamedTuple):
    """The test lanes of one arm at one rate, N seeds; diverged lanes count as untrained."""

    learning_rate: float
    times: CensoredTimes  # [N]: steps to the threshold, the primary metric
    accuracy: NDArray[np.float64]  # [N]: held-out, at the end of the budget
    loss: NDArray[np.float64]  # [N]: held-out, at the end of the budget, nats
    loss_area: NDArray[np.float64]  # [N]: mean held-out loss over the budget, nats
    entropy: NDArray[np.float64]  # [N]: normalised, at the end of the budget
    dead_rows: NDArray[np.float64]  # [N]: dead-row fraction before training
    spikes: NDArray[np.float64]  # [N]: gradient spikes per 1000 steps
    diverged: int  # lanes


class Comparison(NamedTuple):
    """An arm against `sqrt`, seed by seed; differences are the arm's minus sqrt's."""

    cell: str
    arm: str
    choice: str  # which rates: "common" or "own"
    budget: int  # steps
    times: PairedComparison  # steps to the threshold, cut at the budget
    holm_p_value: float  # of `times`, over all comparisons of the study
    log_rank: LogRank
    never: int  # seeds on which the arm never got there
    ratio: float  # mean steps, arm over sqrt; a lower bound where `never` > 0
    times_equivalence: Equivalence
    accuracy: PairedComparison  # at the end
    accuracy_equivalence: Equivalence


def outcome(runs: CellRuns) -> Outcome:
    """What the lanes of one arm at one rate came to."""
    counted = runs.diverged_as_untrained()
    return Outcome(
        learning_rate=float(runs.learning_rate[0]),
        times=steps_to_threshold(counted.steps, counted.accuracy),
        accuracy=counted.accuracy[:, -1].astype(np.float64),
        loss=counted.loss[:, -1].astype(np.float64),
        loss_area=sweeps.clipped_loss_area(counted.steps, counted.loss, counted.loss[:, 0]),
        entropy=_last_finite(runs.normalized_entropy),
        dead_rows=runs.dead_row_fraction[:, 0].astype(np.float64),
        spikes=runs.spikes_per_thousand,
        diverged=int(np.count_nonzero(runs.diverged_at >= 0)),
    )


def choices(result: CellResult) -> dict[str, dict[str, CellRuns]]:
    """The test lanes by choice of rate ("common", and "own" once tuned) and arm."""
    return {"common": result.common} | ({"own": result.own} if result.own else {})


def compare(results: Sequence[CellResult]) -> list[Comparison]:
    """Every arm of every cell against `sqrt`, at the common rate and each at its own."""
    found = []
    for result in results:
        budget: Any = result.cell.config.steps
        for choice, arms in choices(result).items():
            outcomes = {arm: outcome(runs) for arm, runs in arms.items()}
            reference = outcomes.pop("sqrt")
            found += [
                _compare(result.cell.name, arm, choice, budget, own, reference)
                for arm, own in outcomes.items()
            ]
    corrected = paired.holm([c.times.p_value for c in found])
    return [c._replace(holm_p_value=float(p)) for c, p in zip(found, corrected, strict=True)]


def _compare(cell: str, arm: str, choice: str, budget: int, a: Outcome, b: Outcome) -> Comparison:
    times = paired_times(a.times, b.times, budget)
    cut_a, cut_b = a.times.time, b.times.time  # a censored time is the budget
    return Comparison(
        cell=cell,
        arm=arm,
        choice=choice,
        budget=budget,
        times=times,
        holm_p_value=times.p_value,
        log_rank=log_rank(a.times, b.times),
        never=int(np.count_nonzero(~a.times.reached)),
        ratio=float(cut_a.mean() / cut_b.mean()),
        times_equivalence=paired.equivalence_test(cut_a, cut_b, TIME_MARGIN * budget),
        accuracy=paired.paired_comparison(a.accuracy, b.accuracy, better="higher"),
        accuracy_equivalence=paired.equivalence_test(a.accuracy, b.accuracy, ACCURACY_MARGIN),
    )


def _last_finite(values_NE: NDArray) -> NDArray[np.float64]:
    """[N]: each lane's last value before it diverged, if it did."""
    finite = np.isfinite(values_NE)
    last = values_NE.shape[1] - 1 - np.argmax(finite[:, ::-1], axis=1)
    return values_NE[np.arange(len(values_NE)), last].astype(np.float64)
