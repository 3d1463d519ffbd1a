"""Device memory that an offloaded engine takes next to its slots, before it is loaded.

One computation for whoever checks a budget (`offloaded.check_offload`, --dry_run) and
for the engine itself (`offloaded.assemble`), so that both name the same minimum.
"""

import dataclasses

import jax

from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.session import cache_bytes
from moe_edge.engine.weights import Weights
from moe_edge.offload.indexed_slots import IndexedSlots
from moe_edge.offload.slot_plan import least_slots
from moe_edge.offload.slots import DonatedSlots
from moe_edge.predict.base import get_predictor


@dataclasses.dataclass(frozen=True)
class DeviceNeeds:
    """Bytes of the device that are no slots, and the fewest slots.

    Attributes:
      dense: weights but the routed experts.
      cache: keys and values of `rows` sequences of `tokens` tokens.
      staging: records that wait next to the slots (not on a CPU).
      shadow: of a predictor that is an engine itself: weights and cache.
      least_slots: that the slot plan can share out.
    """

    dense: int
    cache: int
    staging: int
    shadow: int
    rows: int
    tokens: int
    least_slots: int

    @property
    def other_bytes(self) -> int:
        """All but the slots."""
        return self.dense + self.cache + self.staging + self.shadow

    def __str__(self) -> str:
        parts = [f"dense weights {self.dense}"]
        batch = "1 row" if self.rows == 1 else f"{self.rows} rows"
        parts.append(f"KV cache {self.cache} for {batch} of {self.tokens} tokens")
        if self.staging:
            parts.append(f"staging {self.staging}")
        if self.shadow:
            parts.append(f"shadow {self.shadow}")
        return ", ".join(parts)


def device_needs(
    options: OffloadOptions,
    weights: Weights,
    records: jax.ShapeDtypeStruct,
    batch: int = 1,
    capacity: int | None = None,
    backend: str | None = None,
) -> DeviceNeeds:
    """What an engine needs on the device.

    Args:
      weights: dense ones, or their shapes (`weights.weight_shapes`).
      records: shape `[E, R]` and dtype of a layer's experts as programs take them.
      batch, capacity: sequences and tokens for whose KV cache an absolute budget
        leaves room; no more tokens than the model's context, which None stands for.
      backend: of the device; None: JAX's here.
    """
    config = weights.config
    tokens = min(capacity or config.max_positions, config.max_positions)
    cache = cache_bytes(config, batch, tokens)
    kind = DonatedSlots if options.layer_io == "arrays" else IndexedSlots
    is_host = (backend or jax.default_backend()) == "cpu"
    staged = 0 if is_host else kind.max_staged + 1
    shadow = 0
    if options.has_shadow:
        predictor = get_predictor(options.predictor, **options.predictor_options)
        shadow = cache + predictor.companion_bytes(weights, records)
    return DeviceNeeds(
        dense=weights.num_bytes,
        cache=cache,
        staging=staged * records.shape[1] * records.dtype.itemsize,
        shadow=shadow,
        rows=batch,
        tokens=tokens,
        least_slots=least_slots(
            options.slot_plan,
            config.moe.num_experts,
            len(config.moe_layers),
            options.slot_plan_options,
        ),
    )
