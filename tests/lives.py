"""Lives of train.py: forks of one process that has imported and traced all that they need.

Reads one life a line from standard input and answers with its exit status, -9 if it was killed:

    {"argv": ["train.py", ...], "log": file, "after": events or null, "delay": seconds}

A life is killed `delay` seconds after its event number `after`. Events are Python's audit events of
files and folders, so a kill hits the same stage of a run however slow the machine is; without a
delay it hits right there, before the operation.
"""

import functools
import json
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import numpy as np

import train
from experiments.analysis import report  # noqa: F401
from experiments.commands import train as train_command  # noqa: F401
from experiments.commands.flags import parse
from experiments.config import ProcessOptions, RecordOptions, TrainConfig, resolve
from experiments.engine import lanes, training
from experiments.runs import record  # noqa: F401

EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.scandir"}


def trace(argv):
    """Trace the programs of a run, which its lives then need not; starts no backend."""
    settings = (TrainConfig, RecordOptions, ProcessOptions)
    parsed = parse(argv, *settings)
    assert parsed is not None
    config = resolve(parsed.pick(TrainConfig))
    for program, lane in dict(lanes.plan_lanes(config)).items():
        initialize, advance, evaluate = (
            functools.partial(f, program)
            for f in (training.initialize, training.advance, training.evaluate)
        )
        state = jax.eval_shape(initialize, lane)
        jax.eval_shape(advance, lane, state, np.int32(1))
        jax.eval_shape(evaluate, lane, state)


def live(argv, log, after, delay):
    """One life; returns its exit status."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 70
        try:
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            if after is not None:
                die(after, write if delay else None)
            status = train.main(argv)
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 1
        finally:
            os._exit(status)
    os.close(write)
    if after is not None:
        os.read(read, 1)  # returns at the event, or when the life has ended
        time.sleep(delay)
        os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    os.close(read)
    return os.waitstatus_to_exitcode(status)


def die(after, tell):
    """Die at an event of this process, or tell of it."""
    count = 0

    def hook(event, arguments):
        nonlocal count
        if event in EVENTS:
            count += 1
            if count == after and tell is None:
                os.kill(os.getpid(), signal.SIGKILL)
            elif count == after:
                os.write(tell, b".")

    sys.addaudithook(hook)


def main():
    """Serve until standard input ends."""
    traced = False
    for line in sys.stdin:
        life = json.loads(line)
        if not traced:
            trace([flag for flag in life["argv"] if flag != "--resume"])
            traced = True
        print(live(**life), flush=True)


if __name__ == "__main__":
    main()
