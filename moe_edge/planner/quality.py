"""What lossy choices cost: routes, formats and K of measured fidelity cards."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moe_edge.core.checks import ConfigError
from moe_edge.core.files import check_there
from moe_edge.core.json_reader import LARGE_FILE_BYTES, read_json
from moe_edge.model.quantised import KINDS
from moe_edge.offload.budget import parse_budget
from moe_edge.route.base import ROUTES

Range = tuple[float, float, float]  # low, middle, high
ONE: Range = (1.0, 1.0, 1.0)
DEFERRED = "assist_deferred"  # an option of a card
NOT_DESCRIBED = "leave mode and assist free, and name a GPU with --machine and --trace"
_HALF = re.compile(r"(\d+) of (\d+) experts")
_FORMAT = re.compile(r"experts in (\w+)")


class Refused(NamedTuple):
    """What is not among the candidates, and why."""

    what: str
    reason: str
    remedy: str

    @classmethod
    def by(cls, what: str, error: Exception) -> "Refused":
        """Of an error, whose last part says what to do."""
        reason, _, remedy = str(error).rpartition("; ")
        return cls(what, reason or remedy, remedy)


@dataclasses.dataclass(frozen=True)
class Quality:
    """A lossy choice, or the lossless one, and what it costs.

    Attributes:
      options: of `OffloadOptions` (its route); k, expert_dtype: of the model.
      ppl_ratio, agreement: against the unmodified model.
    """

    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    k: int | None = None
    expert_dtype: str | None = None
    ppl_ratio: Range | None = ONE
    agreement: Range | None = ONE

    @property
    def label(self) -> str:
        parts = []
        if "route" in self.options:
            given = self.options["route_options"]
            own = ", ".join(f"{n}={v}" for n, v in given.items())
            parts.append(f"route {self.options['route']} ({own})")
        if "assist_deferred" in self.options:
            parts.append(f"deferred assist {self.options['assist']}")
        if self.k is not None:
            parts.append(f"k {self.k}")
        if self.expert_dtype is not None:
            parts.append(f"experts in {self.expert_dtype}")
        return ", ".join(parts) or "lossless"

    def beside(self, other: "Quality") -> "Quality":
        """Both: ratios and agreements multiply, as if they were independent."""
        return Quality(
            {**self.options, **other.options},
            self.k if other.k is None else other.k,
            other.expert_dtype or self.expert_dtype,
            _times(self.ppl_ratio, other.ppl_ratio),
            _times(self.agreement, other.agreement),
        )


def _times(one: Range | None, other: Range | None) -> Range | None:
    if one is None or other is None:
        return None
    return tuple(a * b for a, b in zip(one, other, strict=True))


def read_card(path: str, checkpoint: str, share: float | None) -> list[Quality]:
    """The lossy choices of a card.

    Args:
      path: cards.json of `moe-edge fidelity`, or its folder.
      checkpoint: that is planned.
      share: of the experts' bytes on the device; None: not known. Of a route the rows
        of the nearest budget count.
    Raises:
      ConfigError: no card, or one of another checkpoint.
    """
    given = Path(path)
    file = given / "cards.json" if given.is_dir() else given
    check_there(file, "--card", "moe-edge fidelity writes it")
    rows = read_json(file, max_bytes=LARGE_FILE_BYTES)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(
            f"{file} is no fidelity card, expected the cards.json of moe-edge fidelity"
        )
    _check_model(file, checkpoint)
    found = []
    for row in _nearest(rows, share):
        try:
            quality = _quality(row)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{file} is no fidelity card ({error!r}); moe-edge fidelity writes them"
            ) from error
        if quality is not None and quality not in found:
            found.append(quality)
    return found


def _check_model(file: Path, checkpoint: str) -> None:
    entry = file.with_name("result.json")
    if not entry.is_file():
        return
    model = read_json(entry, strict=False).get("model") or {}
    name = str(model.get("name"))
    if Path(name).name != Path(checkpoint).name:
        raise ConfigError(
            f"card {file} is of checkpoint {name!r}, the plan is for {checkpoint!r}; "
            "measure that one (moe-edge fidelity)"
        )


def _nearest(rows: Sequence[Mapping[str, Any]], share: float | None):
    """The rows of batch 1 (or the least) without a budget, or of the nearest one."""
    least = min((row.get("batch", 1) for row in rows), default=1)
    rows = [row for row in rows if row.get("batch", 1) == least]
    shares = {}
    for row in rows:
        if "device_memory" in row:
            own = parse_budget(row["device_memory"]).share
            shares[row["device_memory"]] = 1.0 if own is None else own
    if not shares:
        return rows
    wanted = min(shares.values()) if share is None else share
    # At most the user's: fewer slots change more.
    below = {name: own for name, own in shares.items() if own <= wanted} or shares
    name = min(below, key=lambda each: abs(below[each] - wanted))
    return [row for row in rows if row.get("device_memory", name) == name]


def _quality(row: Mapping[str, Any]) -> Quality | None:
    option = row["option"]
    low, high = row["ratio_interval95"]
    ratio = (low, row["perplexity_ratio"], high)
    low, high = row["agreement_interval95"]
    agreement = (low, row["agreement"], high)
    if found := _HALF.fullmatch(option):
        return Quality({}, int(found[1]), None, ratio, agreement)
    if (found := _FORMAT.fullmatch(option)) and found[1] in KINDS:
        return Quality({}, None, found[1], ratio, agreement)
    if option in ROUTES and option != "topk":
        fields = [field.name for field in dataclasses.fields(ROUTES[option])]
        own = {name: row[name] for name in fields}
        return Quality(
            {"route": option, "route_options": own}, None, None, ratio, agreement
        )
    if option == DEFERRED:
        own = {"assist": row["assist"], "assist_in_fused": True}
        own |= {"assist_deferred": True, "mode": "fused"}
        return Quality(own, None, None, ratio, agreement)
    return None


def admitted(
    asked, base, fixed: frozenset[str], checkpoint: str, with_fused: bool = False
) -> tuple[list[Quality], list[Refused]]:
    """The choices that the targets allow, the lossless one (or the fixed route) first.

    Args:
      asked: `PlanOptions`; base: the user's `OffloadOptions`; fixed: its fields that
        stay as they are. Of routes that the budget changes the card's nearest counts.
      with_fused: whether mode fused is among the candidates, which alone defers.
    Raises:
      ConfigError: a bad card, or a fixed route that no card knows.
    """
    share = parse_budget(base.device_memory).share  # None: a size
    known = [q for path in asked.card for q in read_card(path, checkpoint, share)]
    refused, allowed = [], []
    if asked.max_ppl_ratio > 1 and not known:
        reason = "no card says what routes, formats or fewer experts cost"
        remedy = "measure them (moe-edge fidelity) and give --card"
        refused.append(Refused("lossy configurations", reason, remedy))
    late = [q for q in known if "assist_deferred" in q.options]
    known = [q for q in known if q not in late]
    routes = [q for q in known if q.options and "route" not in fixed]
    if with_fused and not {"assist", "mode"} & fixed:
        routes += late
    else:
        reason = "it is of mode fused, which is tried on a described GPU alone"
        refused += [Refused(q.label, reason, NOT_DESCRIBED) for q in late]
    models = [q for q in known if not q.options]
    first = Quality()
    if not base.lossless:
        own = {"route": base.route, "route_options": dict(base.route_options)}
        found = [q for q in known if q.options and _same_route(q.options, own)]
        if not found:
            raise ConfigError(
                f"route {base.route} is fixed, and no card says its perplexity ratio; "
                "measure it (moe-edge fidelity) and give --card"
            )
        first, routes = found[0], []
    formats = [q for q in models if q.expert_dtype]
    others = [*routes, *models, *(r.beside(f) for r in routes for f in formats)]
    if not base.lossless:
        others = [first.beside(model) for model in models]
    for quality in others:
        wrong = _too_lossy(quality, asked)
        if wrong is None:
            allowed.append(quality)
        else:
            remedy = "raise --max_ppl_ratio or lower --min_agreement"
            refused.append(Refused(quality.label, wrong, remedy))
    return [first, *allowed], refused


def unmeasured(qualities: Sequence[Quality], config) -> list[Quality]:
    """Formats of which no card says what they cost; none of a quantised model."""
    known = {quality.expert_dtype for quality in qualities}
    kinds = KINDS if config.moe.expert_kind is None else ()
    return [Quality({}, None, k, None, None) for k in kinds if k not in known]


def _same_route(given: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    options = own["route_options"]
    return given["route"] == own["route"] and all(
        given["route_options"].get(name) == value for name, value in options.items()
    )


def _too_lossy(quality: Quality, asked) -> str | None:
    ratio, agreement = quality.ppl_ratio, quality.agreement
    if ratio is None or ratio[1] > asked.max_ppl_ratio:
        got = "unknown" if ratio is None else f"{ratio[1]:.4f}"
        return f"its perplexity ratio is {got}, above {asked.max_ppl_ratio:g}"
    least = asked.min_agreement
    if least is not None and (agreement is None or agreement[1] < least):
        got = "unknown" if agreement is None else f"{agreement[1]:.4f}"
        return f"its agreement is {got}, below {least:g}"
    return None
