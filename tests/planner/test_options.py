import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.planner.options import PlanOptions

REFUSED = [
    ({"checkpoint": "a", "config_json": "b"}, "'a' and --config_json 'b'"),
    ({"batch": 0}, "batch must be a positive whole number, got 0"),
    ({"tpot_ms": -1.0}, "tpot_ms must be positive, got -1.0"),
    ({"temperature": -0.5}, "temperature must be 0 or more and finite, got -0.5"),
    ({"objective": "speed"}, "unknown objective 'speed'"),
    ({"new_tokens": 2}, "new_tokens is 2, expected at least 3"),
    ({"max_ppl_ratio": 0.9}, "max_ppl_ratio is 0.9, expected a number from 1"),
    ({"min_agreement": 1.5}, "min_agreement is 1.5, expected a share from 0 to 1"),
    ({"objective": "quality"}, "objective quality and max_ppl_ratio 1.0"),
    ({"context": 100}, "context is 100 tokens, and a prompt of 128 with 128 new"),
    ({"host_memory": "50%"}, "host_memory is '50%', expected a size such as 8GiB"),
    ({"margin": "2GiB"}, "margin is '2GiB', expected a share such as 5%"),
    ({"margin": "5"}, "margin is '5', expected a share such as 5%"),
    ({"host_memory": "much"}, "host_memory is 'much', expected a size such as 8GiB"),
    ({"config_json": "c.json"}, "--config_json 'c.json' is planned without weights"),
    (
        {"config_json": "c.json", "machine": "rtx_4090", "verify": True},
        "--verify needs weights, and --config_json has none",
    ),
    (
        {"config_json": "c.json", "machine": "rtx_4090", "device_memory": "auto"},
        "--device_memory auto asks this machine",
    ),
]


@pytest.mark.parametrize(("given", "message"), REFUSED, ids=lambda x: str(x)[:30])
def test_options_that_no_plan_could_meet_are_refused(given, message):
    with pytest.raises(ConfigError) as caught:
        PlanOptions(**given)
    assert message in str(caught.value)


def test_base_keeps_what_the_user_fixed():
    asked = PlanOptions(
        fixed=["eviction=lfu", "horizon=2"], device_memory="25%", link_bytes_per_s=1e8
    )
    base, fixed = asked.base(OffloadOptions(prefetch_limit=4))
    assert (base.eviction, base.horizon, base.prefetch_limit) == ("lfu", 2, 4)
    assert (base.device_memory, base.link_bytes_per_s) == ("25%", 1e8)
    assert fixed == {"eviction", "horizon", "prefetch_limit"}


def test_base_keeps_a_fixed_value_that_is_the_default():
    _, fixed = PlanOptions(fixed=["eviction=lru"]).base(None)
    assert fixed == {"eviction"}


@pytest.mark.parametrize(
    ("given", "offload", "message"),
    [
        ({"fixed": ["eviction"]}, {}, "--fixed is 'eviction', expected NAME=VALUE"),
        ({"fixed": ["colour=red"]}, {}, "colour"),
        ({"fixed": ["horizon='far'"]}, {}, "horizon"),
        (
            {"fixed": ["eviction=lru"]},
            {"eviction": "lfu"},
            "--fixed eviction=lru and offload.eviction = 'lfu'",
        ),
        (
            {"device_memory": "25%"},
            {"device_memory": "30%"},
            "--device_memory is '25%' and the fixed offload.device_memory '30%'",
        ),
        (
            {"fixed": ["route=drop"]},
            {},
            "route drop is fixed, which is lossy, and max_ppl_ratio is 1.0",
        ),
        ({"link_latency_s": 1e-5}, {}, "link_latency_s is 1e-05 and link_bytes_per_s"),
    ],
)
def test_base_refuses_what_excludes_each_other(given, offload, message):
    with pytest.raises(ConfigError) as caught:
        PlanOptions(**given).base(OffloadOptions(**offload) if offload else None)
    assert message in str(caught.value)
