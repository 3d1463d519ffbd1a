"""Tables of docs/serving.md name exactly the fields, codes and options there are."""

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from moe_edge.schedule.request import Request
from moe_edge.serve import chat_body, completion_body, usage
from moe_edge.serve.body import IGNORED
from moe_edge.serve.errors import CODES
from moe_edge.serve.options import ServingOptions
from moe_edge.serve.server_options import ServerOptions

PAGE = (Path(__file__).parents[2] / "docs/serving.md").read_text(encoding="utf-8")


def table(heading: str) -> list[list[str]]:
    """Cells of the rows of the first table under a heading."""
    part = PAGE.partition(f" {heading}\n")[2].partition("\n#")[0]
    lines = re.search(r"(?:^\|.*\n)+", part, re.MULTILINE)[0].splitlines()
    return [re.split(r" *\| *", line)[1:-1] for line in lines[2:]]


def names(cell: str) -> list[str]:
    return re.findall(r"`-{0,2}([a-z_0-9]+)`", cell)


@pytest.fixture
def read_by(monkeypatch):
    """(fields that are read, fields that may have their default) of a request."""

    def found(module, read):
        model = SimpleNamespace(own_k=8, vocab_size=9, check_id=None)
        got = []

        def note(given, readers, neutral, ignored):
            got.append((set(readers), set(neutral)))
            assert ignored is IGNORED
            return {}

        monkeypatch.setattr(module, "read_fields", note)
        with pytest.raises(Exception, match="there (is|are) no"):
            read(b"{}", model)
        return got[0]

    return found


def test_fields_of_requests_are_those_that_are_read(read_by):
    completion, _ = read_by(completion_body, completion_body.read_completion)
    chat, _ = read_by(chat_body, chat_body.read_chat)
    rows = table("Fields of a request")
    shown = {where: set() for where in ("both", "completions", "chat")}
    for cells in rows:
        shown[cells[1]] |= {*names(cells[0])}
    assert shown["both"] | shown["completions"] == completion
    assert shown["both"] | shown["chat"] == chat


def test_fields_without_effect_are_listed(read_by):
    (line,) = re.findall(r"^Without effect: (?:.+\n)+", PAGE, re.MULTILINE)
    ignored, _, neutral = line.partition("Refused unless")
    _, completion = read_by(completion_body, completion_body.read_completion)
    _, chat = read_by(chat_body, chat_body.read_chat)
    assert {*names(ignored)} == {*IGNORED}
    assert {*names(neutral)} == completion | chat


def test_fields_of_an_answer_are_those_that_are_written():
    call = SimpleNamespace(
        rows=[Request()],
        prompts=[SimpleNamespace(ids=(1,))],
        body=SimpleNamespace(n=1, max_new_tokens=1),
        ended_by=lambda index: "length",
    )
    written = usage.usage_of(call)["moe_edge"]
    shown = [name for cells in table("Fields of an answer") for name in names(cells[0])]
    assert sorted(shown) == sorted(written)


def test_errors_have_their_codes_and_status():
    shown = {
        code: int(cells[0]) for cells in table("Errors") for code in names(cells[1])
    }
    assert shown == {code: status for code, (status, *_) in CODES.items()}


def test_options_and_defaults_are_those_of_the_flags():
    shown = {"both": {}, "serve": {}}
    for flags, of, default, _ in table("Options"):
        values = default.split(", ") if ", `" in flags else [default]
        shown[of] |= dict(zip(names(flags), values, strict=True))
    for kind, of in ((ServingOptions, "both"), (ServerOptions, "serve")):
        fields = {field.name: field.default for field in dataclasses.fields(kind)}
        assert {*shown[of]} == {*fields}
        for name, default in fields.items():
            if default not in (None, (), dataclasses.MISSING):
                said = f"{default:g}" if type(default) is float else str(default)
                assert shown[of][name].lower() == said.lower(), name
