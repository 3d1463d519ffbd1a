"""What README shows: its picture, from results/, and its table of GPUs, computed.

`python docs/readme_numbers.py` draws docs/readme.png and prints the table;
tests/test_readme.py compares README with the table.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import jax
import ml_dtypes
import numpy as np

from moe_edge.checkpoint.schema import item_shapes
from moe_edge.core.figures import picture
from moe_edge.core.json_reader import read_json
from moe_edge.engine.device_needs import DeviceNeeds, device_needs
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.weights import weight_shapes
from moe_edge.hardware.models import PUBLISHED
from moe_edge.hardware.presets import host_link
from moe_edge.model.config import ModelConfig
from moe_edge.model.record import RecordLayout
from moe_edge.offload.slots import DonatedSlots

ROOT = Path(__file__).resolve().parents[1]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
CONTEXT_TOKENS = 4096
MODELS = {
    "OLMoE-1B-7B": ("olmoe_1b_7b", {}),
    "DeepSeek-V2-Lite": ("deepseek_v2_lite", {}),
    "Qwen3-30B-A3B": ("qwen3_30b_a3b", {"top_k": 8}),  # as published
    "Mixtral-8x7B": ("mixtral_8x7b", {}),
}
# GB of the card -> GiB of --device_memory: the rest is for programs.
BUDGETS = {8: 6, 12: 10, 24: 20}
LINK = "pcie4_x16"


@dataclasses.dataclass(frozen=True)
class Fit:
    """A model in bfloat16 on a GPU: one row of CONTEXT_TOKENS tokens, mode fused."""

    config: ModelConfig
    expert_bytes: int
    needs: DeviceNeeds

    @property
    def blocks(self) -> int:
        return len(self.config.moe_layers) * self.config.moe.num_experts

    def share(self, budget_bytes: int) -> float:
        """Share of the experts that have a slot; 0 where the budget is refused."""
        slots = (budget_bytes - self.needs.other_bytes) // self.expert_bytes
        return min(slots / self.blocks, 1.0) if slots >= self.needs.least_slots else 0.0

    @property
    def all_missed_s(self) -> float:
        """Time on the link of a token none of whose experts are on the GPU."""
        chosen = len(self.config.moe_layers) * self.config.moe.top_k
        return chosen * self.expert_bytes / host_link(LINK).bytes_per_s


def fit(name: str, **moe) -> Fit:
    """What `moe-edge generate --dry_run` computes, from a config instead of files."""
    config, _ = PUBLISHED[name]
    config = dataclasses.replace(
        config,
        max_positions=CONTEXT_TOKENS,
        moe=dataclasses.replace(config.moe, **moe),
    )

    def dense_dtypes(item) -> dict[str, np.dtype]:
        return dict.fromkeys(item_shapes(config, item), BFLOAT16)

    layout = RecordLayout.of(config)
    records = jax.ShapeDtypeStruct((config.moe.num_experts, layout.size), BFLOAT16)
    reader = SimpleNamespace(
        config=config, dense_dtypes=dense_dtypes, dense_kinds=lambda item: {}
    )
    needs = device_needs(OffloadOptions(), weight_shapes(reader), records)
    size = layout.num_bytes(BFLOAT16)
    staging = (DonatedSlots.max_staged + 1) * size  # on a GPU; here we are on a CPU
    return Fit(config, size, dataclasses.replace(needs, staging=staging))


def table() -> Iterator[str]:
    """The lines of README's table."""
    fits = [fit(name, **moe) for name, moe in MODELS.values()]
    yield row("computed, bfloat16", MODELS)
    yield row("---", ["---"] * len(fits))
    in_all = [f"{fit.blocks * fit.expert_bytes / 1e9:.0f} GB" for fit in fits]
    yield row("all experts; on the host as much memory is needed", in_all)
    other = [f"{fit.needs.other_bytes / 1e9:.1f} GB" for fit in fits]
    yield row(f"the rest, KV cache of {CONTEXT_TOKENS} tokens included", other)
    for card_gb, gib in BUDGETS.items():
        shares = [share_text(fit.share(gib * 2**30)) for fit in fits]
        yield row(f"{card_gb} GB: `--device_memory {gib}GiB` holds", shares)
    slowest = [f"{fit.all_missed_s * 1e3:.0f} ms" for fit in fits]
    yield row("a token's experts over PCIe 4 x16, if all are absent", slowest)


def row(first: str, cells) -> str:
    return f"| {first} | {' | '.join(cells)} |"


def share_text(share: float) -> str:
    if share == 1:
        return "all"
    return f"{100 * share:.0f} %" if share else "too little"


def draw(path: Path) -> None:
    """Left: decoding on a GPU by budget, measured. Right: hits by policy, replayed."""
    with picture(path, ncols=2, figsize=(8.6, 3.2)) as (_, (left, right)):
        draw_speed(left, values("benchmark_traced_h200"))
        draw_hits(right, hits("replay_public_traces"))


def values(entry: str) -> dict[tuple[str, str], float]:
    """(policy, name) -> value of a results entry."""
    result = read_json(ROOT / "results" / entry / "result.json")
    return {(each["policy"], each["name"]): each["value"] for each in result["metrics"]}


def hits(entry: str) -> dict[tuple[str, str, int], float]:
    """(trace, policy, slots a layer) -> hit ratio of a replay."""
    found = read_json(ROOT / "results" / entry / "result.json")["frames"]["ratios"]
    return {tuple(key): ratio for *key, ratio in found["rows"]}


def draw_speed(axes, measured: dict) -> None:
    case = "traced/olmoe_7b/batch1/"
    peer = "transformers bfloat16 grouped_mm"
    bars = {
        "25 % of the experts\non the GPU": 1e3 / measured["ours", case + "fused/25%"],
        "50 %": 1e3 / measured["ours", case + "fused/50%"],
        "100 %": 1e3 / measured["ours", case + "resident"],
        "transformers,\n100 %": measured[peer, case + "resident beside transformers"],
    }
    colors = ["C0", "C0", "C0", "0.6"]
    drawn = axes.barh(list(bars), list(bars.values()), color=colors)
    axes.bar_label(drawn, fmt="%.0f", padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set(xlabel="tokens/s, batch 1")
    axes.set_title("Decoding by memory budget (measured)")


def draw_hits(axes, replayed: dict) -> None:
    trace, slots = "trace_qwen3_30b_a3b", (13, 32, 64)
    labels = {
        "lru": "LRU",
        "lfu": "LFU",
        "successor": "successor (ours)",
        "belady": "knows the future (Belady)",
    }
    for policy, label in labels.items():
        ratios = [replayed[trace, policy, count] for count in slots]
        style = "k--" if policy == "belady" else "o-"
        axes.plot([100 * n / 128 for n in slots], ratios, style, label=label)
    axes.set(xlabel="% of the experts on the device", ylabel="hit ratio")
    axes.set_title("Hits by eviction policy (replayed)")
    axes.legend(frameon=False, loc="lower right")


if __name__ == "__main__":
    draw(ROOT / "docs" / "readme.png")
    print("\n".join(table()))
