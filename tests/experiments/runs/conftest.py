"""What tests of run folders share."""

import os
import shutil
import signal

import pytest

from experiments.config import RecordOptions, resolve
from experiments.runs.folder import EVALUATION, METRICS


def _ignore(*_):
    pass


@pytest.fixture(scope="session")
def go():
    """Records a run, or goes on with one, without figures."""
    from experiments.runs.record import record

    def go(config, folder, *, watch=_ignore, say=_ignore, **options):
        options = RecordOptions(folder, figures=False, **options)
        return record(resolve(config), options, watch=watch, say=say)

    return go


@pytest.fixture(scope="session")
def rows():
    """The bytes of what a run measured."""

    def rows(folder):
        return {name: (folder / name).read_bytes() for name in (METRICS, EVALUATION)}

    return rows


@pytest.fixture(scope="session")
def stop_at():
    """Gives a watch that ends the run as SIGTERM would, once the chunk up to `step` is done."""

    def stop_at(step):
        def watch(result):
            if result.chunk.stop == step:
                os.kill(os.getpid(), signal.SIGTERM)

        return watch

    return stop_at


@pytest.fixture
def run_folder(tiny_run, tmp_path):
    """A copy of the finished tiny run, to be changed."""
    return shutil.copytree(tiny_run, tmp_path / "run")
