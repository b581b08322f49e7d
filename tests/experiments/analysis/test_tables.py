"""Tables, numbers and pages: the same everywhere, and what a user named as it is."""

import io

import numpy as np
import pytest
from rich.console import Console

from experiments.analysis import tables
from experiments.analysis.tables import Table


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.8317, "0.832"),
        (64.0, "64.0"),
        (1012.3, "1012"),
        (-25.34, "-25.3"),
        (0.99996, "1.00"),
        (3.2e-6, "3.2e-6"),
        (17420.0, "1.7e4"),
        (-0.0, "0"),
        (np.inf, "inf"),
        (np.nan, "–"),
        (None, "–"),
    ],
)
def test_numbers(value, text):
    assert tables.number(value) == text


def test_forms_of_quantities():
    assert [tables.percent(x) for x in (0.4871, 1, None, np.nan)] == ["48.7", "100.0", "–", "–"]
    assert [tables.percent(x, "+") for x in (0.4871, -0.0004, -0.01)] == ["+48.7", "+0.0", "-1.0"]
    assert [tables.nats(x) for x in (1.3799, -0.0001, np.inf)] == ["1.380", "0.000", "–"]
    assert [tables.whole(x, "+") for x in (188.2, -0.2)] == ["+188", "+0"]
    assert tables.p_value(0.0625) == "0.0625"
    assert tables.p_value(0.00012, exact=False) == "0.00012 (drawn)"
    assert tables.interval(-1.0, 2.0, tables.nats) == "[-1.000, 2.000]"
    assert tables.with_range([0.1, 0.9, 0.2], tables.percent) == "20.0 (10.0–90.0)"
    assert tables.with_range([0.1, 0.9, 0.2], tables.percent, np.mean) == "40.0 (10.0–90.0)"
    assert tables.with_range([0.1], tables.percent) == "10.0"


HOSTILE = ("[red]a[/]", ":fire:", "a|b", "<b>", "a\nb", "x" * 10)


def test_a_terminal_shows_names_as_they_are():
    table = Table("[bold]:fire:", ("[i]h", "n"), [(name, "1") for name in HOSTILE], ["[b]:x:"])
    text = io.StringIO()
    Console(file=text, width=60).print(tables.on_terminal(table))
    for name in ("[bold]:fire:", "[i]h", "[red]a[/]", ":fire:", "a|b", "<b>", "[b]:x:"):
        assert name in text.getvalue()


def test_markdown_keeps_names_in_their_cells():
    table = Table("T\nT", ("h|h", "n\nn"), [(name, "1") for name in HOSTILE], ["a\nnote"])
    lines = tables.markdown(table).splitlines()
    assert lines[:5] == ["**T T**", "", r"| h\|h | n n |", "| --- | ---: |", "| [red]a[/] | 1 |"]
    assert r"| a\|b | 1 |" in lines and r"| \<b> | 1 |" in lines and "| a b | 1 |" in lines
    assert lines[-1] == "- a note"


def test_a_page_begins_with_what_was_found_and_ends_with_how():
    page = tables.page(
        "Title",
        opening=["Found.", ""],
        tables=[Table("T", ("a",), [("1",)])],
        figures={"figures/x.png": "What it shows."},
        closing=["Note."],
        command="python x",
        environment={"versions": {"jax": "1"}, "platform": "cpu", "git_revision": None, "x": 1},
    )
    assert page == (
        "# Title\n\nFound.\n\n**T**\n\n| a |\n| --- |\n| 1 |\n\n"
        "![What it shows.](figures/x.png)\n\nWhat it shows.\n\nNote.\n\n```sh\npython x\n```\n\n"
        "Made with jax 1, platform cpu.\n"
    )


@pytest.mark.parametrize("environment", [{}, {"versions": []}, {"versions": None}])
def test_an_environment_that_says_nothing(environment):
    assert tables.made_with(environment) == ""
