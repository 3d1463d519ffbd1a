"""Runs calibration text through a model, one layer after the other.

All calibration tokens pass a layer before any passes the next: one layer's weights
are in memory at a time, so a model need not fit; hidden states of all tokens lie in
files that the kernel pages (2 x tokens x width x 4 bytes, plus half of that
for the experts' input and for each layer that probes look ahead). Every choice of a
layer is thus known before tokens are sampled, so neurons are computed for sampled
tokens only, and the end of a layer is where a killed run goes on (`writer.py`).
"""

import sys

import numpy as np

from moe_edge.core.progress import counter
from moe_edge.profile.activations import MAX_FLOAT16, LayerPrograms, Seen
from moe_edge.profile.calibration import Calibration
from moe_edge.profile.counts import (
    coactivation,
    count_rows,
    domain_counts,
    sample_tokens,
)
from moe_edge.profile.probes import fit_probe
from moe_edge.profile.writer import HIDDEN, ProfileWriter


def record_layers(
    reader,
    calibration: Calibration,
    writer: ProfileWriter,
    facts: dict,
    batch_size: int,
) -> None:
    """Runs every layer that is not done over all windows.

    Raises:
      CheckpointError: states or activations that are not finite.
    """
    config = reader.config
    programs = LayerPrograms(reader)
    shape = (*calibration.tokens_NW.shape, config.d_model)
    if writer.next_layer == 0:
        writer.states(0, shape)[:] = programs.embed(calibration.tokens_NW)
    elif writer.next_layer < config.num_layers:
        print(f"profile: going on at layer {writer.next_layer}", file=sys.stderr)
    steps = -(-shape[0] // batch_size)
    with counter("profile batches", config.num_layers * steps) as count:
        count(writer.next_layer * steps)
        for layer in range(writer.next_layer, config.num_layers):
            programs.load(layer)
            report = _record_layer(
                programs, layer, calibration, writer, facts, batch_size, count
            )
            writer.finish_layer(layer, report)


def _record_layer(
    programs: LayerPrograms, layer, calibration, writer, facts, size, count
) -> dict | None:
    """Runs one layer; returns its report, None for a dense layer."""
    config = programs.config
    N, W = calibration.tokens_NW.shape
    shape = (N, W, config.d_model)
    x_NWD = writer.states(layer, shape)
    next_NWD = writer.states(layer + 1, shape)
    # Of this layer and of those before it on which probes look ahead to it.
    ahead = facts["probes"]
    hidden_NWD = writer.scratch(hidden_name(layer, ahead), shape)
    is_moe = layer in config.moe_layers
    choice = (N, W, config.moe.top_k)
    ids_NWK, weights_NWK = np.zeros(choice, np.int32), np.zeros(choice, np.float32)
    for first in range(0, N, size):
        part = slice(first, min(first + size, N))
        n = part.stop - first
        x, valid = _pad(x_NWD[part], size), _pad(calibration.valid_NW[part], size)
        x, seen = programs.run(x, valid)
        next_NWD[part] = x = np.asarray(x)[:n]
        is_real = calibration.valid_NW[part]
        if is_moe:
            seen = Seen(*(np.asarray(a).reshape(size, W, -1)[:n] for a in seen))
            hidden_NWD[part], ids_NWK[part], weights_NWK[part] = seen
            seen = Seen(*(array[is_real] for array in seen))
        programs.check_states(x[is_real], seen)
        count(1)
    next_NWD.flush()
    if not is_moe:
        return None
    place_T = np.flatnonzero(calibration.valid_NW)  # of tokens among padding
    ids_TK = ids_NWK.reshape(N * W, -1)[place_T]
    weights_TK = weights_NWK.reshape(N * W, -1)[place_T]
    hidden_PD = hidden_NWD.reshape(N * W, -1)
    E, seed = config.moe.num_experts, facts["seeds"][0]
    clipped = 0
    for sample in sample_tokens(ids_TK, E, facts["max_tokens_per_expert"], seed, layer):
        hidden = hidden_PD[place_T[sample.tokens_S]]
        rows_SF, outside = programs.neurons(sample.expert, hidden)
        clipped += outside
        more = {}
        if facts["hidden"]:
            clipped += int((np.abs(hidden) > MAX_FLOAT16).sum())
            more[HIDDEN] = np.clip(hidden, -MAX_FLOAT16, MAX_FLOAT16).astype(np.float16)
        writer.write_expert(
            layer,
            sample.expert,
            activations=rows_SF,
            weights=weights_TK[sample.tokens_S, sample.ranks_S],
            ranks=sample.ranks_S,
            **more,
        )
    probes = []
    for earlier in range(max(layer - ahead, 0), layer):
        if earlier not in config.moe_layers:
            continue
        states_NWD = writer.scratch(hidden_name(earlier, ahead), shape)
        probe = fit_probe(
            states_NWD.reshape(N * W, -1), place_T, ids_TK, E, facts["probe_neurons"]
        )
        writer.write_probe(earlier, layer, probe.rows_EC, probe.neurons_NX)
        probes.append({"layer": earlier, "target": layer, "recall": probe.recall})
    writer.write_coactivation(layer, coactivation(ids_TK, E))
    domain_T = calibration.domain_T
    counts_NE = domain_counts(ids_TK, domain_T, len(calibration.domains), E)
    return {
        "clipped": clipped,
        "probes": probes,
        "counts": count_rows(
            facts["checkpoint"],
            calibration.domains,
            domain_T,
            layer,
            config.moe.top_k,
            counts_NE,
        ),
    }


def hidden_name(layer: int, ahead: int) -> str:
    """Scratch file of what a layer's experts took; `ahead` + 1 take turns."""
    return f"hidden_{layer % (ahead + 1)}"


def _pad(array: np.ndarray, rows: int) -> np.ndarray:
    """Rows of zeros up to a full batch: one compiled shape."""
    return np.pad(array, [(0, rows - len(array))] + [(0, 0)] * (array.ndim - 1))
