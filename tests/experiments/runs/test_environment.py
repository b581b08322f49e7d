"""What a run depends on besides its settings: recorded, and compared when it goes on."""

import json
import os
import shutil
import subprocess

import pytest

from experiments.runs import environment
from experiments.runs.folder import ENVIRONMENT, RunFolderError, read_json, write_json


def edit(folder, change):
    path = folder / ENVIRONMENT
    content = read_json(path)
    change(content)
    write_json(path, content)


def test_resuming_elsewhere_warns_where_only_the_last_bits_are_at_stake(tiny, run_folder, go):
    def elsewhere(content):
        content["thread_pool_size"] = 99
        content["versions"]["jax"] = "0.0.1"
        content["git_revision"] = "0" * 40

    edit(run_folder, elsewhere)
    lines = []
    go(tiny, run_folder, resume=True, say=lines.append)
    assert any(line.startswith("warning: thread_pool_size was 99 and is now") for line in lines)
    assert any("versions" in line and "0.0.1" in line for line in lines)
    assert any(line.startswith(f"warning: git_revision was {'0' * 40}") for line in lines)
    assert not any("\n" in line for line in lines)


@pytest.mark.parametrize("what", ["weights", "data"])
def test_resuming_with_a_source_that_draws_otherwise_is_refused(tiny, run_folder, go, what):
    edit(run_folder, lambda content: content["digests"]["1"].update({what: "0" * 64}))
    before = {path: path.read_bytes() for path in run_folder.rglob("*") if path.is_file()}
    with pytest.raises(RunFolderError, match=f"began with other {what} for seed 1 than this"):
        go(tiny, run_folder, resume=True)
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize(
    "damage", [os.unlink, lambda path: path.write_text('{"versions":'), lambda p: p.write_text("")]
)
def test_a_lost_environment_is_made_again(tiny, tiny_run, run_folder, go, damage):
    damage(run_folder / ENVIRONMENT)
    go(tiny, run_folder, resume=True)
    made, before = (read_json(folder / ENVIRONMENT) for folder in (run_folder, tiny_run))
    assert made["digests"] == before["digests"]


def test_an_environment_of_an_earlier_version_is_no_other_one(tiny, run_folder, go):
    def earlier(content):
        del content["cpu"], content["thread_pool_size"], content["digests"]
        content["git_revision"] = environment.git_revision()

    edit(run_folder, earlier)
    go(tiny, run_folder, resume=True, say=pytest.fail)


def test_everything_that_decides_bits_is_recorded(tiny_run):
    content = json.loads((tiny_run / ENVIRONMENT).read_text(), parse_constant=pytest.fail)
    assert set(environment.BIT_SETTINGS) < content.keys()
    assert content["matmul_precision"] == "highest"
    assert content["versions"].keys() > {"python", "jax", "jaxlib", "numpy"}


def test_the_revision_is_that_of_this_source_and_of_no_other_repository(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ["-c", "user.name=x", "-c", "user.email=x@example.com"]
        subprocess.run(["git", *identity, "-C", str(tmp_path), *arguments], check=True)

    def module(folder):
        file = folder / "experiments" / "runs" / "environment.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
        return str(file)

    monkeypatch.setattr(environment, "__file__", module(tmp_path / "site-packages"))
    assert environment.git_revision() is None
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message=theirs")
    assert environment.git_revision() is None  # it merely lies in there
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path))
    assert environment.git_revision() is None

    monkeypatch.setattr(environment, "__file__", module(tmp_path))
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    clean = environment.git_revision()
    assert clean is not None and len(clean) == 40
    (tmp_path / "site-packages" / "experiments" / "runs" / "environment.py").write_text("x")
    assert environment.git_revision() == f"{clean}+"
    shutil.rmtree(tmp_path / ".git")
    assert environment.git_revision() is None
