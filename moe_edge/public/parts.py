"""What the engines of one checkpoint share: weights, expert records, programs."""

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from moe_edge.checkpoint.reader import CheckpointReader
from moe_edge.core.events import Recorder
from moe_edge.engine.devices import DeviceOptions, homes_for, mesh_for
from moe_edge.engine.load import allow_pinned, check_backend, check_weights
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.sizes import reserved_tokens

if TYPE_CHECKING:
    import jax

    from moe_edge.engine.base import Engine
    from moe_edge.engine.mesh import DeviceMesh
    from moe_edge.engine.weights import Weights
    from moe_edge.offload.store import HostStore


class SharedParts:
    """Made when an engine first needs them.

    That is dense weights on the device, expert records on the host (pinned once), and
    compiled programs.

    Args:
      reader: the open checkpoint.
      devices, weights: as given to `load`, checked.
    """

    def __init__(self, reader: Any, devices: int | str | None, weights: str = "copied"):
        self._reader, self._devices, self._weights = reader, devices, weights
        self._stores: dict[str, HostStore] = {}
        self._resident: Callable[[], Weights | None] = lambda: None
        self._programs: dict[str, Any] = {}  # of engines, by mode

    @functools.cached_property
    def mesh(self) -> "DeviceMesh | None":
        """Of resident engines; None: they run on one device."""
        return mesh_for(self._reader, self._devices, None)

    @functools.cached_property
    def homes(self) -> "tuple[jax.Device, ...]":
        """Of offloaded engines, where experts have homes on several devices."""
        return homes_for(self._reader, self._devices)

    def resident(self, split_attention: bool) -> "Engine":
        """An engine with all weights on the device, or on several."""
        from moe_edge.engine.resident import ResidentEngine
        from moe_edge.engine.weights import load_weights

        check_backend(self._reader.config)
        weights = self._resident()  # of another resident engine that still lives
        check, programs = self._check_finite, self._programs.get("resident")
        shared = DeviceOptions(devices=self._devices, split_attention=split_attention)
        mesh = shared.mesh(self._reader, None) if split_attention else self.mesh
        check_weights(self._weights, self._reader, None, mesh)
        if mesh is not None and split_attention:
            from moe_edge.engine.split_attention import make_sharded

            return make_sharded(self._reader, mesh, shared, check_finite=check)
        if mesh is not None:
            from moe_edge.engine.sharded import ShardedEngine, load_sharded

            weights = weights or load_sharded(self._reader, mesh, check)
            engine: Engine = ShardedEngine(weights, mesh, programs=programs)
        else:
            weights = weights or load_weights(
                self._reader,
                check_finite=check,
                dense=self._dense,
                mapped=self._weights == "mapped",
            )
            engine = ResidentEngine(weights, programs=programs)
        self._resident = weakref.ref(weights)
        self._programs["resident"] = engine.programs
        return engine

    def offloaded(
        self,
        options: OffloadOptions,
        max_batch: int,
        max_context: int | None,
        with_trace: bool,
        recorder: Recorder,
    ) -> "Engine":
        """An engine whose experts live on the host."""
        allow_pinned(self._reader, options)
        from moe_edge.engine.layered import LayeredEngine
        from moe_edge.engine.offloaded import (
            assemble,
            check_offload,
            is_recorded,
        )

        check_backend(self._reader.config)
        capacity = reserved_tokens(max_context)
        recorded = is_recorded(recorder, with_trace)
        given = max_batch, capacity, recorded, self.homes
        context = check_offload(self._reader, options, *given)
        core = assemble(
            options,
            self._dense,
            self._store(options.memory),
            context=context,
            batch=max_batch,
            capacity=capacity,
            recorder=recorder,
            with_trace=with_trace,
            programs=self._programs.get("layered"),
            devices=self.homes,
        )
        if isinstance(core, LayeredEngine):
            self._programs["layered"] = core.programs
        return core

    @property
    def _check_finite(self) -> bool:
        # Conversion has checked our own format already.
        return not isinstance(self._reader, CheckpointReader)

    @functools.cached_property
    def _dense(self) -> "Weights":
        """All weights but the experts, on the device."""
        from moe_edge.engine.weights import load_weights

        return load_weights(
            self._reader, check_finite=self._check_finite, with_experts=False
        )

    @property
    def has_records(self) -> bool:
        """Whether the host holds expert records already."""
        return bool(self._stores)

    def _store(self, memory: str) -> "HostStore":
        from moe_edge.offload.store import HostStore

        if memory not in self._stores:
            self._stores[memory] = HostStore(self._reader, memory)
        return self._stores[memory]
