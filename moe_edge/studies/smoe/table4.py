"""SMoE, table IV: multiple-choice accuracy over a, beside fidelity on a text.

Prompts are prefilled, which no route changes; every token of a choice is predicted by
a decode step under the route. Where intervals overlap accuracy says nothing, and
answers equal to the unmodified model's, agreement and perplexity say more.
"""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moe_edge.core.checks import check_count
from moe_edge.core.files import check_out_dir
from moe_edge.engine.load import check_checkpoint, load_engine
from moe_edge.engine.offload_options import OffloadOptions, resolve_offload
from moe_edge.evaluate.agreement import compare
from moe_edge.evaluate.fidelity import SwitchEngine, cut_rows
from moe_edge.evaluate.multiple_choice import answer_questions, read_questions
from moe_edge.evaluate.stepwise import score_batches, step_continuations
from moe_edge.evaluate.texts import find_path, read_text, sha256_of
from moe_edge.metrics.results import Entry, write_entry
from moe_edge.route.substitute import Substitute
from moe_edge.studies.fidelity.card import BASE, find_text
from moe_edge.studies.fidelity.plots import accuracy_over_a
from moe_edge.studies.smoe.settings import claim
from moe_edge.studies.smoe.table4_rows import by_task, metric_rows, short_questions
from moe_edge.studies.smoe.table4_text import LIMITS, PAPER, WHY, answer_of, table_of
from moe_edge.studies.study import model_entry

SETS = ("arc_challenge", "boolq", "hellaswag", "mmlu", "sciq", "wic", "winogrande")
A_VALUES = tuple(round(0.05 * i, 2) for i in range(13))  # the paper's columns


def run_accuracy(
    *,
    out_dir: str,
    checkpoint: str = "default",
    data_dir: str | None = None,
    sets: Sequence[str] = tuple(f"mcq/{name}.jsonl" for name in SETS),
    limit: int = 40,
    max_tokens: int = 128,
    a_values: Sequence[float] = A_VALUES,
    device_memory: str = "25%",
    batch_size: int = 3,
    offload: OffloadOptions | None = None,
    text: str | None = None,
    rows: int = 6,
    prompt_tokens: int = 64,
    forced_tokens: int = 192,
    seed: int = 0,
    overwrite: bool = False,
    dry_run: bool = False,
    config_text: Callable[[], str] = str,
) -> dict[str, Any]:
    """Measures accuracy and fidelity over a and writes the entry.

    Args:
      out_dir: folder of the entry.
      checkpoint: path or `default`.
      data_dir: where relative paths are looked up too.
      sets: multiple-choice files.
      limit: questions of each, the first that are short enough.
      max_tokens: of a question with a choice.
      a_values: of substitution, with the default weight rule.
      device_memory: budget of the experts.
      batch_size: choices, or rows of the text, that decode together.
      offload: policies beside the route; default as in `fidelity_card`.
      text, rows, prompt_tokens, forced_tokens: see `run_fidelity`.
      seed: of the bootstrap.
      overwrite: replace a non-empty out_dir.
      dry_run: check everything but the weights and stop.
      config_text: gives the config to store.
    Raises:
      MoeEdgeError: bad input.
      OSError: a file cannot be read.
    """
    started_s = time.time()
    check_out_dir(out_dir, overwrite)
    for name, value in (("limit", limit), ("max_tokens", max_tokens)):
        check_count(name, value)
    check_count("batch_size", batch_size)
    routes = {a: Substitute(a) for a in sorted({0.0, *map(float, a_values)})}
    paths = [find_path(path, data_dir) for path in sets]
    for path in paths:
        read_questions([path], 1)
    text_path = find_text(text, data_dir)
    content = read_text(text_path)
    options = resolve_offload(device_memory, offload or BASE)
    if dry_run:
        check_checkpoint(checkpoint, offload=options)
        return {"dry_run": True, "sets": len(paths), "out_dir": out_dir}

    loaded = load_engine(checkpoint)
    tokenizer, resident = loaded.tokenizer, loaded.engine
    tasks = {
        Path(path).stem: short_questions(tokenizer, path, limit, max_tokens)
        for path in paths
    }
    questions = [question for part in tasks.values() for question in part]
    forced = cut_rows(
        tokenizer.encode(content),
        rows=rows,
        prompt_tokens=prompt_tokens,
        forced_tokens=forced_tokens,
    )

    def answer(engine):
        return answer_questions(
            engine, tokenizer, questions, batch_size, step_continuations
        )[1]

    expected = answer(resident)
    reference = score_batches(resident, forced, batch_size)
    capacity = max(max_tokens, prompt_tokens + forced_tokens)
    switch = SwitchEngine(checkpoint, options, batch=batch_size, capacity=capacity)
    accuracy, fidelity = [], []
    for a, route in routes.items():
        found = vars(compare(switch.run(route, forced, batch_size), reference, seed))
        fidelity.append({"a": a, **found, "changed_ratio": switch.route.changed_ratio})
        switch.start(route)
        accuracy += by_task(tasks, a, answer(switch.engine), expected)
        print(
            f"a={a:g}: accuracy {accuracy[-1]['accuracy']:.3f}, "
            f"same answers {accuracy[-1]['same_answer']:.3f}, "
            f"agreement {found['agreement']:.3f}, "
            f"perplexity x{found['perplexity_ratio']:.4f}",
            flush=True,
        )
    switch.close()
    weights = resident.weights
    at_0 = accuracy[: len(tasks) + 1]
    entry = Entry(
        question="Does accuracy fall with SMoE's a (SMoE table IV)?",
        answer=answer_of(accuracy, fidelity),
        model=model_entry(checkpoint, weights.num_bytes, loaded.dtype),
        workload={
            "sets": {
                path: {"sha256": sha256_of(found), "questions": len(part)}
                for path, found, part in zip(sets, paths, tasks.values(), strict=True)
            },
            "max_tokens": max_tokens,
            "text": {"source": text_path.name, "sha256": sha256_of(text_path)},
            "rows": rows,
            "prompt_tokens": prompt_tokens,
            "forced_tokens": forced_tokens,
            "device_memory": device_memory,
            "batch_size": batch_size,
        },
        metrics=metric_rows(accuracy, fidelity),
        limits=[*LIMITS, WHY],
        seeds=[seed],
        baselines=["resident model", "chance"],
        checks={
            "a = 0 answers every question as the resident model": all(
                row["same_answer"] == 1 for row in at_0
            ),
            "a = 0 agrees on every token": fidelity[0]["agreement"] == 1,
        },
        paper_claim=claim(
            "SMoE, table IV: accuracy (%) at alpha 0, 0.35 and 0.6",
            PAPER,
            {
                f"{row['task']}, a={row['a']:g}": round(100 * row["accuracy"], 1)
                for row in accuracy
                if row["a"] in (0, 0.35, 0.6)
            },
            WHY,
        ),
        started_s=started_s,
    )
    write_entry(
        out_dir,
        entry,
        plot=lambda path: accuracy_over_a(
            path, accuracy, fidelity, title=f"{checkpoint}: accuracy over a"
        ),
        config_text=config_text(),
        overwrite=overwrite,
        files={
            "accuracy.json": json.dumps(
                {"accuracy": accuracy, "fidelity": fidelity}, indent=1
            ),
            "table.md": table_of(accuracy, fidelity),
        },
    )
    print(entry.answer)
    return {"accuracy": accuracy, "fidelity": fidelity, "out_dir": out_dir}
