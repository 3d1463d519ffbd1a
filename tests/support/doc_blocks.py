"""Fenced blocks of a page, the commands in them, and what the page says about running.

A comment right before a block says how a test runs it: `<!-- run -->` as it stands,
`<!-- not run: REASON -->` not at all; without one, commands of ours run with --dry_run.
"""

import dataclasses
import itertools
import re
import shlex
from pathlib import Path

_BLOCK = re.compile(
    r"(?:^<!-- (?P<said>run|not run: [^\n]+) -->\n+)?"
    r"^(?P<indent> *)```(?P<language>[^\n]*)\n(?P<body>.*?)^(?P=indent)``` *$",
    re.DOTALL | re.MULTILINE,
)
SHELL = ("", "bash", "sh", "console")
# What begins a line of a bare block of commands; others show output or a diagram.
_BEGINS = (
    r"(?:[A-Z_]+=\S+ )*(?:python|moe-edge|pip|pytest|bash|git|cd|export|lm_eval)\b"
)
# Needs no reason: CI installs by them, and runs the tests.
INSTALLS = ("pip", "pytest", "bash .ci/run", "pre-commit", "ruff", "mypy")


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
      line: number of its first line in the page, from 1.
      language: after the fence; "" where nothing is said.
      said: "run", the reason not to run it, or "".
    """

    line: int
    language: str
    body: str
    said: str

    @property
    def runs(self) -> bool:
        """Whether it is to run as it stands."""
        return self.said == "run"

    @property
    def reason(self) -> str:
        """Why it does not run; "" if it does."""
        return self.said.removeprefix("not run: ") if not self.runs else ""

    @property
    def is_shell(self) -> bool:
        """Whether it holds commands."""
        if self.language not in SHELL:
            return False
        lines = [line for line in self.body.splitlines() if line.strip()]
        begins = [line for line in lines if re.match(_BEGINS, line.strip())]
        return bool(begins) or self.language != ""


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a Markdown page."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            line=text.count("\n", 0, found.start("language")) + 1,
            language=found["language"].strip(),
            body=re.sub(f"^{found['indent']}", "", found["body"], flags=re.MULTILINE),
            said=found["said"] or "",
        )
        for found in _BLOCK.finditer(text)
    ]


def commands(body: str) -> list[list[str]]:
    """Words of every command: lines are joined at a backslash and cut at `&&`."""
    joined = re.sub(r" *\\\n *", " ", body)
    found = []
    for line in joined.splitlines():
        words = shlex.split(line, comments=True)
        while "&&" in words:
            at = words.index("&&")
            found, words = [*found, words[:at]], words[at + 1 :]
        found += [words] if words else []
    return found


def ours(words: list[str]) -> tuple[str, list[str]] | None:
    """(name, arguments) of a command of this package, else None.

    `moe-edge NAME`, `python launch/NAME.py` and `python -m launch.NAME` are the same.
    """
    words = words[len(settings(words)) :]
    if words[:1] == ["moe-edge"]:
        return (words[1], words[2:]) if words[1:] else ("--help", [])
    script = re.fullmatch(r"launch/(\w+)\.py", " ".join(words[1:2]))
    if words[:1] == ["python"] and script:
        return script[1], words[2:]
    return None


def settings(words: list[str]) -> dict[str, str]:
    """Environment variables that are set before a command."""
    said = itertools.takewhile(lambda word: re.fullmatch(r"[A-Z_]+=.*", word), words)
    return dict(word.split("=", 1) for word in said)


def is_install(words: list[str]) -> bool:
    """Whether CI runs it."""
    return " ".join(words).startswith(INSTALLS)
