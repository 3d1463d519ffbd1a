"""Which sizes of sessions and chunks occur: few, so that few programs are compiled.

Nothing here needs JAX: what computes time without a model (`simulate/serving.py`) cuts
prompts as the engine does.
"""

from collections.abc import Iterable, Sequence

from moe_edge.core.checks import CapacityError, ConfigError, check_count
from moe_edge.model.config import ModelConfig

# Tokens of a row, prompt and new, for whose KV cache a budget in bytes reserves room
# where nobody says: of commands and of Python.
DEFAULT_CONTEXT = 1024
MIN_BUCKET = 16
MIN_CAPACITY = 64
_SMALLEST_BATCH_CAPACITY = 128  # below, a smaller cache saves next to nothing
_SMALLEST_PROMPT_CAPACITY = 64


def bucket(size: int, smallest: int = MIN_BUCKET) -> int:
    """The next of smallest * (1, 1.5, 2, 3, 4, 6, ...): few shapes, <= 50 % waste."""
    low = smallest
    while low < size:
        if low + low // 2 >= size:
            return low + low // 2
        low *= 2
    return low


def capacity_for(tokens: int) -> int:
    """Cache capacity for sequences of up to `tokens`."""
    return bucket(tokens, MIN_CAPACITY)


def check_context(max_context: int, config: ModelConfig) -> None:
    """Raises CapacityError for rows that are longer than the model's context."""
    if max_context > config.max_positions:
        raise CapacityError(
            f"max_context of {max_context} tokens exceeds the model's context of "
            f"{config.context_words}; lower it"
        )


def reserved_tokens(max_context: int | None, longest: int = 0) -> int:
    """Tokens of each row for whose KV cache a budget in bytes reserves room.

    Args:
      max_context: what the caller says; None: DEFAULT_CONTEXT.
      longest: tokens of the longest row, prompt and new, where it is known already: the
        default is never less.
    Raises:
      ConfigError, CapacityError: max_context is no number of tokens, or less than them.
    """
    if max_context is None:
        return max(DEFAULT_CONTEXT, longest)
    check_count("max_context", max_context)
    if longest > max_context:
        raise CapacityError(
            f"prompt and new tokens are up to {longest} tokens, more than max_context "
            f"of {max_context}; raise it, shorten the prompt or lower max_new_tokens"
        )
    return max_context


class SlotSizes:
    """Sizes of a running batch: steps of 2 in capacity and in rows.

    Of prompts on their way, which stay for a few chunks only: of 4 in both, and of 2 in
    the size of a chunk.

    Args:
      max_rows: rows that run at once.
      max_context: tokens of the longest row, prompt and new.
      prefill_chunk: most tokens of a prompt that run between two steps; the next
        lower power of two is taken.
      prompt_rows: most prompts that are prefilled together, see `prompts_together`.
      deterministic: one shape for all: bits do not depend on company.
      anchor: chunks begin at its multiples.
    Raises:
      ConfigError: a size that is no positive number, or a prefill_chunk that is no
        multiple of the anchor.
    """

    def __init__(
        self,
        *,
        max_rows: int,
        max_context: int,
        prefill_chunk: int,
        prompt_rows: int,
        deterministic: bool = False,
        anchor: int = 1,
    ):
        sizes = {
            "max_rows": max_rows,
            "max_context": max_context,
            "prefill_chunk": prefill_chunk,
            "prompt_rows": prompt_rows,
        }
        for name, size in sizes.items():
            check_count(name, size)
        if prefill_chunk % anchor:
            raise ConfigError(
                f"prefill_chunk must be a multiple of {anchor} for a model whose "
                f"layers keep states, got {prefill_chunk}"
            )
        self.max_rows, self.max_context = max_rows, max_context
        self.deterministic = deterministic
        largest, prompt_rows = capacity_for(max_context), min(prompt_rows, max_rows)
        self.rows = (max_rows,) if deterministic else _powers(max_rows, 1, 2)
        some = () if deterministic else _powers(prompt_rows, 1, 4)
        self.prompt_rows = tuple(sorted({1, *some}))
        self.capacities = self.prompt_capacities = (largest,)
        if not deterministic:
            powers = _powers(largest, _SMALLEST_BATCH_CAPACITY, 2)
            self.capacities = tuple(map(capacity_for, powers))
            powers = _powers(largest, _SMALLEST_PROMPT_CAPACITY, 4)
            self.prompt_capacities = tuple(map(capacity_for, powers))
        # A padded chunk never reaches past the capacity: chunks divide it.
        self.chunk = 1 << min(prefill_chunk, largest).bit_length() - 1
        while largest > self.chunk and largest % self.chunk:
            self.chunk //= 2
        if self.chunk % anchor:  # of a capacity of 96: a prompt is one chunk
            self.chunk = largest
        self.prompt_capacities = tuple(
            M for M in self.prompt_capacities if M <= self.chunk or not M % self.chunk
        )
        self.chunks = _powers(self.chunk, 2 * MIN_BUCKET, 2)

    def rows_for(self, rows: int) -> int:
        return next(size for size in self.rows if size >= rows)

    def together_bytes(self, rows_bytes: Iterable[int]) -> int:
        """Bytes of the caches of a session, from those of each of its rows alone."""
        rows_bytes = list(rows_bytes)
        if not rows_bytes:
            return 0
        return self.rows_for(min(len(rows_bytes), self.max_rows)) * max(rows_bytes)

    def prompt_rows_for(self, rows: int) -> int:
        return next(size for size in self.prompt_rows if size >= rows)

    def capacity_for(self, tokens: int) -> int:
        return next(size for size in self.capacities if size >= tokens)

    def prompt_capacity_for(self, tokens: int) -> int:
        return next(size for size in self.prompt_capacities if size >= tokens)

    def padded(self, tokens: int, capacity: int) -> int:
        """Size of a chunk of so many tokens in a session of a capacity."""
        return min(next(size for size in self.chunks if size >= tokens), capacity)

    def prompts_together(self, lengths: Sequence[int]) -> int:
        """How many prompts, the first ones of these that wait, run together.

        Those of one padded size, as long as together they are no larger than a chunk:
        otherwise short ones would be padded to long ones, and steps would wait.

        Args:
          lengths: tokens of each that are to run, at least one.
        """
        size, *others = (self._chunk_of(n) for n in lengths[: self.prompt_rows[-1]])
        count = 1
        for other in others:
            rows = self.prompt_rows_for(count + 1)
            if other != size or rows * size > self.chunk:
                break
            count += 1
        return count

    def _chunk_of(self, tokens: int) -> int:
        """Padded size of a prompt's first chunk, in a session that holds it."""
        return self.padded(min(tokens, self.chunk), self.prompt_capacity_for(tokens))

    def prompt_shapes(self) -> list[tuple[int, int, int]]:
        """Rows, padded size of a chunk and capacity: all in which prompts run."""
        found = []
        for R in self.prompt_rows:
            largest = self.prompt_capacity_for(self.prompt_tokens(R))
            for M in (M for M in self.prompt_capacities if M <= largest):
                sizes = sorted({min(size, M) for size in self.chunks})
                found += [(R, S, M) for S in sizes if R == 1 or R * S <= self.chunk]
        return found

    def prompt_tokens(self, rows: int) -> int:
        """Tokens of the longest of so many prompts that run together."""
        return (
            self.max_context if rows == 1 else min(self.chunk // rows, self.max_context)
        )

    def prompt_shape(self, lengths: Sequence[int]) -> tuple[int, int, int]:
        """Rows, size of the first chunk and capacity of prompts that run together."""
        longest = max(lengths)
        capacity, size = self.prompt_capacity_for(longest), min(longest, self.chunk)
        return self.prompt_rows_for(len(lengths)), self.padded(size, capacity), capacity

    def kept_capacity(self, tokens: int) -> int:
        """Capacity of a cache that keeps whole chunks: chunk * 1, 2, 4, ..."""
        size = self.chunk
        while size < tokens:
            size *= 2
        return min(size, self.capacities[-1])


def _powers(largest: int, smallest: int, factor: int) -> tuple[int, ...]:
    """largest, largest / factor, ... down to `smallest`, ascending."""
    sizes = [largest]
    while sizes[-1] // factor >= smallest:
        sizes.append(-(-sizes[-1] // factor))
    return tuple(reversed(sizes))
