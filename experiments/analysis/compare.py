"""Arm against arm, by seed: pairs of arms, and two runs that differ in the scale only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import RenderableType

from experiments.analysis.paired import Better, PairedComparison, paired_comparison
from experiments.analysis.read import ArmRun, read_arms
from experiments.analysis.sweeps import clipped_loss_area
from experiments.analysis.tables import (
    NOTHING,
    Form,
    Table,
    interval,
    nats,
    on_terminal,
    p_value,
    percent,
    whole,
    with_range,
)
from experiments.analysis.times import THRESHOLD, paired_times
from experiments.runs.folder import ENVIRONMENT, RunFolderError, read_json

# Settings that two runs of a pair may differ in: the question, and how closely each was watched.
FREE = ("scale", "steps", "log_every", "eval_every", "checkpoint_every")


class Quantity(NamedTuple):
    """What arms are compared by, on the held-out set."""

    name: str
    form: Form
    better: Better


QUANTITIES = {
    "accuracy": Quantity("accuracy %", percent, "higher"),
    "loss": Quantity("loss", nats, "lower"),
    "loss_area": Quantity("loss area", nats, "lower"),
    "steps_to_threshold": Quantity(f"steps to {THRESHOLD:.0%}", whole, "lower"),
}


class Compared(NamedTuple):
    """One quantity of two arms, by seed."""

    a: NDArray[np.float64]  # [seeds]; a seed that never reached the threshold has the last step
    b: NDArray[np.float64]  # [seeds]
    short: tuple[int, int]  # seeds of a and of b that never reached it
    test: PairedComparison | None  # of a - b; None where there is nothing to test


class Pair(NamedTuple):
    """Two arms on the seeds and evaluations that both have."""

    a: ArmRun
    b: ArmRun
    step: int  # of the last evaluation
    compared: dict[str, Compared]  # by QUANTITIES; diverged lanes count as untrained


def pair_arms(a: ArmRun, b: ArmRun) -> Pair | None:
    """Compare two arms on what both have; None if they have no evaluation of a seed in common."""
    seeds = np.intersect1d(a.seeds, b.seeds)
    steps = np.intersect1d(a.evaluation_steps, b.evaluation_steps)
    if not len(seeds) or not len(steps):
        return None
    last = int(steps[-1])
    x, y = (arm.diverged_as_untrained().evaluated_at(seeds, steps) for arm in (a, b))
    compared = {
        "accuracy": _compared("accuracy", x.accuracy[:, -1], y.accuracy[:, -1]),
        "loss": _compared("loss", x.loss[:, -1], y.loss[:, -1]),
    }
    if last > 0:
        compared["loss_area"] = _compared("loss_area", _area(x), _area(y))
        compared["steps_to_threshold"] = _compared_times(x, y, last)
    return Pair(a.evaluated_at(seeds, steps), b.evaluated_at(seeds, steps), last, compared)


def _compared(quantity: str, a: NDArray[np.float64], b: NDArray[np.float64]) -> Compared:
    test = None
    if np.all(np.isfinite([a, b])):  # else a lane had no value before training even began
        test = paired_comparison(a, b, better=QUANTITIES[quantity].better)
    return Compared(a, b, (0, 0), test)


def _area(arm: ArmRun) -> NDArray[np.float64]:
    """[N]: the loss area; NaN where a lane has no loss before training."""
    start = arm.loss[:, 0]
    known = np.isfinite(start)
    area = clipped_loss_area(arm.evaluation_steps, arm.loss, np.where(known, start, 0.0))
    return np.where(known, area, np.nan)


def _compared_times(a: ArmRun, b: ArmRun, last: int) -> Compared:
    x, y = a.reached(), b.reached()
    short = (int(np.sum(~x.reached)), int(np.sum(~y.reached)))
    somebody = min(short) < len(a.seeds)
    test = paired_times(x, y, horizon=float(last)) if somebody else None
    return Compared(x.time, y.time, short, test)


# Two runs -------------------------------------------------------------------------------------


def compare_runs(
    folder_a: Path,
    folder_b: Path,
    *,
    say: Callable[[str], None] = lambda line: None,
    accept_edits: bool = False,
) -> list[Pair]:
    """Every arm of run A against every arm of run B that is another and has the same rate.

    A lane that diverged stays: from there on it counts as untrained, with its own loss and accuracy
    of step 0. A lane that never reached the threshold counts as the last step, and is named.

    Args:
      folder_a, folder_b: of runs made by any commands.
      say: called with one line for each difference that may change the last bits only.
      accept_edits: compare what was changed since it was written, too.

    Raises:
      ValueError: the runs are no pair; the message names the settings that differ.
      RunFolderError: a folder that is no run, or one that is damaged or was changed.
    """
    arms = read_arms([folder_a, folder_b], accept_edits=accept_edits)
    first, second = ([arm for arm in arms if arm.folder == f] for f in (folder_a, folder_b))
    _check_settings(first[0], second[0])
    _check_start(first[0], second[0], say)
    both = [
        (a, b)
        for a in first
        for b in second
        if a.learning_rate == b.learning_rate and a.arm.identity != b.arm.identity
    ]
    if not both:
        raise ValueError(f"scale: the same in {folder_a} and {folder_b}, so there is no difference")
    pairs = [pair for a, b in both if (pair := pair_arms(a, b)) is not None]
    if not pairs:
        raise ValueError(f"{folder_a} and {folder_b} have no evaluation of every seed in common")
    return pairs


def _check_settings(a: ArmRun, b: ArmRun) -> None:
    ours, theirs = a.config.to_json(), b.config.to_json()
    differing = [name for name in ours if name not in FREE and ours[name] != theirs[name]]
    if differing:
        listed = "; ".join(f"{name}: {ours[name]} and {theirs[name]}" for name in differing)
        raise ValueError(f"{a.folder} and {b.folder} differ in more than the scale: {listed}")


def _check_start(a: ArmRun, b: ArmRun, say: Callable[[str], None]) -> None:
    """Refuse runs that began with other weights or data; name what may change the last bits."""
    (ours, our_digests), (theirs, their_digests) = (_surroundings(x.folder) for x in (a, b))
    for seed in map(str, a.seeds):
        found = [_digests(x, seed, d) for x, d in ((a, our_digests), (b, their_digests))]
        for what in ("weights", "data"):
            if found[0].get(what) != found[1].get(what):
                raise ValueError(
                    f"{a.folder} and {b.folder} are no pair: seed {seed} has other {what} "
                    "at the start, although the settings are the same"
                )
    for name in [name for name in ours if name in theirs and ours[name] != theirs[name]]:
        say(f"warning: {name} is {ours[name]} and {theirs[name]}: last bits may differ")


def _surroundings(folder: Path) -> tuple[dict[str, Any], Any]:
    """What environment.json says of a run, each version by itself, and its digests."""
    found = read_json(folder / ENVIRONMENT)
    digests, versions = found.pop("digests", None), found.pop("versions", None)
    found.pop("cores", None)  # thread_pool_size says what matters of them
    versions = versions if isinstance(versions, dict) else {}
    return {f"version of {name}": version for name, version in versions.items()} | found, digests


def _digests(arm: ArmRun, seed: str, digests: Any) -> dict[str, str]:
    try:
        return {str(name): str(value) for name, value in digests[seed].items()}
    except (KeyError, TypeError, AttributeError):
        raise RunFolderError(
            f"{arm.folder / ENVIRONMENT} has no digests of seed {seed}: nothing shows that it "
            "began with the same weights and data"
        ) from None


# For people -----------------------------------------------------------------------------------


def tables(pair: Pair) -> RenderableType:
    """A pair for a rich console."""
    return on_terminal(table(pair))


def table(pair: Pair) -> Table:
    """A row for each quantity: both arms, their difference, and what speaks for it."""
    a, b = pair.a, pair.b
    header = (
        *("mean (range)", a.label, b.label),
        *("difference", "95% interval", "p", "Wilcoxon\np", "P(better)"),
    )
    rows = [
        (
            QUANTITIES[name].name,
            *(
                _values(values, short, pair.step, QUANTITIES[name].form)
                for values, short in zip((found.a, found.b), found.short, strict=True)
            ),
            *_verdict(found, QUANTITIES[name].form),
        )
        for name, found in pair.compared.items()
    ]
    title = (
        f"{a.label} − {b.label}: {a.config.task}, {len(a.seeds)} "
        f"seed{'s' * (len(a.seeds) > 1)}, held-out, to step {pair.step}"
    )
    return Table(title, header, rows, notes(pair))


def notes(pair: Pair) -> list[str]:
    """What a reader of the table must know."""
    found = [note for arm in (pair.a, pair.b) for note in _notes_on(arm, pair.step)]
    if any(sum(compared.short) for compared in pair.compared.values()):
        found.append(
            f"A seed short of the threshold counts as step {pair.step}: ≥ and ≤ mark bounds, "
            "~ neither."
        )
    pairs = len(pair.a.seeds)
    if pairs == 1:
        found.append("One seed shows no more than itself: there is no interval and no test.")
    elif (least := 2 / 2**pairs) > 0.01:
        verdict = ", so none can be below 0.05" if least > 0.05 else ""
        found.append(f"With {pairs} pairs the smallest possible p is {least:.3g}{verdict}.")
    found.append(
        "Difference and P(better) are of the first arm; BCa interval; p of the sign-flip test, "
        "not corrected for the number of rows. Loss area: mean over the steps of the smaller of "
        "the held-out loss and its value at step 0."
    )
    return found


def _notes_on(arm: ArmRun, last: int) -> list[str]:
    found = []
    if arm.changed:
        found.append(f"{arm.folder}: {arm.changed}.")
    if diverged := diverged_lanes(arm):
        lanes = ", ".join(f"seed {seed} by step {step}" for seed, step in diverged)
        found.append(
            f"{arm.label}: {len(diverged)} of {len(arm.seeds)} diverged ({lanes}); from there on "
            "they count as untrained."
        )
    if not np.all(np.isfinite([arm.loss[:, 0], arm.accuracy[:, 0]])):
        found.append(f"{arm.label}: a seed has no loss even before training: nothing to compare.")
    if arm.config.steps != last:
        found.append(
            f"{arm.label}: {arm.config.steps} steps were asked for; the comparison ends at step "
            f"{last}, the last evaluation that both runs have."
        )
    return found


def diverged_lanes(arm: ArmRun) -> list[tuple[int, int]]:
    """Seed and step of every lane that diverged."""
    at = zip(arm.seeds.tolist(), arm.diverged_at().tolist(), strict=True)
    return [(seed, step) for seed, step in at if step >= 0]


def _values(values: NDArray[np.float64], short: int, last: int, form: Form) -> str:
    if short == len(values):
        return f"not by {last}"
    if not short:
        return with_range(values, form, np.mean)
    largest = f" ({form(values.min())}–>{last})" * (len(values) > 1)
    return f"≥ {form(values.mean())}{largest}"


def bound(short: tuple[int, int]) -> str:
    """Seeds that never got there make the difference of times a bound, if all on one side."""
    return "~ " if all(short) else "≥ " if short[0] else "≤ " if short[1] else ""


def _verdict(found: Compared, form: Form) -> list[str]:
    test = found.test
    if test is None:
        return [NOTHING] * 5
    difference = bound(found.short) + form(test.mean_difference, "+")
    better = f"{test.probability_better:.2f}"
    if test.pairs == 1:
        return [difference, NOTHING, NOTHING, NOTHING, better]
    return [
        difference,
        interval(test.low, test.high, lambda value: form(value, "+")),
        p_value(test.p_value, exact=test.exact),
        p_value(test.wilcoxon_p_value),
        better,
    ]
