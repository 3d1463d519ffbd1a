"""CPU assist of mode fused on a described GPU: which there is, and computed costs.

Nothing of it was timed on a GPU. Of the host's memory no machine file says anything,
so its rate is assumed.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from moe_edge.engine.fused_assist import split_table
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.hardware import presets
from moe_edge.offload.assist_base import ASSISTS, AssistCosts, get_assist
from moe_edge.planner.calibrate import absent_costs
from moe_edge.planner.candidates import NOT_REPLAYED, Space, fault
from moe_edge.planner.costs import assist_key
from moe_edge.planner.quality import Refused
from moe_edge.predict.base import PREDICTORS

HOST_BYTES_PER_S = 40e9  # two channels of DDR4-3200 have 51 GB/s at most
NOTE = (
    "what CPU assist of mode fused takes is computed, by the link and a host that is "
    f"assumed to read experts at {HOST_BYTES_PER_S / 1e9:g} GB/s and to take "
    f"{presets.CALL_S * 1e6:g} us for a layer more; it was never timed on a GPU"
)


def with_fused(space: Space, fixed: frozenset[str], config, joining: bool) -> Space:
    """A space whose assists are those of mode fused; predictors that it could run are
    refused, for no file keeps what they say.

    Args:
      fixed: fields that keep the base's value; config: of the model; joining: whether
        rows join and leave.
    """
    first, *_ = space.values["assist"]
    helped: list[Mapping[str, Any]] = []
    alone = "assist ", "mode fused"  # refusals of other plans
    refused = [r for r in space.refused if not r.what.startswith(alone)]
    for name in ASSISTS if not {"assist", "mode"} & fixed else ():
        own = {"assist": name, "assist_in_fused": True, "mode": "fused"}
        wrong = fault(space.base, own, config, joining)
        if wrong is None:
            helped.append(own)
        else:
            refused.append(wrong)
    for name in PREDICTORS if not {"predictor", "mode"} & fixed else ():
        own = {"predictor": name, "prefetch_in_fused": True, "mode": "fused"}
        if fault(space.base, own, config, joining) is None:
            reason = "it reads hidden states, so no trace says what it names"
            what = f"predictor {name} prefetch_in_fused True mode fused"
            refused.append(Refused(what, reason, NOT_REPLAYED))
    values = {**space.values, "assist": [first, *helped]}
    del values["mode"]  # the assist says it, and the base
    return Space(space.base, values, refused)


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
