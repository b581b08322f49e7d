"""Whatever is typed, whatever became of a run folder: it works, or one line says why not."""

import contextlib
import dataclasses
import io
import json
import shutil
from pathlib import Path

import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

import train
from experiments import __main__ as tools
from experiments.analysis.read import load_runs
from experiments.commands import startup
from experiments.config import (
    ProcessOptions,
    RecordOptions,
    RunConfig,
    TrainConfig,
    as_typed,
    resolve,
)
from experiments.figures import draw
from experiments.runs import record
from experiments.runs.folder import RunFolderError
from experiments.runs.rows import read_rows

NAMES = [
    field.name
    for settings_of in (TrainConfig, RecordOptions, ProcessOptions)
    for field in dataclasses.fields(settings_of)
]
SENSIBLE = {
    "scale": ["none", "sqrt", "mup", "0.2", "none,sqrt", "0", "learned", "power:-1/4", "fold,hot"],
    "task": ["sort", "recall", "histogram", "induction", "majority", "reverse", "copy"],
    "optimizer": ["adam", "adamw", "sgd"],
    "norm": ["pre", "post"],
    "dtype": ["float32", "bfloat16"],
    "matmul_precision": ["default", "highest"],
    "attention": ["plain", "streaming", "fused"],
    "learning_rate": ["1e-3", "1e-3,1e-2"],
    "dropout_rate": ["0", "0.1"],
    "clip_norm": ["1"],
    "out": ["run", "new", "new/er", "notes", "file", "file/x"],
    "compilation_cache": ["off", "cache"],
    "resume": ["true", "false"],
    "overwrite": ["true", "false"],
    "figures": ["true", "false"],
    "tensorboard": ["true", "false"],
    "accept_edits": ["true", "false"],
    "vectorize_lanes": ["true", "false"],
    "batch_shards": ["1", "2"],
    "distributed": ["false"],  # there is nobody else
    "coordinator_address": ["localhost:1234", "localhost"],
}
NUMBERS = ["1", "2", "3", "4", "8", "16", "64"]
ODD_NUMBERS = ["-1", "0", "257", "65536", "1000000", "100000000", "9" * 30, "9" * 5000]
STRANGE = [
    "", " ", ",", "nan", "NaN", "inf", "-inf", "1e400", "1e39", "-0.0", "5e-324", "0x10", "1_0",
    "1.5", "٣", "½", "\N{SNOWMAN}", "\udcff", "\0", "\n", "a\nb", "true", "None", "none,none",
    "none,", "1,,2", "--steps=1", "-", "..", ".", "x" * 300, "x" * 5000, "[red]", "{tasks}", "%s",
    "'", "[/]", "maybe", "~", "~/x", "~nobody/x", ":100:",
]  # fmt: skip
ANY_NUMBER = st.integers().map(str) | st.floats().map(str)
WORDS = [
    "--help", "-h", "--", "sort", "--scale", "--no", "--=", "--steps 5", "--stps=5", "--nosteps",
    "--flagfile=", "--flagfile=flags", "--flagfile=binary", "--flagfile=notes", "--resume False",
    "--flagfile=nowhere", "--undefok=x", "--helpfull", "--noscale=none", "---steps=3", "-steps=3",
    "--resume", "--overwrite", "--nofigures", "\0", "\udcff", "--lr=1", "--seeds=2", "--help=no",
]  # fmt: skip


def sensible(name):
    return st.sampled_from(SENSIBLE.get(name, NUMBERS)).map(f"--{name}={{}}".format)


def odd(name):
    values = [st.sampled_from(SENSIBLE.get(name, ODD_NUMBERS)), st.sampled_from(STRANGE)]
    if name not in ("out", "compilation_cache"):  # nothing outside the folder of the test
        values += [ANY_NUMBER, st.lists(ANY_NUMBER).map(",".join), st.text()]
    return st.one_of(values).map(f"--{name}={{}}".format)


FLAG_NAMES = st.sampled_from(NAMES)
COMMANDS = st.builds(
    lambda flags, others: [word for text in flags + others for word in text.split(" ", 1)],
    st.lists(FLAG_NAMES.flatmap(sensible), max_size=5),
    st.lists(FLAG_NAMES.flatmap(odd) | st.sampled_from(WORDS), max_size=2),
)


class Started(Exception):
    """The run would go on with computing."""


def furnish(home, run_folder):
    """Make a folder hold a run, notes, files of flags and nothing else."""
    for entry in home.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    shutil.copytree(run_folder, home / "run")
    (home / "notes").mkdir()
    (home / "notes" / "thesis.txt").write_text("mine")
    (home / "file").write_text("mine")
    (home / "flags").write_text("--steps=7\n")
    (home / "binary").write_bytes(bytes(range(256)))


def everything():
    """Every file and folder here, with what is in it."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in Path().rglob("*")}


def call(main, *argv):
    """Exit status of a command, or None if a run began, and its standard error."""
    error = io.StringIO()
    with contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO()):
        try:
            status = main(list(argv))
        except Started:
            status = None
    return status, error.getvalue()


@pytest.fixture(scope="module")
def home(tiny_run, tmp_path_factory):
    """A furnished folder."""
    folder = tmp_path_factory.mktemp("home")
    furnish(folder, tiny_run)
    return folder


@contextlib.contextmanager
def nothing_begins(folder):
    """In this folder no run gets to computing; yields the configs of those that would."""
    begun = []

    def note_surroundings(folder, config, *rest):  # the folder is ours, the first step is next
        begun.append(config)
        raise Started

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HOME", str(folder))
        patch.setattr(record, "note_surroundings", note_surroundings)
        patch.setattr(startup, "use_compilation_cache", lambda *_: None)
        yield begun


@settings(max_examples=300)
@given(argv=COMMANDS)
@example(argv=["--scale=1e39"])
@example(argv=["--scale=0." + "1" * 300])
@example(argv=["--steps=100000000", "--eval_every=1"])
@example(argv=["--num_seeds=100000"])
@example(argv=["--task=majority", "--sequence_length=65536", "--vocab_size=65536"])
@example(argv=["--task=recall", "--sequence_length=65536", "--eval_size=1"])
@example(argv=["--task=recall", "--vocab_size=2", "--sequence_length=5"])
@example(argv=["--flagfile=binary"])
@example(argv=["--out=new", "--resume", "--overwrite"])
@example(argv=["--out=run", "--resume", "--steps=20"])
@example(argv=["--out=run", "--overwrite"])
@example(argv=["--out=a/" + "x" * 300])
def test_any_flags_start_a_run_or_are_refused_in_one_line(home, tiny_run, argv):
    with nothing_begins(home) as begun:
        before = everything()
        status, error = call(train.main, "train.py", *argv)
        event(f"exit status {status}")
        if status is None:
            (config,) = begun
            assert type(config) is RunConfig
            assert resolve(as_typed(config)) == config
            stored = [json.loads(path.read_text()) for path in Path().rglob("config.json")]
            assert config.to_json() in stored or any("resume" in word for word in argv)
            furnish(home, tiny_run)
            return
        assert everything() == before
    if status == 0:
        assert any(word.startswith(("--help", "-h")) for word in argv)
        assert error == ""
        return
    assert status == 2
    assert error.startswith("train.py: ")
    assert error.count("\n") == 1


ROWS = ("metrics.jsonl", "evaluation.jsonl")
KINDS = ("cut", "flip", "delete", "empty", "folder", "junk", "hole", "double")


def damage(path, kind, where):
    """Do something bad to a file, at a place given as a fraction of its length."""
    if kind in ("delete", "folder"):
        path.unlink()
        if kind == "folder":
            path.mkdir()
        return
    content = path.read_bytes()
    at = int(where * len(content))
    before, after = content[:at], content[at:]
    changed = {
        "cut": before,
        "flip": before + bytes([after[0] ^ 1 << int(where * 1e6) % 8]) + after[1:],
        "empty": b"",
        "junk": before + bytes(range(at % 192, at % 192 + 64)) + after[64:],
        "hole": before + after[100:],
        "double": content + content,
    }
    path.write_bytes(changed[kind])


def damages(*files):
    where = st.floats(0, 1, exclude_max=True)
    one = st.tuples(st.sampled_from(files), st.sampled_from(KINDS), where)
    return st.lists(one, min_size=1, max_size=2, unique_by=lambda d: d[0])


def damaged_copy(run_folder, folder, done):
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(run_folder, folder, ignore=shutil.ignore_patterns("figures"))
    for name, kind, where in done:
        path = folder / name
        if name == "arrays":
            data = (folder / "checkpoints" / "12").iterdir()
            path = max(data, key=lambda p: p.stat().st_size)
        damage(path, kind, where)


def refused(status, error, command):
    """Whether a command refused with one last line that begins with its name."""
    return status in (1, 2) and error.splitlines()[-1].startswith(f"{command}: ")


@settings(max_examples=60)
@given(done=damages("config.json", *ROWS, "environment.json"))
@example(done=[("metrics.jsonl", "empty", 0.0)])
@example(done=[("evaluation.jsonl", "double", 0.0)])
@example(done=[("environment.json", "empty", 0.0)])
def test_reading_a_damaged_run_works_or_is_refused_in_one_line(tiny_run, tmp_path_factory, done):
    folder = tmp_path_factory.getbasetemp() / "damaged_to_read"
    damaged_copy(tiny_run, folder, done)
    for rows in ("metrics", "evaluation"):
        try:
            table = load_runs([folder, tiny_run], rows)
        except RunFolderError as error:
            assert str(folder) in str(error) and "\n" not in str(error)
        else:
            assert len({len(column) for column in table.values()}) == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draw, "draw_figures", lambda *arguments: [])
        patch.setattr(startup, "use_compilation_cache", lambda *_: None)
        for command in ("compare", "plot"):
            runs = (str(folder), str(tiny_run))
            status, error = call(tools.main, "experiments", command, *runs)
            event(f"{command}: {status}")
            assert status == 0 or refused(status, error, command), error


@settings(max_examples=60)
@given(done=damages("config.json"))
def test_resuming_by_a_damaged_config_starts_or_is_refused(home, tiny_run, done):
    with nothing_begins(home):
        damaged_copy(tiny_run, Path("damaged"), done)
        before = everything()
        status, error = call(train.main, "train.py", "--resume", "--out=damaged")
        event(f"exit status {status}")
        assert status is None or refused(status, error, "train.py"), error
        assert everything() == before


@settings(max_examples=30)
@given(
    done=damages(*ROWS, "environment.json", *(f"checkpoints/{n}/manifest.json" for n in (8, 12)))
    | damages("arrays", "environment.json")
)
@example(done=[("metrics.jsonl", "cut", 0.9), ("checkpoints/12/manifest.json", "delete", 0.0)])
def test_resuming_a_damaged_run_makes_it_whole_or_is_refused(
    tiny, tiny_run, tmp_path_factory, done
):
    folder = tmp_path_factory.getbasetemp() / "damaged_to_resume"
    damaged_copy(tiny_run, folder, done)
    flags = ("--resume", "--nofigures", "--compilation_cache=off", f"--out={folder}")
    status, error = call(train.main, "train.py", *flags)
    event(f"exit status {status}")
    assert status == 0 or refused(status, error, "train.py"), error
    if status == 0:
        for name, every in zip(ROWS, (1, 4), strict=True):
            steps = [row["step"] for row in read_rows(folder / name)]
            last = 12 if name == "evaluation.jsonl" else 11
            names = resolve(tiny).lane_names()
            assert steps == [step for step in range(0, last + 1, every) for _ in names]
        if all(name not in ROWS for name, _, _ in done):
            for name in ROWS:
                assert (folder / name).read_bytes() == (tiny_run / name).read_bytes()
