"""What a machine was measured to need for a model: the numbers of a calibration."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moe_edge.core.checks import ConfigError, check_shape
from moe_edge.core.typed import built
from moe_edge.offload.link import EmulatedLink
from moe_edge.simulate.replay.timed import CostModel


def assist_key(options) -> str:
    """What costs of an assist are kept under: its name, and how mode fused has it."""
    key = options.assist + " in fused" * options.assist_in_fused
    return key + ", deferred" * options.assist_deferred


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelCosts:
    """Seconds of the layered engine for one checkpoint at one K and batch.

    Attributes:
      batch: rows that decode together.
      layered_s: of a decode step whose experts are all here, without a predictor.
      layer_share: of such a step, what its layers with experts take.
      per_predictor_s: likewise with each predictor.
      miss_host_s: by predictor: (seconds of a transfer, seconds that a transferred
        block costs beyond replay), a point a link that was measured, the fastest first.
      assist_s: by `assist_key`: (seconds of a transfer, of a layer in which experts are
        absent, of each of these, and what its rule saw: seconds to load one, to compute
        it on the host and on the device).
      copy_s: of a transfer over this machine's own link.
      prefill_s: prompt tokens -> batch -> seconds to the first token, experts here.
      prefill_block_s: (seconds of a transfer, seconds of a prompt's block) a link.
      block_bytes: of an expert; dense_bytes: of all other weights.
      noise: standard deviation of measured over computed time of a batch's run.
      resident_s: of a decode step of the resident engine; None: not measured.
      temperature: of the tokens that were decoded.
      steps: decode steps behind the numbers.
    """

    batch: int
    layered_s: float
    layer_share: float
    per_predictor_s: Mapping[str, float]
    miss_host_s: Mapping[str, Sequence[Sequence[float]]]
    copy_s: float
    prefill_s: Mapping[str, Mapping[str, float]]
    prefill_block_s: Sequence[Sequence[float]]
    block_bytes: int
    dense_bytes: int
    noise: float
    temperature: float
    steps: int
    assist_s: Mapping[str, Sequence[float]] = dataclasses.field(default_factory=dict)
    resident_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def of_json(cls, where: str, stored: Any) -> "ModelCosts":
        """ConfigError where a machine file holds something else."""
        try:
            costs = built(where, cls, stored)
            for name, known in costs.assist_s.items():
                check_shape(f"{where}: assist_s.{name}", np.array(known), (6,))
            return costs
        except ConfigError as error:
            raise ConfigError(
                f"{error}; measure again (leave --machine out, or its models)"
            ) from error

    def link(self, options) -> EmulatedLink:
        """The link of options; this machine's own as one that copies at its rate."""
        return link_of(options, self.block_bytes / self.copy_s)

    def step_costs(
        self, predictor: str, link: EmulatedLink, block_bytes: int, moe_layers: int
    ) -> CostModel:
        """Costs of a replay, before what transfers cost the host.

        Only the sum of a layer's experts and the next one's routing matters: nothing
        happens on the host between them.
        """
        hit_s = self.per_predictor_s[predictor]
        half_s = hit_s * self.layer_share / moe_layers / 2
        return CostModel(
            half_s, half_s, block_bytes, link, (1 - self.layer_share) * hit_s
        )

    def assisted_s(self, options, absent_S2: np.ndarray) -> np.ndarray:
        """float64 [S]: seconds of steps with a CPU assist, measured as a whole.

        Args:
          absent_S2: layers in which experts are absent, and how many (`TimedResult`).
        """
        more_s = absent_S2 @ self.assist_s[assist_key(options)][1:3]
        return self.per_predictor_s["none"] + more_s

    def block_host_s(self, predictor: str, load_s: float) -> float:
        """What a block costs the host beyond replay: linear between measured links."""
        return between(self.miss_host_s[predictor], load_s)


def link_of(options, bytes_per_s: float, latency_s: float = 0.0) -> EmulatedLink:
    """The link that options emulate, or a machine's own of this rate and latency."""
    if options.link_bytes_per_s is not None:
        bytes_per_s, latency_s = options.link_bytes_per_s, options.link_latency_s
    return EmulatedLink(bytes_per_s, latency_s)


def between(points: Sequence[Sequence[float]], at: float) -> float:
    """Linear between points of rising x, level outside."""
    known = sorted(map(tuple, points))
    return float(np.interp(at, *zip(*known, strict=True))) if known else 0.0
