"""What a run found, in numbers: every arm, and every arm against the one it is paired with.

Two rules keep the numbers honest. A lane that diverged is not dropped: from there on it counts as
untrained, with its own held-out loss and accuracy of step 0. A lane that never reached the
threshold is censored: its time is "not by" the last evaluation, never that step itself.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.analysis.compare import QUANTITIES, Compared, Pair, diverged_lanes, pair_arms
from experiments.analysis.paired import holm
from experiments.analysis.read import ArmRun, read_arms, telling_settings
from experiments.analysis.times import THRESHOLD, CensoredTimes, kaplan_meier
from experiments.config import RunConfig, TrainConfig, as_typed, resolve
from experiments.runs.folder import ENVIRONMENT, read_json

LAST_ROWS = 20  # a lane "at the end" is the median of so many rows: one batch is noisy


def summarize(folder: str | Path) -> dict[str, Any]:
    """The content of summary.json, for a run folder whose run may have ended early.

    Keys: `command`, `task`, `chance_loss` and `chance_accuracy` (without attention that selects),
    `steps` (asked for), `steps_done` (as far as the rows tell), `seeds`, `environment`, `changed`
    (what was changed since it was written, None for nothing), and those of `summarize_arms`.

    Raises:
      RunFolderError: no run, or one that is damaged or was changed; one line.
    """
    return summarize_run(read_arms([folder]))


def summarize_run(arms: Sequence[ArmRun]) -> dict[str, Any]:
    """`summarize`, for arms that are read already: all those of one run folder."""
    config = arms[0].config
    task = config.make_task()
    surroundings = read_json(arms[0].folder / ENVIRONMENT)
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
        "changed": arms[0].changed,
        **summarize_arms(arms),
    }


def summarize_arms(arms: Sequence[ArmRun]) -> dict[str, Any]:
    """Arms and their comparisons; the arms may be of several runs.

    Returns:
      `threshold`: THRESHOLD.
      `arms`: label, run, scale, rule, multiplier, learning_rate, seeds (how many),
        diverged (seed and step of each lane that did),
        held_out (None without an evaluation: step, then loss and accuracy, each with the median
        over seeds, the least, the largest and all by_seed),
        steps_to_threshold (None without an evaluation: median, least, largest, None where that
        seed is still short of it; not_reached, how many seeds are; by_seed),
        start and end (the measures, see `ArmRun`, to the median over seeds, each seed at step 0
        and at the median of its last rows; None where there is none) and end_steps (the first and
        last of these rows).
      `comparisons`: of each arm with its partner, see `partners`: arm and against (labels), seeds
        (how many pairs), step, then QUANTITIES, each None or the fields of PairedComparison (arm
        minus partner) with p_value_holm, corrected for the number of comparisons. For
        steps_to_threshold a seed that never got there counts as `step`, and not_reached says how
        many of the arm and of its partner there are.
    """
    pairs = [pair for arm, partner in partners(arms) if (pair := _pair(arm, partner)) is not None]
    comparisons = [_comparison(pair) for pair in pairs]
    for quantity in QUANTITIES:
        tests = [found[quantity] for found in comparisons if found[quantity] is not None]
        corrected = holm([test["p_value"] for test in tests])
        for test, p_value in zip(tests, corrected, strict=True):
            test["p_value_holm"] = float(p_value)
    return {
        "threshold": THRESHOLD,
        "arms": [_arm(arm) for arm in arms],
        "comparisons": comparisons,
    }


def partners(arms: Sequence[ArmRun]) -> list[tuple[ArmRun, ArmRun]]:
    """Which arm is compared with which.

    The partner is the arm `sqrt`, or the first one if there is none; of several, the one that
    differs in nothing but the arm, or else the first. With a single arm of the table the first is
    everyone's partner.
    """
    names = [arm.arm.name for arm in arms]
    reference = "sqrt" if "sqrt" in names else names[0]
    candidates = [arm for arm in arms if arm.arm.name == reference]
    if len(set(names)) == 1:
        return [(arm, arms[0]) for arm in arms[1:]]

    def same_but_for_the_arm(a: ArmRun, b: ArmRun) -> bool:
        settings = [telling_settings(arm.config) for arm in (a, b)]
        return a.learning_rate == b.learning_rate and settings[0] == settings[1]

    return [
        (arm, next((c for c in candidates if same_but_for_the_arm(arm, c)), candidates[0]))
        for arm in arms
        if arm.arm.name != reference
    ]


def train_command(config: RunConfig) -> str:
    """The command that makes a run of this config: what differs from the defaults."""
    ours = vars(as_typed(config))
    defaults = vars(as_typed(resolve(TrainConfig(task=config.task, optimizer=config.optimizer))))
    defaults["optimizer"] = TrainConfig.optimizer
    flags = []
    for name, value in ours.items():
        if name in ("scale", "task") or value != defaults[name]:
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            flags.append(f"--{name}={text}")
    return shlex.join(["python", "train.py", *flags])


def _arm(arm: ArmRun) -> dict[str, Any]:
    held_out = None
    counted = arm.diverged_as_untrained()
    if arm.evaluation_steps.size:
        held_out = {
            "step": int(arm.evaluation_steps[-1]),
            "loss": _spread(counted.loss[:, -1]),
            "accuracy": _spread(counted.accuracy[:, -1]),
        }
    last = max(1, min(LAST_ROWS, len(arm.steps) // 10))
    measured = arm.measures.items()
    return {
        "label": arm.label,
        "run": str(arm.folder),
        "scale": arm.arm.name,
        "rule": arm.arm.label,
        "multiplier": arm.arm.rule.multiplier,
        "learning_rate": arm.learning_rate,
        "seeds": len(arm.seeds),
        "diverged": [{"seed": seed, "step": step} for seed, step in diverged_lanes(arm)],
        "held_out": held_out,
        "steps_to_threshold": _times(counted.reached()) if held_out else None,
        "start": {name: _median(values[:, :1].ravel()) for name, values in measured},
        "end": {name: _end(values, last) for name, values in measured},
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
    median = kaplan_meier(times).median
    return {
        "median": int(median) if np.isfinite(median) else None,
        "least": min(reached, default=None),
        "largest": max(reached) if len(reached) == len(by_seed) else None,
        "not_reached": len(by_seed) - len(reached),
        "by_seed": by_seed,
    }


def _pair(arm: ArmRun, partner: ArmRun) -> Pair | None:
    """The pair, if the two were asked the same and share enough seeds for a test."""
    what = ("task", "sequence_length", "vocab_size", "eval_size")
    if any(getattr(arm.config, name) != getattr(partner.config, name) for name in what):
        return None
    if np.intersect1d(arm.seeds, partner.seeds).size < 2:
        return None
    return pair_arms(arm, partner)


def _comparison(pair: Pair) -> dict[str, Any]:
    tests = {name: _test(name, pair.compared.get(name)) for name in QUANTITIES}
    return {
        "arm": pair.a.label,
        "against": pair.b.label,
        "seeds": len(pair.a.seeds),
        "step": pair.step,
        **tests,
    }


def _test(quantity: str, found: Compared | None) -> dict[str, Any] | None:
    if found is None or found.test is None:
        return None
    censored = quantity == "steps_to_threshold"
    return found.test._asdict() | ({"not_reached": list(found.short)} if censored else {})
