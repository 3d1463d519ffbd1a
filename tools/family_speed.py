"""How near each family decodes to its own limit, compared with Qwen3-MoE.

Random models of about half a billion parameters in the shapes of the tests' tiny ones,
bfloat16, batch 1, on a CPU. The limit is the bytes that a step reads over the memory's
rate; Qwen3-MoE is timed next to each family in turn, so that the machine's mood
cancels.

    python tools/family_speed.py FOLDER [FAMILY ...]
"""

import gc
import statistics
import sys
from pathlib import Path

from moe_edge.core.checks import MoeEdgeError
from moe_edge.engine.load import load_engine
from moe_edge.studies.speed.decode import bytes_per_step, decode_rate
from moe_edge.studies.speed.models import write_random
from moe_edge.studies.speed.runs import random_prompts
from tests.support.tiny_checkpoints import FAMILIES, raw_config

ROUNDS, STEPS = 5, 40
SIZES = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 64),
    **{"num_experts_per_tok": 8, "moe_top_k": 8, "top_k_experts": 8, "moe_k": 8},
    **{"moe_num_experts": 64, "moe_num_shared_experts": 1},
    **dict.fromkeys(("n_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **{"num_key_value_heads": 4, "num_global_key_value_heads": 4, "head_dim": 64},
    **{"global_head_dim": 64, "v_head_dim": 64, "qk_nope_head_dim": 64},
    **{"qk_rope_head_dim": 32, "kv_lora_rank": 256, "q_lora_rank": 384},
    **{"moe_intermediate_size": 384, "intermediate_size": 1536},
    **{"intermediate_size_mlp": 1536, "index_topk": 2048, "rotary_dim": 32},
    **{"shared_expert_intermediate_size": 384, "shared_intermediate_size": 384},
}
EXPERT_WIDTH = ("moe_intermediate_size", "intermediate_size")


def shape(family: str) -> dict:
    """The tests' config of a family, enlarged."""
    raw = raw_config(family)
    raw |= {key: size for key, size in SIZES.items() if raw.get(key) is not None}
    if raw.get("moe_intermediate_size") is None:
        raw["intermediate_size"] = 384  # of its experts
    if family in ("phimoe", "llama4_text"):  # two and one a token, always
        raw["num_experts_per_tok"] = raw_config(family)["num_experts_per_tok"]
    layers = 8
    for key, value in raw.items():
        if isinstance(value, list) and len(value) == raw["num_hidden_layers"]:
            raw[key] = (value * layers)[:layers]
    if raw.get("first_k_dense_replace"):
        raw["first_k_dense_replace"] = 1
    more = {"hidden_size": 768, "num_attention_heads": 12, "vocab_size": 8192}
    if family == "mimo_v2_flash":
        raw["num_key_value_heads"] = 3  # twice as many in sliding layers
    if raw.get("kv_lora_rank"):
        more["num_key_value_heads"] = 12
    more |= {"num_hidden_layers": layers, "max_position_embeddings": 2048}
    return raw | more | {"dtype": "bfloat16", "torch_dtype": "bfloat16"}


def load(folder: Path, family: str):
    """(engine, prompt, bytes of a step)."""
    where = write_random(folder / family, shape(family))
    engine = load_engine(where, with_tokenizer=False).engine
    prompts = random_prompts(engine, 1, 32)
    read = bytes_per_step(engine, prompts, STEPS)
    decode_rate(engine, prompts, 4)
    return engine, prompts, read


def main(folder: str, *families: str) -> None:
    base = load(Path(folder), "qwen3_moe")
    print("family: tokens/s x bytes, over Qwen3-MoE's (1: as near to its limit)")
    for family in families or FAMILIES:
        try:
            one = load(Path(folder), family)
        except MoeEdgeError as error:
            print(f"{family}: {error}", flush=True)
            continue
        ratios = []
        for _ in range(ROUNDS):
            own, other = (
                decode_rate(engine, prompts, STEPS) * read
                for engine, prompts, read in (one, base)
            )
            ratios.append(own / other)
        middle, low, high = statistics.median(ratios), min(ratios), max(ratios)
        megabytes = one[2] / 1e6
        print(
            f"{family}: {middle:.2f} ({low:.2f} to {high:.2f}), {megabytes:.0f} MB a "
            "step",
            flush=True,
        )
        one[0].close()
        del one
        gc.collect()


if __name__ == "__main__":
    main(*sys.argv[1:])
