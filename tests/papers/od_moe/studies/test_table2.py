"""Table 2: engines of one process beside live runs, which are made up here."""

import pytest

from moe_edge.bench.study import run_study
from moe_edge.core.checks import ConfigError, RequestError
from moe_edge.metrics.schema import validate_entry
from moe_edge.papers.od_moe.studies import table2_runs
from moe_edge.papers.od_moe.studies.table2 import (
    RESIDENT,
    SAME_PROCESSES,
    STAND_INS,
    STUDY,
    Table2Settings,
    paper_ratios,
    peers,
)
from moe_edge.papers.od_moe.studies.table2_entry import Measured, Text, checks
from tests.support.tiny_checkpoint import TEXT, write_tiny_checkpoint

AT = (16, 64)
OWN = "OD-MoE, speculative"


def test_peers_are_those_that_are_told():
    options = peers([[0, 1]], 2, 0.05)
    assert list(options) == list(STAND_INS)
    assert [name for name, one in options.items() if not one.lossless] == ["AdapMoE"]


def test_papers_averages_over_its_cached_model():
    ratios = paper_ratios()
    assert ratios["OD-MoE, late: decode over resident"] == 0.7551
    assert ratios["OD-MoE, late: bytes over resident"] == 0.3333
    assert len(ratios) == 5 * 4


def measured(**texts):
    """One round of each system; the peers hold 30 bytes, OD-MoE 31."""
    found = {RESIDENT: Text(1.0, 0.5), OWN: Text(2.0, 1.0), **texts}
    found |= {SAME_PROCESSES: Text(2.0, 0.9)} | dict.fromkeys(STAND_INS, Text(2.0, 4.0))
    return Measured(
        texts={(system, AT): [one] for system, one in found.items()},
        device_bytes={RESIDENT: {"all": 90}, OWN: {"a": 1, "b": 30}}
        | {peer: {"a": 1, "b": 29} for peer in STAND_INS},
        fidelity={},
        dropped={},
        perplexity=3.0,
        expert_share={OWN: 0.3},
        on_time={},
        model={},
        workload={},
    )


def test_measures_of_a_text():
    found = measured()
    assert found.values(OWN, "output", AT) == [64 / (2 + 63)]
    assert found.over(OWN, "decode", AT) == [0.5]
    assert found.mean_over(OWN, "TTFT") == 2.0
    assert all(checks(found, [OWN]).values())


@pytest.mark.parametrize(
    "text, failed",
    [
        (Text(2.0, 1.0, is_same=False), "every lossless system gave"),
        (Text(2.0, 1.2), "speculative: decode >= .85"),
    ],
)
def test_checks_fail_where_they_should(text, failed):
    found = checks(measured(**{OWN: text}), [OWN])
    (name,) = [name for name, passed in found.items() if not passed]
    assert failed in name


@pytest.mark.parametrize(
    "change, message",
    [
        ({"shadow": "q3"}, "precision 'q3'; known"),
        ({"departures": ("soon",)}, "departures 'soon'; known"),
        ({"output_lengths": (64, 1)}, "output_lengths is 1, expected at least 2"),
        ({"prompt_lengths": (0,)}, "prompt_lengths must be a positive whole .* 0"),
        ({"groups": 3}, "groups is 3 and workers 4"),
        ({"drop_threshold": 1.0}, "threshold must lie in .*1.0"),
    ],
)
def test_settings_that_cannot_run_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        Table2Settings(**change)


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("table2")
    tiny = write_tiny_checkpoint(folder / "tiny")
    (folder / "t.txt").write_text(TEXT * 80)
    return Table2Settings(
        checkpoint=str(tiny),
        data_dir=str(folder),
        sources=("t.txt",),
        rounds=2,
        prompt_tokens=8,
        new_tokens=4,
        prompt_lengths=(8,),
        output_lengths=(4,),
        history=2,
        drop_threshold=0.6,
        fidelity_rows=2,
    )


@pytest.fixture
def asked(monkeypatch):
    """Live runs are answered here; what was asked. Speculative workers hold more."""
    calls = []

    def answer(texts, **options):
        calls.append((texts, options))
        speculative = options["departure"] == "speculative"
        return {
            "decode_tokens_per_s": 50.0,
            "resident_tokens_per_s": 100.0,
            "ttft_s": 0.2,
            "resident_ttft_s": 0.1,
            "same_tokens": True,
            "load_bytes_per_s": 2e7,
            "expert_bytes_share": 0.4 if speculative else 0.3,
            "device_bytes": {
                **{"main": 100_000, "shadow": 10_000},
                **{f"worker{n}": 8000 if speculative else 4000 for n in range(4)},
            },
        }

    monkeypatch.setattr(table2_runs, "run_od_moe", answer)
    return calls


@pytest.mark.slow
def test_study_writes_an_entry(settings, asked, tmp_path):
    summary = run_study(STUDY, settings, out_dir=str(tmp_path / "o"))
    result = validate_entry(tmp_path / "o")
    assert summary["checks"]["every lossless system gave the model's own tokens"]
    assert summary["checks"]["no program was compiled while measuring"]
    # All but the first run are over the link that the first one found.
    rates = [options["load_bytes_per_s"] for _, options in asked]
    assert rates == ["balanced", *["20000000.0"] * 5]
    assert {text for (text,), _ in asked[1:4]} == {asked[0][0][0]}
    assert "0.50 of the decode speed of the same processes" in result["details"][3]
    assert result["details"][5].startswith("For Mixtral-offloading stands: LRU and")
    values = {(r["policy"], r["name"]): r["value"] for r in result["metrics"]}
    assert values["OD-MoE, late", "decode, 8 in, 4 out"] == 50
    assert values[SAME_PROCESSES, "TTFT, 8 in, 4 out"] == pytest.approx(100)
    assert values["OD-MoE, late", "device bytes, in all"] == 126_000
    assert values["OD-MoE, speculative", "device bytes, in all"] == 142_000
    for peer in STAND_INS:
        held = values[peer, "device bytes, in all"]
        assert 142_000 - 10_000 < held <= 142_000
    share = "experts on shadow and workers <= 1/3 of the model's bytes"
    assert summary["checks"][f"OD-MoE, late: {share}"]
    assert not summary["checks"][f"OD-MoE, speculative: {share}"]
    assert result["details"][2] == (
        "The peers hold as many bytes as OD-MoE, speculative."
    )
    assert values["AdapMoE", "perplexity"] != values[RESIDENT, "perplexity"]
    assert 0 < values["AdapMoE", "chosen experts dropped"] <= 0.5
    assert ("AdapMoE", "agreement") in values and ("HOBBIT", "agreement") not in values


def test_too_few_prompts_that_go_on_are_refused(settings, asked, monkeypatch):
    monkeypatch.setattr(table2_runs, "SPARE", 0)
    with pytest.raises(RequestError, match="0 prompts of 8 tokens .* expected 2"):
        STUDY.measure(settings)
