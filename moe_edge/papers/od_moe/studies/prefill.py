"""OD-MoE, figure 7 and the first-token times of table 2, at the paper's scale."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any

from moe_edge.bench.settings import Positive, StudySettings, known
from moe_edge.bench.study import Study
from moe_edge.hardware.cost_model import BlockShape
from moe_edge.hardware.presets import DEVICES, gpu, lan
from moe_edge.metrics.frames import Rows, Tables, frame
from moe_edge.papers.od_moe.cluster.prefill_timing import Prefill
from moe_edge.papers.od_moe.studies.paper_scale import (
    CACHED_TOKENS_PER_S,
    SHAPE,
    VALUE_BYTES,
)

PAPER_S = {16: 1.340, 128: 3.150}  # section 4.4, about


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillSettings(StudySettings):
    """The size of the study.

    Attributes:
      tokens: of the prompt; mini_batches: of a layer's rows.
      workers: nodes that hold an expert of each layer; gpu: of each, a preset.
      mbps: rates of the main node's line; the paper's is 1000.
    """

    tokens: Sequence[int] = (16, 128, 512)
    mini_batches: Sequence[int] = (1, 2, 4, 8, 16)
    workers: int = 8
    gpu: Annotated[str, known("gpu", DEVICES)] = "rtx_3090"
    mbps: Sequence[Positive] = (1000.0, 10_000.0)


def parts_of(settings: PrefillSettings, tokens: int, mbps: float) -> dict[str, Any]:
    """The paper's test bed as parts of `Prefill`.

    The main node's part of a layer is what the cached model's time leaves beside its
    experts, software and all; for a prompt it is taken to be no longer.
    """
    block = BlockShape(SHAPE.block.d_model, SHAPE.block.expert_dim, VALUE_BYTES)
    machine, network = gpu(settings.gpu), lan(mbps)
    device = machine.device
    expert_s = device.call_s + block.num_bytes / device.memory_bytes_per_s
    layer_s = 1 / CACHED_TOKENS_PER_S / SHAPE.num_layers
    return {
        "layers": SHAPE.num_layers,
        "rows": tokens * SHAPE.top_k,
        "main_s": layer_s - SHAPE.top_k * expert_s,
        "load_s": machine.host_link.seconds(block.num_bytes),
        "row_s": network.busy_s(block.token_bytes),
        "expert_s": expert_s,
        # The preset's rate is of FP16 matrix units, twice that of FP32.
        "expert_row_s": 2 * block.flops(1) / device.flops_per_s,
        "workers": settings.workers,
        "latency_s": network.latency_s,
    }


def measure(settings: PrefillSettings, rows: Rows) -> None:
    """First-token times of every prompt, line and number of mini-batches."""
    for mbps in settings.mbps:
        for tokens in settings.tokens:
            parts = parts_of(settings, tokens, mbps)
            for count in settings.mini_batches:
                ttft_s = Prefill(**parts, mini_batches=count).ttft_s()
                rows("ttft", mbps, tokens, count, ttft_s=ttft_s)
            layer = {name: 1e3 * parts[name] for name in ("load_s", "main_s")}
            sent_ms = 1e3 * parts["rows"] * parts["row_s"]
            rows(
                "layer",
                mbps,
                tokens,
                load_ms=layer["load_s"],
                main_ms=layer["main_s"],
                send_ms=sent_ms,
            )
    rows.about |= {
        "model": {"name": SHAPE.name, "params": None, "weights": "none: sizes only"},
        "workload": dataclasses.asdict(settings),
        "kind": "simulated",
        "cost_model_source": "preset",
    }


def derive(tables: Tables) -> dict[str, Any]:
    """What mini-batches gain, and the paper's two prompts."""
    ttft = tables["ttft"]
    whole = ttft[ttft.mini_batches == ttft.mini_batches.min()]
    keys = ["mbps", "tokens"]
    both = ttft.merge(whole[[*keys, "ttft_s"]], on=keys, suffixes=("", "_whole"))
    both["change"] = both.ttft_s / both.ttft_s_whole - 1
    best = both.loc[both.groupby(keys, sort=False).ttft_s.idxmin()]
    first = best[best.mbps == ttft.mbps.iloc[0]]
    paper = first[first.tokens.isin(PAPER_S)]
    return {
        "first": first,
        "best": best,
        "mbps": ttft.mbps.iloc[0],
        "paper": paper.assign(paper_s=paper.tokens.map(PAPER_S)),
        "layers": tables["layer"],
    }


FRAMES = {
    "ttft": frame("mbps tokens mini_batches", "ttft_s"),
    "layer": frame("mbps tokens", "load_ms main_ms send_ms"),
}
STUDY = Study("od_moe_prefill", PrefillSettings, measure, FRAMES, derive)
