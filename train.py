"""Train scaled and unscaled attention side by side: `python train.py --scale=none`."""

from __future__ import annotations

import dataclasses
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments import startup
from experiments.command_line import disk_error, fail, help_text, parse, typed
from experiments.config import RecordOptions, TrainConfig, resolve

COMMAND = "train.py"
ABOUT = """\
Trains a small transformer on a toy task, once for each score rule (arm) and seed: same initial
weights, same batches, one number changed. Writes one row a step and lane to a run folder."""


@dataclasses.dataclass(frozen=True)
class ProcessOptions:
    """What concerns this process only."""

    compilation_cache: str | None = dataclasses.field(
        default=None,
        metadata={
            "help": "folder for compiled programs, or off",
            "default": "why-sqrt-dk in the user's cache folder",
        },
    )


def main(argv: Sequence[str]) -> int:
    """Run the command line; returns the exit status."""
    settings = (TrainConfig, RecordOptions, ProcessOptions)
    try:
        parsed = parse(argv, *settings)
    except ValueError as error:
        fail(COMMAND, error)
    from experiments import console  # starts importing JAX

    if parsed is None:
        print(help_text("python train.py", ABOUT, console.help_notes(), *settings))
        return 0
    options = parsed.pick(RecordOptions)
    try:
        config = resolve(console.requested_config(parsed, options))
    except (ValueError, console.RunFolderError) as error:
        fail(COMMAND, error)
    cache = parsed.values["compilation_cache"]
    if cache != "off":
        startup.use_compilation_cache(Path(cache) if cache else startup.default_cache())
    try:
        return console.run(config, options, typed(argv, "scale", "out", "resume", "overwrite"))
    except console.RunFolderError as error:
        fail(COMMAND, error)
    except OSError as error:
        fail(COMMAND, disk_error(error), status=1)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv))
    except KeyboardInterrupt:  # before the first step, or a second one
        fail(COMMAND, "interrupted", status=128 + signal.SIGINT)
