"""The root of `moe-edge refactor`: experts into sub-experts that K can choose among."""

import dataclasses
import inspect
import json
import math
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_edge.checkpoint.manifest import MANIFEST_NAME, REPORT_NAME
from moe_edge.convert.open import check_floats, check_unpruned, open_checkpoint
from moe_edge.convert.refactored_records import down_factor, is_exact
from moe_edge.core.checks import ConfigError, OutputError, check_count, check_from_zero
from moe_edge.core.files import locked_folder, write_json, write_text
from moe_edge.core.json_reader import as_read_back, read_json
from moe_edge.core.run_folder import RunFolder, root, unpacked
from moe_edge.core.typed import build_known
from moe_edge.evaluate.texts import find_file, find_path
from moe_edge.papers.moe_prism.refactor.finetune.settings import FineTuning
from moe_edge.papers.moe_prism.refactor.partition.matrix import run_matrix
from moe_edge.papers.moe_prism.refactor.settings import (
    FINE_TUNED,
    PartitionOptions,
    Settings,
    parse_ks,
)
from moe_edge.papers.moe_prism.refactor.texts import read_ids, read_windows
from moe_edge.profile.reader import open_profile

# One matrix is partitioned by these alone.
MATRIX_FLAGS = (
    *("activations", "sub_experts", "inactive", "solver", "restarts", "normalise"),
    *("heldout_ratio", "data_dir", "seed"),
)
# Gates -> flags that mean nothing with other ones.
GATE_FLAGS = {
    FINE_TUNED: ("train_text", "teacher_kl", "fine_tuning", "max_minutes"),
    ("cg",): ("gate_neurons", "proxy_rule", "gate_choice"),
}


@root
@unpacked(settings=Settings)
def run_refactor(
    run: RunFolder,
    *,
    checkpoint: str | None = None,
    profile: str | None = None,
    activations: str | None = None,
    settings: Settings,
    text: str | None = None,
    ppl_k: str = "all",
    max_text_tokens: int = 4096,
    train_text: str | None = None,
    teacher_kl: bool = False,
    fine_tuning: dict[str, Any] | None = None,
    max_minutes: float | None = None,
    data_dir: str | None = None,
) -> dict[str, Any]:
    """Refactors a checkpoint by its profile, or partitions one matrix of activations.

    A run that was killed goes on when it is called again: what is done stays in
    `<out_dir>.partition` until the result, with its report, is complete.

    Args:
      run: folder of the new checkpoint, in our format, with `report.json`; of a matrix
        see `run_matrix`.
      checkpoint: the model to refactor: folder, GGUF file or `default`.
      profile: folder of moe-edge profile_model, of the same checkpoint.
      activations: `.npy` file to partition instead of a model.
      settings: how experts are split and their blocks chosen.
      text: held-out file whose perplexity is measured; None: the packaged one.
      ppl_k: values of K, `all`, or an empty string for none.
      max_text_tokens: read of the text.
      train_text: lg_ft, calibrated_ft: files to fine-tune on, separated by commas.
      teacher_kl: of these: follow the model as it was, each step at a K drawn at random
        (ours), instead of the text alone at rising K.
      fine_tuning: of these: options of `FineTuning`.
      max_minutes: of these: stop training after so many minutes; the same call goes on.
      data_dir: where relative paths are looked up too.
    Returns:
      objective and objective_heldout (eq. 2 summed over all experts, on tokens that the
      partition was fitted on and others), seconds, ppl_by_k, identity_error; of a
      training that `max_minutes` stopped also finished (False) and work_dir.
    Raises:
      MoeEdgeError: bad input; OSError: a file that cannot be read.
    """
    given, started = dict(locals()), time.monotonic()
    check_mode(given | vars(settings))
    if activations is not None:
        activations = find_file(activations, data_dir, "--activations")
        run.check_apart(activations)
        names = [field.name for field in dataclasses.fields(PartitionOptions)]
        options = PartitionOptions(**{name: getattr(settings, name) for name in names})
        return run_matrix(run, activations, options)
    check_count("max_text_tokens", max_text_tokens)
    if max_minutes is not None:
        check_from_zero("max_minutes", max_minutes)
    reader = open_checkpoint(checkpoint)
    check_floats(reader, "refactoring")
    check_unpruned(reader, "refactoring")
    run.check_apart(reader.path, profile)
    child = settings.split(reader.config)
    ks = parse_ks(ppl_k, child.moe)
    ids, source = (
        read_ids(reader, text, data_dir, max_text_tokens) if ks else ([], None)
    )
    training = windows = None
    if settings.gate in FINE_TUNED:
        ours = {"teacher_kl": 1.0, "k_order": "drawn"} if teacher_kl else {}
        training = _training(fine_tuning, {"seed": settings.seed} | ours)
        training.check(child)
        named = filter(None, map(str.strip, train_text.split(",")))
        texts = [find_path(path, data_dir) for path in named]
        run.check_apart(*texts)
        windows = read_windows(reader, texts, training)
    opened = open_profile(profile)
    opened.check(reader.content_sha256())
    if settings.model_gate == "calibrated":
        opened.check_hidden()
    U = settings.sub_experts
    factor = down_factor(reader.config.moe, U, settings.model_gate)
    exact = is_exact(factor, U, reader.layout.has_bias)
    if not exact and reader.dtype.itemsize < 4:
        scaled = "down biases" if factor == 1 else "down weights"
        print(
            f"{U} sub-experts are no power of two: {scaled} are rounded to "
            f"{reader.dtype.name} once more, so all of them together are the parent "
            "only nearly (bfloat16: logits within 1e-2 standard deviations)",
            file=sys.stderr,
        )
    if run.dry_run:
        return {}
    # Only now: these load JAX, and a refused value should not wait for that.
    from moe_edge.convert.refactored_writer import write_refactored
    from moe_edge.papers.moe_prism.refactor.build import build_refactoring
    from moe_edge.papers.moe_prism.refactor.measure import measure_model

    # Next to the output, so that a run that was killed goes on with what is done.
    work_dir = run.path.with_name(f"{run.path.name}.partition")
    model, done = work_dir / "model", work_dir / REPORT_NAME
    with locked_folder(work_dir, str(run.path)):
        facts = {
            "parent": opened.content_sha256,
            "settings": dataclasses.asdict(settings),
            "training": training and [dataclasses.asdict(training), windows.sha256],
        }
        report = _finished_report(model, done, facts)
        if report is None:
            refactoring, partition = build_refactoring(
                reader, opened, settings, work_dir
            )
            report = partition.summary() | {
                "down_factor": factor,
                "down_factor_exact": exact,
                "gate": refactoring.manifest(),
            }
            untrained = work_dir / "untrained" if training else model
            write_refactored(reader, refactoring, untrained, overwrite=True)
            if training is not None:
                from moe_edge.papers.moe_prism.refactor.finetune.train import (
                    finetune_router,
                )

                report["fine_tuning"] = finetune_router(
                    open_checkpoint(untrained), training, windows, model, max_minutes
                )
                if not report["fine_tuning"]["finished"]:
                    shutil.rmtree(untrained)
                    print(
                        f"stopped; the same command goes on in {work_dir}",
                        file=sys.stderr,
                    )
                    paused = {"finished": False, "work_dir": str(work_dir)}
                    return summary_of(report, started) | paused | {"out_dir": None}
            write_text(done, json.dumps([facts, report], default=str))
        report["text"] = source
        report |= measure_model(checkpoint, model, ids, ks, settings.seed)
        summary = summary_of(report, started)
        try:
            write_json(model / REPORT_NAME, report | summary, default=str)
            run.move(model)
        except (OSError, OutputError) as error:
            raise OutputError(
                f"results cannot be written to {run.path}: {error}; the refactored "
                f"model is in {model}, and the same command goes on from there"
            ) from error
        shutil.rmtree(work_dir)
    print_report(report)
    return summary


def _training(options, defaults: dict[str, Any]) -> FineTuning:
    """Settings of the fine-tuning; refuses options that are none."""
    if not isinstance(options, Mapping | None):
        raise ConfigError(
            f"fine_tuning is {options!r}, expected options by name, such as "
            "{'tokens': 100000}"
        )
    options = dict(options or {})
    if twice := sorted(options.keys() & (defaults.keys() - {"seed"})):
        raise ConfigError(
            f"fine_tuning names {', '.join(twice)}, which --teacher_kl sets, too; "
            "leave one of them out"
        )
    given = defaults | options
    return build_known("settings", {"fine_tuning": FineTuning}, "fine_tuning", given)


def _finished_report(model: Path, done: Path, facts: dict) -> dict[str, Any] | None:
    """The report of a model that only lacks its measurement, if there is one."""
    if not (done.is_file() and (model / MANIFEST_NAME).is_file()):
        return None
    before, report = read_json(done, strict=False)
    return report if before == as_read_back(facts, default=str) else None


def check_mode(given: Mapping[str, Any]) -> None:
    """Checks that what was given is of one mode and one gate.

    Args:
      given: flag -> value; one that is its default cannot be told from one left out.
    Raises:
      ConfigError: a flag that would be ignored, or one that is missing.
    """
    defaults = inspect.signature(run_refactor).parameters
    changed = [
        name
        for name, value in given.items()
        if name in defaults and value != defaults[name].default
    ]
    gate = given["gate"]
    if given["activations"] is not None:
        extra = [name for name in changed if name not in MATRIX_FLAGS]
        if extra:
            raise ConfigError(
                f"--{extra[0]} means nothing with --activations, which partitions "
                "one matrix; leave one of them out"
            )
        return
    needed = ["checkpoint", "profile"] + ["train_text"] * (gate in FINE_TUNED)
    missing = [f"--{name}" for name in needed if not given[name]]
    if missing:
        raise ConfigError(
            f"no {', '.join(missing)}; a model with --gate {gate} needs "
            f"{', '.join('--' + name for name in needed)}, one matrix --activations"
        )
    for wanted, names in GATE_FLAGS.items():
        extra = [name for name in changed if name in names and gate not in wanted]
        if extra:
            gates = " or ".join(wanted)
            raise ConfigError(f"--{extra[0]} is for --gate {gates}, got --gate {gate}")


def summary_of(report: dict[str, Any], started: float) -> dict[str, Any]:
    """The last line of stdout; JSON has no infinity."""
    ppl = report.get("ppl_by_k", {})
    return {
        "objective": report["objective"],
        "objective_heldout": report["objective_heldout"],
        "seconds": round(time.monotonic() - started, 3),
        "ppl_by_k": {k: v if math.isfinite(v) else None for k, v in ppl.items()},
        "identity_error": report.get("identity_error"),
    }


def print_report(report: dict[str, Any]) -> None:
    """The report for people."""
    print("share of the neurons' activity that lies in inactive sub-experts, by how")
    print("experts are split (`partition` is what was written); lower is better")
    print(f"{'split':24}{'fitted':>9}{'held out':>10}")
    fitted, heldout = (report["shares"][part] for part in ("fitted", "heldout"))
    for name, share in fitted.items():
        held = f"{100 * heldout[name]:8.2f} %" if name in heldout else f"{'-':>10}"
        print(f"{name:24}{100 * share:7.2f} %{held}")
    few = sum(n for rule, n in report["rules"].items() if rule != "solved")
    print(f"experts with too few tokens to fit a split to: {few}")
    error = report["identity_error"]
    print(f"all sub-experts on: logits differ from the parent's by {error:.2g} std")
    parents = report["parent_ppl_by_k"]
    for k, value in report["ppl_by_k"].items():
        parent = f"   parent {parents[k]:.3f}" if k in parents else ""
        print(f"K {k:3}   perplexity {value:.3f}{parent}")
