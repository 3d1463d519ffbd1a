"""Do the routers of 2026 differ enough by domain for placement to pay?

Equal servers of one GPU, a domain each. How often a server calls an expert is measured
(counts), ordered (published ranks with an assumed curve, `place/ranks.py`) or assumed
(the narrow tasks of our simulations). No request is simulated: the answer is the share
of calls that a placement keeps at home.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np

from moe_edge.bench.derived import spans, wide
from moe_edge.bench.study import Study
from moe_edge.core.checks import ConfigError
from moe_edge.evaluate.texts import find_file, sha256_of
from moe_edge.metrics.frames import Rows, Tables, frame
from moe_edge.papers.prism.studies.patterns import (
    PatternSettings,
    assumed_usage,
    read_usage,
)
from moe_edge.papers.prism.studies.served import EPLB, OPTIMUM, PRISM
from moe_edge.place.placer import get_placer
from moe_edge.place.ranks import (
    CURVES,
    INSTALL,
    PACKAGE,
    RANKED,
    VERSION,
    rank_frequencies,
    ranks_folder,
    read_ranks,
)

METHODS = ("uniform", "redundance", "smartmoe", EPLB, PRISM, OPTIMUM)


def check_share(name: str, value: float) -> None:
    """Raises ConfigError where three servers hold less than a copy of the model."""
    if not 1 / 3 < value <= 1:
        raise ConfigError(f"{name} is {value}, expected a share above 1/3, at most 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankSettings(PatternSettings):
    """What is read and placed; `PatternSettings` names the counts.

    Attributes:
      ranks_dir: folder of moe-l2's data; None: of the installed package.
      qwen_domains: of the eight that Qwen3.6 was recorded with, one a server.
      deepseek_domains: likewise, of DeepSeek-V4-Flash's four.
      shares: of the experts, that each server holds.
    """

    ranks_dir: str | None = None
    qwen_domains: Sequence[str] = ("general_qa", "codegen", "math", "creative_write")
    deepseek_domains: Sequence[str] = ("general", "math", "code", "chat")
    shares: Sequence[Annotated[float, check_share]] = (0.34, 0.42, 0.6)


class Calls(NamedTuple):
    """How often each server calls each expert.

    Attributes:
      kind: "counts", "ranks, CURVE" or "assumed tasks".
      share_NLE: float64, of a layer's calls.
    """

    model: str
    kind: str
    share_NLE: np.ndarray

    def overlap(self) -> float:
        """Share of a domain's most used quarter that is in another's; .25 by chance."""
        quarter = self.share_NLE.shape[2] // 4
        top_NLQ = np.argsort(-self.share_NLE, axis=2, kind="stable")[..., :quarter]
        pairs = itertools.combinations(top_NLQ, 2)
        shared = [
            len(np.intersect1d(a, b)) / quarter
            for one, other in pairs
            for a, b in zip(one, other, strict=True)
        ]
        return float(np.mean(shared))

    def local(self, method: str, share: float) -> float:
        """Share of calls that stay at home, where `method` places."""
        N, L, E = self.share_NLE.shape
        slots = [np.array([round(share * L * E)])] * N
        placement = get_placer(method).place(self.share_NLE, slots)
        return float((self.share_NLE * placement.on_NLE).sum() / (N * L))


def calls_of(settings: RankSettings) -> list[Calls]:
    """Everything that is placed: counts, ranks, assumed tasks."""
    path = Path(find_file(settings.counts, settings.data_dir))
    found = [Calls(m, "counts", u.share_NLE) for m, u in read_usage(path).items()]
    folder = ranks_folder(settings.ranks_dir)
    domains = settings.qwen_domains, settings.deepseek_domains
    for model, wanted in zip(RANKED, domains, strict=True):
        ranks, _ = read_ranks(folder / model.file, model.num_experts, wanted)
        for curve in CURVES:
            share_NLE = rank_frequencies(
                ranks, model.num_experts, model.coverage, curve
            )
            found.append(Calls(model.name, f"ranks, {curve}", share_NLE))
    for model in dict.fromkeys(calls.model for calls in found):
        if (tasks := assumed_usage(model)) is not None:
            found.append(Calls(model, "assumed tasks", tasks.share_NLE))
    return found


def measure(settings: RankSettings, rows: Rows) -> None:
    """Places every model's calls by every method."""
    all_calls = calls_of(settings)
    for calls in all_calls:
        rows("overlaps", calls.model, calls.kind, overlap=calls.overlap())
        for share in settings.shares:
            for method in METHODS:
                local = calls.local(method, share)
                rows("homes", calls.model, calls.kind, share, method, local=local)
    rows.about |= {
        "model": {
            "name": ", ".join(dict.fromkeys(calls.model for calls in all_calls)),
            "params": 0,
            "weights": "none: counts and ranks of their routers",
        },
        "workload": sources(settings),
        "kind": "simulated",
        "cost_model_source": "preset",
        "baselines": [m for m in METHODS if m != PRISM],
    }


def sources(settings: RankSettings) -> dict:
    """What was read, from where, under which licence."""
    folder = ranks_folder(settings.ranks_dir)
    return {
        "counts": Path(settings.counts).name,
        "counts sha256": sha256_of(find_file(settings.counts, settings.data_dir)),
        "ranks": f"{PACKAGE} {VERSION} of PyPI, Apache-2.0 ({INSTALL})",
        **{f"{m.file} sha256": sha256_of(folder / m.file) for m in RANKED},
        f"domains of {RANKED[0].name}": list(settings.qwen_domains),
        f"domains of {RANKED[1].name}": list(settings.deepseek_domains),
    }


def derive(tables: Tables) -> dict[str, Any]:
    """Prism's gain over heterogeneous EPLB in points, and its range by statistics."""
    homes = tables["homes"]
    found = wide(homes, "local", "method", "model kind share")
    gains = (100 * (found[PRISM] - found[EPLB])).rename("points").reset_index()
    shares = list(dict.fromkeys(homes.share))
    middle = shares[len(shares) // 2]
    at_middle = gains[gains.share == middle]
    at_middle = at_middle.assign(by=at_middle.kind.str.split(",").str[0])
    return {
        "gains": gains,
        "middle": middle,
        "spans": spans(at_middle, "points", "by").set_index("by").to_dict("index"),
    }


def check(settings: RankSettings) -> None:
    """Refuses files that are not there, before anything is placed."""
    find_file(settings.counts, settings.data_dir)
    folder = ranks_folder(settings.ranks_dir)
    for model in RANKED:
        find_file(model.file, str(folder))


FRAMES = {
    "overlaps": frame("model kind", "overlap"),
    "homes": frame("model kind share method", "local"),
}
STUDY = Study("prism_ranks", RankSettings, measure, FRAMES, derive, check=check)
