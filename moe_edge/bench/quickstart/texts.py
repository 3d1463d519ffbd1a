"""Held-out texts and prompts of the quickstart: six domains, no download.

Task families come from the project's generators with a seed that training never
used; `books` is public-domain text that training held out (shipped in
`evaluate/held_out`, CC0); `code` is this package's own source.
"""

from pathlib import Path

from moe_edge.engine.prompts import Prompt
from moe_edge.training.generators import FAMILIES, documents, examples

PACKAGE = Path(__file__).resolve().parents[2]
BOOKS = PACKAGE / "evaluate" / "held_out" / "books.txt"
SOURCE_FOLDERS = ("core", "engine", "model", "evaluate")
DOCUMENT_SEPARATOR = "\n\n"


def _alternate(text: str, characters: int) -> tuple[str, str]:
    """Two texts of like content: the paragraphs taken in turn."""
    paragraphs = text[: 2 * characters].split(DOCUMENT_SEPARATOR)
    return tuple(DOCUMENT_SEPARATOR.join(paragraphs[half::2]) for half in (0, 1))


def held_out_texts(characters: int, seed: int) -> dict[str, tuple[str, str]]:
    """Domain -> two different texts of up to `characters` each."""
    texts = {}
    for family in FAMILIES:
        texts[family] = tuple(
            DOCUMENT_SEPARATOR.join(
                documents(family, f"quickstart-{half}-{seed}", characters)
            )[:characters]
            for half in ("a", "b")
        )
    texts["books"] = _alternate(BOOKS.read_text(encoding="utf-8"), characters)
    files = [path for name in SOURCE_FOLDERS for path in PACKAGE.glob(f"{name}/*.py")]
    source = "\n\n".join(path.read_text(encoding="utf-8") for path in sorted(files))
    texts["code"] = _alternate(source, characters)
    return texts


def story_prompt() -> Prompt:
    """The prompt that is streamed and timed."""
    return Prompt("story", "It was a cold morning when Anna, the sailor, met")


def task_prompts(seed: int) -> list[tuple[Prompt, str]]:
    """A solved example and a question of each family, with the right answer."""
    prompts = []
    for family in FAMILIES:
        solved, asked = examples(family, f"quickstart-prompt-{seed}", 2)
        text = (
            f"{solved.question}\nAnswer: {solved.answer}{DOCUMENT_SEPARATOR}"
            f"{asked.question}\nAnswer:"
        )
        prompts.append((Prompt(family, text), asked.answer))
    return prompts
