"""Training model-steps per second: this project, what it could be, and what else there is.

    python -m benchmarks.throughput
    python -m benchmarks.throughput --sequence_length=32 --without_torch

Every contender trains the same model on the same task with the same optimizer and computes the same
diagnostics at every step. This project is measured as `train.py` runs it: its lanes over all cores,
every row written to a run folder, a checkpoint every 200 steps; held-out evaluations, which the
peers don't make, are left out of one measurement and stand in another. Beside it stand the same
lanes without statistics and rows, which only this file compiles, and the fastest matrix product of
the machine. All take turns, round by round (`rounds.py`); ratios are formed within a round.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import flax_loop
from benchmarks.rounds import Work, measure, publish, ratios, spread
from experiments.config import RecordOptions, TrainConfig, resolve
from experiments.engine import lanes, training
from experiments.engine.training import Lane, LaneProgram, LaneState
from experiments.runs import run


def recorded(config: TrainConfig) -> Work:
    """`train.py` without its figures: lanes, rows, evaluations, checkpoints."""
    c: Any = resolve(config)
    count = len(lanes.lane_names(c))

    def work() -> tuple[float, float]:
        times: list[float] = []
        with tempfile.TemporaryDirectory() as folder:
            run.record(
                config,
                RecordOptions(Path(folder) / "run", figures=False),
                watch=lambda result: times.append(time.perf_counter()),
            )
            # From the first evaluation, before the first step, to the end of the last checkpoint.
            return c.steps * count, time.perf_counter() - times[0]

    return work


def bare(config: TrainConfig, share: int = 20) -> Work:
    """The same lanes and updates, with nothing measured: XLA drops what nobody reads."""
    c: Any = resolve(config)
    program, places = run.prepare(c)

    @jax.jit
    def advance(lane: Lane, state: LaneState, steps: int) -> LaneState:
        def body(_, state: LaneState) -> LaneState:
            return training.train_step(program, lane, state)[0]

        return jax.lax.fori_loop(0, steps, body, state)

    all_lanes = lanes.lanes_of(c)
    threads = [concurrent.futures.ThreadPoolExecutor(1) for _ in places]

    def run_place(number: int) -> None:
        here = [places[number].put(lane) for lane in all_lanes[number :: len(places)]]
        states = [training.initialize(program, lane) for lane in here]
        for _ in range(0, c.steps, share):
            states = [advance(lane, state, share) for lane, state in zip(here, states, strict=True)]
            jax.block_until_ready(states)

    def work() -> tuple[float, float]:
        start = time.perf_counter()
        for future in [thread.submit(run_place, i) for i, thread in enumerate(threads)]:
            future.result()
        return c.steps * len(all_lanes), time.perf_counter() - start

    return work


def matrix_products(size: int = 1024, repeats: int = 12) -> Work:
    """Floating-point operations of float32 matrix products, one stream of them on each core."""
    places = lanes.start_places(lanes.num_cores())
    multiply = jax.jit(lambda a, b: a @ b)
    arguments = [place.put((jnp.ones((size, size)), jnp.ones((size, size)))) for place in places]

    def stream(pair: tuple[jax.Array, jax.Array]) -> None:
        for _ in range(repeats):
            multiply(*pair).block_until_ready()

    def work() -> tuple[float, float]:
        start = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(len(places)) as pool:
            list(pool.map(stream, arguments))
        return 2 * size**3 * repeats * len(places), time.perf_counter() - start

    return work


def step_operations(program: LaneProgram) -> int:
    """Floating-point operations of the matrix products of one update.

    A product of [m, k] and [k, n] is 2 m k n; going back takes two more of that size for each.
    """
    c = program.model
    tokens = program.batch_size * program.sequence_length
    layer = c.d_model * c.num_heads * (2 * c.d_k + c.d_v)  # queries, keys, values
    layer += program.sequence_length * c.num_heads * (c.d_k + c.d_v)  # logits, weighted values
    layer += c.num_heads * c.d_v * c.d_model + 2 * c.d_model * c.d_ff
    return 3 * 2 * tokens * (c.num_layers * layer + c.d_model * c.num_outputs)


def main() -> None:
    """Measure, print a table, write it."""
    parser = argparse.ArgumentParser(description="Training model-steps per second.")
    parser.add_argument("--sequence_length", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=400, help="per lane and round; 10 lanes")
    parser.add_argument("--without_torch", action="store_true")
    parser.add_argument("--out", type=Path, help="a page of markdown: .../throughput.md")
    options = parser.parse_args()
    evaluated = TrainConfig(sequence_length=options.sequence_length, steps=options.steps)
    config = dataclasses.replace(evaluated, eval_every=10**6)
    ours, without, peak = "this project, all rows written", "without statistics and rows", "peak"
    defaults = "with an evaluation every 20 steps"
    peers: dict[str, Any] = {
        "Flax loop": (flax_loop.one_by_one, (config, options.steps)),
        "Flax loop, 10 lanes vmapped": (flax_loop.vmapped, (config, options.steps)),
    }
    if not options.without_torch:
        try:
            from benchmarks import torch_peer
        except ModuleNotFoundError:
            raise SystemExit(
                "PyTorch is missing: pip install -r requirements-benchmarks.txt, or give "
                "--without_torch"
            ) from None
        peers["PyTorch, eager"] = (torch_peer.contender, (config, options.steps, False))
        peers["PyTorch, torch.compile"] = (torch_peer.contender, (config, options.steps, True))
    contenders: dict[str, Any] = {
        ours: (recorded, (config,)),
        defaults: (recorded, (evaluated,)),
        without: (bare, (config,)),
        peak: (matrix_products, ()),
        **peers,
    }
    rates = measure(contenders, options.rounds)
    operations = step_operations(training.lane_program(resolve(config)))
    rows = []
    for name in (ours, defaults, without, *peers):
        share = [
            100 * rate * operations / best
            for rate, best in zip(rates[name], rates[peak], strict=True)
        ]
        rows.append(
            (
                name,
                spread(rates[name], ".0f"),
                spread(ratios(rates, ours, name)) if name != ours else "1",
                spread(share, ".0f"),
            )
        )
    cost = 100 * (np.array(rates[without]) / np.array(rates[ours]) - 1)
    publish(
        options.out,
        f"Training throughput, {config.batch_size} sequences of {options.sequence_length} tokens",
        ("", "model-steps/s", "this project is faster by ×", "% of peak"),
        rows,
        f"Median (range) of {options.rounds} rounds. An update is {operations / 1e6:.0f} MFLOP of "
        f"matrix products; the peak is {statistics.median(rates[peak]) / 1e9:.0f} GFLOP/s of "
        f"float32 products of size 1024 on all cores. Statistics, rows and checkpoints cost "
        f"{spread(list(cost), '.0f')} % against the lanes without them.",
    )


if __name__ == "__main__":
    main()
