"""Two processes of one run: they agree or don't start, and write what one process writes."""

import contextlib
import dataclasses
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import chex
import pytest

from experiments.config import RecordOptions, TrainConfig, resolve
from experiments.engine import lanes
from experiments.engine.devices import num_cores
from experiments.runs.folder import ENVIRONMENT, EVALUATION, METRICS, read_json
from experiments.runs.record import record
from experiments.runs.resume import read_states

ROOT = Path(__file__).parents[1]
NPROC = str(max(2, num_cores()))  # the thread pool that this process has
SLURM_PORTS = 65535 - 2**12 + 1  # JAX adds the job's number, modulo 2¹²


@pytest.fixture
def config(tiny):
    """A run that takes long enough to be stopped and killed."""
    return dataclasses.replace(tiny, steps=500, eval_every=10, checkpoint_every=50)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of the source: one that is edited meanwhile would not agree with itself."""
    copy = tmp_path_factory.mktemp("source")
    for room in ("attention", "experiments"):
        shutil.copytree(ROOT / room, copy / room, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "train.py", copy)
    return copy


def free_port(first=0):
    """A port where nobody listens, from `first` on; any if that is 0."""
    while True:
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("localhost", first))
            return free.getsockname()[1]
        first += 1


class Launcher:
    """Starts processes of a run; what they say goes to log0 and log1."""

    def __init__(self, config, source, folder):
        settings = vars(config).items()
        self._run = [f"--{n}={value}" for n, value in settings if value != getattr(TrainConfig, n)]
        self._source, self.folder, self.started = source, folder, []

    def one(self, number, *flags, source=None, **environment):
        """A process with these flags behind the run's."""
        # One device compiles fewer programs than two, to the same bits.
        variables = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "NPROC": NPROC}
        with (self.folder / f"log{number}").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "train.py", *self._run, "--nofigures", "--distributed", *flags],
                cwd=source or self._source,
                env=os.environ | variables | environment,
                stderr=log,
            )
        self.started.append(process)
        return process

    def pair(self, *flags, others=(), source=None):
        """Both, the leader first; `others` and `source` are the follower's."""
        address = f"--coordinator_address=localhost:{free_port()}"
        flags = (*flags, address, "--num_processes=2")
        return (
            self.one(0, *flags, "--process_id=0"),
            self.one(1, *flags, "--process_id=1", *others, source=source),
        )

    def log(self, number):
        """The lines that a process has said."""
        return (self.folder / f"log{number}").read_text().splitlines()


@pytest.fixture
def launch(config, source, tmp_path):
    """Starts processes, and sees to it that they end."""
    launcher = Launcher(config, source, tmp_path)
    yield launcher
    for process in launcher.started:
        process.kill()
        process.wait()


def ends(processes):
    """The exit statuses of a run's processes."""
    return [process.wait(timeout=120) for process in processes]


def wait_for_rows(folder, count, pair):
    """Wait until the run has so many rows."""
    metrics = folder / METRICS
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < count:
        assert all(process.poll() is None for process in pair)
        time.sleep(0.01)


# They agree or don't start --------------------------------------------------------------------


def assert_refused(launch, pair, line):
    """Both said whom they waited for and this line, and left nothing."""
    assert ends(pair) == [2, 2]
    for number in range(2):
        waited, said = launch.log(number)
        assert waited.startswith(f"waiting for process {1 - number} at localhost:")
        assert said == f"train.py: distributed: {line}"
    assert {path.name for path in launch.folder.iterdir()} == {"log0", "log1"}


@pytest.mark.parametrize(
    ("flag", "line"),
    [
        ("--seed=1", "seed is 1 in process 1, 0 in process 0"),
        ("--num_processes=3", "num_processes is 3 in process 1, 2 in process 0"),
    ],
)
def test_a_follower_with_another_flag_is_refused_by_name(launch, flag, line):
    pair = launch.pair(f"--out={launch.folder / 'run'}", others=[flag])
    assert_refused(launch, pair, line)


def test_a_follower_with_another_learning_rate_in_its_code_is_refused(launch, source):
    other = launch.folder / "other"
    shutil.copytree(source, other)
    config = other / "experiments" / "config.py"
    config.write_text(config.read_text().replace('"adam": 1e-3', '"adam": 2e-3'))
    pair = launch.pair(f"--out={launch.folder / 'run'}", source=other)
    assert ends(pair) == [2, 2]
    assert launch.log(0)[1:] == launch.log(1)[1:]
    assert "train.py: distributed: experiments/config.py is " in launch.log(1)[1]
    assert not (launch.folder / "run").exists()


def test_processes_that_slurm_starts_find_each_other_and_disagree(launch):
    port = free_port(SLURM_PORTS + os.getpid() % 2**11)
    step = {
        "SLURM_JOB_ID": str(port - SLURM_PORTS),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": "2",
        "SLURM_LOCALID": "0",
    }
    out = f"--out={launch.folder / 'run'}"
    pair = (
        launch.one(0, out, **step, SLURM_PROCID="0"),
        launch.one(1, out, "--batch_size=8", **step, SLURM_PROCID="1"),
    )
    assert_refused(launch, pair, "batch_size is 8 in process 1, 4 in process 0")


def test_who_waits_in_vain_and_who_finds_the_port_taken_end_in_one_line(launch):
    out = launch.folder / "run"
    with socket.create_server(("localhost", 0)) as server:
        taken = f"localhost:{server.getsockname()[1]}"
        free = f"localhost:{free_port()}"
        flags = ("--num_processes=2", "--process_id=0", "--wait_seconds=1", f"--out={out}")
        pair = [
            launch.one(number, *flags, f"--coordinator_address={address}")
            for number, address in enumerate((taken, free))
        ]
        assert ends(pair) == [2, 2]
    assert launch.log(0) == [f"train.py: coordinator_address: {taken}: Address already in use"]
    assert launch.log(1) == [
        f"waiting for process 1 at {free}, up to 1 s",
        f"train.py: distributed: waited 1 s at {free} for process 1",
    ]
    assert not out.exists()


# They write what one writes -------------------------------------------------------------------


def test_two_processes_stopped_and_killed_write_what_one_writes(config, launch, tmp_path):
    folder, one = tmp_path / "two", tmp_path / "one"
    out = f"--out={folder}"

    pair = launch.pair(out)
    wait_for_rows(folder, 200, pair)
    pair[1].send_signal(signal.SIGTERM)  # the follower hears of it, and both stop
    assert ends(pair) == [128 + signal.SIGTERM] * 2
    assert len(read_json(folder / ENVIRONMENT)["devices"]) == 2

    pair = launch.pair(out, "--resume")
    wait_for_rows(folder, 800, pair)
    pair[0].kill()
    assert ends(pair)[1] != 0  # the runtime does not let the follower wait for ever

    assert ends(launch.pair(out)) == [2, 2]  # the folder is taken: the leader says so, both leave
    assert "exists" in launch.log(0)[-1] and len(launch.log(1)) == 1
    assert ends(launch.pair(out, "--resume")) == [0, 0]
    assert not any("Traceback" in line for number in range(2) for line in launch.log(number))

    config = resolve(config)
    record(config, RecordOptions(one, figures=False))
    for name in (METRICS, EVALUATION):
        assert (folder / name).read_bytes() == (one / name).read_bytes()
    planned = lanes.plan_lanes(config)
    ends_of = [read_states(path, config, planned, pytest.fail) for path in (folder, one)]
    assert ends_of[0][0] == 500
    chex.assert_trees_all_equal(*ends_of)
