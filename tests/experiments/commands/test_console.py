"""The one way out for text: users' words as they are, and streams that refuse them."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Group
from rich.table import Table

from experiments.commands import console

ROOT = Path(__file__).parents[3]
NASTY = ["sweep:100:b", "x[red]y[/]", "tab\there", "[link=x]", "%s {0}", "\\[b]", "a" * 300]


@pytest.mark.parametrize("text", NASTY)
def test_words_are_shown_as_they_are(text, capsys):
    console.say(text)
    assert console.fail("name", ValueError(text)) == 2
    console.page(text)
    captured = capsys.readouterr()
    assert captured.err == f"{text}\nname: {text}\n"
    assert captured.out == f"{text}\n"


def test_a_failure_is_one_line_whatever_it_names(capsys):
    assert console.fail("name", "a\nb\r\nc", status=1) == 1
    assert capsys.readouterr().err == "name: a b c\n"


def table_of(columns):
    table = Table(title=":100: [red]")
    for i in range(columns):
        table.add_column(f"column {i}")
    table.add_row(*(f"{i}2345.6789" for i in range(columns)))
    return table


def test_a_table_is_never_cut(capsys):
    console.show(Group("first", table_of(40)))
    out = capsys.readouterr().out
    assert out.startswith("first\n")
    assert ":100: [red]" in out
    (row,) = (line for line in out.splitlines() if "2345" in line)
    assert all(f" {i}2345.6789 " in row for i in range(40))


def output_of(code, stdout, **environment):
    """Standard error of a process that writes to `stdout`, and its status."""
    done = subprocess.run(
        [sys.executable, "-c", f"from experiments.commands import console\n{code}"],
        cwd=ROOT,
        stdout=stdout,
        stderr=subprocess.PIPE,
        env={**os.environ, **environment},
    )
    return done.returncode, done.stderr.decode()


def test_a_narrow_terminal_wraps_lines_and_cuts_nothing():
    ours, theirs = pty.openpty()
    code = (
        "from rich.table import Table\n"
        "table = Table(*map(str, range(12)))\n"
        "table.add_row(*(f'{i}2345.6789' for i in range(12)))\n"
        "console.show(table)"
    )
    assert output_of(code, theirs, COLUMNS="80", TERM="xterm") == (0, "")
    os.close(theirs)
    shown = os.read(ours, 10**5).decode()
    os.close(ours)
    assert "…" not in shown
    assert all(f" {i}2345.6789 " in shown for i in range(12))


@pytest.mark.parametrize("ends", ["", "; import warnings; warnings.warn('late')"])
def test_a_stream_that_refuses_is_done_without(ends):
    code = "console.settle(); console.page('x' * 10**6); console.show('y'); print('z')" + ends
    with Path("/dev/full").open("w") as full:
        status, error = output_of(code, full)
    assert status == 0
    assert "Error" not in error and "Exception" not in error
    reader, writer = os.pipe()
    os.close(reader)
    status, error = output_of(code, writer)
    os.close(writer)
    assert status == 0
    assert "Error" not in error and "Exception" not in error


def test_closed_streams_lend_their_numbers_to_no_file(tmp_path):
    code = (
        "import sys; from experiments.commands import console; console.settle();"
        "file = open(sys.argv[1], 'w'); file.write('rows'); file.flush();"
        "print('printed'); console.say('said'); console.show('shown');"
        "import os; os.write(2, b'logged'); os.write(1, b'logged')"
    )
    path = tmp_path / "rows"
    line = f'"{sys.executable}" -c "{code}" "{path}" <&- >&- 2>&-'
    assert subprocess.run(["bash", "-c", line], cwd=ROOT).returncode == 0
    assert path.read_text() == "rows"
