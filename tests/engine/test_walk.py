"""How far a reader walks for a missed expert: the files of its layer."""

from tests.support.layered import NINE, forced_logits, layered
from tests.support.tiny_models import GQA, random_prompts
from tools.walk import walk_of

MOST = 14


def test_a_missed_expert_passes_few_files_and_never_comes_back():
    engine, prompts = layered(slots=9, with_trace=False), random_prompts(GQA, NINE)
    forced_logits(engine, prompts, steps=8)
    walk = walk_of(engine, lambda: forced_logits(engine, prompts, steps=8))
    assert len(walk.entered) <= MOST, [*walk.entered]
    assert walk.entered["engine/layered.py"] == 1
    functions = [call for call in walk.calls if call[0] == "offload/layer_step.py"]
    assert [name for _, name in functions] == ["begin", "fits", "bring"]


def test_a_walk_counts_calls_from_other_files():
    engine = layered(slots=9, with_trace=False)
    forced_logits(engine, random_prompts(GQA, NINE), steps=4)
    walk = walk_of(engine, lambda: forced_logits(engine, random_prompts(GQA, NINE), 4))
    assert sum(walk.entered.values()) == len(walk.calls)
    assert walk.calls[0] == ("engine/layered.py", "_moe_layer")
    # One admission a missed expert, of at most K that a token chooses.
    admitted = [name for _, name in walk.calls].count("admit")
    assert 1 <= admitted <= engine.config.moe.top_k
