"""`python -m experiments compare RUN_A RUN_B`: two runs that differ in the scale only, by seed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from experiments.commands.flags import disk_error, fail, help_text, parse, terminal_width

if TYPE_CHECKING:
    import numpy as np
    from rich.console import RenderableType

    from experiments.analysis.comparison import PairedComparison
    from experiments.analysis.read import Arm

COMMAND = "python -m experiments compare"
USAGE = "RUN_A RUN_B"
ABOUT = "two runs that differ in nothing but the scale, paired by seed"

# Settings that two runs of a pair may differ in: the question, and how closely each was watched.
FREE = ("scale", "steps", "log_every", "eval_every", "checkpoint_every")


class Compared(NamedTuple):
    """One quantity of two arms, by seed."""

    name: str
    a: np.ndarray  # [seeds]; a seed that never reached the threshold has the last step
    b: np.ndarray  # [seeds]
    short: tuple[int, int]  # seeds of a and of b that never reached it
    test: PairedComparison | None  # of a - b; None where there is nothing to test


class Pair(NamedTuple):
    """Two arms on the evaluations that both have."""

    a: Arm
    b: Arm
    step: int  # of the last evaluation
    compared: tuple[Compared, ...]


def compare_command(argv: Sequence[str]) -> int:
    """Run the command line, argv[0] being "compare"; returns the exit status."""
    folders = [Path(word) for word in argv[1:] if not word.startswith("-")]
    try:
        parsed = parse([argv[0], *(word for word in argv[1:] if word.startswith("-"))])
        if parsed is None:
            about = (
                f"Compares {ABOUT}: held-out loss and\n"
                "accuracy at the last evaluation that both have, loss area, steps to 90 %. A RUN "
                "is a folder that\ntrain.py wrote."
            )
            print(help_text(f"{COMMAND} {USAGE}", about, {}))
            return 0
        if len(folders) != 2:
            raise ValueError(f"give two run folders: {COMMAND} {USAGE}")
    except ValueError as error:
        fail(COMMAND, error)
    from rich.console import Console

    from experiments.runs.recording import RunFolderError

    try:
        pairs = compare_runs(
            *folders, say=lambda line: print(f"{COMMAND}: {line}", file=sys.stderr)
        )
    except (ValueError, RunFolderError) as error:
        fail(COMMAND, error)
    except OSError as error:
        fail(COMMAND, disk_error(error), status=1)
    console = Console(highlight=False, markup=False, width=terminal_width())
    for pair in pairs:
        console.print(tables(pair))
    return 0


def compare_runs(
    folder_a: Path, folder_b: Path, *, say: Callable[[str], None] = lambda line: None
) -> list[Pair]:
    """Every arm of run A against every arm of run B that has another scale and the same rate.

    A lane that diverged stays: from there on it counts as untrained, with its own loss and accuracy
    of step 0. A lane that never reached the threshold counts as the last step, and is named.

    Args:
      folder_a, folder_b: of runs made by any commands.
      say: called with one line for each difference that may change the last bits only.

    Raises:
      ValueError: the runs are no pair; the message names the settings that differ.
      RunFolderError: a folder that is no run, or a damaged one.
    """
    from experiments.analysis.read import read_arms
    from experiments.analysis.summary import diverged_as_untrained

    arms = read_arms([folder_a, folder_b])
    first, second = ([arm for arm in arms if arm.folder == f] for f in (folder_a, folder_b))
    _check_pair(first[0], second[0], say)
    pairs = [
        (a, b)
        for a in first
        for b in second
        if a.learning_rate == b.learning_rate and a.rule.multiplier != b.rule.multiplier
    ]
    if not pairs:
        raise ValueError(f"scale: the same in {folder_a} and {folder_b}, so there is no difference")
    return [_compare(*map(diverged_as_untrained, pair)) for pair in pairs]


def _check_pair(a: Arm, b: Arm, say: Callable[[str], None]) -> None:
    from experiments.runs import recording

    ours, theirs = a.config.to_json(), b.config.to_json()
    differing = [name for name in ours if name not in FREE and ours[name] != theirs[name]]
    if differing:
        listed = "; ".join(f"{name}: {ours[name]} and {theirs[name]}" for name in differing)
        raise ValueError(f"{a.folder} and {b.folder} differ in more than the scale: {listed}")
    ours, theirs = (recording.read_json(x.folder / recording.ENVIRONMENT) for x in (a, b))
    for seed in map(str, a.seeds):
        found = [_digests(x.folder, here, seed) for x, here in ((a, ours), (b, theirs))]
        for what in ("weights", "data"):
            if found[0].get(what) != found[1].get(what):
                raise ValueError(
                    f"{a.folder} and {b.folder} are no pair: seed {seed} has other {what} "
                    "at the start, although the settings are the same"
                )
    for name in recording.BIT_SETTINGS:
        if ours.get(name) != theirs.get(name):
            say(f"warning: {name} is {ours.get(name)} and {theirs.get(name)}: last bits may differ")


def _digests(folder: Path, environment: dict[str, Any], seed: str) -> dict[str, str]:
    from experiments.runs.recording import ENVIRONMENT, RunFolderError

    try:
        return {str(name): str(value) for name, value in environment["digests"][seed].items()}
    except (KeyError, TypeError, AttributeError):
        raise RunFolderError(
            f"{folder / ENVIRONMENT} has no digests of seed {seed}: nothing shows that it began "
            "with the same weights and data"
        ) from None


def _compare(a: Arm, b: Arm) -> Pair:
    import numpy as np

    from experiments.analysis import comparison
    from experiments.analysis.summary import THRESHOLD, only, reached_threshold

    steps = np.intersect1d(a.evaluation_steps, b.evaluation_steps)
    if not len(steps):
        raise ValueError(f"{a.folder} and {b.folder} have no evaluation of every seed in common")
    a, b = (only(arm, a.seeds, steps) for arm in (a, b))
    last = int(steps[-1])
    for arm in (a, b):
        if not np.all(np.isfinite(arm.loss[:, 0])):
            raise ValueError(f"{arm.folder}: {arm.label} has no finite loss even at step 0")

    def compared(name: str, x: np.ndarray, y: np.ndarray, better: Any) -> Compared:
        return Compared(name, x, y, (0, 0), comparison.paired_comparison(x, y, better=better))

    found = [
        compared("accuracy %", 100 * a.accuracy[:, -1], 100 * b.accuracy[:, -1], "higher"),
        compared("loss", a.loss[:, -1], b.loss[:, -1], "lower"),
    ]
    if last > 0:
        area = [comparison.clipped_loss_area(steps, arm.loss, arm.loss[:, 0]) for arm in (a, b)]
        found.append(compared("loss area", area[0], area[1], "lower"))
        x, y = reached_threshold(a), reached_threshold(b)
        short = (int(np.sum(~x.reached)), int(np.sum(~y.reached)))
        test = None
        if min(short) < len(a.seeds):
            test = comparison.paired_times(x, y, horizon=float(last))
        found.append(Compared(f"steps to {THRESHOLD:.0%}", x.time, y.time, short, test))
    return Pair(a, b, last, tuple(found))


def tables(pair: Pair) -> RenderableType:
    """A row for each quantity: both arms, their difference, and what speaks for it."""
    from rich import box
    from rich.console import Group
    from rich.table import Table

    title = (
        f"{pair.a.label} − {pair.b.label}: {pair.a.config.task}, {len(pair.a.seeds)} "
        f"seed{'s' * (len(pair.a.seeds) > 1)}, held-out, to step {pair.step}"
    )
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("mean (range)")
    for column in (pair.a.label, pair.b.label, "difference", "95% interval", "p", "Wilcoxon\np"):
        table.add_column(column, justify="right", vertical="bottom")
    table.add_column("P(better)", justify="right", vertical="bottom")
    for found in pair.compared:
        form = {"accuracy %": ".1f", "loss": ".3f", "loss area": ".3f"}.get(found.name, ".0f")
        table.add_row(
            found.name,
            *(
                _values(values, short, pair.step, form)
                for values, short in zip((found.a, found.b), found.short, strict=True)
            ),
            *_verdict(found, form),
        )
    return Group(title, "", table, "", *notes(pair))


def notes(pair: Pair) -> list[str]:
    """What a reader of the table must know."""
    found = []
    for arm in (pair.a, pair.b):
        diverged = [
            f"seed {seed} by step {step}"
            for seed, step in zip(arm.seeds, arm.diverged_at(), strict=True)
            if step >= 0
        ]
        if diverged:
            found.append(
                f"{arm.label}: {len(diverged)} of {len(arm.seeds)} diverged "
                f"({', '.join(diverged)}); from there on they count as untrained."
            )
    if any(sum(compared.short) for compared in pair.compared):
        found.append(
            f"A seed short of the threshold counts as step {pair.step}: ≥ and ≤ mark bounds, "
            "~ neither."
        )
    for arm in (pair.a, pair.b):
        if arm.config.steps != pair.step:
            found.append(
                f"{arm.label}: {arm.config.steps} steps were asked for; the comparison ends at "
                f"step {pair.step}, the last evaluation that both runs have."
            )
    pairs = len(pair.a.seeds)
    least = 2 / 2**pairs
    if pairs == 1:
        found.append("One seed shows no more than itself: there is no interval and no test.")
    elif least > 0.01:
        verdict = ", so none can be below 0.05" if least > 0.05 else ""
        found.append(f"With {pairs} pairs the smallest possible p is {least:.3g}{verdict}.")
    found.append(
        "Difference and P(better) are of the first arm; BCa interval; p of the sign-flip test, "
        "not corrected for the number of rows. Loss area: mean over the steps of the smaller of "
        "the held-out loss and its value at step 0."
    )
    return found


def _values(values: np.ndarray, short: int, last: int, form: str) -> str:
    if short == len(values):
        return f"not by {last}"
    least, largest = f"{values.min():{form}}", f"{values.max():{form}}"
    mark, largest = ("≥ ", f">{last}") if short else ("", largest)
    return f"{mark}{values.mean():{form}}" + f" ({least}–{largest})" * (len(values) > 1)


def _verdict(found: Compared, form: str) -> list[str]:
    test = found.test
    if test is None:
        return ["–"] * 5
    mark = "~" if all(found.short) else "≥ " if found.short[0] else "≤ " if found.short[1] else ""
    difference = f"{mark}{_signed(test.mean_difference, form)}"
    if test.pairs == 1:
        return [difference, "–", "–", "–", f"{test.probability_better:.2f}"]
    return [
        difference,
        f"[{_signed(test.low, form)}, {_signed(test.high, form)}]",
        f"{test.p_value:.3g}{'' if test.exact else ' (drawn)'}",
        f"{test.wilcoxon_p_value:.3g}",
        f"{test.probability_better:.2f}",
    ]


def _signed(value: float, form: str) -> str:
    text = f"{value:+{form}}"
    return text if float(text) else text.replace("-", "+")
