"""Measured routing, read for the fit of the generator: counts and public traces."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from moe_edge.core.checks import ConfigError
from moe_edge.workload.routing_model import BROAD
from moe_edge.workload.trace_reader import read_trace
from moe_edge.workload.traces import DECODE

COUNTS = "routing/expert_counts.jsonl"
CROSS = "routing/crosslayer_counts.jsonl"
TRACES = (
    "routing/trace_qwen3_30b_a3b.csv.gz",
    "routing/trace_gemma4_26b_a4b.csv.gz",
)
TRACE_EXPERTS = 128


def mutual_information(table: np.ndarray) -> float:
    """Bits that a row of a table of counts says about its column."""
    p = table / table.sum()
    chance = p.sum(1, keepdims=True) * p.sum(0, keepdims=True)
    seen = p > 0
    return float((p[seen] * np.log2(p[seen] / chance[seen])).sum())


def mutual_bits(cross: list[dict], name: str, layers, top_k: int) -> float:
    """Mean bits between neighbouring measured layers of a model, over all domains."""
    pairs = list(zip(layers[:-1], layers[1:], strict=True))
    found = [
        mutual_information(np.array(row["counts"], float))
        for row in cross
        if row["model"] == name
        and row["top_k"] == top_k
        and (row["layer_from"], row["layer_to"]) in pairs
    ]
    if len(found) != len(BROAD) * len(pairs):
        raise ConfigError(f"{CROSS} has {len(found)} rows of {name}, too few")
    return float(np.mean(found))


def read_rows(path: Path) -> list[dict]:
    """The objects of a JSON lines file."""
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def counts_row(rows, name: str, domain: str, layer: int, top_k: int) -> Mapping:
    """The line of one model, domain, layer and top k.

    Raises:
      ConfigError: there is none.
    """
    wanted = (name, domain, layer, top_k)
    for row in rows:
        if (row["model"], row["domain"], row["layer"], row["top_k"]) == wanted:
            return row
    raise ConfigError(f"{COUNTS} has no row {wanted}")


def token_share(rows, name: str, domain: str, layer: int, top_k: int) -> np.ndarray:
    """float64 [E]: share of the tokens that had each expert among their top k."""
    row = counts_row(rows, name, domain, layer, top_k)
    return np.array(row["counts"], float) / row["tokens"]


def recall_excess(data_dir: Path) -> float:
    """Share of experts that the previous token chose too, less what chance gives."""
    found = []
    for path in TRACES:
        trace = read_trace(data_dir / path, TRACE_EXPERTS)
        rows = trace.phase == DECODE
        for layer in range(trace.num_layers):
            here = rows & (trace.layer == layer)
            ids_TK = trace.ids_TK[here]  # one token a decode step
            chosen = np.zeros((len(ids_TK), TRACE_EXPERTS), bool)
            np.put_along_axis(chosen, ids_TK, True, axis=1)
            share_E = chosen.mean(axis=0)
            repeated = (chosen[1:] & chosen[:-1]).sum() / chosen[1:].sum()
            found.append(repeated - (share_E**2).sum() / share_E.sum())
    return float(np.mean(found))
