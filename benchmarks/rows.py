"""How many rows a second one process can write: the limit of a run on many devices.

    python -m benchmarks.rows --out=results/benchmarks/rows.md

Rows as `train.py` writes them, from arrays of a chunk of 20 steps and 100 lanes to lines in a file
that are safely on the disk.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from attention.statistics import HeadStatistics
from benchmarks.rounds import Work, measure, publish, spread
from experiments.engine.lanes import Chunk, ChunkResult, LaneName
from experiments.engine.training import StepMetrics
from experiments.runs import recording

STEPS, LANES, CHUNKS = 20, 100, 20


def writing(layers: int, heads: int, log_every: int) -> Work:
    """Chunks of made-up numbers to a file; the units are rows of training, written or not."""
    random = np.random.default_rng(0)

    def numbers(*shape: int) -> Any:
        return random.normal(size=(LANES, STEPS, *shape)).astype(np.float32)

    by_head = HeadStatistics(*(numbers(layers, heads) for _ in HeadStatistics._fields))
    scalars = {name: numbers() for name in recording.STEP_SCALARS}
    metrics = StepMetrics(**scalars, heads=by_head)
    names = [LaneName("sqrt", 1e-3, seed) for seed in range(LANES)]
    rows = recording.RowFormat(names, [0.125] * LANES, log_every)

    def work() -> tuple[float, float]:
        with tempfile.TemporaryDirectory() as folder, (Path(folder) / "rows").open("w") as file:
            start = time.perf_counter()
            for i in range(CHUNKS):
                chunk = Chunk(i * STEPS, (i + 1) * STEPS, False)
                file.write(rows.metrics(ChunkResult(chunk, metrics, None, ())))
            recording.sync(file)
            return CHUNKS * STEPS * LANES, time.perf_counter() - start

    return work


def main() -> None:
    """Measure, print a table, write it."""
    parser = argparse.ArgumentParser(description="Rows per second of one process.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="a page of markdown: .../rows.md")
    options = parser.parse_args()
    shapes = {
        "1 layer, 2 heads": (1, 2, 1),
        "2 layers, 2 heads": (2, 2, 1),
        "2 layers, 8 heads": (2, 8, 1),
        "1 layer, 2 heads, --log_every=10": (1, 2, 10),
    }
    rates = measure({name: (writing, shape) for name, shape in shapes.items()}, options.rounds)
    publish(
        options.out,
        "Rows that one process can write",
        ("model", "model-steps/s that its writing keeps up with"),
        [(name, spread(values, ",.0f")) for name, values in rates.items()],
        f"Median (range) of {options.rounds} rounds of {CHUNKS * STEPS * LANES} model-steps.",
    )


if __name__ == "__main__":
    main()
