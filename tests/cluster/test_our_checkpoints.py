"""Every mode of a cluster on checkpoints of our own format, as processes."""

import json

import pytest

from moe_edge.cluster.run import run_cluster
from moe_edge.convert.open import open_checkpoint
from moe_edge.engine.run_generate import run_generate
from tests.support.our_checkpoints import OURS, write_ours

NEW = 12
MODES = {
    "prism": {"servers": 2},
    "od_moe": {"mode": "od_moe", "workers": 2, "groups": 1, "shadow": "full"},
}
CASES = [(kind, mode) for kind in OURS for mode in MODES]


@pytest.fixture(scope="module")
def ours(request, tmp_path_factory):
    return write_ours(tmp_path_factory.mktemp("ours"), request.param)


@pytest.fixture(scope="module")
def of_one_machine(ours, prompts):
    folder = ours.parent / "alone"
    given = {"checkpoint": ours, "prompts": str(prompts), "batch_size": 1}
    run_generate(out_dir=str(folder), max_new_tokens=NEW, **given)
    return tokens_in(folder)


def tokens_in(folder) -> dict[str, list[int]]:
    lines = (folder / "generations.jsonl").read_text().splitlines()
    return {row["id"]: row["tokens"] for row in map(json.loads, lines)}


@pytest.mark.slow
@pytest.mark.parametrize(("ours", "mode"), CASES, indirect=["ours"])
def test_every_mode_gives_the_tokens_of_one_machine(
    ours, mode, of_one_machine, prompts, tmp_path
):
    given = {"checkpoint": str(ours), "prompts": str(prompts), "max_new_tokens": NEW}
    given |= MODES[mode]
    if mode != "od_moe":
        moe = open_checkpoint(ours).config.moe
        half = 2 * moe.num_experts // 2 + 1  # of two layers, and the free slot
        given["slots"] = f"{half},{half}"
    summary = run_cluster(out_dir=str(tmp_path / "o"), **given)
    assert tokens_in(tmp_path / "o") == of_one_machine
    assert summary["lost_requests"] == 0 and not summary["failures"]
