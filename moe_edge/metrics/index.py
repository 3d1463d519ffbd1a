"""The index of all entries: results/README.md, a small picture beside each answer.

Pictures are the entries' `plot.png`, made small in `results/thumbs/`, so that the page
loads fast.
"""

from pathlib import Path

import numpy as np

from moe_edge.core.files import write_text
from moe_edge.metrics.schema import validate_entry

HEAD = """# Results

Every folder answers one question with measured, emulated or simulated numbers; its
README has the command to run it again. Runs of your own land in `local/`, which git
ignores. This page is written by `python -m moe_edge.metrics.report`.
"""
THUMBS = "thumbs"
WIDTH, COLOURS = 240, 32  # of a small picture
# Beginning of names -> heading; the first that fits.
SECTIONS = {
    "smoe_": "SMoE",
    "moe_prism_": "MoE-Prism",
    "prism_": "Prism",
    "od_moe_": "OD-MoE",
    "coserve_": "CoServe",
    "benchmark_": "Speed",
    "": "The whole, and the default model",
}


def find_entries(root: str | Path) -> list[Path]:
    """Folders of all entries below `root`, without `local/`, sorted."""
    root = Path(root)
    found = [path.parent for path in root.rglob("result.json")]
    return sorted(path for path in found if "local" not in path.relative_to(root).parts)


def head_of(page: str) -> tuple[str, str]:
    """Question and answer of an entry's page, its first two paragraphs."""
    question, answer = page.split("\n\n", 2)[:2]
    return question.removeprefix("# "), " ".join(answer.strip("*").split())


def index_text(root: str | Path) -> str:
    """The text of results/README.md."""
    rows: dict[str, list[str]] = {title: [] for title in SECTIONS.values()}
    for folder in find_entries(root):
        name = folder.relative_to(root).as_posix()
        title = next(SECTIONS[start] for start in SECTIONS if name.startswith(start))
        rows[title].append(_row(name, folder))
    parts = [HEAD]
    for title, found in rows.items():
        if found:
            head = ["| | entry | answer | kind | machine |", "|---|---|---|---|---|"]
            parts.append("\n".join([f"## {title}\n", *head, *found]) + "\n")
    return "\n".join(parts)


def _row(name: str, folder: Path) -> str:
    result = validate_entry(folder)
    machine, page = result["machine"], f"{name}/README.md"
    where = machine["gpu"] or f"{machine['cpu']}, {machine['cores']} cores"
    question, answer = head_of((folder / "README.md").read_text(encoding="utf-8"))
    file = thumb_of(name)
    picture = f'<img src="{THUMBS}/{file}" width="{WIDTH}" alt="{name}">'
    cells = picture, f"[{name}]({page}): {question}", answer, result["kind"], where
    return f"| {' | '.join(cells)} |"


def thumb_of(name: str) -> str:
    """File of an entry's small picture."""
    return name.replace("/", "-") + ".png"


def write_index(root: str | Path) -> None:
    """Writes the index and its small pictures; those of entries that are gone go."""
    root, wanted = Path(root), set()
    folder = root / THUMBS
    folder.mkdir(exist_ok=True)
    for entry in find_entries(root):
        name = thumb_of(entry.relative_to(root).as_posix())
        wanted.add(name)
        _write_small(entry / "plot.png", folder / name)
    for path in folder.glob("*.png"):
        if path.name not in wanted:
            path.unlink()
    write_text(root / "README.md", index_text(root))


def _write_small(source: Path, target: Path) -> None:
    """A small picture of few colours; one that looks the same is left as it is."""
    from PIL import Image  # matplotlib's, which reading the index does without

    with Image.open(source) as image:
        height = max(1, round(image.height * WIDTH / image.width))
        small = image.convert("RGB").resize((WIDTH, height), Image.Resampling.LANCZOS)
    small = small.quantize(COLOURS, dither=Image.Dither.NONE)
    if target.is_file():
        with Image.open(target) as before:
            pixels = [np.asarray(i.convert("RGB"), float) for i in (before, small)]
        if _alike(*pixels):
            return
    small.save(target, optimize=True)


def _alike(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two pictures differ by no more than libraries do."""
    return one.shape == other.shape and bool(np.abs(one - other).mean() < 1)
