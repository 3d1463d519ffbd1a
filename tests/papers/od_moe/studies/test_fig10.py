"""Figure 10: the timing model at the paper's scale, and held against live runs."""

import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.metrics.frames import Estimate, Rows, tables
from moe_edge.metrics.machine import REPOSITORY
from moe_edge.metrics.results import write_rows
from moe_edge.metrics.schema import read_result
from moe_edge.papers.od_moe.cluster.timing import Timing
from moe_edge.papers.od_moe.studies.fig10 import (
    EARLY,
    LATE,
    STUDY,
    Fig10Settings,
    speeds_of,
    tell,
)
from moe_edge.papers.od_moe.studies.held import (
    LiveEntry,
    LiveModel,
    checks_of,
    timing_of,
)
from moe_edge.papers.od_moe.studies.live import STUDIES as LIVE
from moe_edge.papers.od_moe.studies.live import derive
from moe_edge.papers.od_moe.studies.paper_scale import parts_of, scaled_recall
from tests.support.entries import page_of, result_of

MODEL_ENTRY = {"name": "default", "params": 1, "weights": "toy trained here"}
MODEL = LiveModel(layers=2, top_k=2, workers=4, groups=2)
ALIGNED = "1 both aligned, late"


def live_entry(folder, speed_over_model=1.0, **found):
    """An entry of one case whose layers take 1 s and 2 s, loads 4 s, shadow 1 s."""
    timing = Timing(2, 1.0, 2.0, 4.0, 1.0, missed_ratio=0.19, reload_s=4.0)
    values = {
        "decode_tokens_per_s": speed_over_model / timing.token_s(9),
        "over_resident": speed_over_model * 6 / timing.token_s(9),
        "recall": 0.9,
        "t_load_s": 4.0,
        "t_maxload_s": 4.0,
        "t_shadow_s": 1.0,
    } | found
    rows = Rows(LIVE["od_moe_fig8"].frames)
    rows("cases", ALIGNED, **values)
    rows.about |= {"model": MODEL_ENTRY, "workload": {"new_tokens": 10}}
    given = {"config_text": "", "started_s": 0.0}
    write_rows(folder, "od_moe_fig8", rows, derive, **given)
    return str(folder)


def test_page_says_what_is_modelled():
    settings, rows = Fig10Settings(), Rows(STUDY.frames)
    recall = {n: Estimate(0.9, 9, 0.8, 1.0, "all") for n in settings.kv_periods}
    tell(rows, settings, recall, {ALIGNED: 1.0})
    result = result_of(STUDY, rows)
    page, _ = page_of(STUDY, result)
    assert "no overhead up to 50 ms makes another one so" not in page
    assert f"the model is 1.00 ({ALIGNED}) to 1.00 ({ALIGNED}) times as fast" in page
    assert len(result["checks"]) == 2


def test_live_case_gives_the_times_of_its_parts(tmp_path):
    entry = LiveEntry.read(live_entry(tmp_path / "live", speed_over_model=0.8))
    timing = timing_of(ALIGNED, entry.cases[ALIGNED], MODEL)
    assert timing.main_s == pytest.approx(1.0)
    assert timing.worker_s == pytest.approx(2.0)
    assert timing.missed_ratio == pytest.approx(0.19)  # 1 - .9 ** 2
    assert timing.reload_s == 4.0  # a worker loads one expert a layer
    ratios = entry.over_measured(MODEL)
    assert ratios == {ALIGNED: pytest.approx(1.25)}
    assert list(checks_of(ratios).values()) == [False]
    assert list(checks_of({ALIGNED: 0.9}).values()) == [True]


def test_the_entry_is_held_against_the_live_entry_that_is_committed():
    results = REPOSITORY / "results"
    stored = tables(read_result(results / "od_moe_fig10")["frames"])["held"]
    live = LiveEntry.read(str(results / "od_moe_fig8"))
    model = LiveModel(layers=6, top_k=8, workers=4, groups=2)  # the default model's
    found = stored.set_index("case").over_measured.to_dict()
    assert found == pytest.approx(live.over_measured(model))


def test_case_without_predictions_waits_for_every_load():
    found = {"decode_tokens_per_s": 0.1, "over_resident": 0.6, "recall": 0.0}
    found |= {"t_load_s": 4.0, "t_maxload_s": 4.0}
    timing = timing_of("6 no prefetch", found, MODEL)
    assert timing.shadow_s is None and timing.missed_ratio == 0
    assert timing.token_s(9) == pytest.approx(2 * (1 + 4 + 2))
    assert timing_of("5 random", found, MODEL).shadow_s == 0  # named at once, wrongly


def test_recall_keeps_the_proportion_of_misses():
    scaled = scaled_recall({1: 0.99, 4: 0.98}, "int8")
    assert scaled == {1: pytest.approx(0.9734), 4: pytest.approx(1 - 2 * 0.0266)}
    assert scaled_recall({1: 1.0, 4: 0.98}, "full") == {1: 1.0, 4: 0.98}


def test_parts_add_up_to_the_papers_cached_model():
    parts = parts_of("rtx_3090", 0.5)
    slower = parts_of("rtx_3080", 0.5)
    resident_s = 32 * (parts["main_s"] + parts["worker_s"])
    assert 0.18 < resident_s < 0.22  # 1 / 4.89 s, one expert's time against messages
    assert parts["load_s"] == slower["load_s"] == pytest.approx(0.028, rel=0.01)
    assert slower["worker_s"] > parts["worker_s"]
    assert parts["kv_s"] == pytest.approx(256e3 / 125e6)


def test_overhead_of_alignments_makes_longer_periods_best():
    settings = Fig10Settings(gpus=("rtx_3080",), align_costs_s=(0.0, 0.02))
    misses = {1: 0.0266, 2: 0.0285, 4: 0.0295, 8: 0.0313, 16: 0.0332, 32: 0.0342}
    speeds = speeds_of(settings, {n: 1 - miss for n, miss in misses.items()})
    best = {case: max(by_kv, key=by_kv.get) for case, by_kv in speeds.items()}
    assert best["rtx_3080", LATE, 0.0] == best["rtx_3080", EARLY, 0.0] == 1
    assert best["rtx_3080", LATE, 0.02] == 4
    early, late = speeds["rtx_3080", EARLY, 0.0], speeds["rtx_3080", LATE, 0.0]
    assert early[1] > 1.05 * late[1]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"gpus": ("rtx_3090", "abacus")}, "abacus.*rtx_3080"),
        ({"align_costs_s": (0.0, -1.0)}, "align_costs_s.*-1"),
        ({"shadow_share": 0.0}, "shadow_share.*0"),
        ({"kv_periods": (1, 0)}, "kv_periods must be a positive whole .* 0"),
        ({"precision": "q3"}, "precision 'q3'; known"),
    ],
)
def test_settings_that_cannot_be_modelled_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        Fig10Settings(**change)


def test_live_entry_that_is_none_is_refused(tmp_path):
    settings = Fig10Settings(live=str(tmp_path / "none"))
    with pytest.raises(FileNotFoundError, match="live: .*none.*od_moe_fig8 writes"):
        STUDY.check(settings)
    other = live_entry(tmp_path / "other", recall=None)
    with pytest.raises(ConfigError, match=f"live: .*{ALIGNED}.*of od_moe_fig8"):
        LiveEntry.read(other)
