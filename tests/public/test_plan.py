import pytest

import moe_edge as me
from moe_edge.core.checks import ConfigError
from tests.support.public import tiny_folder


def test_plan_gives_arguments_of_offload():
    found = me.plan(
        config_json=str(tiny_folder()),
        machine="rtx_4090",
        device_memory="50%",
        options={"eviction": "lfu"},
        prompt_tokens=8,
        new_tokens=8,
    )
    want = {"device_memory": "50%", "eviction": "lfu"}
    assert found["chosen"]["offload"] == want
    with me.load(tiny_folder()).offload(**found["chosen"]["offload"]) as engine:
        assert engine.stats()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_batch": 2}, "plan has no argument 'max_batch': write batch"),
        ({"tpot_ms": "fast"}, "tpot_ms"),
        ({"options": {"colour": 1}}, "colour"),
        ({"path": 3}, "path is 3, expected a folder, a file or 'default'"),
        (
            {"options": {"eviction": me.Eviction}},
            "options of plan: eviction is .*, expected a name; register the class",
        ),
    ],
)
def test_plan_refuses_bad_arguments(given, message):
    with pytest.raises(ConfigError, match=message):
        me.plan(**given)
