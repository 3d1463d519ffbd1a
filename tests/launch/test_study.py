import json

import pytest

from moe_edge.metrics.schema import validate_entry
from moe_edge.workload.trace_writer import write_trace
from tests.support.traces import one_layer

pytestmark = pytest.mark.slow

SMALL = [
    *("--rounds", 1, "--prompt_tokens", 8, "--new_tokens", 6),
    *("--gin_param", "study.budgets = ('50%',)"),
    *("--gin_param", "study.batches = (1,)"),
    *("--gin_param", "study.history = 1"),
    *("--gin_param", "study.fidelity_rows = 1"),
    *("--gin_param", "study.lengths = (8,)"),
]


def test_study_ablation_writes_an_entry(run_script, tiny, tmp_path):
    done = run_script(
        *("study_smoe", "--name", "smoe_fig14", "--checkpoint", tiny, *SMALL),
        *("--out_dir", "o"),
    )
    assert list(done.summary["tpot_change"]) == ["+CE", "+CR", "+Pre", "+BA"]
    assert all(done.summary["checks"].values()), done.stdout
    result = validate_entry(tmp_path / "o")
    assert result["kind"] == "emulated" and result["workload"]["link"]["emulated"]
    assert set(result["paper_claim"]) == {"source", "paper", "ours", "why_they_differ"}
    names = {(row["policy"], row["name"]) for row in result["metrics"]}
    assert ("+BA", "perplexity ratio, 50%, batch 1") in names
    assert ("resident", "TPOT, 100%, batch 1") in names
    (prompts,) = result["workload"]["prompts"]
    assert prompts["path"] == "books.txt" and len(prompts["sha256"]) == 64


def test_study_ttft_writes_an_entry(run_script, tiny, tmp_path):
    done = run_script(
        *("study_smoe", "--name", "smoe_ttft", "--checkpoint", tiny, *SMALL),
        *("--out_dir", "o"),
    )
    assert all(done.summary["checks"].values()), done.stdout
    result = validate_entry(tmp_path / "o")
    policies = {row["policy"] for row in result["metrics"]}
    assert policies == {"resident", "layer-wise", "on_demand", "lru", "smoe"}


def test_study_replays_traces_without_a_model(run_script, tmp_path):
    trace = one_layer([0, 1, 2], [0, 1, 3, 0, 1, 0, 2, 1], num_experts=4)
    write_trace(tmp_path / "t.csv.gz", trace)
    done = run_script(
        *("study_smoe", "--name", "replay_public_traces", "--data_dir", tmp_path),
        *("--gin_param", "study.traces = ('t.csv.gz',)", "--out_dir", "o"),
        *("--gin_param", "study.slots_per_layer = (2, 3)"),
        *("--gin_param", "study.trace_experts = 4"),
        *("--gin_param", "study.sources = ()"),
    )
    ratios = done.summary["hit_ratio"]["t"]
    assert ratios["belady"]["2"] >= ratios["lru"]["2"]
    assert validate_entry(tmp_path / "o")["kind"] == "simulated"
    stored = json.loads((tmp_path / "o" / "replay.json").read_text())
    assert stored["hit_ratio"]["t"]["lru"]["3"] == ratios["lru"]["3"]


def test_study_unknown_name_is_refused_in_one_line(run_script, tmp_path):
    done = run_script("study", "--name", "fig0", "--out_dir", "o")
    assert "unknown study 'fig0'; known: " in done.error
    assert not (tmp_path / "o").exists()
