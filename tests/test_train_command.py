"""The command line: what it takes, what it refuses in one line, what it leaves behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import train
from experiments.commands.flags import parse
from experiments.config import RecordOptions, TrainConfig, resolve

ROOT = Path(__file__).parent.parent
TINY = [
    "--task=reverse", "--steps=8", "--num_seeds=1", "--batch_size=4", "--sequence_length=8",
    "--vocab_size=4", "--d_model=16", "--d_k=8", "--d_ff=16", "--eval_every=4", "--eval_size=8",
    "--checkpoint_every=4", "--nofigures",
]  # fmt: skip


def parsed(*flags):
    found = parse(["train.py", *flags], TrainConfig, RecordOptions)
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

    def run(*flags, **kwargs):
        environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
        return subprocess.Popen(
            [sys.executable, str(ROOT / "train.py"), *flags],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **kwargs,
        )

    return run


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--scale=sqr"], r"unknown score rule 'sqr' (nearest: sqrt); choose from none (×1), sqrt"),
        (["--scale="], "scale: empty, give a value"),
        (["--scale=none,none"], "scale: none is given twice"),
        (["--scale=none,"], "unknown score rule ''"),
        (["--scale=nan"], "must be finite, got 'nan'"),
        (["--task=srt"], "task: unknown 'srt' (nearest: sort); choose from sort, recall"),
        (["--steps=abc"], "steps: 'abc', must be a whole number"),
        (["--steps=0"], "steps: 0, must be a whole number from 1"),
        (["--steps=1e3"], "steps: '1e3', must be a whole number"),
        (["--learning_rate=1e-3,nan"], "learning_rate: nan, must be a positive finite number"),
        (["--learning_rate=-1"], "learning_rate: -1.0, must be a positive finite number"),
        (["--learning_rate=1e-3,0.001"], "learning_rate: 0.001 is given twice"),
        (["--dropout_rate=1"], "dropout_rate: 1.0, must be in [0, 1)"),
        (["--clip_norm=0"], "clip_norm: 0.0, must be a positive finite number"),
        (["--optimizer=adm"], "optimizer: unknown 'adm' (nearest: adam)"),
        (["--d_model=10", "--num_heads=3"], "d_v: its default is d_model / num_heads"),
        (["--seed=-1"], "seed: -1, must be a whole number from 0"),
        (["--seed=2147483647", "--num_seeds=2"], "go past the last seed"),
        (["--batch_size=60000", "--sequence_length=60000"], "one lane would need about"),
        (["--resume", "False"], "stray word 'False': flags are written --name=value; a switch"),
        (["sort"], "stray word 'sort'"),
        (["--tsak=sort"], "Unknown command line flag 'tsak'"),
        (["--resume"], "resume: say which run, with --out=RUN"),
        (["--resume", "--out=nowhere"], "not a run folder"),
        (["--out="], "out: empty"),
        (["--task=recall", "--vocab_size=2", "--sequence_length=1"], "sequence_length"),
        (["--task=\N{SNOWMAN}"], "task: unknown '\N{SNOWMAN}'"),
    ],
)
def test_bad_input_is_one_line_status_2_and_no_folder(
    flags, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_:
        main(*flags)
    captured = capsys.readouterr()
    assert exit_.value.code == 2
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("train.py: ")
    assert message in captured.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "resume"),
    [(["--resume=False"], False), (["--noresume"], False), (["--resume"], True)],
)
def test_switches(flags, resume):
    assert parsed(*flags).values["resume"] is resume
    assert parsed(*flags).given == {"resume"}


def test_zero_is_a_scale_and_flags_are_the_settings():
    flags = ("--scale=0.0,none", "--d_v=5", "--learning_rate=1e-2,1")
    config = parsed(*flags).pick(TrainConfig)
    assert [rule.multiplier for rule in config.rules()] == [0.0, 1.0]
    assert (config.d_v, config.learning_rate) == (5, (0.01, 1.0))
    assert resolve(TrainConfig()) == resolve(parsed().pick(TrainConfig))


def test_flags_can_come_from_a_file(tmp_path):
    (tmp_path / "flags").write_text("--steps=7\n--scale=mup\n")
    values = parsed(f"--flagfile={tmp_path / 'flags'}").values
    assert (values["steps"], values["scale"]) == (7, ("mup",))


def test_help_names_every_setting(capsys):
    assert main("--help") == 0
    text = capsys.readouterr().out
    assert all(name in text for name in vars(TrainConfig()))
    assert "none (×1), sqrt (×1/√d_k), mup (×1/d_k)" in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """The rows of a run of both arms."""
    folder = tmp_path_factory.mktemp("both") / "run"
    assert main(*TINY, f"--out={folder}", "--compilation_cache=off") == 0
    return (folder / "metrics.jsonl").read_text().splitlines()


def test_main_runs_twice_in_one_process_and_says_how_to_go_on(tmp_path, capsys, rows):
    for arm in ("none", "sqrt"):
        out = f"--out={tmp_path / arm}"
        assert main(*TINY, f"--scale={arm}", out, "--compilation_cache=off") == 0
        assert "python -m experiments compare" in capsys.readouterr().err
    # One arm alone writes the rows that it has beside another.
    for arm in ("none", "sqrt"):
        alone = (tmp_path / arm / "metrics.jsonl").read_text().splitlines()
        assert alone == [row for row in rows if json.loads(row)["scale"] == arm]


def test_every_lane_diverged_is_status_1(tmp_path, capsys):
    flags = ["--optimizer=sgd", "--learning_rate=1e25", f"--out={tmp_path / 'run'}"]
    assert main(*TINY, *flags, "--compilation_cache=off") == 1
    error = capsys.readouterr().err
    assert "diverged" in error
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
    _, error = process.communicate(timeout=60)
    assert process.returncode == status
    assert "go on with: python train.py --resume --out=run" in error
    assert "Traceback" not in error
    last = int(metrics.read_text().splitlines()[-1].split(",")[0].split(":")[1])
    assert (tmp_path / "run" / "checkpoints" / str(last + 1) / "manifest.json").is_file()
    # Another process, which compiled for itself, and another number of steps: the same bytes.
    written = metrics.read_text().splitlines()
    assert written[: len(rows)] == rows[: len(written)]


@pytest.mark.parametrize(("flag", "status"), [("--scale=sqr", 2), ("--help", 0)])
def test_help_and_usage_errors_start_no_backend(command, monkeypatch, flag, status):
    monkeypatch.setenv("JAX_PLATFORMS", "no_such_platform")  # starting it would fail
    process = command(flag)
    _, error = process.communicate(timeout=60)
    assert process.returncode == status
    assert error.count("\n") == (status != 0)
