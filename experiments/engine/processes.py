"""One run by several processes, on one machine or many: who leads, and what they exchange.

Every process runs the lanes that were dealt to its own devices. Process 0 leads: it alone touches
the run folder and talks to people; rows and checkpoints reach it by all-gathers between chunks, in
which all take part in the same order. The others follow: they hear what to run, and end with it.
They begin only if they agree on what decides numbers. A process that dies takes the others with it,
which the run folder survives like any kill.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.engine import roll_call
from experiments.engine.devices import num_cores
from experiments.engine.roll_call import Facts

HEARTBEAT_SECONDS = 20  # after which a process that is not heard of counts as dead
_ROOT = Path(__file__).resolve().parents[2]
_CPU_DEVICES = "jax_num_cpu_devices"  # below 1: nobody has chosen
# Of JAX's settings those that decide numbers; in the environment their names are in capitals.
_JAX_SETTINGS = (
    "jax_platforms",
    "jax_enable_x64",
    "jax_disable_jit",
    "jax_debug_nans",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_random_seed_offset",
)


def facts(settings: Mapping[str, Any]) -> Facts:
    """What the processes of a run must have in common, by name, as texts.

    Args:
      settings: what was asked of this process.
    """
    packages = ("jax", "jaxlib", "flax", "optax", "numpy")
    devices = jax.config.values[_CPU_DEVICES]
    values = {
        **settings,
        **{name.upper(): jax.config.values[name] for name in _JAX_SETTINGS},
        _CPU_DEVICES.upper(): devices if devices > 0 else num_cores(),
        "XLA_FLAGS": os.environ.get("XLA_FLAGS"),
        "NPROC": os.environ.get("NPROC") or num_cores(),  # XLA's thread pool
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
        **source_digests(),
    }
    return {name: _text(value) for name, value in values.items()}


def _text(value: Any) -> str:
    if isinstance(value, tuple | list):
        return ",".join(map(_text, value))
    return "default" if value is None else str(value)


def source_digests(root: Path = _ROOT) -> dict[str, str]:
    """The files of this source and the first digits of their SHA-256."""
    files = sorted(
        path for room in ("attention", "experiments") for path in root.glob(f"{room}/**/*.py")
    )
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()[:12]
        for path in files
    }


def start(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    facts: Facts,
    wait_seconds: int,
    say: Callable[[str], None],
) -> None:
    """Join the other processes of this run; before anything else uses JAX.

    Args:
      coordinator_address: host:port of process 0; None finds out from Slurm, TPU pods, Kubernetes
        or Open MPI, as for the other two.
      num_processes: how many there are.
      process_id: which of them this is.
      facts: what all must have in common.
      wait_seconds: how long to wait for the others.
      say: called with a line that says for whom.

    Raises:
      ValueError: nothing says who the others are, they don't come or don't agree, or process 0
        can't listen; one line.
    """
    with _errors_named():
        address, count, number = _found(
            coordinator_address, num_processes, process_id, wait_seconds
        )
    roll_call.meet(address, count, number, facts, wait_seconds, say)
    with _errors_named():
        jax.distributed.initialize(
            address,
            count,
            number,
            initialization_timeout=wait_seconds,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        )
    if jax.config.values[_CPU_DEVICES] < 1:
        # All start their devices together, before those who follow have heard what is run.
        jax.config.update(_CPU_DEVICES, num_cores())


def _found(
    address: str | None, count: int | None, number: int | None, wait_seconds: int
) -> tuple[str, int, int]:
    """Who the others are: as given, or as `jax.distributed.initialize` would find out."""
    # Private; but what is public would begin to wait for them in the same breath.
    from jax._src.clusters import ClusterEnv

    address = address or os.environ.get("JAX_COORDINATOR_ADDRESS")
    if address is None or count is None or number is None:
        address, count, number, _ = ClusterEnv.auto_detect_unset_distributed_params(
            address, count, number, None, None, wait_seconds
        )
    if address is None or count is None or number is None:
        raise ValueError(
            "nothing here says who the others are; give --coordinator_address, --num_processes "
            "and --process_id"
        )
    return address, count, number


@contextlib.contextmanager
def _errors_named():
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"distributed: {str(error).splitlines()[0]}") from None


class ProcessLost(Exception):
    """Another process of the run is gone; what was recorded stays good."""

    def __init__(self, reason: str):
        super().__init__(
            f"another process of this run is gone ({reason}); when all have ended, go on with "
            "--resume"
        )


def several() -> bool:
    """Whether there are other processes; starts no backend where there are none."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def leading() -> bool:
    """Whether this process is the one that records."""
    return not several() or jax.process_index() == 0


class Followers(contextlib.AbstractContextManager):
    """The other processes as the leader sees them: they wait for one order.

    Leaving the block without having told them anything sends them home.
    """

    def __init__(self):
        self._waiting = several()

    def tell(self, order: Mapping[str, Any]) -> None:
        """Give them their order, which JSON can write."""
        if self._waiting:
            self._waiting = False
            _exchange_text(json.dumps(order))

    def __exit__(self, *exception) -> None:
        self.tell({})


def hear() -> dict[str, Any]:
    """What the leader tells its followers; {} is to go home."""
    return json.loads(_exchange_text(""))


def _exchange_text(text: str) -> str:
    """The leader's text."""
    content = np.frombuffer(text.encode(), np.uint8)
    size = int(leaders(np.int32(content.size)))
    return leaders(content if leading() else np.zeros(size, np.uint8)).tobytes().decode()


def leaders(tree: Any) -> Any:
    """The leader's arrays, bit for bit; every process gives a tree of the same shapes."""
    if not several():
        return tree

    def leaders_array(array):
        array = np.asarray(array)
        # As bytes: the broadcast is a sum over processes, which makes +0 of -0.
        content = np.frombuffer(array.tobytes(), np.uint8)
        sent = np.asarray(_exchange("broadcast_one_to_all", content))
        return sent.view(array.dtype).reshape(array.shape)

    return jax.tree.map(leaders_array, tree)


def largest(number: int) -> int:
    """The largest of the numbers that the processes give."""
    return int(_exchange("process_allgather", np.int32(number)).max()) if several() else number


def gather_lanes(
    own: Mapping[int, Any], owners: Sequence[int], like: Sequence[Any] | None = None
) -> list[Any]:
    """All-gather: every lane's tree in every process, in order.

    Args:
      own: this process's lanes, at least one: its number to a tree of arrays.
      owners: the process of each lane.
      like: every lane's tree as shapes and dtypes; None where all are like this process's own.
    """
    if not several():
        return [own[i] for i in range(len(owners))]
    like = like or [own[min(own)]] * len(owners)
    most = max(collections.Counter(owners).values())
    size = max(sum(map(_size, jax.tree.leaves(tree))) for tree in like)
    # One exchange of bytes, not one for each leaf: each takes milliseconds.
    packed = np.zeros((most, size), np.uint8)
    for row, i in zip(packed, sorted(own), strict=False):
        content = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(own[i]))
        row[: len(content)] = np.frombuffer(content, np.uint8)
    gathered = _exchange("process_allgather", packed)  # [processes, most, bytes]
    seen: collections.Counter[int] = collections.Counter()
    trees = []
    for owner, tree in zip(owners, like, strict=True):
        trees.append(_unpack(gathered[owner, seen[owner]], tree))
        seen[owner] += 1
    return trees


def _size(leaf: Any) -> int:
    return math.prod(leaf.shape) * leaf.dtype.itemsize


def _unpack(content: np.ndarray, like: Any) -> Any:
    arrays, start = [], 0
    for leaf in jax.tree.leaves(like):
        part = content[start : start + _size(leaf)].copy()  # a copy is aligned
        arrays.append(part.view(leaf.dtype).reshape(leaf.shape))
        start += _size(leaf)
    return jax.tree.unflatten(jax.tree.structure(like), arrays)


def _exchange(name: str, array: Any) -> np.ndarray:
    """One of JAX's exchanges between processes."""
    from jax.experimental import multihost_utils

    try:
        return getattr(multihost_utils, name)(array)
    except (RuntimeError, ValueError) as error:
        # What a backend reports begins with a status, whatever its type; the rest is a fault here.
        if not re.match("[A-Z_]+: ", str(error)):
            raise
        raise ProcessLost(str(error).splitlines()[0]) from None
