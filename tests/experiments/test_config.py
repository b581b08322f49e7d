"""Settings: one way in for every type, resolved once, written and read back the same."""

import dataclasses
import json
import math
import pickle
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.config import (
    BEFORE,
    FORMAT,
    VERSION,
    LaneName,
    RecordOptions,
    RunConfig,
    TrainConfig,
    as_typed,
    from_json,
    resolve,
)
from experiments.runs.folder import stored_config, write_json
from experiments.settings import normalised

FIELDS = {field.name: field for field in dataclasses.fields(TrainConfig)}
# Another value than the default for every setting, together a run that can be.
OTHER: dict[str, Any] = {
    "scale": ("0.125", "power:-1/3", "learned", "fold"),
    "task": "recall",
    "steps": 7,
    "num_seeds": 3,
    "seed": 11,
    "optimizer": "sgd",
    "learning_rate": (0.1, 1 / 3),
    "warmup_steps": 5,
    "clip_norm": 0.1,
    "batch_size": 8,
    "sequence_length": 12,
    "vocab_size": 5,
    "d_model": 48,
    "d_k": 6,
    "d_v": 10,
    "d_ff": 20,
    "num_heads": 4,
    "num_layers": 3,
    "norm": "post",
    "dropout_rate": 0.1,
    "log_every": 2,
    "eval_every": 3,
    "eval_size": 16,
    "checkpoint_every": 9,
    "dtype": "bfloat16",
    "matmul_precision": "high",
    "vectorize_lanes": True,
    "batch_shards": 2,
    "attention": "streaming",
}


def test_every_setting_is_written_and_read_back_the_same(tmp_path):
    assert OTHER.keys() == FIELDS.keys()
    assert all(value != FIELDS[name].default for name, value in OTHER.items())
    apart: dict[str, Any] = {
        "vectorize_lanes": {"batch_shards": 1},
        "attention": {"dropout_rate": 0.0},
    }
    for name, value in OTHER.items():
        for changes in ({name: value}, OTHER | apart["vectorize_lanes"] | apart["attention"]):
            config = resolve(TrainConfig(**changes | apart.get(name, {})))
            write_json(tmp_path / "config.json", config.to_json())
            text = (tmp_path / "config.json").read_text()
            written = json.loads(text, parse_constant=pytest.fail)
            assert written == config.to_json()
            assert written.keys() == FIELDS.keys() | {"format", "version"}
            read = stored_config(tmp_path)
            assert read == config
            assert list(map(type, vars(read).values())) == list(map(type, vars(config).values()))
            assert getattr(read, name) == changes[name]


def test_what_is_run_leaves_nothing_open_and_resolves_to_itself():
    for typed in (TrainConfig(), TrainConfig(task="recall", optimizer="sgd", clip_norm=1)):
        config = resolve(typed)
        assert type(config) is RunConfig
        assert None not in vars(config).values()
        assert resolve(as_typed(config)) == resolve(config) == config
        assert pickle.loads(pickle.dumps(config)) == config
    assert resolve(TrainConfig()).clip_norm == math.inf
    assert resolve(dataclasses.replace(config, steps=3)).steps == 3
    with pytest.raises(ValueError, match="d_k: 0, must be a whole number from 1"):
        resolve(dataclasses.replace(config, d_k=0))


@pytest.mark.parametrize(
    ("typed", "resolved"),
    [
        ({"scale": "none"}, {"scale": ("none",)}),
        ({"scale": " none "}, {"scale": ("none",)}),
        ({"scale": 0.5}, {"scale": ("0.5",)}),
        ({"scale": np.float32(0.5)}, {"scale": ("0.5",)}),
        ({"scale": (0.5, 1.0)}, {"scale": ("0.5", "1.0")}),
        ({"scale": [0.5, "sqrt"]}, {"scale": ("0.5", "sqrt")}),
        ({"scale": np.array([0.5, 2])}, {"scale": ("0.5", "2.0")}),
        ({"scale": np.array(["none", "mup"])}, {"scale": ("none", "mup")}),
        ({"scale": 0}, {"scale": ("0.0",)}),
        ({"learning_rate": 0.01}, {"learning_rate": (0.01,)}),
        ({"learning_rate": 1}, {"learning_rate": (1.0,)}),
        ({"learning_rate": np.float64(0.01)}, {"learning_rate": (0.01,)}),
        ({"learning_rate": [1e-2, np.float64(1e-3)]}, {"learning_rate": (0.01, 0.001)}),
        ({"learning_rate": jnp.asarray([0.5, 0.25])}, {"learning_rate": (0.5, 0.25)}),
        ({"learning_rate": Fraction(1, 8)}, {"learning_rate": (0.125,)}),
        ({"d_k": np.int64(4)}, {"d_k": 4}),
        ({"d_k": np.uint8(4)}, {"d_k": 4}),
        ({"steps": jnp.int32(4)}, {"steps": 4}),
        ({"steps": np.array(4)}, {"steps": 4}),
        ({"clip_norm": np.int32(2)}, {"clip_norm": 2.0}),
        ({"dropout_rate": np.float16(0.5)}, {"dropout_rate": 0.5}),
        ({"vectorize_lanes": np.True_}, {"vectorize_lanes": True}),
        ({"task": np.str_("copy")}, {"task": "copy"}),
    ],
)
def test_what_means_the_same_is_the_same(typed: Any, resolved):
    config = resolve(TrainConfig(**typed))
    for name, value in resolved.items():
        found = getattr(config, name)
        assert found == value
        assert type(found) is type(value)
        if isinstance(value, tuple):
            assert list(map(type, found)) == list(map(type, value))
    assert json.loads(json.dumps(config.to_json(), allow_nan=False)) == config.to_json()


ANYTHING: Any = (
    *(None, "x", b"x", "", 1.5, -1, 10**400, float("nan"), 1j, True, object(), lambda: 0),
    *([1], [], [[1, 2], [3]], {}, {1}),
)


@pytest.mark.parametrize("name", FIELDS)
def test_a_wrong_type_is_one_line_that_names_the_field(name):
    right = type(OTHER[name])
    refused = 0
    for value in ANYTHING:
        try:
            found = getattr(resolve(TrainConfig(**{name: value})), name)
        except ValueError as error:
            assert str(error).startswith(f"{name}: "), f"{value!r}: {error}"
            assert "\n" not in str(error)
            refused += 1
        else:
            assert isinstance(found, right), repr(value)
    assert refused >= 10


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip_norm": "1"}, "clip_norm: '1', must be a number"),
        ({"task": None}, "task: None, must be a word"),
        ({"task": "srot"}, r"task: unknown 'srot' \(nearest: sort\); choose from sort, recall"),
        ({"d_k": 4.0}, "d_k: 4.0, must be a whole number"),
        ({"d_k": True}, "d_k: True, must be a whole number"),
        ({"steps": "10"}, "steps: '10', must be a whole number"),
        ({"learning_rate": "0.1"}, "learning_rate: '0.1', must be a comma list of numbers"),
        ({"learning_rate": [0.1, None]}, r"learning_rate: \[0.1, None\], must be"),
        ({"learning_rate": []}, "learning_rate: empty, give at least one"),
        ({"learning_rate": (1e-3, 1e-3)}, "learning_rate: 0.001 is given twice"),
        ({"learning_rate": 1e-300}, "learning_rate: 1e-300, must be a positive finite number"),
        ({"clip_norm": math.inf}, "clip_norm: inf, must be a positive finite number"),
        ({"scale": ()}, "scale: empty, give at least one"),
        ({"scale": "sqr"}, r"scale: unknown score rule 'sqr' \(nearest: sqrt\)"),
        ({"scale": math.nan}, "scale: a score rule that is a number must be finite, got 'nan'"),
        ({"scale": ("8", "8.0")}, "scale: 8.0 is given twice: it is the arm 8"),
        ({"scale": ("none", "1e0")}, "scale: 1e0 is given twice: it is the arm none"),
        ({"scale": ("power:0.5", "power:1/2")}, "scale: power:1/2 is given twice"),
        ({"scale": ("sqrt", "sqrt")}, "scale: sqrt is given twice$"),
        ({"scale": "1e38"}, r"scale: 1e38, must be at most 1e\+30 in size"),
        ({"vectorize_lanes": 1}, "vectorize_lanes: 1, must be true or false"),
        ({"seed": 2**31 - 1}, "seed: 2147483647 and num_seeds: 5 go past the last seed"),
        ({"d_model": 63}, "d_v: its default is d_model / num_heads, but 63 / 2"),
        ({"d_model": 2**14, "d_ff": 2**16, "num_layers": 9}, "one lane would need about .* GiB"),
    ],
)
def test_what_can_not_be_says_what_can(settings, message):
    with pytest.raises(ValueError, match=message) as error:
        resolve(TrainConfig(**settings))
    assert "\n" not in str(error.value)


def test_rates_that_differ_in_the_tenth_digit_are_different_lanes():
    config = resolve(TrainConfig(learning_rate=(0.001, 0.0010000001), scale="none", num_seeds=1))
    assert config.lane_names() == (LaneName("none", 0.001, 0), LaneName("none", 0.0010000001, 0))


def test_paths_are_expanded_or_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    right: Any = ("~/runs/a", Path("~/runs/a"))
    for typed in right:
        assert normalised(RecordOptions(out=typed)).out == tmp_path / "runs" / "a"
    wrong: Any = ("", "a\0b", "bad\udcff", "~nobody-here/x", 7, b"x")
    for typed in wrong:
        with pytest.raises(ValueError, match=r"^out: .*, must be a path"):
            normalised(RecordOptions(out=typed))


# Stored settings


def test_a_setting_that_an_earlier_version_lacked_has_the_value_that_it_then_had():
    settings = resolve(TrainConfig()).to_json()
    for name in ("format", "version", *BEFORE):
        del settings[name]
    config = from_json(settings)
    assert {name: getattr(config, name) for name in BEFORE} == BEFORE
    assert config == resolve(TrainConfig())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"flux": 1}, f"flux is not a setting .* by {VERSION}, format {FORMAT}; this is {VERSION}"),
        (
            {"flux": 1, "format": 9, "version": "3.1"},
            f"flux is not a setting .* by 3.1, format 9; this is {VERSION}, format {FORMAT}",
        ),
        ({"format": 3, "version": "3.1"}, f"by 3.1, format 3; this is {VERSION}, format {FORMAT}"),
        ({"format": "two"}, "format two; this is"),
        ({"format": None}, "format None; this is"),
    ],
)
def test_another_version_is_named_and_not_called_damaged(changes, message):
    with pytest.raises(ValueError, match=message) as error:
        from_json(resolve(TrainConfig()).to_json() | changes)
    assert "damaged" not in str(error.value)


def test_a_setting_that_every_version_had_must_be_there():
    settings = resolve(TrainConfig()).to_json()
    del settings["d_k"]
    with pytest.raises(ValueError, match="d_k is missing"):
        from_json(settings)
