"""What the quickstart shows: a text, what experts compute, the text from a quarter."""

import dataclasses
import hashlib
import time
from collections.abc import Mapping, Sequence

import numpy as np

from moe_edge.bench.engines import describe_model
from moe_edge.bench.offloading import studied
from moe_edge.bench.quickstart.study import QuickstartSettings
from moe_edge.bench.quickstart.texts import (
    held_out_texts,
    story_prompt,
    task_prompts,
)
from moe_edge.bench.study import Findings
from moe_edge.convert.text_stream import TextStream
from moe_edge.core.events import Event, Recorder
from moe_edge.engine.generate import generate_rows
from moe_edge.engine.load import Loaded, load_engine
from moe_edge.engine.prompts import encode_prompts
from moe_edge.evaluate.specialisation import DomainScore, DomainScorer
from moe_edge.evaluate.usage import usage_distances
from moe_edge.kernels import native
from moe_edge.metrics.plots import expert_usage, timeline
from moe_edge.metrics.results import metric
from moe_edge.model.sampling import Sampling

LIMITS = (
    "A model of a few million parameters trained on two CPU cores: its text shows "
    "that the machinery works, not what large models can do.",
    "Held-out texts of a few thousand tokens; the task families come from the same "
    "generator as the training data, with other seeds.",
    "Speed of one run on a machine that may be busy; moe-edge benchmark compares.",
)
BUDGET = "25%"
TRANSFER_LATENCY_S = 50e-6
LOAD_OF_LAYER = 0.5  # an expert's transfer, in layers of resident compute
OFFLOADED = f"offloaded, {BUDGET}, lru, stale_gate"
METRICS = (  # policy, measure, key of what was found, unit
    ("resident", "decode speed, batch 1", "tokens_per_s", "tokens/s"),
    ("resident", "time to first token", "ttft_s", "s"),
    ("resident", "held-out perplexity", "perplexity", "1"),
    ("half experts", "perplexity lost", "half_experts_perplexity_lost", "1"),
    ("resident", "usage distance between tasks", "usage_distance_tasks", "1"),
    ("resident", "usage distance within a task", "usage_distance_control", "1"),
    (OFFLOADED, "decode speed, batch 1", "offloaded_tokens_per_s", "tokens/s"),
    (OFFLOADED, "hit ratio", "hit_ratio", "1"),
    (OFFLOADED, "bytes moved", "bytes_moved", "bytes"),
    (OFFLOADED, "emulated link", "link_bytes_per_s", "bytes/s"),
)


def encoded(loaded: Loaded, prompts, max_new_tokens: int) -> list[list[int]]:
    """Token ids of prompts that leave room for so many new ones."""
    limit = loaded.engine.config.max_positions
    return encode_prompts(loaded.tokenizer, prompts, max_new_tokens, limit)


def show_generation(loaded: Loaded, max_new_tokens: int, seed: int) -> dict[str, float]:
    """Streams a story, answers a question of each family; returns the speed."""
    engine, tokenizer, story = loaded.engine, loaded.tokenizer, story_prompt()
    rows = encoded(loaded, [story], max_new_tokens)
    stream = TextStream(tokenizer, rows[0])
    is_first = True

    def on_token(row: int, token: int) -> None:
        nonlocal is_first
        print((story.text if is_first else "") + stream.push(token), end="", flush=True)
        is_first = False

    sampling = Sampling(temperature=0.7, top_p=0.9, seed=seed)
    _, speed = generate_rows(engine, rows, max_new_tokens, sampling, on_token=on_token)
    print(stream.finish())
    print(
        f"[{speed['tokens_per_s']:.0f} tokens/s, first token after "
        f"{1000 * speed['ttft_s']:.0f} ms; compilation took "
        f"{speed['warm_up_s']:.0f} s before; products: {native.describe()}]\n"
    )
    tasks = task_prompts(seed)
    rows = encoded(loaded, [prompt for prompt, _ in tasks], 16)
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
    def ratio(self) -> float:
        return float(self.between_L.mean() / max(self.within_L.mean(), 1e-9))


def sum_up(scores: Mapping[str, DomainScore]) -> Specialisation:
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


def show_offloaded(
    loaded: Loaded, max_new_tokens: int
) -> tuple[dict[str, float], Sequence[Event]]:
    """Writes a text twice, resident and offloaded, and compares.

    The link is emulated: on a machine without an accelerator host and device are the
    same memory, and a transfer would take no time.
    """
    rows, greedy = encoded(loaded, [story_prompt()], max_new_tokens), Sampling()
    expected, speed = generate_rows(loaded.engine, rows, max_new_tokens, greedy)
    config = loaded.engine.config
    layer_s = 1 / max(speed["tokens_per_s"], 1e-9) / config.num_layers
    records = next(e for e in loaded.engine.weights.experts if e is not None)
    rate = records.nbytes / config.moe.num_experts / (LOAD_OF_LAYER * layer_s)
    options = studied(
        device_memory=BUDGET,
        predictor="stale_gate",
        link_bytes_per_s=rate,
        link_latency_s=TRANSFER_LATENCY_S,
    )
    recorder = Recorder()
    with load_engine(loaded.name, offload=options, recorder=recorder).engine as engine:
        tokens, speed = generate_rows(engine, rows, max_new_tokens, greedy)
        moved = engine.movement()
    found = {
        "offloaded_same_text": tokens == expected,
        "offloaded_tokens_per_s": speed["tokens_per_s"],
        "hit_ratio": moved["hit_ratio"] or 0.0,
        "bytes_moved": moved["bytes_moved"],
        "link_bytes_per_s": rate,
    }
    return found, recorder.events()


def run(settings: QuickstartSettings) -> Findings:
    """Loads a model, lets it write, measures it, runs it offloaded."""
    started = time.time()
    loaded = load_engine(settings.checkpoint)
    config = loaded.engine.config
    moe = config.moe
    model = describe_model(settings.checkpoint, loaded.engine.weights, loaded.dtype)
    print(
        f"{settings.checkpoint}: {config.model_type}, {model['params'] / 1e6:.1f} M "
        f"parameters, {config.num_layers} layers, {moe.num_experts} experts, "
        f"{moe.top_k} a token; loaded in {time.time() - started:.1f} s. The first text "
        "needs compilation.\n"
    )
    speed = show_generation(loaded, settings.max_new_tokens, settings.seed)
    texts = held_out_texts(settings.characters, settings.seed)
    scores = score_domains(loaded, texts)
    usage = sum_up(scores)
    total = usage.total
    learned = (
        f"perplexity {total.perplexity:.1f} on held-out text; expert usage differs "
        f"{usage.ratio:.1f}x more between tasks than within one; half the experts cost "
        f"{100 * total.lost_ratio:.1f} % perplexity"
    )
    print(f"\nTogether: {learned}.")
    moved, events = show_offloaded(loaded, settings.max_new_tokens)
    rate = moved["link_bytes_per_s"]
    link = f"emulated link of {rate / 1e6:.0f} MB/s"
    same = "the same text" if moved["offloaded_same_text"] else "ANOTHER TEXT"
    offloaded = (
        f"Offloaded: with {BUDGET} of the experts on the device {same}, "
        f"{100 * moved['hit_ratio']:.0f} % of the chosen experts were there"
    )
    print(
        f"{offloaded}; {moved['bytes_moved'] / 1e6:.1f} MB moved over an {link}, "
        f"{moved['offloaded_tokens_per_s']:.0f} tokens/s."
    )
    found = {
        "tokens_per_s": speed["tokens_per_s"],
        "ttft_s": speed["ttft_s"],
        "perplexity": total.perplexity,
        "tokens": total.tokens,
        "usage_distance_tasks": float(usage.between_L.mean()),
        "usage_distance_control": float(usage.within_L.mean()),
        "half_experts_perplexity_lost": total.lost_ratio,
        **moved,
    }
    rows = [
        metric(*named, found[key], unit, total.tokens if "perplexity" in key else 1)
        for *named, key, unit in METRICS
    ]
    rows += [
        metric("resident", f"held-out perplexity, {d}", s.perplexity, "1", s.tokens)
        for d, s in scores.items()
    ]
    return Findings(
        answer=f"{speed['tokens_per_s']:.0f} tokens/s; {learned}.",
        details=[f"{offloaded}."],
        model=model,
        workload={
            domain: {"sha256": hashlib.sha256("".join(parts).encode()).hexdigest()}
            for domain, parts in texts.items()
        },
        metrics=rows,
        limits=LIMITS,
        seeds=[settings.seed],
        checks={
            "usage differs between tasks, at least 3x the control": usage.ratio >= 3,
            "offloaded text is the resident text": moved["offloaded_same_text"],
            "half the experts cost > .5 % perplexity": total.lost_ratio > 0.005,
        },
        plot=lambda path: plot(path, config, scores, usage),
        pictures={
            "timeline.png": lambda path: timeline(
                path,
                events,
                title=f"Experts travel while layers compute ({link})",
            )
        },
        summary={key: value for key, value in found.items() if "link" not in key}
        | {"seconds": time.time() - started},
    )


def plot(path, config, scores: Mapping[str, DomainScore], found) -> None:
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
