"""What packing sub-experts gains on the paper's cards (MoE-Prism, section 6.2.3).

A fragment of memory that is too small for an expert holds some of its sub-experts. The
paper gives every layer an equal share of the memory, so a fragment is left in each of
them; ours is one pool of slots over all layers, which leaves one.
"""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np

from moe_edge.bench.settings import Positive, StudySettings, by
from moe_edge.bench.study import Study
from moe_edge.core.checks import check_count, check_from_zero, check_positive
from moe_edge.hardware.models import ModelShape, model_shape
from moe_edge.metrics.frames import Rows, Tables, frame


def resident_share(
    memory_bytes: float,
    expert_bytes: float,
    layers: int,
    experts: int,
    sub_experts: int = 1,
    *,
    pooled: bool = False,
) -> float:
    """Share of a model's experts that have a slot.

    Args:
      memory_bytes: for experts, of the device.
      experts: of each layer; sub_experts: of each expert, 1: whole ones.
      pooled: one pool over all layers, in place of an equal part for each.
    """
    check_from_zero("memory_bytes", memory_bytes)
    check_positive("expert_bytes", expert_bytes)
    for name, count in (
        ("layers", layers),
        ("experts", experts),
        ("sub_experts", sub_experts),
    ):
        check_count(name, count)
    parts = 1 if pooled else layers
    blocks = layers * experts * sub_experts // parts  # of a part
    slots = int(memory_bytes / parts * sub_experts // expert_bytes)
    return min(slots, blocks) / blocks


GIB = 2**30
PAPER = ("deepseek_v2_lite", 16.0)
MEMORIES = {"a part a layer": False, "one pool": True}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packing(StudySettings):
    """The size of the study.

    Attributes:
      models: presets; cards_gb: memory of the cards.
      reserved_gib: of a card, for KV cache and programs; dense weights come on top.
      sub_experts: of each expert.
      steps: memories of the sweep, from room for a tenth of the experts to nine tenths.
    """

    models: Sequence[Annotated[str, by(model_shape)]] = (
        *("deepseek_v2_lite", "olmoe_1b_7b", "qwen3_30b_a3b"),
    )
    cards_gb: Sequence[Positive] = (8.0, 12.0, 16.0, 24.0)
    reserved_gib: Positive = 1.5
    sub_experts: int = 4
    steps: int = 2000


def measure(settings: Packing, rows: Rows) -> None:
    """Shares of the experts with a slot, on each card and over a sweep of memories."""
    for name in settings.models:
        shape = model_shape(name)
        for card_gb in settings.cards_gb:
            free = room_bytes(shape, card_gb, settings.reserved_gib)
            for memory, pooled in MEMORIES.items():
                whole, subs = shares(shape, free, settings.sub_experts, pooled)
                rows("cards", name, card_gb, memory, whole=whole, sub_experts=subs)
        all_bytes = shape.num_blocks * shape.block.num_bytes
        for memory, pooled in MEMORIES.items():
            found = [
                shares(shape, share * all_bytes, settings.sub_experts, pooled)
                for share in np.linspace(0.1, 0.9, settings.steps)
            ]
            gain = np.array([subs - whole for whole, subs in found])
            rows("sweep", name, memory, mean=gain.mean(), most=gain.max())
    rows.about |= {
        "model": {
            "name": ", ".join(settings.models),
            "params": None,
            "weights": "none: sizes only",
        },
        "workload": dataclasses.asdict(settings),
        "kind": "simulated",
        "cost_model_source": "preset",
    }


def shares(
    shape: ModelShape, memory_bytes: float, subs: int, pooled: bool
) -> tuple[float, float]:
    """Of whole experts, and of sub-experts."""
    sizes = shape.block.num_bytes, shape.num_layers, shape.num_experts
    whole, of_subs = (
        resident_share(memory_bytes, *sizes, count, pooled=pooled)
        for count in (1, subs)
    )
    return whole, of_subs


def room_bytes(shape: ModelShape, card_gb: float, reserved_gib: float) -> float:
    """Memory of a card for experts; 0 where the rest does not fit."""
    dense = shape.num_layers * shape.dense.num_bytes + shape.once.num_bytes
    return max(0.0, card_gb * 1e9 - reserved_gib * GIB - dense)


def derive(tables: Tables) -> dict[str, Any]:
    """The paper's example, and the gains."""
    cards, sweep = tables["cards"], tables["sweep"]
    cards = cards.assign(gain=cards.sub_experts - cards.whole)
    a_layer = sweep[sweep.memory == "a part a layer"]
    pool = sweep[sweep.memory == "one pool"]
    model, card_gb = PAPER
    is_paper = (cards.model == model) & (cards.card_gb == card_gb)
    return {
        "gains": cards,
        "mean": a_layer["mean"].max(),
        "most": a_layer.most.max(),
        "pool_most": pool.most.max(),
        "paper": cards[is_paper & (cards.memory == "a part a layer")],
    }


FRAMES = {
    "cards": frame("model card_gb memory", "whole sub_experts"),
    "sweep": frame("model memory", "mean most"),
}
STUDY = Study("moe_prism_packing", Packing, measure, FRAMES, derive)
