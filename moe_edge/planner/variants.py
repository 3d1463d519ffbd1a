"""The checkpoint in other formats and at other K, measured for a plan."""

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from moe_edge.convert.convert import convert_checkpoint
from moe_edge.core.checks import MoeEdgeError
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.planner.calibrate import NONE, Protocol, calibrate
from moe_edge.planner.candidates import Refused
from moe_edge.planner.costs import ModelCosts
from moe_edge.planner.estimate import Subject
from moe_edge.planner.live import Live
from moe_edge.planner.quality import Quality

LARGE_BYTES = 2 << 30  # of expert records, which a plan does not convert by itself
Variant = tuple[int | None, str | None]  # k, expert_dtype


@contextlib.contextmanager
def variants(
    checkpoint: str,
    own: Subject,
    base: OffloadOptions,
    qualities: Sequence[Quality],
    protocol: Protocol,
    context: int,
) -> Iterator[tuple[dict[Variant, Subject], list[Refused]]]:
    """Subjects of all formats and K that qualities name, the checkpoint's own first.

    Converted checkpoints last as long as the block.

    Args:
      own: the checkpoint as it is, calibrated.
      base: the user's options.
      context: tokens of a row.
    """
    found: dict[Variant, Subject] = {(None, None): own}
    refused = []
    with tempfile.TemporaryDirectory() as temporary:
        for quality in qualities:
            key = quality.k, quality.expert_dtype
            if key in found:
                continue
            try:
                path = _converted(checkpoint, own, quality.expert_dtype, temporary)
                cache = own.live.config.cache_type
                room = own.live.batch, context, cache
                live = Live(path, quality.k, *room, base.memory)
                recorded = own.recorded.at_k(quality.k)
                plain = dataclasses.replace(base, predictor=NONE, predictor_options={})
                given = plain, {}, (), protocol, recorded
                costs = calibrate(live, *given).costs
            except MoeEdgeError as error:
                refused.append(Refused.by(quality.label, error))
                continue
            found[key] = Subject(live, with_predictors(costs, own.costs), recorded)
        yield found, refused


def _converted(
    checkpoint: str, own: Subject, expert_dtype: str | None, folder: str
) -> str:
    """A checkpoint with its experts in a format.

    Raises:
      MoeEdgeError: experts that are too large to convert on the way, or that have no
        whole blocks.
    """
    if expert_dtype is None:
        return checkpoint
    config = own.live.config
    blocks = len(config.moe_layers) * config.moe.num_experts
    num_bytes = blocks * own.live.block_bytes
    if num_bytes > LARGE_BYTES:
        raise MoeEdgeError(
            f"the experts have {num_bytes} bytes, which a plan does not convert to "
            f"{expert_dtype} on its way; convert them (moe-edge convert "
            f"--expert_dtype {expert_dtype}) and plan that checkpoint"
        )
    path = Path(folder) / expert_dtype
    if not path.exists():
        options = {"expert_dtype": expert_dtype, "progress": False}
        convert_checkpoint(checkpoint, path, **options)
    return str(path)


def with_predictors(costs: ModelCosts, own: ModelCosts) -> ModelCosts:
    """Costs that were measured without predictors, with what these add to the model as
    it is."""
    more_s = {
        name: costs.layered_s + max(0.0, s - own.layered_s)
        for name, s in own.per_predictor_s.items()
    }
    host_s: Mapping = {**own.miss_host_s, **costs.miss_host_s}
    return dataclasses.replace(
        costs,
        per_predictor_s={**more_s, NONE: costs.layered_s},
        miss_host_s=host_s,
        assist_s=own.assist_s,
        noise=max(costs.noise, own.noise),
    )
