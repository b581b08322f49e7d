"""One run by several processes, on one machine or many: who leads, and what they exchange.

Every process runs the lanes that were dealt to its own devices. Process 0 leads: it alone touches
the run folder and talks to people; rows and checkpoints reach it by gathers between chunks, in
which all take part in the same order. The others follow: they hear what to run, and end with it.
A process that dies takes the others with it (JAX's runtime aborts them), which the run folder
survives like any kill.
"""

from __future__ import annotations

import collections
import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

HEARTBEAT_SECONDS = 20  # after which a process that is not heard of counts as dead


def start(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> None:
    """Join the other processes of this run; before anything else uses JAX.

    Args:
      coordinator_address: host:port of process 0; None finds out from Slurm, TPU pods, Kubernetes
        or Open MPI, as for the other two.
      num_processes: how many there are.
      process_id: which of them this is.

    Raises:
      ValueError: nothing says who the others are, or the coordinator can't be reached.
    """
    try:
        jax.distributed.initialize(
            coordinator_address,
            num_processes,
            process_id,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        )
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"distributed: {str(error).splitlines()[0]}") from None


class ProcessLost(Exception):
    """Another process of the run is gone; what was recorded stays good."""


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
    except jax.errors.JaxRuntimeError:
        raise ProcessLost(
            "another process of this run is gone; when all have ended, go on with --resume"
        ) from None
