"""Serving at the paper's scale: the same requests in computed time by every system."""

import dataclasses

import pytest

from moe_edge.bench.study import run_study
from moe_edge.core.checks import CapacityError, ConfigError
from moe_edge.metrics.frames import Rows, plain, tables
from moe_edge.metrics.schema import validate_entry
from moe_edge.papers.moe_prism.studies.serving_scale import (
    FIGURES,
    LOOP,
    STUDY,
    Case,
    ScaleSettings,
    derive,
    measure,
    offered_by,
    tell_rates,
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
    run_study(STUDY, SMALL, out_dir=str(tmp_path / "entry"))
    frames = tables(validate_entry(tmp_path / "entry")["frames"])
    rates, gains = (frames[name].set_index("system") for name in ("rates", "gains"))
    assert len(rates) == 3 and set(rates.batch) == {4}
    # Rows of their own K in a batch that others join beat batches that run to the end.
    assert rates.at_once[OURS] > rates.at_once[LOOP] > rates.at_once[FIFO]
    assert rates.goodput[LOOP] > rates.goodput[FIFO]
    much = rates.goodput[OURS] / rates.goodput[FIFO] - 1
    assert gains.goodput[OURS] == pytest.approx(much)


def test_floors_count_sub_experts():
    floors = {each.floor for each in offered_by(SMALL, "olmoe_1b_7b", seed=0)}
    assert min(floors) >= 4 and max(floors) <= 32 and len(floors) > 8


def test_ranges_say_what_each_part_brings_over_all_batches():
    rates = {2: (1.0, 2.0, 3.0), 4: (2.0, 5.0, 4.0)}
    found = {
        (Case("olmoe_1b_7b", batch, system), name): [rate]
        for batch, each in rates.items()
        for system, rate in zip(SMALL.systems, each, strict=True)
        for name in FIGURES
    }
    rows = Rows(STUDY.frames)
    tell_rates(rows, SMALL, found)
    numbers = plain(derive(tables(rows.stored())))
    told = {"system": LOOP, "low": 1.0, "high": 1.5, "cases": 2, "none": 0}
    assert numbers["our_loop"] == [told]
    assert numbers["base"] == FIFO and numbers["scheduler"] == []
    (part,) = numbers["parts_of_loop"]
    assert (part["low"], part["high"]) == (pytest.approx(-0.2), 0.5)


def test_a_gain_that_rounds_do_not_agree_on_is_no_difference():
    rates = {FIFO: [2.0, 4.0, 5.0], LOOP: [2.2, 4.4, 4.5], OURS: [3.0, 6.0, 7.0]}
    found = {
        (Case("olmoe_1b_7b", 4, system), name): each
        for system, each in rates.items()
        for name in FIGURES
    }
    rows = Rows(STUDY.frames)
    tell_rates(rows, SMALL, found)
    (loop,) = plain(derive(tables(rows.stored())))["our_loop"]
    assert loop == {"system": LOOP, "cases": 1, "none": 1}  # and no range
    gain = rows.rows["gains"][0]["goodput"]
    assert gain[2:4] == (pytest.approx(-0.1), pytest.approx(0.1))


def test_device_too_slow_for_any_rate_is_refused():
    slow = dataclasses.replace(SMALL, systems=(FIFO, LOOP), slo_tpot_ms=0.01)
    with pytest.raises(CapacityError, match="4 rows, FIFO: no rate .* goodput is 0;"):
        measure(slow, Rows(STUDY.frames))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"models": ("gpt",)}, "model preset 'gpt'"),
        ({"gpu": "abacus"}, "gpu 'abacus'"),
        ({"systems": ("best",)}, "system 'best'"),
        ({"systems": (FIFO,)}, r"systems are \['FIFO'\], expected two at least"),
        ({"slo_tpot_ms": 0.0}, "slo_tpot_ms"),
        ({"max_batches": (0,)}, "max_batches .* got 0"),
    ],
)
def test_bad_settings_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        ScaleSettings(**given)
