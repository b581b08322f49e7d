"""Run folders as arrays: one tidy table for notebooks, or arm by arm for all that is made of them.

What was changed since it was written is refused, see `runs.seal`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from attention.names import unknown
from experiments.analysis.columns import Columns, read_columns
from experiments.analysis.times import CensoredTimes, steps_to_threshold
from experiments.arms import Arm
from experiments.config import LaneName, RunConfig
from experiments.metrics import HEAD_STATISTICS, STEP_SCALARS, by_head, parameter_column
from experiments.runs.folder import EVALUATION, METRICS, RunFolderError, stored_config
from experiments.runs.seal import check_seal

MEASURES = (*STEP_SCALARS, *HEAD_STATISTICS)  # a number each of a lane's every row
ROWS = {"metrics": METRICS, "evaluation": EVALUATION}

# Settings that say how long and how closely a run was watched, not what was run.
_WATCHING = {"seed", "num_seeds", "steps", "log_every", "eval_every", "checkpoint_every"}


# A table for notebooks ------------------------------------------------------------------------


def load_runs(
    paths: str | Path | Sequence[str | Path], rows: str = "metrics", *, accept_edits: bool = False
) -> dict[str, NDArray[Any]]:
    """Read runs as one tidy table, for notebooks: `pandas.DataFrame(load_runs(paths))`.

    Args:
      paths: one run folder or several.
      rows: "metrics" for every step, "evaluation" for the held-out evaluations.
      accept_edits: read what was changed since it was written, too.

    Returns:
      Column name to NumPy array, one entry a row. The columns of the rows (a statistic of head h
      in layer l is `entropy_layer0_head1`, a parameter of an arm's own
      `parameter_log_scale_layer0_head1`, and so on), then `run` (the folder) and the settings.
      What is text has dtype object. Missing numbers, and columns that a run lacks, are NaN. Of a
      single run the settings are held once, so they can't be written to.

    Raises:
      ValueError: `rows` is neither word.
      RunFolderError: a folder that is no run, or one that is damaged or was changed.
    """
    if rows not in ROWS:
        raise unknown("rows", rows, ROWS)
    paths = [paths] if isinstance(paths, str | Path) else paths
    tables = []
    for path in map(Path, paths):
        settings = {"run": str(path), **_settings(stored_config(path))}
        [columns], _ = _read(path, [ROWS[rows]], accept_edits)
        count = len(columns["step"])
        same = {name: _repeated(value, count) for name, value in settings.items()}
        tables.append((count, same | columns))
    if len(tables) == 1:
        return tables[0][1]
    names = dict.fromkeys(itertools.chain.from_iterable(table for _, table in tables))
    missing = {count: _repeated(None, count) for count, _ in tables}
    # A column leaves its table before the next is made, so that no run is held twice.
    return {
        name: np.concatenate([table.pop(name, missing[count]) for count, table in tables])
        for name in names
    }


def _settings(config: RunConfig) -> dict[str, Any]:
    """The settings that every row of a run has in common, as config.json has them."""
    settings = config.to_json()
    return {name: settings[name] for name in vars(config) if not isinstance(settings[name], list)}


def _repeated(value: Any, count: int) -> NDArray[Any]:
    """[count]: the value of every row, held once."""
    kind = object if isinstance(value, str) else None
    return np.broadcast_to(np.array(np.nan if value is None else value, kind), count)


def _read(
    folder: Path, names: Sequence[str], accept_edits: bool
) -> tuple[list[Columns], str | None]:
    """The columns of files of a run, and what was changed in it, if that is accepted."""
    with ThreadPoolExecutor(1) as beside:
        changed = beside.submit(check_seal, folder, accept_edits=accept_edits)
        columns = [read_columns(folder / name) for name in names]
        return columns, changed.result()


# Arms -----------------------------------------------------------------------------------------


class ArmRun(NamedTuple):
    """One arm at one learning rate in one run: N seeds, T rows, E evaluations.

    Only steps and evaluations that every lane has are kept.
    """

    folder: Path
    config: RunConfig  # of the whole run
    arm: Arm
    learning_rate: float
    label: str  # what tells it from those read with it
    seeds: NDArray[np.int_]  # [N]
    steps: NDArray[np.int_]  # [T]: row i describes the parameters after steps[i] updates
    measures: dict[str, NDArray[np.float64]]  # MEASURES, and parameters of the arm's own: [N, T]
    evaluation_steps: NDArray[np.int_]  # [E]: updates taken before each evaluation
    loss: NDArray[np.float64]  # [N, E]: held-out
    accuracy: NDArray[np.float64]  # [N, E]: held-out
    changed: str | None = None  # what was changed in the run since it was written

    def diverged_at(self) -> NDArray[np.int_]:
        """[N]: the step by which a lane had diverged, as far as its rows tell; -1 if it did not.

        That is its first row whose loss or gradient is not finite. Between rows that are written
        (log_every) it is its first evaluation without a value.
        """
        finite = np.isfinite(self.measures["loss"]) & np.isfinite(self.measures["grad_norm"])
        steps = np.concatenate([self.steps, np.maximum(self.evaluation_steps - 1, 0)])
        evaluated = np.isfinite(self.loss) & np.isfinite(self.accuracy)
        lost = ~np.concatenate([finite, evaluated], axis=1)
        never = np.iinfo(int).max
        first = np.min(np.where(lost, steps, never), axis=1, initial=never)
        return np.where(first == never, -1, first)

    def after_divergence(self) -> NDArray[np.bool_]:
        """[N, E]: which evaluations are of lanes that had diverged."""
        diverged = self.diverged_at()[:, None]
        return (diverged >= 0) & (self.evaluation_steps > diverged)

    def diverged_as_untrained(self) -> ArmRun:
        """The arm with the held-out values of a diverged lane replaced by those before training."""
        after = self.after_divergence()
        return self._replace(
            loss=np.where(after, self.loss[:, :1], self.loss),
            accuracy=np.where(after, self.accuracy[:, :1], self.accuracy),
        )

    def reached(self) -> CensoredTimes:
        """[N]: when each seed reached the threshold, see `steps_to_threshold`."""
        return steps_to_threshold(self.evaluation_steps, self.accuracy)

    def evaluated_at(self, seeds: NDArray[np.int_], steps: NDArray[np.int_]) -> ArmRun:
        """The arm with these seeds, and its evaluations at these steps, only."""
        lanes = np.searchsorted(self.seeds, seeds)
        columns = np.searchsorted(self.evaluation_steps, steps)
        grid = np.ix_(lanes, columns)
        return self._replace(
            seeds=seeds,
            measures={name: values[lanes] for name, values in self.measures.items()},
            evaluation_steps=steps,
            loss=self.loss[grid],
            accuracy=self.accuracy[grid],
        )


def read_arms(folders: Sequence[str | Path], *, accept_edits: bool = False) -> list[ArmRun]:
    """Read the arms of run folders: folder by folder, scale by scale, rate by rate.

    Args:
      folders: of runs.
      accept_edits: read what was changed since it was written, too; `changed` then says what.

    Raises:
      ValueError: no folder, or one that is given twice.
      RunFolderError: a folder that is no run, or one that is damaged or was changed; one line.
    """
    paths = [Path(folder) for folder in folders]
    if not paths:
        raise ValueError("give at least one run folder")
    resolved = [path.resolve() for path in paths]
    for path in paths:
        if resolved.count(path.resolve()) > 1:
            raise ValueError(f"{path} is given twice")
    arms = [arm for path in paths for arm in _arms_of(path, accept_edits)]
    labels = _labels(arms)
    return [arm._replace(label=label) for arm, label in zip(arms, labels, strict=True)]


def _arms_of(folder: Path, accept_edits: bool) -> list[ArmRun]:
    config = stored_config(folder)
    names = config.lane_names()
    (rows, evaluations), changed = _read(folder, [METRICS, EVALUATION], accept_edits)
    for name in set(MEASURES) - {"loss", "grad_norm"}:  # those two tell who diverged
        rows.setdefault(name, np.full(len(rows["step"]), np.nan))
    rows |= (parameters := _parameters(rows))
    steps, measures = _by_lane(folder / METRICS, rows, names, (*MEASURES, *parameters))
    evaluation_steps, held_out = _by_lane(
        folder / EVALUATION, evaluations, names, ("loss", "accuracy")
    )
    arms = []
    for i, (arm, rate) in enumerate(itertools.product(config.arms(), config.learning_rate)):
        lanes = slice(i * config.num_seeds, (i + 1) * config.num_seeds)
        arms.append(
            ArmRun(
                folder=folder,
                config=config,
                arm=arm,
                learning_rate=rate,
                label="",
                seeds=np.array(config.seeds()),
                steps=steps,
                measures={
                    name: values[lanes]
                    for name, values in measures.items()
                    if name in MEASURES or np.isfinite(values[lanes]).any()
                },
                evaluation_steps=evaluation_steps,
                loss=held_out["loss"][lanes],
                accuracy=held_out["accuracy"][lanes],
                changed=changed,
            )
        )
    return arms


def _parameters(rows: Columns) -> Columns:
    """The mean over layers and heads of each parameter of an arm's own."""
    start = parameter_column("").removesuffix(by_head(""))
    own: dict[str, list[NDArray[np.float64]]] = {}
    for name in rows:
        if name.startswith(start):
            own.setdefault(name.rpartition("_layer")[0], []).append(rows[name])
    return {name: np.mean(values, axis=0) for name, values in own.items()}


def _by_lane(
    path: Path, table: Columns, names: Sequence[LaneName], columns: Sequence[str]
) -> tuple[NDArray[np.int_], dict[str, NDArray[np.float64]]]:
    """Steps [T] and columns [lanes, T] of rows; the rows of an unfinished step are left out."""
    lanes = len(names)
    count = len(table["step"]) // lanes
    if not count:
        return np.zeros(0, int), {name: np.zeros((lanes, 0)) for name in columns}

    def grid(name: str) -> NDArray[Any]:
        if name not in table:
            raise RunFolderError(f"{path}: its rows have no {name}")
        return table[name][: count * lanes].reshape(count, lanes)

    steps = grid("step")
    for name, expected in zip(LaneName._fields, zip(*names, strict=True), strict=True):
        if np.any(grid(name) != np.array(expected)) or np.any(steps != steps[:, :1]):
            raise RunFolderError(f"{path}: its rows are not those of config.json, lane by lane")
    if np.any(np.diff(steps[:, 0]) <= 0):
        raise RunFolderError(f"{path}: its rows are not in step order")
    return steps[:, 0], {name: grid(name).T for name in columns}


def _labels(arms: Sequence[ArmRun]) -> list[str]:
    """What differs between the arms: always the rule, then whatever else is not the same."""
    settings = [telling_settings(arm.config) for arm in arms]
    differing = [name for name in settings[0] if len({repr(s[name]) for s in settings}) > 1]
    rates = len({arm.learning_rate for arm in arms}) > 1
    labels = [
        ", ".join(
            [
                arm.arm.label,
                *[f"lr {arm.learning_rate!r}"] * rates,
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


def telling_settings(config: RunConfig) -> dict[str, Any]:
    """What was run, but for rule and rate; None for widths that follow from another setting."""
    settings = {n: value for n, value in _settings(config).items() if n not in _WATCHING}
    if config.d_v * config.num_heads == config.d_model:
        settings["d_v"] = None
    if config.d_ff == 4 * config.d_model:
        settings["d_ff"] = None
    return settings
