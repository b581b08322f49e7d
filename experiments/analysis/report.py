"""A summary for people: tables on the terminal, and a page of markdown with the figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from experiments.analysis.read import read_arms
from experiments.analysis.summary import summarize_run
from experiments.runs import recording

Summary = dict[str, Any]  # from `summary.summarize`

NOTHING = "–"


class Grid(NamedTuple):
    """A table, before it is known what it is drawn with."""

    title: str
    header: tuple[str, ...]
    rows: Sequence[Sequence[str]]


def write_results(
    folder: Path, *, figures: bool = True, say: Callable[[str], None] = lambda line: None
) -> Summary:
    """Write summary.json, figures/ and report.md from the rows of a run folder.

    Each file is replaced in one piece, so this may be repeated, and mends what is missing.

    Args:
      folder: of a run that has ended, early or not.
      figures: without them the report embeds none.
      say: called with a line for each figure that can't be drawn.

    Returns:
      The summary.

    Raises:
      RunFolderError: no run, or a damaged one.
      OSError: the disk is full, read-only or gone.
    """
    arms = read_arms([folder])
    summary = summarize_run(arms)
    recording.write_json(folder / "summary.json", summary)
    drawn: list[Path] = []
    if figures:
        from experiments.commands.plot import draw_figures  # half a second of matplotlib

        drawn = draw_figures(arms, folder / "figures", say)
    text = report(summary, [path.relative_to(folder).as_posix() for path in drawn])
    partial = folder / "report.md.partial"
    partial.write_text(text)
    partial.replace(folder / "report.md")
    return summary


def terminal_tables(summary: Summary) -> RenderableType:
    """The tables of a summary for a rich console, with a line for everything worth a warning."""
    parts: list[RenderableType] = []
    for grid in grids(summary):
        table = Table(
            title=grid.title,
            title_justify="left",
            box=box.SIMPLE_HEAD,
            show_edge=False,
            padding=(0, 1, 0, 0),
            pad_edge=False,
        )
        for i, name in enumerate(grid.header):
            table.add_column(name, justify="right" if i else "left", vertical="bottom")
        for row in grid.rows:
            table.add_row(*map(Text, row))  # not markup: a folder may have brackets in its name
        parts += [table, ""]
    return Group(*parts, *map(Text, notes(summary)))


def report(summary: Summary, figures: Sequence[str] = ()) -> str:
    """The page report.md of a run folder.

    Args:
      summary: from `summary.summarize`.
      figures: paths to embed, relative to the run folder.
    """
    versions = summary["environment"].get("versions", {})
    surroundings = [
        f"{name.replace('_', ' ')} {summary['environment'][name]}"
        for name in ("platform", "matmul_precision", "git_revision")
        if summary["environment"].get(name)
    ]
    ended = ""
    if summary["steps_done"] < summary["steps"]:
        ended = f" The run stopped after {summary['steps_done']} steps."
    seeds = summary["seeds"]
    lines = [
        f"# {summary['task']}: {', '.join(arm['label'] for arm in summary['arms'])}",
        f"{summary['steps']} steps, {len(seeds)} seed{'s' * (len(seeds) > 1)}.{ended} "
        f"Without attention that selects, the best possible accuracy is "
        f"{summary['chance_accuracy']:.1%} and the best loss {summary['chance_loss']:.3g} nats.",
        f"```sh\n{summary['command']}\n```",
        *(_markdown(grid) for grid in grids(summary)),
        "\n".join(f"- {note}" for note in notes(summary)),
        *(f"![{_caption(path)}]({path})" for path in figures),
        "Made with "
        + ", ".join([*(f"{name} {version}" for name, version in versions.items()), *surroundings])
        + ".",
    ]
    return "\n\n".join(line for line in lines if line) + "\n"


def grids(summary: Summary) -> list[Grid]:
    """The tables of a summary: held-out results, attention and gradients, paired differences."""
    found = [_held_out(summary), _attention(summary)]
    if summary["comparisons"]:
        found.append(_differences(summary))
    return found


def notes(summary: Summary) -> list[str]:
    """What a reader of the tables must know: lanes that diverged, never arrived, or are few."""
    threshold = f"{summary['threshold']:.0%}"
    found = []
    for arm in summary["arms"]:
        if arm["diverged"]:
            lanes = ", ".join(f"seed {d['seed']} by step {d['step']}" for d in arm["diverged"])
            found.append(
                f"{arm['label']}: {len(arm['diverged'])} of {arm['seeds']} diverged ({lanes}); "
                "held-out, they count as untrained from there on."
            )
        times = arm["steps_to_threshold"]
        if times and times["not_reached"] > len(arm["diverged"]):
            found.append(
                f"{arm['label']}: {times['not_reached']} of {arm['seeds']} still short of "
                f"{threshold} at step {arm['held_out']['step']}: slower than the run is long, "
                "which is not never (more --steps tell)."
            )
        if arm["held_out"] is None:
            found.append(f"{arm['label']}: no evaluation of every seed yet.")
    for pairs in {c["seeds"] for c in summary["comparisons"]}:
        if 2 / 2**pairs > 0.01:
            found.append(f"With {pairs} pairs no p can be below {2 / 2**pairs:.3g}.")
    if any(_bound(c["steps_to_threshold"]) for c in summary["comparisons"]):
        found.append("A seed still short counts as the last step: ≥ and ≤ mark bounds, ~ neither.")
    if len(summary["comparisons"]) > 1:
        found.append(f"p is corrected for {len(summary['comparisons'])} comparisons (Holm).")
    return found


def _held_out(summary: Summary) -> Grid:
    rows = []
    for arm in summary["arms"]:
        held_out, times = arm["held_out"], arm["steps_to_threshold"]
        if held_out is None:
            rows.append((arm["label"], *[NOTHING] * 5))
            continue
        rows.append(
            (
                arm["label"],
                str(held_out["step"]),
                _with_range(held_out["accuracy"], "{:.1f}", 100),
                _with_range(held_out["loss"], "{:#.3g}"),
                _time(times, held_out["step"]),
                f"{times['not_reached']} of {arm['seeds']}",
            )
        )
    to = f"steps to {summary['threshold']:.0%}"
    header = ("arm", "step", "accuracy %", "loss", to, "still\nshort")
    return Grid("Held-out: median over seeds (range)", header, rows)


def _attention(summary: Summary) -> Grid:
    columns = {
        "normalized_entropy": "entropy\n/ ln n",
        "saturation": "saturated\n%",
        "dead_row_fraction": "dead\nrows %",
        "logit_std": "logit\nstd",
        "grad_norm": "gradient\nnorm",
        "grad_norm_logits": "∂loss/\n∂logits",
    }
    rows = []
    for arm in summary["arms"]:
        steps = arm["end_steps"]
        between = NOTHING if steps is None else "–".join(map(str, dict.fromkeys(steps)))
        for name, when in (("start", "0"), ("end", between)):
            values = [
                _number(arm[name][column], "{:.1f}", 100)
                if title.endswith("%")
                else _number(arm[name][column], "{:#.3g}")
                for column, title in columns.items()
            ]
            rows.append((arm["label"] if name == "start" else "", when, *values))
    header = ("arm", "steps", *columns.values())
    return Grid("Attention and gradients: median over seeds and steps", header, rows)


def _differences(summary: Summary) -> Grid:
    rows = []
    for found in summary["comparisons"]:
        title = f"{found['arm']} − {found['against']}"
        for quantity, name, form in (
            ("accuracy", "accuracy %", "{:+.1f}"),
            ("loss", "loss", "{:+.3f}"),
            ("steps_to_threshold", f"steps to {summary['threshold']:.0%}", "{:+.0f}"),
        ):
            test = found[quantity]
            values = [NOTHING] * 3
            if test is not None:
                unit = 100 if quantity == "accuracy" else 1
                mean, low, high = (
                    _number(test[key], form, unit) for key in ("mean_difference", "low", "high")
                )
                exact = "" if test["exact"] else " (drawn)"
                values = [
                    _bound(test) + mean,
                    f"[{low}, {high}]",
                    f"{test['p_value_holm']:.3g}{exact}",
                ]
            rows.append((title, name, *values))
            title = ""
    header = ("arm − partner", "", "difference", "95% interval", "p")
    return Grid(
        "Held-out, paired by seed: mean difference, BCa interval, sign-flip test", header, rows
    )


def _bound(test: dict[str, Any] | None) -> str:
    """Seeds that never got there make the difference of the times a bound, if all on one side."""
    arm, partner = (test or {}).get("not_reached", (0, 0))
    if arm and partner:
        return "~"
    return "≥ " if arm else "≤ " if partner else ""


def _with_range(spread: dict[str, Any], form: str, unit: float = 1) -> str:
    median, *ends = (_number(spread[name], form, unit) for name in ("median", "least", "largest"))
    return median if len(spread["by_seed"]) == 1 else f"{median} ({'–'.join(ends)})"


def _time(times: dict[str, Any], watched: int) -> str:
    if times["median"] is None:
        return f"not by {watched}"
    if len(times["by_seed"]) == 1:
        return str(times["median"])
    largest = f">{watched}" if times["largest"] is None else times["largest"]
    return f"{times['median']} ({times['least']}–{largest})"


def _number(value: float | None, form: str, unit: float = 1) -> str:
    if value is None or not math.isfinite(value):
        return NOTHING
    text = form.format(unit * value).removesuffix(".")
    return text if float(text) else form.format(0.0)  # no minus before a zero


def _markdown(grid: Grid) -> str:
    alignment = ["---", *["---:"] * (len(grid.header) - 1)]
    header = [name.replace("\n", " ") for name in grid.header]
    lines = [header, alignment, *grid.rows]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f"**{grid.title}**\n\n{table}"


def _caption(path: str) -> str:
    return path.rsplit("/", 1)[-1].rsplit(".", 1)[0].replace("_", " ")
