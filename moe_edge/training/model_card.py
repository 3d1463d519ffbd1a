"""The root of `moe-edge model_card`: a training run becomes a folder to ship.

Exports the newest checkpoint as a Hugging Face folder, measures the exported weights
on held-out text, and writes the model card and its pictures to the same folder.
"""

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from moe_edge.core.checks import ConfigError, check_count
from moe_edge.core.heap import keep_heap
from moe_edge.core.json_reader import json_objects, read_json
from moe_edge.core.run_folder import CONFIG_NAME, RunFolder, root
from moe_edge.evaluate.usage import usage_distances, usage_entropy
from moe_edge.model.config import ModelConfig
from moe_edge.training.generators import FAMILIES
from moe_edge.training.resume import CORPUS_FILE, SETTINGS_FILE, saved_config
from moe_edge.training.run import TOKENIZER_FILE, read_corpus
from moe_edge.training.text import HELD_OUT, SOURCES

NOTES_FILE = "notes.md"  # optional list items for the card
# What the card says of how the model was trained, by their names in settings.json.
CARD_SETTINGS = frozenset(
    ("length", "long_length", "peak", "balance")
    + ("expert_rate_factor", "embedding_std", "expert_scale")
)


def read_metrics(path: Path) -> list[dict]:
    """Rows of metrics.jsonl by tokens, with the mean held-out loss added.

    Steps that a resumed run repeated count once, as they were the last time.
    """
    if not path.is_file():
        raise ConfigError(f"{path} is missing; expected the folder of a training run")
    rows = [row for _, row in json_objects(path, strict=False)]
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
    settings = read_json(run / SETTINGS_FILE, strict=False)
    if missing := sorted(CARD_SETTINGS - set(settings)):
        raise ConfigError(
            f"{run / SETTINGS_FILE} lacks {missing}, which the card reports; an older "
            "moe-edge pretrain wrote it: make the card with the commit that trained it"
        )
    if saved_config(run) is None:
        raise ConfigError(f"no training checkpoint in {run}; the run saved none yet")
    return metrics


@root
def run_model_card(run: RunFolder, *, run_dir: str, eval_rows: int = 16) -> dict:
    """Writes weights, tokenizer, README.md, loss.png, routing_entropy.png.

    Args:
      run: the Hugging Face folder to write.
      run_dir: folder of a training run (`--out_dir` of moe-edge pretrain).
      eval_rows: held-out sequences of 512 tokens measured per domain.
    Returns:
      Summary with tokens, perplexity by domain, the ratio of expert-usage distances
      (between tasks to same task) and the mean loss with half the experts.
    Raises:
      ConfigError: `run_dir` is not a run. OutputError: the folder cannot be written.
    """
    check_count("eval_rows", eval_rows)
    source = Path(run_dir)
    metrics = check_run(source)
    if run.dry_run:
        return {}
    # Only now: these load JAX, and a refused value should not wait for that.
    from moe_edge.training import plots
    from moe_edge.training.evaluation import assess, text_counts
    from moe_edge.training.export import export_hf, read_newest

    keep_heap()
    params, progress, config = read_newest(source)
    corpus = read_corpus(source / CORPUS_FILE)
    notes = source / NOTES_FILE
    full, half = assess(params, config, corpus, rows=eval_rows)
    between_L, control_L = usage_distances(text_counts(full))
    counts_NLE = text_counts(full).sum(axis=1)
    tasks = list(full.loss)
    facts = CardFacts(
        config=config,
        progress=progress,
        settings=read_json(source / SETTINGS_FILE, strict=False),
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
    if text := run.config_text():
        files[CONFIG_NAME] = text
    tokenizer = Tokenizer.from_file(str(source / TOKENIZER_FILE))
    export_hf(
        params,
        config,
        tokenizer,
        run.path,
        extra_files=files,
        overwrite=run.overwrite,
    )
    return {
        "tokens": progress.tokens,
        "perplexity": {task: float(np.exp(nats)) for task, nats in full.loss.items()},
        "usage_ratio": facts.usage_ratio,
        "lost_with_half": facts.lost_with_half,
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class CardFacts:
    """What the card reports.

    Attributes:
      shares, loss, loss_half: by domain; losses in nats per token, `loss_half` with
        half the chosen experts.
      entropy_NL: bits, domains in the order of `loss`.
      between_L, control_L: total variation distances of expert usage by layer.
      held_out_tokens: scored per domain.
      notes: what else happened in the run, written by whoever ran it.
    """

    config: ModelConfig
    progress: Any  # of checkpoints.Progress
    settings: dict[str, Any]
    parameters: int
    shares: dict[str, float]
    loss: dict[str, float]
    loss_half: dict[str, float]
    entropy_NL: np.ndarray
    between_L: np.ndarray
    control_L: np.ndarray
    held_out_tokens: int
    notes: str = ""

    @property
    def usage_ratio(self) -> float:
        return float(self.between_L.mean() / self.control_L.mean())

    @property
    def lost_with_half(self) -> float:
        """Perplexity lost with half the experts, from the mean loss over domains."""
        difference = [self.loss_half[d] - self.loss[d] for d in self.loss]
        return float(np.expm1(np.mean(difference)))


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _data_table(facts: CardFacts) -> str:
    rows = [
        [s.domain, f"{facts.shares[s.domain]:.0%}", s.origin, s.licence]
        for s in SOURCES
        if s.domain in facts.shares
    ]
    rows += [
        [name, f"{facts.shares[name]:.0%}", "written by training/generators.py", "ours"]
        for name in FAMILIES
        if name in facts.shares
    ]
    return _table(["domain", "share of tokens", "source", "licence"], rows)


def _loss_table(facts: CardFacts) -> str:
    rows = [
        [
            domain,
            f"{np.exp(loss):.2f}",
            f"{np.expm1(facts.loss_half[domain] - loss):+.1%}",
            *(f"{bits:.2f}" for bits in facts.entropy_NL[i]),
        ]
        for i, (domain, loss) in enumerate(facts.loss.items())
    ]
    layers = [f"H{layer}" for layer in facts.config.moe_layers]
    return _table(["domain", "perplexity", "half the experts", *layers], rows)


def card_text(facts: CardFacts) -> str:
    """README.md of the model folder."""
    config, settings = facts.config, facts.settings
    moe, attention = config.moe, config.attention
    uniform = np.log2(moe.num_experts)
    weights = " (their weights add up to 1)" if moe.norm_topk else ""
    layers = _table(
        ["layer", *(str(layer) for layer in config.moe_layers)],
        [
            ["between domains", *(f"{v:.3f}" for v in facts.between_L)],
            ["same domain", *(f"{v:.3f}" for v in facts.control_L)],
        ],
    )
    return f"""---
license: apache-2.0
language: en
library_name: transformers
---
# moe_edge default model

A small Qwen2-MoE language model, trained from nothing by `launch/pretrain.py` of
this project. It exists so that every part of moe_edge can be run and measured on a real
mixture of experts. It is far too small and too little trained to be relied on for
facts or advice.

- {facts.parameters / 1e6:.1f} M parameters, bfloat16: {config.num_layers} layers, width
  {config.d_model}, {attention.num_heads} heads ({attention.num_kv_heads} for keys and
  values), {moe.num_experts} experts of width {moe.expert_dim} a layer, {moe.top_k} a
  token{weights}, one shared expert of width {moe.shared_dim}.
- Byte-level BPE of {config.vocab_size} tokens, digits apart. `<|endoftext|>` separates
  documents and ends generation; there is no BOS. Context {config.max_positions};
  trained on sequences of {settings["length"]}, then (decay) {settings["long_length"]}.
- Trained on {facts.progress.tokens / 1e6:.2f} M tokens: {facts.progress.step} steps of
  {facts.progress.tokens // facts.progress.step} tokens on average,
  {facts.progress.seconds / 60:.0f} minutes of two shared CPU cores. AdamW; learning
  rate {settings["peak"]:g} after warm-up, a plateau, a linear decay; load-balancing
  weight {settings["balance"]:g}; experts learn at
  {settings["expert_rate_factor"]:g} times that rate. Start: embeddings of standard
  deviation {settings["embedding_std"]:g}, experts {settings["expert_scale"]:g} times
  the usual.
{facts.notes}
![training and held-out loss](loss.png)

## Data

{_data_table(facts)}

The last {HELD_OUT:.0%} of every source, and other seeds of the generators, are held
out. wikitext-2's tokenisation is undone and its sentences with `<unk>` are dropped; its
valid and test files were not read. No benchmark rows (BIG-bench or others) and no
non-commercial sets were used. Wikipedia text is CC BY-SA 3.0, by its authors.

## Held-out perplexity and routing

Of these weights (bfloat16), {facts.held_out_tokens} held-out tokens a domain in
sequences of 512. "Half the experts": change of perplexity with {moe.top_k // 2} of
{moe.top_k} experts a token. H0, H1, ..: entropy of expert usage by layer in bits
(uniform: {uniform:.2f}).

{_loss_table(facts)}

With half the experts perplexity rises by {facts.lost_with_half:.1%} (domain mean).

![routing entropy](routing_entropy.png)

Total variation distance of expert usage, between domains and, as a control, between two
halves of the same domain's held-out text; their ratio is {facts.usage_ratio:.1f}:

{layers}

## Limits

English and Python only; facts, numbers and code it writes are unreliable. The
generated tasks are narrow, so low perplexity on them means little elsewhere.

Licence of the weights: Apache-2.0, as the project; the texts' licences are above.
"""
