import pytest

from moe_edge.engine.generate import generate
from moe_edge.engine.resident import ResidentEngine
from moe_edge.engine.weights import load_weights
from moe_edge.offload.link import EmulatedLink
from moe_edge.offload.store import HostStore
from moe_edge.papers.smoe.studies.layerwise import LayerwiseEngine
from tests.support.tiny_models import GQA, RandomReader, random_prompts

pytestmark = pytest.mark.slow

LAYER_S = 0.03  # transfer of a layer


class StoredReader(RandomReader):
    """Reads records in place, as checkpoints do."""

    def release(self):
        pass


@pytest.fixture
def engine():
    reader = StoredReader(GQA)
    weights = load_weights(reader, with_experts=False)
    store = HostStore(reader)
    rate = store.num_experts * store.block_bytes / LAYER_S
    engine = LayerwiseEngine(weights, store, EmulatedLink(rate))
    yield engine
    engine.close()


def test_layerwise_gives_the_resident_tokens_and_waits_for_whole_layers(engine):
    weights = load_weights(StoredReader(GQA))
    resident = ResidentEngine(weights, programs=engine.programs)
    prompts = random_prompts(GQA, [9, 5])
    expected = generate(resident, prompts, 6).tokens
    assert generate(engine, prompts, 6).tokens == expected
    engine.reset_records()
    run = generate(engine, prompts, 6)
    assert run.tokens == expected
    # A prefill and five steps of two MoE layers; nothing is kept between steps.
    layer_bytes = GQA.moe.num_experts * engine._store.block_bytes
    assert engine.movement()["bytes_moved"] == 6 * 2 * layer_bytes
    assert run.decode_s >= 5 * 2 * LAYER_S
