"""config.json of a refactored model: the same architecture with E U experts.

A model whose sub-experts are chosen by a linear gate is an ordinary mixture of experts
of E U experts of width F / U, of which K = U k compute a token, so it can be exported
wherever the family's own routing chooses sub-experts as ours does. DeepSeek's shared
expert is as wide as `n_shared_experts` experts, so that number grows by U.
"""

import copy
import dataclasses
from typing import Any

from moe_edge.convert.families import FAMILIES, config_from_hf
from moe_edge.convert.neutral_fields import expert_sizes
from moe_edge.core.checks import ConfigError
from moe_edge.model.config import ModelConfig

EXPORTED = sorted(name for name, family in FAMILIES.items() if family.exported)
WIDTH_MULTIPLE = 8


def refactored_hf_config(
    config: ModelConfig, generation: dict[str, Any] | None = None
) -> dict[str, Any]:
    """config.json that means the refactored model `config`.

    Args:
      config: of a refactored checkpoint; its `hf_config` is the parent's.
      generation: the generation_config.json next to it.
    Raises:
      ConfigError: an architecture that cannot express the model, with the reason.
    """
    check_exportable(config)
    moe, raw = config.moe, copy.deepcopy(config.hf_config)
    names = FAMILIES[config.model_type].experts
    read = {name for aliases in names for name in aliases}
    for name in expert_sizes(config).keys() - read:
        raw.pop(name, None)  # the parent's, in another family's words
    values = {
        names.experts: moe.num_experts,
        names.top_k: moe.top_k,
        names.width: moe.expert_dim,
    }
    if names.shared:
        values[names.shared] = moe.shared_dim // moe.expert_dim
    for aliases, value in values.items():
        present = [name for name in aliases if name in raw]
        raw |= dict.fromkeys(present or aliases[:1], value)
    expected = dataclasses.replace(moe, sub_experts=1, parent_top_k=0)
    found = config_from_hf(raw, generation)
    if dataclasses.replace(config, moe=expected) != dataclasses.replace(
        found, eos_ids=config.eos_ids, bos_id=config.bos_id
    ):
        raise ConfigError(
            f"a config.json of {config.model_type} cannot say {expected}; it would be "
            f"read as {found.moe}"
        )
    return raw


def check_exportable(config: ModelConfig) -> None:
    """Refuses what a Hugging Face checkpoint of the same architecture cannot express.

    Raises:
      ConfigError: a gate that chooses among blocks, a width that stock kernels refuse,
        or a family without an export. (Group routing by two experts has no linear gate
        to export.)
    """
    moe = config.moe
    if moe.keeps_router:
        raise ConfigError(
            f"a {moe.gate} gate chooses blocks of chosen experts, as no architecture "
            "of transformers does; refactor with --gate lg or lg_ft to export"
        )
    if config.model_type not in EXPORTED:
        raise ConfigError(
            f"refactored models of {config.model_type} have no export; known: "
            f"{', '.join(EXPORTED)}"
        )
    if moe.expert_dim % WIDTH_MULTIPLE:
        parent = moe.expert_dim * moe.sub_experts
        fitting = [
            n
            for n in range(1, parent + 1)
            if parent % n == 0 and parent // n % WIDTH_MULTIPLE == 0
        ]
        raise ConfigError(
            f"sub-experts of {moe.expert_dim} neurons cannot be exported: stock "
            f"kernels need a multiple of {WIDTH_MULTIPLE}; experts of {parent} neurons "
            + (
                f"split into {', '.join(map(str, fitting))}"
                if fitting
                else "have no such split"
            )
        )
