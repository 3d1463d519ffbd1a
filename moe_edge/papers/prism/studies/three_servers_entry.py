"""The rows of `prism_three_servers`: measured and simulated side by side."""

from moe_edge.metrics.frames import Rows, of_seeds
from moe_edge.papers.prism.studies.live_entry import same_tokens, tell
from moe_edge.papers.prism.studies.live_shares import PARTS
from moe_edge.papers.prism.studies.served import (
    EPLB,
    LOCAL,
    MEAN,
    OPTIMUM,
    OURS,
    MethodRuns,
    stored,
)
from moe_edge.papers.prism.studies.three_servers import (
    COMPUTED,
    REAL,
    Runs,
    ThreeServers,
    run_all,
)

MORE_LOCAL = 0.08  # of all pairs, than heterogeneous EPLB
KEYS = (LOCAL, MEAN, "remote_calls")


def measure(settings: ThreeServers, rows: Rows) -> None:
    """Runs it all."""
    with settings.folder() as folder:
        runs = run_all(settings, folder)
    tell_runs(rows, runs)
    tell(rows, settings, runs.facts)
    rows.checks |= same_tokens(runs.facts) | targets(runs.measured)
    rows.about["baselines"] = [m for m in settings.methods if m not in (OPTIMUM, OURS)]
    real = runs.measured
    rows.files |= stored(
        {
            REAL: real.only(*real.rows[settings.methods[0]][0]),
            COMPUTED: runs.simulated.only(*KEYS, "error_pct"),
            "shares": MethodRuns(runs.shares),
        }
    )


def tell_runs(rows: Rows, runs: Runs) -> None:
    """Adds what all seeds of all methods gave."""
    real = runs.measured
    for method in real.rows:
        for kind, served in ((REAL, real), (COMPUTED, runs.simulated)):
            values = [of_seeds(served.values(method, key)) for key in KEYS]
            local, mean_s, calls = values
            given = {"local": local, "mean_s": mean_s, "remote_calls": calls}
            rows("runs", method, kind, **given)
        rows("errors", method, error_pct=of_seeds(runs.errors(method)))
        for part in PARTS:
            shares = [share[part] for share in runs.shares[method]]
            rows("time", method, part, share=of_seeds(shares))
    for method, cells in real.cells().items():
        for server, seconds in enumerate(cells[:-1], 1):
            rows("servers", method, str(server), seconds=seconds)
        rows("servers", method, "all", seconds=cells[-1])
    for method in real.rows if EPLB in real.rows else ():
        if method != EPLB:
            latency = of_seeds(real.ratio(method, EPLB))
            away = (1 - real.values(method, LOCAL)) / (1 - real.values(EPLB, LOCAL))
            rows("changes", method, latency=latency, remote=of_seeds(away))
    late = sum(facts["compiled_after_warmup"] for facts in runs.facts)
    rows("compiled", programs=late)


def targets(real: MethodRuns) -> dict[str, bool]:
    """What the project set out to reach, seed by seed."""
    found = {}
    for method in (OPTIMUM, OURS):
        if {method, EPLB} <= set(real.rows):
            more = real.values(method, LOCAL) - real.values(EPLB, LOCAL)
            name = f"target: {method} keeps {MORE_LOCAL} more pairs local than {EPLB}"
            found[name] = bool((more >= MORE_LOCAL).all())
            name = f"target: {method} is faster than {EPLB} in every seed"
            found[name] = bool((real.ratio(method, EPLB) < 1).all())
    return found
