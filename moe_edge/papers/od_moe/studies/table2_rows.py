"""What table 2 tells of texts and bytes: its rows, and what follows from them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moe_edge.bench.rounds import round_ratios
from moe_edge.metrics.frames import Rows, Tables, median
from moe_edge.papers.od_moe.studies.table2 import RESIDENT, SAME_PROCESSES, STAND_INS

At = tuple[int, int]  # tokens in and out
Roles = dict[str, int]  # bytes of weights on main node, shadow, workers (slots)
LOSSY = ("AdapMoE",)
SAME = "every lossless system gave the model's own tokens"
MOST = "no peer holds more bytes than the largest OD-MoE"


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


Texts = Mapping[tuple[str, At], Sequence[Text]]  # by system and setting, one a round


def tell_texts(rows: Rows, texts: Texts) -> None:
    """Adds speeds of every system and setting, and those over the resident engine's
    and over the same processes' in the same round: medians, averaged over the settings
    as the paper averages."""
    rows.checks[SAME] = all(
        one.is_same
        for (system, _), found in texts.items()
        if system not in LOSSY
        for one in found
    )
    values = {key: figures_of(found, key[1][1]) for key, found in texts.items()}
    averages: dict[tuple[str, str], dict[str, list[float]]] = {}
    for (system, at), found in values.items():
        measured = {name: median(each) for name, each in found.items()}
        for base in (RESIDENT, SAME_PROCESSES):
            if base == system:
                continue
            its, of = values[base, at], averages.setdefault((base, system), {})
            over = {n: median(round_ratios(found[n], its[n])) for n in found}
            for name, one in over.items():
                of.setdefault(name, []).append(one.value)
            if base == RESIDENT:
                measured["over_resident"] = over["decode"]
        rows("speeds", system, *at, **measured)
    for (base, system), of in averages.items():
        means = {name: float(np.mean(each)) for name, each in of.items()}
        rows("over", base, system, **means)


def figures_of(texts: Sequence[Text], new_tokens: int) -> dict[str, list[float]]:
    """Of every round."""
    return {
        "ttft_ms": [1e3 * one.ttft_s for one in texts],
        "decode": [1 / one.step_s for one in texts],
        "output": [one.tokens_per_s(new_tokens) for one in texts],
    }


def tell_bytes(rows: Rows, held: Mapping[str, Roles], shares: Mapping[str, float]):
    """Adds bytes by role; `shares`: the routed experts' on shadow and workers over the
    model's."""
    for system, one in held.items():
        rows("bytes", system, **one, in_all=sum(one.values()))
    for name, share in shares.items():
        third = f"{name}: experts on shadow and workers <= 1/3 of the model's bytes"
        rows.checks[third] = share <= 1 / 3


def derive(tables: Tables) -> dict[str, Any]:
    """Averages over the settings, with bytes; which of OD-MoE and of the peers is
    fastest."""
    held, over = (tables[name].set_index("system") for name in ("bytes", "over"))
    found = over[over.base == RESIDENT].drop(columns="base")
    found["bytes"] = held.in_all / held.in_all[RESIDENT]
    own = [name for name in found.index if name.startswith("OD-MoE, ")]
    peers = [name for name in found.index if name in STAND_INS]
    largest = held.in_all[own].idxmax()
    same = over[over.base == SAME_PROCESSES].decode[own]
    checks = {MOST: bool((held.in_all[peers] <= held.in_all[largest]).all())}
    for name in own:
        if name.endswith("speculative"):
            bar = f"{name}: decode >= .85 of the same processes, all resident"
            checks[bar] = bool(same[name] >= 0.85)
    speeds = tables["speeds"].astype({"tokens_in": str, "tokens_out": str})
    speeds["at"] = speeds.tokens_in + " in, " + speeds.tokens_out + " out"
    return {
        "shown": speeds,
        "means": found.reset_index(),
        "mine": found.loc[own].decode.idxmax(),
        "best": found.loc[peers].decode.idxmax(),
        "largest": largest,
        "same": same.rename("decode").reset_index(),
        "stand_ins": [{"peer": name, "what": STAND_INS[name]} for name in peers],
        "checks": checks,
    }


def by_role(device_bytes: Mapping[str, int]) -> Roles:
    """Bytes of a live run, all workers together."""
    workers = sum(n for who, n in device_bytes.items() if who.startswith("worker"))
    return roles(device_bytes["main"], device_bytes["shadow"], workers)


def roles(main: int, shadow: int, workers: int) -> Roles:
    """Bytes by role, in the order of the table."""
    return {"main": main, "shadow": shadow, "workers": workers}
