"""What launch/refactor.py says at its end: a line for programs, a table for people."""

import math
import time
from typing import Any


def summary_of(report: dict[str, Any], started: float) -> dict[str, Any]:
    """The last line of stdout; JSON has no infinity."""
    ppl = report.get("ppl_by_k", {})
    return {
        "objective": report["objective"],
        "objective_heldout": report["objective_heldout"],
        "seconds": round(time.monotonic() - started, 3),
        "ppl_by_k": {k: v if math.isfinite(v) else None for k, v in ppl.items()},
        "identity_error": report.get("identity_error"),
    }


def print_report(report: dict[str, Any]) -> None:
    """The report for people."""
    print(f"{'share of |M| left out':24}{'fitted':>9}{'held out':>10}")
    fitted, heldout = (report["shares"][part] for part in ("fitted", "heldout"))
    for name, share in fitted.items():
        held = f"{100 * heldout[name]:8.2f} %" if name in heldout else f"{'-':>10}"
        print(f"{name:24}{100 * share:7.2f} %{held}")
    few = sum(n for rule, n in report["rules"].items() if rule != "solved")
    print(f"experts with too few tokens to be solved: {few}")
    error = report["identity_error"]
    print(f"all sub-experts on: logits differ from the parent's by {error:.2g} std")
    parents = report["parent_ppl_by_k"]
    for k, value in report["ppl_by_k"].items():
        beside = f"   parent {parents[k]:.3f}" if k in parents else ""
        print(f"K {k:3}   perplexity {value:.3f}{beside}")
