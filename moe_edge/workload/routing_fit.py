"""Fits the routing generator to measured counts; writes `routing_domains.json`.

What is fitted, a measured model:
  - logits of each broad domain at each measured layer, so that the share of tokens
    that choose an expert among their top k is as counted (fixed-point iteration);
  - the correlation of the noise over depth, so that the mutual information of equally
    ranked choices at two measured layers is as counted;
  - the correlation of the noise of neighbouring tokens, so that the share of experts
    that the previous token chose too exceeds chance as in the public route traces.
What is held out and stated (total variation of expert shares): half of the counts, the
counts of first choices, and the middle layer, predicted from the outer two by rank.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import ndtr

from moe_edge.core.checks import ConfigError, OutputError
from moe_edge.core.files import write_text
from moe_edge.core.json_reader import json_objects
from moe_edge.core.progress import progress
from moe_edge.workload.routing_model import (
    BROAD,
    RoutingModel,
    SourceFit,
    count_ids,
    smallest,
)
from moe_edge.workload.trace_reader import read_trace
from moe_edge.workload.traces import DECODE

COUNTS = "routing/expert_counts.jsonl"
CROSS = "routing/crosslayer_counts.jsonl"
TRACES = (
    "routing/trace_qwen3_30b_a3b.csv.gz",
    "routing/trace_gemma4_26b_a4b.csv.gz",
)
TRACE_EXPERTS = 128
# source -> (name in the files, layers of the model, measured layers, top k)
MODELS = {
    "olmoe": ("OLMoE-1B-7B-0924", 16, (0, 7, 15), 8),
    "mixtral": ("Mixtral-8x7B-v0.1", 32, (0, 7, 15), 2),
}
TOKENS = 20_000  # behind every estimate here
ROUNDS = 60


def fit_routing(*, data_dir: str, out: str) -> dict[str, Any]:
    """Fits all sources, writes the parameters of `RoutingModel.load` as JSON, and
    returns what was held out, by source."""
    if Path(out).is_dir():
        raise OutputError(f"output file {out} is a folder; name a file in it")
    fitted = fit_all(data_dir)
    write_text(out, json.dumps(fitted, separators=(",", ":")) + "\n")
    return {name: entry["held_out"] for name, entry in fitted["sources"].items()}


def fit_all(data_dir: str | Path) -> dict:
    """The content of `routing_domains.json`.

    Raises:
      OSError: a file is missing. ConfigError: it lacks a model, domain or layer.
    """
    data_dir = Path(data_dir)
    counts, cross = (
        [row for _, row in json_objects(data_dir / name)] for name in (COUNTS, CROSS)
    )
    excess = recall_excess(data_dir)
    time_rho = fit_time_rho(excess)
    return {
        "format_version": 1,
        "command": "python launch/fit_routing.py --data_dir DATA --out FILE",
        "fitted_to_sha256": {
            name: hashlib.sha256((data_dir / name).read_bytes()).hexdigest()
            for name in (COUNTS, CROSS, *TRACES)
        },
        "previous_token_excess": round(excess, 4),
        "sources": {
            source: fit_source(source, counts, cross, time_rho) for source in MODELS
        },
    }


def fit_source(source: str, counts, cross, time_rho: float) -> dict:
    """One entry of `sources`."""
    name, num_layers, layers, top_k = MODELS[source]
    by_domain = {
        domain: np.array(
            [
                fit_logits(token_share(counts, name, domain, layer, top_k)[0], top_k)
                for layer in layers
            ]
        )
        for domain in progress(BROAD, f"domains of {source} fitted")
    }
    base_AE = np.mean([by_domain[d] for d in BROAD], axis=0)
    # Mixtral's counts end at half depth.
    depths = np.array(layers) / max(layers[-1], num_layers - 1)
    fit = SourceFit(
        depths=depths.round(4),
        base=base_AE.round(2),
        deviation={d: (v - base_AE).round(2) for d, v in by_domain.items()},
        layer_rho=0.0,
        time_rho=round(time_rho, 3),
    )
    bits = mutual_bits(cross, name, layers, top_k)
    return {
        "num_layers": num_layers,
        "num_experts": fit.base.shape[1],
        "top_k": top_k,
        "depths": fit.depths.tolist(),
        "base": fit.base.tolist(),
        "deviation": {d: v.tolist() for d, v in fit.deviation.items()},
        "layer_rho": round(fit_layer_rho(fit, bits, top_k), 3),
        "time_rho": fit.time_rho,
        "mutual_bits": round(bits, 4),
        "held_out": held_out(fit, counts, name, layers, top_k),
    }


def fit_logits(share_E: np.ndarray, top_k: int) -> np.ndarray:
    """Logits under which experts are among the top k for `share_E` of the tokens."""
    goal_E = _log_odds(share_E)
    logits_E = goal_E.copy()
    for seed in range(ROUNDS):
        got_E = _included(logits_E, top_k, np.random.default_rng(seed))
        logits_E = logits_E + 0.6 * (goal_E - _log_odds(got_E))
    return logits_E - logits_E.mean()


def held_out(fit: SourceFit, counts, name, layers, top_k) -> dict[str, float]:
    """Mean total variation against what the fit has not seen."""
    rng = np.random.default_rng(1)
    half, first, middle = [], [], []
    outer = dataclasses.replace(
        fit,
        depths=fit.depths[[0, 2]],
        base=fit.base[[0, 2]],
        deviation={d: v[[0, 2]] for d, v in fit.deviation.items()},
    )
    for domain in BROAD:
        logits_AE = fit.base + fit.deviation[domain]
        for a, layer in enumerate(layers):
            share_E, tokens = token_share(counts, name, domain, layer, top_k)
            thin_E = rng.binomial(np.round(share_E * tokens).astype(int), 0.5)
            seen_E = fit_logits(thin_E / (tokens / 2), top_k)
            rest_E = share_E * tokens - thin_E
            half.append(_variation(_included(seen_E, top_k, rng), rest_E))
            got_E = _included(logits_AE[a], 1, rng)
            first_E, _ = token_share(counts, name, domain, layer, 1)
            first.append(_variation(got_E, first_E))
        between_E = _layer_at(outer, domain, float(fit.depths[1]))
        got_E = np.sort(_included(between_E, top_k, rng))
        share_E, _ = token_share(counts, name, domain, layers[1], top_k)
        middle.append(_variation(got_E, np.sort(share_E)))
    found = {"half_of_counts": half, "first_choice": first}
    found |= {"middle_layer_by_rank": middle}
    return {name: round(float(np.mean(v)), 4) for name, v in found.items()}


def fit_layer_rho(fit: SourceFit, bits: float, top_k: int) -> float:
    """Correlation over the whole depth that gives `bits` between measured layers."""
    experts = fit.base.shape[1]

    def generated(rho: float) -> float:
        rng, found = np.random.default_rng(0), []
        for domain in BROAD:
            logits_AE = fit.base + fit.deviation[domain]
            for a, depths in enumerate(zip(fit.depths, fit.depths[1:], strict=False)):
                gap = rho ** (depths[1] - depths[0])
                first, fresh = rng.standard_normal((2, TOKENS, experts))
                second = gap * first + np.sqrt(1 - gap**2) * fresh
                ids = [
                    smallest(-np.log(ndtr(z)) * np.exp(-logits_E), top_k).reshape(-1)
                    for z, logits_E in zip((first, second), logits_AE[a:], strict=False)
                ]
                # Counts of equally ranked choices.
                table = np.bincount(ids[0] * experts + ids[1], minlength=experts**2)
                found.append(mutual_information(table.reshape(experts, experts)))
        return float(np.mean(found))

    return _bisect(generated, bits + generated(0.0))  # the same bias on both sides


def fit_time_rho(excess: float) -> float:
    """Correlation of neighbouring tokens that gives this excess of repeated experts.

    Fitted on even popularity, where chance is K / E.
    """
    experts, top_k = 64, 6

    def generated(rho: float) -> float:
        fit = SourceFit(np.zeros(1), np.zeros((1, experts)), {}, 0.0, rho)
        model = RoutingModel(fit, "olmoe", 1, experts, top_k, correlated=True)
        rng = np.random.default_rng(0)
        ids = model._sample_correlated(np.zeros((1, experts)), TOKENS, rng)[:, 0]
        chosen_TE = _chosen(ids.astype(int), experts)
        return float(_repeated(chosen_TE) - top_k / experts)

    return _bisect(generated, excess)


def recall_excess(data_dir: Path) -> float:
    """Share of experts that the previous token chose too, less what chance gives."""
    found = []
    for path in TRACES:
        trace = read_trace(data_dir / path, TRACE_EXPERTS)
        for layer in range(trace.num_layers):  # one token a decode step
            here = (trace.phase == DECODE) & (trace.layer == layer)
            chosen_TE = _chosen(trace.ids_TK[here], TRACE_EXPERTS)
            share_E = chosen_TE.mean(axis=0)
            found.append(_repeated(chosen_TE) - (share_E**2).sum() / share_E.sum())
    return float(np.mean(found))


def mutual_bits(cross: list[dict], name: str, layers, top_k: int) -> float:
    """Mean bits between neighbouring measured layers of a model, over all domains."""
    pairs = list(zip(layers[:-1], layers[1:], strict=True))
    found = [
        mutual_information(np.array(row["counts"], float))
        for row in cross
        if (row["model"], row["top_k"]) == (name, top_k)
        and (row["layer_from"], row["layer_to"]) in pairs
    ]
    if len(found) != len(BROAD) * len(pairs):
        raise ConfigError(f"{CROSS} has {len(found)} rows of {name}, too few")
    return float(np.mean(found))


def mutual_information(table: np.ndarray) -> float:
    """Bits that a row of a table of counts says about its column."""
    p = table / table.sum()
    chance = p.sum(1, keepdims=True) * p.sum(0, keepdims=True)
    seen = p > 0
    return float((p[seen] * np.log2(p[seen] / chance[seen])).sum())


def token_share(rows: list[Mapping], *wanted: str | int) -> tuple[np.ndarray, int]:
    """float64 [E], share of the tokens with each expert in their top k; and tokens.

    Args:
      wanted: model, domain, layer and top k.
    Raises:
      ConfigError: no such row.
    """
    for row in rows:
        if (row["model"], row["domain"], row["layer"], row["top_k"]) == wanted:
            return np.array(row["counts"], float) / row["tokens"], row["tokens"]
    raise ConfigError(f"{COUNTS} has no row {wanted}")


def _chosen(ids_TK: np.ndarray, experts: int) -> np.ndarray:
    chosen_TE = np.zeros((len(ids_TK), experts), bool)
    np.put_along_axis(chosen_TE, ids_TK, True, axis=1)
    return chosen_TE


def _repeated(chosen_TE: np.ndarray) -> float:
    """Share of the chosen experts that the token before chose too."""
    return (chosen_TE[1:] & chosen_TE[:-1]).sum() / chosen_TE[1:].sum()


def _bisect(function, goal: float) -> float:
    low, high = 0.0, 0.999
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < goal else (low, middle)
    return (low + high) / 2


def _included(logits_E, top_k: int, rng) -> np.ndarray:
    waits = rng.standard_exponential((TOKENS, len(logits_E))) * np.exp(-logits_E)
    ids = np.argpartition(waits, top_k - 1, axis=1)[:, None, :top_k]
    return count_ids(ids, len(logits_E))[0] / TOKENS


def _layer_at(fit: SourceFit, domain: str, depth: float) -> np.ndarray:
    """Logits of a layer at `depth` by the rule of RoutingModel, unpermuted."""
    near = int(np.abs(fit.depths - depth).argmin())
    parts = []
    for part_AE in (fit.base, fit.deviation[domain]):
        spread = np.interp(depth, fit.depths, part_AE.std(axis=1))
        parts.append(part_AE[near] * spread / part_AE[near].std())
    return parts[0] + parts[1]


def _log_odds(share):
    share = np.clip(share, 1e-4, 1 - 1e-4)
    return np.log(share / (1 - share))


def _variation(first, second) -> float:
    return 0.5 * float(np.abs(first / np.sum(first) - second / np.sum(second)).sum())
