"""What a refactoring is asked to do; checked before JAX is loaded."""

import dataclasses
from typing import Any

from moe_edge.core.checks import (
    ConfigError,
    check_count,
    check_known,
)
from moe_edge.model.config import ModelConfig, MoeConfig
from moe_edge.model.sub_experts import split_config
from moe_edge.papers.moe_prism.refactor.partition.problem import (
    HELDOUT_RATIO,
    check_split,
    split_rows,
)
from moe_edge.papers.moe_prism.refactor.partition.solve import DEFAULT, check_solver

GATES = {
    "lg": "linear",
    "lg_ft": "linear",
    "cg": "proxy",
    "calibrated": "calibrated",
    "calibrated_ft": "calibrated",
}
FINE_TUNED = ("lg_ft", "calibrated_ft")
PROXY_RULES = ("global", "pattern")
IMPORTANCE = ("output", "activation", "usage")
CHOICES = ("fitted", "central")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartitionOptions:
    """How an expert's neurons are cut into sub-experts.

    Attributes:
      sub_experts: U, equal parts of every expert.
      inactive: K of the partition objective; None: U - 1, the paper's.
      solver: of `solve.SOLVERS`; None: alternate.
      restarts: of solver alternate; None: its default.
      normalise: divide every neuron by its mean magnitude before solving.
      weigh_tokens: by their router weight, before solving.
      heldout_ratio: share of each expert's tokens that is not fitted on, only scored.
      min_tokens: experts with fewer fitted tokens are split by their weights' norms.
      seed: of everything random.
    """

    sub_experts: int = 4
    inactive: int | None = None
    solver: str | None = None
    restarts: int | None = None
    normalise: bool = False
    weigh_tokens: bool = False
    heldout_ratio: float = HELDOUT_RATIO
    min_tokens: int = 64
    seed: int = 0

    def check(self, neurons: int) -> None:
        """Raises ConfigError for options that such experts cannot have."""
        check_split(neurons, self.sub_experts, self.num_inactive)
        check_solver(self.chosen_solver, self.solver_options)
        split_rows(1, self.heldout_ratio, 0)
        check_count("min_tokens", self.min_tokens)

    @property
    def num_inactive(self) -> int:
        return self.sub_experts - 1 if self.inactive is None else self.inactive

    @property
    def chosen_solver(self) -> str:
        return self.solver or DEFAULT

    @property
    def solver_options(self) -> dict[str, int]:
        return {} if self.restarts is None else {"restarts": self.restarts}

    def facts(self) -> dict[str, Any]:
        """Everything that a partition depends on, in JSON's types."""
        names = [field.name for field in dataclasses.fields(PartitionOptions)]
        chosen = {"inactive": self.num_inactive, "solver": self.chosen_solver}
        return {name: getattr(self, name) for name in names} | chosen


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(PartitionOptions):
    """What `moe-edge refactor` does to a model; defaults are measured ones.

    Attributes (more than those of `PartitionOptions`):
      solver: alternate, magnitude, anneal, ..; None: magnitude for lg, which always
        runs the same blocks of an expert first, and alternate where the gate tells
        blocks apart or `restarts` are given.
      gate: lg, lg_ft (linear gate, fine-tuned), cg (proxy gate), calibrated (rows that
        predict the blocks' norms) or calibrated_ft (those, fine-tuned).
      weigh_neurons: by the length of their down columns, before solving.
      importance: how sub-experts are ordered, output, activation or usage, see
        `gates.linear.order_subs`.
      proxy_rule: cg: global ranks all blocks of the chosen experts, pattern gives the
        expert of each rank a number of blocks.
      gate_neurons: cg: r of every sub-expert; None: the paper's 4, but at most one in
        sixteen of its neurons, since they are computed for all blocks.
      gate_choice: cg: fitted or central (the paper's).
    """

    gate: str = "lg"
    weigh_neurons: bool = True
    importance: str = "output"
    proxy_rule: str = "global"
    gate_neurons: int | None = None
    gate_choice: str = "fitted"

    def __post_init__(self):
        check_count("sub_experts", self.sub_experts)
        if self.gate_neurons is not None:
            check_count("gate_neurons", self.gate_neurons)
        check_known("gate", self.gate, GATES)
        check_known("importance rule", self.importance, IMPORTANCE)
        check_known("proxy_rule", self.proxy_rule, PROXY_RULES)
        check_known("gate_choice", self.gate_choice, CHOICES)

    @property
    def chosen_solver(self) -> str:
        fixed = self.gate == "lg" and self.restarts is None
        return self.solver or ("magnitude" if fixed else DEFAULT)

    def num_gate_neurons(self, parent: MoeConfig) -> int:
        """r, or 0 without a proxy gate."""
        if self.gate != "cg":
            return 0
        if self.gate_neurons is not None:
            return self.gate_neurons
        return max(1, min(4, parent.expert_dim // self.sub_experts // 16))

    @property
    def model_gate(self) -> str:
        """One of `model.config_checks.GATES`."""
        kind = GATES[self.gate]
        return f"proxy_{self.proxy_rule}" if kind == "proxy" else kind

    def split(self, parent: ModelConfig) -> ModelConfig:
        """The refactored config; refuses what cannot be done before any work.

        Raises:
          ConfigError: a model refactored already, sizes that do not divide, more gate
            neurons than there are, or a linear gate of a model routed by groups.
        """
        zeros = ((0.0,) * self.sub_experts,) * parent.moe.top_k
        child = split_config(
            parent,
            self.sub_experts,
            gate=self.model_gate,
            gate_neurons=self.num_gate_neurons(parent.moe),
            rank_shares=zeros if self.model_gate == "proxy_pattern" else (),
        )
        self.check(parent.moe.expert_dim)
        return child


def whole_k(moe: MoeConfig) -> int:
    """K at which all sub-experts of the parent's own experts run."""
    return moe.parent_top_k * moe.sub_experts


def parse_ks(text: str, moe: MoeConfig) -> list[int]:
    """Values of K named by a flag.

    Args:
      text: `all` (1 to all sub-experts of the parent's experts), numbers separated by
        commas, or empty.
      moe: of the refactored model.
    Raises:
      ConfigError: no numbers, or outside of what the gate defines.
    """
    if text == "all":
        return list(range(1, whole_k(moe) + 1))
    try:
        ks = [int(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise ConfigError(f"ppl_k is {text!r}, expected `all` or 4,8,12") from error
    bad = [k for k in ks if not 1 <= k <= moe.max_top_k]
    if bad:
        raise ConfigError(f"ppl_k {bad[0]} is outside of 1..{moe.max_top_k}")
    return sorted(set(ks))
