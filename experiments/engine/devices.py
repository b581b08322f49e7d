"""Where lanes run: the devices of one machine or many, in places that a lane has to itself."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from experiments.engine.training import BATCH_AXIS


class Place(NamedTuple):
    """Where lanes run: one device, or several that share their batches."""

    devices: tuple[jax.Device, ...]

    @property
    def process(self) -> int:
        """The process whose devices these are."""
        return self.devices[0].process_index

    def put(self, tree: Any) -> Any:
        """The tree here, on every device."""
        sharding = SingleDeviceSharding(self.devices[0])
        if len(self.devices) > 1:
            sharding = NamedSharding(self._mesh(), PartitionSpec())
        return jax.device_put(tree, sharding)

    def current(self) -> contextlib.AbstractContextManager:
        """Compute here, in this thread: makes BATCH_AXIS the name of the devices."""
        return jax.set_mesh(self._mesh()) if len(self.devices) > 1 else contextlib.nullcontext()

    def _mesh(self) -> Mesh:
        return Mesh(self.devices, (BATCH_AXIS,), axis_types=(AxisType.Auto,))


def start_places(num_lanes: int, batch_shards: int = 1, *, attention: str = "plain") -> list[Place]:
    """The places for lanes, of all processes; on CPU one per core, at most one per lane.

    The number of CPU devices can only be chosen before JAX's backend starts, and only if nobody has
    chosen it: a process that has already used JAX keeps the devices it has. Either way the numbers
    are the same.

    Args:
      num_lanes: as many places are wanted.
      batch_shards: devices per place, all of one process.
      attention: how it is computed; "fused" needs an NVIDIA GPU.

    Raises:
      ValueError: too few devices for a place, devices that can't serve, or too few lanes for the
        processes.
    """
    if jax.config.values["jax_num_cpu_devices"] < 1:
        with contextlib.suppress(RuntimeError):  # JAX has been used
            wanted = batch_shards * max(1, num_cores() // batch_shards)
            jax.config.update("jax_num_cpu_devices", wanted)
    if num_lanes < jax.process_count():
        raise ValueError(
            f"num_processes: {jax.process_count()}, but there are only {num_lanes} lanes; "
            "each process needs one"
        )
    by_process = []
    for process in range(jax.process_count()):
        devices = jax.local_devices(process_index=process)
        platform = devices[0].platform
        if attention == "fused" and platform != "gpu":
            raise ValueError(
                f"attention: fused needs an NVIDIA GPU, but this is {platform}; choose plain or "
                "streaming"
            )
        if len(devices) < batch_shards:
            raise ValueError(
                f"batch_shards: {batch_shards}, but a process has {len(devices)} devices "
                f"({platform})"
            )
        starts = range(0, len(devices) - batch_shards + 1, batch_shards)
        by_process.append([Place(tuple(devices[i : i + batch_shards])) for i in starts])
    # Every process gets a lane before any gets two.
    rounds = itertools.zip_longest(*by_process)
    return [place for dealt in rounds for place in dealt if place is not None][:num_lanes]


def devices_of(places: Iterable[Place]) -> list[jax.Device]:
    """All devices of these places."""
    return [device for place in places for device in place.devices]


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def thread_pool_size() -> int:
    """Threads of XLA's CPU pool, which splits some sums by their number: it decides last bits.

    Raises:
      ValueError: the environment variable NPROC, which sets it, is no number.
    """
    text = os.environ.get("NPROC") or str(num_cores())
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise ValueError(f"NPROC: {text!r} in the environment, must be a positive whole number")
    return max(int(text), jax.local_device_count())
