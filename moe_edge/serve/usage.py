"""What a request took: OpenAI's `usage`, and ours in it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # it loads JAX
    from moe_edge.serve.choices import Choice

# Of several choices the least natural end is named.
_ENDS = ("eos", "stop", "length", "deadline")


def usage_of(choices: Sequence["Choice"], silent: bool = False) -> dict[str, Any]:
    """The usage of a request, over all its choices; a prompt counts once.

    `moe_edge` has of several choices the slowest queue and first token, and the mean
    time of the tokens after it.

    Args:
      choices: that have ended.
      silent: no new token was asked for.
    """
    firsts = [choice for choice in choices if choice.number == 0]
    prompt = sum(len(choice.prompt.ids) for choice in firsts)
    served = [choice.live.served for choice in choices]
    new = 0 if silent else sum(one.tokens for one in served)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {
            "cached_tokens": sum(choice.live.cached_tokens for choice in firsts)
        },
        "moe_edge": _own(choices, served),
    }


def _own(choices, served) -> dict[str, Any]:
    begun = [one for one in served if one.tokens]
    after_first = sum(one.tokens - 1 for one in begun)
    tokens = sum(one.tokens for one in begun)
    routed = sum(choice.live.routed for choice in choices)
    substituted = sum(choice.live.substituted for choice in choices)
    return {
        "k_min": min((one.k_least for one in begun), default=None),
        "k_mean": sum(one.k_sum for one in begun) / tokens if tokens else None,
        "k_max": max((one.k_most for one in begun), default=None),
        "substituted_share": substituted / routed if routed else 0.0,
        "bytes_moved": sum(choice.live.moved_bytes for choice in choices),
        "queue_ms": _ms([one.admitted_s - one.arrival_s for one in begun]),
        "ttft_ms": _ms([one.ttft_s for one in begun]),
        "tpot_ms": 1e3 * sum(one.last_s - one.first_s for one in begun) / after_first
        if after_first
        else None,
        "ended_by": max((choice.ended_by for choice in choices), key=_ENDS.index),
    }


def _ms(seconds: Sequence[float]) -> float | None:
    return 1e3 * max(seconds) if seconds else None
