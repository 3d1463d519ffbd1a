"""Frequencies of experts from published ranks: an order by domain, without counts.

The package moe-l2 (PyPI, Apache-2.0) ships JSON files of routers it recorded: the most
used experts of every layer and domain, most used first, and in words which share of the
calls they cover. Its code is not imported, its data is read where pip put it.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moe_edge.core.checks import ConfigError, check_known
from moe_edge.core.json_reader import LARGE_FILE_BYTES, read_json

PACKAGE, VERSION, FOLDER = "moe-l2", "0.14.1", "moe_l2/data"
INSTALL = f"pip install --no-deps {PACKAGE}=={VERSION}"
CURVES = ("geometric", "flat")
FLAT = 1 - 1e-9  # alike, and still in the order of the ranks


class RankedModel(NamedTuple):
    """A file of ranks, and what it says of them in words.

    Attributes:
      name: of the model.
      file: in the package's folder of data.
      num_experts: of a layer.
      coverage: share of a layer's calls that go to its listed experts, the middle of
        the range that the file states.
    """

    name: str
    file: str
    num_experts: int
    coverage: float


RANKED = (
    RankedModel("Qwen3.6-35B-A3B", "domain_router_map_qwen.json", 256, 0.94),
    RankedModel("DeepSeek-V4-Flash", "domain_router_map_v4_topics.json", 256, 0.96),
)
Ranks = list[list[list[int]]]  # by domain and layer, most used first


def ranks_folder(given: str | None = None) -> Path:
    """Where the package's data is.

    Args:
      given: that folder; None: of the installed package.
    Raises:
      ConfigError: it is not installed.
      FileNotFoundError: `given` is not there.
    """
    if given is not None:
        if not Path(given).is_dir():
            raise FileNotFoundError(f"ranks_dir {given} is no folder")
        return Path(given)
    for installed in sys.path:
        if (found := Path(installed) / FOLDER).is_dir():
            return found
    raise ConfigError(
        f"the ranks of {PACKAGE} are not installed; run `{INSTALL}`, or name the "
        "folder of its data in gin: ranks_dir"
    )


def read_ranks(
    path: str | Path, num_experts: int, domains: Sequence[str]
) -> tuple[Ranks, tuple[int, ...]]:
    """The lists of some domains, of the layers that all of them list well.

    A layer whose list is shorter than a quarter of its experts in some domain is left
    out: DeepSeek-V4-Flash's recording holds six experts in nine of its layers.

    Returns:
      Lists by domain and layer; the numbers of the layers.
    Raises:
      ConfigError: another schema, an unknown domain, a list with an expert that is not
        there or stands twice, or no layer left.
    """
    stored = read_json(path, max_bytes=LARGE_FILE_BYTES)
    tables = stored.get("domains") if isinstance(stored, dict) else None
    if not isinstance(tables, dict):
        raise ConfigError(f"{path} has no `domains`, expected an object by domain")
    by_domain = []
    for domain in domains:
        check_known("domain", domain, tables)
        table = tables[domain]
        found = table.get("per_layer_domain_preferred") if type(table) is dict else None
        if not isinstance(found, dict) or not all(n.isdecimal() for n in found):
            raise ConfigError(
                f"{path}: domain {domain} has no `per_layer_domain_preferred`, "
                "expected an object of lists by layer"
            )
        by_domain.append({int(layer): ranks for layer, ranks in found.items()})
        for layer, ranks in by_domain[-1].items():
            _check_list(ranks, num_experts, f"{path}: domain {domain}, layer {layer}")
    least = num_experts / 4
    layers = tuple(
        layer
        for layer in sorted(set.intersection(*map(set, by_domain)))
        if all(len(table[layer]) >= least for table in by_domain)
    )
    if not layers:
        raise ConfigError(
            f"{path} lists {least:g} experts in no layer of all domains "
            f"{', '.join(domains)}"
        )
    return [[table[layer] for layer in layers] for table in by_domain], layers


def _check_list(ranks, num_experts: int, where: str) -> None:
    if not isinstance(ranks, list):
        raise ConfigError(f"{where} is {ranks!r:.60}, expected a list of experts")
    bad = [e for e in ranks if type(e) is not int or not 0 <= e < num_experts]
    if bad or len(set(ranks)) < len(ranks):
        what = f"expert {bad[0]!r:.60}" if bad else "an expert twice"
        raise ConfigError(
            f"{where} names {what}, expected different numbers in 0..{num_experts - 1}"
        )


def rank_frequencies(
    ranks: Ranks, num_experts: int, coverage: float, curve: str
) -> np.ndarray:
    """Assumed frequencies, of which only the order and the coverage were measured.

    Args:
      ranks: by domain and layer, most used first; shorter than `num_experts`.
      coverage: share of the calls to listed experts, above their share of experts.
      curve: "geometric": each rank is called a constant factor less often than the one
        before it; "flat": all listed ones alike, the least skew that fits.
    Returns:
      float64 [N, L, E]; experts that no list names share what is left.
    """
    check_known("curve", curve, CURVES)
    found_NLE = np.empty((len(ranks), len(ranks[0]), num_experts))
    for domain, by_layer in enumerate(ranks):
        for layer, listed in enumerate(by_layer):
            size = len(listed)
            factor = FLAT
            if curve == "geometric":
                factor = _factor(size, num_experts, coverage)
            share_R = factor ** np.arange(size)
            found_NLE[domain, layer] = (1 - coverage) / (num_experts - size)
            found_NLE[domain, layer, listed] = coverage * share_R / share_R.sum()
    return found_NLE


def _factor(size: int, num_experts: int, coverage: float) -> float:
    """Of a geometric sequence whose first `size` of `num_experts` sum to `coverage`."""
    low, high = 1e-6, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        share = (1 - middle**size) / (1 - middle**num_experts)
        low, high = (middle, high) if share > coverage else (low, middle)
    return low
