"""A summary for people: tables on the terminal, and a page of markdown with the figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from experiments.analysis.compare import QUANTITIES, bound
from experiments.analysis.read import MEASURES, ArmRun, read_arms
from experiments.analysis.summary import summarize_run
from experiments.analysis.tables import (
    NOTHING,
    Form,
    Table,
    interval,
    number,
    on_terminal,
    p_value,
    page,
    percent,
)
from experiments.runs.folder import write_json, write_text

Summary = dict[str, Any]  # from `summary.summarize`
Say = Callable[[str], None]
Draw = Callable[[Sequence[ArmRun], Path, Say], list[Path]]

# Measures that the table of attention and gradients shows, of those that summary.json has.
SHOWN: dict[str, tuple[str, Form]] = {
    "normalized_entropy": ("entropy\n/ ln n", number),
    "saturation": ("saturated\n%", percent),
    "dead_row_fraction": ("dead\nrows %", percent),
    "logit_std": ("logit\nstd", number),
    "grad_norm": ("gradient\nnorm", number),
    "grad_norm_logits": ("∂loss/\n∂logits", number),
}


def write_results(
    folder: Path,
    *,
    draw: Draw | None = None,
    say: Say = lambda line: None,
    accept_edits: bool = False,
) -> Summary:
    """Write summary.json, figures/ and report.md from the rows of a run folder.

    Each file is replaced in one piece, so this may be repeated, and mends what is missing.

    Args:
      folder: of a run that has ended, early or not.
      draw: what draws the figures, such as `figures.draw.draw_figures`; None for no figures.
      say: called with a line for each figure that can't be drawn.
      accept_edits: make it from what was changed since it was written, too, and say so.

    Returns:
      The summary.

    Raises:
      RunFolderError: no run, or one that is damaged or was changed.
      OSError: the disk is full, read-only or gone.
    """
    arms = read_arms([folder], accept_edits=accept_edits)
    summary = summarize_run(arms)
    write_json(folder / "summary.json", summary)
    drawn = draw(arms, folder / "figures", say) if draw else []
    text = report(summary, [path.relative_to(folder).as_posix() for path in drawn])
    write_text(folder / "report.md", text)
    return summary


def terminal_tables(summary: Summary) -> RenderableType:
    """The tables of a summary for a rich console, with a line for everything worth a warning."""
    return on_terminal(*tables(summary))


def report(summary: Summary, figures: Sequence[str] = ()) -> str:
    """The page report.md of a run folder.

    Args:
      summary: from `summary.summarize`.
      figures: paths to embed, relative to the run folder.
    """
    seeds = len(summary["seeds"])
    about = f"{summary['steps']} steps, {seeds} seed{'s' * (seeds > 1)}. "
    if summary["steps_done"] < summary["steps"]:
        about += f"The run stopped after {summary['steps_done']} steps. "
    about += (
        f"Without attention that selects, the best possible accuracy is "
        f"{percent(summary['chance_accuracy'])}% and the best loss "
        f"{number(summary['chance_loss'])} nats."
    )
    changed = f"**The run was {summary['changed']}.**" if summary["changed"] else ""
    return page(
        f"{summary['task']}: {', '.join(arm['label'] for arm in summary['arms'])}",
        opening=[about, changed],
        tables=tables(summary),
        figures={path: Path(path).stem.replace("_", " ") for path in figures},
        command=summary["command"],
        environment=summary["environment"],
    )


def tables(summary: Summary) -> list[Table]:
    """The tables of a summary: held-out results, attention and gradients, paired differences."""
    found = [_held_out(summary), _attention(summary)]
    if summary["comparisons"]:
        found.append(_differences(summary))
    return [*found[:-1], found[-1]._replace(notes=notes(summary))]


def notes(summary: Summary) -> list[str]:
    """What a reader of the tables must know: lanes that diverged, never arrived, or are few."""
    found = [note for arm in summary["arms"] for note in _notes_on(arm, summary["threshold"])]
    comparisons = summary["comparisons"]
    for pairs in {c["seeds"] for c in comparisons}:
        if 2 / 2**pairs > 0.01:
            found.append(f"With {pairs} pairs no p can be below {2 / 2**pairs:.3g}.")
    if any(any(_short(c["steps_to_threshold"])) for c in comparisons):
        found.append("A seed still short counts as the last step: ≥ and ≤ mark bounds, ~ neither.")
    if len(comparisons) > 1:
        found.append(f"p is corrected for {len(comparisons)} comparisons (Holm).")
    return found


def _notes_on(arm: dict[str, Any], threshold: float) -> list[str]:
    found = []
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
            f"{threshold:.0%} at step {arm['held_out']['step']}: slower than the run is long, "
            "which is not never (more --steps tell)."
        )
    if arm["held_out"] is None:
        found.append(f"{arm['label']}: no evaluation of every seed yet.")
    return found


def _held_out(summary: Summary) -> Table:
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
                _spread(held_out["accuracy"], percent),
                _spread(held_out["loss"], number),
                _time(times, held_out["step"]),
                f"{times['not_reached']} of {arm['seeds']}",
            )
        )
    to = QUANTITIES["steps_to_threshold"].name
    header = ("arm", "step", "accuracy %", "loss", to, "still\nshort")
    return Table("Held-out: median over seeds (range)", header, rows)


def _attention(summary: Summary) -> Table:
    own = dict.fromkeys(
        name for arm in summary["arms"] for name in arm["start"] if name not in MEASURES
    )
    shown = SHOWN | {name: (name.replace("_", "\n", 1).replace("_", " "), number) for name in own}
    rows = []
    for arm in summary["arms"]:
        steps = arm["end_steps"]
        between = NOTHING if steps is None else "–".join(map(str, dict.fromkeys(steps)))
        for name, when in (("start", "0"), ("end", between)):
            values = [form(arm[name].get(measure)) for measure, (_, form) in shown.items()]
            rows.append((arm["label"] if name == "start" else "", when, *values))
    header = ("arm", "steps", *(title for title, _ in shown.values()))
    return Table("Attention and gradients: median over seeds and steps", header, rows)


def _differences(summary: Summary) -> Table:
    rows = []
    for found in summary["comparisons"]:
        title = f"{found['arm']} − {found['against']}"
        for name, quantity in QUANTITIES.items():
            rows.append((title, quantity.name, *_difference(found[name], quantity.form)))
            title = ""
    return Table(
        "Held-out, paired by seed: mean difference, BCa interval, sign-flip test",
        ("arm − partner", "", "difference", "95% interval", "p"),
        rows,
    )


def _difference(test: dict[str, Any] | None, form: Form) -> list[str]:
    if test is None:
        return [NOTHING] * 3
    return [
        bound(_short(test)) + form(test["mean_difference"], "+"),
        interval(test["low"], test["high"], lambda value: form(value, "+")),
        p_value(test["p_value_holm"], exact=test["exact"]),
    ]


def _short(test: dict[str, Any] | None) -> tuple[int, int]:
    """How many seeds of the arm and of its partner never reached the threshold."""
    arm, partner = (test or {}).get("not_reached", (0, 0))
    return arm, partner


def _spread(spread: dict[str, Any], form: Form) -> str:
    median, least, largest = (form(spread[name]) for name in ("median", "least", "largest"))
    return median + f" ({least}–{largest})" * (len(spread["by_seed"]) > 1)


def _time(times: dict[str, Any], watched: int) -> str:
    if times["median"] is None:
        return f"not by {watched}"
    if len(times["by_seed"]) == 1:
        return str(times["median"])
    largest = f">{watched}" if times["largest"] is None else times["largest"]
    return f"{times['median']} ({times['least']}–{largest})"
