"""`python -m experiments evaluate RUN`: the table, and what is refused."""

import pytest

from experiments.__main__ import main as experiments
from experiments.commands import startup


@pytest.fixture(autouse=True)
def no_cache(monkeypatch):
    monkeypatch.setattr(startup, "use_compilation_cache", lambda *_: None)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--sequence_length=9", "sequence_length: 9, must be at most 8: the run learned an "),
        ("--sequence_length=1", "sequence_length: 1, must be a whole number from 2 up"),
        ("--sequence_length=x", "sequence_length: 'x', must be a whole number"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_in_one_line(tiny_run, flag, message, capsys):
    assert experiments(["experiments", "evaluate", str(tiny_run), flag]) == 2
    error = capsys.readouterr().err
    assert error.startswith("evaluate: ")
    assert message in error
    assert error.count("\n") == 1


def test_the_command_prints_a_row_for_each_arm(tiny_run, capsys):
    assert experiments(["experiments", "evaluate", str(tiny_run), "--sequence_length=4"]) == 0
    text = capsys.readouterr().out
    assert "8 held-out sequences of 4 tokens, trained on 8" in text
    rows = {line.split("  ")[0]: line.split() for line in text.splitlines()}
    assert rows["none ×1"][2:4] == rows["sqrt ×1/√d_k"][2:4] == ["2", "0"]
    assert len(rows["chance"]) == 3
