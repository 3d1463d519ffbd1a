"""What is compared: each method alone, and methods together."""

import dataclasses
from collections.abc import Mapping
from typing import Any

LOSSLESS, PAPER, NEWER, FORMAT = "lossless", "paper", "newer", "format"
COMPOSED = "composed"
SUBS = 4  # sub-experts of an expert
NF4 = 0.28  # of the bfloat16 bytes: a shadow of all weights in nf4, without its head


@dataclasses.dataclass(frozen=True)
class Variant:
    """A checkpoint made of the one that is studied.

    Attributes:
      format: of its experts.
      removed: share of its experts that were pruned.
      by: the rule of that.
      subs: sub-experts of an expert.
    """

    format: str = "bfloat16"
    removed: float = 0.0
    by: str = "reap"
    subs: int = 1

    @property
    def name(self) -> str:
        """Of its folder."""
        pruned = f"_{self.by}{100 * self.removed:.0f}" if self.removed else ""
        subs = f"_subs{self.subs}" if self.subs > 1 else ""
        return f"{self.format}{pruned}{subs}"


@dataclasses.dataclass(frozen=True)
class Method:
    """One way to run.

    Attributes:
      name: in tables; family: one of those above.
      variant: the checkpoint.
      route, options, eviction: as of `OffloadOptions`.
      k_share: of a token's experts that are computed.
      foresight: layers ahead whose experts are prefetched, all of them rightly: a bound
        of what predictors reach.
      shadow: share of the bfloat16 bytes that a shadow takes, which runs first.
    """

    name: str
    family: str
    variant: Variant = Variant()
    route: str = "topk"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    eviction: str = "lru"
    k_share: float = 1.0
    foresight: int = 0
    shadow: float = 0.0

    @property
    def is_plain(self) -> bool:
        """Whether its choices do not depend on what is in slots."""
        return self.route == "topk"

    @property
    def is_bfloat16(self) -> bool:
        return self.variant.format == "bfloat16"


def methods() -> list[Method]:
    """All of them, each name once."""
    quarter, half = Variant(removed=0.25), Variant(removed=0.5)
    return [
        *(Method(name, LOSSLESS, eviction=name) for name in ("lru", "lfu")),
        Method("lru, prefetched by an oracle", LOSSLESS, foresight=1),
        *map(_smoe, (0.1, 0.2, 0.3)),
        *(
            Method(f"MoE-Prism, {k:g} of K", PAPER, Variant(subs=SUBS), k_share=k)
            for k in (0.75, 0.5)
        ),
        Method("OD-MoE, nf4 shadow that never errs", PAPER, foresight=3, shadow=NF4),
        *(_prefer(b, NEWER) for b in (0.2, 0.35, 0.5)),
        Method("pruned by 25 % (REAP)", NEWER, quarter),
        Method("pruned by 50 % (REAP)", NEWER, half),
        Method("q8_0", FORMAT, Variant("q8_0")),
        Method("q4_0", FORMAT, Variant("q4_0")),
        *(_prefer(b, COMPOSED, quarter) for b in (0.2, 0.5)),
        _substitute(0.1, COMPOSED, quarter),
        _prefer(0.2, COMPOSED, eviction="lfu"),
        _prefer(0.2, COMPOSED, Variant("q4_0")),
        Method("q4_0, pruned by 25 %", COMPOSED, Variant("q4_0", 0.25)),
    ]


def _smoe(a: float) -> Method:
    given = {"route": "substitute", "options": {"a": a}, "eviction": "smoe_score"}
    return Method(f"SMoE, a = {a:g}", PAPER, **given)


def _prefer(
    bonus: float, family: str, variant: Variant = Variant(), eviction: str = "lru"
) -> Method:
    name, options = f"prefer, bonus {bonus:g}", {"bonus": bonus}
    return _routed(name, family, variant, "prefer", options, eviction)


def _substitute(a: float, family: str, variant: Variant = Variant()) -> Method:
    return _routed(f"substitute, a = {a:g}", family, variant, "substitute", {"a": a})


def _routed(name, family, variant, route, options, eviction="lru") -> Method:
    parts = [] if variant.format == "bfloat16" else [variant.format]
    parts += [f"pruned by {100 * variant.removed:.0f} %"] if variant.removed else []
    parts += [] if eviction == "lru" else [f"eviction {eviction}"]
    given = {"route": route, "options": options, "eviction": eviction}
    return Method(", ".join([*parts, name]), family, variant, **given)
