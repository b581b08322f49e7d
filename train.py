"""Train scaled and unscaled attention side by side: `python train.py --scale=none`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.commands import startup
from experiments.commands.flags import Parsed, disk_error, fail, help_text, parse, typed
from experiments.config import ProcessOptions, RecordOptions, TrainConfig, check_process, resolve

COMMAND = "train.py"
ABOUT = """\
Trains a small transformer on a toy task, once for each score rule (arm) and seed: same initial
weights, same batches, one number changed. Writes one row a step and lane to a run folder."""


def main(argv: Sequence[str]) -> int:
    """Run the command line; returns the exit status."""
    settings = (TrainConfig, RecordOptions, ProcessOptions)
    try:
        parsed = parse(argv, *settings)
        if parsed is None:
            from experiments import tasks

            notes = {"tasks": ", ".join(tasks.TASKS)}
            print(help_text("python train.py", ABOUT, notes, *settings))
            return 0
        config, options = parsed.pick(TrainConfig), parsed.pick(RecordOptions)
        if not options.resume:  # otherwise much of it is the stored run's
            config = resolve(config)
        process = check_process(parsed.pick(ProcessOptions))
    except ValueError as error:
        fail(COMMAND, error)
    cache = process.compilation_cache
    if cache != "off":
        startup.use_compilation_cache(Path(cache) if cache else startup.default_cache())
    flags = typed(argv, "scale", "out", "resume", "overwrite", "process_id")
    if not process.distributed:
        return lead(parsed, config, flags)

    from experiments.engine import processes

    try:
        processes.start(process.coordinator_address, process.num_processes, process.process_id)
    except ValueError as error:
        fail(COMMAND, error)
    try:
        if not processes.leading():
            from experiments.runs import run

            return run.follow()
        with processes.Followers() as followers:
            return lead(parsed, config, flags, followers)
    except processes.ProcessLost as error:
        print(f"{COMMAND}: {error}", file=sys.stderr, flush=True)
        os._exit(1)  # to leave in good order would be to wait for the one that is gone


def lead(parsed: Parsed, config: TrainConfig, flags: str, followers=None) -> int:
    """Record the run; returns the exit status."""
    from experiments.commands import console
    from experiments.runs import run

    options = parsed.pick(RecordOptions)
    try:
        if options.resume:
            config = resolve(console.resumed_config(parsed, options))
        run.prepare(config)
    except (ValueError, console.RunFolderError) as error:
        fail(COMMAND, error)
    try:
        return console.run(config, options, flags, followers)
    except console.RunFolderError as error:
        fail(COMMAND, error)
    except OSError as error:
        fail(COMMAND, disk_error(error), status=1)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv))
    except KeyboardInterrupt:  # before the first step, or a second one
        fail(COMMAND, "interrupted", status=128 + signal.SIGINT)
