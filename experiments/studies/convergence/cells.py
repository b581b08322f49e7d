"""Cells of lanes that keep compact arrays: what the tuned studies are made of.

A cell is one task, optimizer, d_k and budget; its lanes are arms × learning rates × seeds, all
calls of one compiled program. A cell's file holds every lane that was run for it, so asking for
lanes runs only those that are missing: studies resume where they stopped and share what they have.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import zipfile
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from experiments.analysis.sweeps import spikes_per_thousand
from experiments.arms import Arm, make_arm
from experiments.config import RunConfig, TrainConfig, resolve
from experiments.engine import lanes, training
from experiments.engine.devices import Place, devices_of, start_places
from experiments.engine.lanes import ChunkResult, PlannedLane
from experiments.metrics import reduce_heads
from experiments.runs import environment
from experiments.runs.folder import strict

LANES_AT_ONCE = 12  # a file is saved after so many lanes: what an interruption can cost
Watch = Callable[[int], None] | None
ROW_STATISTICS = (
    "entropy",
    "normalized_entropy",
    "logit_std",
    "logit_max",
    "dead_row_fraction",
    "saturation",
)


def ignore(steps: int) -> None:
    """Watch nothing."""


@contextlib.contextmanager
def progress(total: int) -> Generator[Callable[[int], None]]:
    """A bar on the error output with the time left; gives what counts the model-steps done."""
    bar = Progress(
        TextColumn("model-steps"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
    with bar:
        task = bar.add_task("", total=total)

        def watch(steps: int) -> None:
            bar.advance(task, steps)
            done = bar.tasks[task].completed
            if done > (bar.tasks[task].total or 0):  # a grid was extended
                bar.update(task, total=done)

        yield watch


ARMS = ("sqrt", "none", "mup", "fold", "hot")  # the protocol's, in the order they are shown
MakeArm = Callable[[str, int], Arm]  # from a name and d_k


class Cell(NamedTuple):
    """What the lanes of a cell share."""

    config: RunConfig  # its scales, learning rates and seeds are not used
    arms: tuple[str, ...]

    @property
    def name(self) -> str:
        """Task, optimizer and d_k."""
        return f"{self.config.task}-{self.config.optimizer}-{self.config.d_k}"


class LaneKey(NamedTuple):
    """What tells the lanes of a cell apart."""

    arm: str
    learning_rate: float
    seed: int


class CellRuns(NamedTuple):
    """Lanes of a cell: N lanes, E evaluations.

    Statistics are means over layers, heads and the batch's rows (the largest logit: the largest),
    of the training batch at each evaluation's step, at the last step for the last evaluation.
    """

    arm: NDArray[np.str_]  # [N]
    learning_rate: NDArray[np.float64]  # [N]
    seed: NDArray[np.int64]  # [N]
    steps: NDArray[np.int64]  # [E]: updates taken before each evaluation
    loss: NDArray[np.float32]  # [N, E]: held-out, nats
    accuracy: NDArray[np.float32]  # [N, E]: held-out
    entropy: NDArray[np.float32]  # [N, E], nats
    normalized_entropy: NDArray[np.float32]  # [N, E], 0 to 1
    logit_std: NDArray[np.float32]  # [N, E]
    logit_max: NDArray[np.float32]  # [N, E]
    dead_row_fraction: NDArray[np.float32]  # [N, E]
    saturation: NDArray[np.float32]  # [N, E]
    spikes_per_thousand: NDArray[np.float64]  # [N], see `spikes_per_thousand`
    diverged_at: NDArray[np.int64]  # [N]: the step, -1 if it did not

    def lane_keys(self) -> list[LaneKey]:
        """One key a lane."""
        columns = (self.arm.tolist(), self.learning_rate.tolist(), self.seed.tolist())
        return list(itertools.starmap(LaneKey, zip(*columns, strict=True)))

    def select(self, keys: Iterable[LaneKey]) -> CellRuns:
        """These lanes, in this order."""
        place = {key: i for i, key in enumerate(self.lane_keys())}
        rows = [place[key] for key in keys]
        return CellRuns(
            **{
                name: values if name == "steps" else values[rows]
                for name, values in self._asdict().items()
            }
        )

    def diverged_as_untrained(self) -> CellRuns:
        """A lane that diverged has its own loss and accuracy of step 0 from there on."""
        after = (self.diverged_at[:, None] >= 0) & (self.steps[None] > self.diverged_at[:, None])
        return self._replace(
            loss=np.where(after, self.loss[:, :1], self.loss),
            accuracy=np.where(after, self.accuracy[:, :1], self.accuracy),
        )


def make_cell(base: TrainConfig, arms: Sequence[str]) -> Cell:
    """A cell from settings whose scales, learning rates and seeds don't matter."""
    plain = dataclasses.replace(base, scale=("sqrt",), learning_rate=(1.0,), num_seeds=1, seed=0)
    return Cell(resolve(plain), tuple(arms))


def cell_path(out: Path, cell: Cell) -> Path:
    """Where a cell is kept."""
    return out / "cells" / f"{cell.name}.npz"


def run_cell(
    cell: Cell,
    keys: Sequence[LaneKey],
    path: Path,
    *,
    arms: MakeArm = make_arm,
    watch: Watch = ignore,
) -> CellRuns:
    """Run those of the lanes that the cell's file lacks, and return all of them in order.

    Args:
      cell: what the lanes share.
      keys: the lanes wanted.
      path: the cell's file; kept up to date while the lanes run.
      arms: makes an arm of its name.
      watch: called with model-steps just done (those found in the file count at once); None runs
        nothing.

    Raises:
      LookupError: watch is None, and the file lacks lanes.
      ValueError: the file was made with other settings, or is damaged.
    """
    settings = _settings(cell, keys, arms)
    runs, about = load_cell(path)
    _check_settings(path, about["settings"], settings)
    have = set(runs.lane_keys()) if runs else set()
    missing = [key for key in dict.fromkeys(keys) if key not in have]
    if watch is None:
        if runs is None or missing:
            raise LookupError(f"{path} lacks {len(missing)} of {len(keys)} lanes")
        return runs.select(keys)
    watch((len(keys) - len(missing)) * cell.config.steps)
    places: list[Place] = []
    if missing:
        places = start_places(len(missing))
        # Weights and data are decided by code too, which may change under a stored cell.
        planned = _plan(cell, missing[:1], make_arm)
        first = dataclasses.replace(cell.config, seed=0, num_seeds=1)
        settings["held_out_data"] = environment.digest(_held_out(planned[0].program))
        settings["seed_0"] = environment.starting_digests(first, planned, places[0])["0"]
        _check_settings(path, about["settings"], settings)
        about["settings"] |= settings
        now = environment.environment(devices_of(places), cell.config.matmul_precision)
        if now not in about["environments"]:
            about["environments"].append(now)
    for first in range(0, len(missing), LANES_AT_ONCE):
        new = _run_lanes(cell, missing[first : first + LANES_AT_ONCE], arms, places, watch)
        runs = new if runs is None else _join(runs, new)
        save_cell(path, runs, about)
    if runs is None:
        raise ValueError("keys: empty, give at least one lane")
    return runs.select(keys)


_held_out = jax.jit(training.evaluation_batch, static_argnames="program")


def _run_lanes(
    cell: Cell,
    keys: Sequence[LaneKey],
    arms: MakeArm,
    places: Sequence[Place],
    watch: Callable[[int], None],
) -> CellRuns:
    config = cell.config
    chunks = lanes.plan_chunks(
        0, config.steps, evaluate_every=config.eval_every, end_every=config.steps
    )
    kept = _Kept(config.eval_every)
    planned = _plan(cell, keys, arms)
    for result in lanes.run_chunks(planned, chunks, places=places[: len(keys)]):
        kept.add(result)
        watch((result.chunk.stop - result.chunk.start) * len(keys))
    return kept.finish(keys)


def _plan(cell: Cell, keys: Sequence[LaneKey], arms: MakeArm) -> list[PlannedLane]:
    made = {name: arms(name, cell.config.d_k) for name in dict.fromkeys(key.arm for key in keys)}
    programs = {name: training.lane_program(cell.config, arm) for name, arm in made.items()}
    return [
        PlannedLane(programs[key.arm], lanes.make_lane(made[key.arm], key.learning_rate, key.seed))
        for key in keys
    ]


class _Kept:
    """What stays of the chunks."""

    def __init__(self, eval_every: int):
        self._every = eval_every
        self._steps: list[int] = []
        self._columns: dict[str, list[NDArray]] = {
            name: [] for name in ("loss", "accuracy", "grad_norm", *ROW_STATISTICS)
        }

    def add(self, result: ChunkResult) -> None:
        chunk = result.chunk
        if result.evaluation is not None:
            self._steps.append(chunk.stop)
            for name, values in result.evaluation._asdict().items():
                self._columns[name].append(values)
        if chunk.stop > chunk.start:
            self._columns["grad_norm"].extend(result.metrics.grad_norm.T)
            if chunk.start % self._every == 0:
                self._keep_row(result, 0)
        self._last = result

    def _diverged_at(self) -> list[int]:
        return [int(state.diverged_at) for state in self._last.states if state is not None]

    def _keep_row(self, result: ChunkResult, row: int) -> None:
        for name in ROW_STATISTICS:
            values = getattr(result.metrics.heads, name)[:, row]
            self._columns[name].append(reduce_heads(name, values))

    def finish(self, keys: Sequence[LaneKey]) -> CellRuns:
        self._keep_row(self._last, -1)
        columns = {name: np.stack(values, axis=1) for name, values in self._columns.items()}
        spikes = spikes_per_thousand(columns.pop("grad_norm"))
        arm, rate, seed = zip(*keys, strict=True)
        return CellRuns(
            arm=np.array(arm),
            learning_rate=np.array(rate),
            seed=np.array(seed),
            steps=np.array(self._steps),
            spikes_per_thousand=spikes,
            diverged_at=np.array(self._diverged_at()),
            **columns,
        )


def _join(a: CellRuns, b: CellRuns) -> CellRuns:
    return CellRuns(
        **{
            name: values if name == "steps" else np.concatenate([values, getattr(b, name)])
            for name, values in a._asdict().items()
        }
    )


def _settings(cell: Cell, keys: Sequence[LaneKey], arms: MakeArm) -> dict[str, Any]:
    """What decides a lane's numbers besides its key; JSON."""
    settings = strict(cell.config.to_json())
    for name in (
        *("scale", "learning_rate", "num_seeds", "seed", "log_every", "checkpoint_every"),
        *("format", "version"),
    ):
        del settings[name]
    for name in dict.fromkeys(key.arm for key in keys):
        arm = arms(name, cell.config.d_k)
        numbers = (arm.rule.multiplier, arm.query_key_init, arm.query_key_rate)
        settings[f"numbers of {name}"] = list(numbers)
    return settings


def _check_settings(path: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    for name, value in now.items():
        if name in before and before[name] != value:
            raise ValueError(
                f"out: {path} was run with {name} {before[name]}, now it is {value}; "
                "give another folder"
            )


def save_cell(path: Path, runs: CellRuns, about: dict[str, Any]) -> None:
    """Write a cell's file in one piece: readers see the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".partial")
    with temporary.open("wb") as file:
        np.savez_compressed(file, about=np.array(json.dumps(about)), **runs._asdict())
    temporary.replace(path)


def load_cell(path: Path) -> tuple[CellRuns | None, dict[str, Any]]:
    """Read a cell's file.

    Returns:
      Its lanes (None without a file); `settings`, which decide the numbers of all of them, and
      `environments`, those that they were run in.

    Raises:
      ValueError: a damaged file; one line.
    """
    try:
        with path.open("rb") as opened, np.load(opened) as file:
            about = json.loads(str(file["about"]))
            return CellRuns(**{name: file[name] for name in CellRuns._fields}), about
    except FileNotFoundError:
        return None, {"settings": {}, "environments": []}
    except (ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"out: {path} is damaged, delete it: {error}") from None
