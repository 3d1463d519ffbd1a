"""MoE-Prism, figure 3: how unevenly activations are spread inside experts.

Magnitudes depend on a model's scale, so each is also given relative to its expert's
mean. Two questions are kept apart. *Dynamic*: how few of its own neurons carry most of
a token's L1 norm, which a partition with a gate may use. *Static*: how much one fixed
set of neurons carries for all tokens, which pruning would keep as well, without a gate.
"""

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from moe_edge.convert.open import open_checkpoint
from moe_edge.core.checks import CapacityError
from moe_edge.core.files import check_out_dir
from moe_edge.metrics.results import Entry, write_entry
from moe_edge.profile.reader import Profile, open_profile
from moe_edge.profile.run_profile import run_profile
from moe_edge.studies.moe_prism.fig3_entry import Experts, by_layer, describe
from moe_edge.studies.moe_prism.plots import activation_sparsity
from moe_edge.studies.moe_prism.sparsity import (
    MAGNITUDES,
    TOP,
    at_top,
    gated_noise,
    measure,
    own_order,
)


def run_activations(
    *,
    out_dir: str,
    text: str | None = None,
    profile: str | None = None,
    checkpoint: str = "default",
    data_dir: str | None = None,
    window: int | None = None,
    tokens: int | None = 131_072,
    max_tokens_per_expert: int = 2048,
    batch_size: int = 4,
    seed: int = 0,
    overwrite: bool = False,
    dry_run: bool = False,
    config_text: Callable[[], str] = str,
) -> dict[str, Any]:
    """Measures the sparsity of activations and writes the entry.

    Args:
      out_dir: folder of the entry.
      text, window, tokens, max_tokens_per_expert, batch_size, seed: of the profile,
        see `run_profile`.
      profile: folder of one made before, instead.
      checkpoint: path or `default`: the profiled one.
      data_dir: where relative paths are looked up too.
      overwrite: replace a non-empty out_dir.
      dry_run: check the input and stop.
      config_text: gives the config to store.
    Raises:
      MoeEdgeError: bad input.
      OSError: a file cannot be read.
    """
    started_s = time.time()
    check_out_dir(out_dir, overwrite)
    given = {
        "text": text or "",
        "checkpoint": checkpoint,
        "data_dir": data_dir,
        "window": window,
        "tokens": tokens,
        "max_tokens_per_expert": max_tokens_per_expert,
        "batch_size": batch_size,
        "seed": seed,
    }
    with tempfile.TemporaryDirectory() as folder:
        if profile is None:
            path = str(Path(folder) / "profile")
            made = run_profile(out_dir=path, dry_run=dry_run, **given)
            if dry_run:
                return made | {"out_dir": out_dir}
            profile = path
        found = open_profile(profile)
        reader = open_checkpoint(checkpoint)
        found.check(reader.content_sha256())
        if dry_run:
            return {"dry_run": True, "out_dir": out_dir}
        experts = measure_experts(found, reader)
    entry, summary = describe(found, experts, checkpoint, reader, started_s)
    write(out_dir, found, experts, entry, config_text, overwrite)
    return summary | {"out_dir": out_dir}


def measure_experts(profile: Profile, reader) -> Experts:
    """(layer, expert) -> sparsity, of experts with as many rows as neurons.

    Raises:
      CapacityError: a layer has no such expert.
    """
    found = {}
    for layer in profile.layers:
        records = reader.experts(layer)
        first = len(found)
        for expert in range(profile.num_experts):
            rows = profile.activations(layer, expert)
            if len(rows) < max(2, profile.neurons):
                continue
            down_DF = reader.layout.part(records[expert], "down").astype(np.float32)
            norm_F = np.linalg.norm(down_DF, axis=0)
            found[layer, expert] = measure(rows, norm_F)
        if len(found) == first:
            raise CapacityError(
                f"no expert of layer {layer} got {profile.neurons} tokens, as many as "
                "it has neurons; profile more --tokens"
            )
    return found


def write(
    out_dir: str,
    found: Profile,
    experts: Experts,
    entry: Entry,
    config_text: Callable[[], str],
    overwrite: bool,
) -> None:
    """Writes the entry with its curves."""
    layers = list(found.layers)
    below_LM = by_layer(experts, lambda s: s.share_below_M)
    dynamic_LF = by_layer(experts, lambda s: s.dynamic_F)
    static_LF = by_layer(experts, lambda s: s.static_F)
    shuffled_LF = by_layer(experts, lambda s: s.shuffled_F)
    lorenz = {
        "a token's own order (dynamic)": dynamic_LF.mean(axis=0),
        "one order for all (static)": static_LF.mean(axis=0),
        "neurons shuffled over tokens": shuffled_LF.mean(axis=0),
        "gated noise": own_order(np.abs(gated_noise(found.neurons))).mean(axis=0),
    }
    tops = {
        "a token's own quarter": [at_top(row) for row in dynamic_LF],
        "the same, shuffled": [at_top(row) for row in shuffled_LF],
        "one fixed quarter": [at_top(row) for row in static_LF],
    }
    stored = {
        "magnitudes": MAGNITUDES.tolist(),
        "share_below": {
            str(n): row.tolist() for n, row in zip(layers, below_LM, strict=True)
        },
        "l1_share_of_first_neurons": {k: v.tolist() for k, v in lorenz.items()},
    }
    write_entry(
        out_dir,
        entry,
        plot=lambda path: activation_sparsity(
            path,
            layers=layers,
            magnitudes=MAGNITUDES,
            share_below=below_LM,
            lorenz=lorenz,
            top_shares=tops,
            top=TOP,
            title="Activations inside experts (MoE-Prism fig. 3)",
        ),
        config_text=config_text(),
        overwrite=overwrite,
        files={"curves.json": json.dumps(stored, indent=1) + "\n"},
    )
