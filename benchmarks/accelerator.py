"""What an accelerator does with this project, in under 8 minutes: ready for whoever has one.

    python -m benchmarks.accelerator --out=results/accelerator
    python -m benchmarks.accelerator --cpu

Training throughput and memory against lanes at once (--vectorize_lanes); values and entropy of
plain, streaming and fused attention against float64 on the host; rows against those of the CPU.
Nothing here has been run on an accelerator yet; --cpu shows on any machine that it works, in a size
that says nothing about speed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention import attention_statistics, dot_product_attention
from attention.fused import fused_attention
from attention.streaming import streaming_attention
from benchmarks.agreement import difference, flat
from benchmarks.rounds import publish
from experiments.config import RunConfig, TrainConfig, resolve
from experiments.engine import lanes, training
from experiments.engine.devices import Place
from experiments.engine.lanes import Chunk, PlannedLane

WIDTH, HEADS = 64, 2
SECONDS = 1.0  # of a measurement, about


class Size(NamedTuple):
    """How much is tried; the larger sizes are left out when the time is up."""

    lanes: Sequence[int]
    lengths: Sequence[int]
    updates: int  # whose rows are held against those of the CPU
    settings: dict[str, Any]


FULL = Size((1, 4, 16, 64, 256, 1024), (1024, 4096, 8192), 100, {})
TINY = Size((1, 4, 64), (64, 256), 10, {"sequence_length": 8, "batch_size": 4, "d_model": 16})


def rate(function: Callable[[], object]) -> float:
    """Calls per second, compiled and warm; every result is waited for."""
    jax.block_until_ready(function())
    calls, start = 0, time.perf_counter()
    while time.perf_counter() - start < SECONDS:
        jax.block_until_ready(function())
        calls += 1
    return calls / (time.perf_counter() - start)


def stacked(planned: Sequence[PlannedLane], place: Place) -> Any:
    """Lanes of one program as one, with a leading axis."""
    together = jax.tree.map(lambda *values: np.stack(values), *(one.lane for one in planned))
    return place.put(together)


def lanes_at_once(size: Size, place: Place, deadline: float) -> list[tuple[str, ...]]:
    """Throughput and memory of one program with ever more lanes in it."""
    rows: list[tuple[str, ...]] = []
    for count in size.lanes:
        config = resolve(TrainConfig(scale="sqrt", num_seeds=count, **size.settings))
        planned = lanes.plan_lanes(config)
        program, together = planned[0].program, stacked(planned, place)
        if time.perf_counter() > deadline:
            rows.append((str(count), *("the time was up",) * 3))
            break
        states = jax.jit(jax.vmap(partial(training.initialize, program)))(together)
        steps = np.int32(20)
        compiled = training.advance_together.lower(program, together, states, steps).compile()
        memory: Any = compiled.memory_analysis()
        needed = memory.temp_size_in_bytes + memory.output_size_in_bytes
        try:
            calls = rate(partial(compiled, together, states, steps))
        except jax.errors.JaxRuntimeError as error:  # out of memory
            rows.append((str(count), str(error).splitlines()[0][:60], "–", f"{needed / 1e6:.0f}"))
            break
        per_second = f"{calls * steps * count:,.0f}"
        rows.append((str(count), per_second, f"{1e3 / calls / steps:.2f}", f"{needed / 1e6:.0f}"))
    return rows


def exact(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(values, entropy) in float64, on the host."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    logits = np.einsum("thk,shk->hts", query, key) / np.sqrt(query.shape[-1])
    logits -= logits.max(-1, keepdims=True)
    weights = np.exp(logits)
    total = weights.sum(-1, keepdims=True)
    entropy = np.log(total[..., 0]) - (weights * logits).sum(-1) / total[..., 0]
    return np.einsum("hts,shv->thv", weights / total, value), entropy


def plain(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, Any]:
    """Values, and statistics by way of the weights."""
    output = dot_product_attention(query, key, value)
    return output.values, attention_statistics(output.logits)


def attentions(size: Size, place: Place, deadline: float) -> list[tuple[str, ...]]:
    """Time and error of each kind of attention, forward, with its statistics."""
    kernel = "cudnn" if place.devices[0].platform == "gpu" else "xla"
    kinds = {
        "plain": (plain, jnp.float32),
        "streaming": (streaming_attention, jnp.float32),
        f"fused, by {kernel}": (partial(fused_attention, implementation=kernel), jnp.bfloat16),
    }
    rows: list[tuple[str, ...]] = []
    for length in size.lengths:
        keys = jax.random.split(jax.random.key(0), 3)
        drawn = [jax.random.normal(key, (length, HEADS, WIDTH)) for key in keys]
        for name, (attend, dtype) in kinds.items():
            if time.perf_counter() > deadline:
                rows.append((str(length), name, *("the time was up",) * 3))
                continue
            given = place.put([x.astype(dtype) for x in drawn])
            compiled = jax.jit(attend)
            values, statistics = compiled(*given)
            expected = exact(*(np.asarray(x.astype(jnp.float32)) for x in given))
            errors = [
                f"{np.abs(np.asarray(ours, np.float64) - theirs).max():.1e}"
                for ours, theirs in zip((values, statistics.entropy), expected, strict=True)
            ]
            milliseconds = 1e3 / rate(partial(compiled, *given))
            rows.append((str(length), f"{name}, {dtype.__name__}", f"{milliseconds:.2f}", *errors))
    return rows


def rows_beside_cpu(size: Size, place: Place) -> list[tuple[str, ...]]:
    """The same lanes here, one by one and as one batch, against one by one on the CPU."""
    config = resolve(TrainConfig(num_seeds=2, **size.settings))

    def rows(where: Place, vectorize: bool) -> np.ndarray:
        chunk = Chunk(0, size.updates, False)
        planned = lanes.plan_lanes(config)
        [result] = lanes.run_chunks(planned, [chunk], places=[where], vectorize=vectorize)
        metrics = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), result.metrics)
        return flat(metrics).reshape(len(planned), size.updates, -1).swapaxes(0, 1)

    cpu = rows(Place((jax.devices("cpu")[0],)), False)
    table: list[tuple[str, ...]] = []
    for name, vectorize in (("one by one", False), ("as one batch", True)):
        here = rows(place, vectorize)
        losses = f"{difference(here[..., 0], cpu[..., 0]):.1e}"
        table.append((name, f"{difference(here[0], cpu[0]):.1e}", losses))
    return table


def settings(config: RunConfig) -> str:
    """The size of a model, in words."""
    return (
        f"batch {config.batch_size}, {config.sequence_length} tokens, d_model {config.d_model}, "
        f"{config.num_heads} heads of {config.d_k}"
    )


def main() -> None:
    """Measure, print three tables, write them."""
    parser = argparse.ArgumentParser(description="What an accelerator does with this project.")
    parser.add_argument("--cpu", action="store_true", help="a tiny version, on the CPU")
    parser.add_argument("--minutes", type=float, default=8, help="larger sizes are then left out")
    parser.add_argument("--out", type=Path, help="a folder for three pages of markdown")
    options = parser.parse_args()
    device = jax.devices("cpu")[0] if options.cpu else jax.devices()[0]
    if device.platform == "cpu" and not options.cpu:
        raise SystemExit("no accelerator here, only a CPU; --cpu shows in a tiny size how it goes")
    jax.config.update("jax_default_matmul_precision", "highest")
    size, place, start = TINY if options.cpu else FULL, Place((device,)), time.perf_counter()
    seconds = 60 * options.minutes
    where = f"{device.device_kind} ({device.platform})"

    def page(name: str, title: str, header: Sequence[str], rows: Any, notes: str) -> None:
        path = options.out and options.out / f"{name}.md"
        publish(path, f"{title}, on {where}", header, rows, notes)

    page(
        "rows",
        "Rows",
        ("lanes", "any number of the first row differs by", f"loss of {size.updates} rows by"),
        rows_beside_cpu(size, place),
        "Largest difference from the same lanes on the CPU, relative to the largest value.",
    )
    page(
        "attention",
        "Attention",
        ("T = S", "kind", "ms", "largest error of a value", "of an entropy, nats"),
        attentions(size, place, start + 0.5 * seconds),
        f"{HEADS} heads of {WIDTH}, forward with statistics; against float64 of the same inputs.",
    )
    page(
        "lanes",
        "Lanes at once",
        ("lanes", "model-steps/s", "ms per step", "MB beside the inputs"),
        lanes_at_once(size, place, start + 0.9 * seconds),
        settings(resolve(TrainConfig(**size.settings))),
    )


if __name__ == "__main__":
    main()
