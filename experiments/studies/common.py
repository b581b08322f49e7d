"""What studies share: how they are asked, how they draw, what they answer with."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from rich.console import Group, RenderableType
from rich.markdown import Markdown
from rich.text import Text

from experiments.analysis.tables import Table, interval, number, on_terminal, page
from experiments.figures import style
from experiments.runs.environment import environment
from experiments.runs.folder import write_json, write_text

BASE_SEED = 20170612  # of every study
# A random stream is named and folded in, so that a new one never shifts another's draws.
STREAMS = {"query": 0, "key": 1, "value": 2, "needle": 3}
MOST_SEEDS = 10**6

# Compiling takes longer than running in most studies; this halves it and costs no speed.
_COMPILER = {"xla_backend_optimization_level": 1}


class Request(NamedTuple):
    """What a study is asked for."""

    out: Path  # its folder; long studies keep unfinished work here
    seeds: int | None = None  # default: the study's own number
    quick: bool = False  # a smaller version, in seconds
    cells: tuple[str, ...] = ()  # of learning_rate and convergence; none named: all of them
    say: Callable[[str], None] = lambda line: None  # progress, for people

    def number_of_seeds(self, full: int, quick: int) -> int:
        """How many seeds to draw: what was asked for, or the study's own number."""
        own = quick if self.quick else full
        return check_seeds(own if self.seeds is None else self.seeds)


class Findings(NamedTuple):
    """What a study found."""

    title: str
    answer: str  # markdown: what was found, first of all
    tables: tuple[Table, ...]
    figures: dict[str, Figure]  # file name to figure
    captions: dict[str, str]  # file name to what the figure shows
    settings: dict[str, Any]  # everything the numbers depend on
    numbers: dict[str, Any]  # for summary.json
    notes: str = ""  # markdown, after the figures


def check_seeds(seeds: int, least: int = 2) -> int:
    """The number itself; ValueError where it is out of range."""
    if not least <= operator.index(seeds) <= MOST_SEEDS:
        raise ValueError(f"seeds: {seeds}, must be from {least} to {MOST_SEEDS}")
    return seeds


# --- Drawing --------------------------------------------------------------------------------------


def study_key(name: str) -> jax.Array:
    """The key of a study: the base seed with the study's name folded in."""
    key = jax.random.key(BASE_SEED)
    return functools.reduce(jax.random.fold_in, name.encode(), key)


def normal(key: jax.Array, stream: str, shape: tuple[int, ...]) -> jax.Array:
    """Standard normal draws of a named stream, float32."""
    return jax.random.normal(jax.random.fold_in(key, STREAMS[stream]), shape)


def over_seeds(measure: Callable[[jax.Array], Any], key: jax.Array, seeds: int, chunk: int) -> Any:
    """measure(key of a seed) for every seed, in one compiled call.

    Args:
      measure: a pure function of a typed key; returns a pytree of arrays.
      key: seed i gets fold_in(key, i).
      seeds: how many.
      chunk: how many of them are vectorised at a time; bounds the memory.

    Returns:
      The pytree as NumPy arrays with a leading axis of seeds.
    """

    # Whole chunks only, so that one program serves all; the last one may draw some seeds in vain.
    chunks = -(-check_seeds(seeds, 1) // chunk)
    chunk = -(-seeds // chunks)
    indices = jnp.arange(chunks * chunk).reshape(chunks, chunk)

    @functools.partial(jax.jit, compiler_options=_COMPILER)
    def mapped(key: jax.Array) -> Any:
        def one(index: jax.Array) -> Any:
            return measure(jax.random.fold_in(key, index))

        return jax.lax.map(jax.vmap(one), indices)

    def flat(array: jax.Array) -> np.ndarray:
        return np.asarray(array).reshape(-1, *array.shape[2:])[:seeds]

    return jax.tree.map(flat, mapped(key))


# --- Summarising ----------------------------------------------------------------------------------


class Spread(NamedTuple):
    """A sample over seeds in a few numbers."""

    median: float
    low: float  # 5 % quantile
    high: float  # 95 % quantile
    mean: float
    standard_error: float  # of the mean
    seeds: int


def spread(values: np.ndarray) -> Spread:
    """Summarise a sample [seeds]."""
    values = np.asarray(values, float)
    low, median, high = np.quantile(values, (0.05, 0.5, 0.95))
    error = values.std(ddof=1) / np.sqrt(values.size)
    return Spread(median, low, high, values.mean(), float(error), values.size)


def with_interval(sample: Spread, digits: int = 3) -> str:
    """Median [5 %, 95 %]."""

    def form(value: float) -> str:
        return number(value, digits)

    return f"{form(sample.median)} {interval(sample.low, sample.high, form)}"


def with_error(sample: Spread, digits: int = 3) -> str:
    """Mean ± standard error."""
    return f"{number(sample.mean, digits)} ± {number(sample.standard_error, 2)}"


# --- Answering ------------------------------------------------------------------------------------


def write(findings: Findings, out: Path, command: str, quick: bool) -> None:
    """Write report.md, summary.json and figures/ into a folder; the same findings, the same bytes.

    Args:
      findings: of the study.
      out: made if needed; files of the same names are replaced.
      command: what made the findings, as typed.
      quick: whether it was a quick run, which every output says.
    """
    out.mkdir(parents=True, exist_ok=True)
    surroundings = environment(jax.devices(), "highest")
    for name, figure in findings.figures.items():
        if quick:
            with style.house():
                figure.suptitle("quick run", x=0.99, ha="right", fontsize=8)
        style.save(figure, out / "figures" / name)
    write_text(out / "report.md", _report(findings, command, quick, surroundings))
    summary = {
        "command": command,
        "quick": quick,
        "settings": findings.settings,
        "numbers": findings.numbers,
        "environment": surroundings,
    }
    write_json(out / "summary.json", summary)


def terminal(findings: Findings) -> RenderableType:
    """The findings for a rich console."""
    return Group(on_terminal(*findings.tables), Text(), Markdown(findings.answer))


def _report(findings: Findings, command: str, quick: bool, surroundings: dict[str, Any]) -> str:
    settings = [f"{name.replace('_', ' ')} {value}" for name, value in findings.settings.items()]
    return page(
        findings.title,
        opening=["**A quick run: fewer seeds than the numbers deserve.**" * quick, findings.answer],
        tables=findings.tables,
        figures={f"figures/{name}.png": findings.captions[name] for name in findings.figures},
        closing=[findings.notes, f"Settings: {'; '.join(settings)}."],
        command=command,
        environment=surroundings,
    )
