import hashlib
import json
from pathlib import Path

import pytest

from moe_edge.core.checks import ConfigError, OutputError
from moe_edge.metrics import results
from moe_edge.metrics.index import find_entries, head_of, index_text
from moe_edge.metrics.report import entry_page
from moe_edge.metrics.results import Findings, metric, write_entry
from moe_edge.metrics.schema import check_answer, validate_entry

ROOT = Path(__file__).parents[2]
COMMITTED = find_entries(ROOT / "results")


def draw(path):
    path.write_bytes(b"png")


def findings(**changes):
    fields = {
        "answer": "3 tokens/s.",
        "model": {"name": "m", "params": 5, "weights": "random"},
        "workload": {"prompts": 1},
        "metrics": [metric("ours", "speed", 3.0, "tokens/s", 5, ("std", 0.2))],
        "limits": ["One machine."],
        "plot": draw,
    }
    return Findings(**(fields | changes))


def write(folder, found=None, **kwargs):
    kwargs = {"question": "How fast?", "config_text": "x.y = 1\n"} | kwargs
    return write_entry(folder, found or findings(), **kwargs)


def test_write_entry_is_complete_and_valid(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.orig_argv", ["python3", "launch/x.py", "--out_dir", "o"])
    found = findings(files={"extra.txt": "hello"}, pictures={"more.png": draw})
    folder = write(tmp_path / "e", found)
    result = validate_entry(folder)
    assert result["config_sha256"] == hashlib.sha256(b"x.y = 1\n").hexdigest()
    assert result["metrics"][0]["spread"] == {"kind": "std", "value": 0.2}
    page = (folder / "README.md").read_text()
    for part in ("# How fast?", "3 ± 0.2", "--out_dir o", "One mac"):
        assert part in page
    assert "](plot.png)" in page and "](more.png)" in page
    assert (folder / "extra.txt").read_text() == "hello"


def test_a_page_of_many_details_stays_short_and_says_so(tmp_path):
    rows = [metric("ours", f"time of case {n}", n, "s") for n in range(80)]
    found = findings(details=[f"Case {n}." for n in range(80)], metrics=rows)
    page = (write(tmp_path / "e", found) / "README.md").read_text()
    assert len(page.splitlines()) <= 100
    assert "- Case 59.\n- 20 more: `result.json`.\n" in page


def test_write_entry_failing_plot_leaves_nothing(tmp_path):
    def plot(path):
        raise RuntimeError("no ink")

    with pytest.raises(RuntimeError, match="no ink"):
        write(tmp_path / "e", findings(plot=plot))
    assert list(tmp_path.iterdir()) == []


def test_write_entry_rejects_full_folder(tmp_path):
    write(tmp_path / "e")
    with pytest.raises(OutputError, match="not empty"):
        write(tmp_path / "e")
    write(tmp_path / "e", overwrite=True)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"kind": "guessed"}, "unknown results kind 'guessed'; known: emulated"),
        ({"cost_model_source": "?"}, "unknown cost model source '\\?'"),
        ({"metrics": []}, "at least one metric"),
        ({"limits": []}, "one limit"),
        ({"model": {"name": "m"}}, r"lack \['params', 'weights'\]"),
        ({"metrics": [metric("a", "b", float("nan"), "1")]}, "metric b is nan"),
    ],
)
def test_write_entry_rejects_what_does_not_fit(tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        write(tmp_path / "e", findings(**change))
    assert list(tmp_path.iterdir()) == []


def test_validate_entry_rejects_changed_config(tmp_path):
    folder = write(tmp_path / "e")
    (folder / "config.gin").write_text("x.y = 2\n")
    with pytest.raises(ConfigError, match="does not have the hash"):
        validate_entry(folder)


def test_validate_entry_rejects_missing_file(tmp_path):
    folder = write(tmp_path / "e")
    (folder / "plot.png").unlink()
    with pytest.raises(ConfigError, match="e lacks plot.png"):
        validate_entry(folder)


def test_validate_entry_rejects_readme_without_command(tmp_path):
    folder = write(tmp_path / "e")
    (folder / "README.md").write_text("# How fast?\n")
    with pytest.raises(ConfigError, match="does not name the command"):
        validate_entry(folder)


@pytest.mark.parametrize(
    "edit, message",
    [
        (lambda r: r.pop("seeds"), r"missing or unknown keys \['seeds'\]"),
        (lambda r: r.update(wall_s="1"), "wall_s is '1', expected"),
        (lambda r: r.update(schema_version=9), "schema_version is 9, expected 2 or 4"),
        (lambda r: r["machine"].pop("jax"), r"lack \['jax'\]"),
        (lambda r: r["metrics"][0].pop("unit"), "must have keys"),
    ],
)
def test_validate_entry_rejects_bad_result(tmp_path, edit, message):
    folder = write(tmp_path / "e")
    result = json.loads((folder / "result.json").read_text())
    edit(result)
    (folder / "result.json").write_text(json.dumps(result))
    with pytest.raises(ConfigError, match=message):
        validate_entry(folder)


def test_command_line_is_relative_to_the_repository(monkeypatch):
    script = str(results.REPOSITORY / "launch" / "x.py")
    monkeypatch.setattr("sys.orig_argv", ["python3", script, "--a", "b c"])
    assert results.command_line() == "python launch/x.py --a 'b c'"
    started = ["/v/bin/python3", "/v/bin/moe-edge", "x", "--a", "b c"]
    monkeypatch.setattr("sys.orig_argv", started)
    assert results.command_line() == "moe-edge x --a 'b c'"


def test_index_names_entries_but_not_local_ones(tmp_path):
    write(tmp_path / "speed" / "2026_cpu2_abc")
    write(tmp_path / "local" / "speed" / "2026_cpu2_abc")
    text = index_text(tmp_path)
    assert text.count("How fast?") == 1
    assert "(speed/2026_cpu2_abc/README.md)" in text


def test_committed_entries_are_valid_short_and_as_the_report_writes_them():
    faults = []
    for folder in COMMITTED:
        result, page = validate_entry(folder), (folder / "README.md").read_text()
        check_answer(head_of(page)[1])
        if page != entry_page(folder, result):
            faults.append(f"{folder.name}: run python -m moe_edge.metrics.report")
        if (lines := len(page.splitlines())) > 100:
            faults.append(f"{folder.name}: a page of {lines} lines")
        script = ROOT / result["command"].split()[1]
        if not script.is_file():
            faults.append(f"{folder.name}: no {script}")
    assert faults == []


def test_committed_index_is_up_to_date():
    stored = (ROOT / "results" / "README.md").read_text(encoding="utf-8")
    assert stored == index_text(ROOT / "results"), (
        "run python -m moe_edge.metrics.report"
    )
