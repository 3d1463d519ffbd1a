"""Activation statistics from files in the `expert_counts` schema.

A line is `{"model", "domain", "layer", "num_experts", "top_k", "tokens", "counts"}`;
the measured files and the `counts.jsonl` of profiles have it.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moe_edge.core.checks import ConfigError, check_known
from moe_edge.core.json_reader import json_objects

MOST = 2**63 - 1  # 64 bits
FIELDS = ("model", "domain", "layer", "num_experts", "top_k", "tokens", "counts")


@dataclasses.dataclass(frozen=True)
class Statistics:
    """How often each server calls each block.

    Attributes:
      frequency_NLE: float64 [N, L, E], rows sum to 1 for every server and layer.
      layers: numbers of the layers in the model.
      model, top_k: what was counted.
    """

    frequency_NLE: np.ndarray
    layers: tuple[int, ...]
    model: str
    top_k: int


def read_statistics(
    path: str | Path,
    server_domains: Sequence[str],
    model: str | None = None,
    top_k: int | None = None,
) -> Statistics:
    """One domain a server, normalised per server and layer.

    Args:
      path: JSON lines in the schema above.
      server_domains: the domain that each server is asked about.
      model, top_k: which rows, where a file holds several.
    Raises:
      ConfigError: bad lines or what the file lacks, with what it holds, or it cannot
        be read.
    """
    rows = read_counts(path)
    model = _chosen("model", model, [row["model"] for row in rows], path)
    rows = [row for row in rows if row["model"] == model]
    top_k = _chosen("top_k", top_k, [row["top_k"] for row in rows], path)
    rows = [row for row in rows if row["top_k"] == top_k]
    table: dict[str, dict[int, np.ndarray]] = {}
    for row in rows:
        by_layer = table.setdefault(row["domain"], {})
        if row["layer"] in by_layer:
            raise ConfigError(
                f"{path} counts layer {row['layer']} of domain {row['domain']!r} twice"
            )
        by_layer[row["layer"]] = np.array(row["counts"], np.float64)
    for domain in server_domains:
        check_known("domain", domain, table)
    layers = sorted({layer for by_layer in table.values() for layer in by_layer})
    for domain in server_domains:
        missing = sorted(set(layers) - set(table[domain]))
        if missing:
            raise ConfigError(f"{path} lacks layers {missing} of domain {domain!r}")
    sizes = {len(table[domain][layer]) for domain in server_domains for layer in layers}
    if len(sizes) > 1:
        raise ConfigError(f"{path} has layers of {sorted(sizes)} experts, expected one")
    counts_NLE = np.array(
        [[table[d][layer] for layer in layers] for d in server_domains]
    )
    return Statistics(
        frequency_NLE=counts_NLE / counts_NLE.sum(axis=-1, keepdims=True),
        layers=tuple(layers),
        model=model,
        top_k=top_k,
    )


def read_counts(path: str | Path) -> list[dict[str, Any]]:
    """All lines of a counts file, checked one by one."""
    rows = [_row(row, where) for where, row in json_objects(path)]
    if not rows:
        raise ConfigError(f"{path} holds no counts")
    return rows


def _row(row: dict[str, Any], where: str) -> dict[str, Any]:
    missing = [field for field in FIELDS if field not in row]
    if missing:
        raise ConfigError(f"{where} lacks {', '.join(missing)}")
    for field in ("model", "domain"):
        if not isinstance(row[field], str):
            raise ConfigError(
                f"{where}: {field} is {row[field]!r:.60}, expected a text"
            )
    for field, least in (("layer", 0), ("num_experts", 1), ("top_k", 1), ("tokens", 1)):
        if not _is_whole(row[field], least):
            raise ConfigError(
                f"{where}: {field} is {row[field]!r:.60}, expected a whole number from "
                f"{least} to {MOST}"
            )
    counts = row["counts"]
    if not isinstance(counts, list) or len(counts) != row["num_experts"]:
        size = len(counts) if isinstance(counts, list) else type(counts).__name__
        raise ConfigError(
            f"{where} has counts of {size}, expected {row['num_experts']} experts"
        )
    tokens, top_k = row["tokens"], row["top_k"]
    for expert, count in enumerate(counts):
        if not _is_whole(count, 0, tokens):
            raise ConfigError(
                f"{where}: count of expert {expert} is {count!r:.60}, expected a whole "
                f"number from 0 to {tokens}, the tokens counted"
            )
    if sum(counts) != tokens * top_k:
        raise ConfigError(
            f"{where}: counts sum to {sum(counts)}, expected {tokens * top_k}: "
            f"{tokens} tokens with {top_k} choices each"
        )
    return row


def _is_whole(value, least: int, most: int = MOST) -> bool:
    """Whether it is a whole number within these limits; True is none."""
    return type(value) is int and least <= value <= most


def _chosen(flag: str, wanted, found: list, path: str | Path):
    """The value asked for, or the only one there is."""
    known = sorted(set(found), key=str)
    values = ", ".join(map(str, known))
    if wanted is None and len(known) > 1:
        raise ConfigError(f"{path} holds several: {values}; choose with --{flag}")
    if wanted is not None and wanted not in known:
        raise ConfigError(f"unknown {flag} {wanted!r} in {path}; known: {values}")
    return known[0] if wanted is None else wanted
