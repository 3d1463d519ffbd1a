"""The entry of table 2: what was measured, its rows, checks and picture."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moe_edge.bench.rounds import median_metric, median_panel, round_ratios
from moe_edge.bench.study import median_and_spread
from moe_edge.metrics.plots_panels import draw_panels
from moe_edge.metrics.results import Findings, interval_metric, metric
from moe_edge.papers.od_moe.studies.table2 import (
    RESIDENT,
    SAME_PROCESSES,
    STAND_INS,
    Table2Settings,
    name_of,
    ratio_name,
)


@dataclasses.dataclass(frozen=True)
class Text:
    """One measured text.

    Attributes:
      ttft_s: seconds to the first token.
      step_s: of a decode step.
      is_same: whether the tokens were the model's own.
    """

    ttft_s: float
    step_s: float
    is_same: bool = True

    def tokens_per_s(self, new_tokens: int) -> float:
        """All new tokens over all seconds."""
        return new_tokens / (self.ttft_s + (new_tokens - 1) * self.step_s)


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a study measured.

    Attributes:
      texts: by (system, (tokens in, tokens out)), one a round.
      device_bytes: system -> role -> bytes of weights.
      fidelity: `Agreement` of every lossy system with the resident engine.
      dropped: share of chosen experts that it left out, likewise.
      perplexity: of the resident engine and of all that give its tokens.
      expert_share: of each OD-MoE, routed experts' bytes on shadow and workers over
        the model's.
      on_time: the check that nothing was compiled late.
      model, workload: of the entry.
    """

    texts: Mapping[tuple[str, tuple[int, int]], Sequence[Text]]
    device_bytes: Mapping[str, Mapping[str, int]]
    fidelity: Mapping[str, Any]
    dropped: Mapping[str, float]
    perplexity: float
    expert_share: Mapping[str, float]
    on_time: Mapping[str, bool]
    model: Mapping[str, Any]
    workload: Mapping[str, Any]

    @property
    def systems(self) -> list[str]:
        """In the order of the table."""
        return list(dict.fromkeys(system for system, _ in self.texts))

    def held(self, system: str) -> int:
        """Bytes of weights of a system, all its devices together."""
        return sum(self.device_bytes[system].values())

    def values(self, system: str, measure: str, at: tuple[int, int]) -> list[float]:
        """One a round: of `MEASURES`."""
        return [MEASURES[measure][0](one, at[1]) for one in self.texts[system, at]]

    def over(self, system: str, measure: str, at, base: str = RESIDENT) -> list[float]:
        """Likewise, over another system's in the same round."""
        mine = self.values(system, measure, at)
        return round_ratios(mine, self.values(base, measure, at))

    def mean_over(self, system: str, measure: str, base: str = RESIDENT) -> float:
        """Median of the rounds, averaged over the settings as the paper averages."""
        settings = dict.fromkeys(at for _, at in self.texts)
        medians = [
            median_and_spread(self.over(system, measure, at, base))[0]
            for at in settings
        ]
        return sum(medians) / len(medians)


# measure -> (value of a text and its new tokens, unit, scale)
MEASURES: dict[str, tuple[Callable[[Text, int], float], str, float]] = {
    "TTFT": (lambda one, new: one.ttft_s, "ms", 1e3),
    "decode": (lambda one, new: 1 / one.step_s, "tokens/s", 1),
    "output": (lambda one, new: one.tokens_per_s(new), "tokens/s", 1),
}


def name_at(at: tuple[int, int]) -> str:
    """Of a setting."""
    return f"{at[0]} in, {at[1]} out"


def findings(settings: Table2Settings, found: Measured) -> Findings:
    """The entry."""
    decode = {
        system: found.mean_over(system, "decode")
        for system in found.systems
        if system != RESIDENT
    }
    own = [name_of(departure) for departure in settings.departures]
    others = {system: decode[system] for system in STAND_INS}
    mine, best = max(own, key=decode.get), max(others, key=others.get)
    whole = found.held(RESIDENT)
    largest = max(own, key=found.held)
    return Findings(
        answer=f"{mine} decodes at {decode[mine]:.3f} of the resident engine's speed "
        f"with {found.held(mine) / whole:.3f} of its bytes; of the peers with "
        f"{found.held(largest) / whole:.3f} and the same link rate {best} is fastest, "
        f"at {others[best]:.3f}.",
        details=[
            *(
                f"{system}: {found.held(system) / whole:.3f} of the resident engine's "
                f"bytes, {decode[system]:.3f} of its decode speed."
                for system in own
            ),
            f"The peers hold as many bytes as {largest}.",
            *(
                f"{system}: {found.mean_over(system, 'decode', SAME_PROCESSES):.2f} of "
                "the decode speed of the same processes with all experts resident."
                for system in own
            ),
            *(f"For {peer} stands: {what}." for peer, what in STAND_INS.items()),
        ],
        model=found.model,
        workload=found.workload,
        kind="emulated",
        metrics=metrics(settings, found),
        baselines=[RESIDENT, *STAND_INS],
        limits=[
            "OD-MoE's processes share two cores, which machines of their own would "
            "not; a peer has both for itself, and one link where OD-MoE has one a "
            "worker.",
            "Bytes are of weights: KV caches (main node and shadow have one each), "
            "activations and programs are not counted.",
            "Perplexity is scored with the resident engine and what is lossy; all "
            "others give the resident engine's tokens, so theirs is its.",
            "A peer keeps its slots from one text to the next. One tiny model: prompts "
            "and outputs are the paper's lengths, layers and experts are not.",
        ],
        checks=checks(found, own),
        ours={
            ratio_name(system, measure): found.mean_over(system, measure)
            for measure in MEASURES
            for system in (*own, *STAND_INS)
        }
        | {
            ratio_name(system, "bytes"): found.held(system) / whole
            for system in (*own, *STAND_INS)
        },
        plot=lambda path: plot(path, settings, found),
        summary={"decode_over_resident": decode},
    )


def checks(found: Measured, own: Sequence[str]) -> dict[str, bool]:
    """Of the entry."""
    same = (
        one.is_same
        for (system, _), texts in found.texts.items()
        if system not in found.fidelity
        for one in texts
    )
    most = max(map(found.held, own))
    checks = {
        "every lossless system gave the model's own tokens": all(same),
        "no peer holds more bytes than the largest OD-MoE": all(
            found.held(peer) <= most for peer in STAND_INS
        ),
    }
    for system in own:
        name = f"{system}: experts on shadow and workers <= 1/3 of the model's bytes"
        checks[name] = found.expert_share[system] <= 1 / 3
        if system.endswith("speculative"):
            name = f"{system}: decode >= .85 of the same processes, all resident"
            checks[name] = found.mean_over(system, "decode", SAME_PROCESSES) >= 0.85
    return checks | dict(found.on_time)


def metrics(settings: Table2Settings, found: Measured) -> list[dict[str, Any]]:
    """All rows: a measure a table, a setting a column."""
    rows = []
    for measure, (_, unit, scale) in MEASURES.items():
        for system in found.systems:
            for at in settings.at:
                values = found.values(system, measure, at)
                name = f"{measure}, {name_at(at)}"
                rows.append(median_metric(system, name, values, unit, scale))
    for system in found.systems:
        for at in settings.at if system != RESIDENT else ():
            values = found.over(system, "decode", at)
            name = f"decode over resident, {name_at(at)}"
            rows.append(median_metric(system, name, values, "1"))
    for system, roles in found.device_bytes.items():
        total = {"in all": sum(roles.values())}
        for role, num_bytes in (roles | total).items():
            rows.append(metric(system, f"device bytes, {role}", num_bytes, "bytes"))
    for system in found.systems:
        if system not in found.fidelity:
            rows.append(metric(system, "perplexity", found.perplexity, "1"))
    for system, one in found.fidelity.items():
        rows.append(metric(system, "perplexity", one.perplexity, "1", one.tokens))
        share = found.dropped[system]
        rows.append(metric(system, "chosen experts dropped", share, "1", one.tokens))
        for name, value, interval in (
            ("perplexity ratio", one.perplexity_ratio, one.ratio_interval95),
            ("agreement", one.agreement, one.agreement_interval95),
        ):
            rows.append(interval_metric(system, name, value, interval, one.tokens))
    return rows


def plot(path, settings: Table2Settings, found: Measured) -> None:
    """A panel a measure: bars of all systems in every setting."""
    names = [name_at(at) for at in settings.at]
    panels = [
        median_panel(
            f"{measure}, {unit}",
            unit,
            names,
            {
                system: [found.values(system, measure, at) for at in settings.at]
                for system in found.systems
            },
            scale,
            log=True,
        )
        for measure, (_, unit, scale) in MEASURES.items()
        if measure != "output"
    ]
    draw_panels(path, panels, title="The same bytes and link rate (emulated links)")
