"""Made-up routing that has the statistics of measured routing.

A token's score of expert e in layer l is `logit[domain, l, e] + Gumbel noise`; the
top k scores are chosen, so experts are drawn without replacement with probabilities
proportional to exp(logit) (Plackett-Luce). The logits of broad domains are fitted to
measured counts (`routing_fit.py`); the noise may be correlated from token to token and
from layer to layer through a Gaussian copula, which leaves every frequency as it is.

Rule for layers between the measured ones: a layer takes the joint popularity (all
domains) of the nearest measured layer, with the spread of base and deviation
interpolated linearly in depth, under a permutation of experts of its own. Narrow tasks
are built from broad domains by `DOMAINS`.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from scipy.special import ndtr

from moe_edge.core.checks import (
    ConfigError,
    check_count,
    check_from_zero,
    check_known,
    check_positive,
)
from moe_edge.core.json_reader import read_json
from moe_edge.hardware.models import ModelShape

FITTED = Path(__file__).with_name("routing_domains.json")
SOURCES = ("olmoe", "mixtral")

# Domain -> (weights of the measured domains' deviations, skew). The skew multiplies
# the deviation of a domain from what all domains share. BIG-bench tasks are narrower
# than any measured text: Prism's figure 2 shows it without numbers. 2 puts the share
# of the most used quarter of OLMoE's experts between that of broad domains (mean .52)
# and of single prompts (.85, public traces). Mixtral's broad domains are almost even,
# so the same factor would leave its tasks even, against figure 2: 6 there.
# TASK_SKEW is an assumption, and without it (`narrow_tasks` False) a task calls experts
# as often as was measured for the domain that it is built from.
TASK_SKEW = {"olmoe": 2.0, "mixtral": 6.0}
BROAD = ("c4", "wikipedia", "github", "book")
TASKS = {"arithmetic": "github", "ascii": "wikipedia", "narrative": "book"}
MIXED = {
    "mmlu_pro": {"c4": 0.5, "book": 0.5},
    "wikitext": {"wikipedia": 0.5, "c4": 0.5},
    "taco": {"github": 1.0},
}
DOMAINS = (*BROAD, *TASKS, *MIXED)
BIGBENCH = ("narrative", "arithmetic", "ascii")  # Prism, section IV-A, one a server
MULTIDATA = ("mmlu_pro", "wikitext", "taco")

_SAMPLED = 8192  # tokens behind `frequencies`
_CHUNK = 4_000_000  # scores held at a time


@dataclasses.dataclass(frozen=True, eq=False)
class SourceFit:
    """What was fitted to one measured model.

    Attributes:
      depths: of the measured layers, 0 (first) to 1, float64 [A].
      base: what all domains share, float64 [A, E] logits.
      deviation: domain -> float64 [A, E], what it adds.
      layer_rho: correlation of the noise over the whole depth.
      time_rho: correlation of the noise of neighbouring tokens.
    """

    depths: np.ndarray
    base: np.ndarray
    deviation: Mapping[str, np.ndarray]
    layer_rho: float
    time_rho: float

    @classmethod
    def from_json(cls, entry: Mapping) -> "SourceFit":
        depths, base = (np.array(entry[k], np.float64) for k in ("depths", "base"))
        deviation = {d: np.array(v, np.float64) for d, v in entry["deviation"].items()}
        return cls(depths, base, deviation, entry["layer_rho"], entry["time_rho"])


@dataclasses.dataclass(frozen=True)
class RoutingModel:
    """A generator of expert ids for a model of any depth.

    Attributes:
      fit: statistics of a measured model.
      source: its name.
      num_layers, num_experts, top_k: of the model to route for.
      skew: multiplies every domain's deviation (1: as fitted and built).
      layer_seed: of the permutation of experts in each layer: part of the model, not
        of a run.
      correlated: whether tokens and layers are correlated as measured.
      narrow_tasks: whether BIG-bench's tasks lie further apart than the measured
        domains that they are built from, by the assumed `TASK_SKEW`.
    """

    fit: SourceFit
    source: str
    num_layers: int
    num_experts: int
    top_k: int
    skew: float = 1.0
    layer_seed: int = 0
    correlated: bool = False
    narrow_tasks: bool = True

    def __post_init__(self):
        for name in ("num_layers", "num_experts", "top_k"):
            check_count(name, getattr(self, name))
        if self.top_k >= self.num_experts:
            raise ConfigError(
                f"top_k is {self.top_k}, expected less than the {self.num_experts} "
                "experts"
            )
        check_from_zero("skew", self.skew)

    @classmethod
    def load(cls, source: str = "olmoe", **shape) -> "RoutingModel":
        """The committed fit of "olmoe" (64 fine experts) or "mixtral" (8 large ones).

        `shape`: fields of this class; default: those of the measured model.
        """
        check_known("routing source", source, SOURCES)
        fit, sizes = _committed(source)
        return cls(fit, source, **sizes | shape)

    @classmethod
    def like(cls, shape: ModelShape, **options) -> "RoutingModel":
        """The committed fit nearest to a model: of few large experts, or of many."""
        fields = ("num_layers", "num_experts", "top_k")
        options |= {name: getattr(shape, name) for name in fields}
        return cls.load("mixtral" if shape.num_experts <= 8 else "olmoe", **options)

    def logits(self, domain: str) -> np.ndarray:
        """float64 [L, E]: log weights of a domain, under the layers' permutations."""
        return np.take_along_axis(self._columns(domain), self._order(), axis=1)

    def frequencies(self, domain: str, tokens: int = _SAMPLED) -> np.ndarray:
        """float64 [L, E]: share of a layer's calls that go to each expert.

        Counted over sampled tokens with a fixed seed; rows sum to 1; read-only.
        """
        plain = dataclasses.replace(self, correlated=False)
        return _frequencies(plain, domain, tokens)

    def sample(
        self, domain: str, tokens: int, rng: np.random.Generator | None = None
    ) -> np.ndarray:
        """Expert ids of consecutive tokens: int16 [T, L, K], best score first."""
        rng = np.random.default_rng(0) if rng is None else rng
        check_count("tokens", tokens)
        logits_LE = self.logits(domain)
        if self.correlated:
            return self._sample_correlated(logits_LE, tokens, rng)
        weights_LE = np.exp(-logits_LE).astype(np.float32)
        ids_TLK = np.empty((tokens, len(logits_LE), self.top_k), np.int16)
        step = max(1, _CHUNK // logits_LE.size)
        for start in range(0, tokens, step):
            chunk = ids_TLK[start : start + step]
            # The smallest of Exp(1) / weight are the largest of logit + Gumbel.
            waits = rng.standard_exponential((len(chunk), *logits_LE.shape), np.float32)
            waits *= weights_LE
            chunk[:] = smallest(waits, self.top_k)
        return ids_TLK

    def _sample_correlated(self, logits_LE, tokens, rng) -> np.ndarray:
        """As `sample`, the noise an AR(1) over tokens and over layers.

        Layers are linked in the columns of the fit, before their permutations.
        """
        order_LE, top_k = self._order(), self.top_k
        layer_rho = self.fit.layer_rho ** (1 / max(self.num_layers - 1, 1))
        ids_TLK = np.empty((tokens, self.num_layers, top_k), np.int16)
        noise_TE = None
        for layer, order_E in enumerate(order_LE):
            fresh_TE = _chained(rng, tokens, self.num_experts, self.fit.time_rho)
            if noise_TE is not None:
                fresh_TE *= np.sqrt(1 - layer_rho**2)
                fresh_TE += layer_rho * noise_TE
            noise_TE = fresh_TE
            waits_TE = -np.log(ndtr(noise_TE[:, order_E]))
            waits_TE *= np.exp(-logits_LE[layer])
            ids_TLK[:, layer] = smallest(waits_TE, top_k)
        return ids_TLK

    def _columns(self, domain: str) -> np.ndarray:
        """float64 [L, E]: shared and own logits, experts in the order of the fit."""
        fit, skew = self.fit, self.skew
        weights, factor = domain_rule(domain, self.source)
        factor = factor if self.narrow_tasks else 1.0
        own_AE = sum(w * fit.deviation[name] for name, w in weights.items())
        depth_L = np.linspace(0, 1, self.num_layers) if self.num_layers > 1 else [0.0]
        near_L = np.abs(np.subtract.outer(depth_L, fit.depths)).argmin(axis=1)
        columns_E = np.arange(self.num_experts) % fit.base.shape[1]
        parts = []
        for part_AE, scale in ((fit.base, 1.0), (own_AE, factor * skew)):
            spread_A = part_AE.std(axis=1)
            check_positive(f"spread of {domain} logits", spread_A.min())
            unit_AE = part_AE / spread_A[:, None]
            spread_L = np.interp(depth_L, fit.depths, spread_A)
            parts.append(scale * spread_L[:, None] * unit_AE[near_L][:, columns_E])
        return parts[0] + parts[1]

    def _order(self) -> np.ndarray:
        """int64 [L, E]: the column of the fit that each expert takes."""
        rng = np.random.default_rng([self.layer_seed, 20_26])
        columns_LE = np.tile(np.arange(self.num_experts), (self.num_layers, 1))
        return rng.permuted(columns_LE, axis=1)


@functools.lru_cache(64)  # seeds of a run and several cases ask for the same
def _frequencies(model: RoutingModel, domain: str, tokens: int) -> np.ndarray:
    ids_TLK = model.sample(domain, tokens, rng=np.random.default_rng(0))
    share_LE = count_ids(ids_TLK, model.num_experts) / (tokens * model.top_k)
    share_LE.setflags(write=False)
    return share_LE


@functools.cache
def _committed(source: str) -> tuple["SourceFit", dict[str, int]]:
    """The committed fit, and the sizes of the model that was measured."""
    entry = read_json(FITTED)["sources"][source]
    sizes = {name: entry[name] for name in ("num_layers", "num_experts", "top_k")}
    return SourceFit.from_json(entry), sizes


def domain_rule(domain: str, source: str) -> tuple[Mapping[str, float], float]:
    """Weights of the measured domains and the skew behind a domain."""
    check_known("routing domain", domain, DOMAINS)
    if domain in TASKS:
        return {TASKS[domain]: 1.0}, TASK_SKEW[source]
    return MIXED.get(domain, {domain: 1.0}), 1.0


def smallest(values, count: int) -> np.ndarray:
    """Indices of the `count` smallest of the last axis, smallest first."""
    some = np.argpartition(values, count - 1, axis=-1)[..., :count]
    order = np.argsort(np.take_along_axis(values, some, -1), axis=-1)
    return np.take_along_axis(some, order, -1)


def count_ids(ids_TLK: np.ndarray, num_experts: int) -> np.ndarray:
    """int64 [L, E]: how often each expert was chosen."""
    layers = np.arange(ids_TLK.shape[1])[None, :, None]
    keys = (layers * num_experts + ids_TLK).reshape(-1)
    size = ids_TLK.shape[1] * num_experts
    return np.bincount(keys, minlength=size).reshape(-1, num_experts)


def _chained(rng, tokens: int, experts: int, rho: float) -> np.ndarray:
    """Standard normals [T, E], each column an AR(1) with correlation `rho`."""
    noise_TE = rng.standard_normal((tokens, experts))
    if rho:
        noise_TE[1:] *= np.sqrt(1 - rho**2)
        for before_E, noise_E in itertools.pairwise(noise_TE):
            noise_E += rho * before_E  # in place; importing scipy.signal takes longer
    return noise_TE
