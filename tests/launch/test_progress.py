"""No command is silent: what it does is reported whenever nothing else is said."""

import json

import pytest

from moe_edge.core import progress
from tests.launch.test_place_experts import write_counts
from tests.support.traces import PUBLIC_HEAD


@pytest.fixture
def opened(monkeypatch):
    """Names of what was counted; that lines come of it is tested in tests/core."""
    names, begin = [], progress._Reporter.begin

    def noted(reporter, task):
        names.append(task.name)
        begin(reporter, task)

    monkeypatch.setattr(progress._Reporter, "begin", noted)
    return names


def test_generate_reports_loading_and_compiling(run_script, tiny, opened):
    flags = "--checkpoint", tiny, "--prompt", "a", "--max_new_tokens", 2
    assert run_script("generate", *flags, "--out_dir", "o").code == 0
    assert {"layers loaded", "compiling for batches"} <= set(opened)
    more = "--prompt", "b", "--device_memory", "50%"
    assert run_script("generate", *flags, *more, "--out_dir", "p").code == 0
    wanted = {"layers of experts loaded", "compiling for batches", "batches generated"}
    assert wanted <= set(opened)


def test_streamed_text_is_not_interrupted(run_script, tiny, opened):
    flags = "--checkpoint", tiny, "--prompt", "a", "--max_new_tokens", 4
    assert run_script("generate", *flags, "--out_dir", "o").code == 0
    assert "batches generated" not in set(opened)


def test_commands_report_what_they_do(run_script, tmp_path, opened):
    write_counts(tmp_path / "counts.jsonl")
    flags = ["--statistics", "counts.jsonl", "--server_domains", "a,b"]
    flags += ["--slots", "20,24", "--d_model", 64, "--expert_dim", 64]
    assert run_script("place_experts", *flags, "--out_dir", "o").code == 0
    assert "placements found" in set(opened)
    rows = [f"0,1,{s},0,{k},{(s + k) % 8},1" for s in range(4) for k in (0, 1)]
    (tmp_path / "t.csv").write_text(PUBLIC_HEAD + "\n".join(rows) + "\n")
    flags = ["--trace", "t.csv", "--slots_per_layer", 4, "--num_experts", 8]
    assert run_script("replay", *flags, "--out_dir", "p").code == 0
    assert "cache policies replayed" in set(opened)


def test_every_command_reports_itself(run_script, tmp_path, progress_clock):
    """Whatever it does: here nothing that any part of it counts."""
    script = tmp_path / "mine.py"
    script.write_text(
        "import gin\nfrom moe_edge.commands import common\n"
        "from moe_edge.core.progress import _REPORTER\n"
        "@gin.register\ndef mine() -> dict:\n    _REPORTER.clock.passes(10)\n"
        "    return {}\n"
        "common.run('mine')\n"
    )
    done = run_script(str(script))
    assert done.stderr == "mine: 10 s\n"
    assert json.loads(done.stdout) == {}


def test_memory_that_does_not_suffice_is_one_line(run_script, tmp_path):
    script = tmp_path / "large.py"
    script.write_text(
        "import gin\nfrom moe_edge.commands import common\n"
        "@gin.register\ndef large() -> dict:\n    raise MemoryError('5 TiB')\n"
        "common.run('large')\n"
    )
    wanted = "error: not enough memory for what was asked; ask for less (5 TiB)"
    assert run_script(str(script)).error == wanted
