"""OD-MoE, figures 8 and 9: decode speed by what is aligned, on live processes.

Every case is a run of `moe-edge cluster` on this machine: main node, shadow, workers
over emulated links of their own. It is compared with the same processes holding all
experts, which each run measures first, so that a busy moment falls on both.
"""

import dataclasses
import itertools
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from moe_edge.bench.prompts import PromptSettings, check_inputs, make_pool
from moe_edge.bench.settings import Steps, known
from moe_edge.bench.study import Study, weights_of
from moe_edge.core.checks import check_from_zero
from moe_edge.metrics.frames import Rows, Tables, frame, median
from moe_edge.papers.od_moe.options import DEPARTURES

CASES = {  # of section 4.2: shadow, token period, KV period
    "1 both aligned": ("int8", 1, 1),
    "2 token only": ("int8", 1, 0),
    "3 KV only": ("int8", 0, 1),
    "4 neither": ("int8", 0, 0),
    "5 random": ("random", 1, 1),
    "6 no prefetch": ("none", 1, 1),
}


Departure = Annotated[str, known("departures", DEPARTURES)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LiveSettings(PromptSettings):
    """`PromptSettings` names the rest; a round is one run of every case.

    Attributes:
      prompts: of each run, one after another.
      workers, groups: of OD-MoE.
      departures: of the shadow, each with all cases.
    """

    sources: Sequence[str] = ("prompts/alpaca.jsonl", "prompts/gsm8k.jsonl")
    rounds: int = 3
    prompt_tokens: int = 16
    new_tokens: Steps = 96
    prompts: int = 2
    workers: int = 4
    groups: int = 2
    departures: Sequence[Departure] = ("late", "speculative")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeriodSettings(LiveSettings):
    """`LiveSettings` names the rest.

    Attributes:
      periods: of tokens and of keys and values, in all pairs.
    """

    rounds: int = 1
    departures: Sequence[Departure] = ("late",)
    periods: Sequence[Annotated[int, check_from_zero]] = (1, 4, 16)


class LiveRuns:
    """Runs of one study: the same prompts in every case of a round."""

    def __init__(self, settings: LiveSettings):
        from moe_edge.convert.open import open_checkpoint
        from moe_edge.convert.tokenizer import load_tokenizer

        reader = open_checkpoint(settings.checkpoint)
        tokenizer, name = load_tokenizer(reader), settings.checkpoint
        self.model = {
            "name": name,
            "params": count_parameters(reader.config),
            "weights": weights_of(name),
        }
        count = settings.rounds * settings.prompts
        pool = make_pool(settings, tokenizer, count, settings.prompt_tokens)
        self.settings, self.sources = settings, pool.sources
        self._texts = [tokenizer.decode(row) for row in pool.rows]

    def run(self, number: int, shadow: str, periods, departure: str) -> dict:
        """The row of one run, by the prompts of a round."""
        settings = self.settings
        first = number * settings.prompts
        return run_od_moe(
            self._texts[first : first + settings.prompts],
            checkpoint=settings.checkpoint,
            max_new_tokens=settings.new_tokens,
            workers=settings.workers,
            groups=settings.groups,
            shadow=shadow,
            token_period=periods[0],
            kv_period=periods[1],
            departure=departure,
        )


def worker_layers(departure: str | None) -> int:
    """Of which workers have slots: `late` is as in the paper."""
    return 2 if departure == "speculative" else 1


def run_od_moe(texts: Sequence[str], *, departure: str, **options) -> dict:
    """The row of one run over these prompts; `options`: of `OdMoeOptions`."""
    from moe_edge.cluster.run import run_cluster

    with tempfile.TemporaryDirectory() as work:
        path = Path(work) / "prompts.jsonl"
        lines = [{"id": str(i), "prompt": text} for i, text in enumerate(texts)]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return run_cluster(
            out_dir=str(Path(work) / "run"),
            mode="od_moe",
            prompts=str(path),
            departure=departure,
            worker_layers=worker_layers(departure),
            **options,
        )


def count_parameters(config) -> int:
    """Of a model, by the shapes of its tensors."""
    from moe_edge.checkpoint.schema import dense_items, item_shapes
    from moe_edge.model.record import RecordLayout

    shapes = [item_shapes(config, item).values() for item in dense_items(config)]
    dense = sum(math.prod(shape) for item in shapes for shape in item)
    blocks = len(config.moe_layers) * config.moe.num_experts
    return dense + blocks * RecordLayout.of(config).num_values


def measure_fig8(settings: LiveSettings, rows: Rows) -> None:
    """All cases, round by round."""
    runs, found = LiveRuns(settings), {}
    for number in range(settings.rounds):
        for name, (shadow, *periods) in CASES.items():
            for departure in departures_of(settings, shadow):
                key = f"{name}, {departure}" if departure else name
                row = runs.run(number, shadow, periods, departure or "late")
                found.setdefault((key,), []).append(row)
    tell(settings, runs, found, rows)


def departures_of(settings: LiveSettings, shadow: str) -> Sequence[str | None]:
    """What a case is run with; without a model there is nothing to depart."""
    return settings.departures if shadow not in ("random", "none") else [None]


def measure_fig9(settings: PeriodSettings, rows: Rows) -> None:
    """All pairs of periods."""
    runs, found = LiveRuns(settings), {}
    for number in range(settings.rounds):
        for pair in itertools.product(settings.periods, repeat=2):
            for departure in settings.departures:
                row = runs.run(number, "int8", pair, departure)
                found.setdefault((*pair, departure), []).append(row)
    tell(settings, runs, found, rows)


def tell(
    settings: LiveSettings,
    runs: LiveRuns,
    found: Mapping[tuple, Sequence[dict]],
    rows: Rows,
) -> None:
    """Adds the runs of every case, by the keys of frame `cases`."""
    for keys, some in found.items():
        ratios = [r["decode_tokens_per_s"] / r["resident_tokens_per_s"] for r in some]
        measures = {"over_resident": median(ratios)}
        for name in MEASURES:
            values = [row[name] for row in some if row.get(name) is not None]
            if values:
                measures[name] = median(values)
        rows("cases", *keys, **measures)
    same = all(row["same_tokens"] for some in found.values() for row in some)
    rows.checks["every case gave the model's own tokens"] = same
    names = ("prompt_tokens", "new_tokens", "prompts", "rounds", "workers", "groups")
    sizes = {name: getattr(settings, name) for name in names}
    workload = {"sources": runs.sources} | sizes
    rows.about |= {"model": runs.model, "workload": workload, "kind": "emulated"}


def derive(tables: Tables) -> dict[str, Any]:
    """The fastest and the slowest case."""
    cases = tables["cases"]
    shares = cases.over_resident
    return {
        "best": cases.loc[shares.idxmax()].to_dict(),
        "worst": cases.loc[shares.idxmin()].to_dict(),
    }


MEASURES = frame(
    "",
    "decode_tokens_per_s:tokens/s recall reloads:experts t_load_s t_maxload_s "
    "t_shadow_s",
).units
STUDIES = {
    name: Study(
        *(name, settings, measure),
        {"cases": frame(keys, "over_resident", **MEASURES)},
        derive,
        check=check_inputs,
    )
    for name, settings, measure, keys in (
        ("od_moe_fig8", LiveSettings, measure_fig8, "case"),
        ("od_moe_fig9", PeriodSettings, measure_fig9, "token kv departure"),
    )
}
