"""Figures 8 and 9: entries from rows of live runs, which are made up here."""

import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.metrics.frames import Rows
from moe_edge.papers.od_moe.studies import live
from moe_edge.papers.od_moe.studies.live import LiveSettings, PeriodSettings
from tests.support.entries import page_of, result_of, rows_of

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
def test_entry_names_the_fastest_case(monkeypatch, name, settings, cases, best):
    monkeypatch.setattr(live, "LiveRuns", FakeRuns)
    study, rows = STUDIES[name], Rows(STUDIES[name].frames)
    study.measure(settings, rows)
    result = result_of(study, rows)
    page, _ = page_of(study, result)
    assert f"**Best: {best}, " in page
    found = rows_of(result, "cases")
    assert len(found) == cases and all(result["checks"].values())
    assert {row["over_resident_n"] for row in found} == {settings.rounds}
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
