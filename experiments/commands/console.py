"""What a person sees of a run: progress while it goes on, then a table and what to do next."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import shlex
import signal
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from experiments import tasks
from experiments.analysis import report
from experiments.commands.flags import Parsed
from experiments.config import RecordOptions, TrainConfig
from experiments.engine import lanes
from experiments.engine.lanes import ChunkResult
from experiments.engine.processes import Followers
from experiments.runs.recording import RunFolderError as RunFolderError
from experiments.runs.recording import disk_errors_named
from experiments.runs.run import Recorded, record, stored_config

RUNS = Path("runs")


def resumed_config(parsed: Parsed, options: RecordOptions) -> TrainConfig:
    """The config of the run to go on with; flags that were typed stand above it."""
    config = parsed.pick(TrainConfig)
    if options.out is None:
        raise ValueError("resume: say which run, with --out=RUN")
    if options.overwrite:
        raise ValueError("overwrite: contradicts --resume; give one of them")
    stored = stored_config(options.out)
    given = {name: getattr(config, name) for name in vars(config) if name in parsed.given}
    return dataclasses.replace(stored, **given)


def run(
    config: TrainConfig, options: RecordOptions, flags: str, followers: Followers | None = None
) -> int:
    """Record a resolved config, showing progress; returns the exit status.

    Args:
      config: resolved.
      options: where to; out None is a new folder under runs/.
      flags: as typed, without the scale and the folder, for the command of the other arm.
      followers: the other processes of this run, if there are any.
    """
    if options.out is None:
        options = dataclasses.replace(options, out=new_folder(config))
    task = tasks.make_task(
        config.task, sequence_length=config.sequence_length, vocab_size=config.vocab_size
    )
    err = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    layers: Any = config.num_layers
    if layers < task.min_layers:
        err.print(f"warning: num_layers is {layers}: {task.depth_reason}")
    arms = ", ".join(f"{rule.name} ({rule.formula})" for rule in config.rules())
    header = f"{options.out}: {task.name}, {config.steps} steps, {config.num_seeds} seeds; {arms}"
    with _Progress(config, err, header) as progress:
        recorded = record(
            config,
            options,
            watch=progress.update,
            begin=progress.begin,
            say=err.print,
            followers=followers,
        )
    return _conclude(recorded, options, flags, err)


def new_folder(config: TrainConfig) -> Path:
    """A name under runs/ that is not taken yet: date, task, arms."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    base = f"{stamp}-{config.task}-{'-'.join(name[:12] for name in config.scale[:4])}"
    names = itertools.chain([base], (f"{base}-{i}" for i in itertools.count(2)))
    return next(RUNS / name for name in names if not (RUNS / name).exists())


class _Progress:
    """A header and a bar over the steps of all lanes, with loss and accuracy per arm."""

    def __init__(self, config: TrainConfig, console: Console, header: str):
        self._arms = [name.scale for name in lanes.lane_names(config)]
        self._header = header
        self._bar = Progress(
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=console,
        )
        self._task = self._bar.add_task("compiling", total=config.steps)

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *exception) -> None:
        if self._bar.live.is_started:
            self._bar.stop()

    def begin(self) -> None:
        self._bar.console.print(self._header)
        self._bar.start()

    def update(self, result: ChunkResult) -> None:
        text = "training"
        if result.evaluation is not None:
            arms = np.array(self._arms)
            text = "  ".join(
                f"{arm}: loss {np.median(result.evaluation.loss[arms == arm]):.2f} "
                f"acc {np.median(result.evaluation.accuracy[arms == arm]):.0%}"
                for arm in dict.fromkeys(self._arms)
            )
        self._bar.update(self._task, completed=result.chunk.stop, description=text)


def _conclude(recorded: Recorded, options: RecordOptions, flags: str, err: Console) -> int:
    """Summary, figures, what diverged, what to do next."""
    config, folder = recorded.config, options.out
    here = shlex.quote(str(folder))
    if recorded.stopped_by is not None:
        name = signal.Signals(recorded.stopped_by).name
        err.print(
            f"stopped by {name} after {recorded.steps_done} of {config.steps} steps; "
            f"go on with: python train.py --resume --out={here}"
        )
        return 128 + recorded.stopped_by
    with err.status("summary and figures"), disk_errors_named(folder):
        summary = report.write_results(folder, figures=options.figures, say=err.print)
    Console(highlight=False).print(report.terminal_tables(summary))
    err.print(f"written: {folder}, with report.md")
    diverged = [
        f"{name.scale} learning_rate={name.learning_rate:g} seed={name.seed} at step {step}"
        for name, step in zip(recorded.names, recorded.diverged_at, strict=True)
        if step >= 0
    ]
    if diverged:
        err.print(f"diverged and frozen: {'; '.join(diverged)}")
    if len(config.scale) == 1:
        other = "sqrt" if config.scale[0] != "sqrt" else "none"
        err.print("the other arm, and the two compared:")
        there = shlex.quote(f"{folder}-{other}")
        err.print(f"  python train.py --scale={other} {flags} --out={there}")
        err.print(f"  python -m experiments compare {here} {there}")
    if len(diverged) == len(recorded.names):
        err.print(f"every lane diverged: {folder} has nothing to conclude from")
        return 1
    return 0
