"""DeepSeek-V3.2 and GLM-5: DeepSeek-V3's parts, and an indexer that chooses positions.

Up to `index_topk` positions it chooses all of them, so attention is DeepSeek-V3's;
contexts end there. Defaults and meaning of the fields are those of transformers 5.24.
"""

import dataclasses

from moe_edge.convert.family import DEEPSEEK_EXPERTS, Family
from moe_edge.convert.family_layers import (
    listed_layers,
    read_first_dense,
    typed_dense_layers,
)
from moe_edge.convert.family_parts import end_positions, read_mla, read_moe_v3, read_mtp
from moe_edge.convert.hf_config import Fields
from moe_edge.core.checks import ConfigError
from moe_edge.model.attention_config import IndexerConfig

_MODES = {"F": "full", "S": "shared"}


def _read(fields: Fields, heads: int, groups, **latent) -> dict:
    """What both have; `heads`: of the indexer, where the file is silent."""
    read_mtp(fields)
    fields.int("q_lora_rank", latent["q_rank"])  # null is nothing to an indexer
    indexed = ["indexed_attention"] * fields.layers
    fields.only("layer_types", (indexed, None), "all layers have this attention")
    dense = read_first_dense(fields, 3)
    dense_layers = typed_dense_layers(fields, dense["dense_layers"])
    top_k = fields.int("index_topk", 2048)
    why = f"beyond index_topk={top_k} its sparse attention chooses positions, which"
    return {
        "attention": read_mla(fields, interleaved=True, **latent),
        "moe": read_moe_v3(
            fields, top_k=8, width=2048, shared=1, scaling=2.5, groups=groups
        ),
        "indexer": IndexerConfig(
            num_heads=fields.int("index_n_heads", heads),
            head_dim=fields.int("index_head_dim", 128),
            top_k=top_k,
            layers=tuple(range(fields.layers)),
        ),
        **dense | {"dense_layers": dense_layers},
        **end_positions(fields.positions, top_k, f"{why} is not implemented"),
    }


def deepseek_v32(fields: Fields) -> dict:
    fields.only("indexer_rope_interleave", (False, None), "halves in this family")
    return _read(fields, 64, (8, 4), nope=128, values=128, q_rank=1536)


def _indexed_layers(fields: Fields) -> tuple[int, ...]:
    """Layers with an indexer of their own; others take the choice of the one before."""
    pattern, modes = fields.get("index_topk_pattern"), tuple(_MODES.values())
    layers = fields.layers
    every = max(fields.int("index_topk_freq", 1, low=0), 1)
    offset = fields.int("index_skip_topk_offset", 2, low=0)
    types = listed_layers(fields, "indexer_types", modes)
    if types is None and isinstance(pattern, str):
        types = [_MODES.get(letter) for letter in pattern]
    elif types is None and pattern is not None:
        types = pattern
    elif types is None:
        places = (max(i - offset + 1, 0) for i in range(layers))
        types = [modes[place % every != 0] for place in places]
    known = isinstance(types, list) and all(each in modes for each in types)
    if not known or len(types) != layers or types[0] != "full":
        raise ConfigError(
            f"config.json of glm_moe_dsa: index_topk_pattern is {pattern!r:.80}, "
            f"expected one letter for each of {layers} layers, F (an indexer) or S "
            "(that of the layer before), the first F"
        )
    return tuple(i for i, each in enumerate(types) if each == "full")


def glm_moe_dsa(fields: Fields) -> dict:
    fields.only("indexer_rope_interleave", (True, None), "pairs in this family")
    parts = _read(fields, 32, (1, 1), nope=192, values=256, q_rank=2048)
    indexer = dataclasses.replace(parts["indexer"], layers=_indexed_layers(fields))
    return parts | {"indexer": indexer}


DEEPSEEK_V32 = Family(
    read=deepseek_v32,
    experts=DEEPSEEK_EXPERTS._replace(
        experts=(*DEEPSEEK_EXPERTS.experts, "num_experts")
    ),
    max_positions=163_840,
    norm_eps=1e-6,
    bos=0,
    eos=1,
)
GLM_MOE_DSA = dataclasses.replace(
    DEEPSEEK_V32, read=glm_moe_dsa, max_positions=202_752, norm_eps=1e-5
)
