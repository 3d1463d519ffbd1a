"""The entry of `prism_table1_live`: the host link's rate, the runs, the answer."""

from collections.abc import Mapping, Sequence

from moe_edge.bench.engines import Bench
from moe_edge.convert.open import DEFAULT_MODEL
from moe_edge.metrics.plots_panels import draw_panels
from moe_edge.metrics.results import Findings
from moe_edge.papers.prism.studies.live_entry import live_findings, same_tokens
from moe_edge.papers.prism.studies.live_seeds import each_seed
from moe_edge.papers.prism.studies.served import LOCAL, MethodRuns, median_row, stored
from moe_edge.papers.prism.studies.table1 import (
    ALONE,
    TABLE_1,
    beside,
    changes_of,
    metrics_of,
    panels_of,
)
from moe_edge.papers.prism.studies.table1_live import TOGETHER, Table1Live
from moe_edge.place.placer import ALONE as ALONE_METHODS

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


def measure(settings: Table1Live) -> Findings:
    """Runs every seed; the answer."""
    bytes_per_s, layer_s = host_link(settings.link_factor)
    rows, facts = {method: [] for method in settings.methods}, []
    with settings.folder() as folder:
        for run in each_seed(settings, folder, host_bytes_per_s=bytes_per_s):
            facts.append(run.facts)
            for method in settings.methods:
                rows[method].append(run.facts["rows"][method])
    link = {"host_bytes_per_s": bytes_per_s, "layer_compute_s": layer_s}
    return findings(settings, MethodRuns(rows), facts, link)


def findings(
    settings: Table1Live,
    served: MethodRuns,
    facts: Sequence[Mapping],
    link: Mapping[str, float],
) -> Findings:
    """The entry of some runs."""
    ours, changes = served.cells(), changes_of(served)
    local = [
        median_row(method, "local ratio", served.values(method, LOCAL), "1")
        for method in settings.methods
    ]
    return live_findings(
        settings,
        facts,
        answer=f"Mean latency against {ALONE}, live: {beside(changes)}.",
        details=[
            f"The link to host memory: {link['host_bytes_per_s'] / 1e6:.0f} MB/s. A "
            f"block of {facts[0]['block_bytes'] / 1e3:.0f} kB takes "
            f"{settings.link_factor:g} times what a layer of a decoded token does with "
            f"nothing else running ({MS * link['layer_compute_s']:.2f} ms).",
            *(_line(method, served) for method in settings.methods),
        ],
        metrics=[*metrics_of(served), *local],
        workload=link,
        limits=[
            "The ratio of host link and network decides who wins; the paper names "
            "neither its host link's rate nor its software's time.",
            "Few requests; spreads are over seeds of requests, arrivals and random "
            "placements.",
        ],
        baselines=[ALONE],
        checks=same_tokens(facts) | as_in_the_paper(ours),
        ours=ours,
        plot=lambda path: draw_panels(
            path, panels_of("live", ours), title="Serving alone and together"
        ),
        files=stored({"table I": served}),
        summary={"change": changes},
    )


def _line(method: str, served: MethodRuns) -> str:
    """What a method's servers did."""
    if method not in ALONE_METHODS:
        share, calls = served.median(method, LOCAL), "remote_calls"
        extra_ms = MS * served.median(method, "call_overhead_s")
        return (
            f"{method}: {100 * share:.0f} % of pairs at home, "
            f"{served.median(method, calls):.0f} remote calls; messages take "
            f"{extra_ms:.2f} ms of a layer that has some."
        )
    moved_mb = served.median(method, "host_bytes") / 1e6
    hits = served.median(method, "hit_ratio")
    return (
        f"{method}: {100 * hits:.0f} % of blocks found in their slots, "
        f"{moved_mb:.0f} MB from host memory, "
        f"{served.median(method, 'redirected'):.0f} requests passed on."
    )


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
