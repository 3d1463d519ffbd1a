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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from moe_edge.bench.prompts import PromptSettings, check_inputs, make_pool
from moe_edge.bench.settings import RULES, Rules
from moe_edge.bench.study import Claim, Study, median_and_spread, weights_of
from moe_edge.core.checks import check_from_zero, check_known
from moe_edge.metrics.plots_panels import Panel, draw_panels
from moe_edge.metrics.results import Findings, metric
from moe_edge.papers.od_moe.mode import DEPARTURES

CASES = {  # of section 4.2: shadow, token period, KV period
    "1 both aligned": ("int8", 1, 1),
    "2 token only": ("int8", 1, 0),
    "3 KV only": ("int8", 0, 1),
    "4 neither": ("int8", 0, 0),
    "5 random": ("random", 1, 1),
    "6 no prefetch": ("none", 1, 1),
}
LIMITS = [
    "All processes share two cores, so the shadow and idle workers take time from the "
    "main node, which machines of their own would not.",
    "Links are emulated in real time at the rate that balances loading and computing.",
]
WHY = (
    "The paper runs Mixtral-8x7B on ten machines at 1 Gbps; its loads take longer than "
    "the bound without a stall, ours exactly as long. Here all processes share two "
    "cores, and a token needs more messages than arithmetic."
)


def check_departure(name: str, value: str) -> None:
    """Raises ConfigError for an unknown departure of the shadow."""
    check_known(name, value, DEPARTURES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LiveSettings(PromptSettings):
    """`PromptSettings` names the rest; a round is one run of every case.

    Attributes:
      prompts: of each run, one after another.
      workers, groups: of OD-MoE.
      departures: of the shadow, each with all cases.
    """

    rules: ClassVar[Rules] = {**RULES, "departures": check_departure}
    sources: Sequence[str] = ("prompts/alpaca.jsonl", "prompts/gsm8k.jsonl")
    rounds: int = 3
    prompt_tokens: int = 16
    new_tokens: int = 96
    prompts: int = 2
    workers: int = 4
    groups: int = 2
    departures: Sequence[str] = ("late", "speculative")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeriodSettings(LiveSettings):
    """`LiveSettings` names the rest.

    Attributes:
      periods: of tokens and of keys and values, in all pairs.
    """

    rules: ClassVar[Rules] = {**LiveSettings.rules, "periods": check_from_zero}
    rounds: int = 1
    departures: Sequence[str] = ("late",)
    periods: Sequence[int] = (1, 4, 16)


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
    """The row of one run over these prompts; `options`: of `ClusterOptions`."""
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


def run_fig8(settings: LiveSettings) -> Findings:
    """All cases, round by round."""
    runs, rows = LiveRuns(settings), {}
    for number in range(settings.rounds):
        for name, (shadow, *periods) in CASES.items():
            for departure in departures_of(settings, shadow):
                key = f"{name}, {departure}" if departure else name
                row = runs.run(number, shadow, periods, departure or "late")
                rows.setdefault(key, []).append(row)
    return findings(settings, runs, rows, case_panels, "What is aligned")


def departures_of(settings: LiveSettings, shadow: str) -> Sequence[str | None]:
    """What a case is run with; without a model there is nothing to depart."""
    return settings.departures if shadow not in ("random", "none") else [None]


def run_fig9(settings: PeriodSettings) -> Findings:
    """All pairs of periods."""
    runs, rows = LiveRuns(settings), {}
    for number in range(settings.rounds):
        for pair in itertools.product(settings.periods, repeat=2):
            for departure in settings.departures:
                row = runs.run(number, "int8", pair, departure)
                rows.setdefault(period_case(*pair, departure), []).append(row)
    return findings(settings, runs, rows, period_panels, "Periods of alignment")


def period_case(token: int, kv: int, departure: str) -> str:
    """Name of a case of figure 9; the periods as the paper writes them."""
    return f"T{token}_KV{kv}, {departure}"


SPEED = "decode speed over all experts resident"


def case_panels(settings: LiveSettings, share: Mapping[str, float]) -> list[Panel]:
    """A bar a case."""
    title = f"{settings.workers} workers, {settings.groups} groups"
    return [
        Panel(title, SPEED, list(share), {"median of rounds": list(share.values())})
    ]


def period_panels(settings: PeriodSettings, share: Mapping[str, float]) -> list[Panel]:
    """A panel a departure, a colour a period of the KV cache."""
    return [
        Panel(
            f"{departure} departure, {settings.workers} workers",
            SPEED,
            [_every(token) for token in settings.periods],
            {
                f"KV cache {_every(kv)}": [
                    share[period_case(token, kv, departure)]
                    for token in settings.periods
                ]
                for kv in settings.periods
            },
            x_label="tokens aligned",
        )
        for departure in settings.departures
    ]


def _every(period: int) -> str:
    return f"every {period}" if period else "never"


def findings(
    settings: LiveSettings,
    runs: LiveRuns,
    rows: Mapping[str, list[dict]],
    panels_of: Callable[[LiveSettings, Mapping[str, float]], list[Panel]],
    title: str,
) -> Findings:
    """The entry of a study of cases."""
    metrics, share = [], {}
    for name, found in rows.items():
        ratios = [r["decode_tokens_per_s"] / r["resident_tokens_per_s"] for r in found]
        share[name], spread = median_and_spread(ratios)
        metrics.append(
            metric(name, "decode over resident", share[name], "1", len(ratios), spread)
        )
        for key, unit in (
            ("decode_tokens_per_s", "tokens/s"),
            ("recall", "1"),
            ("reloads", "experts"),
            ("t_load_s", "s"),
            ("t_maxload_s", "s"),
            ("t_shadow_s", "s"),
        ):
            values = [row[key] for row in found if row.get(key) is not None]
            if values:
                value, spread = median_and_spread(values)
                label = key.removesuffix("_s").replace("_", " ")
                metrics.append(metric(name, label, value, unit, len(values), spread))
    best, worst = max(share, key=share.get), min(share, key=share.get)
    same = all(row["same_tokens"] for found in rows.values() for row in found)
    return Findings(
        answer=f"Best: {best}, {share[best]:.2f} of the speed with all experts "
        f"resident; worst: {worst}, {share[worst]:.2f}.",
        model=runs.model,
        workload={
            "sources": runs.sources,
            "prompt_tokens": settings.prompt_tokens,
            "new_tokens": settings.new_tokens,
            "prompts": settings.prompts,
            "rounds": settings.rounds,
            "workers": settings.workers,
            "groups": settings.groups,
        },
        kind="emulated",
        metrics=metrics,
        limits=LIMITS,
        checks={"every case gave the model's own tokens": same},
        ours={"best": best} | share,
        plot=lambda path: draw_panels(
            path, panels_of(settings, share), title=title, share_y=True
        ),
        summary={"share": share},
    )


STUDIES = {
    "od_moe_fig8": Study(
        name="od_moe_fig8",
        question="What do aligning tokens and KV cache, a shadow, and prefetching "
        "bring to OD-MoE's decode speed (fig. 8)?",
        settings=LiveSettings,
        measure=run_fig8,
        check=check_inputs,
        claim=Claim(
            source="OD-MoE, section 4.2, fig. 8 and table 2",
            paper={
                "1 both aligned": 0.7551,
                "order": "falls from case 1 to case 6; 3 below 2",
            },
            why=WHY,
        ),
    ),
    "od_moe_fig9": Study(
        name="od_moe_fig9",
        question="Which periods of aligning tokens and KV cache are fastest (OD-MoE, "
        "fig. 9)?",
        settings=PeriodSettings,
        measure=run_fig9,
        check=check_inputs,
        claim=Claim(
            source="OD-MoE, section 4.2, fig. 9",
            paper={"best": "T1_KV1"},
            why=WHY,
        ),
    ),
}
