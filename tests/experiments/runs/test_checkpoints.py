"""Checkpoints are whole or don't count: damage, kills, full disks, wrong templates."""

import asyncio
import errno
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.runs import checkpoints
from experiments.runs.checkpoints import (
    CheckpointNotFound,
    CorruptCheckpoint,
    committed_steps,
    restore,
    restore_latest,
    save,
    verify,
)

ROOT = Path(__file__).parents[3]
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))


class State(NamedTuple):
    params: Any
    optimizer: Any
    frozen: Any
    best: Any


def initial() -> State:
    """Two lanes with a state of every dtype and container that training has."""
    params = {"dense/0": jnp.ones((2, 3)), "scale": jnp.full((2,), 0.5, jnp.bfloat16)}
    return State(params, OPTIMIZER.init(params), jnp.array([False, True]), (np.float32(3), None))


@jax.jit
def update(state: State) -> State:
    gradients = jax.tree.map(lambda p: p * p, state.params)
    updates, optimizer = OPTIMIZER.update(gradients, state.optimizer)
    return state._replace(params=optax.apply_updates(state.params, updates), optimizer=optimizer)


def after(updates: int) -> State:
    state = initial()
    for _ in range(updates):
        state = update(state)
    return state


def assert_same(actual: Any, expected: Any) -> None:
    """Bitwise, structure and dtypes included."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        e = np.asarray(e)
        assert (a.dtype, a.shape, a.tobytes()) == (e.dtype, e.shape, e.tobytes())


def no_warning(line: str) -> None:
    raise AssertionError(line)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Steps 10, 13 and 20; never written to after."""
    directory = tmp_path_factory.mktemp("saved") / "checkpoints"
    for step in (10, 13, 20):
        save(directory, step, after(step), keep=3, warn=no_warning)
    return directory


@pytest.fixture
def directory(saved, tmp_path) -> Path:
    return shutil.copytree(saved, tmp_path / "checkpoints")


def data_file(step: Path) -> Path:
    return max((step / "arrays").rglob("*"), key=lambda p: p.stat().st_size if p.is_file() else -1)


def flip(file: Path, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


def test_restored_state_is_bitwise_the_saved_one(directory):
    step, state = restore_latest(directory, initial(), warn=no_warning)
    assert step == 20
    assert_same(state, after(20))
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(state))


def test_adam_goes_on_counting_from_the_final_checkpoint(directory):
    shutil.rmtree(directory / "20")
    abstract = jax.eval_shape(initial)
    step, state = restore_latest(directory, abstract, warn=no_warning)
    assert step == 13
    assert state.optimizer[1][0].count == 13
    assert_same(update(jax.tree.map(jnp.asarray, state)), after(14))


def test_bits_that_compare_equal_or_to_nothing_survive(tmp_path):
    bits = np.array([0x7FC00001, 0xFFC00000, 0x80000000, 0, 0x7F800000, 1], np.uint32)
    state = {
        "float": bits.view(np.float32),
        "negative_zero": -np.zeros((2, 2), np.float32),
        "transposed": np.arange(6, dtype=np.int32).reshape(2, 3).T,
        **{path: np.array([len(path)]) for path in ("a/b", "../c", "d.e", "", "é\n")},
    }
    assert_same(restore(save(tmp_path, 0, state, warn=no_warning), state), state)


def empty_folder(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def plain_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("")


def other_step(path: Path) -> None:
    shutil.rmtree(path)
    shutil.copytree(path.with_name("10"), path)


DAMAGES = {
    "empty folder": (empty_folder, "manifest.json: No such file"),
    "plain file": (plain_file, "manifest.json: Not a directory"),
    "other step": (other_step, "holds step 10"),
    "no manifest": (lambda p: (p / "manifest.json").unlink(), "manifest.json: No such file"),
    "empty manifest": (lambda p: (p / "manifest.json").write_text(""), "manifest.json is not"),
    "no JSON": (lambda p: (p / "manifest.json").write_text("{"), "manifest.json is not"),
    "no object": (lambda p: (p / "manifest.json").write_text("[1]"), "manifest.json is not"),
    "not UTF-8": (lambda p: (p / "manifest.json").write_bytes(b"\xff"), "manifest.json is not"),
    "cut manifest": (lambda p: os.truncate(p / "manifest.json", 99), "manifest.json is not"),
    "no data file": (lambda p: data_file(p).unlink(), "No such file"),
    "no arrays": (lambda p: shutil.rmtree(p / "arrays"), "No such file"),
    "empty file": (lambda p: os.truncate(data_file(p), 0), "(0 bytes) is not"),
    "cut file": (lambda p: os.truncate(data_file(p), 99), "(99 bytes) is not"),
    "longer file": (lambda p: os.truncate(data_file(p), 99_999), "(99999 bytes) is not"),
    "flipped bit": (lambda p: flip(data_file(p), 801), "is not"),
}


@pytest.mark.parametrize(("damage", "reason"), DAMAGES.values(), ids=DAMAGES)
def test_a_bad_newest_step_is_renamed_with_one_line_and_the_one_before_is_used(
    directory, damage, reason
):
    damage(directory / "20")
    lines = []
    step, state = restore_latest(directory, initial(), warn=lines.append)
    assert step == 13
    assert_same(state, after(13))
    (line,) = lines
    assert line.startswith("bad checkpoint, renamed to 20.bad: ")
    assert reason in line
    assert "\n" not in line
    assert sorted(entry.name for entry in directory.iterdir()) == ["10", "13", "20.bad"]


def test_every_flipped_bit_is_seen(directory):
    step = directory / "20"
    generator = np.random.default_rng(0)
    files = sorted(entry for entry in step.rglob("*") if entry.is_file())
    assert len(files) >= 5
    for file in files:
        size = 8 * file.stat().st_size
        count = 300 if file.name == "manifest.json" else 20
        for bit in {0, size - 1, *generator.integers(size, size=count).tolist()}:
            flip(file, bit)
            with pytest.raises(CorruptCheckpoint, match=str(file.relative_to(step))):
                verify(step)
            flip(file, bit)
    verify(step)


def test_a_folder_is_committed_by_its_manifest(directory, tmp_path):
    (directory / "20" / "manifest.json").unlink()
    for name in ("30", "030", "-1", "notes", "²"):
        (directory / name).mkdir()
    assert committed_steps(directory) == [10, 13]
    assert committed_steps(tmp_path / "nowhere") == []


def test_none_good_is_said_every_time(directory):
    for step in ("10", "13", "20"):
        flip(data_file(directory / step), 801)
    lines = []
    for _ in range(2):
        with pytest.raises(CorruptCheckpoint, match=r"none of its .* \(10.bad, 13.bad, 20.bad\)"):
            restore_latest(directory, initial(), warn=lines.append)
    assert len(lines) == 3


def test_none_at_all_is_not_found(tmp_path):
    for directory in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(CheckpointNotFound, match="there is no checkpoint"):
            restore_latest(directory, initial(), warn=no_warning)


def test_saving_renames_a_bad_step_in_its_place(directory):
    lines = []
    for name in ("20.bad", "20.bad1"):
        empty_folder(directory / "20")
        save(directory, 20, after(20), warn=lines.append)
        assert (directory / name).is_dir()
    assert [line.split(":")[0] for line in lines] == [
        "bad checkpoint, renamed to 20.bad",
        "bad checkpoint, renamed to 20.bad1",
    ]
    assert_same(restore_latest(directory, initial(), warn=no_warning).state, after(20))


def test_a_good_step_is_not_saved_over(directory):
    with pytest.raises(ValueError, match="must not be committed yet, got step=20"):
        save(directory, 20, after(10), warn=no_warning)
    assert_same(restore(directory / "20", initial()), after(20))


def mismatch(**changes) -> State:
    return initial()._replace(**changes)


PARAMS = initial().params
MISMATCHES = {
    "dtype": (
        mismatch(frozen=np.zeros(2, np.int8)),
        r"leaf .frozen is int8\[2\], but bool\[2\] in ",
    ),
    "shape": (
        mismatch(params={**PARAMS, "dense/0": np.ones((3, 2), np.float32)}),
        r"leaf .params\['dense/0'\] is float32\[3, 2\], but float32\[2, 3\] in ",
    ),
    "unknown leaf": (
        mismatch(params={**PARAMS, "bias": np.ones(2)}),
        r"template leaf .params\['bias'\] is not in ",
    ),
    "missing leaf": (
        mismatch(params={"scale": PARAMS["scale"]}),
        r"template has no leaf .params\['dense/0'\]",
    ),
    "dict for a tuple": (initial()._asdict(), r"template leaf \['best'\]\[0\] is not in "),
    "other optimizer": (
        mismatch(optimizer=optax.sgd(0.1, momentum=0.9).init(PARAMS)),
        r"template leaf .optimizer\[0\].trace\['dense/0'\] is not in ",
    ),
}


@pytest.mark.parametrize(("template", "message"), MISMATCHES.values(), ids=MISMATCHES)
def test_a_template_that_does_not_fit_is_named_and_nothing_is_renamed(saved, template, message):
    with pytest.raises(ValueError, match=message):
        restore_latest(saved, template, warn=no_warning)
    assert committed_steps(saved) == [10, 13, 20]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, r"state must hold at least one array, got {}"),
        ({"a": [1.0]}, r"state leaf \['a'\]\[0\] .* got float"),
        ({"a": np.zeros((0, 3))}, r"state leaf \['a'\] .* got float64\[0, 3\]"),
        ({"a": np.array(["x"])}, r"state leaf \['a'\] .* got <U1\[1\]"),
        ({"a": np.array([None])}, r"state leaf \['a'\] .* got object\[1\]"),
        ({"key": jax.random.key(0)}, r"state leaf \['key'\] .* got key<fry>\[\]"),
    ],
)
def test_a_state_that_cannot_be_stored_is_refused(tmp_path, state, message):
    with pytest.raises(ValueError, match=message):
        save(tmp_path, 1, state, warn=no_warning)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("step", "keep"), [(-1, 2), (1, 0)])
def test_numbers_out_of_range_are_refused(tmp_path, step, keep):
    with pytest.raises(ValueError, match=f"got step={step} and keep={keep}"):
        save(tmp_path, step, after(0), keep=keep, warn=no_warning)


@pytest.mark.parametrize(
    ("keep", "left"), [(1, [14, 20]), (2, [13, 14, 20]), (9, [10, 13, 14, 20])]
)
def test_older_steps_beyond_the_last_ones_are_deleted_and_newer_never(directory, keep, left):
    save(directory, 14, after(14), keep=keep, warn=no_warning)
    assert sorted(int(entry.name) for entry in directory.iterdir()) == left


@pytest.mark.parametrize("action", ["save", "restore"])
def test_what_a_killed_save_left_is_deleted(directory, action):
    shutil.copytree(directory / "20", directory / "30.tmp")
    (directory / "notes.tmp").mkdir()
    if action == "save":
        save(directory, 30, after(3), keep=9, warn=no_warning)
        assert_same(restore(directory / "30", initial()), after(3))
    else:
        assert restore_latest(directory, initial(), warn=no_warning).step == 20
    assert [entry.name for entry in directory.glob("*.tmp")] == ["notes.tmp"]


def test_threads_and_running_event_loops_are_fine_and_nothing_is_printed(tmp_path, capfd):
    def cycle(step: int) -> None:
        save(tmp_path, step, after(1), warn=no_warning)
        results.append(restore_latest(tmp_path, initial(), warn=no_warning).step)

    async def in_a_loop() -> None:
        cycle(2)

    results: list[int] = []
    thread = threading.Thread(target=cycle, args=(1,))
    thread.start()
    thread.join()
    asyncio.run(in_a_loop())
    assert results == [1, 2]
    assert capfd.readouterr() == ("", "")


def fails(code: int):
    def function(*_args, **_kwargs):
        raise OSError(code, os.strerror(code), "some file")

    return function


FAILURES = {
    "full from the start": (checkpoints, "_require_room", errno.ENOSPC),
    "full at the manifest": (Path, "write_bytes", errno.ENOSPC),
    "full at the flush": (os, "fsync", errno.EDQUOT),
    "gone at the rename": (Path, "rename", errno.ENOENT),
    "read-only": (Path, "mkdir", errno.EROFS),
}


@pytest.mark.parametrize(("owner", "name", "code"), FAILURES.values(), ids=FAILURES)
def test_a_failing_disk_is_an_oserror_and_touches_nothing(
    directory, monkeypatch, owner, name, code
):
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fails(code))
        with pytest.raises(OSError, match=os.strerror(code)) as caught:
            save(directory, 30, after(3), warn=no_warning)
    assert caught.value.errno == code
    assert sorted(entry.name for entry in directory.iterdir()) == ["10", "13", "20"]
    assert restore_latest(directory, initial(), warn=no_warning).step == 20


@pytest.mark.parametrize("found_by", ["us", "Orbax"])
def test_a_file_too_large_for_the_system_is_one_quiet_line(
    directory, monkeypatch, capfd, caplog, found_by
):
    if found_by == "Orbax":
        monkeypatch.setattr(checkpoints, "_require_room", lambda folder, size: None)
    random = np.random.default_rng(0).integers(256, size=2**20, dtype=np.uint8)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**19, limits[1]))
    try:
        with pytest.raises(OSError, match=r"File too large: '.*/30.tmp") as caught:
            save(directory, 30, {"one": random}, warn=no_warning)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno == errno.EFBIG
    assert "\n" not in str(caught.value)
    assert sorted(entry.name for entry in directory.iterdir()) == ["10", "13", "20"]
    assert capfd.readouterr() == ("", "")
    assert caplog.text == ""


def test_a_run_folder_that_was_deleted_does_not_come_back(tmp_path):
    with pytest.raises(FileNotFoundError):
        save(tmp_path / "deleted" / "checkpoints", 1, after(0), warn=no_warning)
    assert list(tmp_path.iterdir()) == []


def test_what_reads_back_wrong_is_not_committed(directory, monkeypatch):
    read = checkpoints._orbax_read

    def one_bit_off(folder, wanted):
        arrays = read(folder, wanted)
        arrays[".frozen"] = ~arrays[".frozen"]
        return arrays

    monkeypatch.setattr(checkpoints, "_orbax_read", one_bit_off)
    with pytest.raises(OSError, match=r"\.frozen reads back other than it was saved"):
        save(directory, 30, after(3), warn=no_warning)
    assert sorted(entry.name for entry in directory.iterdir()) == ["10", "13", "20"]


@pytest.mark.parametrize(("code", "damaged"), [(errno.EIO, True), (errno.EACCES, False)])
def test_only_damage_gets_a_step_renamed(directory, monkeypatch, code, damaged):
    monkeypatch.setattr(checkpoints, "_sha256", fails(code))
    with pytest.raises(CorruptCheckpoint if damaged else PermissionError):
        restore_latest(directory, initial(), warn=lambda line: None)
    assert committed_steps(directory) == ([] if damaged else [10, 13, 20])


def test_the_manifest_tells_structure_shapes_and_dtypes(saved):
    manifest = json.loads((saved / "20" / "manifest.json").read_text())
    assert manifest["step"] == 20
    assert manifest["leaves"][".params['dense/0']"] == {"dtype": "float32", "shape": [2, 3]}
    assert manifest["leaves"][".params['scale']"] == {"dtype": "bfloat16", "shape": [2]}
    assert manifest["leaves"][".optimizer[1][0].count"] == {"dtype": "int32", "shape": []}
    assert len(manifest["leaves"]) == len(jax.tree.leaves(initial()))


SAVING_FOR_EVER = """
import itertools, sys
from pathlib import Path
import numpy as np
from experiments.runs.checkpoints import committed_steps, save

directory = Path(sys.argv[1])
first = max(committed_steps(directory), default=0) + 1
for step in itertools.count(first):
    save(directory, step, {str(i): np.full((50, 50), step) for i in range(20)}, warn=sys.exit)
    print(step, flush=True)
"""


def test_kills_while_saving_leave_only_good_steps(tmp_path):
    generator = np.random.default_rng(0)
    template = {str(i): np.zeros((50, 50), int) for i in range(20)}
    for _ in range(3):
        command = [sys.executable, "-c", SAVING_FOR_EVER, str(tmp_path)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            acknowledged = int(process.stdout.readline())
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(generator.uniform(0, 0.4))
            process.kill()
            acknowledged = max([acknowledged, *map(int, process.stdout)])
        for step in committed_steps(tmp_path):
            verify(tmp_path / str(step))
        step, state = restore_latest(tmp_path, template, warn=no_warning)
        assert step in (acknowledged, acknowledged + 1)
        assert all((leaf == step).all() for leaf in state.values())
        assert not list(tmp_path.glob("*.*"))
