"""The root of launch/pretrain.py: text in, a trained model in `out_dir` out."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from moe_edge.core.checks import ConfigError
from moe_edge.core.files import write_text
from moe_edge.core.heap import keep_heap
from moe_edge.core.progress import counter
from moe_edge.core.run_folder import unpacked
from moe_edge.model.config import ModelConfig
from moe_edge.training import data
from moe_edge.training.control import say
from moe_edge.training.default_config import default_config
from moe_edge.training.loop import RunOptions, train
from moe_edge.training.resume import (
    CORPUS_FILE,
    FACTS_FILE,
    SETTINGS_FILE,
    check_resume,
    corpus_facts,
)
from moe_edge.training.schedule import Schedule
from moe_edge.training.start import Start
from moe_edge.training.step import Hyper

TOKENIZER_FILE = "tokenizer.json"


@unpacked(
    config=default_config,
    schedule=Schedule,
    hyper=Hyper,
    start=Start,
    options=RunOptions,
)
def run_pretrain(
    out_dir: str,
    *,
    config: ModelConfig,
    schedule: Schedule,
    hyper: Hyper,
    start: Start,
    options: RunOptions,
    data_dir: str = "../shared/data",
    task_characters: int = 3_000_000,
    dry_run: bool = False,
    config_text: Callable[[], str] | None = None,
) -> dict:
    """Trains, or goes on training, the model in `out_dir`.

    A second call with the same `out_dir` resumes from its newest checkpoint. The end
    (`train_tokens`, `decay_tokens`, `max_minutes`, `decay_minutes`) and the batches may
    be changed then, the model, loss and optimiser not; a decay starts as soon as either
    end is that near.

    Args:
      out_dir: receives tokenizer.json, corpus.npz, checkpoints/, metrics.jsonl.
      data_dir: the data folder; where it is missing, code and tasks alone train.
      dry_run: check settings, data and `out_dir`, write nothing.
      config_text: gives the settings to store as config.gin.
    Returns:
      Summary with step, tokens, seconds and out_dir.
    Raises:
      ConfigError: settings that do not fit each other, the checkpoint or the corpus.
    """
    if config.moe.norm_topk and config.moe.top_k == 1:
        raise ConfigError(
            "norm_topk with top_k 1 makes every weight 1, so the router would learn "
            "nothing; add --nonorm_topk or choose more experts"
        )
    folder, texts = Path(out_dir), Path(data_dir)
    facts = corpus_facts(texts, config.vocab_size, task_characters, options.seed)
    training = dataclasses.asdict(hyper) | dataclasses.asdict(start)
    check_resume(folder, config, facts, training)
    if not (folder / CORPUS_FILE).is_file():
        data.check_data_dir(texts)
    if dry_run:
        return {"dry_run": True, "out_dir": out_dir}
    keep_heap()
    folder.mkdir(parents=True, exist_ok=True)
    settings = dataclasses.asdict(schedule) | dataclasses.asdict(options) | training
    settings["peak"] = settings.pop("learning_rate")
    write_text(folder / SETTINGS_FILE, json.dumps(settings, indent=1) + "\n")
    if config_text is not None:
        write_text(folder / "config.gin", config_text())
    with counter("preparing the corpus"):
        corpus = load_corpus(folder, texts, facts)
    progress = train(config, corpus, folder, schedule, hyper, start, options)
    return {
        "step": progress.step,
        "tokens": progress.tokens,
        "seconds": progress.seconds,
        "finished": progress.tokens >= schedule.train_tokens,
        "out_dir": out_dir,
    }


def load_corpus(folder: Path, data_dir: Path, facts: dict[str, Any]) -> data.Corpus:
    """The encoded corpus of a run; built and stored in `folder` the first time.

    A stored one is used as it is: `resume.check_corpus` says whether it fits `facts`.
    """
    stored = folder / CORPUS_FILE
    if stored.is_file():
        return read_corpus(stored)
    vocab_size = facts["vocab_size"]
    texts, shares = data.load_texts(data_dir, facts["task_characters"], facts["seed"])
    tokenizer_path = folder / TOKENIZER_FILE
    if tokenizer_path.is_file():
        tokenizer = Tokenizer.from_file(str(tokenizer_path))
    else:
        tokenizer = data.fit_tokenizer(texts, vocab_size)
        write_text(tokenizer_path, tokenizer.to_str())
    if tokenizer.get_vocab_size() > vocab_size:
        raise ConfigError(
            f"{tokenizer_path} has {tokenizer.get_vocab_size()} tokens, expected at "
            f"most vocab_size {vocab_size}"
        )
    corpus = data.build_corpus(tokenizer, texts, shares)
    arrays = {
        f"{part}/{domain}": stream.astype(np.uint16)
        for part in ("train", "held_out")
        for domain, stream in getattr(corpus, part).items()
    }
    arrays["shares"] = np.array([corpus.shares[d] for d in corpus.domains])
    # First, so that a corpus without its facts is never seen.
    write_text(folder / FACTS_FILE, json.dumps(facts, indent=1) + "\n")
    partial = folder / f".partial.{CORPUS_FILE}"
    np.savez(partial, **arrays)
    partial.rename(stored)
    for domain in corpus.domains:
        say(
            f"domain {domain}: {corpus.train[domain].size} training tokens, "
            f"share {corpus.shares[domain]:.3f}"
        )
    return corpus


def read_corpus(path: Path) -> data.Corpus:
    """A corpus that `load_corpus` stored."""
    with np.load(path, allow_pickle=False) as arrays:
        streams = {name: arrays[name] for name in arrays.files}
    shares = streams.pop("shares")
    parts: dict[str, dict[str, np.ndarray]] = {"train": {}, "held_out": {}}
    for name, stream in streams.items():
        part, domain = name.split("/")
        parts[part][domain] = stream.astype(np.int32)
    domains = list(parts["train"])
    return data.Corpus(
        parts["train"],
        parts["held_out"],
        dict(zip(domains, map(float, shares), strict=True)),
    )
