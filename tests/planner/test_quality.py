import dataclasses
import json

import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.planner.options import PlanOptions
from moe_edge.planner.quality import Quality, admitted, read_card

FREE, BASE = frozenset(), OffloadOptions(device_memory="25%")
INTERVALS = {"agreement_interval95": [0.9, 0.99], "ratio_interval95": [0.99, 1.01]}


def row(option, ratio, **more):
    found = {"option": option, "agreement": 0.95, "perplexity_ratio": ratio}
    return found | INTERVALS | {"batch": 1} | more


def drop(ratio, budget, threshold=0.1):
    own = {"threshold": threshold, "renormalise": True}
    return row("drop", ratio, device_memory=budget, **own)


@pytest.fixture
def card(tmp_path):
    rows = [
        row("2 of 4 experts", 1.02),
        row("topk", 1.0, device_memory="25%"),
        drop(1.004, "25%"),
        drop(1.2, "10%"),
        drop(1.5, "25%") | {"batch": 3},
        row("experts in q4_0", 1.002),
    ]
    (tmp_path / "cards.json").write_text(json.dumps(rows))
    return tmp_path


def test_card_gives_routes_of_the_nearest_budget_formats_and_k(card):
    found = read_card(str(card), "default", 0.3)
    assert [(q.k, q.expert_dtype, q.options.get("route")) for q in found] == [
        (2, None, None),
        (None, None, "drop"),
        (None, "q4_0", None),
    ]
    assert found[1].ppl_ratio == (0.99, 1.004, 1.01)
    assert found[1].options["route_options"]["threshold"] == 0.1
    assert read_card(str(card), "default", 0.12)[1].ppl_ratio[1] == 1.2


def test_admitted_joins_a_route_and_a_format_and_says_what_is_too_lossy(card):
    asked = PlanOptions(card=[str(card)], max_ppl_ratio=1.01)
    found, refused = admitted(asked, BASE, FREE, "default")
    assert [q.label for q in found] == [
        "lossless",
        "route drop (threshold=0.1, renormalise=True)",
        "experts in q4_0",
        "route drop (threshold=0.1, renormalise=True), experts in q4_0",
    ]
    assert found[3].ppl_ratio[1] == pytest.approx(1.004 * 1.002)
    assert [(r.what, r.reason) for r in refused] == [
        ("k 2", "its perplexity ratio is 1.0200, above 1.01")
    ]


def test_admitted_by_agreement_alone(card):
    asked = PlanOptions(card=[str(card)], max_ppl_ratio=2.0, min_agreement=0.96)
    found, refused = admitted(asked, BASE, FREE, "default")
    assert [q.label for q in found] == ["lossless"]
    assert "its agreement is 0.9500, below 0.96" in refused[0].reason


def test_deferral_is_allowed_where_mode_fused_is_tried(tmp_path):
    rows = [row("assist_deferred", 1.006, assist="all", device_memory="25%")]
    (tmp_path / "cards.json").write_text(json.dumps(rows))
    asked = PlanOptions(card=[str(tmp_path)], max_ppl_ratio=1.01)
    found, refused = admitted(asked, BASE, FREE, "default", with_fused=True)
    assert [q.label for q in found] == ["lossless", "deferred assist all"]
    assert refused == [] and not OffloadOptions(**found[1].options).lossless
    for fixed, fused in ((FREE, False), (frozenset({"assist"}), True)):
        found, refused = admitted(asked, BASE, fixed, "default", with_fused=fused)
        assert [q.label for q in found] == ["lossless"]
        assert "of mode fused" in refused[0].reason


def test_lossless_plans_need_no_card():
    found, refused = admitted(PlanOptions(), BASE, FREE, "default")
    assert found == [Quality()] and refused == []


def test_lossy_plans_without_a_card_say_how_to_get_one():
    asked = PlanOptions(max_ppl_ratio=1.01)
    _, refused = admitted(asked, BASE, FREE, "default")
    assert "moe-edge fidelity" in refused[0].remedy


def test_fixed_route_is_kept_or_refused(card):
    base = dataclasses.replace(BASE, route="drop", route_options={"threshold": 0.1})
    asked = PlanOptions(card=[str(card)], max_ppl_ratio=1.01)
    found, _ = admitted(asked, base, {"route"}, "default")
    assert {q.options["route"] for q in found} == {"drop"}
    base = dataclasses.replace(BASE, route="drop", route_options={"threshold": 0.3})
    with pytest.raises(ConfigError, match="route drop is fixed, and no card says"):
        admitted(asked, base, {"route"}, "default")


def test_fixed_lossless_route_leaves_formats_and_k(card):
    asked = PlanOptions(
        card=[str(card)],
        max_ppl_ratio=1.1,
        fixed=["route=topk"],
        device_memory="25%",
    )
    found, _ = admitted(asked, *asked.base(None), "default")
    assert [q.label for q in found] == ["lossless", "k 2", "experts in q4_0"]


def test_card_of_another_checkpoint_is_refused(card):
    (card / "result.json").write_text(json.dumps({"model": {"name": "a/OLMoE"}}))
    assert read_card(str(card), "b/OLMoE", None)
    with pytest.raises(ConfigError, match="is of checkpoint 'a/OLMoE', the plan is fo"):
        read_card(str(card), "default", None)


@pytest.mark.parametrize("content", ["{}", '[{"option": "experts in q4_0"}]'])
def test_what_is_no_card_is_refused(tmp_path, content):
    (tmp_path / "cards.json").write_text(content)
    with pytest.raises(ConfigError, match="is no fidelity card"):
        read_card(str(tmp_path), "default", None)
