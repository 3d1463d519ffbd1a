"""Keys and values of prompts that ran before, for prompts that begin like them.

A cache is kept in whole chunks, because a chunk's bits depend on where it begins, and
with the K at which all its tokens were computed. The least recently used leave first.

Where layers keep states, a cache serves only prompts that begin with all of its tokens,
because a state cannot be cut; it is taken while a prompt runs, behind a chunk's end:
the prompt's last, and where a prompt parted from another one (`ends`).
"""

import collections
import dataclasses
from collections.abc import Sequence

from moe_edge.core.checks import check_from_zero
from moe_edge.model.kv_cache import Cache


@dataclasses.dataclass(frozen=True, eq=False)
class Kept:
    """Caches of every layer, of one row, that hold these tokens."""

    tokens: tuple[int, ...]  # whole chunks
    caches: list[Cache]
    num_bytes: int


class PromptCache:
    """Finds the longest beginning of a prompt that was computed at the same K.

    Args:
      budget_bytes: most bytes of all caches; 0 keeps none.
      chunk: tokens of a chunk.
      whole: whether caches hold states.
    """

    def __init__(self, budget_bytes: int, chunk: int, whole: bool = False):
        check_from_zero("prompt_cache_bytes", budget_bytes)
        self.budget_bytes, self.chunk, self.num_bytes = budget_bytes, chunk, 0
        self.whole = whole
        # (K, tokens) -> Kept, least recently used first.
        self._kept: collections.OrderedDict[tuple, Kept] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, prompt: Sequence[int], k: int) -> tuple[Kept | None, int]:
        """(caches, how many of their first tokens the prompt begins with).

        Whole chunks, and fewer than all tokens of the prompt: the last one is run,
        because its logits are wanted.
        """
        key, count = self._search(prompt, k)
        if key is None:
            return None, 0
        self._kept.move_to_end(key)
        return self._kept[key], count

    def count(self, prompt: Sequence[int], k: int) -> int:
        """How many tokens `find` would spare; it asks only, so nothing gets younger."""
        return self._search(prompt, k)[1]

    def _search(self, prompt: Sequence[int], k: int) -> tuple[tuple | None, int]:
        most = (len(prompt) - 1) // self.chunk
        best_key, best = None, 0
        for key, kept in self._kept.items():
            if key[0] == k:
                shared = self._shared_chunks(prompt, kept.tokens, most)
                serves = not self.whole or shared * self.chunk == len(kept.tokens)
                if serves and shared > best:
                    best_key, best = key, shared
        return best_key, best * self.chunk

    def ends(self, prompt: Sequence[int], k: int) -> set[int]:
        """Of a prompt that runs: behind how many tokens states are worth keeping."""
        whole = len(prompt) // self.chunk
        parted = (
            self._shared_chunks(prompt, kept.tokens, whole)
            for key, kept in self._kept.items()
            if key[0] == k
        )
        return {self.chunk * count for count in (whole, max(parted, default=0))} - {0}

    def _shared_chunks(self, prompt, tokens, most: int) -> int:
        count, C = 0, self.chunk
        for first in range(0, min(most, len(tokens) // C) * C, C):
            if tuple(prompt[first : first + C]) != tokens[first : first + C]:
                break
            count += 1
        return count

    def wants(self, tokens: tuple[int, ...], k: int, num_bytes: int) -> bool:
        """Whether a row's first tokens would be kept: they fit and are news.

        Args:
          tokens: whole chunks.
        """
        if not tokens or num_bytes > self.budget_bytes:
            return False
        for key, kept in self._kept.items():
            there = kept.tokens if self.whole else kept.tokens[: len(tokens)]
            if key[0] == k and there == tokens:
                self._kept.move_to_end(key)
                return False
        return True

    def make_room(self, tokens: tuple[int, ...], k: int, num_bytes: int) -> None:
        """Room for what `wants` said yes to, before it is copied.

        Beginnings of it are no longer needed, but for states; then the least recently
        used leave.
        """
        for key in [key for key in self._kept if self._begins(key, k, tokens)]:
            if not self.whole:
                self.num_bytes -= self._kept.pop(key).num_bytes
        while self._kept and self.num_bytes + num_bytes > self.budget_bytes:
            _, kept = self._kept.popitem(last=False)
            self.num_bytes -= kept.num_bytes

    def add(self, k: int, kept: Kept) -> None:
        """Keeps caches for which there is room (`make_room`)."""
        self._kept[k, kept.tokens] = kept
        self.num_bytes += kept.num_bytes

    def youngest_first(self) -> list[tuple[int, Kept]]:
        """All that is kept, by K; the most recently used first."""
        return [(k, kept) for (k, _), kept in reversed(self._kept.items())]

    def clear(self) -> None:
        """Keeps nothing of what there was."""
        self._kept.clear()
        self.num_bytes = 0

    @staticmethod
    def _begins(key: tuple, k: int, tokens: tuple[int, ...]) -> bool:
        return key[0] == k and tokens[: len(key[1])] == key[1]
