"""Small route traces made by hand."""

import os
from pathlib import Path

import numpy as np

from moe_edge.workload.traces import Trace, ordered_trace

ROOT = Path(__file__).parents[2]
ROUTING = Path(
    os.environ.get("MOE_EDGE_SHARED", ROOT.parent / "shared"), "data", "routing"
)
PUBLIC_HEAD = "turn,phase,step,layer,rank,expert,weight\n"


def make_trace(rows, num_experts=4, scores_TE=None) -> Trace:
    """A trace of rows (phase, step, layer, ids), all of one request unless repeated."""
    K = max(len(ids) for *_, ids in rows)
    ids_TK = np.array([[*ids, *[-1] * (K - len(ids))] for *_, ids in rows], np.int32)
    keys = np.array([row[:3] for row in rows], np.int32)
    return ordered_trace(
        num_experts,
        K,
        request=np.zeros(len(rows), np.int32),
        phase=keys[:, 0],
        step=keys[:, 1],
        layer=keys[:, 2],
        ids_TK=ids_TK,
        weights_TK=np.where(ids_TK >= 0, np.float32(1 / K), np.float32(0)),
        scores_TE=scores_TE,
    )


def changing_rows(raw: dict, steps: int) -> list[tuple]:
    """Of a model with this config.json, for `make_trace`: each step and layer choose
    other experts."""
    E, K, L = raw["num_experts"], raw["num_experts_per_tok"], raw["num_hidden_layers"]
    return [
        (int(step > 3), step, layer, [(step + layer + j) % E for j in range(K)])
        for step in range(steps)
        for layer in range(L)
    ]


def one_layer(prefill, decode, **kwargs) -> Trace:
    """One layer, one expert a step."""
    phases = [0] * len(prefill) + [1] * len(decode)
    both = enumerate(zip(phases, [*prefill, *decode], strict=True))
    return make_trace([(p, step, 0, [e]) for step, (p, e) in both], **kwargs)
