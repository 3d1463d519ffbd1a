"""The root of launch/model_card.py: a training run becomes a folder to ship.

Exports the newest checkpoint as a Hugging Face folder, measures the exported weights
on held-out text, and writes the model card with its pictures next to them.
"""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from moe_edge.core.checks import ConfigError, check_count
from moe_edge.core.files import check_out_dir
from moe_edge.core.heap import keep_heap
from moe_edge.evaluate.routing_stats import usage_entropy
from moe_edge.evaluate.specialisation import usage_distances
from moe_edge.training import plots
from moe_edge.training.card_text import CARD_SETTINGS, CardFacts, card_text
from moe_edge.training.evaluation import assess, text_counts
from moe_edge.training.export import export_hf, read_newest
from moe_edge.training.resume import CORPUS_FILE, SETTINGS_FILE, saved_config
from moe_edge.training.run import TOKENIZER_FILE, read_corpus

NOTES_FILE = "notes.md"  # optional list items for the card


def read_metrics(path: Path) -> list[dict]:
    """Rows of metrics.jsonl by tokens, with the mean held-out loss added.

    Steps that a resumed run repeated count once, as they were the last time.
    """
    if not path.is_file():
        raise ConfigError(f"{path} is missing; expected the folder of a training run")
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    last = {(row["tokens"], "held_out" in row): row for row in rows}
    rows = sorted(last.values(), key=lambda row: row["tokens"])
    for row in rows:
        if "held_out" in row:
            row["held_out_loss"] = float(np.mean(list(row["held_out"].values())))
    return rows


def check_run(run: Path) -> list[dict]:
    """The metrics of a training run that has everything the card is made from.

    Raises:
      ConfigError: names the first file that is missing, or the checkpoint.
    """
    metrics = read_metrics(run / "metrics.jsonl")
    for name in (CORPUS_FILE, SETTINGS_FILE, TOKENIZER_FILE):
        if not (run / name).is_file():
            raise ConfigError(f"{run / name} is missing; is the run complete?")
    settings = json.loads((run / SETTINGS_FILE).read_text("utf-8"))
    if missing := sorted(CARD_SETTINGS - set(settings)):
        raise ConfigError(
            f"{run / SETTINGS_FILE} lacks {missing}, which the card reports; an older "
            "launch/pretrain.py wrote it: make the card with the commit that trained it"
        )
    if saved_config(run) is None:
        raise ConfigError(f"no training checkpoint in {run}; the run saved none yet")
    return metrics


def run_model_card(
    run_dir: str,
    out_dir: str,
    *,
    eval_rows: int = 16,
    overwrite: bool = False,
    dry_run: bool = False,
    config_text: Callable[[], str] | None = None,
) -> dict:
    """Writes `out_dir`: weights, tokenizer, README.md, loss.png, routing_entropy.png.

    Args:
      run_dir: folder of a training run (`--out_dir` of launch/pretrain.py).
      out_dir: the Hugging Face folder to write.
      eval_rows: held-out sequences of 512 tokens measured per domain.
      overwrite: replace a non-empty `out_dir`.
      dry_run: check `run_dir` and `out_dir`, write nothing.
      config_text: gives the settings to store as config.gin.
    Returns:
      Summary with tokens, perplexity by domain, the ratio of expert-usage distances
      (between tasks to same task) and the mean loss with half the experts.
    Raises:
      ConfigError: `run_dir` is not a run. OutputError: `out_dir` cannot be written.
    """
    check_out_dir(out_dir, overwrite)
    check_count("eval_rows", eval_rows)
    run = Path(run_dir)
    metrics = check_run(run)
    if dry_run:
        return {"dry_run": True, "out_dir": out_dir}
    keep_heap()
    params, progress, config = read_newest(run)
    corpus = read_corpus(run / CORPUS_FILE)
    notes = run / NOTES_FILE
    full, half = assess(params, config, corpus, rows=eval_rows)
    between_L, control_L = usage_distances(text_counts(full))
    counts_NLE = text_counts(full).sum(axis=1)
    tasks = list(full.loss)
    facts = CardFacts(
        config=config,
        progress=progress,
        settings=json.loads((run / SETTINGS_FILE).read_text("utf-8")),
        parameters=sum(int(array.size) for array in params.values()),
        shares=corpus.shares,
        loss=full.loss,
        loss_half=half.loss,
        entropy_NL=usage_entropy(counts_NLE),
        between_L=between_L,
        control_L=control_L,
        held_out_tokens=eval_rows * 512,
        notes=notes.read_text("utf-8") if notes.is_file() else "",
    )
    files: dict[str, str | bytes] = {"README.md": card_text(facts)}
    with tempfile.TemporaryDirectory() as temporary:
        loss, entropy = (Path(temporary) / n for n in ("loss.png", "entropy.png"))
        plots.loss_curve(loss, metrics, title="Training of the default model")
        plots.routing_entropy(
            entropy, facts.entropy_NL, tasks, num_experts=config.moe.num_experts
        )
        files["loss.png"] = loss.read_bytes()
        files["routing_entropy.png"] = entropy.read_bytes()
    if config_text is not None:
        files["config.gin"] = config_text()
    tokenizer = Tokenizer.from_file(str(run / TOKENIZER_FILE))
    export_hf(
        params,
        config,
        tokenizer,
        Path(out_dir),
        extra_files=files,
        overwrite=overwrite,
    )
    return {
        "tokens": progress.tokens,
        "perplexity": {task: float(np.exp(nats)) for task, nats in full.loss.items()},
        "usage_ratio": facts.usage_ratio,
        "lost_with_half": facts.lost_with_half,
        "out_dir": out_dir,
    }
