"""The graph of a collaboration of experts: `coe.json`, checked, and who is used.

Axes: E experts, D dependencies. A request names a component; a rule names the expert
that looks at it first (preliminary). If that one finds nothing wrong, a dependency
may name a second one (subsequent), which several preliminary experts can share.
"""

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from moe_edge.core.checks import CheckpointError, ConfigError, check_count, check_known
from moe_edge.core.files import write_json
from moe_edge.core.json_reader import LARGE_FILE_BYTES, read_json
from moe_edge.core.typed import built

FORMAT_VERSION = 1
OK = "ok"  # the one verdict on which a request goes on


@dataclasses.dataclass(frozen=True)
class Architecture:
    """What experts of one kind share: a program, and the size of their weights.

    Attributes:
      module: name of the network; options: of it.
      input_shape: of one image; outputs: of the network.
      record_bytes, dtype: of the weights of one expert.
      record: {name, shape} of the weights in the order of the file.
    """

    module: str
    options: Mapping[str, Any]
    input_shape: Sequence[int]
    outputs: object
    record_bytes: int
    dtype: str
    record: Sequence[Mapping[str, Any]] = ()

    def __post_init__(self):
        check_count("record_bytes", self.record_bytes)


@dataclasses.dataclass(frozen=True)
class Expert:
    """One model.

    Attributes:
      id: unique.
      architecture: name of it.
      file: of its weights, relative to the graph's; None where it is only simulated.
      sha256: of that file.
      trained: whether its verdicts mean anything.
    """

    id: str
    architecture: str
    file: str | None = None
    sha256: str | None = None
    trained: bool = False


@dataclasses.dataclass(frozen=True)
class CoeGraph:
    """Experts, who sees which component, and who follows whom.

    Attributes:
      architectures: by name.
      experts: in the order by which everything else numbers them.
      rules: component -> its first expert.
      follow: preliminary expert -> subsequent one.
      frequencies: component -> share of the requests; None: not known.
      probabilities: uses of each expert a request, need not sum to 1; None: not known.
    """

    architectures: Mapping[str, Architecture]
    experts: Sequence[Expert]
    rules: Mapping[str, int]
    follow: Mapping[int, int]
    frequencies: Mapping[str, float] | None = None
    probabilities: np.ndarray | None = None

    @property
    def bytes_E(self) -> np.ndarray:
        """int64 [E]: of the weights."""
        of = self.architectures
        return np.array([of[e.architecture].record_bytes for e in self.experts])

    def uses_E(self, components: Mapping[str, float]) -> np.ndarray:
        """Uses of each expert by components that come so often, float64 [E].

        Every request counts as passed by its first expert: the graph does not say how
        many are, and few are damaged.
        """
        uses_E = np.zeros(len(self.experts))
        for component, times in components.items():
            if (first := self.rules.get(component)) is not None:
                uses_E[first] += times
                if first in self.follow:
                    uses_E[self.follow[first]] += times
        return uses_E

    def probability_E(self, sample: Iterable[str] = ()) -> np.ndarray:
        """Uses of each expert a request, float64 [E].

        Args:
          sample: components of some requests, where the graph says nothing.
        Raises:
          ConfigError: it says nothing, and no component of the sample has a rule.
        """
        if self.probabilities is not None:
            return self.probabilities
        if self.frequencies is not None:
            return self.uses_E(self.frequencies) / sum(self.frequencies.values())
        counts = collections.Counter(sample)
        uses_E = self.uses_E(counts)
        if not uses_E.any():
            raise ConfigError(
                "the graph has neither frequencies nor probabilities, and no request "
                "of the sample has a rule; give one of the three"
            )
        return uses_E / sum(counts.values())


def read_graph(path: str | Path) -> CoeGraph:
    """The graph of a `coe.json`.

    Raises:
      CheckpointError: no such file, or no JSON; ConfigError: anything in it is wrong.
    """
    stored = read_json(path, CheckpointError, max_bytes=LARGE_FILE_BYTES)
    return parse_graph(stored, str(path))


def parse_graph(given: Any, where: str = "graph") -> CoeGraph:
    """As `read_graph`, from parsed JSON; `where`: it stands, for messages."""
    file = built(where, _File, given)
    if file.format_version != FORMAT_VERSION:
        raise ConfigError(
            f"{where} has format_version {file.format_version}, this program reads "
            f"{FORMAT_VERSION}"
        )
    architectures = {
        name: built(f"{where}: architecture {name!r}", Architecture, one)
        for name, one in file.architectures.items()
    }
    experts = [
        built(f"{where}: expert {number}", Expert, one)
        for number, one in enumerate(file.experts)
    ]
    if not experts:
        raise ConfigError(f"{where} has no experts; expected at least one")
    numbers: dict[str, int] = {}
    for number, expert in enumerate(experts):
        _check_file(where, expert)
        if expert.id in numbers:
            raise ConfigError(f"{where}: expert id {expert.id!r} occurs twice")
        kind = f"architecture of expert {expert.id!r} in {where}"
        check_known(kind, expert.architecture, architectures)
        numbers[expert.id] = number
    rules: dict[str, int] = {}
    for number, one in enumerate(file.rules):
        rule = built(f"{where}: rule {number}", _Rule, one)
        if rule.component in rules:
            raise ConfigError(
                f"{where}: component {rule.component!r} has two rules, expected one"
            )
        kind = f"the rule of component {rule.component!r}"
        rules[rule.component] = _number(numbers, rule.expert, where, kind)
    follow = _follow(where, file.dependencies, numbers)
    frequencies = file.frequencies
    if frequencies is not None:
        _check_shares(f"{where}: frequencies", frequencies)
        for component in frequencies:
            if component not in rules:
                raise ConfigError(
                    f"{where}: component {component!r} has a frequency and no rule"
                )
    probabilities = None
    if file.probabilities is not None:
        _check_shares(f"{where}: probabilities", file.probabilities)
        probabilities = np.zeros(len(experts))
        for expert, share in file.probabilities.items():
            probabilities[_number(numbers, expert, where, "a probability")] = share
    return CoeGraph(architectures, experts, rules, follow, frequencies, probabilities)


def write_graph(path: str | Path, graph: CoeGraph) -> None:
    """Writes what `read_graph` reads."""
    ids = [expert.id for expert in graph.experts]
    known = graph.probabilities
    shares = None if known is None else dict(zip(ids, known.tolist(), strict=True))
    value = {
        "format_version": FORMAT_VERSION,
        "architectures": {
            name: dataclasses.asdict(one) for name, one in graph.architectures.items()
        },
        "experts": [dataclasses.asdict(expert) for expert in graph.experts],
        "rules": [
            {"component": name, "expert": ids[e]} for name, e in graph.rules.items()
        ],
        "dependencies": [
            {"from": ids[first], "when": OK, "to": ids[then]}
            for first, then in graph.follow.items()
        ],
        "frequencies": graph.frequencies,
        "probabilities": shares,
    }
    write_json(path, value)


@dataclasses.dataclass(frozen=True)
class _File:
    format_version: int
    architectures: Mapping[str, Mapping]
    experts: Sequence[Mapping]
    rules: Sequence[Mapping]
    dependencies: Sequence[Mapping]
    frequencies: Mapping[str, float] | None = None
    probabilities: Mapping[str, float] | None = None


@dataclasses.dataclass(frozen=True)
class _Rule:
    component: str
    expert: str


def _check_file(where: str, expert: Expert) -> None:
    """Refuses a file of weights that is not in the folder of the graph."""
    path = PurePath(expert.file or "")
    if path.is_absolute() or ".." in path.parts:
        raise ConfigError(
            f"{where}: file of expert {expert.id!r} is {expert.file!r:.80}, expected a "
            "path below the folder of the graph"
        )


def _number(numbers: Mapping[str, int], expert: Any, where: str, what: str) -> int:
    if expert not in numbers:
        raise ConfigError(
            f"{where}: {what} names expert {expert!r}, which is not among the "
            f"{len(numbers)} experts"
        )
    return numbers[expert]


def _follow(
    where: str, given: Sequence[Any], numbers: Mapping[str, int]
) -> dict[int, int]:
    """Preliminary -> subsequent, one step deep."""
    follow: dict[int, int] = {}
    for place, one in enumerate(given):
        keys = {"from", "when", "to"}
        if not isinstance(one, Mapping) or set(one) != keys:
            raise ConfigError(
                f"{where}: dependency {place} is {one!r:.80}, expected from, when, to"
            )
        if not all(isinstance(one[key], str) for key in keys) or one["when"] != OK:
            raise ConfigError(
                f"{where}: dependency {place} holds {one!r:.80}, expected ids of "
                f"experts and when {OK!r}"
            )
        first, then = (
            _number(numbers, one[key], where, f"dependency {place}")
            for key in ("from", "to")
        )
        if first in follow:
            raise ConfigError(
                f"{where}: expert {one['from']!r} has two dependencies, expected one"
            )
        follow[first] = then
    ids = list(numbers)
    for chain in map(list, follow.items()):
        while chain[-1] in follow and chain[-1] not in chain[:-1]:
            chain.append(follow[chain[-1]])
        is_cycle = chain[-1] in chain[:-1]
        if len(chain) > 2 or is_cycle:
            text = " -> ".join(ids[e] for e in chain)
            wrong = "a cycle" if is_cycle else "too deep"
            raise ConfigError(
                f"{where}: dependencies {text} are {wrong}, expected preliminary -> "
                "subsequent"
            )
    return follow


def _check_shares(name: str, shares: Mapping[str, float]) -> None:
    for key, share in shares.items():
        if not 0 <= share < math.inf:
            raise ConfigError(f"{name}: {key!r} has {share}, expected 0 or more")
    if not sum(shares.values()) > 0:
        raise ConfigError(f"{name} sum to 0; expected at least one above 0")
