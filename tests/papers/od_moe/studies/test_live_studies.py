"""Figures 8 and 9: entries from rows of live runs, which are made up here."""

import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.metrics.results import write_entry
from moe_edge.metrics.schema import validate_entry
from moe_edge.papers.od_moe.studies import live
from moe_edge.papers.od_moe.studies.live import LiveSettings, PeriodSettings

STUDIES = live.STUDIES


class FakeRuns:
    """Rows by what is asked: the shorter the periods, the faster."""

    model = {"name": "default", "params": 1, "weights": "toy trained here"}
    sources = ()

    def __init__(self, settings):
        self.asked = []

    def run(self, number, shadow, periods, departure):
        late = departure == "late"
        seconds = 2.0 + number / 8 + sum(n or 32 for n in periods) / 64 + late / 4
        has_shadow = shadow not in ("none", "random")
        return {
            "decode_tokens_per_s": 1 / seconds,
            "resident_tokens_per_s": 1.0,
            "recall": 0.99,
            "reloads": 3,
            "t_load_s": 0.5,
            "t_maxload_s": 0.5,
            "t_shadow_s": 1.0 if has_shadow else None,
            "same_tokens": True,
        }


@pytest.mark.parametrize(
    "name, settings, cases, best",
    [
        ("od_moe_fig8", LiveSettings(rounds=2), 10, "1 both aligned, speculative"),
        ("od_moe_fig9", PeriodSettings(rounds=2), 9, "T1_KV1, late"),
        (
            "od_moe_fig9",
            PeriodSettings(departures=("late", "speculative"), periods=(0, 1)),
            8,
            "T1_KV1, speculative",
        ),
    ],
)
def test_entry_names_the_fastest_case(
    monkeypatch, tmp_path, name, settings, cases, best
):
    monkeypatch.setattr(live, "LiveRuns", FakeRuns)
    study = STUDIES[name]
    found = study.measure(settings)
    assert found.answer.startswith(f"Best: {best}, ")
    assert found.ours["best"] == best
    assert len(found.ours) == 1 + cases and all(found.checks.values())
    claim = study.claim.entry(found.ours)
    text = {"question": study.question, "config_text": "", "paper_claim": claim}
    result = validate_entry(write_entry(tmp_path / "o", found, **text))
    assert {row["n"] for row in result["metrics"]} == {settings.rounds}
    assert result["workload"]["groups"] == 2


@pytest.mark.parametrize(
    "change, message",
    [
        ({"departures": ("soon",)}, "departures 'soon'; known"),
        ({"periods": (1, -1)}, "periods.*-1"),
        ({"workers": 0}, "workers .*0"),
    ],
)
def test_settings_that_cannot_run_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        PeriodSettings(**change)
