"""All figures of runs. A figure that can't be drawn is one line, and costs nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.analysis.read import ArmRun
from experiments.figures import curves, style

if TYPE_CHECKING:
    from experiments.figures.attention_maps import ArmMaps


def draw_figures(arms: Sequence[ArmRun], folder: Path, say: Callable[[str], None]) -> list[Path]:
    """Draw the curves of arms, and their attention maps where they can stand side by side.

    Args:
      arms: of one run or several.
      folder: where to; made if need be.
      say: called with one line for each thing that is wrong: no attention maps, and why.

    Returns:
      The PNGs; beside each is its SVG.
    """
    drawn = []
    with ThreadPoolExecutor(1) as beside:  # XLA compiles while Matplotlib draws
        maps = beside.submit(_read_maps, arms, say)
        for name, draw in (
            ("curves", lambda: curves.draw_curves(arms, folder)),
            ("attention maps", lambda: _draw_maps(maps.result(), folder)),
        ):
            try:
                drawn.append(draw())
            except Exception as error:  # of whatever library: the report is worth more
                reason = " ".join(str(error).split()) or type(error).__name__
                say(f"no {name}: {reason}")
    return drawn


def _read_maps(arms: Sequence[ArmRun], say: Callable[[str], None]) -> list[ArmMaps]:
    from experiments.figures import attention_maps  # with JAX, which nothing else here needs

    return attention_maps.read_maps(arms, say)


def _draw_maps(maps: list[ArmMaps], folder: Path) -> Path:
    from experiments.figures import attention_maps

    with style.house(style.VERBATIM):
        return attention_maps.draw_maps(maps, folder)
