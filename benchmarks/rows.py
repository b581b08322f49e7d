"""How many rows a second one process can write: the limit of a run on many devices.

    python -m benchmarks.rows --out=results/benchmarks/rows.md

Rows as `train.py` writes them, from arrays of a chunk of 20 steps and 100 lanes to lines in a file,
with their digest, that are safely on the disk.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rounds import Contender, Work, measure, publish, spread
from experiments.config import LaneName
from experiments.engine.lanes import Chunk, ChunkResult
from experiments.metrics import STEP_SCALARS, HeadStatistics, StepMetrics
from experiments.runs.rows import RowFormat
from experiments.runs.writer import RowsFile

STEPS, LANES, CHUNKS = 20, 100, 20


def writing(layers: int, heads: int, log_every: int) -> Work:
    """Chunks of made-up numbers to a file; the units are rows of training, written or not."""
    random = np.random.default_rng(0)

    def numbers(*shape: int) -> Any:
        return random.normal(size=(LANES, STEPS, *shape)).astype(np.float32)

    by_head = HeadStatistics(*(numbers(layers, heads) for _ in HeadStatistics._fields))
    scalars = {name: numbers() for name in STEP_SCALARS}
    metrics = StepMetrics(**scalars, heads=by_head, parameters={})
    names = [LaneName("sqrt", 1e-3, seed) for seed in range(LANES)]
    rows = RowFormat(names, [0.125] * LANES, log_every)

    def work(seconds: float) -> tuple[float, float]:
        chunks, start = 0, time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "rows").touch()
            file = RowsFile(Path(folder) / "rows")
            while time.perf_counter() - start < seconds:
                for _ in range(CHUNKS):
                    chunk = Chunk(chunks * STEPS, (chunks + 1) * STEPS, False)
                    file.append(rows.metrics(ChunkResult(chunk, metrics, None, ())))
                    chunks += 1
                file.extent()
            file.close()
        return chunks * STEPS * LANES, time.perf_counter() - start

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
    contenders = {name: Contender(writing, shape) for name, shape in shapes.items()}
    rates = measure(contenders, options.rounds)
    publish(
        options.out,
        "Rows that one process can write",
        ("model", "model-steps/s that its writing keeps up with"),
        [(name, spread(values, ",.0f")) for name, values in rates.items()],
        f"Median (range) of {options.rounds} rounds of 2 s, on the disk after every "
        f"{CHUNKS * STEPS * LANES} model-steps.",
    )


if __name__ == "__main__":
    main()
