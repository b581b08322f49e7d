"""The rules of the house, read from the source: what may import what, late imports included."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in ("attention", "experiments")
    for path in sorted((ROOT / package).rglob("*.py"))
} | {"train": ROOT / "train.py"}


def imports(module: str, *, typing: bool = False) -> set[str]:
    """Modules that a module names in imports anywhere, but (as a rule) under TYPE_CHECKING."""
    tree = ast.parse(FILES[module].read_text(encoding="utf-8"))
    hidden = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for node in ast.walk(block)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in hidden and not typing:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in FILES else node.module for name in inside}
    return found - {module}


def room(module: str) -> str:
    """The folder of experiments/ that a module lies in, or the module itself."""
    return ".".join(module.split(".")[:2])


def test_every_room_was_found():
    assert {"attention.dot_product", "experiments.engine.lanes", "experiments.config"} <= set(FILES)
    assert "experiments.config" in imports("experiments.engine.lanes")


def test_there_are_no_import_cycles_not_even_late_ones():
    graph = {module: imports(module) & FILES.keys() for module in FILES}
    order: list[str] = []
    left = dict(graph)
    while free := [m for m, needs in left.items() if not needs & left.keys()]:
        order += free
        for module in free:
            del left[module]
    assert not left, f"in cycles, or above one: {sorted(left)}"


def test_attention_imports_nothing_of_experiments():
    found = {m: imports(m) for m in FILES if m.startswith("attention")}
    assert not {m for m, names in found.items() if any(n.startswith("experiments") for n in names)}


def test_only_the_transformer_imports_flax():
    found = {m for m in FILES if any(n.split(".")[0] == "flax" for n in imports(m))}
    assert found == {"attention.transformer"}


def test_only_commands_know_flags_and_nothing_below_imports_them():
    knowing = {m for m in FILES if any(n.split(".")[0] == "absl" for n in imports(m))}
    assert {room(m) for m in knowing} == {"experiments.commands"}
    importing = {m for m in FILES if any(room(n) == "experiments.commands" for n in imports(m))}
    assert {room(m) for m in importing} <= {"experiments.commands", "experiments.__main__", "train"}


@pytest.mark.parametrize(
    ("lower", "upper"),
    [
        ("experiments.engine", {"runs", "analysis", "figures", "commands", "studies"}),
        ("experiments.runs", {"analysis", "figures", "commands", "studies"}),
        ("experiments.analysis", {"engine", "figures", "commands", "studies"}),
        ("experiments.figures", {"commands", "studies"}),
        ("experiments.tasks", {"engine", "runs", "analysis", "figures", "commands", "studies"}),
    ],
)
def test_data_flows_one_way(lower, upper):
    reaching = {
        (m, name)
        for m in FILES
        if room(m) == lower
        for name in imports(m)
        if room(name) in {f"experiments.{name}" for name in upper}
    }
    assert not reaching


def test_only_the_attention_maps_need_jax_among_what_reads():
    def needs_jax(module: str, seen: frozenset[str] = frozenset()) -> bool:
        if module == "attention.scale":  # its hooks do, once they are called
            return False
        names = imports(module)
        if any(name.split(".")[0] in ("jax", "optax", "flax") for name in names):
            return True
        return any(needs_jax(n, seen | {module}) for n in names & FILES.keys() - seen)

    reading = {m for m in FILES if room(m) in ("experiments.analysis", "experiments.figures")}
    late = {"experiments.figures.attention_maps", "experiments.figures.draw"}  # the maps, last
    reading |= {"experiments.config", "experiments.arms", "experiments.metrics"}
    assert {m for m in reading if needs_jax(m)} <= late
