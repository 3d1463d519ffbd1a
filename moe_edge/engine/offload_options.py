"""The options of a run whose experts do not fit the device.

`OffloadOptions` is what a policy gin file (configs/policies/) sets; policies are named
here and nowhere else. From Python a class or an object takes the place of a name.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from moe_edge.core.checks import (
    ConfigError,
    check_count,
    check_known,
    check_positive,
)
from moe_edge.core.plug_in import is_object
from moe_edge.engine.fused_refusals import layered_only
from moe_edge.engine.refusals import Asked, refuse
from moe_edge.offload.assist_base import Assist, get_assist
from moe_edge.offload.budget import parse_budget
from moe_edge.offload.evict_base import (
    EVICTIONS,
    Eviction,
    check_needs,
    get_eviction,
)
from moe_edge.offload.link import EmulatedLink, TransferLink
from moe_edge.offload.slot_plan import plan_of
from moe_edge.predict.base import NEEDS as PREDICTOR_NEEDS
from moe_edge.predict.base import PREDICTORS, Predictor, get_predictor
from moe_edge.route.base import ROUTES, Route, get_route

# What a running engine can give a policy; the future and profiles it cannot.
AVAILABLE = frozenset({"ids", "weights", "scores"})
MODES = ("layered", "fused", "auto")
LAYER_IO = ("arrays", "packed", "direct")
HOMES = ("free", "fixed")
Options = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffloadOptions:
    """How experts that do not fit the device are handled.

    Its defaults are those of commands, gin files and Python alike. Studies name what
    their results were measured with (`bench/offloading.py`).
    """

    # A share of the experts' bytes (`25%`, 0.25), or a size (`2GiB`) that also holds
    # the dense weights, the KV cache and staging.
    device_memory: str | float = "50%"
    # `layered`, `fused`, or `auto`: fused on a GPU, where nothing else needs layered.
    mode: str = "auto"
    eviction: str | Eviction | type[Eviction] = "lru"
    eviction_options: Options = dataclasses.field(default_factory=dict)
    # `equal`, `one_pool`, ...; `auto`: equal where every layer gets two slots, else one
    # pool.
    slot_plan: str = "auto"
    slot_plan_options: Options = dataclasses.field(default_factory=dict)
    # Names experts to prefetch; `none`: no prefetching.
    predictor: str | Predictor | type[Predictor] = "none"
    predictor_options: Options = dataclasses.field(default_factory=dict)
    horizon: int = 1  # layers ahead that are prefetched
    prefetch_limit: int = 8  # most prefetches asked for after one layer's routing
    # `topk` is lossless; or `substitute` (SMoE), `drop`.
    route: str | Route | type[Route] = "topk"
    route_options: Options = dataclasses.field(default_factory=dict)
    # Says which absent experts the host computes; None: all of them travel.
    assist: str | Assist | type[Assist] | None = None
    assist_options: Options = dataclasses.field(default_factory=dict)
    # Of an emulated host, slower than this one: seconds for an expert.
    assist_expert_s: float | None = None
    # A recorded route trace, whose counts `static_oracle` keeps and `adapmoe_dp` plans
    # with.
    profile_trace: str | None = None
    memory: str = "host"  # where blocks live: also `pinned` (GPUs), `mmap` (disk)
    link_bytes_per_s: float | None = None  # of an emulated link; None: the real one
    link_latency_s: float = 0.0
    asynchronous: bool = True  # False: each transfer at once (the serial reference)
    # Of mode fused on a GPU: decode steps compute absent experts while they arrive
    # (engine/fused_zero_copy.py) instead of fetching them by a loop.
    zero_copy: bool = False
    # Of mode fused: what `predictor` names for the next layer travels while a layer
    # computes (engine/fused_prefetch.py). Needs slots of each layer's own.
    prefetch_in_fused: bool = False
    # Of mode fused: a prompt's next experts travel while others are computed
    # (engine/fused_turns.py).
    overlap_in_fused: bool = False
    # Of mode fused: `assist` splits absent experts of decode steps between the host and
    # the link (engine/fused_assist.py).
    assist_in_fused: bool = False
    # Lossy: the next layer adds what the host computed, which has a layer longer.
    assist_deferred: bool = False
    # How mode layered speaks to its programs on a GPU. `arrays`: small arrays;
    # `packed`: one array each way a layer, in pinned memory; `direct`: packed, and a
    # layer's absent experts are fetched from memory `pinned` by one program.
    layer_io: str = "arrays"
    # On several devices. `free`: an expert goes to the device whose link has the least
    # to carry for its layer; `fixed`: to one of its own, in turn, or by the counts of
    # `profile_trace`.
    homes: str = "free"

    def __post_init__(self):
        """Refuses what no model could run with.

        Raises:
          ConfigError: an unknown name, a rate <= 0, options that exclude each other.
        """
        parse_budget(self.device_memory)
        check_known("offload mode", self.mode, MODES)
        check_known("layer_io", self.layer_io, LAYER_IO)
        check_known("homes", self.homes, HOMES)
        self._check_eviction()
        self._check_predictor()
        if self.memory != "host":
            from moe_edge.offload.store import MEMORIES  # loads JAX

            check_known("expert memory", self.memory, MEMORIES)
        plan_of(self.slot_plan)
        get_route(self.route, **self.route_options)
        check_count("horizon", self.horizon)
        check_count("prefetch_limit", self.prefetch_limit)
        self.make_assist()
        if self.assist_expert_s is not None:
            check_positive("assist_expert_s", self.assist_expert_s)
            if self.assist is None:
                raise ConfigError(
                    f"assist_expert_s is {self.assist_expert_s} and assist not given; "
                    "name the rule by which the host computes experts"
                )
        self.link()
        refuse(Asked.of(self))

    @property
    def has_shadow(self) -> bool:
        """Whether the predictor is another engine."""
        return "shadow" in PREDICTORS.class_of(self.predictor).needs

    def choose_mode(self, backend: str, recorded: bool = False) -> str:
        """`layered` or `fused`.

        Args:
          backend: JAX's. On a GPU a step of layered waits for the host in every layer,
            which costs more than the transfers (docs/performance.md).
          recorded: whether a trace or events are wanted, which layered alone writes.
        """
        if self.mode != "auto":
            return self.mode
        kinds = EVICTIONS.class_of(self.eviction), ROUTES.class_of(self.route)
        host_only = any(kind.host_only for kind in kinds)
        needs_layered = recorded or layered_only(self) or host_only
        return "fused" if backend == "gpu" and not needs_layered else "layered"

    def _check_predictor(self) -> None:
        given, options = self.predictor, self.predictor_options
        kind = PREDICTORS.class_of(given)
        if wrong := sorted(kind.needs - PREDICTOR_NEEDS):
            raise ConfigError(
                f"predictor {kind.name} needs {', '.join(wrong)}, which nothing gives; "
                f"known: {', '.join(sorted(PREDICTOR_NEEDS))}"
            )
        PREDICTORS.check(given, options, kind.from_context)
        if not kind.from_context:  # the others need a model
            get_predictor(given, **options)

    def _check_eviction(self) -> None:
        given, options = self.eviction, self.eviction_options
        kind = EVICTIONS.class_of(given)
        if not is_object(given) and "profile" in kind.needs:
            if options.get("profile") is None:
                return  # it will come from the trace
        policy = get_eviction(given, **options)
        check_needs(policy, AVAILABLE | {"profile"})

    def make_assist(self) -> Assist | None:
        """What says which absent experts the host computes."""
        if self.assist is not None:
            return get_assist(self.assist, **self.assist_options)
        if self.assist_options:
            raise ConfigError(
                f"assist_options {', '.join(self.assist_options)} given and no assist; "
                "name one"
            )
        return None

    def link(self) -> TransferLink:
        """The link that these options describe."""
        if self.link_bytes_per_s is None:
            if self.link_latency_s:
                raise ConfigError(
                    f"link_latency_s is {self.link_latency_s} and link_bytes_per_s not "
                    "given; a link has a latency only together with a rate"
                )
            return TransferLink()
        return EmulatedLink(self.link_bytes_per_s, self.link_latency_s)

    @property
    def lossless(self) -> bool:
        """Whether the tokens are those of the resident engine."""
        route = get_route(self.route, **self.route_options)
        return route.lossless and not self.assist_deferred


def resolve_offload(
    device_memory: str | None, offload: OffloadOptions | None
) -> OffloadOptions | None:
    """The options of a script: a budget alone takes the default policies."""
    if device_memory is None:
        return offload
    return dataclasses.replace(offload or OffloadOptions(), device_memory=device_memory)
