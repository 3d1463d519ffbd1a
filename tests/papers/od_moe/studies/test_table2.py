"""Table 2: engines of one process beside live runs, which are made up here."""

import pytest

from moe_edge.bench.study import run_study
from moe_edge.core.checks import ConfigError, RequestError
from moe_edge.metrics.frames import Rows
from moe_edge.metrics.schema import validate_entry
from moe_edge.papers.od_moe.studies import table2, table2_rows, table2_runs
from moe_edge.papers.od_moe.studies.table2 import (
    RESIDENT,
    SAME_PROCESSES,
    STAND_INS,
    STUDY,
    Table2Settings,
    peers,
)
from moe_edge.papers.od_moe.studies.table2_rows import Text
from tests.support.entries import page_of, result_of, row_of, rows_of
from tests.support.prompts import refuses_a_start, write_prompts
from tests.support.tiny_checkpoint import TEXT, write_tiny_checkpoint

AT = (16, 64)
OWN = "OD-MoE, speculative"


def test_peers_are_those_that_are_told():
    options = peers([[0, 1]], 2, 0.05)
    assert list(options) == list(STAND_INS)
    assert [name for name, one in options.items() if not one.lossless] == ["AdapMoE"]


def test_a_start_without_texts_of_its_own_is_refused_before_any_is_made(tmp_path):
    given = write_prompts(tmp_path, {"a": [40] * 12 + [8] * 400})
    given |= {"prompt_tokens": 8, "new_tokens": 24, "prompt_lengths": (8,)}
    settings = Table2Settings(**given, fidelity_rows=5)
    refuses_a_start(STUDY, settings, 2, tmp_path / "o", "12 prompts of 32", "15 are")
    settings = Table2Settings(
        **given | {"prompt_lengths": (40,)}, history=4, fidelity_rows=1
    )
    refuses_a_start(STUDY, settings, 1, tmp_path / "o", "12 prompts of 40", "16 are")


def entry(shares=None, **texts):
    """One round of each system; the peers hold 30 bytes, OD-MoE 31."""
    found = {RESIDENT: Text(1.0, 0.5), OWN: Text(2.0, 1.0), **texts}
    found |= {SAME_PROCESSES: Text(2.0, 0.9)} | dict.fromkeys(STAND_INS, Text(2.0, 4.0))
    rows = Rows(STUDY.frames)
    table2_rows.tell_texts(rows, {(who, AT): [one] for who, one in found.items()})
    roles = table2_rows.roles
    held = {RESIDENT: roles(90, 0, 0), OWN: roles(1, 0, 30)}
    held |= {peer: roles(1, 0, 29) for peer in STAND_INS}
    table2_rows.tell_bytes(rows, held, {OWN: 0.3})
    rows("fidelity", RESIDENT, perplexity=3.0)
    rows.about["workload"] = {"fidelity_rows": 8, "new_tokens": 64}
    return result_of(STUDY, rows)


def test_measures_of_a_text():
    result = entry()
    speeds = row_of(result, "speeds", system=OWN)
    assert speeds["output"] == 64 / (2 + 63) and speeds["over_resident"] == 0.5
    means = row_of(result, "over", system=OWN, base=RESIDENT)
    assert means["decode"] == 0.5 and means["ttft_ms"] == 2.0
    assert all(result["checks"].values()), result["checks"]
    page, _ = page_of(STUDY, result)
    assert f"{OWN} decodes at 0.500 of the resident engine's speed with 0.344" in page
    assert "- For Mixtral-offloading stands: LRU and" in page


@pytest.mark.parametrize(
    "text, failed",
    [
        (Text(2.0, 1.0, is_same=False), "every lossless system gave"),
        (Text(2.0, 1.2), "speculative: decode >= .85"),
    ],
)
def test_checks_fail_where_they_should(text, failed):
    found = entry(**{OWN: text})["checks"]
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
    numbers = result["numbers"]
    assert [one["decode"] for one in numbers["same"]] == [0.5, 0.5]
    assert numbers["largest"] == "OD-MoE, speculative"
    late = row_of(result, "speeds", system="OD-MoE, late")
    assert (late["tokens_in"], late["tokens_out"], late["decode"]) == (8, 4, 50)
    same = row_of(result, "speeds", system=SAME_PROCESSES)
    assert same["ttft_ms"] == pytest.approx(100)
    held = {row["system"]: row["in_all"] for row in rows_of(result, "bytes")}
    assert held["OD-MoE, late"] == 126_000
    assert held["OD-MoE, speculative"] == 142_000
    for peer in STAND_INS:
        assert 142_000 - 10_000 < held[peer] <= 142_000
    share = "experts on shadow and workers <= 1/3 of the model's bytes"
    assert summary["checks"][f"OD-MoE, late: {share}"]
    assert not summary["checks"][f"OD-MoE, speculative: {share}"]
    lossy, own, exact = (
        row_of(result, "fidelity", system=name)
        for name in ("AdapMoE", RESIDENT, "HOBBIT")
    )
    assert lossy["perplexity"] != own["perplexity"]
    assert 0 < lossy["dropped"] <= 0.5
    assert "agreement" in lossy and "agreement" not in exact


def test_too_few_prompts_that_go_on_are_refused(settings, asked, monkeypatch):
    monkeypatch.setattr(table2, "SPARE", 0)
    with pytest.raises(RequestError, match="0 prompts of 8 tokens .* expected 2"):
        STUDY.measure(settings, Rows(STUDY.frames))
