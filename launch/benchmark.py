"""Times our paths and, where installed, peers on the same checkpoint in the same run.

python launch/benchmark.py --suite decode --out_dir DIR
"""

import json
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import gin
from absl import flags

from launch import common
from moe_edge.convert.open import open_checkpoint
from moe_edge.convert.rules import hf_shapes
from moe_edge.core.checks import check_known, check_positive
from moe_edge.core.files import check_out_dir
from moe_edge.metrics.plots import benchmark_bars
from moe_edge.metrics.results import Entry, metric, write_entry
from moe_edge.model.config import ModelConfig
from moe_edge.studies.speed import convert, decode, offload, placement, refactor, traced

SUITES = {
    "decode": decode.decode_suite,
    "prefill": decode.prefill_suite,
    "convert": convert.convert_suite,
    "offload": offload.offload_suite,
    "refactor": refactor.refactor_suite,
    "traced": traced.traced_suite,
    "placement": placement.placement_suite,
}
# Name, and HF folder or config, of what a suite measures, as it left the work folder.
MODELS = {
    "decode": lambda folder: decode.benchmark_models(folder),
    "prefill": lambda folder: decode.benchmark_models(folder),
    "convert": convert.convert_models,
    "offload": offload.offload_models,
    "refactor": refactor.refactor_models,
    "traced": traced.traced_models,
    "placement": placement.placement_models,
}
WEIGHTS = (
    "Random weights: speed only, no quality claim. They route uniformly, but for suite "
    "`traced`, whose routers repeat a recorded trace."
)
# What the figures of a suite do not show, where it is not the above.
SYNTHETIC = {
    "refactor": "Synthetic activations: planted clusters of neurons with log-normal "
    "scales. They show the solver's speed and objective, no model's quality.",
    "placement": "Seconds and gaps: made-up statistics, Zipf-1 over a layer's blocks, "
    "half of it in an order that all servers share; gaps are of eq. 2. Latencies: "
    "simulated, routing from a fitted generator; ratios only.",
}
SUITE = flags.DEFINE_string("suite", None, f"one of {', '.join(SUITES)}")
REPEATS = flags.DEFINE_integer("repeats", None, "measured rounds of every case")
WORK_DIR = flags.DEFINE_string(
    "work_dir", None, "keeps the random checkpoints for a next run (default: removed)"
)


@gin.register
def benchmark(
    *,
    out_dir: str,
    suite: str = "decode",
    repeats: int = 5,
    work_dir: str | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    config_text: Callable[[], str] = str,
) -> dict:
    """Runs one suite.

    Args:
      out_dir: folder of the results entry.
      suite: one of SUITES.
      repeats: measured rounds; a figure is the median, a ratio the median of rounds.
      work_dir: where random checkpoints (up to 4 GB) are made and kept; None uses a
        temporary folder.
      overwrite: replace a non-empty `out_dir`.
      dry_run: check and stop.
      config_text: gives the config to store.
    """
    check_known("suite", suite, SUITES)
    check_positive("repeats", repeats)
    check_out_dir(out_dir, overwrite)
    if dry_run:
        return {"suite": suite, "dry_run": True}
    started = time.time()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(work_dir or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        rows = SUITES[suite](repeats, folder)
        model = describe_models(MODELS[suite](folder))
    print_table(rows)
    peers = sorted({row["peer_name"] for row in rows if row["peer"] is not None})
    entry = Entry(
        question=f"How fast is `{suite}`, beside {', '.join(peers) or 'no peer'}?",
        answer="; ".join(sentence(row) for row in rows) + ".",
        model=model,
        workload={"suite": suite, "repeats": repeats},
        metrics=[row_metric for row in rows for row_metric in metrics_of(row)],
        kind="emulated" if any(row.get("emulated") for row in rows) else "measured",
        limits=[
            SYNTHETIC.get(suite, WEIGHTS),
            "One machine; other programs may have shared it. Trust the ratios, which "
            "are medians over rounds measured side by side.",
        ],
        baselines=peers,
        started_s=started,
    )
    write_entry(
        out_dir,
        entry,
        plot=lambda path: benchmark_bars(path, rows, f"Benchmark suite `{suite}`"),
        config_text=config_text(),
        overwrite=overwrite,
        files={"benchmark.json": json.dumps(common.plain(rows), indent=1) + "\n"},
    )
    keys = ("case", "ours", "peer", "unit", "ratio", "limit_fraction")
    return {
        "suite": suite,
        "rows": [{key: row[key] for key in keys} for row in rows],
        "out_dir": out_dir,
    }


def describe_models(models: list[tuple[str, Path | ModelConfig]]) -> dict:
    """`model` of the results entry; of several, the name lists their parameters."""
    if not models:
        return {"name": "no model", "params": 0, "weights": "none"}
    params = {}
    for name, source in models:
        is_config = isinstance(source, ModelConfig)
        shapes = hf_shapes(source if is_config else open_checkpoint(source).config)
        params[name] = sum(math.prod(shape) for shape in shapes.values())
    listed = ", ".join(
        f"{name} ({count / 1e6:.1f} M)" for name, count in params.items()
    )
    return {
        "name": next(iter(params)) if len(params) == 1 else listed,
        "params": next(iter(params.values())) if len(params) == 1 else 0,
        "weights": "random" if "default" not in params else "random, but for default",
    }


def sentence(row: dict) -> str:
    """A row in a few words."""
    text = f"{row['case']} {row['ours']:.3g} {row['unit']}"
    return text if row["ratio"] is None else f"{text} ({row['ratio']:.2f}x the peer)"


def metrics_of(row: dict) -> list[dict]:
    """Metrics of a row for the results entry."""
    n = len(row["runs"]["ours"])
    metrics = [metric("ours", row["case"], row["ours"], row["unit"], n)]
    if row["peer"] is not None:
        metrics.append(
            metric(row["peer_name"], row["case"], row["peer"], row["unit"], n)
        )
        spread = (max(row["round_ratios"]) - min(row["round_ratios"])) / 2
        metrics.append(
            metric(
                "ours / peer",
                row["case"],
                row["ratio"],
                "1",
                n,
                ("half range", spread),
            )
        )
    for name, unit in (("limit_fraction", "1"), ("peak_rss_bytes", "bytes")):
        if row.get(name) is not None:
            metrics.append(metric(name, row["case"], row[name], unit, n))
    return metrics


def print_table(rows: list[dict]) -> None:
    """One line a case, for people."""
    print(
        f"{'case':34}{'ours':>10}{'peer':>10}  {'unit':9}{'ratio':>7}{'of limit':>10}"
    )
    for row in rows:
        peer = "-" if row["peer"] is None else f"{row['peer']:.1f}"
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}x"
        limit = row["limit_fraction"]
        limit = "-" if limit is None else f"{100 * limit:.0f} %"
        line = f"{row['case']:34}{row['ours']:10.1f}{peer:>10}  {row['unit']:9}"
        print(f"{line}{ratio:>7}{limit:>10}")


if __name__ == "__main__":
    common.run("benchmark", (SUITE, REPEATS, WORK_DIR))
