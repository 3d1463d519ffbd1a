"""Serving at the paper's scale: the same requests in computed time by every system."""

import dataclasses

import pytest

from moe_edge.core.checks import CapacityError, ConfigError
from moe_edge.metrics.results import write_entry
from moe_edge.metrics.schema import validate_entry
from moe_edge.papers.moe_prism.studies.serving_scale import (
    GOODPUT,
    LOOP,
    STUDY,
    THROUGHPUT,
    Case,
    ScaleSettings,
    answer,
    offered_by,
    run,
)
from moe_edge.papers.moe_prism.studies.serving_studies import FIFO, OURS

SMALL = ScaleSettings(
    models=("olmoe_1b_7b",),
    systems=(FIFO, LOOP, OURS),
    max_batches=(4,),
    requests=30,
    rounds=1,
    output_tokens=64,
    max_context=512,
)


def test_entry_holds_every_system(tmp_path):
    found = run(SMALL)
    write_entry(
        tmp_path / "entry",
        found,
        question=STUDY.question,
        config_text="",
        paper_claim=STUDY.claim.entry(found.ours),
    )
    validate_entry(tmp_path / "entry")
    rates = {(row["policy"], row["name"]): row["value"] for row in found.metrics}
    assert len(rates) == 3 * 2

    def rate(system, name):
        return rates[Case("olmoe_1b_7b", 4, system).label, name]

    # Rows of their own K in a batch that others join beat batches that run to the end.
    assert rate(OURS, THROUGHPUT) > rate(LOOP, THROUGHPUT) > rate(FIFO, THROUGHPUT)
    assert rate(LOOP, GOODPUT) > rate(FIFO, GOODPUT)
    much = rate(OURS, GOODPUT) / rate(FIFO, GOODPUT) - 1
    assert f"goodput {much:+.1%}" in found.ours[f"olmoe_1b_7b, 4 rows, {OURS}"]


def test_floors_count_sub_experts():
    floors = {each.floor for each in offered_by(SMALL, "olmoe_1b_7b", seed=0)}
    assert min(floors) >= 4 and max(floors) <= 32 and len(floors) > 8


def test_answer_says_what_each_part_brings_over_all_batches():
    settings = dataclasses.replace(SMALL, max_batches=(2, 4))
    rates = {2: (1.0, 2.0, 3.0), 4: (2.0, 5.0, 4.0)}
    found = {
        (Case("olmoe_1b_7b", batch, system), GOODPUT): [rate]
        for batch, each in rates.items()
        for system, rate in zip(settings.systems, each, strict=True)
    }
    assert answer(settings, found) == (
        "Over FIFO: continuous, original: goodput +100% to +150%; "
        "sub-experts then goodput -20% to +50%."
    )


def test_device_too_slow_for_any_rate_is_refused():
    slow = dataclasses.replace(SMALL, systems=(FIFO,), slo_tpot_ms=0.01)
    with pytest.raises(CapacityError, match="4 rows, FIFO: no rate .* goodput is 0;"):
        run(slow)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"models": ("gpt",)}, "model preset 'gpt'"),
        ({"gpu": "abacus"}, "gpu 'abacus'"),
        ({"systems": ("best",)}, "system 'best'"),
        ({"slo_tpot_ms": 0.0}, "slo_tpot_ms"),
        ({"max_batches": (0,)}, "max_batches .* got 0"),
    ],
)
def test_bad_settings_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        ScaleSettings(**given)
