"""Train scaled and unscaled attention side by side: `python train.py --scale=none`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from experiments.commands.flags import Parsed

# Imports are late: Ctrl-C during them is one line too, and whoever asks for --help needs no JAX.


def main(argv: Sequence[str]) -> int:
    """Run the command line; returns the exit status."""
    from experiments.commands import command, train

    return command.run(train.command(run), argv)


def run(parsed: Parsed) -> int:
    """Flags, RunConfig, record, report; returns the exit status."""
    from experiments import config as settings
    from experiments.commands import startup, train
    from experiments.commands.console import ERRORS, say
    from experiments.runs.folder import disk_errors_named

    options = parsed.pick(settings.RecordOptions)
    process = settings.check_process(parsed.pick(settings.ProcessOptions))
    typed = parsed.pick(settings.TrainConfig)
    config = None if options.resume else settings.resolve(typed)
    startup.use_compilation_cache(say, process.compilation_cache)
    with train.leading(process, typed) as followers:  # the other processes end here
        from experiments.analysis.report import write_results
        from experiments.runs.record import record

        config = config or train.resumed_config(parsed, options)
        with train.prepared(config, options) as kept, train.RunProgress(config, kept) as bar:
            recorded = record(
                config, kept, watch=bar.update, begin=bar.begin, say=say, followers=followers
            )
        if recorded.stopped_by is not None:
            return train.stopped(recorded, kept.out)
        with ERRORS.status("summary and figures"), disk_errors_named(kept.out):
            draw = train.draw_figures if kept.figures else None
            summary = write_results(kept.out, draw=draw, say=say, accept_edits=kept.accept_edits)
        return train.conclude(recorded, summary, kept.out)


if __name__ == "__main__":
    try:
        from experiments.commands.startup import end_at_interrupt
    except KeyboardInterrupt:
        print("train.py: interrupted", file=sys.stderr)
        sys.exit(130)
    end_at_interrupt("train.py")
    sys.exit(main(sys.argv))
