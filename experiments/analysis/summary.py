"""What a run found, in numbers: every arm, and every arm against the one it is paired with.

Two rules keep the numbers honest. A lane that diverged is not dropped: from there on it counts as
untrained, with its own held-out loss and accuracy of step 0. A lane that never reached the
threshold is censored: its time is "not by" the last evaluation, never that step itself.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.analysis import comparison
from experiments.analysis.comparison import CensoredTimes, PairedComparison
from experiments.analysis.read import MEASURES, Arm, read_arms, rule_text, telling_settings
from experiments.config import TrainConfig, resolve
from experiments.runs import recording
from experiments.tasks import make_task

THRESHOLD = 0.9  # held-out accuracy
LAST_ROWS = 20  # a lane "at the end" is the median of so many rows: one batch is noisy


def summarize(folder: str | Path) -> dict[str, Any]:
    """The content of summary.json, for a run folder whose run may have ended early.

    Keys: `command`, `task`, `chance_loss` and `chance_accuracy` (without attention that selects),
    `steps` (asked for), `steps_done` (as far as the rows tell), `seeds`, `environment`, and those
    of `summarize_arms`.

    Raises:
      RunFolderError: no run, or a damaged one; one line.
    """
    return summarize_run(read_arms([folder]))


def summarize_run(arms: Sequence[Arm]) -> dict[str, Any]:
    """`summarize`, for arms that are read already: all those of one run folder."""
    config = arms[0].config
    task = make_task(
        config.task, sequence_length=config.sequence_length, vocab_size=config.vocab_size
    )
    surroundings = recording.read_json(arms[0].folder / "environment.json")
    surroundings.pop("digests", None)
    ends = [*(arms[0].steps[-1:] + 1), *arms[0].evaluation_steps[-1:]]
    return {
        "command": train_command(config),
        "task": task.name,
        "chance_loss": task.chance_loss,
        "chance_accuracy": task.chance_accuracy,
        "steps": config.steps,
        "steps_done": int(max(ends, default=0)),
        "seeds": list(config.seeds()),
        "environment": surroundings,
        **summarize_arms(arms),
    }


def summarize_arms(arms: Sequence[Arm]) -> dict[str, Any]:
    """Arms and their comparisons; the arms may be of several runs.

    Returns:
      `threshold`: THRESHOLD.
      `arms`: label, run, scale, rule, multiplier, learning_rate, seeds (how many),
        diverged (seed and step of each lane that did),
        held_out (None without an evaluation: step, then loss and accuracy, each with the median
        over seeds, the least, the largest and all by_seed),
        steps_to_threshold (None without an evaluation: median, least, largest, None where that
        seed is still short of it; not_reached, how many seeds are; by_seed),
        start and end (MEASURES to the median over seeds, each seed at step 0 and at the median of
        its last rows; None where there is none) and end_steps (the first and last of these rows).
      `comparisons`: of each arm with its partner, see `partners`: arm and against (labels), seeds
        (how many pairs), step, then loss, accuracy and steps_to_threshold, each None or the fields
        of PairedComparison (arm minus partner) with p_value_holm, corrected for the number of
        comparisons. For steps_to_threshold a seed that never got there counts as `step`, and
        not_reached says how many of the arm and of its partner there are.
    """
    counted = [diverged_as_untrained(arm) for arm in arms]
    comparisons = [
        found for arm, partner in partners(counted) if (found := _compare(arm, partner)) is not None
    ]
    for quantity in ("loss", "accuracy", "steps_to_threshold"):
        tests = [found[quantity] for found in comparisons if found[quantity] is not None]
        corrected = comparison.holm([test["p_value"] for test in tests])
        for test, p_value in zip(tests, corrected, strict=True):
            test["p_value_holm"] = float(p_value)
    return {
        "threshold": THRESHOLD,
        "arms": [_arm(arm) for arm in counted],
        "comparisons": comparisons,
    }


def partners(arms: Sequence[Arm]) -> list[tuple[Arm, Arm]]:
    """Which arm is compared with which.

    The partner has the rule `sqrt`, or the first arm's if none has; it is the one that differs in
    nothing but the rule, or else the first. With a single rule the first arm is everyone's partner.
    """
    names = [arm.rule.name for arm in arms]
    reference = "sqrt" if "sqrt" in names else names[0]
    candidates = [arm for arm in arms if arm.rule.name == reference]
    if len(set(names)) == 1:
        return [(arm, arms[0]) for arm in arms[1:]]

    def same_but_for_the_rule(a: Arm, b: Arm) -> bool:
        settings = [telling_settings(arm.config) for arm in (a, b)]
        return a.learning_rate == b.learning_rate and settings[0] == settings[1]

    return [
        (arm, next((c for c in candidates if same_but_for_the_rule(arm, c)), candidates[0]))
        for arm in arms
        if arm.rule.name != reference
    ]


def train_command(config: TrainConfig) -> str:
    """The command that makes a run of this resolved config: what differs from the defaults."""
    default = resolve(TrainConfig(task=config.task, optimizer=config.optimizer))
    default = dataclasses.replace(default, optimizer=TrainConfig.optimizer)
    flags = []
    for name, value in vars(config).items():
        if name in ("scale", "task") or value != getattr(default, name):
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            flags.append(f"--{name}={text}")
    return shlex.join(["python", "train.py", *flags])


def reached_threshold(arm: Arm) -> CensoredTimes:
    """When each seed of an arm had a held-out accuracy of THRESHOLD."""
    return comparison.steps_to_accuracy(arm.evaluation_steps, arm.accuracy, THRESHOLD)


def diverged_as_untrained(arm: Arm) -> Arm:
    """The arm with the held-out values of a diverged lane replaced by those before training."""
    diverged = arm.diverged_at()[:, None]
    after = (diverged >= 0) & (arm.evaluation_steps[None] > diverged)
    return arm._replace(
        loss=np.where(after, arm.loss[:, :1], arm.loss),
        accuracy=np.where(after, arm.accuracy[:, :1], arm.accuracy),
    )


def _arm(arm: Arm) -> dict[str, Any]:
    held_out = None
    if arm.evaluation_steps.size:
        held_out = {
            "step": int(arm.evaluation_steps[-1]),
            "loss": _spread(arm.loss[:, -1]),
            "accuracy": _spread(arm.accuracy[:, -1]),
        }
    last = max(1, min(LAST_ROWS, len(arm.steps) // 10))
    return {
        "label": arm.label,
        "run": str(arm.folder),
        "scale": arm.rule.name,
        "rule": rule_text(arm.rule),
        "multiplier": arm.rule.multiplier,
        "learning_rate": arm.learning_rate,
        "seeds": len(arm.seeds),
        "diverged": [
            {"seed": int(seed), "step": int(step)}
            for seed, step in zip(arm.seeds, arm.diverged_at(), strict=True)
            if step >= 0
        ],
        "held_out": held_out,
        "steps_to_threshold": _times(reached_threshold(arm)) if held_out else None,
        "start": {name: _median(arm.measures[name][:, :1].ravel()) for name in MEASURES},
        "end": {name: _end(arm.measures[name], last) for name in MEASURES},
        "end_steps": [int(step) for step in arm.steps[-last:][[0, -1]]] if arm.steps.size else None,
    }


def _spread(values: NDArray[np.float64]) -> dict[str, Any]:
    return {
        "median": float(np.median(values)),
        "least": float(values.min()),
        "largest": float(values.max()),
        "by_seed": values.tolist(),
    }


def _median(values: Iterable[float]) -> float | None:
    finite = [value for value in values if np.isfinite(value)]
    return float(np.median(finite)) if finite else None


def _end(lanes: NDArray[np.float64], last: int) -> float | None:
    """Median over lanes of the median of the last rows each one has, diverged lanes included."""
    ends = [lane[np.isfinite(lane)][-last:] for lane in lanes]
    return _median([np.median(end) for end in ends if end.size])


def _times(times: CensoredTimes) -> dict[str, Any]:
    by_seed = [
        int(time) if reached else None
        for time, reached in zip(times.time, times.reached, strict=True)
    ]
    reached = [time for time in by_seed if time is not None]
    median = comparison.kaplan_meier(times).median
    return {
        "median": int(median) if np.isfinite(median) else None,
        "least": min(reached, default=None),
        "largest": max(reached) if len(reached) == len(by_seed) else None,
        "not_reached": len(by_seed) - len(reached),
        "by_seed": by_seed,
    }


def _compare(arm: Arm, partner: Arm) -> dict[str, Any] | None:
    """Arm minus partner over the seeds and evaluations that both have; None if too few."""
    what = ("task", "sequence_length", "vocab_size", "eval_size")
    if any(getattr(arm.config, name) != getattr(partner.config, name) for name in what):
        return None
    seeds = np.intersect1d(arm.seeds, partner.seeds)
    steps = np.intersect1d(arm.evaluation_steps, partner.evaluation_steps)
    if len(seeds) < 2 or not len(steps):
        return None
    a, b = (only(x, seeds, steps) for x in (arm, partner))
    times = [reached_threshold(x) for x in (a, b)]
    not_reached = [int(np.sum(~t.reached)) for t in times]
    steps_test = None
    if steps[-1] > 0 and min(not_reached) < len(seeds):
        test = comparison.paired_times(*times, horizon=float(steps[-1]))
        steps_test = {**test._asdict(), "not_reached": not_reached}
    return {
        "arm": arm.label,
        "against": partner.label,
        "seeds": len(seeds),
        "step": int(steps[-1]),
        "loss": _paired(a.loss[:, -1], b.loss[:, -1], "lower"),
        "accuracy": _paired(a.accuracy[:, -1], b.accuracy[:, -1], "higher"),
        "steps_to_threshold": steps_test,
    }


def _paired(a: NDArray[np.float64], b: NDArray[np.float64], better: Any) -> dict[str, Any] | None:
    if not np.all(np.isfinite([a, b])):
        return None  # a lane whose loss was not finite before training even began
    test: PairedComparison = comparison.paired_comparison(a, b, better=better)
    return test._asdict()


def only(arm: Arm, seeds: NDArray[np.int_], steps: NDArray[np.int_]) -> Arm:
    """The arm's evaluations at these seeds and steps."""
    lanes = np.searchsorted(arm.seeds, seeds)
    columns = np.searchsorted(arm.evaluation_steps, steps)
    grid = np.ix_(lanes, columns)
    return arm._replace(
        seeds=seeds, evaluation_steps=steps, loss=arm.loss[grid], accuracy=arm.accuracy[grid]
    )
