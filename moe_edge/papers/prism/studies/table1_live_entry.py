"""The entry of `prism_table1_live`: the host link's rate, the runs, the answer."""

from collections.abc import Mapping, Sequence

from moe_edge.bench.engines import Bench
from moe_edge.convert.open import DEFAULT_MODEL
from moe_edge.metrics.frames import Rows
from moe_edge.papers.prism.studies.live_entry import same_tokens, tell
from moe_edge.papers.prism.studies.live_seeds import each_seed
from moe_edge.papers.prism.studies.served import LOCAL, MethodRuns
from moe_edge.papers.prism.studies.table1 import (
    ALONE,
    TABLE_1,
    derive,
    tell_methods,
)
from moe_edge.papers.prism.studies.table1_live import TOGETHER, Table1Live

__all__ = ["derive", "measure"]
MS = 1e3
PROMPT, NEW_TOKENS, PROMPTS = 16, 32, 5  # of the measurement of a layer


def host_link(factor: float) -> tuple[float, float]:
    """(bytes per second of the link to host memory, a layer's seconds).

    A layer is of a decoded token, by the resident engine with nothing else running.
    """
    prompts = [list(range(PROMPT * n, PROMPT * (n + 1))) for n in range(PROMPTS)]
    with Bench(DEFAULT_MODEL, with_tokenizer=False) as bench:
        layer_s = bench.layer_seconds(prompts, NEW_TOKENS)
        return bench.standard_link(layer_s, factor, 0.0).bytes_per_s, layer_s


def measure(settings: Table1Live, rows: Rows) -> None:
    """Runs every seed."""
    bytes_per_s, layer_s = host_link(settings.link_factor)
    by_method, facts = {method: [] for method in settings.methods}, []
    with settings.folder() as folder:
        for run in each_seed(settings, folder, host_bytes_per_s=bytes_per_s):
            facts.append(run.facts)
            for method, found in by_method.items():
                row = run.facts["rows"][method]
                overhead_s, num_bytes = (
                    row.get(key) for key in ("call_overhead_s", "host_bytes")
                )
                scaled = {
                    "overhead_ms": None if overhead_s is None else MS * overhead_s,
                    "host_mb": None if num_bytes is None else 1e-6 * num_bytes,
                }
                found.append(row | scaled)
    served = MethodRuns(by_method)
    counts = ("hit_ratio", "redirected", "remote_calls", "overhead_ms", "host_mb")
    tell_methods(rows, served, local=LOCAL, **{name: name for name in counts})
    link = {"host_bytes_per_s": bytes_per_s, "layer_compute_s": layer_s}
    more = link | {"block_bytes": facts[0]["block_bytes"]}
    tell(rows, settings, facts, more)
    rows.checks |= same_tokens(facts) | as_in_the_paper(served.cells())
    rows.about["baselines"] = [ALONE]


def as_in_the_paper(ours: Mapping[str, Sequence[float]]) -> dict[str, bool]:
    """Order of the means, and of every server who is faster, alone or together."""
    known = [method for method in TABLE_1 if method in ours]
    orders = [sorted(known, key=lambda m: rows[m][-1]) for rows in (TABLE_1, ours)]
    signs = [
        [a > b for a, b in zip(rows[ALONE], rows[TOGETHER], strict=True)]
        for rows in (TABLE_1, ours)
    ]
    found = {"target: means in the paper's order": orders[0] == orders[1]}
    places = [*(f"server {n + 1}" for n in range(len(signs[0]) - 1)), "all servers"]
    for place, theirs, mine in zip(places, *signs, strict=True):
        name = f"target: {'together' if theirs else 'alone'} is faster on {place}"
        found[name] = theirs == mine
    return found
