"""The compared models as engines at every K: perplexity, and what they compute."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moe_edge.bench.engines import describe_model
from moe_edge.engine.base import Engine
from moe_edge.engine.load import Loaded, load_engine
from moe_edge.evaluate.agreement import bootstrap_ratio
from moe_edge.evaluate.perplexity import measure_perplexity
from moe_edge.evaluate.plain_text import read_plain_text
from moe_edge.evaluate.texts import find_file, sha256_of
from moe_edge.model.config import ModelConfig
from moe_edge.papers.moe_prism.studies.models import ORIGINAL
from moe_edge.papers.moe_prism.studies.studies import QualitySettings


@dataclasses.dataclass(frozen=True)
class Compared:
    """The original and the refactored models, loaded.

    Attributes:
      parent: the original, with its tokenizer.
      engines: of the refactored ones, by name.
    """

    parent: Loaded
    engines: Mapping[str, Engine]

    @classmethod
    def load(cls, paths: Mapping[str, str]) -> "Compared":
        """Loads the paths of `ModelSettings.checkpoints`."""
        engines = {
            name: load_engine(path, with_tokenizer=False).engine
            for name, path in paths.items()
            if name != ORIGINAL
        }
        return cls(load_engine(paths[ORIGINAL]), engines)

    @property
    def sub_experts(self) -> int:
        """Of each expert: one number (`making.check_models`)."""
        return next(iter(self.engines.values())).config.moe.sub_experts

    @property
    def model(self) -> dict[str, Any]:
        """`model` of a results entry."""
        parent = self.parent
        return describe_model(parent.name, parent.engine.weights, parent.dtype)

    def at(self, k_values: Sequence[int]) -> dict[tuple[str, int], Engine]:
        """(name, K) -> engine, as far as a model can: the original at whole experts."""
        subs, parent = self.sub_experts, self.parent.engine
        found = {
            (ORIGINAL, k): parent.at_k(k // subs)
            for k in k_values
            if k % subs == 0 and k // subs <= parent.config.moe.num_experts
        }
        for name, engine in self.engines.items():
            limit = engine.config.moe.max_top_k
            found |= {(name, k): engine.at_k(k) for k in k_values if k <= limit}
        return found


@dataclasses.dataclass(frozen=True, eq=False)
class Point:
    """One model at one K: every text together, and what it computes.

    Attributes:
      neurons: `active_neurons`.
      nats: of every scored token, window by window.
    """

    neurons: float
    nats: Sequence[np.ndarray]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.nats))

    @property
    def perplexity(self) -> float:
        return float(np.exp(sum(row_T.sum() for row_T in self.nats) / self.tokens))

    def interval(self, other: "Point") -> tuple[float, float]:
        """95 % interval of the perplexity over another's on the same tokens."""
        pairs = zip(self.nats, other.nats, strict=True)
        return bootstrap_ratio([mine_T - its_T for mine_T, its_T in pairs])


def read_tokens(settings: QualitySettings, tokenizer) -> tuple[list, list[dict]]:
    """Token ids of every text, cut to `max_tokens`, and {path, sha256}."""
    texts, sources = [], []
    for name in settings.texts:
        path = find_file(name, settings.data_dir)
        text = read_plain_text(path)
        # A token has one character at least; most have three.
        ids = tokenizer.encode(text[: 16 * settings.max_tokens], end=False)
        texts.append(ids[: settings.max_tokens])
        sources.append({"path": name, "sha256": sha256_of(path)})
    return texts, sources


def measure(engine, texts) -> Point:
    """Perplexity of an engine at its K."""
    found = [measure_perplexity(engine, ids) for ids in texts]
    return Point(
        active_neurons(engine.config), [row_T for one in found for row_T in one.nats]
    )


def active_neurons(config: ModelConfig) -> float:
    """What routing and routed experts of a layer compute for a token, in neurons.

    A neuron is three products with a vector of the model's width: gate, up and down.
    All rows that choose count as what they are a part of one: a router's row, also
    those that a linear gate repeats, a third; gate neurons, of all blocks of the chosen
    parents, two thirds, also where their block runs and computes them again; a
    calibrated gate's rows of these blocks a third. So it is while decoding; in prefill
    one product with all experts' gate neurons or rows is faster than gathering.
    """
    moe = config.moe
    judged = moe.sub_experts * moe.parent_top_k  # blocks of the chosen parents
    rows = moe.num_parents if moe.keeps_router else moe.num_experts
    if moe.has_proxy_gate:
        rows += 2 * moe.gate_neurons * judged
    if moe.gate == "calibrated":
        rows += judged
    return moe.top_k * moe.expert_dim + rows / 3


def log_interpolate(neurons: float, known: Mapping[float, float]) -> float | None:
    """Perplexity at so many neurons, between points measured; None outside of them."""
    at, values = zip(*sorted(known.items()), strict=True)
    outside = {"left": np.nan, "right": np.nan}
    found = np.exp(np.interp(neurons, at, np.log(values), **outside))
    return None if np.isnan(found) else float(found)
