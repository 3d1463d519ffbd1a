"""The timing model of OD-MoE held against the live runs of an entry (fig. 8)."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from moe_edge.core.checks import ConfigError
from moe_edge.core.files import check_there
from moe_edge.metrics.frames import plain, tables
from moe_edge.metrics.schema import read_result
from moe_edge.papers.od_moe.cluster.groups import slots_of
from moe_edge.papers.od_moe.cluster.timing import Timing
from moe_edge.papers.od_moe.studies.live import CASES, worker_layers

SPEED, RATIO, RECALL = "decode_tokens_per_s", "over_resident", "recall"
LOAD, LONGEST, SHADOW = "t_load_s", "t_maxload_s", "t_shadow_s"
CLOSE = 0.15  # of the measured speed


@dataclasses.dataclass(frozen=True)
class LiveModel:
    """What the live runs ran, which their rows do not say.

    Attributes:
      layers, top_k: of the model.
      workers, groups: of OD-MoE.
    """

    layers: int
    top_k: int
    workers: int
    groups: int


@dataclasses.dataclass(frozen=True)
class LiveEntry:
    """An entry `od_moe_fig8`.

    Attributes:
      cases: case -> name of a metric -> its value.
      steps: decode steps of a text.
    """

    cases: Mapping[str, Mapping[str, float]]
    steps: int

    @classmethod
    def read(cls, folder: str) -> "LiveEntry":
        """The entry in a folder.

        Raises:
          FileNotFoundError: there is none. ConfigError: it is another study's.
        """
        path = Path(folder) / "result.json"
        check_there(path, "live:", "moe-edge study od_moe_fig8 writes such an entry")
        result, cases = read_result(folder), {}
        for row in plain(tables(result.get("frames", {})).get("cases", [])):
            cases[row.get("case", "")] = row
        for case, found in cases.items():
            missing = {SPEED, RATIO, LOAD, LONGEST, RECALL} - set(found)
            if missing or case.partition(",")[0] not in CASES:
                raise ConfigError(
                    f"live: {folder} has a case {case!r} with {', '.join(found)}, "
                    "expected cases and metrics of od_moe_fig8; name such an entry"
                )
        if not cases:
            raise ConfigError(f"live: {folder} has no cases; name one of od_moe_fig8")
        return cls(cases, result["workload"]["new_tokens"] - 1)

    def over_measured(self, model: LiveModel) -> dict[str, float]:
        """Modelled over measured decode speed of every case."""
        return {
            case: 1 / timing_of(case, found, model).token_s(self.steps) / found[SPEED]
            for case, found in self.cases.items()
        }


def timing_of(case: str, found: Mapping[str, float], model: LiveModel) -> Timing:
    """The model of a live case, by the times of its parts.

    A layer takes t_M + t_W with all experts resident, and t_maxload is
    G t_M + (G - 1) t_W: so both are known.
    """
    name, _, departure = case.partition(", ")
    shadow, token, kv = CASES[name]
    layer_s = found[RATIO] / found[SPEED] / model.layers
    main_s = found[LONGEST] - (model.groups - 1) * layer_s
    slots = slots_of(model.top_k, model.workers, model.groups)
    named = shadow != "none"
    return Timing(
        layers=model.layers,
        main_s=main_s,
        worker_s=max(layer_s - main_s, 0.0),  # medians of a few runs
        load_s=found[LOAD],
        shadow_s=found.get(SHADOW, 0.0) if named else None,  # random names at once
        groups=model.groups,
        worker_layers=worker_layers(departure),
        departure=departure or "late",
        token_period=token,
        kv_period=kv,
        missed_ratio=missed_ratio(found[RECALL], model.top_k) if named else 0.0,
        reload_s=found[LOAD] / slots,
    )


def missed_ratio(recall: float, top_k: int) -> float:
    """Layers that lack an expert, as if experts were missed independently."""
    return 1 - recall**top_k


def checks_of(ratios: Mapping[str, float]) -> dict[str, bool]:
    """Whether the paper's case is as fast as the model says."""
    return {
        f"live, case {case}: within {100 * CLOSE:.0f} % of the timing model": abs(
            ratio - 1
        )
        <= CLOSE
        for case, ratio in ratios.items()
        if case == "1 both aligned, late"
    }
