"""A run that is killed again and again, and gone on with, is the run that nobody touched.

`pytest tests/test_survival.py --kills=300` kills ten runs thirty times each.
"""

import collections
import json
import os
import subprocess
import sys
from pathlib import Path

import chex
import numpy as np
import pytest

from experiments.engine.lanes import plan_lanes
from experiments.runs import checkpoints
from experiments.runs.folder import stored_config
from experiments.runs.resume import read_states
from experiments.runs.rows import read_rows
from experiments.runs.seal import check_seal, read_seal

FLAGS = [
    "--scale=none,learned", "--task=reverse", "--steps=1500", "--num_seeds=1", "--batch_size=4",
    "--sequence_length=8", "--vocab_size=4", "--d_model=16", "--d_k=8", "--d_ff=16",
    "--optimizer=adamw", "--dropout_rate=0.1", "--eval_every=6", "--eval_size=8",
    "--checkpoint_every=14", "--nofigures",
]  # fmt: skip
ROWS = ("metrics.jsonl", "evaluation.jsonl")
KILLS_PER_RUN = 30


def pytest_generate_tests(metafunc):
    if "run_number" in metafunc.fixturenames:
        runs = -(-metafunc.config.getoption("--kills") // KILLS_PER_RUN)
        metafunc.parametrize("run_number", range(runs))


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    """Runs train.py until it ends or is killed, see lives.py; returns its exit status."""
    folder = tmp_path_factory.mktemp("lives")
    script = Path(__file__).parent / "lives.py"
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={
            **{name: os.environ[name] for name in os.environ if not name.startswith("JAX_")},
            "XDG_CACHE_HOME": str(folder),  # not the suite's: a kill may leave half an entry
            "XLA_FLAGS": "--xla_backend_optimization_level=0",  # compiles in half the time
        },
    ) as process:
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None and stdout is not None

        def live(*flags, log, after=None, delay=0.0):
            argv = ["train.py", *FLAGS, *flags]
            life = {"argv": argv, "log": str(log), "after": after, "delay": delay}
            stdin.write(json.dumps(life) + "\n")
            stdin.flush()
            return int(stdout.readline())

        yield live
        stdin.close()


@pytest.fixture(scope="module")
def untouched(live, tmp_path_factory):
    """The folder of a run that was never killed, and that hardly ever saved."""
    folder = tmp_path_factory.mktemp("untouched")
    flags = (f"--out={folder / 'run'}", "--checkpoint_every=100000")
    assert live(*flags, log=folder / "log") == 0, (folder / "log").read_text()
    return folder / "run"


def stage(folder):
    """What a kill left behind: the name of the stage that it hit."""
    if not (folder / "environment.json").exists():
        return "before the first step"
    steps = checkpoints.committed_steps(folder / "checkpoints")
    if list((folder / "checkpoints").glob("*.tmp")):
        return "during a checkpoint"
    metrics = folder / "metrics.jsonl"
    rows = metrics.read_bytes() if metrics.exists() else b""
    if rows and not rows.endswith(b"\n"):
        return "within a row"
    due = steps[-1] if steps else 0
    return "rows after the checkpoint" if rows.count(b"\n") > 2 * due else "rows as checkpointed"


def test_a_run_killed_thirty_times_is_the_run_that_nobody_touched(
    live, untouched, tmp_path, run_number
):
    random = np.random.default_rng(run_number)
    folder, log = tmp_path / "run", tmp_path / "log"
    whole = {name: (untouched / name).read_bytes() for name in ROWS}
    stages = collections.Counter()
    for number in range(KILLS_PER_RUN):
        resume = ["--resume"] * (folder / "config.json").exists()
        after = int(random.integers(1, min(10 * 2**number, 400)))  # the first ones early
        delay = random.uniform(0, 0.02) if random.random() < 0.7 else 0.0
        status = live(f"--out={folder}", *resume, log=log, after=after, delay=delay)
        assert status == -9, log.read_text()
        stages[stage(folder)] += 1
        for name in ROWS:  # never a row too many, nor another one
            if (folder / name).exists():
                assert whole[name].startswith((folder / name).read_bytes())
        if (folder / "config.json").exists():
            assert check_seal(folder) is None  # a crash is no change
    print(dict(stages), checkpoints.committed_steps(folder / "checkpoints"))
    assert stages["before the first step"] and stages["during a checkpoint"]

    last = live(f"--out={folder}", "--resume", "--checkpoint_every=100000", log=log)
    assert last == 0, log.read_text()
    assert "Traceback" not in log.read_text()
    assert {name: (folder / name).read_bytes() for name in ROWS} == whole
    seal = read_seal(folder)
    assert check_seal(folder) is None and seal is not None and seal.ended
    config = stored_config(folder)
    rows = read_rows(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == [step for step in range(1500) for _ in range(2)]
    states = [read_states(f, config, plan_lanes(config), pytest.fail) for f in (folder, untouched)]
    assert states[0][0] == 1500
    chex.assert_trees_all_equal(*states)
