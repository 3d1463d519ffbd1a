"""The quickstart: the default model writes, is measured, and runs offloaded."""

import dataclasses
import functools
import hashlib
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from moe_edge.engine.generate import generate_rows
from moe_edge.engine.load import Loaded, check_checkpoint, load_engine
from moe_edge.engine.prompts import TextStream, encode_prompts
from moe_edge.evaluate.specialisation import DomainScore, DomainScorer
from moe_edge.evaluate.usage import usage_distances
from moe_edge.metrics.plots import expert_usage
from moe_edge.metrics.results import metric
from moe_edge.model.sampling import Sampling
from moe_edge.studies.engines import describe_model
from moe_edge.studies.quickstart.offloaded import show_offloaded
from moe_edge.studies.quickstart.texts import (
    held_out_texts,
    story_prompt,
    task_prompts,
)
from moe_edge.studies.settings import StudySettings
from moe_edge.studies.study import Findings, Study

LIMITS = (
    "A model of a few million parameters trained on two CPU cores: its text shows "
    "that the machinery works, not what large models can do.",
    "Held-out texts of a few thousand tokens; the task families come from the same "
    "generator as the training data, with other seeds.",
    "Speed of one run on a machine that may be busy; launch/benchmark.py compares.",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuickstartSettings(StudySettings):
    """What is shown, and on how much text it is measured.

    Attributes:
      checkpoint: path or `default`.
      max_new_tokens: length of the story.
      characters: of each of the two held-out texts of a domain.
      seed: of the texts and of sampling.
    """

    checkpoint: str = "default"
    max_new_tokens: int = 64
    characters: int = 6000
    seed: int = 0


def show_generation(loaded: Loaded, max_new_tokens: int, seed: int) -> dict[str, float]:
    """Streams a story, answers a question of each family; returns the speed."""
    engine, tokenizer = loaded.engine, loaded.tokenizer
    limit = engine.config.max_positions
    story = story_prompt()
    rows = encode_prompts(tokenizer, [story], max_new_tokens, limit)
    stream = TextStream(tokenizer, rows[0])
    pieces: list[str] = []

    def on_token(row: int, token: int) -> None:
        if not pieces:
            print(story.text, end="")
        pieces.append(stream.push(token))
        print(pieces[-1], end="", flush=True)

    sampling = Sampling(temperature=0.7, top_p=0.9, seed=seed)
    _, speed = generate_rows(engine, rows, max_new_tokens, sampling, on_token=on_token)
    print(stream.finish())
    print(
        f"[{speed['tokens_per_s']:.0f} tokens/s, first token after "
        f"{1000 * speed['ttft_s']:.0f} ms; compilation took "
        f"{speed['warm_up_s']:.0f} s before]\n"
    )
    tasks = task_prompts(seed)
    prompts = [prompt for prompt, _ in tasks]
    rows = encode_prompts(tokenizer, prompts, 16, limit)
    tokens, _ = generate_rows(engine, rows, 16, Sampling())
    for (prompt, answer), row in zip(tasks, tokens, strict=True):
        question = prompt.text.split("\n\n", 1)[1]
        said = tokenizer.decode(row).strip().split("\n")[0]
        print(f"{prompt.id}: {question} {said}    (right: {answer})\n")
    return speed


def score_domains(loaded: Loaded, texts) -> dict[str, DomainScore]:
    """Scores every domain and prints a line for each."""
    print("Held-out texts:")
    scorer, scores = DomainScorer(loaded), {}
    for domain, parts in texts.items():
        scores[domain] = score = scorer.score(parts)
        print(
            f"{domain:>12}: perplexity {score.perplexity:7.2f} on {score.tokens} "
            f"tokens; with half the experts {100 * score.lost_ratio:+.1f} %",
            flush=True,
        )
    return scores


@dataclasses.dataclass(frozen=True)
class Specialisation:
    """All domains together, and the usage distances per layer."""

    total: DomainScore
    between_L: np.ndarray
    within_L: np.ndarray

    @property
    def between(self) -> float:
        return float(self.between_L.mean())

    @property
    def within(self) -> float:
        return float(self.within_L.mean())

    @property
    def ratio(self) -> float:
        return self.between / max(self.within, 1e-9)

    @property
    def sentence(self) -> str:
        return (
            f"perplexity {self.total.perplexity:.1f} on held-out text; expert usage "
            f"differs {self.ratio:.1f}x more between tasks than within one; half the "
            f"experts cost {100 * self.total.lost_ratio:.1f} % perplexity"
        )


def sum_up(scores: dict[str, DomainScore]) -> Specialisation:
    """Totals over the domains."""
    parts = list(scores.values())
    counts_NPLE = np.stack([score.counts_PLE for score in parts])
    total = DomainScore(
        sum(score.tokens for score in parts),
        sum(score.nll for score in parts),
        sum(score.nll_half for score in parts),
        counts_NPLE.sum(axis=0),
    )
    return Specialisation(total, *usage_distances(counts_NPLE))


def metric_rows(speed, found: Specialisation, scores) -> list[dict]:
    """The entry's metrics."""
    total = found.total
    rows = [
        metric("resident", "decode speed, batch 1", speed["tokens_per_s"], "tokens/s"),
        metric("resident", "time to first token", speed["ttft_s"], "s"),
        metric("resident", "held-out perplexity", total.perplexity, "1", total.tokens),
        metric("half experts", "perplexity lost", total.lost_ratio, "1", total.tokens),
        metric("resident", "usage distance between tasks", found.between, "1"),
        metric("resident", "usage distance within a task", found.within, "1"),
    ]
    for domain, score in scores.items():
        name = f"held-out perplexity, {domain}"
        rows.append(metric("resident", name, score.perplexity, "1", score.tokens))
    return rows


def run(settings: QuickstartSettings) -> Findings:
    """Loads a model, lets it write, measures it, runs it offloaded."""
    started = time.time()
    loaded = load_engine(settings.checkpoint)
    config, weights = loaded.engine.config, loaded.engine.weights
    model = describe_model(settings.checkpoint, weights, loaded.dtype)
    moe = config.moe
    print(
        f"{settings.checkpoint}: {config.model_type}, {model['params'] / 1e6:.1f} M "
        f"parameters, {config.num_layers} layers, {moe.num_experts} experts, "
        f"{moe.top_k} a token; loaded in {time.time() - started:.1f} s. The first text "
        "needs compilation.\n"
    )
    speed = show_generation(loaded, settings.max_new_tokens, settings.seed)
    texts = held_out_texts(settings.characters, settings.seed)
    scores = score_domains(loaded, texts)
    found = sum_up(scores)
    print(f"\nTogether: {found.sentence}.")
    offloaded = show_offloaded(loaded, settings.max_new_tokens)
    return Findings(
        answer=f"{speed['tokens_per_s']:.0f} tokens/s; {found.sentence}.",
        details=[f"Offloaded: {offloaded.sentence}."],
        model=model,
        workload={
            domain: {"sha256": hashlib.sha256("".join(parts).encode()).hexdigest()}
            for domain, parts in texts.items()
        },
        metrics=metric_rows(speed, found, scores) + offloaded.metrics(),
        limits=LIMITS,
        seeds=[settings.seed],
        checks={
            "usage differs between tasks, at least 3x the control": found.ratio >= 3,
            "offloaded text is the resident text": offloaded.is_same,
            "half the experts cost >= 5 % perplexity": found.total.lost_ratio >= 0.05,
        },
        plot=functools.partial(plot, config=config, scores=scores, found=found),
        pictures={"timeline.png": offloaded.plot},
        summary={
            "tokens_per_s": speed["tokens_per_s"],
            "ttft_s": speed["ttft_s"],
            "perplexity": found.total.perplexity,
            "tokens": found.total.tokens,
            "usage_distance_tasks": found.between,
            "usage_distance_control": found.within,
            "half_experts_perplexity_lost": found.total.lost_ratio,
            "offloaded_same_text": offloaded.is_same,
            "offloaded_tokens_per_s": offloaded.tokens_per_s,
            "hit_ratio": offloaded.hit_ratio,
            "bytes_moved": offloaded.bytes_moved,
            "seconds": time.time() - started,
        },
    )


def plot(
    path: Path, config, scores: Mapping[str, DomainScore], found: Specialisation
) -> None:
    """Which experts compute which domain, in every layer."""
    moe, distances = config.moe, zip(found.between_L, found.within_L, strict=True)
    expert_usage(
        path,
        np.stack([score.counts_PLE.sum(axis=0) for score in scores.values()]),
        list(scores),
        title=f"Which experts compute which task ({moe.top_k} of {moe.num_experts} a "
        "token); total variation distance of usage",
        layers=config.moe_layers,
        notes=[f"distance {b:.2f} between tasks, {w:.2f} within" for b, w in distances],
    )


STUDY = Study(
    name="quickstart",
    question="Does the default model write text, and do its experts specialise?",
    settings=QuickstartSettings,
    measure=run,
    check=lambda settings: check_checkpoint(settings.checkpoint),
)
