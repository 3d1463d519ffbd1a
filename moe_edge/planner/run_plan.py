"""The root of `moe-edge plan`: budget and targets in, a configuration out."""

import math
from typing import Any

from moe_edge.core.checks import MoeEdgeError
from moe_edge.core.files import write_json, write_text
from moe_edge.core.run_folder import RunFolder, root, unpacked
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.planner.options import PlanOptions


class NotFeasible(MoeEdgeError):
    """No configuration meets the targets; the nearest plan is written."""

    exit_code = 3

    def __init__(self, message: str, summary: dict[str, Any]):
        super().__init__(message)
        self.summary = summary


@root
@unpacked(asked=PlanOptions)
def run_plan(
    run: RunFolder, *, asked: PlanOptions, offload: OffloadOptions | None = None
) -> dict[str, Any]:
    """Chooses how a model runs in a budget, and says what to expect.

    Args:
      run: folder of `plan.json`, `plan.gin` (for `moe-edge generate --gin_file`; of
        servers, `moe-edge cluster`), `README.md`, and what was measured or placed:
        `machine.json`, `trace.csv.gz`, `placement.npy`, `placement.json`.
      asked: budget and targets.
      offload: options that stay as they are, where they differ from the defaults.
    Raises:
      MoeEdgeError: bad input, or targets that nothing meets (exit code 3; the nearest
        plan is written).
    """
    base, fixed = asked.base(offload)
    from moe_edge.planner.plan import check_plan, make_plan  # loads JAX

    if run.dry_run:
        check_plan(asked, base, fixed)
        return {"fixed": sorted(fixed)}
    plan = make_plan(asked, base, fixed, out_dir=run.path)
    summary = plan.summary

    def save(folder):
        write_json(folder / "plan.json", summary | {"out_dir": str(run.out_dir)})
        write_text(folder / "plan.gin", plan.gin)
        write_text(folder / "README.md", plan.readme)
        for name, write in plan.files.items():
            write(folder / name)

    run.write(save)
    print(plan.line)
    if not summary["feasible"]:
        missed = ", ".join(
            f"{key} by {100 * share:.0f} %"
            if math.isfinite(share)
            else f"{key}, of which nothing is known"
            for key, share in plan.missed.items()
        )
        raise NotFeasible(
            f"no configuration meets the targets; the nearest misses {missed}: loosen "
            f"them or give more memory (nearest plan in {run.path})",
            summary | {"out_dir": str(run.out_dir)},
        )
    return summary
