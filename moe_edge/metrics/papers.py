"""Tables of what papers show beside what we found, made from results entries.

`results/papers.json` lists every figure and table of the papers: what it shows, and an
excuse or the entries that answer it, each with a verdict and why. All else is read from
the entries. `python -m moe_edge.metrics.report` writes the tables anew on the pages
that have a place for them, `<!-- papers NAME -->` up to `<!-- end -->`: `all` (a table
a paper) or `verdicts` (how many of each).
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_edge.core.checks import ConfigError, check_known
from moe_edge.core.files import write_text
from moe_edge.core.json_reader import read_json
from moe_edge.metrics.index import head_of
from moe_edge.metrics.schema import read_result

VERDICTS = ("reproduced", "partly", "not reproduced", "uninformative")
KEYS = {"id", "title", "paper", "excuse", "entries"}
KINDS = {"simulated": "computed"}  # what tables call a kind of results
PAGES = ("docs/results.md", "README.md")
_PART = re.compile(r"(<!-- papers (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
Item = Mapping[str, Any]


def read_items(root: Path) -> list[Item]:
    """The items of `results/papers.json`.

    Raises:
      ConfigError: one that is said twice, has other keys, an unknown verdict, an entry
        that does not exist, or neither an excuse nor an entry, or both.
    """
    path = root / "results" / "papers.json"
    items = read_json(path)
    ids = Counter(item.get("id") for item in items)
    for item in items:
        name = item.get("id")
        if set(item) != KEYS or ids[name] > 1:
            raise ConfigError(
                f"{path}: item {name} has keys {sorted(item)} and stands there "
                f"{ids[name]} times, expected {sorted(KEYS)} and once"
            )
        if bool(item["excuse"]) == bool(item["entries"]):
            raise ConfigError(
                f"{path}: item {name} needs either an excuse or entries that answer it"
            )
        for entry, said in item["entries"].items():
            check_known(f"verdict of {name}", said["verdict"], VERDICTS)
            if not (root / "results" / entry / "result.json").is_file():
                raise ConfigError(
                    f"{path}: item {name} names entry {entry}, which is not in results/"
                )
    return items


def by_paper(items: Sequence[Item]) -> dict[str, list[Item]]:
    """Items by the first part of their ids."""
    found: dict[str, list[Item]] = {}
    for item in items:
        found.setdefault(item["id"].partition("/")[0], []).append(item)
    return found


def title_of(root: Path, paper: str) -> str:
    """How the paper's system is called: the title of its room's page."""
    page = root / "moe_edge" / "papers" / paper / "README.md"
    return page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def item_name(item: Item) -> str:
    """Such as `fig. 10` or `table 2`, and what it shows."""
    kind, number = re.fullmatch(r"(fig|table)(\d+)", item["id"].split("/")[1]).groups()
    return f"{'fig.' if kind == 'fig' else kind} {number}: {item['title']}"


def paper_lines(root: Path, items: Sequence[Item]) -> Iterator[str]:
    """The table of a paper: a row an item and entry, what is excused below it."""
    yield "| item | paper | ours | kind | verdict | why | command |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for item in items:
        for entry, said in item["entries"].items():
            folder = root / "results" / entry
            result, page = read_result(folder), (folder / "README.md").read_text("utf8")
            ours = f"[{entry}](../results/{entry}/README.md): {head_of(page)[1]}"
            kind = KINDS.get(result["kind"], result["kind"])
            cells = [item_name(item), item["paper"], ours, kind, said["verdict"]]
            cells += [said["why"], f"`{result['command']}`"]
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    excused: dict[str, list[str]] = {}
    for item in items:
        if item["excuse"]:
            excused.setdefault(item["excuse"], []).append(item_name(item))
    if excused:
        said = [f"{', '.join(names)}. {why}" for why, names in excused.items()]
        yield ""
        yield "Without an entry: " + " ".join(said)


def all_papers(root: Path, items: Sequence[Item]) -> str:
    """A section with a table for each paper."""
    parts = []
    for paper, own in by_paper(items).items():
        table = "\n".join(paper_lines(root, own))
        parts.append(f"## {title_of(root, paper)}\n\n{table}")
    return "\n\n".join(parts)


def verdicts(root: Path, items: Sequence[Item]) -> str:
    """How many figures and tables of each paper have which verdict.

    An item with several entries counts by the best of those that ran, and by the best
    of all if they are only computed.
    """
    lines = [
        f"| paper | {' | '.join(VERDICTS)} | no entry: diagrams, definitions |",
        "| --- |" + " --- |" * (len(VERDICTS) + 1),
    ]
    for paper, own in by_paper(items).items():
        count = Counter(verdict_of(root, item) for item in own)
        numbers = [str(count[verdict]) for verdict in (*VERDICTS, None)]
        lines.append(f"| {title_of(root, paper)} | {' | '.join(numbers)} |")
    return "\n".join(lines)


def verdict_of(root: Path, item: Item) -> str | None:
    """See `verdicts`; None of what is excused."""
    said = {entry: each["verdict"] for entry, each in item["entries"].items()}
    ran = {
        entry: verdict
        for entry, verdict in said.items()
        if read_result(root / "results" / entry)["kind"] != "simulated"
    }
    found = (ran or said).values()
    return min(found, key=VERDICTS.index) if found else None


TABLES = {"all": all_papers, "verdicts": verdicts}


def up_to_date(text: str, root: Path) -> str:
    """A page with its tables as they are now; ConfigError: one that does not exist."""
    items = read_items(root)

    def made(part: re.Match) -> str:
        check_known("table of papers", part[2], TABLES)
        return f"{part[1]}\n{TABLES[part[2]](root, items)}\n\n{part[3]}"

    return _PART.sub(made, text)


def write_tables(root: Path) -> None:
    """Writes all pages again."""
    for name in PAGES:
        path = root / name
        write_text(path, up_to_date(path.read_text(encoding="utf-8"), root))
