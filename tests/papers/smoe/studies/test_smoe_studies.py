"""The SMoE studies as the driver runs them: small runs, refusals, dry runs."""

import json
import types

import numpy as np
import pytest

from moe_edge.bench.cases import past_prompts
from moe_edge.bench.prompts import make_pool
from moe_edge.bench.started import started
from moe_edge.bench.study import run_study
from moe_edge.core.checks import CheckpointError, ConfigError, RequestError
from moe_edge.metrics.schema import validate_entry
from moe_edge.papers.smoe.studies import (
    fig3,
    fig4,
    fig6,
    fig10,
    fig11,
    fig12,
    fig14,
    fig17,
    public_traces,
    systems,
    table4,
    ttft,
    workloads,
)
from moe_edge.workload.trace_writer import write_trace
from tests.support.entries import row_of, rows_of
from tests.support.prompts import refuses_a_start, write_prompts
from tests.support.tiny_checkpoint import write_tiny_checkpoint
from tests.support.traces import one_layer

SMALL = {"rounds": 1, "prompt_tokens": 8, "new_tokens": 6}
CASES = {"budgets": ("50%",), "batches": (1,), "history": 1, "fidelity_rows": 1}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny"))


def run(study, out, **given):
    summary = run_study(study, study.settings(**given), out_dir=str(out))
    assert len(summary["answer"].split()) <= 40
    return summary, validate_entry(out)


def test_dry_runs_write_nothing_and_refuse_inputs(tmp_path):
    for module in (fig4, fig6, fig11, fig12, fig14, fig17, ttft):
        study, out = module.STUDY, tmp_path / "o"
        settings = study.settings(**{"history": 8} if module is fig11 else {})
        summary = run_study(study, settings, out_dir=str(out), dry_run=True)
        assert summary["dry_run"]
        for given, error, message in (
            ({"checkpoint": "nowhere"}, CheckpointError, "nowhere"),
            ({"data_dir": "/", "sources": ("gone.txt",)}, OSError, "gone.txt"),
        ):
            settings = study.settings(**given)
            with pytest.raises(error, match=message):
                run_study(study, settings, out_dir=str(out), dry_run=True)
        assert not out.exists()
    for study in (public_traces.STUDY, table4.STUDY):
        with pytest.raises((ConfigError, OSError), match="trace_qwen3|arc_challenge"):
            run_study(study, study.settings(), out_dir=str(out), dry_run=True)


def test_traces_are_replayed_without_a_model(tmp_path):
    trace = one_layer([0, 1, 2], [0, 1, 3, 0, 1, 0, 2, 1], num_experts=4)
    write_trace(tmp_path / "t.csv.gz", trace)
    summary, result = run(
        public_traces.STUDY,
        tmp_path / "o",
        data_dir=str(tmp_path),
        traces=("t.csv.gz",),
        slots_per_layer=(2, 3),
        trace_experts=4,
    )
    assert {row["slots"] for row in summary["numbers"]["best"]} == {2, 3}
    lru, belady = (
        row_of(result, "ratios", policy=policy, slots=2) for policy in ("lru", "belady")
    )
    assert belady["hit_ratio"] >= lru["hit_ratio"]
    assert result["kind"] == "simulated"


@pytest.mark.slow
@pytest.mark.parametrize("link", [2.0, None])
def test_ablation_writes_an_entry(tiny, tmp_path, link):
    given = SMALL | CASES | {"link_factor": link}
    summary, result = run(fig14.STUDY, tmp_path / "o", checkpoint=tiny, **given)
    steps = [row["policy"] for row in summary["numbers"]["step"]]
    assert steps == ["+CE", "+CR", "+Pre", "+BA"]
    assert all(summary["checks"].values()), summary["checks"]
    assert result["kind"] == ("emulated" if link else "measured")
    assert result["workload"]["link"]["emulated"] is bool(link)
    lossy = row_of(result, "timing", policy="+BA", budget="50%", batch=1)
    assert lossy["perplexity_ratio"] > 0
    assert row_of(result, "timing", policy="resident", budget="100%")["tpot_ms"] > 0
    (prompts,) = result["workload"]["prompts"]
    assert prompts["path"] == "books.txt" and len(prompts["sha256"]) == 64


@pytest.mark.slow
@pytest.mark.parametrize(("link", "hosts"), [(2.0, ("0.33", "1")), (None, ("own",))])
def test_systems_write_an_entry(tiny, tmp_path, link, hosts):
    lines = [json.dumps({"id": str(n), "prompt": f"{n} " * 40}) for n in range(40, 60)]
    for name in ("one.jsonl", "two.jsonl"):
        (tmp_path / name).write_text("\n".join(lines))
    summary, result = run(
        fig11.STUDY,
        tmp_path / "o",
        checkpoint=tiny,
        data_dir=str(tmp_path),
        sources=("one.jsonl", "two.jsonl"),
        device_memory="50%",
        batches=(1,),
        horizons=(1,),
        history=1,
        fidelity_rows=1,
        link_factor=link,
        **SMALL | {"rounds": 2},
    )
    assert all(summary["checks"].values()), summary["checks"]
    is_own = link is None
    assert result["kind"] == ("measured" if is_own else "emulated")
    assert result["workload"]["link"]["emulated"] is not is_own
    page = (tmp_path / "o" / "README.md").read_text()
    assert ("The link is the machine's own" in page) is is_own
    assert len(summary["numbers"]["changes"]) == 2 * len(hosts)
    for system in (*systems.systems(0.2, np.ones((1, 1)), ()), systems.LAYERWISE):
        row_of(result, "systems", workload="two", system=system, host=hosts[-1])


@pytest.mark.slow
def test_one_workload_may_choose_for_all(tiny, tmp_path, monkeypatch):
    lines = [json.dumps({"id": str(n), "prompt": f"{n} " * 40}) for n in range(40, 60)]
    for name in ("one.jsonl", "two.jsonl"):
        (tmp_path / name).write_text("\n".join(lines))
    timed = []

    def time_cases(bench, cases, at, *args):
        timed.append((len(cases), len(at.engines), len(at.rounds)))
        return real(bench, cases, at, *args)

    real = fig11.time_cases
    monkeypatch.setattr(fig11, "time_cases", time_cases)
    given = {"checkpoint": tiny, "device_memory": "50%", "batches": (1,)}
    given |= {"horizons": (1,), "history": 1, "fidelity_rows": 1, "host_loads": (1.0,)}
    given |= SMALL | {"rounds": 2, "sources": ("one.jsonl", "two.jsonl")}
    given |= {"data_dir": str(tmp_path), "choose_once": True}
    summary, result = run(fig11.STUDY, tmp_path / "o", **given)
    assert all(summary["checks"].values()), summary["checks"]
    assert sum("(the round that chooses)" in name for name in summary["checks"]) == 2
    named = len(systems.systems(0.2, np.ones((1, 1)), ())) + 1  # and layer-wise offload
    (tried, engines, rounds), *measured = timed
    assert tried == engines > 2 * named and rounds == 1
    assert measured == [(named, named, 1)] * 2
    assert len(result["frames"]["systems"]["rows"]) == 2 * named
    assert "chosen by a round of one," in (tmp_path / "o" / "README.md").read_text()


@pytest.mark.slow
def test_layer_wise_offload_is_computed_where_it_is_not_measured(tiny, tmp_path):
    """Over a slow link its measured step is the loads that are added up otherwise."""
    given = {"checkpoint": tiny, "device_memory": "50%", "batches": (1,)}
    given |= {"horizons": (1,), "history": 1, "fidelity_rows": 1, "host_loads": (1.0,)}
    given |= SMALL | {"rounds": 2, "link_factor": 8.0, "link_latency_s": 0.002}
    found = {}
    for name, is_run in (("measured", True), ("computed", False)):
        _, result = run(fig11.STUDY, tmp_path / name, layerwise=is_run, **given)
        system = systems.LAYERWISE + ("" if is_run else ", computed")
        found[name] = row_of(result, "systems", system=system)["tpot_ms"]
        page = (tmp_path / name / "README.md").read_text()
        assert ("Layer-wise offload was not run" in page) is not is_run
        rivals = [row["rivals"] for row in result["numbers"]["changes"]]
        assert not any("computed" in each for each in rivals)
    assert found["computed"] == pytest.approx(found["measured"], rel=0.5)


def test_layer_wise_offload_is_not_computed_without_a_rate(tmp_path):
    settings = systems.Fig11Settings(link_factor=None, layerwise=False)
    with pytest.raises(ConfigError, match="layerwise is False next to the machine's"):
        run_study(fig11.STUDY, settings, out_dir=str(tmp_path / "o"), dry_run=True)


def test_no_measured_prompt_was_learnt_from(tmp_path):
    text = "".join(chr(97 + n % 26) for n in range(120))
    (tmp_path / "t.txt").write_text(text)
    given = {"data_dir": str(tmp_path), "sources": ("t.txt",), "batches": (1, 2)}
    settings = systems.Fig11Settings(**given, rounds=2, prompt_tokens=12)
    tokenizer = types.SimpleNamespace(encode=lambda text, **_: [*text.encode()])
    rows = make_pool(settings, tokenizer, 10, 12).rows
    seen = {tuple(row) for row in rows[:5]}
    rounds = workloads.unseen_rounds(settings, tokenizer, seen)
    assert rounds == [rows[5:7], rows[7:9]]
    with started(1):  # of a file that is shorter than what both learn from
        rounds = workloads.unseen_rounds(
            settings, tokenizer, set(map(tuple, rows[4:6]))
        )
    assert rounds == [[rows[6], rows[7]], [rows[8], rows[9]]]
    seen |= {tuple(row) for row in rows[5:8]}
    with pytest.raises(RequestError, match="t.txt holds 2 prompts of 12 .* 4 are need"):
        workloads.unseen_rounds(settings, tokenizer, seen)


def test_no_start_measures_what_it_learnt_from(tmp_path):
    given = write_prompts(tmp_path, {"a": [30] * 60, "b": [30] * 60})
    given |= {"batches": (1,), "history": 6, "rounds": 2, "prompt_tokens": 12}
    settings = systems.Fig11Settings(**given)
    tokenizer = types.SimpleNamespace(encode=lambda text, **_: [*text.encode()])
    for number in range(4):
        with started(number):
            learnt = past_prompts(settings, tokenizer).rows
            works = workloads.rounds_of(settings, tokenizer)
        rows = [row for _, rounds in works.values() for (row,) in rounds]
        assert len(rows) == 4 and not any(row in learnt for row in rows)


@pytest.mark.parametrize("study", [fig10.STUDY, fig11.STUDY, fig14.STUDY])
def test_a_start_without_texts_of_its_own_is_refused_before_any_is_made(
    study, tmp_path
):
    """Texts by which fidelity is judged are longer, and fewer, than prompts."""
    given = write_prompts(tmp_path, {"a": [40] * 12 + [8] * 400})
    given |= {"prompt_tokens": 8, "new_tokens": 24, "rounds": 2, "history": 2}
    settings = study.settings(**given, fidelity_rows=5)
    refuses_a_start(study, settings, 2, tmp_path / "o", "12 prompts of 32", "15 are")


def test_one_round_is_refused():
    with pytest.raises(ConfigError, match="rounds is 1, expected 2 or more: the first"):
        systems.Fig11Settings(rounds=1)


def test_workloads_of_one_name_are_refused(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    (tmp_path / "a/p.jsonl").write_text("")
    (tmp_path / "b/p.txt").write_text("")
    settings = systems.Fig11Settings(
        data_dir=str(tmp_path), sources=("a/p.jsonl", "b/p.txt")
    )
    with pytest.raises(ConfigError, match="name each file once"):
        run_study(fig11.STUDY, settings, out_dir=str(tmp_path / "o"), dry_run=True)


@pytest.mark.slow
def test_predictors_write_an_entry(tiny, tmp_path):
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("aeiknrst"), 4)) for _ in range(6000)]
    (tmp_path / "t.txt").write_text(" ".join(words))
    given = {"sources": ("t.txt",), "probe_texts": ("t.txt",), "probe_tokens": 4096}
    for name, data in (("a", {}), ("b", {"data_dir": str(tmp_path)} | given)):
        summary, result = run(
            fig17.STUDY,
            tmp_path / name,
            checkpoint=tiny,
            device_memory="50%",
            work_dir=str(tmp_path / "probes"),
            history=1,
            horizon=1,
            batches=(1,),
            **SMALL,
            **data,
        )
        assert all(summary["checks"].values()), summary["checks"]
        named = rows_of(result, "ahead", policy="probe (ours)", ahead=1, batch=1)
        assert bool(named) == bool(data)


@pytest.mark.slow
def test_ttft_writes_an_entry(tiny, tmp_path):
    summary, result = run(
        ttft.STUDY,
        tmp_path / "o",
        checkpoint=tiny,
        device_memory="50%",
        lengths=(8,),
        **SMALL,
    )
    assert all(summary["checks"].values()), summary["checks"]
    policies = {row["policy"] for row in rows_of(result, "waits")}
    assert policies == {"resident", "layer-wise", "on_demand", "lru", "smoe"}


@pytest.mark.slow
def test_single_experts_write_an_entry(tmp_path):
    summary, result = run(
        fig3.STUDY,
        tmp_path / "o",
        shapes=("small 64/32", "large 128/96"),
        tokens=(1, 3),
        experts=2,
        repeats=2,
    )
    ratios = [row["model"] for row in summary["numbers"]["ratios"]]
    assert ratios == ["small", "large"]
    assert row_of(result, "experts", model="large", what="host", tokens=3)
    assert row_of(result, "experts", model="large", what="link")


@pytest.mark.parametrize(
    "text",
    ["2048/1408", "a 2048", "a 2048/x", "a b/1/2", "a 0/8", "a 8/0", "a 12/8", "a ²/3"],
)
def test_shapes_of_another_form_are_refused(text):
    with pytest.raises(ConfigError, match="expected a name, a space and width/neurons"):
        fig3.ExpertSettings(shapes=(text,))


def test_experts_that_cannot_take_turns_are_refused():
    with pytest.raises(ConfigError, match="give each a name of its own"):
        fig3.ExpertSettings(shapes=("a 8/8", "a 16/8"))
    with pytest.raises(ConfigError, match="experts is 1, expected 2 or more"):
        fig3.ExpertSettings(experts=1)


@pytest.mark.slow
def test_ranks_write_an_entry(tiny, tmp_path):
    out, few = tmp_path / "o", {"batch_size": 3, "scored_texts": 1}
    summary, result = run(
        fig4.STUDY, out, checkpoint=tiny, **SMALL | {"rounds": 4}, **few
    )
    assert row_of(result, "changed", kind=fig4.REPLACED, rank=2)
    assert row_of(result, "scores", kind="not chosen", rank=3)
    assert len(summary["numbers"]["lost"]) == 4


@pytest.mark.slow
def test_reuse_by_rank_writes_an_entry(tiny, tmp_path):
    summary, result = run(fig6.STUDY, tmp_path / "o", checkpoint=tiny, **SMALL)
    assert 0 <= summary["numbers"]["chosen"] <= 1
    assert len(rows_of(result, "groups")) == 6
