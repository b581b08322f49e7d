"""What a person sees of a run: its flags, progress, tables, and what to do next."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import os
import re
import shlex
import signal
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from experiments import tasks
from experiments.commands import console, startup
from experiments.commands.command import Command
from experiments.commands.flags import Parsed
from experiments.config import (
    ProcessOptions,
    RecordOptions,
    RunConfig,
    TrainConfig,
    as_typed,
    resolve,
    scales_help,
)
from experiments.runs.claim import make_folder
from experiments.runs.folder import stored_config

if TYPE_CHECKING:
    from experiments.analysis.read import ArmRun
    from experiments.engine.lanes import ChunkResult
    from experiments.engine.processes import Followers
    from experiments.runs.record import Recorded

RUNS = Path("runs")

# --help ---------------------------------------------------------------------------------------

NAME = "train.py"
ABOUT = """\
Trains a small transformer on a toy task, once for each arm (what is done to q·k before the softmax)
and seed: same initial weights, same batches. Writes one row a step and lane to a run folder.

A list is separated by commas, without spaces: --scale=none,sqrt,0.2. A switch is --flag, --noflag,
--flag=true or --flag=false."""
GROUPS = {
    "What is compared": ("scale", "learning_rate", "num_seeds", "seed"),
    "Task and data": ("task", "steps", "batch_size", "sequence_length", "vocab_size"),
    "Model": (
        *("d_model", "d_k", "d_v", "d_ff", "num_heads", "num_layers", "norm", "dropout_rate"),
        "attention",
    ),
    "Optimisation": ("optimizer", "warmup_steps", "clip_norm"),
    "Measuring": ("log_every", "eval_every", "eval_size", "checkpoint_every"),
    "Machine": (
        *("dtype", "matmul_precision", "vectorize_lanes", "batch_shards", "compilation_cache"),
        *("distributed", "coordinator_address", "num_processes", "process_id"),
        "wait_seconds",
    ),
    "Run folder": (
        *("out", "resume", "overwrite", "accept_edits", "figures", "tensorboard"),
        "flagfile",
    ),
}
EXAMPLES = (
    "python train.py --scale=none",
    "python train.py --scale=none,sqrt,0.2 --task=recall --out=runs/recall",
    "python train.py --resume --out=runs/recall --steps=2000",
)


def command(run: Callable[[Parsed], int]) -> Command:
    """The command, which `run` carries out."""
    return Command(
        name=NAME,
        typed=f"python {NAME}",
        words="",
        about=ABOUT,
        options=(TrainConfig, RecordOptions, ProcessOptions),
        run=run,
        groups=GROUPS,
        notes={"scales": scales_help(), "tasks": ", ".join(tasks.TASKS)},
        lists=lambda: {"Tasks": {name: tasks.make_task(name).summary for name in tasks.TASKS}},
        examples=EXAMPLES,
    )


# Before ---------------------------------------------------------------------------------------


def resumed_config(parsed: Parsed, options: RecordOptions) -> RunConfig:
    """The config of the run to go on with; flags that were typed stand above it.

    Raises:
      ValueError: no run is named, or flags contradict each other.
      RunFolderError: it is none, or a damaged one.
    """
    if options.out is None:
        raise ValueError("resume: say which run, with --out=RUN")
    if options.overwrite:
        raise ValueError("overwrite: contradicts --resume; give one of them")
    typed = vars(parsed.pick(TrainConfig))
    given = {name: typed[name] for name in typed if name in parsed.given}
    return resolve(dataclasses.replace(as_typed(stored_config(options.out)), **given))


@contextlib.contextmanager
def prepared(config: RunConfig, options: RecordOptions) -> Generator[RecordOptions]:
    """Check the machine, and give the options a folder: a new one, which goes if it stays empty.

    Raises:
      ValueError: this machine's devices can't serve.
      RunFolderError: no folder can be made.
    """
    from experiments.engine.devices import start_places

    lanes, shards, attention = len(config.lane_names()), config.batch_shards, config.attention
    startup.check_machine(lambda: start_places(lanes, shards, attention=attention))
    if options.out is not None:
        yield options
        return
    folder = _new_folder(config)
    try:
        yield dataclasses.replace(options, out=folder)
    finally:
        with contextlib.suppress(OSError):  # it holds a run
            folder.rmdir()


def _new_folder(config: RunConfig) -> Path:
    """A folder under runs/, named by date, task and arms; made here, so nobody else has it."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    arms = "-".join(re.sub(r"[^\w.+-]", "_", name)[:12] for name in config.scale[:4])
    make_folder(RUNS)
    folder, count = RUNS / f"{stamp}-{config.task}-{arms}", itertools.count(2)
    while True:
        try:
            folder.mkdir()
        except FileExistsError:
            folder = folder.with_name(f"{stamp}-{config.task}-{arms}-{next(count)}")
        else:
            return folder


@contextlib.contextmanager
def leading(process: ProcessOptions, typed: TrainConfig) -> Generator[Followers | None]:
    """Lead a run: alone, or as the first of several processes. The others follow, and leave.

    Raises:
      ValueError: not all processes came, or they were started otherwise than this one.
    """
    if not process.distributed:
        yield None
        return
    from experiments.engine import processes

    processes.start(
        process.coordinator_address,
        process.num_processes,
        process.process_id,
        facts=processes.facts(vars(typed)),
        wait_seconds=process.wait_seconds,
        say=console.say,
    )
    try:
        startup.check_machine(processes.several)  # all start their devices now
        if not processes.leading():
            from experiments.runs.record import follow

            raise SystemExit(follow())
        with processes.Followers() as followers:
            yield followers
    except processes.ProcessLost as error:
        os._exit(console.fail(NAME, error, status=1))  # in good order, it would wait for the lost


# While it goes on -----------------------------------------------------------------------------


class RunProgress:
    """A header, and a bar over the steps of all lanes with loss and accuracy of each arm."""

    def __init__(self, config: RunConfig, options: RecordOptions):
        self._config, self._folder = config, options.out
        self._arms = np.array([name.scale for name in config.lane_names()])
        self._bar = Progress(
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False),
            console=console.ERRORS,
        )
        self._task = self._bar.add_task("compiling", total=config.steps)
        self.begun = False

    def __enter__(self) -> RunProgress:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self.begun:
            self._bar.stop()
        if self.begun and isinstance(error, ValueError):
            # What a person typed was fine: this needs its traceback.
            raise RuntimeError("a fault in the program") from error

    def begin(self) -> None:
        """Say what begins."""
        config, task = self._config, self._config.make_task()
        if config.num_layers < task.min_layers:
            console.say(f"warning: num_layers is {config.num_layers}: {task.depth_reason}")
        seeds = f"{config.num_seeds} seed{'s' * (config.num_seeds > 1)}"
        arms = ", ".join(arm.label for arm in config.arms())
        console.say(f"{self._folder}: {config.task}, {config.steps} steps, {seeds}; {arms}")
        self._bar.start()
        self.begun = True

    def update(self, result: ChunkResult) -> None:
        """Show how far it is."""
        text, evaluation = "training", result.evaluation
        if evaluation is not None:
            text = "  ".join(
                f"{arm}: loss {np.median(evaluation.loss[self._arms == arm]):.2f} "
                f"acc {np.median(evaluation.accuracy[self._arms == arm]):.0%}"
                for arm in self._config.scale
            )
        self._bar.update(self._task, completed=result.chunk.stop, description=text)


# After ----------------------------------------------------------------------------------------


def stopped(recorded: Recorded, folder: Path) -> int:
    """Say by what a run was stopped, and how it goes on; returns the exit status."""
    number = recorded.stopped_by or 0
    console.say(
        f"stopped by {signal.Signals(number).name} after {recorded.steps_done} of "
        f"{recorded.config.steps} steps; go on with: python train.py --resume "
        f"--out={shlex.quote(str(folder))}"
    )
    return 128 + number


def draw_figures(arms: Sequence[ArmRun], folder: Path, say: Callable[[str], None]) -> list[Path]:
    """`figures.draw.draw_figures`, with Matplotlib loaded when it comes to that."""
    from experiments.figures import draw

    return draw.draw_figures(arms, folder, say)


def conclude(recorded: Recorded, summary: dict[str, Any], folder: Path) -> int:
    """Show the tables, what diverged, and what to do next; returns the exit status."""
    from experiments.analysis.report import terminal_tables

    config = recorded.config
    console.show(terminal_tables(summary))
    console.say(f"written: {folder}, with report.md")
    diverged = [
        f"{name.scale} learning_rate={name.learning_rate} seed={name.seed} at step {step}"
        for name, step in zip(recorded.names, recorded.diverged_at, strict=True)
        if step >= 0
    ]
    if diverged:
        console.say(f"diverged and frozen: {'; '.join(diverged)}")
    if len(config.scale) == 1:
        console.say("the other arm, and the two compared:")
        for command in other_arm(config, folder):
            console.say(f"  {command}")
    if len(diverged) == len(recorded.names):
        console.say(f"every lane diverged: {folder} has nothing to conclude from")
        return 1
    return 0


def other_arm(config: RunConfig, folder: Path) -> tuple[str, str]:
    """The commands that run the arm to compare with, and compare."""
    from experiments.analysis.summary import train_command

    arm = config.scale[0]
    other = "none" if arm == "sqrt" else "sqrt"
    here = str(folder)
    there = here.removesuffix(arm) + other if here.endswith(arm) else f"{here}-{other}"
    if os.path.lexists(there):
        there = f"{here}-{other}"
    train = train_command(dataclasses.replace(config, scale=(other,)))
    runs = shlex.join(f"./{run}" if run.startswith("-") else run for run in (here, there))
    return (
        f"{train} --out={shlex.quote(there)}",
        f"python -m experiments compare {runs}",
    )
