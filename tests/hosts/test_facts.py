"""What processes compare, and how a difference is named."""

import re
import shutil
from concurrent.futures import ThreadPoolExecutor

from moe_edge.convert.open import DEFAULT_MODEL
from moe_edge.core.checks import ConfigError
from moe_edge.hosts import facts
from moe_edge.hosts.facts import (
    checkpoint_digest,
    compare,
    device_facts,
    difference,
    program_facts,
)
from tests.hosts.test_link import Linked

OWN = {"out_dir"}
GIVEN = {"checkpoint": "default", "prompt": ["A"], "k": None, "out_dir": "here"}


def test_equal_starts_do_not_differ_and_paths_do_not_matter(tmp_path, monkeypatch):
    for name in "ab":
        (tmp_path / name).write_text("the same")
    first = program_facts(GIVEN | {"prompts": str(tmp_path / "a")}, OWN)
    other = GIVEN | {"out_dir": "there", "prompts": str(tmp_path / "b")}
    assert difference(1, program_facts(other, OWN), first) is None
    looked_up = GIVEN | {"prompts": "b", "data_dir": str(tmp_path)}
    assert difference(1, program_facts(looked_up, OWN | {"data_dir"}), first) is None
    (tmp_path / "b").write_text("another")
    line = difference(1, program_facts(other, OWN), first)
    assert line.startswith("process 1 differs from process 0 in flag --prompts: a fil")
    monkeypatch.setenv("XLA_FLAGS", "--one")
    line = difference(2, program_facts(GIVEN, OWN), program_facts(GIVEN, OWN))
    assert line is None
    monkeypatch.setenv("MOE_EDGE_PARTS", "3")
    line = difference(2, program_facts(GIVEN, OWN), first)
    assert line == (
        "process 2 differs from process 0 in environment MOE_EDGE_PARTS: 3, there "
        "not set; set it alike everywhere"
    )


def test_flag_that_differs_is_named():
    first = program_facts(GIVEN, OWN)
    assert difference(1, program_facts(GIVEN | {"k": 3}, OWN), first) == (
        "process 1 differs from process 0 in flag --k: 3, there None; give all "
        "processes the same flags"
    )
    line = difference(1, program_facts(GIVEN | {"prompt": ["B"]}, OWN), first)
    assert line.startswith("process 1 differs from process 0 in flag --prompt: ")


def test_version_and_kernels_that_differ_are_named(monkeypatch):
    first = program_facts(GIVEN, OWN)
    monkeypatch.setattr(facts, "source_digest", lambda: "abc")
    line = difference(1, program_facts(GIVEN, OWN), first)
    assert line.startswith("process 1 differs from process 0 in version of moe_edge: ")
    monkeypatch.undo()
    monkeypatch.setattr("moe_edge.kernels.native.identity", lambda: "other")
    line = difference(1, program_facts(GIVEN, OWN), first)
    assert "in version of the kernels: other, there" in line


def test_every_switch_between_forms_is_compared():
    found = set()
    for folder in ("kernels", "model"):
        for path in (facts.PACKAGE / folder).glob("*.py"):
            text = path.read_text()
            found |= {*re.findall(r'^VARIABLE\b.* = \(?"(\w+)"', text, re.M)}
    assert "MOE_EDGE_FILLED_ATTENTION" in found
    assert found <= {*facts.VARIABLES}


def test_checkpoint_is_compared_by_what_it_holds(tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(DEFAULT_MODEL, copy)
    assert checkpoint_digest(str(copy)) == checkpoint_digest("default")
    with (copy / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)[0]
        file.seek(-1, 2)
        file.write(bytes([last ^ 1]))
    assert checkpoint_digest(str(copy)) != checkpoint_digest("default")


def test_devices_are_counted_and_a_processor_named():
    assert device_facts()["devices"].startswith("4 x cpu (")


def test_all_processes_refuse_by_the_same_line(monkeypatch):
    linked = Linked(monkeypatch)
    given = [{"devices": kind} for kind in ("4 x A", "4 x A", "2 x B")]

    def one(number):
        try:
            compare(linked.links[number], given[number])
        except ConfigError as error:
            return str(error)

    with ThreadPoolExecutor(3) as pool:
        found = [*pool.map(one, range(3))]
        assert (
            found
            == [
                "process 2 differs from process 0 in devices: 2 x B, there 4 x A; all "
                "hosts of a run need the same devices"
            ]
            * 3
        )
        given = [{"devices": "4 x A"}] * 3
        assert [*pool.map(one, range(3))] == [None] * 3
    linked.end()
