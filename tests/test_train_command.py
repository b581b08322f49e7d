"""The command line: what it takes, what it refuses in one line, what it leaves behind."""

import dataclasses
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import train
from experiments.__main__ import main as tools
from experiments.commands import train as view
from experiments.commands.command import help_page
from experiments.commands.flags import parse
from experiments.config import ProcessOptions, RecordOptions, TrainConfig, resolve
from experiments.tasks import TASKS

ROOT = Path(__file__).parent.parent
TINY = [
    "--task=reverse", "--steps=8", "--num_seeds=1", "--batch_size=4", "--sequence_length=8",
    "--vocab_size=4", "--d_model=16", "--d_k=8", "--d_ff=16", "--eval_every=4", "--eval_size=8",
    "--checkpoint_every=4", "--nofigures",
]  # fmt: skip
SETTINGS = (TrainConfig, RecordOptions, ProcessOptions)


def parsed(*flags):
    found = parse(["train.py", *flags], *SETTINGS)
    assert found is not None
    return found


def main(*flags):
    return train.main(["train.py", *flags])


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A folder for compiled programs."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def command(tmp_path, cache):
    """Runs train.py in a process of its own, in an empty folder."""

    def run(*flags, stdout=subprocess.PIPE, stderr=subprocess.PIPE, code=None, **environment):
        return subprocess.Popen(
            [sys.executable, *(["-c", code] if code else [str(ROOT / "train.py")]), *flags],
            cwd=tmp_path,
            env={**os.environ, "XDG_CACHE_HOME": str(cache), **environment},
            stdout=stdout,
            stderr=stderr,
        )

    return run


def ended(process):
    """Exit status and standard error of a process."""
    error = process.communicate(timeout=120)[1]
    return process.returncode, error.decode()


# What is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--scale=sqr"], "'sqr' (nearest: sqrt); choose from none (×1), sqrt"),
        (["--scale="], "scale: empty, give a value"),
        (["--scale=none,none"], "scale: none is given twice"),
        (["--scale=8,8.0"], "scale: 8.0 is given twice: it is the arm 8"),
        (["--scale=none,1e0"], "scale: 1e0 is given twice: it is the arm none"),
        (["--scale=none,"], "unknown score rule ''"),
        (["--scale=nan"], "must be finite, got 'nan'"),
        (["--task=srt"], "task: unknown 'srt' (nearest: sort); choose from sort, recall"),
        (["--steps=abc"], "steps: 'abc', must be a whole number"),
        (["--steps=0"], "steps: 0, must be a whole number from 1"),
        (["--steps=1e3"], "steps: '1e3', must be a whole number"),
        (["--learning_rate=1e-3,nan"], "learning_rate: nan, must be a positive finite number"),
        (["--learning_rate=-1"], "learning_rate: -1.0, must be a positive finite number"),
        (["--learning_rate=1e-3,0.001"], "learning_rate: 0.001 is given twice"),
        (["--learning_rate=fast"], "learning_rate: 'fast', must be a comma list of numbers"),
        (["--dropout_rate=1"], "dropout_rate: 1.0, must be in [0, 1)"),
        (["--clip_norm=0"], "clip_norm: 0.0, must be a positive finite number"),
        (["--optimizer=adm"], "optimizer: unknown 'adm' (nearest: adam)"),
        (["--d_model=10", "--num_heads=3"], "d_v: its default is d_model / num_heads"),
        (["--seed=-1"], "seed: -1, must be a whole number from 0"),
        (["--seed=2147483647", "--num_seeds=2"], "go past the last seed"),
        (["--batch_size=60000", "--sequence_length=60000"], "one lane would need about"),
        (["--resume", "False"], "stray word 'False': flags are written --name=value; a switch"),
        (["sort"], "stray word 'sort'"),
        (["--tsak=sort"], "unknown flag --tsak (nearest: --task)"),
        (["--lr=1"], "unknown flag --lr (nearest: --learning_rate)"),
        (["--seeds=1"], "unknown flag --seeds (nearest: --num_seeds)"),
        (["--epochs=1"], "unknown flag --epochs (nearest: --steps)"),
        (["--xyzzy"], "unknown flag --xyzzy\n"),
        (["--resume=maybe"], "flag --resume=maybe, must be true or false"),
        (["--resume"], "resume: say which run, with --out=RUN"),
        (["--resume", "--out=nowhere"], "not a run folder"),
        (["--resume", "--overwrite", "--out=nowhere"], "overwrite: contradicts --resume"),
        (["--out="], "out: empty"),
        (["--out=a\0b"], "out: 'a\\x00b', must be a path"),
        (["--out=\udcff"], "out: '\\udcff', must be a path"),
        (["--out=~nobody-of-that-name/x"], "must be a path"),
        (["--compilation_cache=\udcff"], "compilation_cache: '\\udcff', must be a path"),
        (["--flagfile=nowhere"], "No such file or directory: 'nowhere'"),
        (["--task=recall", "--vocab_size=2", "--sequence_length=1"], "sequence_length"),
        (["--task=\N{SNOWMAN}"], "task: unknown '\N{SNOWMAN}'"),
        (["--attention=fused", "--dtype=bfloat16", "--d_v=64"], "fused needs an NVIDIA GPU"),
    ],
)
def test_bad_input_is_one_line_status_2_and_no_folder(
    flags, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main(*flags) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("train.py: ")
    assert message in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("JAX_PLATFORMS", "no_such", "'no_such' is not in the list of known backends"),
        ("JAX_PLATFORMS", "cuda", "JAX_PLATFORMS: 'cuda': this machine has no such device"),
        ("NPROC", "abc", "NPROC: 'abc' in the environment, must be a positive whole number"),
    ],
)
def test_a_machine_that_cannot_serve_is_one_line_too(command, tmp_path, name, value, message):
    status, error = ended(command(*TINY, **{name: value}))
    assert (status, error.count("\n")) == (2, 1)
    assert error.startswith("train.py: ")
    assert message in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("flag", "status"), [("--scale=sqr", 2), ("--help", 0)])
def test_help_and_usage_errors_start_no_backend(command, flag, status):
    process = command(flag, JAX_PLATFORMS="no_such")  # starting it would fail
    found, error = ended(process)
    assert found == status
    assert error.count("\n") == (status != 0)


INTERRUPTED = """
import os, runpy, signal, sys

class Finder:
    def find_spec(self, name, *rest):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)

module, *sys.argv = sys.argv[1:]
sys.meta_path.insert(0, Finder())
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("module", ["numpy", "experiments.commands.flags", "jax", "optax"])
def test_an_interrupted_start_is_one_line(command, tmp_path, module):
    script = str(ROOT / "train.py")
    status, error = ended(command(module, script, *TINY, "--out=run", code=INTERRUPTED))
    assert (status, error) == (130, "train.py: interrupted\n")
    assert list(tmp_path.iterdir()) == []


# What is taken --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "resume"),
    [(["--resume=False"], False), (["--noresume"], False), (["--resume"], True)],
)
def test_switches(flags, resume):
    assert parsed(*flags).values["resume"] is resume
    assert parsed(*flags).given == {"resume"}


def test_zero_is_a_scale_and_flags_are_the_settings():
    flags = ("--scale=0.0,none", "--d_v=5", "--learning_rate=1e-2,1")
    config = resolve(parsed(*flags).pick(TrainConfig))
    assert [arm.rule.multiplier for arm in config.arms()] == [0.0, 1.0]
    assert (config.d_v, config.learning_rate) == (5, (0.01, 1.0))
    assert resolve(TrainConfig()) == resolve(parsed().pick(TrainConfig))


def test_flags_can_come_from_a_file(tmp_path):
    (tmp_path / "flags").write_text("--steps=7\n--scale=mup\n")
    values = parsed(f"--flagfile={tmp_path / 'flags'}").values
    assert (values["steps"], values["scale"]) == (7, ("mup",))


@pytest.mark.parametrize("flag", ["out", "compilation_cache"])
def test_paths_begin_at_home(flag, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parsed(f"--{flag}=~/x").values[flag] == tmp_path / "x"


# --help ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("columns", "width"), [("40", 72), ("80", 80), ("300", 110)])
def test_help_follows_the_terminal(columns, width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", columns)
    assert main("--help") == 0
    longest = max(map(len, capsys.readouterr().out.splitlines()))
    assert width - 12 < longest <= width


def test_help_has_every_flag_once_below_a_heading_and_every_arm_and_task():
    page = help_page(view.command(train.run), 80)
    listed = re.findall(r"^  --(?:\[no\])?(\w+)  +\S", page, re.MULTILINE)
    assert sorted(listed) == sorted(
        ["flagfile", *(f.name for cls in SETTINGS for f in dataclasses.fields(cls))]
    )
    text = " ".join(page.split())
    assert "none (×1), sqrt (×1/√d_k), mup (×1/d_k)" in text
    assert all(re.search(rf"^  {task}  +\w", page, re.MULTILINE) for task in TASKS)
    assert "--scale=none,sqrt,0.2" in text
    assert text.count("python train.py --") == len(view.EXAMPLES) == 3


@pytest.mark.parametrize("example", view.EXAMPLES)
def test_the_examples_of_help_can_be_typed(example):
    assert resolve(parsed(*shlex.split(example)[2:]).pick(TrainConfig)).scale[0] == "none"


# Runs -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """The rows of a run of both arms."""
    folder = tmp_path_factory.mktemp("both") / "run"
    assert main(*TINY, f"--out={folder}", "--compilation_cache=off") == 0
    return (folder / "metrics.jsonl").read_text().splitlines()


def of_arm(rows, arm):
    return [row for row in rows if json.loads(row)["scale"] == arm]


def test_the_hint_of_one_arm_runs_the_other_as_pasted(tmp_path, monkeypatch, capsys, rows):
    monkeypatch.chdir(tmp_path)
    out = "--out=it's [red] :100: none"
    assert main(*TINY, "--scale=none", out, "--compilation_cache=off") == 0
    error = capsys.readouterr().err
    assert "it's [red] :100: none: reverse, 8 steps, 1 seed; none ×1\n" in error
    other, compare = (shlex.split(line) for line in error.splitlines()[-2:])
    assert (other[:2], compare[:4]) == (
        ["python", "train.py"],
        ["python", "-m", "experiments", "compare"],
    )
    assert main(*other[2:], "--nofigures", "--compilation_cache=off") == 0
    assert tools(["experiments", *compare[3:]]) == 0
    assert "none ×1 − sqrt ×1/√d_k" in capsys.readouterr().out
    # One arm alone writes the rows that it has beside another.
    for arm in ("none", "sqrt"):
        alone = (tmp_path / f"it's [red] :100: {arm}" / "metrics.jsonl").read_text().splitlines()
        assert alone == of_arm(rows, arm)


@pytest.mark.parametrize(
    ("scale", "folder", "other", "there"),
    [
        ("none", "runs/none", "sqrt", "runs/sqrt"),
        ("sqrt", "runs/wide-sqrt", "none", "runs/wide-none"),
        ("mup", "mine", "sqrt", "mine-sqrt"),
        ("none", "-none", "sqrt", "./-sqrt"),
        ("1/8", "a\tb", "sqrt", "'a\tb-sqrt'"),
    ],
)
def test_the_other_arm_has_a_folder_of_its_own(scale, folder, other, there):
    config = resolve(TrainConfig(scale=scale, clip_norm=2, d_k=8))
    train_again, compare = view.other_arm(config, Path(folder))
    assert train_again.startswith(f"python train.py --scale={other} ")
    assert "--clip_norm=2.0 --d_k=8 --out=" in train_again
    assert "optimizer" not in train_again
    assert compare.endswith(f" {there}")
    pasted = parsed(*shlex.split(train_again)[2:]).pick(TrainConfig)
    assert resolve(pasted) == dataclasses.replace(config, scale=(other,))


def test_default_folders_are_new_and_safe_and_go_if_nothing_begins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = resolve(TrainConfig(scale=("1/8", "power:-0.25"), d_k=8))
    with view.prepared(config, RecordOptions()) as first:
        with view.prepared(config, RecordOptions()) as second:
            (second.out / "config.json").touch()
        assert first.out.parent == second.out.parent == Path("runs")
        assert re.fullmatch(r"\d{8}-\d{6}-sort-1_8-power_-0.25(-2)?", second.out.name)
        assert first.out != second.out
    assert list(Path("runs").iterdir()) == [second.out]


def test_a_resume_takes_what_was_typed_over_what_is_stored(tmp_path, capsys):
    out = f"--out={tmp_path / 'run'}"
    assert main(*TINY, "--clip_norm=1", "--scale=none", out, "--compilation_cache=off") == 0
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    flags = ("--nofigures", "--compilation_cache=off")
    assert main("--resume", out, "--steps=12", *flags) == 0
    after = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert after[: len(before)] == before
    assert after.count(b"\n") == 12
    assert json.loads((tmp_path / "run" / "config.json").read_text())["clip_norm"] == 1.0
    capsys.readouterr()
    assert main("--resume", out, "--clip_norm=2", *flags) == 2
    assert "resume: clip_norm is 2.0, but" in capsys.readouterr().err


def test_every_lane_diverged_is_status_1(tmp_path, capsys):
    flags = ["--optimizer=sgd", "--learning_rate=1e25", f"--out={tmp_path / 'run'}"]
    assert main(*TINY, *flags, "--compilation_cache=off") == 1
    error = capsys.readouterr().err
    assert "diverged and frozen: none learning_rate=1e+25 seed=0 at step " in error
    assert "every lane diverged" in error


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_at_the_next_chunk_and_says_how_to_resume(
    command, tmp_path, number, status, rows
):
    process = command(*TINY[:1], "--steps=1000000", *TINY[2:], "--out=run")
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    process.send_signal(number)
    found, error = ended(process)
    assert found == status
    assert "go on with: python train.py --resume --out=run" in error
    assert "Traceback" not in error
    last = int(metrics.read_text().splitlines()[-1].split(",")[0].split(":")[1])
    assert (tmp_path / "run" / "checkpoints" / str(last + 1) / "manifest.json").is_file()
    # Another process, which compiled for itself, and another number of steps: the same bytes.
    written = metrics.read_text().splitlines()
    assert written[: len(rows)] == rows[: len(written)]


# Terminals ------------------------------------------------------------------------------------

IN_A_SHELL = {
    "a reader that leaves": "{train} {flags} 2>&1 | head -c 1; exit ${{PIPESTATUS[0]}}",
    "closed": "{train} {flags} <&- >&- 2>&-",
    "full": "{train} {flags} >/dev/full 2>/dev/full",
    "ascii": "PYTHONIOENCODING=ascii {train} {flags}",
    "old": "LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 {train} {flags}",
}


@pytest.mark.parametrize("name", IN_A_SHELL)
def test_whatever_the_terminal_does_the_run_is_written(name, tmp_path, cache, rows):
    folder = tmp_path / (":100:[red]" if name == "old" else "☃:100:[red]")
    train_py = shlex.join([sys.executable, str(ROOT / "train.py")])
    flags = shlex.join([*TINY, f"--out={folder}"])
    done = subprocess.run(
        ["bash", "-c", IN_A_SHELL[name].format(train=train_py, flags=flags)],
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        capture_output=True,
    )
    assert done.returncode == 0
    assert b"Traceback" not in done.stderr
    assert (folder / "metrics.jsonl").read_text().splitlines() == rows
    assert "none ×1" in (folder / "report.md").read_bytes().decode()
    assert (folder / "summary.json").exists()
    if name in ("ascii", "old"):
        assert b"?:100:[red], with report.md" in done.stderr.replace(b"/:100", b"/?:100")
        assert b"sqrt ?1/?d_k" in done.stdout


@pytest.mark.parametrize("ending", ["| true", ">&-", ">/dev/full", "2>&1 | head -1"])
def test_help_and_errors_end_quietly_and_with_their_own_status(ending, tmp_path):
    for flag, status in (("--help", 0), ("--lr=1", 2)):
        line = f"{sys.executable} {ROOT / 'train.py'} {flag} {ending}; exit ${{PIPESTATUS[0]}}"
        done = subprocess.run(["bash", "-c", line], capture_output=True, cwd=tmp_path)
        assert done.returncode == status
        assert b"Traceback" not in done.stderr and b"Error" not in done.stderr
