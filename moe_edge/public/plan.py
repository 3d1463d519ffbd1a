"""What `moe-edge plan` does, from Python."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_edge.core.checks import ConfigError
from moe_edge.core.typed import check_options
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.planner.options import PlanOptions
from moe_edge.public.arguments import refuse_unknown

PLAN_HINTS = {
    "path": "give it as the first argument",
    "checkpoint": "give it as the first argument",
    "offload": "write options, a dict",
    "budget": "write device_memory",
    "max_batch": "write batch",
    "max_context": "write context",
    "max_new_tokens": "write new_tokens",
    "out_dir": "moe-edge plan writes files",
}
_TARGETS = tuple(
    field.name
    for field in dataclasses.fields(PlanOptions)
    if field.name not in ("checkpoint", "fixed")
)


def plan(
    path: str | Path | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    **targets: Any,
) -> dict[str, Any]:
    """Chooses how a model runs in a budget, and says what to expect.

    It measures this machine (about a minute and a half for the default model), replays
    what was recorded with all policies, and takes the best that meets the targets.

    >>> from pathlib import Path
    >>> described = Path(me.__file__).parent / "default_model"
    >>> found = me.plan(
    ...     config_json=str(described), machine="rtx_4090", device_memory="50%"
    ... )
    >>> found["feasible"], found["chosen"]["offload"]
    (True, {'device_memory': '50%'})
    >>> model.offload(**found["chosen"]["offload"]).close()

    Args:
      path: of the checkpoint, as of `load`; None with `config_json`, else "default".
      options: options of `Model.offload` that stay as they are.
      **targets: budget, targets and sources, named like the flags of `moe-edge plan`:
        device_memory, tpot_ms, max_ppl_ratio, card, machine, verify, ...
    Returns:
      the last line of `moe-edge plan`, without a folder: `chosen` (with `offload`, the
      arguments of `Model.offload`; or with `weights` "mapped", an argument of `load`
      whose model is run `resident`), `predicted`, `alternatives`, `refused`,
      `assumptions`, ... Where no configuration meets the targets `feasible` is False
      and the nearest is chosen.
    Raises:
      ConfigError: an unknown argument, targets that exclude each other, or a file of
        another checkpoint.
      CapacityError: a budget of too few slots (the least is named).
    """
    known = ("path", "options", *_TARGETS)
    refuse_unknown("plan", [n for n in targets if n not in _TARGETS], known, PLAN_HINTS)
    check_options("plan", PlanOptions, targets)
    given = dict(options or {})
    check_options("options of plan", OffloadOptions, given)
    if path is not None and not isinstance(path, (str, os.PathLike)):
        raise ConfigError(
            f"path is {path!r:.60}, expected a folder, a file or 'default'"
        )
    for name, value in given.items():
        if not isinstance(value, (str, int, float, bool, dict, type(None))):
            raise ConfigError(
                f"options of plan: {name} is {value!r:.60}, expected a name; register "
                "the class (moe_edge.register) and give its name"
            )
    asked = PlanOptions(
        checkpoint=None if path is None else str(path),
        fixed=[f"{name}={value!r}" for name, value in given.items()],
        **targets,
    )
    base, fixed = asked.base(None)
    from moe_edge.planner.plan import make_plan  # loads JAX

    return make_plan(asked, base, fixed).summary
