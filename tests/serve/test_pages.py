"""The page: what a browser is told to allow, and what its scripts do."""

import asyncio
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
from starlette.applications import Starlette

from moe_edge.serve.pages import FILES, page_routes

APP = Starlette(routes=page_routes())
SCRIPTS = [file for file in FILES.values() if file.suffix == ".js"]
NODE = shutil.which("node")


def ask(path: str, method: str = "GET"):
    """(status, headers, body) of a request for a page's file."""
    scope = {"type": "http", "method": method, "path": path, "headers": []}
    messages = []

    async def receive():
        return {"type": "http.request"}

    async def send(message):
        messages.append(message)

    asyncio.run(APP(scope, receive, send))
    start, *parts = messages
    headers = {name.decode(): value.decode() for name, value in start["headers"]}
    return start["status"], headers, b"".join(part["body"] for part in parts)


class Parts(HTMLParser):
    """Tags of a page, with their attributes, and ids."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def of(self, *names) -> list[dict]:
        return [attrs for tag, attrs in self.tags if tag in names]

    @property
    def ids(self) -> list[str]:
        return [attrs["id"] for _, attrs in self.tags if "id" in attrs]


@pytest.fixture(scope="module")
def page() -> Parts:
    return Parts(FILES["/"].read_text(encoding="utf-8"))


def test_every_file_is_served_with_a_strict_policy():
    types = {"html": "text/html", "js": "text/javascript", "css": "text/css"}
    assert {file.suffix[1:] for file in FILES.values()} == set(types)
    for path, file in FILES.items():
        status, headers, body = ask(path)
        assert status == 200 and body == file.read_bytes()
        kind = types[file.suffix[1:]]
        assert headers["content-type"] == f"{kind}; charset=utf-8"
        assert headers["x-content-type-options"] == "nosniff"
        policy = dict(
            part.strip().split(" ", 1)
            for part in headers["content-security-policy"].split(";")
        )
        assert policy["default-src"] == "'none'"
        for name in ("script-src", "style-src", "connect-src"):
            assert policy[name] == "'self'"
        assert policy["frame-ancestors"] == policy["base-uri"] == "'none'"
        assert "unsafe" not in str(policy) and "*" not in str(policy)
    assert ask("/", "POST")[0] == 405
    assert ask("/page/other.js")[0] == 404


def test_files_need_nothing_from_elsewhere_and_are_all_linked(page):
    for path, file in FILES.items():
        text = file.read_text(encoding="utf-8")
        assert not re.search(r"https?:|//[\w.]+\.\w|@import|url\(", text), path
    linked = [
        attrs.get("src") or attrs["href"] for attrs in page.of("script", "link", "img")
    ]
    imported = [
        name
        for script in SCRIPTS
        for name in re.findall(r'from "\./([\w.]+)"', script.read_text("utf-8"))
    ]
    found = {f"/{name}" for name in linked if name != "data:,"}
    found |= {f"/page/{name}" for name in imported}
    assert found == set(FILES) - {"/"}


def test_nothing_is_inline_and_text_is_never_parsed(page):
    for tag, attrs in page.tags:
        assert "style" not in attrs and not any(a.startswith("on") for a in attrs), tag
    assert all("src" in attrs for attrs in page.of("script"))
    assert not page.of("style")
    forbidden = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|"
        r"new Function|localStorage|sessionStorage|indexedDB|cookie"
    )
    for script in SCRIPTS:
        assert not re.search(forbidden, script.read_text("utf-8")), script.name


def test_controls_have_labels_and_scripts_know_their_ids(page):
    assert len(set(page.ids)) == len(page.ids)
    labelled = {attrs["for"] for attrs in page.of("label") if "for" in attrs}
    for attrs in page.of("input", "textarea"):
        assert attrs.get("type") == "radio" or attrs["id"] in labelled
    for _, attrs in page.tags:
        for name in ("for", "aria-describedby", "aria-labelledby"):
            assert set(attrs.get(name, "").split()) <= set(page.ids)
    for script in SCRIPTS:
        asked = re.findall(r'\$\("([\w-]+)"\)', script.read_text("utf-8"))
        assert set(asked) <= set(page.ids), script.name


def luminance(red: int, green: int, blue: int) -> float:
    """Relative luminance after WCAG 2."""
    parts = [value / 255 for value in (red, green, blue)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
        for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(first: str, second: str) -> float:
    values = [
        luminance(*(int(code[i : i + 2], 16) for i in (1, 3, 5)))
        for code in (first, second)
    ]
    return (max(values) + 0.05) / (min(values) + 0.05)


def test_texts_stand_out_in_light_and_dark():
    text = FILES["/page/style.css"].read_text("utf-8")
    light, dark = (
        dict(re.findall(r"--([\w-]+): (#\w{6});", block))
        for block in re.findall(r":root \{(.*?)\}", text, re.DOTALL)
    )
    assert light.keys() == dark.keys()
    for colours in (light, dark):
        for name in ("text", "soft", "error", "accent"):
            for back in ("panel", "back"):
                assert contrast(colours[name], colours[back]) >= 4.5, (name, back)
        assert contrast(colours["accent"], colours["on-accent"]) >= 4.5
        for name in ("resident", "good", "wait"):  # shapes: 3 is enough
            assert contrast(colours[name], colours["panel"]) >= 3


# The scripts themselves.


def run_node(folder, code: str):
    """What a module prints as JSON; it may import the page's scripts from './'."""
    for script in SCRIPTS:
        shutil.copy(script, folder)
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "main.js").write_text(code)
    command = [NODE, str(folder / "main.js")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


needs_node = pytest.mark.skipif(NODE is None, reason="there is no node")


@needs_node
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_script_is_well_formed(script, tmp_path):
    module = tmp_path / f"{script.stem}.mjs"
    shutil.copy(script, module)
    done = subprocess.run([NODE, "--check", module], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@needs_node
def test_events_cut_anywhere_are_found_whole(tmp_path):
    stream = 'data: {"a": "x\\n\\ny"}\n\n: ping\n\ndata: zwei Ü\r\n\r\ndata: [DONE]\n\n'
    code = f"""
      import {{Events}} from "./stream.js";
      const text = {json.dumps(stream)};
      const found = [];
      for (let size = 1; size <= text.length; size++) {{
        const events = new Events();
        const parts = [];
        for (let at = 0; at < text.length; at += size) {{
          parts.push(...events.add(text.slice(at, at + size)));
        }}
        found.push(parts);
      }}
      console.log(JSON.stringify(found));
    """
    found = run_node(tmp_path, code)
    assert len(found) == len(stream)
    wanted = ['{"a": "x\\n\\ny"}', "zwei Ü", "[DONE]"]
    assert all(parts == wanted for parts in found)


@needs_node
def test_answer_that_ends_early_is_no_whole_one(tmp_path):
    code = """
      import {chunks} from "./stream.js";
      const found = [];
      for (const end of ["data: [DONE]\\n\\n", ""]) {
        globalThis.fetch = async () => new Response('data: {"a": 1}\\n\\n' + end);
        try {
          for await (const chunk of chunks("x", {}, null)) found.push(chunk.a);
          found.push("whole");
        } catch (error) {
          found.push(error.message);
        }
      }
      console.log(JSON.stringify(found));
    """
    assert run_node(tmp_path, code) == [1, "whole", 1, "the answer was cut off"]


@needs_node
def test_thoughts_and_calls_are_told_apart(tmp_path):
    code = """
      import {newsOf} from "./stream.js";
      const call = {index: 0, id: "c", function: {name: "f", arguments: '{"a": 1}'}};
      const found = [
        newsOf({text: "a"}),
        newsOf({delta: {content: "b", reasoning_content: "c"}}),
        newsOf({delta: {tool_calls: [call]}}),
        newsOf({delta: {role: "assistant"}}),
        newsOf(undefined),
      ];
      console.log(JSON.stringify(found.map(({text, thought, calls}) => [
        text, thought, ...calls,
      ])));
    """
    assert run_node(tmp_path, code) == [
        ["a", ""],
        ["b", "c"],
        ["", "", 'f({"a": 1})'],
        ["", ""],
        ["", ""],
    ]


@needs_node
@pytest.mark.parametrize("width", [340, 700])
@pytest.mark.parametrize("experts", [8, 60, 64, 256])
def test_every_square_has_its_place_and_is_found_there(tmp_path, width, experts):
    code = f"""
      import {{layoutOf, placeOf, squareAt}} from "./heat.js";
      const layout = layoutOf(3, {experts}, {width});
      const squares = [];
      for (let row = 0; row < 3; row++) {{
        for (let expert = 0; expert < {experts}; expert++) {{
          const {{x, y}} = placeOf(layout, row, expert);
          const found = squareAt(layout, x + layout.size / 2, y + layout.size / 2);
          const same = found?.row === row && found?.expert === expert;
          squares.push([x, y, same]);
        }}
      }}
      const outside = [squareAt(layout, 2, 2), squareAt(layout, {width} + 50, 2)];
      console.log(JSON.stringify({{layout, squares, outside}}));
    """
    got = run_node(tmp_path, code)
    layout, squares = got["layout"], got["squares"]
    assert all(same for *_, same in squares)
    assert len({(x, y) for x, y, _ in squares}) == 3 * experts
    size = layout["size"]
    assert max(x for x, *_ in squares) + size <= width
    assert max(y for _, y, _ in squares) + size <= layout["height"]
    assert got["outside"] == [None, None] and 8 <= size <= 18
    assert experts > 64 or size >= 12


@needs_node
def test_shares_are_of_a_layer_and_colours_follow_them(tmp_path):
    style = FILES["/page/style.css"].read_text("utf-8")
    heats = re.findall(r"--heat: ([^;]+);", style)
    assert len(heats) == 2  # light and dark
    code = """
      import {colour, shade, sharesOf, stopsOf} from "./heat.js";
      const shares = sharesOf({layers: [{used: [6, 2, 0]}, {used: [0, 0, 0]}]});
      const stops = [[0, 0, 0], [10, 20, 30], [100, 200, 250]];
      console.log(JSON.stringify({
        shares,
        shades: [shade(0.75, 0.75), shade(0.1875, 0.75), shade(0, 0)],
        colours: [0, 0.25, 0.5, 1].map((at) => colour(stops, at)),
        parsed: HEATS.map(stopsOf),
      }));
    """.replace("HEATS", json.dumps(heats))
    got = run_node(tmp_path, code)
    for stops in got.pop("parsed"):
        assert len(stops) == 3 and all(len(stop) == 3 for stop in stops)
        assert all(0 <= value <= 255 for stop in stops for value in stop)
    assert got == {
        "shares": {"rows": [[0.75, 0.25, 0], [0, 0, 0]], "most": 0.75},
        "shades": [1, 0.5, 0],
        "colours": ["rgb(0 0 0)", "rgb(5 10 15)", "rgb(10 20 30)", "rgb(100 200 250)"],
    }
