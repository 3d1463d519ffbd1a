"""What the converter knows of a model family: fields of its config.json, tensor names.

A family is one `Family`, in a file `family_NAME.py` next to the function that reads its
config.json, and a line in `families.FAMILIES`. A part that no family has yet becomes an
option of `ModelConfig` first, tested alone.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class ExpertNames(NamedTuple):
    """Fields of config.json that state the experts' sizes: a name and its aliases."""

    experts: tuple[str, ...]
    top_k: tuple[str, ...] = ("num_experts_per_tok",)
    width: tuple[str, ...] = ("moe_intermediate_size",)
    shared: tuple[str, ...] = ()  # how many experts wide the shared one is


# What DeepSeek calls them, and families that took its router.
DEEPSEEK_EXPERTS = ExpertNames(
    ("n_routed_experts", "num_local_experts"), shared=("n_shared_experts",)
)
_PROJ = {"gate": "gate_proj.weight", "up": "up_proj.weight", "down": "down_proj.weight"}
NUMBERED = {"gate": "w1.weight", "up": "w3.weight", "down": "w2.weight"}


def mlp_names(
    part: str, module: str, names: Mapping[str, str] = _PROJ
) -> dict[str, str]:
    """Canonical -> published name of an MLP's matrices, in a module of a layer."""
    return {f"{part}.{which}": module + name for which, name in names.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A family's config.json, what stands where it is silent, and its tensor names.

    Names of tensors are those of published files, after `model.layers.N.`.
    """

    # Fields -> further arguments of `ModelConfig`.
    read: Callable[[Any], dict]
    experts: ExpertNames
    # As transformers' config class has them.
    max_positions: Any
    norm_eps: float
    tied: bool = False
    bos: int | None = None
    eos: int | None = None
    # Canonical name -> published name, where it differs from the table in `rules.py`.
    # A name of two is one tensor with their rows one behind the other.
    tensors: Mapping[str, str] = dataclasses.field(default_factory=dict)
    expert_module: str = "mlp.experts."
    expert_tensors: Mapping[str, str] = dataclasses.field(default_factory=_PROJ.copy)
    # Published with one tensor of all experts of a layer: "halves", `[E, 2F, D]` (gate,
    # then up) and `[E, D, F]`, these "turned", `[E, D, 2F]` and `[E, F, D]`, or
    # gpt-oss's "columns", see `rules.py`.
    fused: str | None = None
    fused_tensors: tuple[str, str] = ("gate_up_proj", "down_proj")
    # Canonical names of vectors that files hold as a matrix of one row.
    one_row: frozenset[str] = frozenset()
    # How other files begin a name (transformers 5 in memory) -> how published ones do.
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # Folders of this family with other modalities: their model_type, whose config.json
    # holds the family's as `text_config`; how names of the text model begin there ->
    # how they do here; how names of the rest begin.
    whole: str | None = None
    text_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    exported: bool = True  # whether transformers can run a refactored model of it
