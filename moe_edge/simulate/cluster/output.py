"""What people see of simulated methods: progress, a table, and a file of requests."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_edge.simulate.cluster.report import ClusterResult


def write_requests(path: Path, result: ClusterResult) -> None:
    """A line a request, for pictures of latency over time."""
    lines = ["server,domain,arrival_s,first_token_s,latency_s"]
    columns = zip(
        *(result.server_R, result.domain_R, result.arrival_R),
        *(result.first_R, result.latency_R),
        strict=True,
    )
    lines += [f"{n},{d},{a:.6f},{f:.6f},{s:.6f}" for n, d, a, f, s in columns]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def progress(name: str, seed: int, result: ClusterResult, took_s: float) -> str:
    """One line while people wait."""
    return (
        f"{name}, seed {seed}: {result.mean_latency_s:.3f} s a request, "
        f"{result.events} events in {took_s:.1f} s"
    )


def print_table(rows: Mapping[str, Mapping[str, Any]], left_out: Mapping[str, str]):
    """The comparison for people; many servers are summed up."""
    shown = min(len(next(iter(rows.values()))["latency_s_N"]), 4)
    heads = "".join(f"{f'server {n + 1} s':>12}" for n in range(shown))
    print(f"{'method':20}{heads}{'mean s':>10}{'local %':>9}{'remote calls':>14}")
    for name, row in rows.items():
        cells = "".join(
            f"{'-' if s is None else format(s, '.3f'):>12}"
            for s in row["latency_s_N"][:shown]
        )
        print(
            f"{name:20}{cells}{row['mean_latency_s']:10.3f}"
            f"{100 * row['local_ratio']:9.1f}{row['remote_calls']:14.0f}"
        )
    for name, reason in left_out.items():
        print(f"{name:20}left out: {reason}")
