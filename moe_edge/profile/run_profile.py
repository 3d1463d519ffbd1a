"""The root of `moe-edge profile_model`: what happens inside the experts of a model."""

import json
from typing import Any

import numpy as np

from moe_edge.convert.open import check_floats, open_checkpoint
from moe_edge.convert.tokenizer import load_tokenizer
from moe_edge.core.checks import (
    CapacityError,
    ConfigError,
    check_count,
    check_from_zero,
)
from moe_edge.core.heap import keep_heap
from moe_edge.core.run_folder import CONFIG_NAME, RunFolder, root
from moe_edge.profile.calibration import parse_files, read_calibration
from moe_edge.profile.reader import FORMAT_VERSION
from moe_edge.profile.space import check_space, needed_bytes
from moe_edge.profile.writer import (
    COUNTS_NAME,
    PROFILE_NAME,
    open_writer,
    work_folder,
)

# float16 rows of one expert may reach this; more is refused before the run.
MAX_ROWS = 1 << 20
LEAST_TOKENS = 64  # of a text that probes are fitted on


@root
def run_profile(
    run: RunFolder,
    *,
    text: str,
    checkpoint: str = "default",
    window: int | None = None,
    tokens: int | None = 131_072,
    max_tokens_per_expert: int = 2048,
    batch_size: int = 4,
    hidden: bool = False,
    probes: int = 0,
    probe_neurons: int = 256,
    seed: int = 0,
    resume: bool = True,
    data_dir: str | None = None,
) -> dict[str, Any]:
    """Runs calibration text through a model and writes its profile.

    Args:
      run: folder of the profile.
      text: files separated by commas, each `path` or `domain:path`.
      checkpoint: folder (Hugging Face's or ours), GGUF file, or `default`, the model in
        the package.
      window: tokens read together (default: 512 or the context if that is less).
      tokens: at most so many of all domains together, in equal shares; None: all.
      max_tokens_per_expert: rows of activations kept of each expert.
      batch_size: windows run together; changes nothing but rounding. Beyond about 2048
        tokens it gains nothing, and freed buffers go back to the kernel.
      hidden: keep the experts' inputs of these rows, too: `--gate calibrated` of
        moe-edge refactor is fitted on them.
      probes: fit what names the experts of so many layers ahead, for predictor
        `probe`.
      probe_neurons: of each probe; more of them name experts better and take a layer
        more time.
      seed: of the choice of rows.
      resume: go on with a killed run, which must have had the same settings (but for
        batch_size); False: discard it.
      data_dir: where relative paths are looked up too.
    Returns:
      tokens.
    Raises:
      MoeEdgeError: bad input.
      OSError: a file that cannot be read.
    """
    check_count("max_tokens_per_expert", max_tokens_per_expert)
    check_count("batch_size", batch_size)
    check_from_zero("probes", probes)
    check_count("probe_neurons", probe_neurons)
    if max_tokens_per_expert > MAX_ROWS:
        raise ConfigError(
            f"max_tokens_per_expert {max_tokens_per_expert} exceeds {MAX_ROWS}; keep "
            "fewer rows"
        )
    if tokens is not None:
        check_count("tokens", tokens)
    files = parse_files(text, data_dir)
    # Only now: it loads JAX, and a refused value should not wait for that.
    from moe_edge.profile.record_layers import record_layers

    reader = open_checkpoint(checkpoint)
    check_floats(reader, "profiling")
    window = _check_window(window, reader.config.max_positions)
    calibration = read_calibration(files, load_tokenizer(reader), window, tokens)
    if probes and calibration.num_tokens < LEAST_TOKENS:
        raise ConfigError(
            f"probes are fitted on {LEAST_TOKENS} tokens or more, the text has "
            f"{calibration.num_tokens}; give more text, or --probes 0"
        )
    need = needed_bytes(
        reader.config,
        *calibration.tokens_NW.shape,
        max_tokens_per_expert,
        hidden,
        probes,
        probe_neurons,
    )
    check_space(work_folder(run.path), *need)
    if run.dry_run:
        domains = list(calibration.domains)
        return {"tokens": calibration.num_tokens, "domains": domains}
    keep_heap()
    facts = {
        "format_version": FORMAT_VERSION,
        "content_sha256": reader.content_sha256(),
        "checkpoint": str(checkpoint),
        "tokens": calibration.num_tokens,
        "window": window,
        "max_tokens_per_expert": max_tokens_per_expert,
        "hidden": hidden,
        "probes": probes,
        "seeds": [seed],
        "domains": list(calibration.domains),
        "files": list(calibration.files),
    }
    if probes:
        facts["probe_neurons"] = probe_neurons
    with open_writer(run.path, facts, overwrite=run.overwrite, resume=resume) as writer:
        record_layers(reader, calibration, writer, facts, batch_size)
        reports = [report for report in writer.reports.values() if report]
        rows = sorted(
            (row for report in reports for row in report["counts"]),
            key=lambda row: (calibration.domains.index(row["domain"]), row["layer"]),
        )
        info = facts | _model_facts(reader.config, reports)
        written = {
            PROFILE_NAME: json.dumps(info, indent=1) + "\n",
            COUNTS_NAME: "".join(json.dumps(row) + "\n" for row in rows),
            CONFIG_NAME: run.config_text(),
        }
        writer.finish(written, run.overwrite)
    return {"tokens": calibration.num_tokens}


def _check_window(window: int | None, max_positions: int) -> int:
    from moe_edge.evaluate.perplexity import default_window

    window = default_window(max_positions) if window is None else window
    check_count("window", window)
    if window > max_positions:
        raise CapacityError(
            f"window of {window} tokens exceeds the model's context of {max_positions}"
        )
    return window


def _model_facts(config, reports: list[dict]) -> dict:
    """Sizes of the model, and how many tokens its experts got."""
    moe = config.moe
    counts_LE = np.zeros((len(config.moe_layers), moe.num_experts), np.int64)
    for report in reports:
        for row in report["counts"]:
            counts_LE[config.moe_layers.index(row["layer"])] += row["counts"]
    return {
        "L": config.num_layers,
        "layers": list(config.moe_layers),
        "E": moe.num_experts,
        "F": moe.expert_dim,
        "D": config.d_model,
        "top_k": moe.top_k,
        "activation": moe.activation,
        "probe_recall": [one for report in reports for one in report["probes"]],
        # Of the kept activations, those beyond float16's largest number.
        "clipped_activations": sum(report["clipped"] for report in reports),
        "tokens_per_expert": {
            "min": int(counts_LE.min()),
            "mean": float(counts_LE.mean()),
            "max": int(counts_LE.max()),
            "without_tokens": int((counts_LE == 0).sum()),
            # Fewer rows than neurons: a partition of them is hardly determined.
            "fewer_than_neurons": int((counts_LE < moe.expert_dim).sum()),
        },
    }
