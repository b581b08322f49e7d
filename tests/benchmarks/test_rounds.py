"""Contenders in processes of their own: pinned to their share, all at work at once, heard of."""

import os

import pytest

from benchmarks.rounds import Contender, measure, ratios, share_of_cores, spread

needs_cores = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="needs two cores that can be chosen",
)


def cores_as_units():
    """A contender whose units say which cores it has, a bit each."""
    mask = sum(1 << core for core in os.sched_getaffinity(0))
    return lambda seconds: (mask, 1.0)


def dies():
    """A contender that can't be prepared."""
    os._exit(3)


@needs_cores
def test_processes_of_a_contender_share_the_cores_out():
    cores = os.sched_getaffinity(0)
    everything = sum(1 << core for core in cores)
    contenders = {str(n): Contender(cores_as_units, (), n) for n in (1, 2)}
    assert measure(contenders, 1, 0.0) == {"1": [everything], "2": [everything]}
    with share_of_cores(0, 2):
        assert len(os.sched_getaffinity(0)) == (len(cores) + 1) // 2
    assert os.sched_getaffinity(0) == cores


def test_a_contender_that_dies_ends_the_measurement():
    with pytest.raises(SystemExit, match="a contender died"):
        measure({"dead": Contender(dies, ())}, 1)


def test_ratios_are_formed_within_a_round():
    rates = {"a": [2.0, 6.0, 8.0], "b": [1.0, 2.0, 8.0]}
    assert ratios(rates, "a", "b") == [2.0, 3.0, 1.0]
    assert spread(ratios(rates, "a", "b")) == "2.00 (1.00–3.00)"
