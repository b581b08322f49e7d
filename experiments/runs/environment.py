"""What the numbers of a run depend on besides its config: environment.json."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from attention import transformer
from experiments.arms import make_arm
from experiments.config import RunConfig
from experiments.engine import lanes, training
from experiments.engine.devices import Place, devices_of, num_cores, thread_pool_size
from experiments.engine.lanes import PlannedLane
from experiments.runs.folder import ENVIRONMENT, RunFolderError, read_json, write_json

# What can change the last bits of the numbers, so that resuming under another one is warned about.
BIT_SETTINGS = (
    "versions",
    "platform",
    "devices",
    "cpu",
    "thread_pool_size",
    "xla_flags",
    "jax_settings",
    "git_revision",
)
# Settings of JAX's that change last bits too, and are the user's to choose.
_JAX_SETTINGS = ("jax_disable_jit", "jax_disable_most_optimizations")


def environment(devices: Sequence[jax.Device], matmul_precision: str) -> dict[str, Any]:
    """What the numbers depend on besides the config, for environment.json."""
    packages = ("jax", "jaxlib", "flax", "optax", "numpy", "scipy", "orbax-checkpoint")
    return {
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in packages},
        },
        "platform": devices[0].platform,
        "devices": [device.device_kind for device in devices],
        "machine": platform.machine(),
        "cpu": cpu_model(),
        "cores": num_cores(),
        "thread_pool_size": thread_pool_size(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "jax_settings": {name: jax.config.values[name] for name in _JAX_SETTINGS},
        "matmul_precision": matmul_precision,
        "git_revision": git_revision(),
    }


def git_revision() -> str | None:
    """The commit of this source tree, with "+" if it has uncommitted changes; None outside its git.

    A repository that this package merely lies in, as an environment's folder may, is not asked, and
    neither is one that variables such as GIT_DIR name.
    """
    root = Path(__file__).resolve().parents[2]
    surroundings = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        done = subprocess.run(command, capture_output=True, check=True, env=surroundings)
        return done.stdout.decode(errors="replace").strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) != root:
            return None
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def cpu_model() -> str | None:
    """Model and vector instructions of this CPU: they decide how XLA's kernels round."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor() or None
    first: dict[str, str] = {}
    for line in lines:
        name, _, value = (part.strip() for part in line.partition(":"))
        first.setdefault(name, value)
    vector = [
        flag for flag in ("avx2", "fma", "avx512f", "amx_tile") if flag in first.get("flags", "")
    ]
    return " ".join([first.get("model name", platform.machine()), *vector])


def digest(tree: Any) -> str:
    """SHA-256 of a pytree's paths, dtypes, shapes and bytes."""
    sha = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        array = np.asarray(leaf)
        sha.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}\n".encode())
        sha.update(np.ascontiguousarray(array).tobytes())
    return sha.hexdigest()


def starting_digests(
    config: RunConfig, planned: Sequence[PlannedLane], place: Place
) -> dict[str, dict[str, str]]:
    """Per seed, digests of the initial weights and of the first batch: what pairs two runs.

    The weights are the model's, which all arms have; those of an arm's own are left out. Made at
    one of the places that the lanes will run at, which then need not compile it again.
    """
    program = planned[0].program
    sample = jax.jit(training.sample_batch, static_argnames="program")
    digests = {}
    for seed in config.seeds():
        with training.pinned(program), place.current():
            plain = lanes.make_lane(make_arm("none", config.d_k), 1.0, seed)
            state = training.initialize(program, place.put(plain))
            batch = sample(program, place.put(training.stream_key(np.uint32(seed), "data")))
        weights = {k: v for k, v in state.params.items() if k != transformer.SCORE_RULE}
        digests[str(seed)] = {"weights": digest(weights), "data": digest(batch)}
    return digests


def note_surroundings(
    folder: Path,
    config: RunConfig,
    planned: Sequence[PlannedLane],
    places: Sequence[Place],
    say: Callable[[str], None],
) -> None:
    """Write environment.json, or compare it with a run that is there already.

    Raises:
      RunFolderError: this source makes other weights or data than the run began with.
    """
    path = folder / ENVIRONMENT
    now = environment(devices_of(places), config.matmul_precision)
    now["digests"] = starting_digests(config, planned, places[0])
    before = _stored(path, say)
    if before is None:
        write_json(path, now)
        return
    for name in BIT_SETTINGS:
        if before.get(name) != now[name] and name in before:
            say(
                f"warning: {name} was {before.get(name)} and is now {now[name]}: the run "
                "goes on, but may differ in the last bits from an uninterrupted one"
            )
    for seed, digests in now["digests"].items():
        for what, value in digests.items():
            if before.get("digests", {}).get(seed, {}).get(what, value) != value:
                raise RunFolderError(
                    f"resume: {folder} began with other {what} for seed {seed} than this source "
                    "and these settings of JAX make; go on with those that it was begun with"
                )


def _stored(path: Path, say: Callable[[str], None]) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        return read_json(path)
    except RunFolderError as error:
        say(f"warning: {error}: it is made again, as things are now")
        return None
