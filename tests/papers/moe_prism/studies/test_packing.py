"""Resident shares by hand: the paper's example, laws, refusals, the study's entry."""

import pytest

from moe_edge.bench.registry import find
from moe_edge.bench.study import run_study
from moe_edge.core.checks import ConfigError
from moe_edge.metrics.schema import check_answer, validate_entry
from moe_edge.papers.moe_prism.studies.packing import resident_share
from tests.support.entries import row_of


def test_the_papers_example():
    """28.5 experts of memory a layer: 28 of 64, or 114 of 256 sub-experts."""
    model = {"expert_bytes": 100, "layers": 26, "experts": 64}
    memory = 26 * 2850
    assert resident_share(memory, **model) == 28 / 64
    assert resident_share(memory, **model, sub_experts=4) == (28 * 4 + 2) / (64 * 4)


def test_one_pool_leaves_one_fragment_in_all():
    model = {"expert_bytes": 100, "layers": 10, "experts": 8}
    memory = 10 * 250 + 50  # 25.5 experts; 2.55 a layer
    assert resident_share(memory, **model) == 2 / 8
    assert resident_share(memory, **model, sub_experts=4) == 10 / 32
    assert resident_share(memory, **model, pooled=True) == 25 / 80
    assert resident_share(memory, **model, sub_experts=4, pooled=True) == 102 / 320


def test_shares_lie_in_0_to_1_and_more_sub_experts_never_lose():
    for memory in range(0, 5000, 37):
        shares = [resident_share(memory, 100, 4, 8, u) for u in (1, 2, 4, 8)]
        assert 0 <= shares[0] and shares == sorted(shares) and shares[-1] <= 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"memory_bytes": -1}, "memory_bytes"),
        ({"expert_bytes": 0}, "expert_bytes must be positive, got 0"),
        ({"layers": 0}, "layers"),
        ({"sub_experts": 0}, "sub_experts"),
    ],
)
def test_sizes_that_cannot_be_are_refused(wrong, message):
    sizes = {"memory_bytes": 1, "expert_bytes": 1, "layers": 1, "experts": 1}
    with pytest.raises(ConfigError, match=message):
        resident_share(**sizes | wrong)


def test_the_study_writes_a_valid_entry(tmp_path):
    study = find("moe_prism_packing")
    settings = study.settings(models=("olmoe_1b_7b",), cards_gb=(12.0,), steps=50)
    summary = run_study(study, settings, out_dir=str(tmp_path / "e"))
    check_answer(summary["answer"])
    result = validate_entry(tmp_path / "e")
    row = row_of(result, "cards", memory="a part a layer")
    assert row["whole"] <= row["sub_experts"] <= row["whole"] + 0.75 / 64
    pooled = row_of(result, "sweep", memory="one pool")
    assert 0 <= pooled["most"] <= 0.75 / (16 * 64)
