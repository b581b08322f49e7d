"""Where a model looks: the weights of every layer and head on one example, arm beside arm.

The example is the first held-out sequence, the same for every arm of a task; the lane is the one of
an arm's first seed, with the weights it started from and those of its newest good checkpoint.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import PowerNorm

from attention import transformer
from experiments.analysis.read import ArmRun
from experiments.config import LaneName
from experiments.engine import lanes, training
from experiments.engine.training import Lane, LaneProgram
from experiments.figures import style
from experiments.runs.resume import read_states

MOST_ROWS = 48  # heads in one figure; more would be a poster
MOST_POSITIONS = 512  # more than a panel has pixels, and the weights are their square
MOST_LABELS = 32  # tokens on an axis
TICKS = (0, 0.05, 0.2, 0.5, 1)  # of the colour bar


class Example(NamedTuple):
    """What a model does with the first held-out sequence; arrays of JAX or NumPy."""

    tokens_T: Any  # int32: the input
    targets_T: Any  # int32: the right output ...
    answers_T: Any  # bool: ... where it counts
    weights_LHTS: Any  # of query position T for key position S


class ArmMaps(NamedTuple):
    """An arm's weights on the example, before and after training."""

    label: str
    seed: int  # the arm's first
    steps: tuple[int, int]  # updates taken before each of the two
    start: Example
    end: Example


@functools.partial(jax.jit, static_argnames="program")
def attend(program: LaneProgram, lane: Lane, params: transformer.Params) -> Example:
    """Run a lane's model on the first held-out sequence, without dropout.

    By plain attention, whatever the lane was trained with: the others don't hold the weights.
    """
    model = program.model._replace(attention="plain")
    program = program._replace(model=model, batch_shards=1)
    with training.pinned(program):
        batch = jax.tree.map(lambda array: array[:1], training.evaluation_batch(program))
        output = transformer.apply(program.model, params, batch.tokens_BT, lane.multiplier)
    assert output.weights is not None
    tokens_T, targets_T, answers_T = (array[0] for array in batch)
    return Example(tokens_T, targets_T, answers_T, output.weights[:, 0])


def read_maps(arms: Sequence[ArmRun], say: Callable[[str], None]) -> list[ArmMaps]:
    """The maps of arms, in order; no file is changed.

    Args:
      arms: of one run or several.
      say: called with one line for each bad checkpoint that was passed over.

    Raises:
      RunFolderError: a run has no good checkpoint, or those of another model.
      ValueError: longer sequences than can be shown.
    """
    longest = max(arm.config.sequence_length for arm in arms)
    if longest > MOST_POSITIONS:
        raise ValueError(f"{longest} positions are more than can be shown, {MOST_POSITIONS}")
    found = []
    for folder in dict.fromkeys(arm.folder for arm in arms):
        own = [arm for arm in arms if arm.folder == folder]
        config = own[0].config
        planned, names = lanes.plan_lanes(config), config.lane_names()
        step, states = read_states(folder, config, planned, say)
        for arm in own:
            seed = int(arm.seeds[0])
            place = names.index(LaneName(arm.arm.name, arm.learning_rate, seed))
            program, lane = planned[place]
            start, end = (
                jax.tree.map(np.asarray, attend(program, lane, state.params))
                for state in (training.initialize(program, lane), states[place])
            )
            found.append(ArmMaps(arm.label, seed, (0, step), start, end))
    return found


def draw_maps(maps: Sequence[ArmMaps], folder: Path) -> Path:
    """Draw a row of panels for each head, two columns for each arm; returns the PNG.

    Raises:
      ValueError: their examples or heads differ.
    """
    first = maps[0].start
    for other in maps[1:]:
        same = np.array_equal(other.start.tokens_T, first.tokens_T)
        if not same or other.start.weights_LHTS.shape != first.weights_LHTS.shape:
            raise ValueError(f"{other.label}: not the example and heads of {maps[0].label}")
    layers, heads, length, _ = first.weights_LHTS.shape
    rows = min(layers * heads, MOST_ROWS)
    figure, axes = style.new_figure(
        rows, 2 * len(maps), width=1.9, height=1.8, sharex=True, sharey=True
    )
    columns = [
        (f"{m.label}\nstep {step}", example.weights_LHTS.reshape(-1, length, length))
        for m in maps
        for step, example in zip(m.steps, (m.start, m.end), strict=True)
    ]
    # With a square root, what is spread over every key shows beside what is all on one.
    colours = ScalarMappable(PowerNorm(0.5, vmin=0, vmax=1), "magma_r")
    for (title, weights), axes_of_column in zip(columns, axes.T, strict=True):
        axes_of_column[0].set_title(title, fontsize=9)
        for ax, weights_TS in zip(axes_of_column, weights, strict=False):
            ax.grid(False)
            ax.imshow(weights_TS, cmap=colours.cmap, norm=colours.norm, interpolation="nearest")
            ax.tick_params(labelsize=min(7, 90 / length), length=1, pad=1)
            ax.tick_params(axis="x", labelrotation=90)
    for row, ax in enumerate(axes[:, 0]):
        layer, head = divmod(row, heads)
        ax.set_ylabel(f"layer {layer}, head {head}", fontsize=8)
    if length <= MOST_LABELS:
        _label_tokens(axes[0, 0], first)
    left_out = f"; the first {rows} of {layers * heads} heads" * (rows < layers * heads)
    figure.supxlabel(
        "columns: key token; rows: query token → right answer. First held-out sequence, "
        f"seed {maps[0].seed}{left_out}",
        fontsize=8,
        color=style.GREY,
    )
    bar = figure.colorbar(colours, ax=axes, label="attention weight", ticks=TICKS, shrink=0.6)
    bar.ax.tick_params(labelsize=7)
    return style.save(figure, folder / "attention_maps")[0]


def _label_tokens(ax: Axes, example: Example) -> None:
    """Write the tokens along both axes, and beside a query the answer that is asked of it."""
    queries = [
        f"{token}→{target}" if counts else str(token)
        for token, target, counts in zip(*example[:3], strict=True)
    ]
    ax.set_xticks(range(len(queries)), [str(token) for token in example.tokens_T])
    ax.set_yticks(range(len(queries)), queries)
