"""Pages written from results: an entry's README and the index of all entries."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_edge.metrics.schema import validate_entry


def format_value(row: Mapping[str, Any]) -> str:
    """A metric's value with its spread, four digits."""
    text = f"{row['value']:.4g}"
    if row["spread"]["kind"] != "none":
        text += f" ± {row['spread']['value']:.2g} ({row['spread']['kind']})"
    return text


def entry_readme(result: Mapping[str, Any]) -> str:
    """The entry's README.md: question, answer, table, picture, command, limits."""
    machine, git = result["machine"], result["git"]
    rows = [
        f"| {row['policy']} | {row['name']} | {format_value(row)} | {row['unit']} | "
        f"{row['n']} |"
        for row in result["metrics"]
    ]
    checks = [
        f"- {name}: {'yes' if passed else 'NO'}"
        for name, passed in result["checks"].items()
    ]
    memory = f"{(machine['ram_bytes'] or 0) / 2**30:.0f} GiB"
    where = machine["gpu"] or f"{machine['cpu']}, {machine['cores']} cores, {memory}"
    dirty = " with uncommitted changes" if git["dirty"] else ""
    lines = [
        f"# {result['question']}",
        "",
        f"**{result['answer']}**",
        "",
        "| what ran | measure | value | unit | n |",
        "| --- | --- | --- | --- | --- |",
        *rows,
        "",
        f"![{result['question']}](plot.png)",
        "",
        *(["Checks:", "", *checks, ""] if checks else []),
        "Run again:",
        "",
        "```",
        result["command"],
        "```",
        "",
        f"Kind: {result['kind']}. Model: {result['model'].get('name')} "
        f"({result['model'].get('weights')}). Machine: {where}; Python "
        f"{machine['python']}, JAX {machine['jax']} on {machine['backend']}. "
        f"Started {result['started_utc']}, {result['wall_s']:.0f} s. Commit "
        f"{git['commit'] or 'unknown'}{dirty}.",
        "",
        "What this does not show:",
        "",
        *(f"- {limit}" for limit in result["limits"]),
    ]
    return "\n".join(lines) + "\n"


INDEX_HEAD = """# Results

Every folder answers one question with measured, emulated or simulated numbers; its
README has the command to run it again. Runs of your own land in `local/`, which git
ignores. This page is written by `python -m moe_edge.metrics.report`.
"""


def find_entries(root: str | Path) -> list[Path]:
    """Folders of all entries below `root`, without `local/`, sorted."""
    root = Path(root)
    found = [path.parent for path in root.rglob("result.json")]
    return sorted(path for path in found if "local" not in path.relative_to(root).parts)


def index_text(root: str | Path) -> str:
    """The text of results/README.md."""
    lines = [INDEX_HEAD, "| entry | question | answer | kind | machine |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for folder in find_entries(root):
        result = validate_entry(folder)
        machine = result["machine"]
        where = machine["gpu"] or f"{machine['cpu']}, {machine['cores']} cores"
        name = folder.relative_to(root).as_posix()
        lines.append(
            f"| [{name}]({name}/README.md) | {result['question']} | "
            f"{result['answer']} | {result['kind']} | {where} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (Path("results") / "README.md").write_text(index_text("results"), encoding="utf-8")
