"""The arms of one or several run folders, as arrays: what summaries and figures are made of."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from attention.scale import SCORE_RULES, ScoreRule
from experiments.config import TrainConfig
from experiments.engine.lanes import LaneName, lane_names
from experiments.runs import recording, run
from experiments.runs.recording import RunFolderError

MEASURES = (
    "loss",
    "accuracy",
    "grad_norm",
    "grad_norm_logits",
    "entropy",
    "normalized_entropy",
    "saturation",
    "dead_row_fraction",
    "logit_std",
)

# Settings that say how long and how closely a run was watched, not what was run.
_WATCHING = {"seed", "num_seeds", "steps", "log_every", "eval_every", "checkpoint_every"}


class Arm(NamedTuple):
    """One score rule at one learning rate in one run: N seeds, T rows, E evaluations.

    Only steps and evaluations that every lane has are kept.
    """

    folder: Path
    config: TrainConfig  # resolved; of the whole run
    rule: ScoreRule
    learning_rate: float
    label: str  # what tells the arm from those read with it
    seeds: NDArray[np.int_]  # [N]
    steps: NDArray[np.int_]  # [T]: row i describes the parameters after steps[i] updates
    measures: dict[str, NDArray[np.float64]]  # MEASURES to [N, T]; NaN where not finite
    evaluation_steps: NDArray[np.int_]  # [E]: updates taken before each evaluation
    loss: NDArray[np.float64]  # [N, E]: held-out
    accuracy: NDArray[np.float64]  # [N, E]: held-out

    def diverged_at(self) -> NDArray[np.int_]:
        """[N]: the step by which a lane had diverged, as far as its rows tell; -1 if it did not.

        That is its first row whose loss or gradient is not finite. Between rows that are written
        (log_every) it is its first evaluation without a value.
        """
        finite = np.isfinite(self.measures["loss"]) & np.isfinite(self.measures["grad_norm"])
        steps = [*self.steps, *np.maximum(self.evaluation_steps - 1, 0)]
        lanes = np.concatenate([finite, np.isfinite(self.loss)], axis=1)
        return np.array([min(itertools.compress(steps, ~lane), default=-1) for lane in lanes], int)


def read_arms(folders: Sequence[str | Path]) -> list[Arm]:
    """Read the arms of run folders: folder by folder, scale by scale, rate by rate.

    Raises:
      ValueError: no folder, or one that is given twice.
      RunFolderError: a folder that is no run, or a damaged one; one line.
    """
    paths = [Path(folder) for folder in folders]
    if not paths:
        raise ValueError("give at least one run folder")
    for path in paths:
        if [p.resolve() for p in paths].count(path.resolve()) > 1:
            raise ValueError(f"{path} is given twice")
    arms = [arm for path in paths for arm in _arms_of(path)]
    labels = _labels(arms)
    return [arm._replace(label=label) for arm, label in zip(arms, labels, strict=True)]


def _arms_of(folder: Path) -> list[Arm]:
    config = run.stored_config(folder)
    names = lane_names(config)
    steps, rows = _by_lane(folder, "metrics", MEASURES, names)
    evaluation_steps, evaluations = _by_lane(folder, "evaluation", ("loss", "accuracy"), names)
    rules = {rule.name: rule for rule in config.rules()}
    arms = []
    for scale, rate in dict.fromkeys((name.scale, name.learning_rate) for name in names):
        lanes = [i for i, name in enumerate(names) if name[:2] == (scale, rate)]
        arms.append(
            Arm(
                folder=folder,
                config=config,
                rule=rules[scale],
                learning_rate=rate,
                label="",
                seeds=np.array([names[i].seed for i in lanes]),
                steps=steps,
                measures={name: values[lanes] for name, values in rows.items()},
                evaluation_steps=evaluation_steps,
                loss=evaluations["loss"][lanes],
                accuracy=evaluations["accuracy"][lanes],
            )
        )
    return arms


def _by_lane(
    folder: Path, rows: str, columns: Sequence[str], names: Sequence[LaneName]
) -> tuple[NDArray[np.int_], dict[str, NDArray[np.float64]]]:
    """Steps [T] and columns [lanes, T] of the rows; the rows of an unfinished step are left out."""
    table = recording.load_runs(folder, rows)
    lanes = len(names)
    count = len(table["step"]) // lanes
    if count == 0:
        return np.zeros(0, int), {name: np.zeros((lanes, 0)) for name in columns}

    def grid(name: str) -> NDArray[Any]:
        if name not in table:
            raise RunFolderError(f"{folder / rows}.jsonl: its rows have no {name}")
        return table[name][: count * lanes].reshape(count, lanes)

    steps = grid("step")
    identity = zip(*names, strict=True)
    for name, expected in zip(LaneName._fields, identity, strict=True):
        if np.any(grid(name) != np.array(expected)[None]) or np.any(steps != steps[:, :1]):
            raise RunFolderError(
                f"{folder / rows}.jsonl: its rows are not those of config.json, lane by lane"
            )
    if np.any(np.diff(steps[:, 0]) <= 0):
        raise RunFolderError(f"{folder / rows}.jsonl: its rows are not in step order")
    return steps[:, 0], {name: grid(name).T for name in columns}


def rule_text(rule: ScoreRule) -> str:
    """A score rule for people: its name and what it multiplies q·k by, once."""
    return f"{rule.name} {rule.formula}" if rule.name in SCORE_RULES else rule.formula


def _labels(arms: Sequence[Arm]) -> list[str]:
    """What differs between the arms: always the rule, then whatever else is not the same."""
    settings = [telling_settings(arm.config) for arm in arms]
    differing = [name for name in settings[0] if len({repr(s[name]) for s in settings}) > 1]
    rates = len({arm.learning_rate for arm in arms}) > 1
    labels = [
        ", ".join(
            [
                rule_text(arm.rule),
                *[f"lr {arm.learning_rate:g}"] * rates,
                *(f"{name} {own[name]}" for name in differing if own[name] is not None),
            ]
        )
        for arm, own in zip(arms, settings, strict=True)
    ]
    if len(set(labels)) == len(labels):
        return labels
    same_name = len({arm.folder.name for arm in arms}) < len({arm.folder for arm in arms})
    return [
        f"{label} ({arm.folder if same_name else arm.folder.name})"
        for label, arm in zip(labels, arms, strict=True)
    ]


def telling_settings(config: TrainConfig) -> dict[str, Any]:
    """What was run, but for rule and rate; None for widths that follow from another setting."""
    c: Any = config
    settings = {
        name: value
        for name, value in vars(config).items()
        if name not in {"scale", "learning_rate", *_WATCHING}
    }
    if c.d_v * c.num_heads == c.d_model:
        settings["d_v"] = None
    if c.d_ff == 4 * c.d_model:
        settings["d_ff"] = None
    return settings


def load_runs(paths: str | Path | Sequence[str | Path], rows: str = "metrics") -> dict[str, Any]:
    """Read runs as one tidy table, for notebooks: `pandas.DataFrame(load_runs(paths))`.

    Args:
      paths: one run folder or several.
      rows: "metrics" for every step, "evaluation" for the held-out evaluations.

    Returns:
      Column name to NumPy array, one entry a row. The columns of the rows (a statistic of head h
      in layer l is `entropy_layer0_head1`, and so on), then `run` (the folder) and the settings.
      Missing numbers are NaN.

    Raises:
      RunFolderError: a folder that is no run, or a damaged one.
    """
    if rows not in ("metrics", "evaluation"):
        raise ValueError(f"rows: {rows!r}, choose from metrics, evaluation")
    paths = [paths] if isinstance(paths, str | Path) else paths
    tables = []
    for path in map(Path, paths):
        settings = read_json(path / CONFIG)
        lines = read_rows(path / f"{rows}.jsonl")
        try:
            table = _columns(lines)
        except (ValueError, TypeError, KeyError, IndexError, OverflowError):
            raise RunFolderError(f"{path / rows}.jsonl: damaged, its rows are not alike") from None
        count = len(lines)
        for name, value in {"run": str(path), **settings}.items():
            if name not in table and not isinstance(value, list | dict):
                table[name] = np.full(count, np.nan if value is None else value)
        tables.append(table)
    names = dict.fromkeys(itertools.chain.from_iterable(tables))
    lengths = [len(table["step"]) for table in tables]
    return {
        name: np.concatenate(
            [
                table.get(name, np.full(length, np.nan))
                for table, length in zip(tables, lengths, strict=True)
            ]
        )
        for name in names
    }


def _columns(lines: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    columns: dict[str, np.ndarray] = {"step": np.zeros(0, int)}
    if any(line.keys() != lines[0].keys() for line in lines):
        raise ValueError("rows with other columns than the first")
    for name in lines[0] if lines else ():
        values = [line[name] for line in lines]
        if name.endswith("_by_head"):
            by_head = np.array(values, float)
            for layer, head in itertools.product(*map(range, by_head.shape[1:])):
                key = f"{name.removesuffix('_by_head')}_layer{layer}_head{head}"
                columns[key] = by_head[:, layer, head]
        elif name in ("step", "seed"):
            columns[name] = np.array(values, int)
        elif name == "scale":
            columns[name] = np.array(values, str)
        else:
            columns[name] = np.array(values, float)
    return columns
