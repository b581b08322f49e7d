"""Two processes of one run write what one process writes, through stops and kills."""

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import chex
import pytest

from experiments.config import RecordOptions, TrainConfig, resolve
from experiments.engine import lanes, training
from experiments.runs import recording, run

ROOT = Path(__file__).parents[1]
ROWS = (recording.METRICS, recording.EVALUATION)


@pytest.fixture
def config(tiny):
    """A run that takes long enough to be stopped and killed."""
    return dataclasses.replace(tiny, steps=500, eval_every=10, checkpoint_every=50)


@pytest.fixture
def start(config, tmp_path):
    """Starts the two processes of a run, the leader first."""
    settings = vars(config).items()
    run_flags = [f"--{n}={value}" for n, value in settings if value != getattr(TrainConfig, n)]
    started = []

    def start(*flags):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        pair = []
        for number in range(2):
            command = [
                sys.executable, "train.py", *run_flags, *flags, "--nofigures", "--distributed",
                f"--coordinator_address=localhost:{port}", "--num_processes=2",
                f"--process_id={number}", f"--compilation_cache={tmp_path / 'cache'}",
            ]  # fmt: skip
            environment = {
                **os.environ,
                "JAX_PLATFORMS": "cpu",
                "NPROC": str(max(2, lanes.num_cores())),  # the pool that this process has
            }
            with (tmp_path / f"log{number}").open("a") as log:
                pair.append(subprocess.Popen(command, cwd=ROOT, env=environment, stderr=log))
        started.extend(pair)
        return pair

    yield start
    for process in started:
        process.kill()
        process.wait()


def ends(pair):
    """The exit statuses of a run's processes."""
    return [process.wait(timeout=120) for process in pair]


def wait_for_rows(folder, count, pair):
    """Wait until the run has so many rows."""
    metrics = folder / recording.METRICS
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < count:
        assert all(process.poll() is None for process in pair)
        time.sleep(0.01)


def test_two_processes_stopped_and_killed_write_what_one_writes(config, start, tmp_path):
    folder, one = tmp_path / "two", tmp_path / "one"
    out = f"--out={folder}"

    pair = start(out)
    wait_for_rows(folder, 200, pair)
    pair[1].send_signal(signal.SIGTERM)  # the follower hears of it, and both stop
    assert ends(pair) == [128 + signal.SIGTERM] * 2

    pair = start(out, "--resume")
    wait_for_rows(folder, 800, pair)
    pair[0].kill()
    assert ends(pair)[1] != 0  # the runtime does not let the follower wait for ever

    assert ends(start(out)) == [2, 2]  # the folder is taken: the leader says so, both leave
    assert ends(start(out, "--resume")) == [0, 0]

    run.record(config, RecordOptions(one, figures=False))
    for name in ROWS:
        assert (folder / name).read_bytes() == (one / name).read_bytes()
    config = resolve(config)
    program = training.lane_program(config)
    ends_of = [run.read_states(path, config, program, pytest.fail) for path in (folder, one)]
    assert ends_of[0][0] == 500
    chex.assert_trees_all_equal(*ends_of)
    log = (tmp_path / "log0").read_text()
    assert "exists" in log and "Traceback" not in log
    assert len(recording.read_json(folder / "environment.json")["devices"]) > 1
