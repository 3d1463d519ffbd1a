"""How often a board's experts are right: `accuracy.json`, beside its graph.

Whoever trained the experts writes it; runs repeat it. It names the weights that it is
of, so that nobody repeats it of others.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from moe_edge.core.checks import CheckpointError, ConfigError
from moe_edge.core.files import write_text
from moe_edge.core.json_reader import read_json
from moe_edge.core.typed import built
from moe_edge.papers.coserve.workload.coe_graph import CoeGraph

ACCURACY_FILE = "accuracy.json"
Shares = Mapping[str, float | None]


@dataclasses.dataclass(frozen=True)
class _File:
    """Shares of right verdicts; None: no such network was trained."""

    weights_sha256: str
    collaboration: float
    single: float | None
    single_wide: float | None

    def __post_init__(self):
        for name, share in self.shares.items():
            if share is not None and not 0 <= share <= 1:
                raise ConfigError(f"{name} is {share}, expected a share, 0 to 1")

    @property
    def shares(self) -> Shares:
        found = dataclasses.asdict(self)
        del found["weights_sha256"]
        return found


def write_accuracy(folder: Path, graph: CoeGraph, shares: Shares) -> None:
    """Writes the shares of a graph's experts, and of networks beside them."""
    stored = _File(weights_sha256(graph), **shares)
    write_text(folder / ACCURACY_FILE, json.dumps(dataclasses.asdict(stored)) + "\n")


def read_accuracy(folder: Path, graph: CoeGraph) -> Shares | None:
    """{collaboration, single, single_wide}, None: not trained; or None: no such file.

    Raises:
      CheckpointError: it has another form, or is of other weights.
    """
    path = folder / ACCURACY_FILE
    if not path.exists():
        return None
    mend = "delete it, or let moe-edge train_board --compare write it again"
    try:
        stored = built(str(path), _File, read_json(path, CheckpointError))
    except ConfigError as error:
        text = str(error) if str(path) in str(error) else f"{path}: {error}"
        raise CheckpointError(f"{text}; {mend}") from error
    if (expected := weights_sha256(graph)) != stored.weights_sha256:
        raise CheckpointError(
            f"{path} is of weights {stored.weights_sha256[:12]}, the experts of the "
            f"graph beside it are {expected[:12]}; {mend}"
        )
    return stored.shares


def weights_sha256(graph: CoeGraph) -> str:
    """Of who judges what: for each component the sha256 of its experts' files."""
    chains = {}
    for component, first in graph.rules.items():
        then = graph.follow.get(first)
        chain = [first] if then is None else [first, then]
        chains[component] = [graph.experts[expert].sha256 for expert in chain]
    return hashlib.sha256(json.dumps(chains, sort_keys=True).encode()).hexdigest()


def told(shares: Shares) -> str:
    """For people."""
    each = (
        f"{name} {'not trained' if share is None else f'{share:.4f}'}"
        for name, share in shares.items()
    )
    return f"right verdicts on held-out images: {', '.join(each)}"
