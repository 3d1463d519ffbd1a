"""Which configurations a plan tries: all that the registries offer and no rule refuses.

What the user fixed is kept; a value that is refused then ends the plan, others are
listed with reason and remedy.
"""

import dataclasses
import itertools
import types
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from moe_edge.core.checks import ConfigError
from moe_edge.core.typed import changed
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.refusals import Asked, refusals
from moe_edge.model.config import ModelConfig
from moe_edge.offload.assist_base import ASSISTS
from moe_edge.offload.evict_base import EVICTIONS
from moe_edge.offload.slot_plan import PLANS
from moe_edge.planner.quality import Quality, Range, Refused
from moe_edge.predict.base import PREDICTORS, Predictor

IN_FUSED = ("assist_in_fused", "assist_deferred", "prefetch_in_fused")
NOT_REPLAYED = "measure it with moe_edge.compare, or fix nothing of it"


class Placed(NamedTuple):
    """A placement: the placer's name, GPUs and slots of each server, megabits a second
    between them, and where its files will be (a stem); None: nowhere."""

    method: str
    servers: Sequence[str]
    slots: Sequence[int]
    network: float
    path: str | None = None


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A configuration.

    Attributes:
      options: of the engine.
      k: experts a token; None: the model's own.
      expert_dtype: format that the experts are converted to; None: as they are.
      ppl_ratio, agreement: what it costs in fidelity; None: not known.
      placement: of blocks on several servers, and how it was found; None: one engine.
      weights: `mapped`: an engine that offloads nothing and whose experts stay in their
        files; None: the engine of `options`.
    """

    options: OffloadOptions
    k: int | None = None
    expert_dtype: str | None = None
    ppl_ratio: Range | None = (1.0, 1.0, 1.0)
    agreement: Range | None = (1.0, 1.0, 1.0)
    placement: Placed | None = None
    weights: str | None = None

    @property
    def changes(self) -> dict[str, Any]:
        """What differs from the defaults of an engine."""
        found = changed(self.options)
        if self.k is not None:
            found["k"] = self.k
        if self.expert_dtype is not None:
            found["expert_dtype"] = self.expert_dtype
        if self.weights is not None:
            found["weights"] = self.weights
        return found

    @property
    def lossless(self) -> bool:
        return self.options.lossless and self.k is None and self.expert_dtype is None


def parts_of(candidate: Candidate) -> dict[str, Any]:
    """What a configuration is, where it differs from the defaults, and its budget; of
    servers their slots stand for it."""
    budget = {"device_memory": candidate.options.device_memory}
    offloads = candidate.placement is None and candidate.weights is None
    return {
        "offload": budget | changed(candidate.options) if offloads else {},
        "weights": candidate.weights,
        "k": candidate.k,
        "expert_dtype": candidate.expert_dtype,
        "placement": candidate.placement and candidate.placement._asdict(),
    }


@dataclasses.dataclass(frozen=True)
class Space:
    """Values of each dimension, and what was refused.

    Attributes:
      base: the user's options; each value stands in place of one of its fields.
      values: dimension -> options of `OffloadOptions`, the base's own first.
    """

    base: OffloadOptions
    values: Mapping[str, Sequence[Mapping[str, Any]]]
    refused: Sequence[Refused]

    def candidate(self, quality: Quality, **chosen: Mapping[str, Any]) -> Candidate:
        """One of all; ConfigError where its parts do not go together."""
        fields: dict[str, Any] = {}
        for own in (*chosen.values(), quality.options):
            fields |= own
        options = dataclasses.replace(self.base, **fields)
        given = quality.k, quality.expert_dtype, quality.ppl_ratio, quality.agreement
        return Candidate(options, *given)

    def without(self, names: Collection[str], predicted: Collection[str]) -> "Space":
        """Without the predictors and assists that were not measured.

        Args:
          names: of those; predicted: predictors whose predictions are known.
        """
        values = dict(self.values)
        for kind in ("predictor", "assist"):
            first, *others = values[kind]
            kept = [own for own in others if own[kind] not in names]
            if kind == "predictor":
                kept = [own for own in kept if own[kind] in (*predicted, "none")]
            values[kind] = [first, *kept]
        return dataclasses.replace(self, values=values)

    def all(self, *dimensions: str) -> Iterable[dict[str, Mapping[str, Any]]]:
        """Every combination of the values of some dimensions."""
        lists = [self.values[name] for name in dimensions]
        for combined in itertools.product(*lists):
            yield dict(zip(dimensions, combined, strict=True))


def space_of(
    base: OffloadOptions,
    fixed: frozenset[str],
    config: ModelConfig,
    refused: Sequence[Refused] = (),
    budgets: Sequence[str | float] = (),
    joining: bool = False,
) -> Space:
    """All values that go with the base, one dimension at a time.

    Args:
      fixed: fields of `OffloadOptions` that keep the base's value.
      budgets: that are tried; none: the base's alone.
      joining: rows join and leave.
    """
    found, budgets = list(refused), budgets or (base.device_memory,)
    kinds = {
        "eviction": EVICTIONS,
        "predictor": PREDICTORS,
        "assist": {None: None, **ASSISTS},
        "slot_plan": {"auto": None, **PLANS},
        "mode": {"auto": None, "layered": None, "fused": None},
    }
    values: dict[str, list] = {}
    for name, known in kinds.items():
        own = getattr(base, name)
        values[name] = [{name: own}]
        if name in fixed:
            continue
        for other in known:
            if other == own:
                continue
            wrong = fault(base, {name: other}, config, joining)
            wrong = wrong or refused_value(name, other)
            if wrong is None:
                values[name].append({name: other})
            else:
                found.append(wrong)
    values["device_memory"] = [{"device_memory": each} for each in budgets]
    return Space(base, values, found)


def fault(
    base: OffloadOptions, change: Mapping[str, Any], config: ModelConfig, joining: bool
) -> Refused | None:
    """Why a value does not go with the base; None: it does."""
    what = " ".join(f"{name} {value}" for name, value in change.items())
    fields = {f.name: getattr(base, f.name) for f in dataclasses.fields(base)}
    for name in change:  # options of another policy are none of this one's
        if f"{name}_options" in fields:
            fields[f"{name}_options"] = {}
    asked = Asked.of(
        types.SimpleNamespace(**fields | dict(change)), model=config, has_rows=joining
    )
    for refusal in refusals(asked):
        return Refused(what, refusal.reason, refusal.remedy)
    try:
        OffloadOptions(**fields | dict(change))
    except ConfigError as error:
        return Refused.by(what, error)
    return None


def refused_value(name: str, value: Any) -> Refused | None:
    """Why a value that would run is not estimated."""
    what = f"{name} {value}"
    if (name == "mode" and value == "fused") or (name == "overlap_in_fused" and value):
        reason = "mode fused decides on the device, which replay does not time"
        return Refused(what, reason, NOT_REPLAYED)
    if name in IN_FUSED and value:
        reason = "plans try it by themselves, of assists on a described GPU alone"
        return Refused(what, reason, NOT_REPLAYED)
    if name == "predictor":
        kind = PREDICTORS.class_of(value)
        if kind.companion is not Predictor.companion:
            reason = "an engine of its own runs ahead, which replay does not time"
            return Refused(what, reason, NOT_REPLAYED)
    if name == "slot_plan" and value == "planned":
        reason = "its numbers are the user's"
        return Refused(what, reason, "fix slot_plan and slot_plan_options")
    return None
