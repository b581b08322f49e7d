"""Where the time of an update goes, on CPU: by XLA's own profile of one lane.

    python -m benchmarks.profile --out=results/benchmarks/profile.md

One device, so that nothing else runs beside the lane; kinds are told by the names that XLA gives.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from benchmarks.agreement import step_operations
from benchmarks.rounds import publish
from experiments.config import TrainConfig, resolve
from experiments.engine import lanes, training
from experiments.engine.devices import start_places

KINDS = {
    "matrix products": ("ynn_fusion", "dot"),
    "copies and transposes": ("copy", "transpose", "bitcast"),
    "sums and means over axes": ("reduce", "wrapped_reduce", "multiply_reduce", "add_reduce"),
    "softmax, norms, optimizer and the rest, element by element": (),
}
SKIPPED = ("Thunk", "while", "call", "Slinky", "end:", "$", "Pjit", "Wait", "Execute")


def kind_of(name: str) -> str | None:
    """The kind of an event of the profile; None for those that hold others."""
    if name.startswith(SKIPPED) or "::" in name or "(" in name:
        return None
    *named, rest = KINDS
    return next((kind for kind in named if name.startswith(KINDS[kind])), rest)


def by_kind(run: Callable[[], object]) -> tuple[dict[str, float], dict[str, int]]:
    """(seconds, operations) of each kind while it runs."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        [path] = Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(path))
    seconds, counts = dict.fromkeys(KINDS, 0.0), dict.fromkeys(KINDS, 0)
    for plane in profile.planes:
        for line in plane.lines:
            for event in line.events:
                if kind := kind_of(event.name):
                    seconds[kind] += event.duration_ns / 1e9
                    counts[kind] += 1
    return seconds, counts


def main() -> None:
    """Profile, print a table, write it."""
    parser = argparse.ArgumentParser(description="Where the time of an update goes, on CPU.")
    parser.add_argument("--sequence_length", type=int, default=16)
    parser.add_argument("--steps", type=int, default=200, help=f"at most {training.CAPACITY}")
    parser.add_argument("--out", type=Path, help="a page of markdown: .../profile.md")
    options = parser.parse_args()
    if not 0 < options.steps <= training.CAPACITY:
        parser.error(f"--steps: {options.steps}, must be from 1 to {training.CAPACITY}")
    settings = TrainConfig(scale="sqrt", num_seeds=1, sequence_length=options.sequence_length)
    [place] = start_places(1)
    [(program, lane)] = lanes.plan_lanes(resolve(settings))
    lane = place.put(lane)
    state = training.initialize(program, lane)

    def advance() -> None:
        jax.block_until_ready(training.advance(program, lane, state, np.int32(options.steps)))

    advance()
    start = time.perf_counter()
    advance()
    whole = time.perf_counter() - start
    seconds, counts = by_kind(advance)
    total = sum(seconds.values())
    products = step_operations(program) * options.steps / seconds["matrix products"] / 1e9
    publish(
        options.out,
        f"Where the time of an update goes, {options.sequence_length} tokens",
        ("", "operations", "ms", "%"),
        [
            (
                kind,
                f"{counts[kind] / options.steps:.0f}",
                f"{1e3 * seconds[kind] / options.steps:.2f}",
                f"{100 * seconds[kind] / total:.0f}",
            )
            for kind in KINDS
        ],
        f"Means of {options.steps} updates; the matrix products run at {products:.0f} GFLOP/s. An "
        f"update takes {1e3 * whole / options.steps:.2f} ms without the profiler, which slows "
        "small operations.",
    )


if __name__ == "__main__":
    main()
