"""What an absent expert costs where the host computes it, compared with its bytes.

One expert a call, which is the worst case: the engine asks for all that a layer lacks.
The rate is the best of a few readings by all cores.
"""

import functools
import statistics

import numpy as np

from moe_edge.bench.rounds import interleave, seconds_of
from moe_edge.bench.speed import Rows, make_row
from moe_edge.engine.routing_reader import Reading
from moe_edge.studies.speed.decode import memory_bandwidth
from moe_edge.studies.speed.runs import SHARE, load_offloaded

BAR = 1.5  # over its bytes at the memory's rate
MOST = 512  # experts of a round, each read once
MICRO = 1e6


def assist_rows(name: str, folder, repeats: int) -> Rows:
    """One expert of one token after the other by the engine's host backend, in a random
    order."""
    engine = load_offloaded(folder, device_memory=SHARE, assist="two_pointer")
    backend, config = engine.backends[0], engine.config
    store = engine.queue.store
    rng, top_k = np.random.default_rng(0), config.moe.top_k
    hidden_TD = rng.standard_normal((1, config.d_model), np.float32)
    weights_TK = np.full((1, top_k), 1 / top_k, np.float32)
    asked = []
    for layer in store.moe_layers:
        for expert in range(store.num_experts):
            ids_TK = (expert + np.arange(top_k, dtype=np.int32)) % store.num_experts
            reading = Reading(
                layer=layer,
                step=0,
                sequences=[0],
                shape_BS=(1, 1),
                ids_TK=ids_TK[None],
                weights_TK=weights_TK,
                host_weights_TK=weights_TK,
                scores_TE=None,
                wanted_NE=None,
            )
            asked.append((reading, [expert]))
    asked = [asked[n] for n in rng.permutation(len(asked))[:MOST]]

    def compute() -> None:
        for reading, experts in asked:
            backend.start(hidden_TD, reading, experts)()

    cases = {
        "ours": functools.partial(seconds_of, compute),
        "rate": lambda: max(memory_bandwidth(repeats=3).values()),
    }
    found = interleave(cases, repeats)
    if backend.computed != (1 + repeats) * len(asked):  # a round more: not measured
        raise RuntimeError(f"{backend.computed} experts ran of {len(asked)} a round")
    engine.close()
    return [
        make_row(
            f"{name}, one absent expert by CPU assist",
            [MICRO * seconds / len(asked) for seconds in found["ours"]],
            "us",
            peer=[MICRO * store.block_bytes / rate for rate in found["rate"]],
            peer_name="its bytes at the memory's rate",
            bar=BAR,
            block_bytes=store.block_bytes,
            bandwidth_bytes_per_s=statistics.median(found["rate"]),
        )
    ]
