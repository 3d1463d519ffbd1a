"""The root of launch/fidelity.py: what lossy options change, per model and measured.

Every option is compared with the unmodified resident model on the same forced tokens
of the same batches, next to two controls: the lossless offloaded engine, which must
agree in every bit, and half the experts, which puts the numbers in scale.
"""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moe_edge.core.checks import ConfigError, check_count
from moe_edge.core.files import check_out_dir
from moe_edge.engine.load import check_checkpoint, load_engine
from moe_edge.engine.offload_options import OffloadOptions, resolve_offload
from moe_edge.evaluate.agreement import compare
from moe_edge.evaluate.fidelity import (
    Option,
    SwitchEngine,
    card,
    cut_rows,
    option_grid,
)
from moe_edge.evaluate.stepwise import score_batches
from moe_edge.evaluate.texts import find_path, read_text, sha256_of
from moe_edge.evaluate.weight_rules import RuleTally
from moe_edge.metrics.results import Entry, write_entry
from moe_edge.route.policy import get_route
from moe_edge.studies.fidelity.plots import fidelity_curves
from moe_edge.studies.fidelity.text import (
    LIMITS,
    QUESTION,
    answer_of,
    metric_rows,
    name_of,
)
from moe_edge.studies.quickstart.run import count_params
from moe_edge.studies.quickstart.texts import BOOKS

# Serial transfers and no prefetching: what is resident is then the same in every run.
BASE = OffloadOptions(eviction="smoe_score", asynchronous=False)


def check_batches(batch_sizes: Sequence[int]) -> tuple[int, ...]:
    """Batch sizes as given; refuses none and ones below 1."""
    for size in batch_sizes:
        check_count("batch size", size)
    if not batch_sizes:
        raise ConfigError("batch_sizes is empty; expected at least one, such as (1, 3)")
    return tuple(batch_sizes)


def find_text(text: str | None, data_dir: str | None) -> Path:
    """The text to measure on: by default the packaged held-out book."""
    return BOOKS if text is None else Path(find_path(text, data_dir))


def run_fidelity(
    *,
    out_dir: str,
    checkpoint: str = "default",
    text: str | None = None,
    device_memory: str = "15%,25%,50%",
    offload: OffloadOptions | None = None,
    batch_sizes: Sequence[int] = (1, 3),
    a_values: Sequence[float] = (0.05, 0.1, 0.2, 0.3, 0.4, 0.6),
    thresholds: Sequence[float] = (0.05, 0.1, 0.15, 0.25),
    rows: int = 6,
    prompt_tokens: int = 64,
    forced_tokens: int = 192,
    data_dir: str | None = None,
    seed: int = 0,
    overwrite: bool = False,
    dry_run: bool = False,
    config_text: Callable[[], str] = str,
) -> dict[str, Any]:
    """Measures every lossy option of a model and writes its fidelity card.

    Args:
      out_dir: folder of the entry.
      checkpoint: path or `default`.
      text: file to measure on; default: the packaged held-out book.
      device_memory: budgets, separated by commas.
      offload: policies beside the route (default: score-based eviction, serial, no
        prefetching); a lossy route of it is measured too.
      batch_sizes: rows decoded together.
      a_values: of substitution.
      thresholds: of dropping.
      rows: pieces of the text; each has `prompt_tokens` that are prefilled and
        `forced_tokens` that are decoded and scored.
      prompt_tokens, forced_tokens: of a row.
      data_dir: where a relative text is looked up too.
      seed: of the bootstrap.
      overwrite: replace a non-empty out_dir.
      dry_run: check everything but the weights and stop.
      config_text: gives the config to store.
    Raises:
      MoeEdgeError: bad input.
      OSError: the text cannot be read.
    """
    started_s = time.time()
    check_out_dir(out_dir, overwrite)
    batch_sizes = check_batches(batch_sizes)
    grid = option_grid(a_values, thresholds)
    base = offload or BASE
    if not base.lossless:
        own = Option.of(get_route(base.route, **base.route_options))
        grid += [own] if own not in grid else []
    budgets = [part.strip() for part in device_memory.split(",")]
    path = find_text(text, data_dir)
    content = read_text(path)
    settings = [resolve_offload(budget, base) for budget in budgets]
    if dry_run:
        for options in settings:
            check_checkpoint(checkpoint, offload=options)
        return {"dry_run": True, "options": len(grid), "out_dir": out_dir}

    loaded = load_engine(checkpoint)
    resident, config = loaded.engine, loaded.engine.config
    forced = cut_rows(
        loaded.tokenizer.encode(content),
        rows=rows,
        prompt_tokens=prompt_tokens,
        forced_tokens=forced_tokens,
    )
    half = resident.at_k(max(1, config.moe.top_k // 2))
    references, cards, tally = {}, [], RuleTally()
    for batch in batch_sizes:
        references[batch] = score_batches(resident, forced, batch)
        found = compare(score_batches(half, forced, batch), references[batch], seed)
        cards.append(
            {
                "option": f"{half.config.moe.top_k} of {config.moe.top_k} experts",
                "control": True,
                "batch": batch,
                **vars(found),
            }
        )
    size = prompt_tokens + forced_tokens
    for options in settings:
        switch = SwitchEngine(
            checkpoint, options, batch=max(batch_sizes), capacity=size
        )
        for batch in batch_sizes:
            reference = references[batch]
            for option in [Option("topk", {}), *grid]:
                run = switch.run(option.get(), forced, batch)
                found = card(option, switch, run, reference)
                found |= {"batch": batch, "device_memory": options.device_memory}
                found["control"] = option.route == "topk"
                cards.append(found)
                _print_card(found)
                if option.route == "substitute":
                    tally.add(found, run, reference)
        switch.close()
    verdict = tally.verdict(seed)
    facts = {
        "checkpoint": checkpoint,
        "text": f"{path.parent.name}/{path.name}",
        "budgets": budgets,
    }
    entry = Entry(
        question=QUESTION.format(name=checkpoint),
        answer=answer_of(cards, verdict, facts),
        model={
            "name": checkpoint,
            "params": count_params(config, resident.weights.num_bytes, loaded.dtype),
            "weights": "toy trained here" if checkpoint == "default" else "given",
        },
        workload={
            "text": {
                "source": f"{path.parent.name}/{path.name}",
                "sha256": sha256_of(path),
            },
            "rows": rows,
            "prompt_tokens": prompt_tokens,
            "forced_tokens": forced_tokens,
            "device_memory": budgets,
            "batch_sizes": list(batch_sizes),
            "eviction": base.eviction,
            "predictor": base.predictor,
        },
        metrics=metric_rows(cards, verdict, budgets),
        limits=LIMITS,
        seeds=[seed],
        baselines=["resident model", "lossless offloading", "half the experts"],
        checks=_control_checks(cards, base),
        started_s=started_s,
    )
    write_entry(
        out_dir,
        entry,
        plot=lambda target: fidelity_curves(
            target, cards, title=f"{checkpoint}: fidelity"
        ),
        config_text=config_text(),
        overwrite=overwrite,
        files={"cards.json": json.dumps(cards, indent=1) + "\n"},
    )
    return {"cards": cards, "weight_rule": verdict, "out_dir": out_dir}


def _control_checks(cards, base: OffloadOptions) -> dict[str, bool]:
    """The lossless control; what the host computes is summed in another order."""
    error = 0.0 if base.assist is None else 1e-4
    within = "exactly 1" if error == 0 else f"1 within {error:g}"
    lossless = [card for card in cards if card["option"] == "topk"]
    return {
        f"lossless offloading agrees on every token, perplexity ratio {within}": all(
            card["agreement"] == 1 and abs(card["perplexity_ratio"] - 1) <= error
            for card in lossless
        )
    }


def _print_card(found: dict[str, Any]) -> None:
    print(
        f"{found['device_memory']:>6} batch {found['batch']}  {name_of(found):<36} "
        f"agreement {found['agreement']:.3f}, "
        f"perplexity x{found['perplexity_ratio']:.4f}, "
        f"changed {100 * found['changed_ratio']:.1f} %, "
        f"hit ratio {found['hit_ratio']:.3f}",
        flush=True,
    )
