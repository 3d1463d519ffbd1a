"""Suite `serving`: what rows cost whose answers follow a grammar."""

import dataclasses
from pathlib import Path

from moe_edge.bench.rounds import interleave
from moe_edge.bench.speed import MS, Models, Rows, make_row
from moe_edge.engine.load import load_engine
from moe_edge.serve.grammar import Grammars, GrammarSpec
from moe_edge.studies.speed.serving import ServingSettings
from moe_edge.studies.speed.serving_loop import driver_of, same_requests, serve_all

GUIDED_BAR = 1.05
ROUNDS = 8  # a repeat: a round lasts no longer than a disturbance


def guided_rows(settings: ServingSettings, _work_dir: Path, models: Models) -> Rows:
    """A batch of rows under a JSON schema, against the same rows without."""
    loaded = load_engine(models[0][1])
    engine, config = loaded.engine, loaded.engine.config
    new = settings.new_tokens
    schema = {
        "type": "array",
        "minItems": new,  # so that no answer ends before the free ones
        "items": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "sort": {"enum": ["rye", "oats", "wheat"]},
                "sacks": {"type": "integer"},
            },
            "required": ["name", "sort", "sacks"],
            "additionalProperties": False,
        },
    }
    ends = config.eos_ids or (0,)  # where no answer ends, any token may stand for it
    grammars = Grammars(loaded.tokenizer, config.vocab_size, ends)
    grammar = grammars.compile(GrammarSpec("json", schema, "schema"))
    asked = same_requests(engine, settings, config.moe.top_k)[: settings.max_batch]
    driver = driver_of(engine, settings)

    def guided_s() -> float:
        ruled = [dataclasses.replace(each, guide=grammar.guide()) for each in asked]
        return serve_all(driver, ruled)

    found = interleave(
        {"guided": guided_s, "free": lambda: serve_all(driver, asked)},
        ROUNDS * settings.repeats,
    )
    ms = {name: [MS * s / new for s in seconds] for name, seconds in found.items()}
    return [
        make_row(
            f"{len(asked)} rows under a JSON schema, a token of each",
            ms["guided"],
            "ms",
            peer=ms["free"],
            peer_name="free rows",
            bar=GUIDED_BAR,
            tokens_per_s={
                name: [MS * len(asked) / each for each in runs]
                for name, runs in ms.items()
            },
        )
    ]
