"""Processes of one run: what they must have in common, and what is left when one is lost."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.config import TrainConfig
from experiments.engine import processes

ROOT = Path(__file__).parents[3]
TYPED = vars(TrainConfig())
# Exchanges numbers with the other until it is lost, and then says so.
MEMBER = """
import os, sys
import jax
from experiments.engine import processes
from experiments.engine.devices import num_cores
address, number = sys.argv[1], int(sys.argv[2])
processes.start(address, 2, number, facts={}, wait_seconds=60, say=lambda line: None)
assert jax.local_device_count() == int(os.environ.get("JAX_NUM_CPU_DEVICES", num_cores()))
try:
    while True:
        assert processes.largest(number) == 1
        print("exchanged", flush=True)
except processes.ProcessLost as lost:
    print(lost, flush=True)
    os._exit(7)
"""


def differences(before):
    """The facts that are no longer what they were."""
    now = processes.facts(TYPED)
    return {name for name in before | now if before.get(name) != now.get(name)}


def test_facts_are_texts_of_settings_versions_and_source():
    facts = processes.facts(TYPED)
    assert all(isinstance(value, str) for value in facts.values())
    assert facts.keys() >= {*TYPED, "jax", "numpy", "python", "NPROC", "XLA_FLAGS"}
    assert (facts["scale"], facts["seed"], facts["clip_norm"]) == ("none,sqrt", "0", "default")
    rooms = {name.split("/")[0] for name in facts if name.endswith(".py")}
    assert rooms == {"attention", "experiments"}
    assert facts == processes.facts(dict(TYPED))


@pytest.mark.parametrize("name", ["NPROC", "XLA_FLAGS"])
def test_what_the_environment_says_is_a_fact(monkeypatch, name):
    before = processes.facts(TYPED)
    monkeypatch.setenv(name, "77")
    assert differences(before) == {name}


def test_settings_of_jax_that_decide_numbers_are_facts():
    import jax

    before = processes.facts(TYPED)
    jax.config.update("jax_threefry_partitionable", False)
    try:
        assert differences(before) == {"JAX_THREEFRY_PARTITIONABLE"}
    finally:
        jax.config.update("jax_threefry_partitionable", True)


def test_any_change_of_the_source_is_seen_wherever_it_lies(tmp_path):
    copy = tmp_path / "elsewhere"
    for room in ("attention", "experiments"):
        shutil.copytree(ROOT / room, copy / room, ignore=shutil.ignore_patterns("__pycache__"))
    ours, theirs = processes.source_digests(ROOT), processes.source_digests(copy)
    assert ours == theirs and len(ours) > 40
    changed = copy / "experiments" / "tasks" / "table.py"
    changed.write_bytes(changed.read_bytes() + b"\n")
    (copy / "experiments" / "new.py").touch()
    theirs = processes.source_digests(copy)
    assert ours.items() ^ theirs.items() == {
        ("experiments/tasks/table.py", ours["experiments/tasks/table.py"]),
        ("experiments/tasks/table.py", theirs["experiments/tasks/table.py"]),
        ("experiments/new.py", theirs["experiments/new.py"]),
    }


def test_nothing_here_says_who_the_others_are(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("SLURM_", "OMPI_", "JAX_C"))]:
        monkeypatch.delenv(name)
    with pytest.raises(ValueError, match=r"^distributed: .*--coordinator_address.*--process_id$"):
        processes.start(facts={}, wait_seconds=1, say=pytest.fail)


@pytest.fixture
def start():
    """Starts two processes that exchange numbers; a core is a device, or so many as are given."""
    started = []

    def start(**devices):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            address = f"localhost:{free.getsockname()[1]}"
        for number in range(2):
            member = subprocess.Popen(
                [sys.executable, "-c", MEMBER, address, str(number)],
                env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | devices,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            started.append(member)
        return started

    yield start
    for process in started:
        process.kill()
        process.communicate()


# With one device a process, Gloo's word arrives as a ValueError; with more, as a JaxRuntimeError.
@pytest.mark.parametrize("devices", [{}, {"JAX_NUM_CPU_DEVICES": "1"}])
def test_a_lost_follower_is_one_line(start, devices):
    pair = start(**devices)
    for process in pair:
        assert "exchanged\n" in process.stdout  # reads up to there; Gloo has its say before
    pair[1].send_signal(signal.SIGKILL)
    *_, last = pair[0].communicate(timeout=60)[0].splitlines()
    assert pair[0].returncode == 7
    assert last.startswith("another process of this run is gone (")
    assert last.endswith("); when all have ended, go on with --resume")
