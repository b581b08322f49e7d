"""Studies: one question each, one file each, run by `python -m experiments NAME`.

A study's file has a function `run(request: common.Request) -> common.Findings`. Adding a study is a
new file and an entry here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple


class Study(NamedTuple):
    """What the list of studies says of one."""

    about: str  # one line
    takes: str  # time on 2 cores, for people


HOURS = "hours; 20 min a cell"

STUDIES: dict[str, Study] = {
    "score_variance": Study("variance and kurtosis of q·k against d_k", "15 s"),
    "saturation": Study("entropy, largest weight and Jacobian against the logits' spread", "20 s"),
    "gradient_flow": Study("which gradients vanish without scaling, and which explode", "20 s"),
    "head_dimension": Study("what d_k itself changes, scaled and unscaled", "30 s"),
    "length": Study("finding one key among n: no, √log and log scaling", "30 s"),
    "learning_rate": Study("held-out loss against learning rate, every arm", HOURS),
    "convergence": Study("does scaling train faster, and why: tuned, paired, tested", HOURS),
    "article": Study("the audit: every number of the article, measured", "45 s"),
}


def load(name: str) -> Callable[[Any], Any]:
    """The `run` function of a study, which draws in the house style.

    Imported late, as studies import JAX and Matplotlib.
    """
    from experiments.figures import style

    return style.house()(importlib.import_module(f"experiments.studies.{name}").run)
