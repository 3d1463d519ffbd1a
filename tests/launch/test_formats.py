"""docs/formats.md: every example is read by the reader that the commands use."""

import re
from pathlib import Path

import numpy as np
import pytest

from moe_edge.core.json_reader import json_objects
from moe_edge.engine.prompts import read_prompts
from moe_edge.evaluate.multiple_choice import read_questions
from moe_edge.hardware.presets import read_machine
from moe_edge.hardware.step_costs import read_step_costs
from moe_edge.papers.coserve.coe.profile import read_profile
from moe_edge.papers.coserve.workload.coe_graph import read_graph
from moe_edge.papers.coserve.workload.coe_tasks import read_requests
from moe_edge.place.plan import Placement
from moe_edge.place.statistics import read_statistics
from moe_edge.workload.arrivals import read_arrivals, read_prefix_blocks
from moe_edge.workload.trace_reader import read_trace
from tests.support.doc_blocks import blocks

PAGE = Path(__file__).parents[2] / "docs/formats.md"
_EXAMPLE = re.compile(r"<!-- read by: (\w+) -->\n```\w+\n(.*?)^```", re.S | re.M)
EXAMPLES = _EXAMPLE.findall(PAGE.read_text(encoding="utf-8"))


def placement(path: Path):
    np.save(path.with_suffix(".npy"), np.array([[[1, 1, 0, 0]], [[0, 0, 1, 1]]], bool))
    return Placement.load(path.with_suffix("")).gpu_NLE[1, 0].tolist() == [-1, -1, 0, 1]


# What the example is read by -> (ending of the file, what reading it must give).
READERS = {
    "prompts": (".jsonl", lambda path: read_prompts(path)[0].id == "greeting"),
    "questions": (".jsonl", lambda path: len(read_questions([path])[0].choices) == 2),
    "trace": (".csv", lambda path: read_trace(path).ids_TK.tolist() == [[5, 39]]),
    "statistics": (".jsonl", lambda path: read_statistics(path, ["code"]).top_k == 2),
    "placement": (".json", placement),
    "machine": (
        ".json",
        lambda path: (
            read_step_costs(path).decode(1, 8) == 0.001
            and read_machine(path).device.name == "my_box"
        ),
    ),
    "arrivals": (
        ".csv",
        lambda path: read_arrivals(path)[1].tolist()[1:] == [396, 109],
    ),
    "prefixes": (".jsonl", lambda path: read_prefix_blocks(path, 1) == [(0, 1, 2)]),
    "graph": (".json", lambda path: read_graph(path).follow == {0: 1}),
    "coe_requests": (".jsonl", lambda path: read_requests(path)[0].component == "R1"),
    "coe_profile": (
        ".json",
        lambda path: read_profile(path)["cpu"]["board_resnet"].max_batch == 16,
    ),
    "json": (".jsonl", lambda path: len([*json_objects(path)]) == 1),
}
# Read by a command: name -> its command line.
COMMANDS = {
    "gin": ("generate", "--prompt", "One", "--device_memory", "25%"),
    "cluster_gin": ("place_experts",),
}


@pytest.mark.parametrize("name, text", EXAMPLES, ids=[name for name, _ in EXAMPLES])
def test_example_is_read(name, text, tmp_path, run_script):
    if name in COMMANDS:
        (tmp_path / "example.gin").write_text(text, encoding="utf-8")
        done = run_script(*COMMANDS[name], "--gin_file", "example.gin", "--dry_run")
        assert done.summary["dry_run"]
        return
    ending, is_read = READERS[name]
    path = tmp_path / f"example{ending}"
    path.write_text(text, encoding="utf-8")
    assert is_read(path)


def test_every_example_names_its_reader():
    unnamed = [block.line for block in blocks(PAGE) if block.language == "json"]
    assert len(unnamed) < len(EXAMPLES)
    assert {name for name, _ in EXAMPLES} == {*READERS, *COMMANDS}
    text = re.sub(_EXAMPLE, "", PAGE.read_text(encoding="utf-8"))
    assert "```json" not in text
