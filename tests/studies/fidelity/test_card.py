import json

import pytest

from moe_edge.core.checks import ConfigError, RequestError
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.metrics.schema import validate_entry
from moe_edge.studies.fidelity.card import run_fidelity
from tests.support.tiny_checkpoint import TEXT, write_tiny_checkpoint

pytestmark = pytest.mark.slow

SMALL = {"rows": 2, "prompt_tokens": 6, "forced_tokens": 20, "batch_sizes": (2,)}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("card") / "tiny"))


def test_run_fidelity_writes_a_card_of_every_option(tiny, tmp_path, capsys):
    (tmp_path / "t.txt").write_text(TEXT * 3)
    own = OffloadOptions(
        route="substitute", route_options={"a": 0.5}, asynchronous=False
    )
    summary = run_fidelity(
        out_dir=str(tmp_path / "o"),
        checkpoint=tiny,
        text="t.txt",
        data_dir=str(tmp_path),
        device_memory=" 25%",
        offload=own,
        a_values=(0.2,),
        thresholds=(0.3,),
        **SMALL,
    )
    cards = summary["cards"]
    # Half the experts, lossless, 3 rules, own's a, 2 of dropping.
    assert len(cards) == 1 + 1 + 3 + 1 + 2
    assert cards[0]["option"] == "1 of 2 experts" and cards[0]["perplexity_ratio"] != 1
    assert {card["device_memory"] for card in cards[1:]} == {"25%"}
    lossless = [card for card in cards if card["option"] == "topk"]
    assert all(card["agreement"] == card["perplexity_ratio"] == 1 for card in lossless)
    assert [c["a"] for c in cards if c["option"] == "substitute"].count(0.5) == 1
    assert summary["weight_rule"]["best"] in summary["weight_rule"]["rules"]
    result = validate_entry(tmp_path / "o")
    assert list(result["checks"].values()) == [True]
    assert len(result["workload"]["text"]["sha256"]) == 64
    stored = json.loads((tmp_path / "o" / "cards.json").read_text())
    assert [card["option"] for card in stored] == [card["option"] for card in cards]
    names = {row["policy"] for row in result["metrics"]}
    assert "batch 2: 1 of 2 experts" in names
    assert any(name.startswith("25%, batch 2: substitute a=0.2") for name in names)
    assert "lossless offloading" in capsys.readouterr().out


def test_run_fidelity_default_text_is_packaged(tiny, tmp_path):
    options = {"out_dir": str(tmp_path / "o"), "checkpoint": tiny, "dry_run": True}
    assert run_fidelity(**options)["options"] == 3 * 6 + 2 * 4


@pytest.mark.parametrize(
    "given, error, message",
    [
        ({"batch_sizes": ()}, ConfigError, "batch_sizes is empty"),
        ({"batch_sizes": (0,)}, ConfigError, "batch size must be .* got 0"),
        ({"a_values": (1.5,)}, ConfigError, "a must lie in .0, 1., got 1.5"),
        ({"device_memory": "25%,x"}, ConfigError, "device memory 'x' is no budget"),
        ({"rows": 10**6}, RequestError, "1000000 rows of 6 . 20 need 26000000"),
    ],
)
def test_run_fidelity_refuses_bad_input(tiny, tmp_path, given, error, message):
    options = SMALL | {"out_dir": str(tmp_path / "o"), "checkpoint": tiny} | given
    with pytest.raises(error, match=message):
        run_fidelity(**options)
    assert not (tmp_path / "o").exists()
