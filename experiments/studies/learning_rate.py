"""How the learning rate decides: held-out loss against it, for every arm, seed by seed.

The cells are those of `convergence`, which begins with the same tuning (`tuning.py` has its rules)
and finds it done in the same folder. Beside each arm's best rate stands what a wrong one costs:
the sensitivity E_η[min(ℓ(η), ℓ₀) - ℓ*] of Wortsman et al. 2023 over the grid, with the best final
loss ℓ*, without which it says nothing.
"""

from __future__ import annotations

import numpy as np

from experiments.analysis.tables import number
from experiments.studies.common import Findings, Request
from experiments.studies.convergence.cells import cell_path, progress
from experiments.studies.convergence.figures import learning_rate_figure
from experiments.studies.convergence.protocol import choose_cells, protocol
from experiments.studies.convergence.report import CAPTIONS, tuning_table
from experiments.studies.convergence.tuning import TUNING_SEEDS, tune


def run(request: Request) -> Findings:
    """Tune the cells that are asked for; all of them by default."""
    plan = protocol(quick=request.quick)
    first = plan.tuning_seeds[0]
    count = request.number_of_seeds(len(TUNING_SEEDS), len(plan.tuning_seeds))
    seeds = range(first, first + count)
    cells = choose_cells(plan.cells, request.cells)
    lanes = [len(c.arms) * len(plan.grids[c.config.optimizer]) * count for c in cells]
    steps = [cell.config.steps or 0 for cell in cells]
    tuned = []
    with progress(int(np.dot(lanes, steps))) as watch:
        for cell in cells:
            path, grid = cell_path(request.out, cell), plan.grids[cell.config.optimizer]
            tuned.append((cell, tune(cell, path, seeds=seeds, grid=grid, watch=watch)))
    table = tuning_table(tuned)
    lines = []
    for cell, tuning in tuned:
        best = ", ".join(
            f"`{arm}` {tuning.best[arm]:g} (loss area {number(area.mean(-1).min())})"
            for arm, area in zip(tuning.arms, tuning.area, strict=True)
        )
        lines.append(f"- **{cell.name}**, {cell.config.steps} steps, {count} seeds: {best}.")
    return Findings(
        title="How the learning rate decides",
        answer="Best learning rates:\n\n" + "\n".join(lines),
        tables=(table._replace(title="Quick run. " * request.quick + table.title),),
        figures={"learning_rate": learning_rate_figure(tuned)},
        captions={"learning_rate": CAPTIONS["learning_rate"]},
        settings={
            "cells": [cell.name for cell in cells],
            "tuning seeds": list(seeds),
            "steps": dict(zip([cell.name for cell in cells], steps, strict=True)),
        },
        numbers={
            cell.name: {
                "rates": tuning.rates,
                "best": tuning.best,
                "interior": tuning.interior,
                "loss_area": dict(zip(tuning.arms, tuning.area, strict=True)),
                "final_loss": dict(zip(tuning.arms, tuning.loss, strict=True)),
            }
            for cell, tuning in tuned
        },
    )
