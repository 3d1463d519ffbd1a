"""Suite `cluster`: a server that has all blocks, against the layered engine."""

import functools
from pathlib import Path

import numpy as np

from moe_edge.bench.rounds import interleave
from moe_edge.bench.speed import MS, Models, Rows, make_row
from moe_edge.cluster.node.answers import Answers
from moe_edge.cluster.node.engine import PlacedEngine, dense_weights
from moe_edge.cluster.node.holdings import BlockReader, Holdings
from moe_edge.cluster.node.ledger import Ledger
from moe_edge.cluster.node.programs import PlacedPrograms
from moe_edge.cluster.node.remote import Remote
from moe_edge.cluster.node.tables import Tables
from moe_edge.convert.open import open_checkpoint
from moe_edge.studies.speed.cluster import ClusterSettings
from moe_edge.studies.speed.runs import (
    PROMPT_TOKENS,
    decode_run,
    load_offloaded,
    random_prompts,
)

ROUNDS = 5  # a small difference: so many for one of the others
BAR = 1.05


def lone_server(folder) -> PlacedEngine:
    """The engine of a server that holds the whole model."""
    reader = open_checkpoint(folder)
    config, blocks = reader.config, BlockReader(reader)
    held_LE = np.zeros((config.num_layers, config.moe.num_experts), bool)
    held_LE[list(config.moe_layers)] = True
    holdings = Holdings(int(held_LE.sum()), held_LE.shape, blocks)
    holdings.fill(held_LE)
    tables, ledger = Tables(0, holdings), Ledger(0, 1, held_LE.shape)
    tables.begin(0, np.zeros(held_LE.shape, np.int16))
    programs = PlacedPrograms(config, blocks.dtype)
    remote = Remote(0, None, Answers(programs, holdings), tables, ledger)
    return PlacedEngine(dense_weights(reader), holdings, remote, ledger, programs)


def local_rows(settings: ClusterSettings, _work_dir: Path, models: Models) -> Rows:
    """Median token time of both on the default model, in turn."""
    (name, folder), *_ = models
    placed, layered = lone_server(folder), load_offloaded(folder, device_memory="100%")
    prompts = random_prompts(placed, 1, PROMPT_TOKENS)
    decode = functools.partial(
        decode_run, prompts=prompts, steps=settings.local_steps, cold=False, forced=True
    )
    decode(layered)  # loads what the same tokens use again
    layered.reset_records()
    cases = {
        "placed": lambda: MS * float(np.median(decode(placed).step_s)),
        "layered": lambda: MS * float(np.median(decode(layered).step_s)),
    }
    found = interleave(cases, ROUNDS * settings.repeats)
    if layered.layer_step.counters[True].misses:
        raise RuntimeError("a budget of 100 % missed experts that an equal run loaded")
    layered.close()
    return [
        make_row(
            f"token, {name}, all blocks here",
            found["placed"],
            "ms",
            peer=found["layered"],
            peer_name="layered engine, all hits",
            bar=BAR,
        )
    ]
