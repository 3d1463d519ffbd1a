"""One order of a layer, read from the source: nobody reaches through its owner."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "moe_edge"
OWNERS = {"manager", "layer_step"}


def reached_through(source: str) -> list[int]:
    """Lines with `owner.x.y`, the owner a name or an attribute of anything."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute):
            owner = node.value.value
            name = getattr(owner, "attr", getattr(owner, "id", ""))
            if name.lstrip("_") in OWNERS:
                found.append(node.lineno)
    return found


@pytest.mark.parametrize(
    "line, is_through",
    [
        ("engine.layer_step.queue.poll()", True),
        ("self._layer_step.cache.policy", True),
        ("manager.queue.link = other", True),
        ("layer_step.drain()", False),
        ("cache = layer_step.cache; cache.fits", False),
        ("layer_step.counters[True].hits", False),
    ],
)
def test_the_search_finds_what_it_looks_for(line, is_through):
    assert bool(reached_through(line)) == is_through


def test_nobody_reaches_through_the_layer_step():
    found = {
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in PACKAGE.rglob("*.py")
        for line in reached_through(path.read_text("utf-8"))
    }
    assert found == set()


def test_the_layer_step_is_short_and_its_record_does_not_know_it():
    offload = PACKAGE / "offload"
    step = (offload / "layer_step.py").read_text("utf-8")
    assert step.count("\n") <= 250
    assert "layer_step import" not in (offload / "layer_visit.py").read_text("utf-8")
