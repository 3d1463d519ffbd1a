"""Prompt files, and the refusal of starts for which they hold too few."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from moe_edge.bench.study import Study, run_study
from moe_edge.core.checks import RequestError


def write_prompts(folder: Path, words: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Files by name, with prompts of so many words, no two of a file alike.

    Returns:
      Settings of a study that reads them.
    """
    for name, counts in words.items():
        prompts = (_letters(n, many) for n, many in enumerate(counts))
        lines = [json.dumps({"id": str(n), "prompt": p}) for n, p in enumerate(prompts)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return {"data_dir": str(folder), "sources": [f"{name}.jsonl" for name in words]}


def _letters(number: int, count: int) -> str:
    """A number to the base 26, in so many letters, which are a token each."""
    return " ".join(chr(97 + number // 26**place % 26) for place in range(count))


def refuses_a_start(
    study: Study, settings: Any, most: int, out: Path, hold: str, needed: str
) -> None:
    """Asserts that texts are enough for so many starts, and not for one more."""
    at = {"out_dir": str(out)}
    assert run_study(study, settings, **at, starts=most, dry_run=True)["dry_run"]
    message = rf" hold {hold} tokens, {needed} needed; .* or fewer starts"
    with pytest.raises(RequestError, match=message):
        run_study(study, settings, **at, starts=most + 1)
    assert not out.exists()
