"""Pages written from results: an entry's README and the index of all entries.

A page is made from `result.json` alone and shows the pictures next to it. Metrics are
named `measure, setting`: each measure becomes one table of what ran over settings.
`python -m moe_edge.metrics.report` writes all pages of `results/` again, and the tables
of `papers.py`.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_edge.core.checks import ConfigError
from moe_edge.core.files import write_text
from moe_edge.metrics.index import find_entries, head_of, write_index
from moe_edge.metrics.page import render
from moe_edge.metrics.schema import (
    ROWS_VERSION,
    check_answer,
    read_result,
    validate_entry,
)
from moe_edge.metrics.tables import tables_of

PAGE_LINES = 100
MOST_DETAILS = 60  # lines of a page; pages of entries with fewer show all
WORDS = 70  # of a detail or a limit; the whole text stays in result.json
SHORT = "... (all of it: `result.json`)"


def shortened(text: str, words: int = WORDS) -> str:
    """The text, or its first words."""
    parts = text.split()
    return text if len(parts) <= words else f"{' '.join(parts[:words])} {SHORT}"


def check_lines(checks: Mapping[str, bool]) -> list[str]:
    """What was checked; what failed comes first and in capitals."""
    failed = [f"- NOT so: {name}." for name, passed in checks.items() if not passed]
    passed = [name for name, passed in checks.items() if passed]
    if passed:
        failed.append(f"- Yes: {'; '.join(passed)}.")
    return ["Checks:", "", *failed, ""] if checks else []


def origin_line(result: Mapping[str, Any]) -> str:
    """Kind, model, machine, versions and commit in one paragraph."""
    machine, git = result["machine"], result["git"]
    memory = f"{(machine['ram_bytes'] or 0) / 2**30:.0f} GiB"
    where = machine["gpu"] or f"{machine['cpu']}, {machine['cores']} cores, {memory}"
    dirty = " with uncommitted changes" if git["dirty"] else ""
    return (
        f"Kind: {result['kind']}. Model: {result['model'].get('name')} "
        f"({result['model'].get('weights')}). Machine: {where}; Python "
        f"{machine['python']}, JAX {machine['jax']} on {machine['backend']}. "
        f"Started {result['started_utc']}, {result['wall_s']:.0f} s. Commit "
        f"{git['commit'] or 'unknown'}{dirty}."
    )


def starts_lines(starts: Mapping[str, Any]) -> list[str]:
    """Of a study measured in starts: days, commits, and who else computed."""
    each = [start for start in starts["each"] if start["used"]]
    days = sorted({start["started_utc"][:10] for start in each})
    commits = sorted({(start["commit"] or "unknown")[:8] for start in each})
    known = [start["others"] for start in each if start["others"] is not None]
    most = f"at most {max(known):.0%}" if known else "an unknown share"
    busy = [str(start["number"]) for start in each if start["busy"]]
    more = f" Starts {', '.join(busy)} shared it with others." if busy else ""
    again = len(starts["each"]) - len(each)
    return [
        f"Starts: {len(each)} fresh processes of a round each on {', '.join(days)}, "
        f"commits {', '.join(commits)}; others took {most} of the CPU ({again} tries "
        f"repeated).{more} Values are means over starts, +- half of the 95 % interval "
        "of a bootstrap over starts, then their observations; a change inside its "
        'interval is "no difference".',
        "",
    ]


def run_lines(result: Mapping[str, Any]) -> list[str]:
    """The section that says how an entry was made."""
    lines = ["## How it was run", "", *check_lines(result["checks"])]
    lines += starts_lines(result["starts"]) if "starts" in result else []
    return [*lines, "```", result["command"], "```", "", origin_line(result), ""]


def entry_page(folder: Path, result: Mapping[str, Any]) -> str:
    """Of its template, or `entry_readme` with every picture that lies in the folder."""
    if result["schema_version"] == ROWS_VERSION:
        text, _ = render(result["study"], result)
        return "\n".join([text, *run_lines(result)])
    further = sorted({path.name for path in folder.glob("*.png")} - {"plot.png"})
    return entry_readme(result, further)


def entry_readme(result: Mapping[str, Any], further: Sequence[str] = ()) -> str:
    """The entry's README.md: answer, pictures, tables, command, limits.

    Args:
      further: files of pictures besides `plot.png`.
    """
    head = [f"# {result['question']}", "", f"**{result['answer']}**", ""]
    details = result.get("details", [])
    head += [f"- {shortened(text)}" for text in details[:MOST_DETAILS]]
    if (more := len(details) - MOST_DETAILS) > 0:
        head.append(f"- {more} more: `result.json`.")
    head += [""] * bool(details)
    for name in ("plot.png", *further):
        head += [f"![{result['question']}]({name})", ""]
    tail = [*run_lines(result), "What this does not show:", ""]
    tail += [f"- {shortened(limit)}" for limit in result["limits"]]
    left = PAGE_LINES - len(head) - len(tail)
    tables = tables_of(result["metrics"], left - 2, "\n".join(head))
    return "\n".join([*head, *tables, *tail]) + "\n"


def write_pages(root: str | Path) -> list[str]:
    """Writes every entry's page and the index again; returns what is wrong with them.

    Raises:
      ConfigError: an entry that does not fit the schema.
    """
    faults = []
    for folder in find_entries(root):
        result = read_result(folder)
        write_text(folder / "README.md", entry_page(folder, result))
        try:
            validate_entry(folder)
            check_answer(head_of((folder / "README.md").read_text(encoding="utf-8"))[1])
        except ConfigError as error:
            faults.append(f"{folder}: {error}")
    write_index(root)
    return faults


if __name__ == "__main__":
    from moe_edge.metrics.papers import write_tables  # which reads pages by this module

    faults = write_pages(Path("results"))
    write_tables(Path("."))
    sys.exit("\n".join(faults) or 0)
