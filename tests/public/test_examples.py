"""Every public name has an example in its docstring, and the examples run."""

import doctest
import inspect
import subprocess
import sys

import numpy
import pandas
import pytest

import moe_edge as me
from moe_edge.public.running import Running

# `compare` starts a process for its resident row.
SLOW = {"compare", "plot"}
# Their examples are those of the package's own docstring: policies of one's own.
BASES = {"Eviction", "Predictor", "Route"}
# What they change is the process's: their examples run in one of their own.
ALONE = {"run_inline", "register"}
NAMES = [
    pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name
    for name in me.__all__
    if name not in BASES | ALONE
]


@pytest.fixture(scope="module")
def model():
    return me.load("default")


@pytest.fixture(scope="module")
def engine(model):
    with model.offload("25%") as engine:
        yield engine


def examples_of(name: str, found) -> list[doctest.DocTest]:
    """Of a docstring, and of a class's methods, inherited ones of ours too."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    tests = finder.find(found, name, module=False, globs={})
    if found is me.Engine:
        tests += finder.find(Running, name, module=False, globs={})
    return [test for test in tests if test.examples]


def run(tests, **names) -> None:
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    said: list[str] = []
    for test in tests:
        test.globs = {"me": me, "numpy": numpy, "pandas": pandas} | names
        runner.run(test, out=said.append)
    assert runner.failures == 0 and runner.tries, "".join(said)


@pytest.mark.parametrize("name", NAMES)
def test_examples_of_a_public_name_run(name, model, engine, tmp_path):
    tests = examples_of(name, getattr(me, name))
    assert tests, f"{name} has no example in its docstring"
    engine.reset()
    run(tests, model=model, engine=engine, folder=tmp_path)


def test_examples_of_own_policies_run(model):
    (test,) = examples_of("moe_edge", me)[:1]
    assert all(f"(me.{name})" in me.__doc__ for name in BASES)
    run([test], model=model)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ALONE & {*me.__all__}))
def test_example_runs_in_a_fresh_process(name):
    code = (
        "import doctest, sys, moe_edge as me; name = sys.argv[1]; "
        "doctest.run_docstring_examples(getattr(me, name), {'me': me}, name=name); "
        "print(len(doctest.DocTestFinder().find(getattr(me, name))[0].examples) > 1)"
    )
    command = [sys.executable, "-c", code, name]
    done = subprocess.run(command, check=True, timeout=300, capture_output=True)
    assert done.stdout == b"True\n"  # doctest prints what differs


def members(kind: type):
    for name, found in inspect.getmembers(kind):
        if not name.startswith("_"):
            yield name, found


def test_every_public_thing_says_what_it_takes_and_raises():
    """A docstring names each parameter; a function or method its errors."""
    functions = {name: getattr(me, name) for name in me.__all__}
    kinds = {n: f for n, f in functions.items() if inspect.isclass(f)}
    for kind in ("Model", "Engine"):
        functions |= {
            f"{kind}.{name}": found
            for name, found in members(kinds[kind])
            if inspect.isfunction(found)
        }
    for name, found in functions.items():
        assert inspect.getdoc(found), name
        if inspect.isclass(found) or name in ("Engine.close", "Engine.reset"):
            continue
        doc = inspect.getdoc(found)
        taken = [p for p in inspect.signature(found).parameters if p != "self"]
        taken = [p for p in taken if p not in ("unknown", "options", "asked")]
        if "Args: as" not in doc:
            for parameter in taken:
                assert f"{parameter}:" in doc or f"{parameter}," in doc, (
                    name,
                    parameter,
                )
        assert "Raises:" in doc or name == "Engine.stats", name
    for kind in ("Model", "Engine"):
        for name, found in members(kinds[kind]):
            assert inspect.getdoc(found) or not callable(found), f"{kind}.{name}"
