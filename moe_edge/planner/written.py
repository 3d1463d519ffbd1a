"""The files of a plan: plan.json, plan.gin, README.md."""

from collections.abc import Mapping
from typing import Any

PROMPT = "Once upon a time"
UNITS = {"tpot_s": (1e3, "ms"), "ttft_s": (1e3, "ms"), "device_bytes": (1e-6, "MB")}
UNITS |= {"host_bytes": (1e-6, "MB"), "mapped_bytes": (1e-6, "MB")}
UNITS |= {"tokens_per_s": (1, "tokens/s")}


def gin_text(root: str, given: Mapping[str, Any], offload: Mapping[str, Any]) -> str:
    """A gin file of a root."""
    lines = [f"# moe-edge {root} --gin_file plan.gin"]
    lines += [f"{root}.{name} = {value!r}" for name, value in given.items()]
    lines += [f"offload.{name} = {value!r}" for name, value in offload.items()]
    return "\n".join(lines) + "\n"


def readme(plan: Mapping[str, Any], command: str) -> str:
    """The plan for people."""
    chosen, lines = plan["chosen"], ["# Plan", ""]
    if not plan["feasible"]:
        lines += ["**No configuration meets the targets; this one comes nearest.**", ""]
    parts = [f"`{name}` {value!r}" for name, value in chosen["offload"].items()]
    if chosen["weights"] is not None:
        parts.append(f"`weights` {chosen['weights']!r}, nothing offloaded")
    if chosen["k"] is not None:
        parts.append(f"`k` {chosen['k']}")
    if (placed := chosen["placement"]) is not None:
        held = ", ".join(map(str, placed["slots"]))
        parts.append(f"placement `{placed['method']}`, slots {held}")
    if chosen["expert_dtype"] is not None:
        parts.append(f"experts in `{chosen['expert_dtype']}`")
    lines += [f"Chosen: {', '.join(parts)}.", ""]
    if chosen["convert"]:
        lines += ["Convert the checkpoint first:", "", "```bash", chosen["convert"]]
        lines += ["```", ""]
    lines += ["```bash", command, "```", "", "| | low | middle | high | measured |"]
    lines += ["|---|---|---|---|---|"]
    for key, found in plan["predicted"].items():
        scale, unit = UNITS.get(key, (1, ""))
        measured = (plan["measured"] or {}).get(key)
        shown = [measured] if found is None else [*found, measured]
        cells = ["-" if v is None else f"{scale * v:.4g}" for v in shown]
        cells = ["-"] * (4 - len(cells)) + cells
        lines.append(f"| {key} {f'({unit})' if unit else ''} | {' | '.join(cells)} |")
    lines += ["", "Ranges: 95 %, of other prompts of this kind and of the replay."]
    if plan["chosen_was_best"] is not None:
        lines += [f"Chosen was the best of those that ran: {plan['chosen_was_best']}."]
    for name, error in (plan["errors"] or {}).items():
        if error["runs"]:
            median, worst = 100 * error["median"], 100 * error["worst"]
            lines.append(
                f"Error of the time a token, {name.replace('_', ' ')}: median "
                f"{median:.1f} %, worst {worst:.1f} % of {error['runs']} runs."
            )
    if plan["alternatives"]:
        lines += ["", "## What loses, and by how much", ""]
        for each in plan["alternatives"]:
            parts = [f"{name} {value!r}" for name, value in each["offload"].items()]
            if each["weights"] is not None:
                parts.append(f"weights {each['weights']!r}")
            if each["placement"] is not None:
                parts.append(f"placement {each['placement']['method']}")
            if each["k"] is not None:
                parts.append(f"k {each['k']}")
            if each["expert_dtype"] is not None:
                parts.append(f"experts in {each['expert_dtype']}")
            loses = ", ".join(
                f"{key} +{100 * share:.1f} %" for key, share in each["loses_by"].items()
            )
            loses = loses or "no worse by what is known"
            if each["misses"]:
                loses += f"; misses the target of {', '.join(each['misses'])}"
            lines.append(f"- {', '.join(parts)}: {loses}")
    if plan["refused"]:
        lines += ["", "## What was refused", ""]
        lines += [
            f"- {each['what']}: {each['reason']}; {each['remedy']}"
            for each in plan["refused"]
        ]
    lines += ["", "## Assumptions", "", *(f"- {a}" for a in plan["assumptions"])]
    named = "; ".join(f"{name}: {where}" for name, where in plan["sources"].items())
    lines += ["", f"Sources: {named}.", ""]
    return "\n".join(lines)
