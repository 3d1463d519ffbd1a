"""Commands and Python of the documentation run, or the page says why they do not."""

import contextlib
import dataclasses
import functools
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from moe_edge.core import plug_in
from tests.support.doc_blocks import Block, blocks, commands, is_install, ours, settings
from tests.support.gguf_files import from_hf, write_gguf
from tests.support.refactored import write_random
from tests.support.tiny_checkpoints import random_tensors, raw_config

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("moe_edge/papers/*/README.md")),
]
DEFAULT = ROOT / "moe_edge/default_model"
BOARD = ROOT / "moe_edge/papers/coserve/demo_board"


@dataclasses.dataclass(frozen=True)
class Place:
    """A block and where it stands."""

    page: Path
    block: Block

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.block.line}"


@functools.cache
def places() -> tuple[Place, ...]:
    return tuple(Place(page, block) for page in PAGES for block in blocks(page))


SHELL = [place for place in places() if place.block.is_shell and not place.block.reason]
PYTHON = [
    place
    for place in places()
    if place.block.language == "python" and not place.block.reason
]


def without_reason(place: Place) -> list[str]:
    """Commands of a block that no test runs although the block gives no reason."""
    block = place.block
    if block.reason:
        return []
    lines = [words for words in commands(block.body) if not ours(words)]
    return [" ".join(words) for words in lines if not is_install(words)]


@pytest.mark.parametrize("place", SHELL, ids=str)
def test_commands_that_do_not_run_say_why(place):
    assert without_reason(place) == []


def test_blocks_are_found_and_need_a_reason(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "```\npip install x && moe-edge a --b \\\n  1 # c\ncurl x\n```\n\n"
        "<!-- not run: no curl -->\n```bash\ncurl x\n```\n<!-- run -->\n"
        "```bash\nV=1 python launch/a.py\n```\n```text\ncurl\n```\n```\na -> b\n```\n",
        encoding="utf-8",
    )
    found = [Place(page, block) for block in blocks(page)]
    assert [each.block.is_shell for each in found] == [True, True, True, False, False]
    assert [without_reason(each) for each in found[:3]] == [["curl x"], [], []]
    assert found[1].block.reason == "no curl" and found[2].block.runs
    words = [ours(each) for each in commands(found[0].block.body)]
    assert words == [None, ("a", ["--b", "1"]), None]
    assert ours(commands(found[2].block.body)[0]) == ("a", [])
    assert len(SHELL) > 30 and len(PYTHON) > 5


@pytest.fixture(scope="module")
def workspace(tmp_path_factory, run_script_in) -> Path:
    """A folder with every file that the pages' commands name."""
    here = tmp_path_factory.mktemp("documentation")
    for name in ("launch", "configs", "docs", "README.md"):
        (here / name).symlink_to(ROOT / name)
    entry = "results/od_moe_fig8/result.json"  # another study reads it
    copied(ROOT / entry, here / entry)
    write_inputs(here)
    copied(DEFAULT, here / "HF_FOLDER")
    copied(BOARD, here / "W")
    copied(BOARD / "requests.jsonl", here / "R.jsonl")
    for folder in ("R", "results/local/R"):
        write_random(DEFAULT, here / folder)
    for command in PREPARED:
        name, *flags = command.split()
        assert run_script_in(here, name, *flags).summary
    copied(here / "P", here / "results/local/P")
    write_examples(here)
    assert run_script_in(here, *DECIDED.split()).summary
    return here


PREPARED = (
    "convert --src default --dst OURS",
    "convert --src default --dst Q --expert_dtype q8_0",
    "convert --src default --dst Q4 --dtype q4_0",
    "profile_model --checkpoint default --text FILE --out_dir P",
    "generate --prompt One --device_memory 25% --trace T.csv.gz --out_dir G",
)
DECIDED = "load --target computed --costs M/machine.json --poisson 8 --duration_s 2 \
--decisions d.jsonl --out_dir results/local/L"


def copied(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    copy = shutil.copytree if source.is_dir() else shutil.copy
    copy(source, target)


def write_inputs(here: Path) -> None:
    """Files that users would bring."""
    copied(ROOT / "moe_edge/evaluate/held_out/books.txt", here / "FILE")
    np.save(here / "T.npy", np.arange(300, dtype=np.int32)[None] % 100)
    np.save(here / "M.npy", np.random.default_rng(0).random((64, 32), np.float32))
    prompts = [{"id": "a", "prompt": "Once upon a time"}]
    question = {"id": "q", "prompt": "Two and two are", "answer_index": 0}
    write_lines(here / "FILE.jsonl", prompts)
    write_lines(here / "QUESTIONS", [question | {"choices": ["four", "five"]}])
    counts = {"model": "olmoe_1b_7b", "num_experts": 64, "top_k": 8, "tokens": 800}
    rows = [
        counts | {"domain": domain, "layer": layer, "counts": [100] * 64}
        for domain in ("c4", "github", "book")
        for layer in range(16)
    ]
    write_lines(here / "COUNTS.jsonl", rows)
    # Experts of whole blocks of 32, for what quantises them.
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "rms_norm_eps": 1e-6}
    raw = raw_config("qwen2_moe", rope_theta=1e4, **sizes)
    write_gguf(here / "FILE.gguf", *from_hf(raw, random_tensors(raw)))
    (here / "DATA/traces").mkdir(parents=True)
    (here / "DATA/traces/azure_conv.csv").write_text(
        "request_id,arrival_s,input_tokens,output_tokens\n0,0.0,374,44\n", "utf-8"
    )


def write_examples(here: Path) -> None:
    """Files as docs/formats.md shows them."""
    page = (ROOT / "docs/formats.md").read_text(encoding="utf-8")
    shown = dict(re.findall(r"read by: (\w+) -->\n```json\n(.*?)^```", page, _EACH))
    profile = json.loads(shown["coe_profile"])
    profile["devices"]["gpu"] = profile["devices"]["cpu"]
    (here / "M").mkdir()
    (here / "M/machine.json").write_text(shown["machine"], "utf-8")
    (here / "P/coe_profile.json").write_text(json.dumps(profile), "utf-8")


_EACH = re.DOTALL | re.MULTILINE


def write_lines(path: Path, rows: list) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


@pytest.fixture
def beside(workspace, tmp_path):
    """A copy of the workspace, of the same bytes."""
    link = dict(copy_function=os.link, symlinks=True, dirs_exist_ok=True)
    return shutil.copytree(workspace, tmp_path, **link)


@contextlib.contextmanager
def without_outputs(folder: Path, flags: list[str]):
    """Outputs that a command names are not there yet, and there again afterwards."""
    named = [Path(flags[i + 1]) for i, flag in enumerate(flags) if flag in OUTPUTS]
    there = [folder / path for path in named if (folder / path).exists()]
    away = [path.rename(path.with_name(f"{path.name}.away")) for path in there]
    yield
    for path, moved in zip(there, away, strict=True):
        if path.exists():
            shutil.rmtree(path)
        moved.rename(path)


# FILE stands for texts and for prompts.
READ_AS = {("cluster", "FILE"): "FILE.jsonl"}
OUTPUTS = ("--out_dir", "--dst")


@pytest.mark.slow
@pytest.mark.parametrize("place", SHELL, ids=str)
def test_commands_run(place, beside, run_script, monkeypatch):
    """As they stand where the page says so, else with --dry_run."""
    failed = []
    for words in commands(place.block.body):
        for name, value in settings(words).items():
            monkeypatch.setenv(name, value)
        command = ours(words)
        if command is None or command[0] == "--help":
            continue
        name, flags = command
        flags = [READ_AS.get((name, flag), flag) for flag in flags]
        with without_outputs(beside, flags):
            if not place.block.runs and not {"--help", "--dry_run"} & {*flags}:
                flags = [*flags, "--dry_run"]
            done = run_script(name, *flags)
        if done.code:
            failed.append(f"{' '.join(words)}\n{done.stderr}")
    assert failed == []


@pytest.mark.slow
@pytest.mark.parametrize("place", PYTHON, ids=str)
def test_python_runs(place, beside, monkeypatch, capsys):
    monkeypatch.chdir(beside)
    for registry in plug_in._REGISTRIES:  # a page registers a policy of its own
        monkeypatch.setattr(registry, "_classes", dict(registry._classes))
    exec(compile(place.block.body, str(place), "exec"), {"__name__": "documentation"})
