"""What verifying drafts would move: several tokens of a sequence looked up at once.

A step that checks n tokens (n - 1 drafts and the one that is certain) loads each expert
that any of them chose, once. Where transfers are what a step waits for, drafts pay if
the tokens that are accepted are more than the transfers that a step makes over those of
a token alone. With each draft accepted with probability a, up to the first that is not,
a step gives (1 - a^n) / (1 - a) tokens. Nothing is drafted here: a trace's own next
tokens are what is looked up together, so numbers are those of perfect drafts.
"""

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from moe_edge.core.checks import ConfigError
from moe_edge.offload.evict_base import Eviction
from moe_edge.offload.slot_cache import SlotCache
from moe_edge.simulate.replay.hits import pass_cache
from moe_edge.simulate.replay.lookups import (
    RoutedLayer,
    cache_spec,
    equal_slots,
    lookups,
)
from moe_edge.workload.traces import DECODE, Trace


@dataclasses.dataclass(frozen=True)
class Drafts:
    """Steps of n tokens against steps of one.

    Attributes:
      reused: share of the tokens' choices that another token of their step made, too.
      misses_left: misses a token over those of steps of one, by slots a layer; NaN
        where steps of one miss nothing.
      break_even: acceptance of a draft at which a step makes as many transfers a token
        as steps of one; by slots, key 0: without a cache. 1: it never pays.
    """

    reused: float
    misses_left: dict[int, float]
    break_even: dict[int, float]


def replay_drafts(
    trace: Trace, tokens: int, slots: list[int], policy: Callable[[], Eviction]
) -> Drafts:
    """Looks up `tokens` decode steps together, by equally many slots a layer.

    Args:
      policy: makes one, for each cache.
    Raises:
      ConfigError: less than 2 tokens, decode steps of several requests at once, or less
        steps than that.
    """
    if tokens < 2:
        raise ConfigError(f"drafts of {tokens} tokens, expected 2 or more")
    groups = list(_groups(trace, tokens))
    if not groups:
        raise ConfigError(
            f"the trace has no {tokens} decode steps in a row of one request; give "
            "fewer tokens"
        )
    one = [routed for steps in groups for step in steps for routed in step]
    many = [routed for steps in groups for routed in _together(steps)]
    choices = sum(int((r.ids_TK < trace.num_experts).sum()) for r in many)
    distinct = sum(len(_chosen(r, trace.num_experts)) for r in many)
    alone = sum(len(_chosen(r, trace.num_experts)) for r in one)
    left, even = {}, {0: break_even(distinct / alone * tokens, tokens)}
    for size in slots:
        misses = [_misses(trace, rows, size, policy()) for rows in (one, many)]
        left[size] = misses[1] / misses[0] if misses[0] else float("nan")
        even[size] = break_even(left[size] * tokens, tokens)
    return Drafts(1 - distinct / choices, left, even)


def break_even(cost: float, tokens: int) -> float:
    """The acceptance at which a step of so many tokens gives `cost` of them; 1: never.

    Args:
      cost: transfers of a step over those of a step of one token.
    """
    if np.isnan(cost):
        return float("nan")
    if cost >= tokens:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        given = sum(middle**i for i in range(tokens))
        low, high = (middle, high) if given < cost else (low, middle)
    return high


def _decoded(trace: Trace) -> Iterator[RoutedLayer]:
    """The lookups of decode steps of one request each."""
    for routed in lookups(trace):
        if routed.phase != DECODE:
            continue
        if len(routed.sequences) > 1:
            raise ConfigError(
                f"step {routed.step} decodes {len(routed.sequences)} requests, "
                "expected a trace of one at a time (generate --batch_size 1): drafts "
                "are of one sequence"
            )
        yield routed


def _groups(trace: Trace, tokens: int) -> Iterator[list[list[RoutedLayer]]]:
    """Every so many steps of a request, each the lookups of its layers."""
    steps: list[list[RoutedLayer]] = []
    for routed in _decoded(trace):
        if not steps or steps[-1][0].step != routed.step:
            if steps and steps[-1][0].sequences != routed.sequences:
                steps = []  # the rest of a request
            steps.append([])
        steps[-1].append(routed)
        is_whole = len(steps) == tokens and len(steps[-1]) == len(steps[0])
        if is_whole and _ends(trace, routed):
            yield steps
            steps = []


def _together(steps: list[list[RoutedLayer]]) -> Iterator[RoutedLayer]:
    """Steps as one, layer by layer."""
    for layer in zip(*steps, strict=True):
        ids_TK = np.concatenate([r.ids_TK for r in layer])
        scores_TE = None
        if layer[0].scores_TE is not None:
            scores_TE = np.concatenate([r.scores_TE for r in layer])
        yield layer[0]._replace(ids_TK=ids_TK, scores_TE=scores_TE)


def _ends(trace: Trace, routed: RoutedLayer) -> bool:
    """Whether a lookup is the last of its step."""
    return routed.layer == int(trace.layer.max())


def _chosen(routed: RoutedLayer, num_experts: int) -> set[int]:
    return {e for e in routed.ids_TK.reshape(-1).tolist() if e < num_experts}


def _misses(trace: Trace, rows: list[RoutedLayer], size: int, policy) -> int:
    cache = SlotCache(cache_spec(trace, equal_slots(trace, size)), policy)
    return sum(pass_cache(cache, routed)[1] for routed in rows)
