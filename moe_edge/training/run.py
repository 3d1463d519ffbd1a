"""The root of `moe-edge pretrain`: text in, a trained model in `out_dir` out."""

import dataclasses
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from moe_edge.core.checks import ConfigError, check_positive
from moe_edge.core.files import check_work_folder, locked_folder, write_text
from moe_edge.core.heap import keep_heap
from moe_edge.core.progress import counter, say
from moe_edge.training import data
from moe_edge.training.default_config import default_config
from moe_edge.training.options import Hyper, RunOptions, Start
from moe_edge.training.resume import (
    CORPUS_FILE,
    FACTS_FILE,
    SETTINGS_FILE,
    check_resume,
    corpus_facts,
)
from moe_edge.training.schedule import Schedule

TOKENIZER_FILE = "tokenizer.json"
MOST_TOKENS = 1 << 16  # of the tokenizer: the corpus keeps them in 16 bits
EVAL_ROWS = 16  # held-out sequences of a domain


def run_pretrain(
    out_dir: str,
    *,
    data_dir: str = "../shared/data",
    train_tokens: int = 25_000_000,
    decay_tokens: int = 5_000_000,
    decay_minutes: float = 25.0,
    warmup_tokens: int = 300_000,
    max_minutes: float | None = None,
    learning_rate: float = 2e-3,
    balance: float = 0.01,
    expert_rate_factor: float = 3.0,
    embedding_std: float = 1.0,
    expert_scale: float = 1.5,
    batch_tokens: int = 1024,
    checkpoint_minutes: float = 5.0,
    evaluate_minutes: float = 10.0,
    task_characters: int = 3_000_000,
    vocab_size: int = 4096,
    d_model: int = 192,
    num_layers: int = 6,
    num_experts: int = 64,
    top_k: int = 8,
    expert_dim: int = 64,
    shared_dim: int = 32,
    norm_topk: bool = False,
    pause_file: str | None = None,
    seed: int = 0,
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
      train_tokens: where the run ends.
      decay_tokens: last tokens, with a falling rate.
      decay_minutes: the same before `max_minutes`.
      warmup_tokens: first tokens, with a rising rate.
      max_minutes: save and stop after so long.
      learning_rate: peak learning rate.
      balance: weight of the load-balancing loss.
      expert_rate_factor: on the experts' learning rate.
      embedding_std: of fresh embeddings.
      expert_scale: factor on fresh experts.
      batch_tokens: tokens of a step.
      checkpoint_minutes, evaluate_minutes: between checkpoints, between evaluations.
      task_characters: written by each task generator.
      vocab_size: of the tokenizer.
      d_model: model width, a multiple of 32.
      num_layers: layers.
      num_experts: experts of a layer.
      top_k: experts of a token.
      expert_dim, shared_dim: neurons of an expert, of the shared expert.
      norm_topk: weights of the chosen add up to 1.
      pause_file: while this file exists the loop sleeps between steps.
      seed: of weights, data and tasks.
      dry_run: check settings, data and `out_dir`, write nothing.
      config_text: gives the settings to store as config.gin.
    Returns:
      Summary with step, tokens, seconds and out_dir.
    Raises:
      ConfigError: settings that do not fit each other, the checkpoint or the corpus.
    """
    check_positive("learning_rate", learning_rate)
    if vocab_size > MOST_TOKENS:
        raise ConfigError(
            f"vocab_size is {vocab_size}, expected at most {MOST_TOKENS}: the corpus "
            "keeps each token in 16 bits"
        )
    if norm_topk and top_k == 1:
        raise ConfigError(
            "norm_topk with top_k 1 makes every weight 1, so the router would learn "
            "nothing; leave --norm_topk out or choose more experts"
        )
    config = default_config(
        vocab_size,
        d_model=d_model,
        num_layers=num_layers,
        num_experts=num_experts,
        top_k=top_k,
        expert_dim=expert_dim,
        shared_dim=shared_dim,
        norm_topk=norm_topk,
    )
    schedule = Schedule(
        peak=learning_rate,
        warmup_tokens=warmup_tokens,
        train_tokens=train_tokens,
        decay_tokens=decay_tokens,
        decay_minutes=decay_minutes,
    )
    hyper = Hyper(balance=balance, expert_rate_factor=expert_rate_factor)
    options = RunOptions(
        batch_tokens=batch_tokens,
        max_minutes=max_minutes,
        checkpoint_minutes=checkpoint_minutes,
        evaluate_minutes=evaluate_minutes,
        pause_file=Path(pause_file) if pause_file else None,
    )
    folder, texts = Path(out_dir), Path(data_dir)
    facts = corpus_facts(texts, vocab_size, task_characters, seed)
    start = Start(embedding_std=embedding_std, expert_scale=expert_scale)
    training = dataclasses.asdict(hyper) | dataclasses.asdict(start)
    check_resume(folder, config, facts, training)
    if not (folder / CORPUS_FILE).is_file():
        data.check_data_dir(texts)
    if dry_run:
        check_work_folder(out_dir)
        return {"dry_run": True, "out_dir": out_dir}
    keep_heap()
    with locked_folder(folder, out_dir):
        settings = dataclasses.asdict(schedule) | dataclasses.asdict(options)
        settings |= training | {"pause_file": pause_file, "seed": seed}
        write_text(folder / SETTINGS_FILE, json.dumps(settings, indent=1) + "\n")
        if config_text is not None:
            write_text(folder / "config.gin", config_text())
        with counter("preparing the corpus"):
            corpus = load_corpus(folder, texts, vocab_size, task_characters, seed)
        # Here: they load JAX.
        from moe_edge.training.evaluation import held_out_losses
        from moe_edge.training.loop import train
        from moe_edge.training.start import init_params

        progress = train(
            config,
            data.ChunkOrder(corpus, seed),
            folder,
            schedule=schedule,
            hyper=hyper,
            options=options,
            start=functools.partial(init_params, config, seed, start),
            evaluate=held_out_losses(config, corpus, EVAL_ROWS),
        )
    return {
        "step": progress.step,
        "tokens": progress.tokens,
        "seconds": progress.seconds,
        "finished": progress.tokens >= train_tokens,
        "out_dir": out_dir,
    }


def load_corpus(
    folder: Path, data_dir: Path, vocab_size: int, task_characters: int, seed: int
) -> data.Corpus:
    """The encoded corpus of a run; built and stored in `folder` the first time.

    A stored one is used as it is: `resume.check_corpus` says whether it fits.
    """
    stored = folder / CORPUS_FILE
    if stored.is_file():
        return read_corpus(stored)
    texts, shares = data.load_texts(data_dir, task_characters, seed)
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
    arrays = {f"train/{d}": s.astype(np.uint16) for d, s in corpus.train.items()}
    arrays |= {f"held_out/{d}": s.astype(np.uint16) for d, s in corpus.held_out.items()}
    arrays["shares"] = np.array([corpus.shares[d] for d in corpus.domains])
    # First, so that a corpus without its facts is never seen.
    facts = corpus_facts(data_dir, vocab_size, task_characters, seed)
    write_text(folder / FACTS_FILE, json.dumps(facts, indent=1) + "\n")
    partial = folder / f".partial.{CORPUS_FILE}"
    np.savez(partial, **arrays)
    partial.rename(stored)
    for domain in corpus.domains:
        say(
            f"domain {domain}: {corpus.train[domain].size} training tokens, "
            f"share {corpus.shares[domain]:.3f}"
        )
    sys.stderr.flush()
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
