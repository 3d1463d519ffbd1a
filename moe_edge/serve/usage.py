"""What a request took: OpenAI's `usage`, and ours in it."""

from collections.abc import Sequence
from typing import Any

from moe_edge.serve.call import Call

# Of several choices the least natural end is named.
_ENDS = ("eos", "stop", "length", "deadline")


def usage_of(call: Call) -> dict[str, Any]:
    """The usage of a request, over all its rows, which have ended.

    A prompt counts once. `moe_edge` has of several rows the slowest queue and first
    token, and the mean time of the tokens after it.
    """
    rows = call.rows
    prompt = sum(len(each.ids) for each in call.prompts)
    silent = call.body.max_new_tokens == 0  # its one token is not shown
    new = 0 if silent else sum(row.made for row in rows)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {
            "cached_tokens": sum(row.cached_tokens for row in rows[:: call.body.n])
        },
        "moe_edge": _own(call),
    }


def _own(call: Call) -> dict[str, Any]:
    rows = call.rows
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
        "ended_by": max(map(call.ended_by, range(len(rows))), key=_ENDS.index),
    }


def _ms(seconds: Sequence[float]) -> float | None:
    return 1e3 * max(seconds) if seconds else None
