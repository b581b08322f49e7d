"""Files of a run folder: strict JSON, in one piece, and what is wrong with one in one line."""

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.runs.folder import (
    RunFolderError,
    disk_errors_named,
    read_json,
    stored_config,
    write_json,
    write_text,
)


def test_strict_json_takes_numpy_and_jax_values(tmp_path):
    content = {"loss": np.float32(np.nan), "accuracy": jnp.float32(0.5), "n": np.int64(3)}
    more = {"list": (np.float64(np.inf), 1, [-math.inf]), "array": np.arange(2), 7: "name"}
    write_json(tmp_path / "x.json", content | more)
    text = (tmp_path / "x.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {
        "loss": None,
        "accuracy": 0.5,
        "n": 3,
        "list": [None, 1, [None]],
        "array": [0, 1],
        "7": "name",
    }
    assert list(tmp_path.iterdir()) == [tmp_path / "x.json"]


def test_text_is_utf8_and_replaced_in_one_piece(tmp_path):
    path = tmp_path / "x"
    write_text(path, "×1/√d_k")
    assert path.read_bytes() == "×1/√d_k".encode()

    class Unwritable(str):
        def encode(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_text(path, Unwritable("y"))
    assert path.read_bytes() == "×1/√d_k".encode()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "can't be read: Expecting value"),
        (b"[]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b"\xff\xfe{", "can't be read"),
        (b'{"a":' * 10**5, "can't be read"),
        (b"[" * 10**5, "can't be read"),
    ],
)
def test_what_is_no_json_object_is_one_line(tmp_path, content, message):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(RunFolderError, match=message) as error:
        read_json(tmp_path / "config.json")
    assert "config.json" in str(error.value) and "\n" not in str(error.value)


def test_what_is_no_file_is_one_line(tmp_path):
    with pytest.raises(RunFolderError, match=r"has no config.json: not a run folder"):
        stored_config(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(RunFolderError, match=r"config.json can't be read: .*Is a directory"):
        stored_config(tmp_path)
    (tmp_path / "config.json").rmdir()
    (tmp_path / "config.json").symlink_to("config.json")
    with pytest.raises(RunFolderError, match="symbolic links"):
        stored_config(tmp_path)


def test_settings_that_can_not_be_name_the_file_and_the_setting(tiny_run, tmp_path):
    settings = read_json(tiny_run / "config.json")
    for name, value, message in (
        ("d_k", "wide", "d_k: 'wide', must be a whole number"),
        ("d_k", None, "d_k: None, must be a whole number"),
        ("steps", [], r"steps: \[\], must be"),
        ("task", {"a": 1}, "task: .* must be a word"),
        ("scale", ["none", "none"], "scale: none is given twice"),
    ):
        write_json(tmp_path / "config.json", settings | {name: value})
        with pytest.raises(RunFolderError, match=message) as error:
            stored_config(tmp_path)
        assert str(error.value).startswith(str(tmp_path / "config.json"))


def test_an_error_of_the_disk_gets_a_name_unless_it_has_one(tmp_path):
    for raised, named in ((None, str(tmp_path)), ("/elsewhere", "/elsewhere")):
        with pytest.raises(OSError, match="No space") as error, disk_errors_named(tmp_path):
            raise OSError(28, "No space left on device", raised)
        assert error.value.filename == named
