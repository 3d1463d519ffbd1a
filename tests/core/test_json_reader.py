"""The reader of JSON: its refusals, and that nothing is read past it."""

import ast
import json
from pathlib import Path

import pytest

from moe_edge.core.checks import CheckpointError, ConfigError, RequestError
from moe_edge.core.json_reader import (
    MAX_DEPTH,
    as_read_back,
    json_lines,
    json_objects,
    parse_json,
    read_json,
)

ROOT = Path(__file__).parents[2]
READER = ROOT / "moe_edge" / "core" / "json_reader.py"
NESTED = "[" * 100_000 + "]" * 100_000


def nested(depth: int) -> str:
    return '{"a":[' * (depth // 2) + "]}" * (depth // 2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "Expecting value at column 1"),
        ('{"a": 1,\n "b": }', "Expecting value at line 2, column 7"),
        ('{"a": 1} x', "Extra data at column 10"),
        ('{"a": [1, 2', "Expecting ',' delimiter at column 12"),
        ('{"a": 1, "a": 1}', "'a' occurs twice in an object; leave one of them"),
        ('{"a": NaN}', "NaN is no JSON number"),
        ("[-Infinity]", "-Infinity is no JSON number"),
        ("[1e999]", "the number 1e999 is too large"),
        ("1" * 5000, "a number has too many digits"),
        ('{"a": [-1' + "0" * 309 + "]}", "a number has too many digits"),
        ('["\\ud83d"]', r"half a character, \ud83d"),
        ("\ufeff{}", "Unexpected UTF-8 BOM"),
        (NESTED, f"lists and objects are nested deeper than {MAX_DEPTH}"),
        (nested(MAX_DEPTH + 2), f"nested deeper than {MAX_DEPTH}"),
    ],
)
def test_text_that_is_refused(content, message):
    with pytest.raises(RequestError) as caught:
        parse_json("x.json", content, RequestError)
    text = str(caught.value)
    assert text.startswith("x.json is not valid JSON: ") and message in text
    assert "\n" not in text and len(text) < 200


def test_text_that_is_read():
    assert parse_json("x", b'{"a": [1, 2.5, null, "\\ud83e\\udd8a"]}') == {
        "a": [1, 2.5, None, "🦊"]
    }
    assert parse_json("x", nested(MAX_DEPTH)) is not None
    assert parse_json("x", f'["{"1" * 400}", {10**300}]') == ["1" * 400, 10**300]
    for scalar in ("1", "null", '"a"'):
        assert parse_json("x", scalar, max_depth=0) == json.loads(scalar)


def test_what_python_writes_is_read_where_it_is_expected():
    assert parse_json("x", json.dumps("caf\udce9"), strict=False) == "caf\udce9"
    assert parse_json("x", "[Infinity, 1e999]", strict=False) == [float("inf")] * 2
    with pytest.raises(ConfigError, match="'a' occurs twice"):
        parse_json("x", '{"a": 1, "a": 2}', strict=False)


def test_file_that_cannot_be_read_is_refused(tmp_path):
    path = tmp_path / "x.json"
    with pytest.raises(CheckpointError, match=f"cannot read {path}: No such file or d"):
        read_json(path, CheckpointError)
    with pytest.raises(CheckpointError, match=f"{tmp_path} is a folder, expected a JS"):
        read_json(tmp_path, CheckpointError)
    path.write_text("[1, 2]")
    assert read_json(path, max_bytes=6) == [1, 2]
    with pytest.raises(ConfigError, match=f"{path} has 6 bytes, expected at most 5"):
        read_json(path, max_bytes=5)
    path.write_bytes('["é"]'.encode("latin-1"))
    with pytest.raises(ConfigError, match="x.json is not UTF-8 text: byte 2 is 0xe9"):
        read_json(path)


def test_lines_are_named_by_their_numbers(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": "\u2028"}\n\n[1]\r\n', encoding="utf-8")
    assert list(json_lines(path)) == [
        (f"{path}:1", {"a": "\u2028"}),
        (f"{path}:3", [1]),
    ]
    with pytest.raises(RequestError, match=f"{path}:3 is a JSON list, expected an obj"):
        list(json_objects(path, RequestError))
    path.write_text('{}\n{"a"\n')
    with pytest.raises(ConfigError, match="x.jsonl:2 is not valid JSON: .* column 5"):
        list(json_lines(path))
    with pytest.raises(ConfigError, match=f"{tmp_path} is a folder, expected a JSON"):
        list(json_lines(tmp_path))


def test_value_is_as_read_back():
    assert as_read_back({1: (2, Path("x"))}, default=str) == {"1": [2, "x"]}


def uses_of_json(path: Path) -> list[str]:
    """Where a file reads JSON by itself, one line each."""
    found = []
    text = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)) if "json" in text else ():
        names = []
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "json":
                names = [node.attr]
        elif isinstance(node, ast.ImportFrom) and node.module == "json":
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [a.asname for a in node.names if a.name == "json" and a.asname]
        bad = [name for name in names if name not in ("dumps", "JSONEncoder")]
        found += [f"{path.relative_to(ROOT)}:{node.lineno} {name}" for name in bad]
    return found


def test_json_is_read_by_the_reader_alone():
    files = [*(ROOT / "moe_edge").rglob("*.py"), *(ROOT / "launch").rglob("*.py")]
    assert len(files) > 400
    assert [use for p in files if p != READER for use in uses_of_json(p)] == []
    assert uses_of_json(READER) != []


def read_prompts(path):
    from moe_edge.engine.prompts import read_prompts

    read_prompts(path)


def read_questions(path):
    from moe_edge.evaluate.multiple_choice import read_questions

    read_questions([path])


def read_statistics(path):
    from moe_edge.place.statistics import read_counts

    read_counts(path)


def read_profile(path):
    from moe_edge.profile.reader import open_profile

    path.rename(path.with_name("profile.json"))
    open_profile(path.parent)


def read_probes(path):
    from moe_edge.predict.probe import Probe

    path.rename(path.with_name("profile.json"))
    Probe._check_model(type("Of", (), {"profile": path.parent}))


def read_costs(path):
    from moe_edge.hardware.step_costs import read_step_costs

    read_step_costs(path)


def read_machine(path):
    from moe_edge.hardware.presets import read_machine

    read_machine(path)


def read_decisions(path):
    from moe_edge.loadtest.decisions_file import read_decisions

    read_decisions(path)


def read_requests(path):
    from moe_edge.papers.coserve.workload.coe_tasks import read_requests

    read_requests(path)


def read_prefixes(path):
    from moe_edge.workload.arrivals import read_prefix_blocks

    read_prefix_blocks(path, 1)


def read_calibration(path):
    from moe_edge.hardware.cluster_calibration import ClusterCalibration

    ClusterCalibration.load(path.parent, path.name)


def read_cluster(path):
    from moe_edge.workload.cluster_run_reader import read_facts

    path.rename(path.with_name("cluster.json"))
    read_facts(path.parent)


def read_result(path):
    from moe_edge.metrics.schema import read_result

    path.rename(path.with_name("result.json"))
    read_result(path.parent)


READERS = [
    *(read_prompts, read_questions, read_statistics, read_profile, read_probes),
    *(read_costs, read_machine, read_decisions, read_requests, read_prefixes),
    *(read_calibration, read_cluster, read_result),
]


@pytest.mark.parametrize("read", READERS)
def test_nested_json_is_refused_by_every_reader(read, tmp_path):
    """Python's own reader raises RecursionError, which no reader of ours caught."""
    path = tmp_path / "given.json"
    path.write_text(NESTED)
    with pytest.raises((ConfigError, CheckpointError, RequestError)) as caught:
        read(path)
    text = str(caught.value)
    assert f"nested deeper than {MAX_DEPTH}" in text and str(tmp_path) in text
    assert "\n" not in text
