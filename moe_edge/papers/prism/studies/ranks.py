"""Do the routers of 2026 differ enough by domain for placement to pay?

Equal servers of one GPU, a domain each. How often a server calls an expert is measured
(counts), ordered (published ranks with an assumed curve, `place/ranks.py`) or assumed
(the narrow tasks of our simulations). No request is simulated: the answer is the share
of calls that a placement keeps at home.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moe_edge.bench.settings import StudySettings
from moe_edge.bench.study import Claim, Findings, Study
from moe_edge.core.checks import ConfigError
from moe_edge.evaluate.texts import find_file, sha256_of
from moe_edge.metrics.plots_panels import Panel, draw_panels
from moe_edge.metrics.results import metric
from moe_edge.papers.prism.studies.patterns import assumed_usage, read_usage
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
class RankSettings(StudySettings):
    """What is read and placed.

    Attributes:
      data_dir: where `counts` is looked up.
      counts: JSON lines of counts by model, domain and layer.
      ranks_dir: folder of moe-l2's data; None: of the installed package.
      qwen_domains: of the eight that Qwen3.6 was recorded with, one a server.
      deepseek_domains: likewise, of DeepSeek-V4-Flash's four.
      shares: of the experts, that each server holds.
    """

    rules = StudySettings.rules | {"shares": check_share}
    data_dir: str | None = None
    counts: str = "routing/expert_counts.jsonl"
    ranks_dir: str | None = None
    qwen_domains: Sequence[str] = ("general_qa", "codegen", "math", "creative_write")
    deepseek_domains: Sequence[str] = ("general", "math", "code", "chat")
    shares: Sequence[float] = (0.34, 0.42, 0.6)


class Calls(NamedTuple):
    """How often each server calls each expert.

    Attributes:
      kind: "counts", "ranks, CURVE" or "assumed tasks".
      share_NLE: float64, of a layer's calls.
    """

    model: str
    kind: str
    share_NLE: np.ndarray

    @property
    def label(self) -> str:
        return f"{self.model}, {self.kind}"

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


def measure(settings: RankSettings) -> Findings:
    """Places every model's calls by every method."""
    all_calls, shares = calls_of(settings), settings.shares
    rows, details, ours, gains = [], [], {}, {}
    shown: dict[str, dict[str, list[float]]] = {}
    for calls in all_calls:
        label, overlap = calls.label, calls.overlap()
        rows.append(metric(label, "overlap of two domains' quarters", overlap, "1"))
        for share in shares:
            local = {method: calls.local(method, share) for method in METHODS}
            gains[label, share] = 100 * (local[PRISM] - local[EPLB])
            for method, value in local.items():
                at = f"calls at home, {share:.0%} a server, {label}"
                rows.append(metric(method, at, value, "1"))
                shown.setdefault(label, {}).setdefault(method, []).append(value)
        points = ", ".join(f"{gains[label, share]:+.1f}" for share in shares)
        ours[label] = {
            "overlap": round(overlap, 3),
            f"prism over {EPLB}, points": points,
        }
        details.append(
            f"{label}: two domains share {overlap:.0%} of their most used quarters "
            f"(25 % by chance); Prism keeps {points} points more calls at home than "
            f"{EPLB}, where a server holds {', '.join(f'{s:.0%}' for s in shares)} of "
            "the experts."
        )
    return Findings(
        answer=answer(gains, shares),
        details=details,
        model={
            "name": ", ".join(dict.fromkeys(calls.model for calls in all_calls)),
            "params": 0,
            "weights": "none: counts and ranks of their routers",
        },
        workload=sources(settings),
        metrics=rows,
        limits=LIMITS,
        kind="simulated",
        cost_model_source="preset",
        baselines=[m for m in METHODS if m != PRISM],
        ours=ours,
        plot=lambda out: plot(out, shares, shown),
        summary={"points": {f"{m}, {s:g}": gain for (m, s), gain in gains.items()}},
    )


LIMITS = (
    "Ranks hold an order and no counts: how much more often the first is called than "
    "the tenth is assumed, so that the listed experts get the share that the package "
    "states (91-97 and 94-98 %, the middle is taken). The flat curve is the least skew "
    "that fits, the geometric one is a guess.",
    "The ranks come from few recordings by others (24 logs of Qwen3.6, 125 requests of "
    "DeepSeek-V4-Flash in two bits a weight); with few tokens domains look more apart "
    "than they are. Nine layers of DeepSeek-V4-Flash list six experts only and are "
    "left out.",
    "Calls kept at home, not seconds: no server, line or queue is computed. Equal "
    "servers of one GPU: three for the assumed tasks, four for all others.",
)


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


def answer(gains: Mapping[tuple[str, float], float], shares: Sequence[float]) -> str:
    """The range of Prism's gain over heterogeneous EPLB, by kind of statistics."""
    middle = shares[len(shares) // 2]

    def span(word: str) -> str:
        found = [v for (name, s), v in gains.items() if word in name and s == middle]
        return f"{min(found):+.1f} to {max(found):+.1f}"

    return (
        f"With {middle:.0%} of the experts a server Prism keeps {span('ranks')} points "
        f"more calls at home than heterogeneous EPLB by ranks, {span('counts')} by "
        f"counts, {span('assumed')} by assumed tasks."
    )


def plot(path: Path, shares: Sequence[float], shown) -> None:
    """Share of calls at home over the experts that a server holds, by model."""
    ticks = [f"{share:.0%}" for share in shares]
    panels = [
        Panel(
            label, "calls at home", ticks, by_method, x_label="experts a server holds"
        )
        for label, by_method in shown.items()
    ]
    draw_panels(
        path, panels, title="A domain a server (computed from counts and ranks)"
    )


def check(settings: RankSettings) -> None:
    """Refuses files that are not there, before anything is placed."""
    find_file(settings.counts, settings.data_dir)
    folder = ranks_folder(settings.ranks_dir)
    for model in RANKED:
        find_file(model.file, str(folder))


STUDY = Study(
    name="prism_ranks",
    question="Do the routers of 2026's models differ enough by domain for placement to "
    "pay?",
    settings=RankSettings,
    measure=measure,
    check=check,
    claim=Claim(
        source="Prism, section II-A and table II: usage differs by task, so that "
        "placing by it keeps calls at home",
        paper={"numbers": "none of these models, and no ranks"},
        why="The paper counts narrow tasks of BIG-bench on two models of 2023 and "
        "2024. These are domains of text or requests, on models of 2024 (counts) and "
        "2026 (ranks).",
        not_comparable="Other models and tasks.",
    ),
)
