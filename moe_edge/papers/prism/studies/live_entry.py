"""What the entries of live servers have in common."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from moe_edge.convert.open import DEFAULT_MODEL, open_checkpoint
from moe_edge.convert.rules import hf_shapes
from moe_edge.metrics.frames import Rows
from moe_edge.papers.prism.studies.live_seeds import LiveServers

ON_TIME = "nothing is compiled after warm-up"


def tell(
    rows: Rows,
    settings: LiveServers,
    facts: Sequence[Mapping[str, Any]],
    more: Mapping[str, Any] | None = None,
) -> None:
    """What is said of live runs.

    Args:
      settings: of the study; all its fields are told.
      facts: of every run, its cluster.json.
      more: of the workload.
    """
    shapes = hf_shapes(open_checkpoint(DEFAULT_MODEL).config)
    link = "loopback" if settings.link_mbps is None else "tc on veth links"
    told = {"processors": facts[0]["processors"], "network": link}
    params = sum(map(math.prod, shapes.values()))
    weights = "toy trained here"
    rows.about |= {
        "model": {"name": "default", "params": params, "weights": weights},
        "workload": settings.told() | told | dict(more or {}),
        "kind": "measured" if settings.link_mbps is None else "emulated",
        "seeds": settings.all_seeds,
    }
    rows.checks[ON_TIME] = not any(each["compiled_after_warmup"] for each in facts)


def same_tokens(facts: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    """The check that methods change where blocks are computed, not what."""
    return {"all methods give the same tokens": all(f["same_tokens"] for f in facts)}
