"""What `pip install` will find, read from the files that it reads; nothing is built or fetched."""

import ast
import importlib
import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

import pytest
import setuptools

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
PACKAGES = ("attention", "experiments")
PIN = re.compile(r"([A-Za-z0-9-]+)==[0-9][0-9.]*")


def requirement_files():
    """The files that pyproject.toml takes dependencies from: those of all, then of each extra."""
    dynamic = PYPROJECT["tool"]["setuptools"]["dynamic"]
    tables = [dynamic["dependencies"], *dynamic["optional-dependencies"].values()]
    return [name for table in tables for name in table["file"]]


def pinned(name):
    lines = (ROOT / name).read_text("utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_versions_are_one_list():
    assert {path.name for path in ROOT.glob("requirements*.txt")} == set(requirement_files())
    assert set(PYPROJECT["project"]["dynamic"]) == {"dependencies", "optional-dependencies"}
    lines = [line for name in requirement_files() for line in pinned(name)]
    # Nothing but plain pins: setuptools takes no options, such as -r, from these files.
    assert [line for line in lines if not PIN.fullmatch(line)] == []
    names = [line.partition("==")[0] for line in lines]
    assert len(names) == len(set(names))
    for other in ("pyproject.toml", "Makefile", ".ci/run"):
        assert PIN.search((ROOT / other).read_text("utf-8")) is None, other


def imported(path):
    """The top-level names of all modules that a file imports, late imports included."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]


def test_what_is_imported_is_required():
    required = {line.partition("==")[0].lower() for line in pinned("requirements.txt")}
    distributions = importlib.metadata.packages_distributions()
    for path in (path for name in PACKAGES for path in (ROOT / name).rglob("*.py")):
        for module in set(imported(path)) - sys.stdlib_module_names - set(PACKAGES):
            owners = {owner.lower() for owner in distributions.get(module, [])}
            assert owners & required, f"{path} imports {module}"


def test_every_folder_with_code_is_a_package_that_is_found():
    find = PYPROJECT["tool"]["setuptools"]["packages"]["find"]
    assert find["namespaces"] is False  # so that what follows is what setuptools does
    found = setuptools.find_packages(str(ROOT), include=find["include"])
    folders = {path.parent for name in PACKAGES for path in (ROOT / name).rglob("*.py")}
    assert sorted(found) == sorted(".".join(f.relative_to(ROOT).parts) for f in folders)


@pytest.mark.parametrize("name", PACKAGES)
def test_public_names_are_listed_and_typed(name):
    package = importlib.import_module(name)
    assert dir(package) == sorted(package.__all__)
    assert all(getattr(package, public) is not None for public in dir(package))
    assert "py.typed" in PYPROJECT["tool"]["setuptools"]["package-data"][name]
    assert (ROOT / name / "py.typed").is_file()


def test_version_and_licence_are_the_same_everywhere():
    project = PYPROJECT["project"]
    cited = dict(re.findall(r"^([\w-]+): (.+)$", (ROOT / "CITATION.cff").read_text("utf-8"), re.M))
    assert cited["version"] == project["version"]
    assert cited["license"] == project["license"]
    newest = re.search(r"^## (\S+) \((\S+)\)$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M)
    assert newest and newest.groups() == (project["version"], cited["date-released"])
    assert project["license-files"] == ["LICENSE"]
    assert f"SPDX-License-Identifier: {project['license']}" in (ROOT / "LICENSE").read_text("utf-8")
