"""The one list of the columns of metrics.jsonl, and the page made of it."""

from pathlib import Path

import numpy as np

from experiments.metrics import HEAD_STATISTICS, columns, columns_table, reduce_heads
from experiments.runs.rows import read_rows


def test_a_rows_columns_are_the_list(tiny_run):
    [row, *_] = read_rows(tiny_run / "metrics.jsonl")
    own = columns()[-1]
    assert own.name == "parameter_NAME_by_head"
    assert row.keys() == {column.name for column in columns()} - {own.name}
    axes = {column.name: column.axes for column in columns()}
    for name, value in row.items():
        assert np.shape(value) == ((1, 2) if axes[name] == "[L][H]" else ()), name


def test_every_column_says_its_unit_and_one_sentence():
    for column in columns():
        assert column.unit and column.about and "\n" not in column.about


def test_the_page_of_columns_is_that_of_this_list():
    page = Path(__file__).parents[2] / "docs" / "columns.md"
    assert page.read_text(encoding="utf-8") == columns_table()


def test_heads_are_reduced_as_the_list_says():
    values = np.arange(12.0).reshape(2, 2, 3)
    for name, how in HEAD_STATISTICS.items():
        expected = [5, 11] if how.largest else [2.5, 8.5]
        np.testing.assert_array_equal(reduce_heads(name, values), expected)
    assert [name for name, how in HEAD_STATISTICS.items() if how.largest] == ["logit_max"]
