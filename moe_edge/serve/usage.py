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
    rows = [choice.row for choice in choices]
    new = 0 if silent else sum(row.made for row in rows)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {
            "cached_tokens": sum(choice.row.cached_tokens for choice in firsts)
        },
        "moe_edge": _own(choices, rows),
    }


def _own(choices, rows) -> dict[str, Any]:
    begun = [row for row in rows if row.made]
    tokens = sum(row.made for row in begun)
    after_first = tokens - len(begun)
    routed = sum(row.routed for row in rows)
    substituted = sum(row.substituted for row in rows)
    return {
        "k_min": min((row.k_least for row in begun), default=None),
        "k_mean": sum(row.k_sum for row in begun) / tokens if tokens else None,
        "k_max": max((row.k_most for row in begun), default=None),
        "substituted_share": substituted / routed if routed else 0.0,
        "bytes_moved": sum(row.moved_bytes for row in rows),
        "queue_ms": _ms([row.queue_s for row in begun]),
        "ttft_ms": _ms([row.ttft_s for row in begun]),
        "tpot_ms": 1e3 * sum(row.last_s - row.first_s for row in begun) / after_first
        if after_first
        else None,
        "ended_by": max((choice.ended_by for choice in choices), key=_ENDS.index),
    }


def _ms(seconds: Sequence[float]) -> float | None:
    return 1e3 * max(seconds) if seconds else None
