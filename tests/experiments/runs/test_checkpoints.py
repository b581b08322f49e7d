"""Checkpoints are whole or don't count: damage, kills, full disks, hostile folders, old formats."""

import asyncio
import collections
import contextlib
import errno
import hashlib
import io
import json
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
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
SAMPLES = ROOT / "tests" / "data"  # step 7 is `kept()`, saved by the first version of each format
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


@pytest.fixture(autouse=True)
def no_hang():
    """A pipe or /dev/zero that is read never ends, unless this ends it."""

    def ring(*_):
        raise TimeoutError("hangs")

    signal.signal(signal.SIGALRM, ring)
    signal.alarm(120)
    yield
    signal.alarm(0)


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


def names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


def flip(file: Path, bit: int) -> None:
    with file.open("r+b") as opened:  # in place: a file system may take long over a truncation
        opened.seek(bit // 8)
        (byte,) = opened.read(1)
        opened.seek(bit // 8)
        opened.write(bytes([byte ^ 1 << bit % 8]))


def forge(folder: Path, /, **changes: Any) -> None:
    """A manifest whose digests fit what it says and the archive that is there."""
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["sha256"]
    archive = folder / "arrays.npz"
    if archive.is_file():
        manifest["sizes"] = {archive.name: archive.stat().st_size}
        manifest["files"] = {archive.name: hashlib.sha256(archive.read_bytes()).hexdigest()}
    manifest = {key: value for key, value in (manifest | changes).items() if value is not None}
    (folder / "manifest.json").write_bytes(checkpoints._signed(manifest))


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


def test_bits_layouts_and_dtypes_survive(tmp_path):
    bits = np.array([0x7FC00001, 0xFFC00000, 0x80000000, 0, 0x7F800000, 1], np.uint32)
    plain = np.arange(24).reshape(2, 3, 4)
    dtypes = ["bool", "int8", "uint64", "float16", "float64", "complex64", ">f4"]
    dtypes += ["bfloat16", "float8_e5m2", "int4"]  # of ml_dtypes
    state = {
        "float": bits.view(np.float32),
        "negative_zero": -np.zeros((2, 2), np.float32),
        "transposed": plain.T,
        "strided": plain[:, ::2, 1],
        "broadcast": np.broadcast_to(np.float32(3), (2, 2)),
        "empty": np.zeros((0, 3)),
        **{name: np.array([[1], [0]]).astype(np.dtype(name)) for name in dtypes},
        **{f"{name} scalar": np.dtype(name).type(1) for name in dtypes},
        **{path: np.array([len(path)]) for path in ("a/b", "../c", "d.e", "", "é\n")},
    }
    assert_same(restore(save(tmp_path, 0, state, warn=no_warning), state), state)


def test_leaves_are_told_apart_by_their_path_and_not_by_their_order(tmp_path):
    state = collections.OrderedDict(b=np.arange(2), a=np.arange(2, 4))
    path = save(tmp_path, 0, state, warn=no_warning)
    assert_same(restore(path, dict(state)), dict(state))


def empty_folder(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def replaced(name: str, make):
    def replace(step: Path) -> None:
        file = step / name if name else step
        target = file.with_name("elsewhere")
        file.rename(target)
        make(file, target)

    return replace


def plain_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("")


def other_step(path: Path) -> None:
    shutil.rmtree(path)
    shutil.copytree(path.with_name("10"), path)


def text(content: str):
    return lambda step: (step / "manifest.json").write_text(content)


def signed(**changes: Any):
    return lambda step: forge(step, **changes)


def files(name: str):
    return signed(format=None, files={name: "0" * 64})


def archive(make):
    def replace(step: Path) -> None:
        with zipfile.ZipFile(step / "arrays.npz") as old:
            entries = {name: old.read(name) for name in old.namelist()}
        with zipfile.ZipFile(step / "arrays.npz", "w", zipfile.ZIP_DEFLATED) as new:
            for name, content in make(entries).items():
                new.writestr(name, content)
        forge(step)

    return replace


def npy(array: np.ndarray) -> bytes:
    np.save(file := io.BytesIO(), array)
    return file.getvalue()


def header(shape: tuple[int, ...]) -> bytes:
    about = {"descr": "<f4", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file := io.BytesIO(), about)
    return file.getvalue()


def no_archive(step: Path) -> None:
    (step / "arrays.npz").write_bytes(b"PK")
    forge(step)


NOT_THIS = "manifest.json is not the one saved"
DAMAGES = {
    "empty folder": (empty_folder, f"{NOT_THIS} (No such file"),
    "plain file": (plain_file, f"{NOT_THIS} (Not a directory"),
    "other step": (other_step, f"{NOT_THIS} (holds step 10)"),
    "no manifest": (lambda p: (p / "manifest.json").unlink(), f"{NOT_THIS} (No such file"),
    "empty manifest": (text(""), NOT_THIS),
    "no JSON": (text("{"), NOT_THIS),
    "no object": (text("[1]"), NOT_THIS),
    "number": (text("1"), NOT_THIS),
    "deep list": (text("[" * 10**5), f"{NOT_THIS} (maximum recursion"),
    "deep object": (text('{"sha256":' * 10**5 + "1" + "}" * 10**5), f"{NOT_THIS} (maximum recurs"),
    "not as deep": (text('{"sha256": 1, "a": ' + "[" * 900 + "]" * 900 + "}"), NOT_THIS),
    "huge number": (text('{"sha256": ' + "9" * 5000 + "}"), NOT_THIS),
    "not UTF-8": (lambda p: (p / "manifest.json").write_bytes(b"\xff"), NOT_THIS),
    "cut manifest": (lambda p: os.truncate(p / "manifest.json", 99), NOT_THIS),
    "huge manifest": (lambda p: os.truncate(p / "manifest.json", 2**36), NOT_THIS),
    "another spelling": (
        lambda p: text(json.dumps(json.loads((p / "manifest.json").read_text())))(p),
        f"{NOT_THIS} (another SHA-256)",
    ),
    **{f"no {key}": (signed(**{key: None}), NOT_THIS) for key in ("step", "leaves", "files")},
    **{
        f"{key} is {value}": (signed(**{key: value}), NOT_THIS)
        for key in ("step", "leaves", "files", "identity", "sizes")
        for value in (3, [3], "x", [[[]]])
    },
    "leaf is 3": (signed(leaves={"a": 3}), NOT_THIS),
    "leaf without shape": (signed(leaves={"a": {"dtype": "int8"}}), NOT_THIS),
    "/dev/zero": (files("/dev/zero"), f"{NOT_THIS} (names other files than its own)"),
    "other step's": (files("../10/arrays.npz"), f"{NOT_THIS} (names other files than its own)"),
    "outside": (files("arrays/../../../x"), f"{NOT_THIS} (names other files than its own)"),
    "no name": (files(""), f"{NOT_THIS} (names other files than its own)"),
    "of another format": (files("arrays.npz"), f"{NOT_THIS} (names other files than its own)"),
    "not there": (files("arrays/d/x"), "arrays/d/x is not the one saved (No such file"),
    "no file named": (signed(files={}), f"{NOT_THIS} (names other files than its own)"),
    "linked step": (replaced("", lambda p, t: p.symlink_to(t)), f"{NOT_THIS} (no plain file)"),
    **{
        f"{what} for {name}": (replaced(name, make), f"{name} is not the one saved (no plain file)")
        for name in ("manifest.json", "arrays.npz")
        for what, make in {
            "folder": lambda p, t: p.mkdir(),
            "pipe": lambda p, t: os.mkfifo(p),
            "link": lambda p, t: p.symlink_to(t),
            "device": lambda p, t: p.symlink_to("/dev/zero"),
            "loop": lambda p, t: p.symlink_to(p),
        }.items()
    },
    "no arrays": (
        lambda p: (p / "arrays.npz").unlink(),
        "arrays.npz is not the one saved (No such",
    ),
    "empty file": (lambda p: os.truncate(p / "arrays.npz", 0), "the one saved (0 bytes)"),
    "cut file": (lambda p: os.truncate(p / "arrays.npz", 99), "the one saved (99 bytes)"),
    "longer file": (lambda p: os.truncate(p / "arrays.npz", 2**36), "saved (68719476736 bytes)"),
    "flipped bit": (lambda p: flip(p / "arrays.npz", 801), "arrays.npz is not the one saved ("),
    "made-up archive": (no_archive, "arrays.npz is not the one saved (File is not a zip file)"),
    "entry missing": (archive(lambda old: {}), 'is not the one saved ("There is no item'),
    "pickle": (
        archive(lambda old: {name: npy(np.array([{}])) for name in old}),
        "is not the one saved (array 0 is object(1,))",
    ),
    "more than there is memory": (
        archive(lambda old: {name: header((2**50,)) for name in old}),
        "is not the one saved (array 0 is float32(1125899906842624,))",
    ),
    "less than it says": (
        archive(lambda old: old | {"arr_0.npy": header((2, 3))}),
        "is not the one saved (EOF",
    ),
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
    assert set(names(directory)) - {"elsewhere"} == {"10", "13", "20.bad"}


@pytest.mark.parametrize("kind", ["npz", "orbax"])
def test_every_flipped_bit_is_seen(tmp_path, kind):
    step = shutil.copytree(SAMPLES / f"checkpoint_{kind}" / "7", tmp_path / "7")
    generator = np.random.default_rng(0)
    files = sorted(entry for entry in step.rglob("*") if entry.is_file())
    assert len(files) == {"npz": 2, "orbax": 9}[kind]
    for file in files:
        for byte in range(0, file.stat().st_size, {"npz": 3, "orbax": 9}[kind]):
            bit = 8 * byte + int(generator.integers(8))
            flip(file, bit)
            with pytest.raises(CorruptCheckpoint, match=str(file.relative_to(step))):
                verify(step)
            flip(file, bit)
    verify(step)


def test_a_folder_is_committed_by_its_manifest(directory, tmp_path):
    (directory / "20" / "manifest.json").unlink()
    for name in ("030", "-1", "notes", "²"):
        shutil.copytree(directory / "10", directory / name)
    assert committed_steps(directory) == [10, 13]
    assert committed_steps(tmp_path / "nowhere") == []
    lines = []
    assert restore_latest(directory, initial(), warn=lines.append).step == 13
    assert len(lines) == 1


def test_none_good_is_said_every_time(directory):
    for step in ("10", "13", "20"):
        flip(directory / step / "arrays.npz", 801)
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
        r"template leaf .params\['bias'\] is float64\[2\], but absent in ",
    ),
    "missing leaf": (
        mismatch(params={"scale": PARAMS["scale"]}),
        r"template leaf .params\['dense/0'\] is absent, but float32\[2, 3\] in ",
    ),
    "dict for a tuple": (initial()._asdict(), r"template leaf \['.*'\].* is .*, but absent in "),
    "other optimizer": (
        mismatch(optimizer=optax.sgd(0.1, momentum=0.9).init(PARAMS)),
        r"template leaf .optimizer\[0\].trace\['dense/0'\] is float32\[2, 3\], but absent in ",
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
        ({"a": np.array(["x"])}, r"state leaf \['a'\] .* got <U1"),
        ({"a": np.array([None])}, r"state leaf \['a'\] .* got object"),
        ({"a": np.zeros(2, "V4")}, r"state leaf \['a'\] .* got \|V4"),
        ({"a": np.zeros(2, "i4,O")}, r"state leaf \['a'\] .* got \[\('f0'"),
        ({"key": jax.random.key(0)}, r"state leaf \['key'\] .* got key<fry>"),
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


@pytest.fixture(params=["save", "restore"])
def write(request, directory):
    """One thing that the writer does, on whose way it tidies up."""
    lines = []
    step = iter(range(30, 99))

    def act() -> list[str]:
        if request.param == "save":
            save(directory, next(step), after(3), keep=9, warn=lines.append)
        else:
            assert restore_latest(directory, initial(), warn=lines.append).step == 20
        return lines

    return act


def test_what_a_killed_save_left_is_deleted(directory, write):
    shutil.copytree(directory / "20", directory / "20.tmp1")
    for name in ("30.tmp/arrays/d", "31.tmp"):  # the first by format 1, as the probe
        (directory / name).mkdir(parents=True)
    for name in ("30.tmp/arrays/d/0", "30.tmp/probe", "30.tmp/manifest.json", "31.tmp/arrays.npz"):
        (directory / name).write_text("half of")
    assert write() == []
    assert not list(directory.glob("*.tmp*"))


STRANGERS = {
    "file": lambda p, outside: p.write_text("mine"),
    "link": lambda p, outside: p.symlink_to(outside),
    "dangling link": lambda p, outside: p.symlink_to(outside / "nowhere"),
    "other file": lambda p, outside: (p.mkdir(), (p / "thesis.tex").write_text("mine")),
    "folder for a file": lambda p, outside: (p / "arrays.npz").mkdir(parents=True),
    "file for a folder": lambda p, outside: (p.mkdir(), (p / "arrays").write_text("mine")),
    "link in it": lambda p, outside: (p.mkdir(), (p / "arrays").symlink_to(outside)),
}


@pytest.mark.parametrize("make", STRANGERS.values(), ids=STRANGERS)
def test_what_no_save_left_stays_with_one_warning_in_all(tmp_path, directory, write, make):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "manifest.json").write_text("mine")
    (directory / "notes.tmp").mkdir()
    make(directory / "30.tmp", outside)

    def there() -> list[str]:
        return sorted(map(str, [*directory.glob("*.tmp"), *directory.glob("*.tmp/*")]))

    before = there()
    write()
    (line,) = write()
    assert line == (
        f"{directory}: not all that is old was deleted: 30.tmp is more than a save writes"
    )
    assert there() == before
    assert names(outside) == ["manifest.json"]


@pytest.mark.parametrize("make", [STRANGERS["other file"], STRANGERS["link in it"]])
def test_an_old_step_with_more_in_it_stays(tmp_path, directory, make):
    make(old := directory / "5", tmp_path)
    shutil.copy(directory / "10" / "manifest.json", old)
    lines = []
    for step in (30, 31):
        save(directory, step, after(3), warn=lines.append)
    assert lines == [f"{directory}: not all that is old was deleted: 5 is more than a save writes"]
    assert names(directory) == ["30", "31", "5"]
    assert tmp_path.exists()


def test_a_link_to_checkpoints_is_not_written_through(directory, tmp_path):
    (link := tmp_path / "link").symlink_to(directory)
    before = names(directory)
    for act in (
        lambda: save(link, 30, after(3), warn=no_warning),
        lambda: restore_latest(link, initial(), warn=no_warning),
    ):
        with pytest.raises(NotADirectoryError, match=r"A link, not a folder: '.*link'"):
            act()
    assert names(directory) == before
    assert_same(restore(link / "20", initial()), after(20))  # reading is free


def test_all_is_on_the_disk_before_it_is_named_and_the_name_after(directory, monkeypatch):
    fsync, rename, done = os.fsync, Path.rename, []

    def record_sync(descriptor):
        fsync(descriptor)
        done.append(Path(f"/proc/self/fd/{descriptor}").readlink().relative_to(directory.parent))

    def record_rename(self, target):
        done.append(f"{self.name} to {target.name}")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(Path, "rename", record_rename)
    save(directory, 30, after(3), warn=no_warning)
    parts = [directory.name + f"/30.tmp{name}" for name in ("/arrays.npz", "/manifest.json", "")]
    assert list(map(str, done)) == [
        *parts, "30.tmp to 30", directory.name, "13 to 13.tmp", "10 to 10.tmp"
    ]  # fmt: skip


def test_housekeeping_that_fails_ends_nothing_and_is_said_once(directory, monkeypatch):
    fsync, rename = os.fsync, Path.rename

    def files_only(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Folders can't")
        fsync(descriptor)

    def new_ones_only(self, target):
        return rename(self, target) if self.suffix else fails(errno.EACCES)()

    lines = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", files_only)
        patch.setattr(Path, "rename", new_ones_only)
        for step in (30, 31, 32):
            save(directory, step, after(3), warn=lines.append)
    assert lines == [
        f"{directory}: a folder's names were not synced to the disk: Folders can't",
        f"{directory}: not all that is old was deleted: Permission denied",
    ]
    monkeypatch.setattr(shutil, "rmtree", fails(errno.EBUSY))
    save(directory, 33, after(3), warn=lines.append)
    restore_latest(directory, initial(), warn=lines.append)
    assert lines[2:] == [
        f"{directory}: not all that is old was deleted: {os.strerror(errno.EBUSY)}"
    ]
    monkeypatch.undo()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "is_file", fails(errno.EACCES))
        save(directory, 35, after(3), warn=lines.append)
    assert lines[3:] == [f"{directory}: older steps were not deleted: Permission denied"]
    shutil.rmtree(directory / "35")
    save(directory, 34, after(3), warn=no_warning)
    assert names(directory) == ["33", "34"]


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def test_a_checkpoint_of_another_run_is_bad_and_one_without_identity_is_not(directory):
    own = {"config": digest("a"), "data": digest("b")}
    other = own | {"config": digest("c")}
    step = save(directory, 30, after(3), identity=own, keep=9, warn=no_warning)
    for fitting in (own, {}, None, {"data": own["data"]}, own | {"later": digest("d")}):
        assert verify(step, identity=fitting)["identity"] == own
    for read in (verify, lambda *a, **k: restore(step, initial(), **k)):
        with pytest.raises(
            CorruptCheckpoint, match=rf"30: of another run: its config is '{own['config']}'"
        ):
            read(step, identity=other)
    lines = []
    assert restore_latest(directory, initial(), identity=other, warn=lines.append).step == 20
    (line,) = lines
    assert line.startswith("bad checkpoint, renamed to 30.bad: ")

    save(directory, 30, after(3), identity=own, keep=9, warn=no_warning)
    with pytest.raises(ValueError, match="must not be committed yet, got step=30"):
        save(directory, 30, after(3), identity=own, warn=no_warning)
    save(directory, 30, after(4), identity=other, warn=lines.append)
    assert lines[1].startswith("bad checkpoint, renamed to 30.bad1: ")
    assert_same(restore(directory / "30", initial(), identity=other), after(4))


def test_a_later_format_is_no_damage(directory):
    forge(directory / "20", format=3, files={"new": "kinds"}, step=None)
    for read in (restore_latest, lambda d, template, warn: restore(d / "20", template)):
        with pytest.raises(ValueError, match=r"20 has format 3, not one of \[1, 2\]"):
            read(directory, initial(), warn=no_warning)
    assert names(directory) == ["10", "13", "20"]


def fails(code: int):
    def function(*_args, **_kwargs):
        raise OSError(code, os.strerror(code), "some file")

    return function


FAILURES = {
    "full at the archive": (np, "savez", errno.ENOSPC),
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
            save(directory, 30, after(3), warn=lambda line: None)
    assert caught.value.errno == code
    assert names(directory) == ["10", "13", "20"]
    assert restore_latest(directory, initial(), warn=no_warning).step == 20


@contextlib.contextmanager
def limited(kind: int, to: int):
    """A resource of the system, limited for this process."""
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (to, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


@pytest.mark.parametrize("limit", [0, 100, 2**19, 2**20, 2**20 + 200])
def test_a_disk_that_is_full_anywhere_in_a_save_is_one_quiet_line(directory, capfd, caplog, limit):
    random = np.random.default_rng(0).integers(256, size=2**20, dtype=np.uint8)
    full = pytest.raises(OSError, match=r"^\[Errno 27\] File too large: '.*/30.tmp'$")
    with limited(resource.RLIMIT_FSIZE, limit), full as caught:
        save(directory, 30, {"one": random}, warn=no_warning)
    assert caught.value.errno == errno.EFBIG
    assert names(directory) == ["10", "13", "20"]
    assert capfd.readouterr() == ("", "")
    assert caplog.text == ""


def test_a_save_writes_its_size_once_and_reads_nothing(tmp_path):
    state = {str(i): np.random.default_rng(i).bytes(2**20) for i in range(16)}
    state = {
        key: np.frombuffer(value, np.uint8).reshape(1024, 1024).T for key, value in state.items()
    }

    def transferred() -> dict[str, int]:
        lines = Path("/proc/self/io").read_text().split("\n")[:-1]
        return {name: int(count) for name, count in (line.split(": ") for line in lines)}

    save(tmp_path, 0, {"one": np.ones(1)}, warn=no_warning)  # what is imported on the way
    before = transferred()
    path = save(tmp_path, 1, state, warn=no_warning)
    cost = {name: count - before[name] for name, count in transferred().items()}
    size = sum(array.nbytes for array in state.values())
    on_disk = sum(file.stat().st_size for file in path.iterdir())
    assert size < on_disk < 1.001 * size
    assert on_disk <= cost["wchar"] < on_disk + 1000
    assert cost["rchar"] < 10_000
    assert_same(restore(path, state), state)


def test_a_run_folder_that_was_deleted_does_not_come_back(tmp_path):
    with pytest.raises(FileNotFoundError):
        save(tmp_path / "deleted" / "checkpoints", 1, after(0), warn=no_warning)
    assert list(tmp_path.iterdir()) == []


FAULTS = [(errno.EIO, True), (errno.EACCES, False), (errno.ESTALE, False)]


@pytest.mark.parametrize(("code", "damaged"), FAULTS)
def test_only_damage_gets_a_step_renamed(directory, monkeypatch, code, damaged):
    monkeypatch.setattr(hashlib, "file_digest", fails(code))
    with pytest.raises(CorruptCheckpoint if damaged else OSError):
        restore_latest(directory, initial(), warn=lambda line: None)
    assert committed_steps(directory) == ([] if damaged else [10, 13, 20])


def test_no_memory_and_no_descriptors_are_no_damage(directory, monkeypatch):
    def full(*_):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(np.lib.format, "read_array", full)
        with pytest.raises(MemoryError):
            restore_latest(directory, initial(), warn=no_warning)
    with (directory / "20" / "manifest.json").open() as file:
        free = file.fileno()
    for read in (
        lambda: restore(directory / "20", initial()),
        lambda: restore_latest(directory, initial(), warn=no_warning),
    ):
        with limited(resource.RLIMIT_NOFILE, free), pytest.raises(OSError) as caught:
            read()
        assert caught.value.errno == errno.EMFILE
    assert names(directory) == ["10", "13", "20"]


def test_the_manifest_tells_structure_shapes_and_dtypes(saved):
    manifest = json.loads((saved / "20" / "manifest.json").read_text())
    assert (manifest["format"], manifest["step"], manifest["identity"]) == (2, 20, {})
    assert manifest["leaves"][".params['dense/0']"] == {"dtype": "float32", "shape": [2, 3]}
    assert manifest["leaves"][".params['scale']"] == {"dtype": "bfloat16", "shape": [2]}
    assert manifest["leaves"][".optimizer[1][0].count"] == {"dtype": "int32", "shape": []}
    assert len(manifest["leaves"]) == len(jax.tree.leaves(initial()))


class Kept(NamedTuple):
    params: Any
    count: Any
    frozen: Any


def kept() -> Kept:
    """The state of the stored samples; no number in it is computed."""
    bits = np.array([[0x7FC00001, 0x80000000, 1], [0x3F800000, 0x7F800000, 0xFFC00000]], np.uint32)
    params = {"dense/0": bits.view(np.float32), "scale": np.array([0.5, -2.0], ml_dtypes.bfloat16)}
    return Kept(params, np.int32(7), (np.array([False, True]), None))


@pytest.fixture(params=["npz", "orbax"])
def sample(request, tmp_path) -> Path:
    """Step 7, as the first version that had the format saved it."""
    return shutil.copytree(SAMPLES / f"checkpoint_{request.param}", tmp_path / "checkpoints")


def test_every_format_is_restored_in_threads_and_event_loops_without_a_word(sample, capfd):
    def cycle() -> None:
        results.append(restore_latest(sample, kept(), identity={"config": "x"}, warn=no_warning))

    async def in_a_loop() -> None:
        cycle()

    results: list[Any] = []
    thread = threading.Thread(target=cycle)
    thread.start()
    thread.join()
    asyncio.run(in_a_loop())
    assert len(results) == 2
    for step, state in results:
        assert step == 7
        assert_same(state, kept())
    with pytest.raises(ValueError, match=r"leaf .count is int8\[\], but int32\[\] in "):
        restore(sample / "7", kept()._replace(count=np.int8(7)))
    assert capfd.readouterr() == ("", "")


def test_a_run_of_any_format_goes_on_in_the_newest(sample):
    for step in (8, 9):
        save(sample, step, after(1), warn=no_warning)
    assert names(sample) == ["8", "9"]  # the old step is gone
    assert_same(restore(sample / "9", initial()), after(1))


def orbax_file(step: Path) -> Path:
    return next((step / "arrays" / "d").iterdir())


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.unlink(),
        lambda file: os.truncate(file, 99),
        lambda file: flip(file, 801),
        lambda file: (file.rename(file.parent / "x"), file.symlink_to("x")),
        lambda file: (file.unlink(), os.mkfifo(file)),
        lambda file: (file.parent.rename(file.parent / "../e"), file.parent.symlink_to("e")),
    ],
)
def test_damage_in_orbax_files_is_seen_before_orbax_reads_them(tmp_path, damage):
    step = shutil.copytree(SAMPLES / "checkpoint_orbax" / "7", tmp_path / "7")
    file = orbax_file(step)
    damage(file)
    with pytest.raises(CorruptCheckpoint, match=str(file.relative_to(step))):
        restore(step, kept())


def test_what_orbax_says_of_proven_bytes_is_no_damage(tmp_path):
    step = shutil.copytree(SAMPLES / "checkpoint_orbax" / "7", tmp_path / "7")
    (step / "arrays" / "_METADATA").write_text("made up")
    found = {
        str(file.relative_to(step)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted((step / "arrays").rglob("*"))
        if file.is_file()
    }
    forge(step, files=found)
    with pytest.raises(OSError, match=r"Orbax can't read it: [^\n]*: '.*/7'$"):
        restore_latest(tmp_path, kept(), warn=no_warning)
    assert names(tmp_path) == ["7"]


DYING = """
import itertools, os, random, signal, sys, time
from pathlib import Path
import numpy as np
from experiments.runs.checkpoints import committed_steps, restore_latest, save, verify

os.fsync = lambda descriptor: None  # slow, and a kill is no power cut
directory, template = Path(sys.argv[1]), [np.zeros((100, 250), int) for _ in range(5)]

def die_at(event):
    count = itertools.count()
    def hook(name, _):
        if name in {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir"}:
            if next(count) == event:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)

def save_for_ever(event, tell):
    first = max(committed_steps(directory), default=0) + 1
    if event is not None:
        die_at(event)
    for step in itertools.count(first):
        save(directory, step, [leaf + step for leaf in template], warn=sys.exit)
        os.write(tell, b" %d" % step)

save(directory.with_name("other"), 1, template, warn=sys.exit)  # what is imported on the way
seen = 0
for event in [*range(30), *[None] * 8]:
    read, write = os.pipe()
    if not (child := os.fork()):
        try:
            save_for_ever(event, write)
        finally:
            os._exit(1)
    os.close(write)
    if event is None:
        os.read(read, 1)
        time.sleep(random.Random(seen).uniform(0, 0.01))
        os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    told = [0, *map(int, os.read(read, 10**6).split())]
    os.close(read)
    for step in committed_steps(directory):
        verify(directory / str(step))
    if committed_steps(directory) or seen:
        step, state = restore_latest(directory, template, warn=sys.exit)
        assert step in range(max(*told, seen), max(*told, seen) + 2), (step, told, seen)
        assert all((leaf == step).all() for leaf in state)
        seen = step
        assert len(list(directory.iterdir())) in (1, 2, 3), list(directory.iterdir())
print(seen)
"""


def test_kills_while_saving_leave_only_good_steps(tmp_path):
    command = [sys.executable, "-W", "ignore", "-c", DYING, str(tmp_path / "checkpoints")]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")
    assert int(run.stdout) > 15
