"""The resident engine on several devices: each holds and computes its share of experts.

Everything but the routed experts is on every device, and computed by all of them: the
same programs as on one, but for `run_sharded` in place of `run_experts`. Tokens have
the same bits.
"""

import functools
from typing import Any

import jax
import numpy as np

from moe_edge.engine.mesh import DeviceMesh
from moe_edge.engine.programs import TopPrograms
from moe_edge.engine.replicas import with_replicas
from moe_edge.engine.resident import ResidentEngine, ResidentPrograms
from moe_edge.engine.sharded_experts import (
    counted_places,
    even_places,
    put_experts,
    run_sharded,
)
from moe_edge.engine.weights import Weights, kept, load_weights
from moe_edge.model import kv_cache
from moe_edge.model.config import ModelConfig
from moe_edge.model.record import RecordLayout


class ShardedPrograms(ResidentPrograms):
    """Those of a resident engine on the devices of a mesh; options: of `Programs`."""

    def __init__(
        self,
        config: ModelConfig,
        mesh: DeviceMesh,
        top: TopPrograms | None = None,
        **options,
    ):
        super().__init__(config, top, **options)
        self.run_experts = functools.partial(
            run_sharded,
            mesh=mesh,
            layout=RecordLayout.of(config),
            activation=config.moe.activation,
            swiglu_limit=config.moe.swiglu_limit,
        )


class ShardedEngine(ResidentEngine):
    """Runs a model whose experts all fit the devices of a mesh together.

    Args:
      weights: of `load_sharded`, on the same mesh.
      **options: of `ResidentEngine`.
    """

    def __init__(self, weights: Weights, mesh: DeviceMesh, *, programs=None, **options):
        self.mesh = mesh
        programs = programs or self._new_programs(weights.config)
        super().__init__(weights, programs=programs, **options)

    def _new_programs(self, config, top=None) -> ShardedPrograms:
        return ShardedPrograms(config, self.mesh, top)

    def _sibling(self, weights):
        programs = self._new_programs(weights.config, self.programs.top)
        given = {"layers_per_program": self.layers_per_program}
        return type(self)(weights, self.mesh, programs=programs, **given)

    def put(self, tree):
        return self.mesh.put(tree)

    def new_cache(self, layer, batch, capacity):
        attention = self.config.attention_of(layer)
        return kv_cache.empty_cache(attention, batch, capacity, self.mesh.whole)

    def new_caches(self, batch, capacity):
        return kv_cache.empty_caches(self.config, batch, capacity, self.mesh.whole)

    def device_bytes(self):
        """As `Engine.device_bytes`, of each device: all hold as much."""
        weights = self.weights
        arrays = jax.tree.leaves((weights.top, weights.layers, weights.experts))
        return sum(array.addressable_shards[0].data.nbytes for array in arrays)


def load_sharded(
    reader,
    mesh: DeviceMesh,
    check_finite: bool = False,
    counts_LE: np.ndarray | None = None,
    replicas: int = 0,
) -> Weights:
    """A model's weights on a mesh: experts' records cut, all others whole.

    Of several processes each reads the records of its own devices alone.

    Args:
      counts_LE: uses of every expert, by which devices get about equally many; None:
        neighbours stand together.
      replicas: with counts, R slots more of every device and layer, for copies of the
        most used experts, which also take the slots that others leave; 0: no copies.
      reader, check_finite: as of `load_weights`.
    Raises: as `load_weights`.
    """

    def put_whole(array: np.ndarray) -> jax.Array:
        return mesh.put(np.array(kept(array)))  # a copy, never a view of a file

    experts = reader.config.moe.num_experts
    even_NS, own = even_places(experts, mesh.size), range(experts)
    if counts_LE is None:
        own = _own_experts(mesh, even_NS, experts)

    def put_records(layer: int, records: np.ndarray):
        expert_NS = even_NS
        if counts_LE is not None:
            expert_NS = counted_places(counts_LE[layer], mesh.size)
            if replicas:
                expert_NS = with_replicas(expert_NS, counts_LE[layer], replicas)
        return put_experts(mesh, kept(records), expert_NS, own.start, experts)

    given: dict[str, Any] = {"check_finite": check_finite}
    if len(own) < experts:
        given["own_experts"] = own
    return load_weights(reader, put_whole, put_experts=put_records, **given)


def _own_experts(mesh: DeviceMesh, expert_NS: np.ndarray, experts: int) -> range:
    """Those on devices of this process, neighbours; of one process alone all."""
    held = expert_NS[mesh.own.start : mesh.own.stop]
    held = held[held < experts]
    return range(int(held.min()), int(held.max()) + 1) if held.size else range(0)
