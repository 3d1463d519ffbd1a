"""The root of launch/refactor.py: experts into sub-experts that K can choose among."""

import json
import shutil
import sys
import time
from collections.abc import Callable
from typing import Any

from moe_edge.convert.open import open_checkpoint
from moe_edge.core.checks import check_count
from moe_edge.core.files import (
    check_apart,
    check_out_dir,
    locked_folder,
    write_text,
)
from moe_edge.evaluate.texts import find_path
from moe_edge.profile.reader import open_profile
from moe_edge.refactor.build import build_refactoring
from moe_edge.refactor.check_flags import check_fine_tuning, check_mode, find_texts
from moe_edge.refactor.finetune.finetune import finetune_router
from moe_edge.refactor.measure import measure_model, parse_ks, read_ids
from moe_edge.refactor.partition.matrix import run_matrix
from moe_edge.refactor.partition.model import MIN_TOKENS
from moe_edge.refactor.partition.report import HELDOUT_RATIO
from moe_edge.refactor.partition.solve import DEFAULT
from moe_edge.refactor.report import print_report, summary_of
from moe_edge.refactor.settings import Settings
from moe_edge.refactor.split import down_factor, is_exact
from moe_edge.refactor.write import write_refactored

REPORT_NAME = "report.json"


def run_refactor(
    *,
    out_dir: str,
    checkpoint: str | None = None,
    profile: str | None = None,
    activations: str | None = None,
    sub_experts: int = 4,
    gate: str = "lg",
    inactive: int | None = None,
    solver: str | None = None,
    restarts: int | None = None,
    normalise: bool = False,
    weigh_neurons: bool = True,
    weigh_tokens: bool = False,
    importance: str = "output",
    proxy_rule: str = "global",
    gate_neurons: int | None = None,
    gate_choice: str = "fitted",
    heldout_ratio: float = HELDOUT_RATIO,
    min_tokens: int = MIN_TOKENS,
    text: str | None = None,
    ppl_k: str = "all",
    max_text_tokens: int = 4096,
    train_text: str | None = None,
    fine_tuning: dict[str, Any] | None = None,
    max_minutes: float | None = None,
    data_dir: str | None = None,
    seed: int = 0,
    overwrite: bool = False,
    dry_run: bool = False,
    config_text: Callable[[], str] = str,
) -> dict[str, Any]:
    """Refactors a checkpoint by its profile, or partitions one matrix of activations.

    Args:
      out_dir: the new checkpoint, in our format, with `report.json` and `config.gin`;
        of a matrix see `run_matrix`.
      checkpoint: the parent, path or `default`.
      profile: folder of launch/profile_model.py, of the same checkpoint.
      activations: `.npy` file to partition instead of a model.
      sub_experts .. min_tokens: see `refactor_settings.Settings`.
      text: held-out file whose perplexity is measured; None: the packaged one.
      ppl_k: values of K, `all`, or an empty string for none.
      max_text_tokens: read of the text.
      train_text: lg_ft: files to fine-tune on, separated by commas.
      fine_tuning: lg_ft: options of `finetune_settings.FineTuning`.
      max_minutes: lg_ft: stop training after so many minutes; the same call goes on.
      data_dir: where relative paths are looked up too.
      seed: of everything random.
      overwrite: replace earlier results.
      dry_run: check flags, checkpoint and profile, then stop.
      config_text: gives the config to store.
    Returns:
      objective and objective_heldout (eq. 2 summed over all experts, on tokens that the
      partition was fitted on and others), seconds, ppl_by_k, identity_error, out_dir.
    Raises:
      MoeEdgeError: bad input; OSError: a file that cannot be read.
    """
    given, started = dict(locals()), time.monotonic()
    settings = Settings(
        sub_experts=sub_experts,
        gate=gate,
        inactive=inactive,
        solver=solver,
        restarts=restarts,
        normalise=normalise,
        weigh_neurons=weigh_neurons,
        weigh_tokens=weigh_tokens,
        importance=importance,
        proxy_rule=proxy_rule,
        gate_neurons=gate_neurons,
        gate_choice=gate_choice,
        heldout_ratio=heldout_ratio,
        min_tokens=min_tokens,
        seed=seed,
    )
    check_mode(given, run_refactor.__kwdefaults__)
    if activations is not None:
        activations = find_path(activations, data_dir)
        check_apart(out_dir, activations)
        return run_matrix(
            out_dir=out_dir,
            activations=activations,
            sub_experts=sub_experts,
            inactive=settings.num_inactive,
            solver=solver or DEFAULT,
            restarts=restarts,
            normalise=normalise,
            heldout_ratio=heldout_ratio,
            seed=seed,
            overwrite=overwrite,
            dry_run=dry_run,
            config_text=config_text,
        )
    check_count("max_text_tokens", max_text_tokens)
    out = check_out_dir(out_dir, overwrite)
    reader = open_checkpoint(checkpoint)
    check_apart(out, reader.path, profile)
    child = settings.check(reader.config)
    ks = parse_ks(ppl_k, child.moe)
    ids, source = (
        read_ids(reader, text, data_dir, max_text_tokens) if ks else ([], None)
    )
    if gate == "lg_ft":
        train_texts = find_texts(train_text, data_dir)
        check_apart(out, *train_texts)
        tuning = check_fine_tuning(reader, child, train_texts, fine_tuning, seed)
    opened = open_profile(profile)
    opened.check(reader.content_sha256())
    factor = down_factor(reader.config.moe, sub_experts, settings.model_gate)
    exact = is_exact(factor, sub_experts, reader.layout.has_bias)
    if not exact and reader.dtype.itemsize < 4:
        scaled = "down biases" if factor == 1 else "down weights"
        print(
            f"{sub_experts} sub-experts are no power of two: {scaled} are rounded to "
            f"{reader.dtype.name} once more, so all of them together are the parent "
            "only nearly (bfloat16: logits within 1e-2 standard deviations)",
            file=sys.stderr,
        )
    if dry_run:
        return {"dry_run": True, "out_dir": out_dir}
    # Beside the output, so that a run that was killed goes on after its last layer.
    work_dir = out.with_name(f"{out.name}.partition")
    with locked_folder(work_dir, str(out)):
        refactoring, partition = build_refactoring(reader, opened, settings, work_dir)
        report = partition.summary() | {
            "down_factor": factor,
            "down_factor_exact": exact,
            "gate": refactoring.manifest() | {"rank_shares": refactoring.rank_shares},
            "text": source,
        }
        files = {"config.gin": config_text()}
        if gate == "lg_ft":
            # In the work folder, where what a killed run left is found again.
            folder = work_dir / "lg"
            shutil.rmtree(folder, ignore_errors=True)
            try:
                write_refactored(reader, refactoring, folder)
                tuned = finetune_router(
                    folder,
                    ",".join(train_texts),
                    out,
                    overwrite=overwrite,
                    max_minutes=max_minutes,
                    **tuning,
                )
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            report["fine_tuning"] = tuned
            if not tuned["finished"]:
                print(
                    "stopped; the same command goes on with training", file=sys.stderr
                )
                return summary_of(report, started) | {
                    "finished": False,
                    "out_dir": out_dir,
                }
            write_text(out / "config.gin", files["config.gin"])
        else:
            write_refactored(
                reader, refactoring, out, overwrite=overwrite, extra_files=files
            )
        shutil.rmtree(work_dir)
    # The checkpoint is complete: a run killed from here on leaves a usable one.
    report |= measure_model(checkpoint, out, ids, ks, seed)
    summary = summary_of(report, started)
    stored = json.dumps(report | summary, indent=1, allow_nan=False, default=str)
    write_text(out / REPORT_NAME, stored + "\n")
    print_report(report)
    return summary | {"out_dir": out_dir}
