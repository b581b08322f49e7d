"""Where the time of an update goes, on CPU: by XLA's own profile of one lane.

    python -m benchmarks.profile --out=results/benchmarks/profile.md

One device, so that nothing else runs beside the lane; kinds are told by the names that XLA gives.
"""

from __future__ import annotations

import argparse
import collections
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from benchmarks.rounds import publish
from benchmarks.throughput import step_operations
from experiments.config import TrainConfig, resolve
from experiments.engine import lanes, training
from experiments.runs import run

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


def main() -> None:
    """Profile, print a table, write it."""
    parser = argparse.ArgumentParser(description="Where the time of an update goes, on CPU.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, help="a page of markdown: .../profile.md")
    options = parser.parse_args()
    config = resolve(TrainConfig(scale=("sqrt",), num_seeds=1))
    program, (place,) = run.prepare(config)
    lane = place.put(lanes.lanes_of(config)[0])
    state = training.initialize(program, lane)

    def advance() -> Any:
        return jax.block_until_ready(training.advance(program, lane, state, options.steps))

    advance()
    start = time.perf_counter()
    advance()
    whole = (time.perf_counter() - start) / options.steps
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            advance()
        [path] = Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(path))
    seconds: collections.Counter[str] = collections.Counter()
    counts: collections.Counter[str] = collections.Counter()
    for plane in profile.planes:
        for line in plane.lines:
            for event in line.events:
                if kind := kind_of(event.name):
                    seconds[kind] += event.duration_ns / 1e9 / options.steps
                    counts[kind] += 1
    rows = [
        (
            kind,
            f"{counts[kind] / options.steps:.0f}",
            f"{1e3 * seconds[kind]:.2f}",
            f"{100 * seconds[kind] / seconds.total():.0f}",
        )
        for kind in KINDS
    ]
    products = step_operations(program) / seconds["matrix products"] / 1e9
    publish(
        options.out,
        "Where the time of an update goes",
        ("", "operations", "ms", "%"),
        rows,
        f"Means of {options.steps} updates; the matrix products run at {products:.0f} GFLOP/s. An "
        f"update takes {1e3 * whole:.2f} ms without the profiler, which slows small operations.",
    )


if __name__ == "__main__":
    main()
