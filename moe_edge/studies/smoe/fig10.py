"""SMoE, figure 10 and eq. 5: time per token over a, its fit, and the choice of a.

The whole of SMoE but CPU assist runs at each a over an emulated link; a least a is
chosen for a time budget, and the fidelity of every a stands beside its time.
"""

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from moe_edge.core.checks import check_positive
from moe_edge.core.files import check_out_dir
from moe_edge.engine.load import check_checkpoint
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.metrics.results import Entry, write_entry
from moe_edge.offload.choose_a import choose_a
from moe_edge.studies.cases import Case
from moe_edge.studies.engines import Bench
from moe_edge.studies.fidelity.plots import tpot_over_a
from moe_edge.studies.prompts import prompt_files
from moe_edge.studies.smoe.settings import LIMITS, Settings, claim
from moe_edge.studies.smoe.tpot_fit import falls, fit_of, fit_rows, sentence
from moe_edge.studies.timed_cases import Timing, run_cases

WHY = (
    "The paper's figure shows an almost straight fall on three models of 16 to 57 B "
    "parameters whose expert loads take one to two orders of magnitude longer than "
    "their compute. Here a load takes a stated number of layers of compute, and once "
    "nearly all low-score experts are replaced a larger a changes nothing more: "
    "the curve can flatten."
)


def options_at(a: float, assist: str | None) -> OffloadOptions:
    """SMoE with one margin for routing and for prefetching."""
    return OffloadOptions(
        eviction="smoe_score",
        route="substitute",
        route_options={"a": a},
        predictor="smoe_partial",
        predictor_options={"top_a": a},
        assist=assist,
    )


def run_tpot(
    *,
    out_dir: str,
    checkpoint: str = "default",
    data_dir: str | None = None,
    sources: Sequence[str] = ("prompts/gsm8k.jsonl", "mcq/boolq.jsonl"),
    device_memory: str = "25%",
    batches: Sequence[int] = (1, 3),
    a_values: Sequence[float] = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6),
    rounds: int = 5,
    prompt_tokens: int = 48,
    new_tokens: int = 48,
    fidelity_rows: int = 6,
    link_factor: float = 2.0,
    link_latency_s: float = 50e-6,
    assist: str | None = None,
    tpot_budget_s: float | None = None,
    degree: int = 2,
    overwrite: bool = False,
    dry_run: bool = False,
    config_text: Callable[[], str] = str,
) -> dict[str, Any]:
    """Measures TPOT over a, fits it and chooses a for a budget.

    Args:
      out_dir: folder of the entry.
      checkpoint: path or `default`.
      data_dir, sources, batches, rounds, prompt_tokens, new_tokens, fidelity_rows,
        link_factor, link_latency_s: see `study_settings.Settings`.
      device_memory: budget of the experts.
      a_values: measured margins, at least `degree` + 2.
      assist: `two_pointer`, `fiddler` or None: the host's cores are the device's.
      tpot_budget_s: for which a is chosen; None: halfway between the extremes.
      degree: of the fitted polynomial.
      overwrite: replace a non-empty out_dir.
      dry_run: check everything but the weights and stop.
      config_text: gives the config to store.
    Raises:
      MoeEdgeError: bad input.
    """
    started_s = time.time()
    check_out_dir(out_dir, overwrite)
    if tpot_budget_s is not None:
        check_positive("tpot_budget_s", tpot_budget_s)
    settings = Settings(
        checkpoint=checkpoint,
        data_dir=data_dir,
        sources=tuple(sources),
        budgets=(device_memory,),
        batches=tuple(batches),
        rounds=rounds,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        link_factor=link_factor,
        link_latency_s=link_latency_s,
        fidelity_rows=fidelity_rows,
    )
    a_values = sorted(set(map(float, a_values)))
    # Refuses too few points before anything is measured.
    choose_a(a_values, [1.0] * len(a_values), 1.0, degree=degree)
    cases = [
        Case(
            f"a={a:g}", device_memory, batch, options_at(a, assist),
            is_exact=a == 0 and assist is None,
        )
        for batch in settings.batches
        for a in a_values
    ]  # fmt: skip
    prompt_files(settings)
    if dry_run:
        check_checkpoint(checkpoint, offload=cases[0].options)
        return {"dry_run": True, "cases": len(cases), "out_dir": out_dir}
    with Bench(checkpoint) as bench:
        timing = run_cases(bench, cases, settings)
    points = [point_of(timing, case, a) for case, a in _with_a(cases, a_values)]
    fits = []
    for batch in settings.batches:
        mine = [p for p in points if p["batch"] == batch]
        pairs = [(p["a"], seconds) for p in mine for seconds in p["tpot_s"]]
        fits.append(fit_of(batch, *zip(*pairs, strict=True), tpot_budget_s, degree))
    answer = "; ".join(map(sentence, fits)) + "."
    entry = Entry(
        question="How does time per token fall with SMoE's a, and which a meets a "
        "budget (SMoE fig. 10, eq. 5)?",
        answer=f"{device_memory} of the experts on the device. {answer}",
        kind="emulated",
        model=bench.model,
        workload=timing.ready.workload(settings) | {"a": a_values, "assist": assist},
        metrics=[
            *(row for one in timing.timed for row in one.rows()),
            *(row for fit in fits for row in fit_rows(fit)),
            *timing.resident_rows(),
        ],
        baselines=["resident", "a=0"],
        checks=timing.checks()
        | {"the largest a is faster than a = 0": all(falls(fit) for fit in fits)},
        limits=[*LIMITS, WHY, "TPOT is of a step of the whole batch."],
        paper_claim=claim(
            "SMoE, fig. 10 and section V-C: TPOT falls generally linearly with alpha",
            {"shape": "linear fall"},
            {f"batch {fit['batch']}: r2 of a line": fit["linear_r2"] for fit in fits},
            WHY,
        ),
        started_s=started_s,
    )
    write_entry(
        out_dir,
        entry,
        plot=lambda path: tpot_over_a(
            path, points, fits, title=f"Time per step over a, {device_memory}"
        ),
        config_text=config_text(),
        overwrite=overwrite,
        files={"points.json": json.dumps({"points": points, "fits": fits}, indent=1)},
    )
    print(f"{entry.question}\n{entry.answer}")
    return {"points": points, "choice": fits, "out_dir": out_dir}


def _with_a(cases: Sequence[Case], a_values: Sequence[float]):
    return zip(cases, a_values * (len(cases) // len(a_values)), strict=True)


def point_of(timing: Timing, case: Case, a: float) -> dict[str, Any]:
    """Time and fidelity at one a; a lossless case agrees, as its tokens showed."""
    timed = timing.find(case.policy, case.budget, case.batch)
    point = {"batch": case.batch, "a": a, "tpot_s": timed.tpot_s}
    point["hit_ratio"] = float(np.median(timed.hit_ratio))
    fidelity = timed.fidelity
    if fidelity is None:
        return point | {
            "agreement": 1.0,
            "agreement_interval95": (1.0, 1.0),
            "perplexity_ratio": 1.0,
        }
    return point | {
        "agreement": fidelity.agreement,
        "agreement_interval95": fidelity.agreement_interval95,
        "perplexity_ratio": fidelity.perplexity_ratio,
    }
