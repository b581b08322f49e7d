"""Long sequences: time and peak memory of plain against streaming attention.

    python -m benchmarks.long_sequences
    python -m benchmarks.long_sequences --lengths=4096,32768 --causal

Both compute values, row statistics and the gradients of query, key and value in float32, one head
of 64. Times are of one process, the two paths in turn, round by round; the ratio is formed within
each round, and its median and range over rounds are shown. Peak memory is the resident set of a
process of its own for each figure: all of it, and in brackets what the call added.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.progress import Progress

from attention import attention_statistics, dot_product_attention
from attention.streaming import streaming_attention
from benchmarks.rounds import publish, spread

WIDTH = 64


def plain(query, key, value, *, causal):
    """Values and row statistics by way of the weights."""
    output = dot_product_attention(query, key, value, causal=causal)
    return output.values, attention_statistics(output.logits, where=output.visible)


def streaming(query, key, value, *, causal):
    """Values and row statistics block by block."""
    return streaming_attention(query, key, value, causal=causal)


PATHS = {"plain": plain, "streaming": streaming}


def gradient(path: str, causal: bool) -> Callable:
    """Compiled: gradients of query, key and value, and (values, statistics)."""

    def loss(arrays, upstream):
        values, rows = PATHS[path](*arrays, causal=causal)
        return jnp.sum(values * upstream), (values, rows)

    return jax.jit(jax.grad(loss, has_aux=True))


def inputs(length: int) -> tuple[list[jax.Array], jax.Array]:
    """([query, key, value], ∂L/∂values), each [length, 1, WIDTH]."""
    *arrays, upstream = (
        jax.random.normal(key, (length, 1, WIDTH)) for key in jax.random.split(jax.random.key(0), 4)
    )
    return arrays, upstream


def peak_bytes() -> int:
    """The largest resident set that this process has had."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def growth(path: str, length: int, causal: bool) -> tuple[int, int]:
    """(peak in bytes, how much of it the call added), for a process that does nothing else."""
    arguments = jax.block_until_ready(inputs(length))
    before = peak_bytes()
    jax.block_until_ready(gradient(path, causal)(*arguments))
    return peak_bytes(), peak_bytes() - before


def in_own_process(function: Callable, *arguments):
    """Call function in a fresh interpreter."""
    with concurrent.futures.ProcessPoolExecutor(
        1, mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        return pool.submit(function, *arguments).result()


def seconds(paths: list[str], length: int, causal: bool, rounds: int) -> dict[str, list[float]]:
    """Seconds of each path in each round, the paths in turn."""
    arguments = inputs(length)
    compiled = {path: gradient(path, causal) for path in paths}
    for function in compiled.values():
        jax.block_until_ready(function(*arguments))
    times: dict[str, list[float]] = {path: [] for path in paths}
    for _ in range(rounds):
        for path, function in compiled.items():
            start = time.perf_counter()
            jax.block_until_ready(function(*arguments))
            times[path].append(time.perf_counter() - start)
    return times


def main() -> None:
    """Measure, and print one table."""
    parser = argparse.ArgumentParser(description="Plain against streaming attention.")
    parser.add_argument(
        "--lengths", default="1024,2048,4096,8192,32768", help="comma list of T = S"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="a page of markdown: .../long_sequences.md")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument(
        "--plain_up_to", type=int, default=8192, help="longest sequence that plain is asked for"
    )
    options = parser.parse_args()
    lengths = [int(length) for length in options.lengths.split(",")]

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("measuring", total=2 * len(lengths))
        memory, timing = {}, {}
        paths = {
            length: list(PATHS) if length <= options.plain_up_to else ["streaming"]
            for length in lengths
        }
        # Memory first: a process's peak starts at that of the process that started it.
        for length in lengths:
            for path in paths[length]:
                memory[length, path] = in_own_process(growth, path, length, options.causal)
            progress.advance(task)
        for length in lengths:
            timing[length] = seconds(paths[length], length, options.causal, options.rounds)
            progress.advance(task)
    rows = []
    for length in lengths:
        times = timing[length]
        faster = [a / b for a, b in zip(times.get("plain", []), times["streaming"], strict=False)]
        rows.append(
            (
                str(length),
                *(spread(times[path], ".3f") if path in times else "–" for path in PATHS),
                spread(faster, ".1f") if faster else "–",
                *(
                    "{:.0f} ({:.0f})".format(*(size / 1e6 for size in memory[length, path]))
                    if path in times
                    else "–"
                    for path in PATHS
                ),
            )
        )
    publish(
        options.out,
        f"Long sequences{', causal' if options.causal else ''}: plain against streaming attention",
        (
            "T = S",
            "plain, s",
            "streaming, s",
            "plain / streaming",
            "plain peak (call), MB",
            "streaming peak (call), MB",
        ),
        rows,
        f"Values, row statistics and gradients, 1 head of {WIDTH}, float32. Median (range) of "
        f"{options.rounds} rounds; peak memory is that of a process, and what the call added.",
    )


if __name__ == "__main__":
    main()
