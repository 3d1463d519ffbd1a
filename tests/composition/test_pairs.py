"""Every pair of options constructs, or a rule of the table says why not."""

import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.engine import refusals as refusals_module
from moe_edge.engine.refusals import RULES, Asked, Rule, refusals, refuse
from moe_edge.offload.evict_base import EVICTIONS
from moe_edge.predict.base import PREDICTORS
from tests.support.compositions import PARTS, asked_of, options_of, pairs
from tests.support.tiny_models import ALL


def expected(pair) -> bool:
    """Whether a pair is to be refused, said by what its parts are."""
    eviction = EVICTIONS.class_of(pair.get("eviction", "lru"))
    predicts = pair.get("predictor", "none") != "none"
    on_the_host = predicts or pair.get("assist") is not None
    on_the_host |= pair.get("memory", "host") != "host"
    on_the_host |= pair.get("layer_io", "arrays") != "arrays" or eviction.host_only
    is_fused, rows = pair.get("mode") == "fused", pair.get("rows")
    is_refused = (is_fused and on_the_host) or (eviction.forgets and predicts)
    if pair.get("devices", 1) > 1:
        is_refused |= is_fused or pair.get("layer_io", "arrays") != "arrays"
    if rows is not None:
        is_refused |= eviction.per_sequence or pair.get("predictor") == "shadow"
    by_company = pair.get("route", "topk") != "topk" or pair.get("assist") is not None
    return is_refused or (rows == "deterministic" and by_company)


def test_every_pair_is_made_or_refused_by_a_rule():
    refused, remedies = 0, tuple(rule.remedy for rule in RULES)
    for pair in pairs():
        if expected(pair):
            with pytest.raises(ConfigError) as error:
                refuse(asked_of(pair))
            assert str(error.value).endswith(remedies), (pair, error.value)
            refused += 1
        else:
            refuse(asked_of(pair))
    assert refused > 20


def test_a_planted_wrong_refusal_is_seen(monkeypatch):
    """A rule too many refuses a pair that is expected to run."""

    def no_lfu(asked):
        return "lfu" if asked.eviction is EVICTIONS.class_of("lfu") else None

    wrong = Rule("eviction `lfu`", "anything", "use lru", no_lfu)
    monkeypatch.setattr(refusals_module, "RULES", [*RULES, wrong])
    with pytest.raises(ConfigError, match="lfu; use lru"):
        test_every_pair_is_made_or_refused_by_a_rule()


def test_a_rule_that_is_gone_is_seen(monkeypatch):
    """Without one a pair runs that is expected to be refused."""
    left = [rule for rule in RULES if rule.name != "rows_of_one_sequence"]
    monkeypatch.setattr(refusals_module, "RULES", left)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_every_pair_is_made_or_refused_by_a_rule()


def test_rules_of_models_refuse_what_they_name_only():
    """With a model that has no such router, no route is refused."""
    for route in PARTS["route"]:
        options = options_of({"route": route})
        assert not [*refusals(Asked.of(options, model=ALL["gqa"]))]
    dense = options_of({})
    config = ALL["gqa"].__class__(**{**vars(ALL["gqa"]), "dense_layers": (0, 1, 2)})
    (found,) = refusals(Asked.of(dense, model=config))
    assert found.what == "nothing_to_offload" and "dense model" in found.reason


def test_rows_and_devices_are_asked_when_they_are_known():
    options = options_of({"mode": "fused"})
    assert not [*refusals(Asked.of(options))]
    (found,) = refusals(Asked.of(options, devices=2))
    assert found.what == "fused_on_several"
    (found,) = refusals(Asked.of(options, recorded=True))
    assert found.what == "fused_recorded"
    for name in ("moe_infinity", "static_prompt"):
        (found,) = refusals(Asked(eviction=EVICTIONS.class_of(name), has_rows=True))
        assert found.what == "rows_of_one_sequence"
    shadow = Asked(predictor=PREDICTORS.class_of("shadow"), has_rows=True)
    assert [*refusals(shadow)][0].what == "rows_of_one_sequence"
    lossy = Asked.of(options_of({"route": "drop"}), has_rows=True, deterministic=True)
    assert [*refusals(lossy)][0].what == "deterministic_by_company"
