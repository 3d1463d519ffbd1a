"""What studies of live servers share: their sizes, and a checked run of each seed.

Real processes serve the default model; `tc` limits their links. All methods of a seed
follow each other over the same processes and answer the same requests.
"""

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from moe_edge.bench.live import kept_compiled, live_run
from moe_edge.bench.rounds import round_order
from moe_edge.bench.settings import Positive, Seeds, known
from moe_edge.cluster.model_checks import check_model
from moe_edge.cluster.prism_options import PrismOptions
from moe_edge.convert.open import open_checkpoint
from moe_edge.core.checks import MoeEdgeError
from moe_edge.place.placer import METHODS, PLACERS

MethodName = Annotated[str, known("method", METHODS)]
PlacerName = Annotated[str, known("method", PLACERS)]
OPTIONS = {field.name for field in dataclasses.fields(PrismOptions)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LiveServers(Seeds):
    """What every study of live servers reads; it says `run`. `Seeds` names the rest.

    Attributes:
      slots: blocks that each server may hold.
      workload: a task family a server.
      requests_per_server: how many.
      output_tokens: most new tokens of a request.
      link_mbps: of every server's link, made by `tc` (needs root); None: loopback.
      keep_dir: where the runs are kept; None: they are removed.
    """

    slots: str = "115,115,230"
    workload: str = "arithmetic,words,stories"
    requests_per_server: int = 10
    output_tokens: int = 32
    link_mbps: Positive | None = 500.0
    seeds: int = 3
    keep_dir: str | None = None

    @property
    def servers(self) -> int:
        return len(self.workload.split(","))

    def told(self) -> dict[str, Any]:
        """All but where runs are kept, for the entry."""
        stored = dataclasses.asdict(self)
        return {name: value for name, value in stored.items() if name != "keep_dir"}

    @contextlib.contextmanager
    def folder(self) -> Iterator[Path]:
        """Where runs are written; processes that start meanwhile share programs."""
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(self.keep_dir or temporary).resolve()
            folder.mkdir(parents=True, exist_ok=True)
            with kept_compiled(folder / "compiled"):
                yield folder


@dataclasses.dataclass(frozen=True, kw_only=True)
class LiveMethods(LiveServers):
    """`LiveServers` names the rest.

    Attributes:
      methods: each serves all requests in turn.
      interval_s: mean seconds between requests of a server.
    """

    methods: Sequence[MethodName]
    interval_s: Positive = 2.0

    def run(self, seed: int) -> dict[str, Any]:
        """Options of a seed's run; methods begin with another one every time."""
        told = {k: v for k, v in dataclasses.asdict(self).items() if k in OPTIONS}
        methods = ",".join(round_order(list(self.methods), seed - self.seed))
        return told | {"methods": methods, "seed": seed, "servers": self.servers}


def check(settings: LiveMethods) -> None:
    """Refuses a cluster that cannot be."""
    check_cluster(settings.run(settings.seed))


def check_cluster(options: dict[str, Any]) -> None:
    """Refuses options of a run, as the run itself would."""
    found = PrismOptions(**options)
    check_model(found, open_checkpoint(found.checkpoint))


class LiveSeed(NamedTuple):
    """A run: its seed, its folder, and what its cluster.json says."""

    seed: int
    folder: Path
    facts: dict[str, Any]


def served(folder: Path, label: str, options: dict[str, Any]) -> dict[str, Any]:
    """cluster.json of a live run that served all its requests.

    Raises:
      MoeEdgeError: a run lost requests, or cannot be made here.
    """
    facts = live_run(folder, **options)
    if facts["lost_requests"] or facts["failures"]:
        raise MoeEdgeError(
            f"{label}: {facts['lost_requests']} requests were lost, failures "
            f"{facts['failures']}; see {folder}/logs"
        )
    return facts


def each_seed(settings: LiveMethods, folder: Path, **more) -> Iterator[LiveSeed]:
    """Runs every seed, one after another, with `more` options; raises as `served`."""
    for seed in settings.all_seeds:
        where, options = folder / f"seed_{seed}", settings.run(seed) | more
        yield LiveSeed(seed, where, served(where, f"seed {seed}", options))
