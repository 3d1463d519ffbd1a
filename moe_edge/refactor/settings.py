"""Settings of a refactoring: how experts are split and how blocks are chosen."""

import dataclasses

from moe_edge.core.checks import (
    ConfigError,
    check_count,
    check_known,
)
from moe_edge.model.config import ModelConfig, MoeConfig
from moe_edge.model.sub_experts import split_config
from moe_edge.refactor.gates.proxy import CHOICES
from moe_edge.refactor.importance import RULES
from moe_edge.refactor.partition.model import MIN_TOKENS
from moe_edge.refactor.partition.problem import check_split
from moe_edge.refactor.partition.report import HELDOUT_RATIO
from moe_edge.refactor.partition.solve import DEFAULT, check_solver

GATES = {"lg": "linear", "lg_ft": "linear", "cg": "proxy"}
PROXY_RULES = ("global", "pattern")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What `launch/refactor.py` does to a model; defaults are measured ones.

    Attributes:
      sub_experts: U.
      gate: lg, lg_ft (linear gate, fine-tuned) or cg (proxy gate).
      inactive: K of the partition objective; None: U - 1, the paper's.
      solver: of `solve.SOLVERS`; None: magnitude for lg, which always runs the same
        blocks of an expert first, and alternate where the gate tells blocks apart.
      restarts: of solver alternate, which it implies; None: its default.
      normalise: divide every neuron by its mean magnitude before solving.
      weigh_neurons: by the length of their down columns, before solving.
      weigh_tokens: by their router weight, before solving.
      importance: how sub-experts are ordered, one of `importance.RULES`.
      proxy_rule: cg: global ranks all blocks of the chosen experts, pattern gives the
        expert of each rank a number of blocks.
      gate_neurons: cg: r of every sub-expert; None: the paper's 4, but at most one in
        sixteen of its neurons, since they are computed for all blocks.
      gate_choice: cg: fitted or central (the paper's).
      heldout_ratio: share of each expert's tokens that is not fitted on.
      min_tokens: experts with fewer fitted tokens are split by their weights' norms.
      seed: of everything random.
    """

    sub_experts: int = 4
    gate: str = "lg"
    inactive: int | None = None
    solver: str | None = None
    restarts: int | None = None
    normalise: bool = False
    weigh_neurons: bool = True
    weigh_tokens: bool = False
    importance: str = "output"
    proxy_rule: str = "global"
    gate_neurons: int | None = None
    gate_choice: str = "fitted"
    heldout_ratio: float = HELDOUT_RATIO
    min_tokens: int = MIN_TOKENS
    seed: int = 0

    def __post_init__(self):
        check_count("sub_experts", self.sub_experts)
        if self.gate_neurons is not None:
            check_count("gate_neurons", self.gate_neurons)
        check_count("min_tokens", self.min_tokens)
        check_known("gate", self.gate, GATES)
        check_known("importance rule", self.importance, RULES)
        check_known("proxy_rule", self.proxy_rule, PROXY_RULES)
        check_known("gate_choice", self.gate_choice, CHOICES)
        check_solver(self.chosen_solver, self.solver_options)
        if not 0 <= self.heldout_ratio < 1:
            raise ConfigError(
                f"heldout_ratio is {self.heldout_ratio}, expected 0 to below 1"
            )

    @property
    def num_inactive(self) -> int:
        return self.sub_experts - 1 if self.inactive is None else self.inactive

    def num_gate_neurons(self, parent: MoeConfig) -> int:
        """r, or 0 without a proxy gate."""
        if self.gate != "cg":
            return 0
        if self.gate_neurons is not None:
            return self.gate_neurons
        return max(1, min(4, parent.expert_dim // self.sub_experts // 16))

    @property
    def chosen_solver(self) -> str:
        if self.solver is not None:
            return self.solver
        fixed = self.gate == "lg" and self.restarts is None
        return "magnitude" if fixed else DEFAULT

    @property
    def solver_options(self) -> dict[str, int]:
        return {} if self.restarts is None else {"restarts": self.restarts}

    @property
    def model_gate(self) -> str:
        """One of `model.config.GATES`."""
        kind = GATES[self.gate]
        return kind if kind == "linear" else f"proxy_{self.proxy_rule}"

    def check(self, parent: ModelConfig) -> ModelConfig:
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
        check_split(parent.moe.expert_dim, self.sub_experts, self.num_inactive)
        return child
