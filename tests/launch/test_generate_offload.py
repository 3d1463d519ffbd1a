"""Scripts with a budget: resident text, and one line for bad input."""

import gzip
import json
import re

import pytest

from moe_edge.core.checks import CapacityError, ConfigError
from moe_edge.engine.fused import FusedEngine
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.run_generate import run_generate
from moe_edge.evaluate.run import run_evaluate
from tests.launch.conftest import ROOT
from tests.support.chrome_trace import assert_no_overlap
from tests.support.tiny_checkpoint import TEXT

POLICIES = ROOT / "configs" / "policies"
PROMPTS = ["The river", "How many sacks are there?", "café 東京"]


def tokens_in(folder):
    lines = (folder / "generations.jsonl").read_text().splitlines()
    return [json.loads(line)["tokens"] for line in lines]


def generated(tiny, folder, **kwargs):
    """Tokens of a run in this process; and its summary."""
    summary = run_generate(
        out_dir=str(folder),
        checkpoint=tiny,
        prompt=PROMPTS,
        max_new_tokens=9,
        **kwargs,
    )
    return tokens_in(folder), summary


def test_generate_says_what_its_user_should_know(tiny, tmp_path, monkeypatch, capsys):
    remark = "zero_copy is off, experts are fetched by a loop: because"
    monkeypatch.setattr(FusedEngine, "remarks", lambda self: [remark])
    offload = OffloadOptions(mode="fused", device_memory="40%")
    generated(tiny, tmp_path / "o", offload=offload)
    assert remark in capsys.readouterr().err.splitlines()


@pytest.fixture(scope="module")
def resident_tokens(tiny, tmp_path_factory):
    return generated(tiny, tmp_path_factory.mktemp("resident") / "o")[0]


def test_generate_with_a_budget_writes_the_resident_tokens(
    run_script, tiny, tmp_path, resident_tokens
):
    flags = ["--checkpoint", tiny, "--max_new_tokens", 9, "--out_dir", "o"]
    flags += [flag for text in PROMPTS for flag in ("--prompt", text)]
    flags += ["--device_memory", "40%", "--gin_file", POLICIES / "stale_gate.gin"]
    flags += ["--trace", "t.csv.gz", "--events", "e.jsonl", "--timeline", "t.json"]
    summary = run_script("generate", *flags).summary
    assert 0 < summary["hit_ratio"] < 1 and summary["bytes_moved"] > 0
    assert tokens_in(tmp_path / "o") == resident_tokens
    config = (tmp_path / "o" / "config.gin").read_text()
    assert "generate.device_memory = '40%'" in config
    assert "offload.predictor = 'stale_gate'" in config
    head = gzip.decompress((tmp_path / "t.csv.gz").read_bytes()).decode()
    assert head.splitlines()[:2] == [
        "# num_experts=8 top_k=2",
        "request,phase,step,layer,rank,expert,weight,hit,bytes,wait_s",
    ]
    events = [*map(json.loads, (tmp_path / "e.jsonl").read_text().splitlines())]
    assert {"hit", "miss", "transfer", "wait"} <= {event["kind"] for event in events}
    moved = sum(event["bytes"] for event in events if event["kind"] == "transfer")
    assert moved == summary["bytes_moved"]
    spans = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert_no_overlap(spans)
    drawn = sum(s["args"]["bytes"] for s in spans if "bytes" in s.get("args", {}))
    assert drawn == moved
    replayed = run_script(
        "replay", "--trace", "t.csv.gz", "--slots_per_layer", "3", "--out_dir", "r"
    ).summary
    assert 0 < replayed["hit_ratio"]["lru"]["3"] < 1


@pytest.mark.parametrize(
    "offload",
    [
        OffloadOptions(device_memory="20%", link_bytes_per_s=1e7, predictor="previous"),
        OffloadOptions(device_memory="50%", mode="fused"),
    ],
)
def test_lossless_options_generate_the_resident_tokens(
    tiny, tmp_path, resident_tokens, offload
):
    tokens, summary = generated(tiny, tmp_path / "o", offload=offload)
    assert tokens == resident_tokens
    assert 0 <= summary["hit_ratio"] < 1 and summary["bytes_moved"] > 0


def test_evaluate_with_a_budget_measures_the_resident_perplexity(
    run_script, tiny, tmp_path
):
    (tmp_path / "t.txt").write_text(TEXT)
    flags = ["--checkpoint", tiny, "--text", "t.txt", "--window", 32, "--stride", 16]
    resident = run_evaluate(
        out_dir=str(tmp_path / "r"),
        checkpoint=tiny,
        text=str(tmp_path / "t.txt"),
        window=32,
        stride=16,
    )
    flags += ["--device_memory", "30%", "--gin_file", POLICIES / "lru.gin"]
    summary = run_script("evaluate", *flags, "--out_dir", "o").summary
    assert summary["perplexity"] == resident["perplexity"]
    assert summary["tokens"] == resident["tokens"]


def test_generate_with_the_smoe_policy_runs(run_script, tiny, tmp_path):
    flags = ["--checkpoint", tiny, "--prompt", "The mill", "--max_new_tokens", 12]
    flags += ["--device_memory", "50%", "--gin_file", POLICIES / "smoe.gin"]
    done = run_script("generate", *flags, "--out_dir", "o")
    assert 0 < done.summary["hit_ratio"] <= 1
    line = done.stdout.splitlines()[-2]
    changed = re.match(r"lossy route substitute: (\d+) of (\d+) expert choices", line)
    assert 0 < int(changed[1]) < int(changed[2])
    share = 100 * done.summary["hit_ratio"]
    moved = f"{done.summary['bytes_moved'] / 1e6:.1f} MB moved"
    assert f"; {share:.0f} % of the experts used were on the device, {moved}; " in (
        done.stderr
    )
    assert len(tokens_in(tmp_path / "o")[0]) == 12


@pytest.mark.parametrize(
    "flags, message",
    [
        (
            ["--device_memory", "1%"],
            "error: device memory of 1% holds 0 slots .* 12.5%",
        ),
        (
            [
                "--gin_file",
                POLICIES / "lru.gin",
                "--gin_param",
                "offload.eviction = 'x'",
            ],
            "unknown eviction policy 'x'",
        ),
    ],
)
def test_generate_refuses_bad_offloading_in_one_line(run_script, tiny, flags, message):
    base = ["--checkpoint", tiny, "--prompt", "a", "--dry_run", *flags]
    done = run_script("generate", *base)
    assert re.search(message, done.error), done.error


def test_dry_run_judges_the_budget(tiny, tmp_path):
    out_dir = str(tmp_path / "o")
    given = {"checkpoint": tiny, "prompt": ["a"], "out_dir": out_dir, "dry_run": True}
    with pytest.raises(CapacityError, match="minimum is 2 slots"):
        run_generate(**given, device_memory="2%")
    with pytest.raises(ConfigError, match="'1 apple' is no budget"):
        run_generate(**given, device_memory="1 apple")
    assert run_generate(**given, device_memory="50%")["dry_run"] is True
    assert not (tmp_path / "o").exists()


def test_trace_without_a_budget_is_refused(tiny, tmp_path):
    for what in ("trace", "events"):
        with pytest.raises(ConfigError, match="give --device_memory"):
            generated(tiny, tmp_path / "o", **{what: str(tmp_path / "x")})
    with pytest.raises(ConfigError, match="--trace_scores are kept next to a --trace"):
        generated(tiny, tmp_path / "o", device_memory="50%", trace_scores=True)
