"""Training model-steps per second: this project, what it could be, and its peers at their best.

    python -m benchmarks.throughput
    python -m benchmarks.throughput --sequence_length=32 --without_torch

Every contender trains the same model on the same task with the same optimizer and computes the same
diagnostics at every step (`agreement.py` holds them against each other, number by number). Peers
are first tried in several configurations, briefly; the fastest of each goes on to the measurement.

This project is measured as `train.py` runs it: its lanes over all cores, every row written to a run
folder, checkpoints; held-out evaluations, which the peers don't make, are left out of one
measurement and stand in another. Beside it stand the same lanes without statistics and rows, which
only this file compiles, and the fastest matrix product of the machine. All take turns, round by
round (`rounds.py`); ratios are formed within a round.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import flax_peer
from benchmarks.agreement import has_torch, step_operations
from benchmarks.rounds import (
    Contender,
    Team,
    Work,
    publish,
    ratios,
    spread,
    start,
    take_turns,
)
from experiments.config import RecordOptions, RunConfig, TrainConfig, resolve
from experiments.engine import lanes, training
from experiments.engine.devices import num_cores, start_places
from experiments.engine.training import Lane, LaneState
from experiments.runs.record import record

OURS, EVALUATED = "this project, all rows written", "with an evaluation every 20 steps"
BARE, PEAK = "without statistics and rows", "peak"
SCAN = 20  # updates in one call of a scanned program


def recorded(config: RunConfig) -> Work:
    """`train.py` without its figures: lanes, rows, evaluations, checkpoints."""
    count = len(config.lane_names())

    def work(seconds: float) -> tuple[float, float]:
        del seconds  # a run is as long as it is
        times: list[float] = []
        with tempfile.TemporaryDirectory() as folder:
            record(
                config,
                RecordOptions(Path(folder) / "run", figures=False),
                watch=lambda result: times.append(time.perf_counter()),
                say=lambda line: None,
            )
            # From the first evaluation, before the first step, to the end of the last checkpoint.
            return config.steps * count, time.perf_counter() - times[0]

    work(0)
    return work


def bare(config: RunConfig, share: int = 20) -> Work:
    """The same lanes and updates, with nothing measured: XLA drops what nobody reads."""
    planned = lanes.plan_lanes(config)
    program = planned[0].program
    places = start_places(len(planned))

    @jax.jit
    def advance(lane: Lane, state: LaneState, steps: int) -> LaneState:
        def body(_, state: LaneState) -> LaneState:
            return training.train_step(program, lane, state)[0]

        return jax.lax.fori_loop(0, steps, body, state)

    def run_place(number: int) -> None:
        here = [places[number].put(one.lane) for one in planned[number :: len(places)]]
        states = [training.initialize(program, lane) for lane in here]
        for _ in range(0, config.steps, share):
            states = [advance(lane, state, share) for lane, state in zip(here, states, strict=True)]
            jax.block_until_ready(states)

    threads = [concurrent.futures.ThreadPoolExecutor(1) for _ in places]

    def work(seconds: float) -> tuple[float, float]:
        del seconds
        begin = time.perf_counter()
        for future in [thread.submit(run_place, i) for i, thread in enumerate(threads)]:
            future.result()
        return config.steps * len(planned), time.perf_counter() - begin

    work(0)
    return work


def matrix_products(size: int = 1024) -> Work:
    """Floating-point operations of float32 matrix products, one stream of them on each core."""
    places = start_places(num_cores())
    multiply = jax.jit(lambda a, b: a @ b)
    arguments = [place.put((jnp.ones((size, size)), jnp.ones((size, size)))) for place in places]

    def stream(pair: tuple[jax.Array, jax.Array], seconds: float) -> float:
        count, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < seconds:
            multiply(*pair).block_until_ready()
            count += 1
        return 2 * size**3 * count / (time.perf_counter() - begin)

    def work(seconds: float) -> tuple[float, float]:
        with concurrent.futures.ThreadPoolExecutor(len(places)) as pool:
            rates = pool.map(stream, arguments, [seconds] * len(places))
            return sum(rates), 1.0

    work(0.01)
    return work


def on_cores(
    prepare: Callable[..., Work], c: RunConfig, ways: Mapping[str, Any], processes: int
) -> dict[str, Contender]:
    """Ways of a peer in so many processes, which share the cores; by what a table calls them."""
    threads = num_cores() // processes
    suffix = f"{processes} process{'es' * (processes > 1)} of {threads} thread{'s' * (threads > 1)}"
    return {
        ", ".join(filter(None, (name, suffix))): Contender(prepare, (c, way), processes)
        for name, way in ways.items()
    }


def flax_ways(c: RunConfig, scan: int) -> dict[str, Contender]:
    """A Flax training loop: one process or one per core, one model at a time or several as one."""
    ways = {}
    for processes in (num_cores(), 1):
        lanes = len(c.lane_names()) // processes
        named = {"": flax_peer.Way(0, scan), f"vmap of {lanes}": flax_peer.Way(lanes, scan)}
        ways |= on_cores(flax_peer.contender, c, named, processes)
    return ways


def torch_ways(c: RunConfig) -> dict[str, dict[str, Contender]]:
    """PyTorch, eager and compiled.

    "The model": forward and backward are compiled, norms and Adam are not. "The whole update": all
    of it is one graph, gradients by torch.func, Adam written out.
    """
    from benchmarks.torch_peer import Way, contender

    count, cores = len(c.lane_names()), num_cores()
    model, whole = Way(compiled=True), Way(whole=True, compiled=True)
    together = count // cores
    one_per_core = {
        "model": model,
        "whole update": whole,
        f"whole update, ensemble of {together}": whole._replace(lanes=together),
        "whole update, reduce-overhead": whole._replace(mode="reduce-overhead"),
    }
    return {
        "PyTorch, eager": {
            **on_cores(contender, c, {"": Way(), f"ensemble of {together}": Way(together)}, cores),
            **on_cores(contender, c, {"": Way(), f"ensemble of {count}": Way(count)}, 1),
        },
        "PyTorch, torch.compile": {
            **on_cores(contender, c, one_per_core, cores),
            **on_cores(contender, c, {"model": model, "whole update": whole}, 1),
        },
    }


def peers_of(c: RunConfig, with_torch: bool) -> dict[str, dict[str, Contender]]:
    """Every peer, and the configurations that it is tried in."""
    peers = {
        "Flax, a Python loop": flax_ways(c, 1),
        f"Flax, {SCAN} steps in a lax.scan": flax_ways(c, SCAN),
    }
    return peers | (torch_ways(c) if with_torch else {})


def fastest(
    stack: contextlib.ExitStack, ways: dict[str, Contender], rounds: int
) -> tuple[str, Team, dict[str, list[float]]]:
    """Try a peer's configurations in turn: (the fastest's name, its team, all rates).

    The other teams leave; the fastest stays until the stack is closed.
    """
    teams = start(stack, ways)
    rates = take_turns(teams, rounds, seconds=0.8)
    best = max(rates, key=lambda name: statistics.median(rates[name]))
    for name, team in teams.items():
        if name != best:
            team.close()
    return best, teams[best], rates


def ours_of(config: RunConfig) -> dict[str, Contender]:
    """This project with and without evaluations and rows, and the machine's own limit."""
    unevaluated = dataclasses.replace(config, eval_every=10**6)
    return {
        OURS: Contender(recorded, (unevaluated,)),
        EVALUATED: Contender(recorded, (config,)),
        BARE: Contender(bare, (unevaluated,)),
        PEAK: Contender(matrix_products, ()),
    }


def publish_tried(
    path: Path | None, title: str, tried: dict[str, dict[str, list[float]]], rounds: int
) -> None:
    """The configurations of every peer, the fastest first."""
    rows = [
        (peer, name, spread(rates[name], ".0f"))
        for peer, rates in tried.items()
        for name in sorted(rates, key=lambda name: -statistics.median(rates[name]))
    ]
    publish(
        path,
        f"Configurations tried: {title}",
        ("peer", "configuration", "model-steps/s"),
        rows,
        f"Median (range) of {rounds} rounds of 0.8 s; all configurations of a peer take turns. The "
        "first of each is measured against this project.",
    )


def publish_measured(
    path: Path | None,
    title: str,
    rates: dict[str, list[float]],
    configurations: dict[str, str],
    operations: int,
) -> None:
    """This project beside its peers."""
    rows = []
    for name in (name for name in rates if name != PEAK):
        share = [100 * operations * ratio for ratio in ratios(rates, name, PEAK)]
        faster = "1" if name == OURS else spread(ratios(rates, OURS, name))
        rates_here = spread(rates[name], ".0f")
        rows.append((name, configurations[name], rates_here, faster, spread(share, ".0f")))
    cost = 100 * (np.array(ratios(rates, BARE, OURS)) - 1)
    publish(
        path,
        f"Training throughput: {title}",
        ("", "configuration", "model-steps/s", "this project is faster by ×", "% of peak"),
        rows,
        f"Median (range) of {len(rates[OURS])} rounds. An update is {operations / 1e6:.0f} MFLOP "
        f"of matrix products; the peak is {statistics.median(rates[PEAK]) / 1e9:.0f} GFLOP/s of "
        f"float32 products of size 1024 on all cores. Statistics, rows and checkpoints cost "
        f"{spread(list(cost), '.0f')} % against the lanes without them.",
    )


def main() -> None:
    """Try, measure, print two tables, write them."""
    parser = argparse.ArgumentParser(description="Training model-steps per second.")
    parser.add_argument("--sequence_length", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tries", type=int, default=3, help="rounds of trying configurations")
    parser.add_argument("--steps", type=int, default=200, help="per lane and round; 10 lanes")
    parser.add_argument("--without_torch", action="store_true")
    parser.add_argument(
        "--out",
        type=Path,
        help="a page of markdown, .../throughput.md; a second one beside it, "
        "..._configurations.md, says what was tried",
    )
    options = parser.parse_args()
    if not options.without_torch and not has_torch():
        parser.error("PyTorch is missing: give --without_torch, or see requirements-benchmarks.txt")
    config = resolve(TrainConfig(sequence_length=options.sequence_length, steps=options.steps))
    title = f"{config.batch_size} sequences of {config.sequence_length} tokens"
    ours = f"1 process, {num_cores()} devices, {len(config.lane_names())} lanes"
    tried, teams, configurations = {}, {}, dict.fromkeys((OURS, EVALUATED, BARE), ours)
    with contextlib.ExitStack() as stack:
        for peer, ways in peers_of(config, not options.without_torch).items():
            configurations[peer], teams[peer], tried[peer] = fastest(stack, ways, options.tries)
        rates = take_turns(start(stack, ours_of(config)) | teams, options.rounds, seconds=2.0)
    path = options.out
    operations = step_operations(training.lane_program(config, config.arms()[0]))
    publish_measured(path, title, rates, configurations, operations)
    path = path and path.with_stem(f"{path.stem}_configurations")
    publish_tried(path, title, tried, options.tries)


if __name__ == "__main__":
    main()
