import pytest

from moe_edge.papers.prism.studies import speed_simulate as module
from moe_edge.papers.prism.studies.speed_simulate import (
    SETTINGS,
    SimulateSettings,
    simulate_rows,
)


@pytest.mark.slow
def test_rows_name_bars_and_peers(monkeypatch):
    monkeypatch.setattr(
        module,
        "SETTINGS",
        {"mixed": {**SETTINGS["mixed bigbench"], "correlated": False}},
    )
    monkeypatch.setattr(module, "alone", lambda function, *args: function(*args))
    monkeypatch.setattr("moe_edge.simulate.cluster.build.POOL_TOKENS", 400)
    sizes = SimulateSettings(
        repeats=1,
        gpus=8,
        tokens=2,
        speed=((6, 1, 60.0), (12, 2, None)),
        requests_per_server=2,
        latency_seeds=1,
    )
    rows = {r["case"]: r for r in simulate_rows(sizes)}
    assert set(rows) == {
        *(
            f"simulate/{what} 6 requests 8 GPUs {method}"
            for what in ("seconds", "memory", "event")
            for method in ("prism", "uniform")
        ),
        *(
            f"simulate/{what} 12 requests 8 GPUs prism"
            for what in ("seconds", "memory", "event")
        ),
        "latency/latency mixed against optimal",
        "latency/latency mixed against eplb_heterogeneous",
    }
    seconds = rows["simulate/seconds 6 requests 8 GPUs uniform"]
    assert seconds["limit_fraction"] == seconds["ours"] / 60
    assert rows["simulate/seconds 12 requests 8 GPUs prism"]["limit_fraction"] is None
    against = rows["latency/latency mixed against optimal"]
    assert against["ratio"] == against["ours"] / against["peer"]
    assert against["limit_fraction"] == against["ratio"] / 0.9


def test_held_out_seeds_and_machines_are_not_those_of_the_other_rows(monkeypatch):
    seen = []

    def spy(**options):
        seen.append((options["seed"], options["cluster_options"].get("gpus")))
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "build_scenario", spy)
    for name in ("mixed bigbench", "held-out bigbench"):
        with pytest.raises(KeyboardInterrupt):
            module.latency_rows(name, SETTINGS[name], SimulateSettings())
    assert seen == [(0, None), (100, module.HELD_OUT_GPUS)]
