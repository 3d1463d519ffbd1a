"""CPU assist of mode fused on a described GPU: which there is, and computed costs.

Nothing of it was timed on a GPU. Of the host's memory no machine file says anything,
so its rate is assumed.
"""

import numpy as np

from moe_edge.core.checks import ConfigError
from moe_edge.engine.fused_assist import split_table
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.hardware import presets
from moe_edge.kernels import native
from moe_edge.model.experts import choose_method
from moe_edge.offload.assist_base import ASSISTS, AssistCosts, get_assist
from moe_edge.planner.calibrate import absent_costs
from moe_edge.planner.candidates import NOT_REPLAYED, Space, fault
from moe_edge.planner.costs import assist_key
from moe_edge.planner.described import Described
from moe_edge.planner.quality import Refused
from moe_edge.predict.base import PREDICTORS

HOST_BYTES_PER_S = 40e9  # two channels of DDR4-3200 have 51 GB/s at most
NOTE = (
    "what CPU assist of mode fused takes is computed, by the link and a host that is "
    f"assumed to read experts at {HOST_BYTES_PER_S / 1e9:g} GB/s and to take "
    f"{presets.CALL_S * 1e6:g} us for a layer more; it was never timed on a GPU"
)
LATE_NOTE = (
    "how many experts two_pointer and fiddler give to the host follows costs of the "
    "machine, and a card of deferral is of the machine that measured it"
)


def with_fused(
    space: Space, fixed: frozenset[str], live: Described, joining: bool
) -> Space:
    """A space whose assists are those of mode fused; predictors that it could run are
    refused, for no file keeps what they say.

    Args:
      fixed: fields that keep the base's value, a fixed assist in mode fused.
      live: the model on that GPU; joining: whether rows join and leave.
    Raises:
      ConfigError: an assist is fixed, and there is no such help.
    """
    first, *_ = space.values["assist"]
    alone = "assist ", "mode fused"  # refusals of other plans
    refused = [r for r in space.refused if not r.what.startswith(alone)]
    wrong, helped = _unhelped(fixed, live), []
    names = [space.base.assist] if "assist" in fixed else [*ASSISTS]
    for name in filter(None, names if wrong is None else ()):
        own = {"assist": name, "assist_in_fused": True, "mode": "fused"}
        found = fault(space.base, own, live.config, joining)
        if found is None:
            helped.append(own)
        else:
            refused.append(found)
    if wrong is not None:
        refused.append(wrong)
    if "assist" in fixed and space.base.assist is not None:
        if not helped:
            raise ConfigError(
                f"assist {space.base.assist} is fixed: {refused[-1].reason}; "
                f"{refused[-1].remedy}"
            )
        first, *helped = helped
    for name in PREDICTORS if not {"predictor", "mode"} & fixed else ():
        own = {"predictor": name, "prefetch_in_fused": True, "mode": "fused"}
        if fault(space.base, own, live.config, joining) is None:
            reason = "it reads hidden states, so no trace says what it names"
            what = f"predictor {name} prefetch_in_fused True mode fused"
            refused.append(Refused(what, reason, NOT_REPLAYED))
    values = {**space.values, "assist": [first, *helped]}
    del values["mode"]  # the assist says it, and the base
    return Space(space.base, values, refused)


def _unhelped(fixed: frozenset[str], live: Described) -> Refused | None:
    """Why the host computes nothing, whichever the assist."""
    if "mode" in fixed:
        reason = "the mode is fixed, and of a described GPU only help in fused is known"
        return Refused("CPU assist", reason, "leave mode free")
    if not is_helped(live):
        reason = f"the host helps no steps of {live.batch} rows of such experts"
        return Refused("CPU assist", reason, "plan for a smaller --batch")
    return None


def is_helped(live: Described) -> bool:
    """Whether the host helps decode steps of so many rows on a GPU
    (`FusedAssist.suits`)."""
    method = choose_method(live.batch, live.dtype, "gpu", live.layout.kind)
    return method == "pairs" and live.batch <= native.MAX_ROWS


def helped_costs(
    load_s: float, block_bytes: int, layer_s: float, most: int
) -> dict[str, tuple[float, ...]]:
    """`ModelCosts.assist_s` of the assists that mode fused has, deferred ones too.

    The link and the host work side by side; what is deferred has a layer's time more.

    Args:
      load_s: to transfer an expert.
      layer_s: of a layer of a decode step, experts there.
      most: absent experts of a layer.
    """
    host_s, found = block_bytes / HOST_BYTES_PER_S, {}
    seen, absent_N = AssistCosts(load_s, host_s, 0.0), np.arange(1, most + 1)
    for name, kind in ASSISTS.items():
        if not kind.takes_last:
            continue
        on_host_N = np.array(split_table(get_assist(name), seen, most)[1:])
        own = {"assist": name, "assist_in_fused": True, "mode": "fused"}
        for late, spare_s in ((False, 0.0), (True, layer_s)):
            key = assist_key(OffloadOptions(**own, assist_deferred=late))
            host_N = (on_host_N > 0) * presets.CALL_S + on_host_N * host_s - spare_s
            more_N = np.maximum((absent_N - on_host_N) * load_s, host_N)
            fitted = absent_costs(np.stack([np.ones(most), absent_N], axis=1), more_N)
            found[key] = (load_s, *fitted, *seen)
    return found
