"""What a step of one model costs on one machine, by rows or tokens, and by K.

MoE-Prism's C (section 5), measured by `profile_machine --checkpoint` or made from a
preset. Two tables: a decode step by its rows, a prefill by its tokens; both by the
experts a token, which is the mean where rows differ. Between points the tables are
linear, beyond them they go on as between the last two; below the fewest rows or tokens
they are level.

Prompts that run together are padded to the longest one, and to one of few numbers of
rows; a padded position chooses no experts, but passes everything else. So a shape
(rows, size of the chunk, capacity) has a cost of its own, with one token in it; that of
one prompt's shape is in its table. Each prompt more gets a first token, and its cache
is copied. It is the same with rows that decode: in their table they have the least
capacity.

What attention costs follows the keys that there are with host kernels, and without
them, or in latent attention, the capacity of a session. So there is a time for each key
beyond those that rows of the table have, besides the times of capacities; on any
machine one of the two is next to nothing.

The table of decode steps is of rows that go on: each step begins before the tokens of
the one before are told to anybody. Where rows are others than before, the device waits
for Python, and may move them into another session first: such steps take longer by a
time of their own.
"""

import dataclasses
import itertools
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_edge.core.checks import ConfigError, check_from_zero, check_positive
from moe_edge.core.files import check_there
from moe_edge.core.json_reader import read_json
from moe_edge.core.typed import built

TIMES = ("prompt_s", "keys", "key_s", "prompt_key_s", "changed_s", "moved_s")
Shape = tuple[int, int, int]  # rows, size of a chunk, capacity


@dataclasses.dataclass(frozen=True)
class CostTable:
    """Seconds at points of a grid.

    Attributes:
      sizes: rows or tokens, rising; of one alone the table says the same everywhere.
      ks: experts a token, likewise.
      seconds: of each size, at each k.
    """

    sizes: Sequence[float]
    ks: Sequence[float]
    seconds: Sequence[Sequence[float]]

    def __post_init__(self):
        for name in ("sizes", "ks"):
            points = getattr(self, name)
            rises = all(a < b for a, b in itertools.pairwise(points))
            if not len(points) or not rises or not points[0] > 0:
                raise ConfigError(
                    f"{name} of a cost table are {list(points)}, expected numbers "
                    "above 0 that rise"
                )
        shape = [len(row) for row in self.seconds]
        if shape != [len(self.ks)] * len(self.sizes):
            raise ConfigError(
                f"a cost table has rows of {shape} seconds, expected {len(self.sizes)} "
                f"rows of {len(self.ks)}"
            )
        for seconds in itertools.chain(*self.seconds):
            check_positive("seconds of a cost table", seconds)

    def __call__(self, size: float, k: float) -> float:
        """Seconds there."""
        if size <= 0:
            return 0.0
        i, more, x = _place(self.sizes, max(size, self.sizes[0]))
        j, higher, y = _place(self.ks, k)
        low, high = self.seconds[i], self.seconds[more]
        at_low = low[j] + y * (low[higher] - low[j])
        at_high = high[j] + y * (high[higher] - high[j])
        return max(at_low + x * (at_high - at_low), 0.0)


@dataclasses.dataclass(frozen=True)
class StepCosts:
    """Seconds of steps.

    Attributes:
      decode: of a decode step, by its rows; prefill: of a prompt, by its tokens.
      source: where the numbers come from.
      shapes: rows, size, capacity and seconds of each shape in which prompts run, with
        one token in it; none: they are not told apart.
      batches: the same of rows that decode; their size is 1.
      prompt_s: seconds of each prompt of several, beside the first.
      keys: that each row of the decode table attends to, on the mean.
      key_s: seconds for each key more; prompt_key_s: for each pair of a prompt's token
        and a key of an earlier chunk.
      changed_s: more seconds of a decode step that could not begin ahead, as its rows
        are others than those before; moved_s: more of one that moves them, besides
        (rows of about as many keys as the table's).
      runs_ahead: whether steps do begin ahead. One that began at a K of the past is
        made again.
    """

    decode: CostTable
    prefill: CostTable
    source: str
    shapes: Sequence[Sequence[float]] = ()
    batches: Sequence[Sequence[float]] = ()
    prompt_s: float = 0.0
    keys: float = 0.0
    key_s: float = 0.0
    prompt_key_s: float = 0.0
    changed_s: float = 0.0
    moved_s: float = 0.0
    runs_ahead: bool = False

    def __post_init__(self):
        for name in TIMES:
            check_from_zero(f"{name} of step costs", getattr(self, name))
        for shape in (*self.shapes, *self.batches):
            if len(shape) != 4 or not all(0 < number < math.inf for number in shape):
                raise ConfigError(
                    f"a shape of step costs is {list(shape)}, expected rows, size, "
                    "capacity and seconds, numbers above 0"
                )

    def decode_s(self, rows: float, k: float, batch: Shape | None = None) -> float:
        """One token of `rows` rows, at `k` experts a token on the mean.

        Args:
          batch: in which they run; None: the least that holds them.
        """
        seconds = self.decode(rows, k)
        if batch is None or not self.batches:
            return seconds
        least = min(capacity for *_, capacity, _ in self.batches)
        sizes = sorted(B for B, _, capacity, _ in self.batches if capacity == least)
        alone = next((B for B in sizes if B >= rows), sizes[-1]), 1, least
        more = _shape_s(self.batches, batch) - _shape_s(self.batches, alone)
        return max(seconds + more, 0.0)

    def prefill_s(
        self, tokens: float, k: float, shape: Shape | None = None, prompts: int = 1
    ) -> float:
        """Prompts, or parts of them, of so many tokens together.

        Args:
          shape: in which they run; None: that of one prompt.
          prompts: how many they are.
        """
        seconds = self.prefill(tokens, k) + self.prompt_s * (prompts - 1)
        if shape is None or not self.shapes:
            return seconds
        alone = _shape_s(self.shapes, self._alone(tokens))
        more = _shape_s(self.shapes, shape) - alone
        return max(seconds + more, 0.0)

    def _alone(self, tokens: float) -> Shape:
        """The shape of one prompt: the least capacity, then size, that holds it."""
        fewest = min(rows for rows, *_ in self.shapes)
        ones = sorted((M, S) for rows, S, M, _ in self.shapes if rows == fewest)
        M = next((M for M, _ in ones if M >= tokens), ones[-1][0])
        sizes = [S for capacity, S in ones if capacity == M]
        return fewest, next((S for S in sizes if S >= tokens), sizes[-1]), M

    def to_json(self) -> dict[str, Any]:
        """As `step_costs` of a machine.json."""
        return dataclasses.asdict(self)

    @classmethod
    def of_json(cls, given: Any) -> "StepCosts":
        """From `step_costs` of a machine.json.

        Raises:
          ConfigError: it is none.
        """
        if not isinstance(given, Mapping):
            raise ConfigError(f"step_costs is {given!r:.60}, expected names and values")
        tables = {
            name: built(f"step_costs: {name}", CostTable, given.get(name), True)
            for name in ("decode", "prefill")
        }
        return built("step_costs", cls, {**given, **tables}, True)


def read_step_costs(path: str | Path) -> StepCosts:
    """Costs in a machine.json of `profile_machine --checkpoint`.

    Raises:
      ConfigError: there are none, or the file cannot be read; FileNotFoundError.
    """
    path = Path(path)
    check_there(path, "--costs", "moe-edge profile_machine --checkpoint writes it")
    stored = read_json(path)
    given = stored.get("step_costs") if isinstance(stored, dict) else None
    if given is None:
        raise ConfigError(
            f"{path} has no step_costs; measure them with moe-edge profile_machine "
            "--checkpoint"
        )
    return StepCosts.of_json(given)


def _shape_s(shapes: Sequence[Sequence[float]], shape: Shape) -> float:
    """Seconds of a shape; of an unknown one by its positions from the nearest."""

    def distance(known) -> float:
        pairs = zip(_extent(known), _extent(shape), strict=True)
        return sum(abs(math.log(a / b)) for a, b in pairs)

    known = min(shapes, key=distance)
    return known[3] * _extent(shape)[0] / _extent(known)[0]


def _extent(shape: Sequence[float]) -> tuple[float, float]:
    """Positions and capacity of a shape."""
    return shape[0] * shape[1], shape[2]


def _place(points: Sequence[float], at: float) -> tuple[int, int, float]:
    """The two points that are used at a number, and how far from one to the other."""
    if len(points) == 1:
        return 0, 0, 0.0
    i = min(max(bisect_right(points, at) - 1, 0), len(points) - 2)
    return i, i + 1, (at - points[i]) / (points[i + 1] - points[i])
