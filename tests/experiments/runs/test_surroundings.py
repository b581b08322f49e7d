"""JAX as its user has set it: what decides numbers is pinned, recorded or refused, never silent."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from experiments.runs.environment import environment
from experiments.runs.folder import ENVIRONMENT, RunFolderError, read_json, write_json

ROOT = Path(__file__).parents[3]
# Each alone would change rows, or end a healthy run, if it were left to act.
HOSTILE = {
    "JAX_DEBUG_NANS": "1",
    "JAX_ENABLE_X64": "1",
    "JAX_DEFAULT_PRNG_IMPL": "rbg",
    "JAX_THREEFRY_PARTITIONABLE": "0",
    "JAX_NUMPY_DTYPE_PROMOTION": "strict",
    "JAX_NUMPY_RANK_PROMOTION": "raise",
    "JAX_DEFAULT_MATMUL_PRECISION": "bfloat16",
    "JAX_SOFTMAX_CUSTOM_JVP": "0",
}
RUN = """
import dataclasses, sys
from pathlib import Path
import jax
jax.config.update("jax_num_cpu_devices", 2)
from experiments import RecordOptions, train
from experiments.config import as_typed, resolve
from experiments.runs.folder import stored_config
from experiments.runs.record import record

whole, cut, one = map(Path, sys.argv[1:])
config = as_typed(stored_config(cut))
train(dataclasses.replace(config, scale="none", num_seeds=1), out=one)
assert len(jax.devices()) == 2, jax.devices()  # although a single lane asks for one
train(config, out=whole)
record(resolve(config), RecordOptions(cut, resume=True))
assert jax.config.jax_enable_x64 and jax.config.jax_default_prng_impl == "rbg"  # still the user's
"""


def test_a_run_in_a_hostile_process_has_the_same_bytes(tiny, tiny_run, tmp_path, go, rows, stop_at):
    whole, cut, one = (tmp_path / name for name in ("whole", "cut", "one"))
    go(tiny, cut, watch=stop_at(4))
    done = subprocess.run(
        [sys.executable, "-c", RUN, whole, cut, one],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | HOSTILE,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert rows(whole) == rows(cut) == rows(tiny_run)
    lines = (tiny_run / "metrics.jsonl").read_text().splitlines()
    alone = [line for line in lines if '"scale":"none"' in line and '"seed":0' in line]
    assert (one / "metrics.jsonl").read_text().splitlines() == alone
    digests = [read_json(folder / ENVIRONMENT)["digests"] for folder in (whole, cut, tiny_run)]
    assert digests[0] == digests[1] == digests[2]


@pytest.fixture
def setting():
    """Sets one of JAX's settings for the process, and puts it back."""
    before = {}

    def set_(name, value):
        before.setdefault(name, jax.config.values[name])
        jax.config.update(name, value)

    yield set_
    for name, value in before.items():
        jax.config.update(name, value)


def test_seeds_that_mean_others_are_refused_on_resume(tiny, run_folder, go, rows, setting):
    before = rows(run_folder)
    setting("jax_random_seed_offset", 5)
    with pytest.raises(RunFolderError, match="began with other weights for seed 0 than this"):
        go(tiny, run_folder, resume=True)
    assert rows(run_folder) == before


def test_settings_that_change_last_bits_are_recorded_and_warned_of(tiny, run_folder, go, setting):
    recorded = read_json(run_folder / ENVIRONMENT)["jax_settings"]
    assert recorded == {"jax_disable_jit": False, "jax_disable_most_optimizations": False}
    setting("jax_disable_jit", True)
    found = environment(jax.devices(), "highest")["jax_settings"]
    assert json.loads(json.dumps(found)) == recorded | {"jax_disable_jit": True}
    setting("jax_disable_jit", False)
    content = read_json(run_folder / ENVIRONMENT)
    write_json(run_folder / ENVIRONMENT, content | {"jax_settings": found})
    lines = []
    go(tiny, run_folder, resume=True, say=lines.append)
    [line] = [line for line in lines if "jax_settings" in line]
    assert line.startswith("warning: jax_settings was {'jax_disable_jit': True")
