"""What a generation gives: text, tokens, why it ended, and what it took."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Output:
    """The continuation of one prompt.

    >>> out = engine.generate("Once upon a time", max_new_tokens=4)
    >>> out.text, out.tokens, out.finish_reason
    (', and the first', [12, 297, 263, 670], 'length')
    >>> 0 <= out.stats["hit_ratio"] <= 1 and out.stats["tpot_s"] > 0
    True

    Attributes:
      text: without the prompt, and without the stop text that ended it. None where the
        checkpoint has no tokenizer.
      tokens: ids of the new tokens; an end-of-text token that ended it is the last.
      finish_reason: "stop" (end of text, or a stop text) or "length" (as many tokens as
        asked for).
      stats: what the call took; of all its prompts, where there were many:
        `tokens_per_s` decoded tokens of all rows a second, without each row's first;
        `ttft_s` seconds to the first token, and `tpot_s` seconds for each later step;
        `compile_s` seconds of compilation, which is in no other number; `hit_ratio`
        share of experts that decoding found on the device (None: nothing was looked
        up); `bytes_moved` to the device for experts; `device_bytes` that weights, slots
        and KV cache take on it. A speed is None where nothing was decoded.
    """

    text: str | None
    tokens: list[int]
    finish_reason: str
    stats: dict[str, Any]


@dataclasses.dataclass
class Measured:
    """Sums over the batches of a call, or of many calls."""

    ttft_s: float = 0.0
    batches: int = 0
    decode_s: float = 0.0
    steps: int = 0  # after each batch's first
    decoded: int = 0  # tokens of those steps
    compile_s: float = 0.0
    hits: int = 0
    misses: int = 0
    bytes_moved: int = 0

    def add(self, more: "Measured") -> None:
        """Takes in another one."""
        for field in dataclasses.fields(self):
            total = getattr(self, field.name) + getattr(more, field.name)
            setattr(self, field.name, total)

    def stats(self, device_bytes: int) -> dict[str, Any]:
        """As of `Output.stats`."""
        lookups = self.hits + self.misses
        return {
            "tokens_per_s": _ratio(self.decoded, self.decode_s),
            "ttft_s": _ratio(self.ttft_s, self.batches),
            "tpot_s": _ratio(self.decode_s, self.steps),
            "compile_s": self.compile_s,
            "hit_ratio": _ratio(self.hits, lookups),
            "bytes_moved": self.bytes_moved,
            "device_bytes": device_bytes,
        }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
