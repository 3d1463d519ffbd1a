"""The house rules of who may import what, read from the source with `ast`."""

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "moe_edge"

# A folder imports only folders before it (docs/architecture.md).
ORDER = (
    "core kernels model hardware checkpoint convert hosts workload route predict "
    "offload schedule engine evaluate training profile place cluster serve "
    "simulate loadtest planner metrics bench public commands papers studies"
).split()

# The same within cluster/, of folders and of the files beside them. Those of one line
# never import each other, but for its files.
CLUSTER_ORDER = (
    ("transport", "network"),
    (
        "drills",
        "roles",
        "modes",
        "options",
        "prism_options",
        "slots",
        "gpus",
        "model_checks",
        "content",
        "spec",
    ),
    ("node",),
    ("scheduler",),
    ("prism",),
    ("supervisor", "process", "run"),
)
CLUSTER_FILES = CLUSTER_ORDER[1] + CLUSTER_ORDER[-1]

# A collaboration of experts is of any models: these reach nothing of language models,
# not even through others.
COLLABORATION = (
    *(
        f"moe_edge/papers/coserve/{folder}/"
        for folder in ("coe", "memory", "schedule", "simulate", "workload")
    ),
    "moe_edge/schedule/loop.py",
)
LANGUAGE = (
    *"kernels model checkpoint convert route predict engine evaluate training".split(),
    *"profile serve".split(),
)

# Tables of names, which import what is asked for only.
LAZY = (
    "moe_edge/core/entry_points.py",
    "moe_edge/core/plug_in.py",
    "moe_edge/core/tables.py",
    "moe_edge/commands/main.py",
    "moe_edge/__init__.py",
    "moe_edge/bench/registry.py",
)

PEERS = (
    "moe_edge/studies/speed/offload_accelerate.py",
    "moe_edge/studies/speed/peers.py",
)

# Module -> files (relative to the root) that may import it.
RESTRICTED = {
    "gin": ("moe_edge/configurables.py", "moe_edge/commands/"),
    "absl": ("moe_edge/commands/",),
    "matplotlib": (
        "moe_edge/core/figures.py",
        "moe_edge/metrics/plots",
    ),
    "torch": PEERS,
    "transformers": PEERS,
    "zmq": (
        "moe_edge/cluster/transport/messages/",
        "moe_edge/cluster/transport/keys.py",
    ),
    **dict.fromkeys(
        ("starlette", "uvicorn", "prometheus_client", "llguidance"),
        ("moe_edge/serve/",),
    ),
    "jinja2": ("moe_edge/serve/", "moe_edge/metrics/page.py"),
    "pickle": (),
}


@functools.cache
def imported_modules(path: Path) -> list[str]:
    """Absolute dotted names that a file imports, at any depth."""
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise AssertionError(f"{path}: relative import; write it out")
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def order_violations(folder: str, modules: list[str]) -> list[str]:
    """The imports of a file in `folder` that point forwards in ORDER."""
    bad = []
    for module in modules:
        parts = module.split(".")
        if parts[0] != "moe_edge" or len(parts) < 2 or parts[1] not in ORDER:
            continue
        if ORDER.index(parts[1]) > ORDER.index(folder):
            bad.append(module)
    return bad


def cluster_violations(part: str, modules: list[str]) -> list[str]:
    """The imports of a folder or file of cluster/ that point forwards or sideways."""
    rank = {name: i for i, line in enumerate(CLUSTER_ORDER) for name in line}
    bad = []
    for module in modules:
        parts = module.split(".")
        if parts[:2] != ["moe_edge", "cluster"] or parts[2] == part:
            continue
        above = rank[parts[2]] > rank[part]
        beside = rank[parts[2]] == rank[part] and part not in CLUSTER_FILES
        if above or beside:
            bad.append(module)
    return bad


def source_files() -> list[Path]:
    return sorted([*PACKAGE.rglob("*.py"), *(ROOT / "launch").rglob("*.py")])


def upwards_of(relative: str) -> tuple[str, ...]:
    """What a file of the package must not import, whatever its folder."""
    upwards = ["launch"]
    if relative not in LAZY:
        upwards.append("importlib")
    # It imports everything: importing it would undo the order.
    if not relative.startswith("moe_edge/commands/"):
        upwards.append("moe_edge.configurables")
    return tuple(upwards)


def import_faults(path: Path) -> list[str]:
    """What a source file imports though it must not, one line each."""
    modules = imported_modules(path)
    relative = path.relative_to(ROOT).as_posix()
    faults = []
    if relative.startswith("moe_edge/"):
        if path.parent != PACKAGE:
            faults += order_violations(path.relative_to(PACKAGE).parts[0], modules)
        if relative.startswith("moe_edge/cluster/") and path.name != "__init__.py":
            part = path.relative_to(PACKAGE / "cluster").parts[0].removesuffix(".py")
            faults += cluster_violations(part, modules)
        faults += [m for m in modules if m.startswith(upwards_of(relative))]
    for module in modules:
        allowed = RESTRICTED.get(module.split(".")[0])
        if allowed is not None and not relative.startswith(allowed):
            faults.append(module)
    return [f"{relative} imports {module}" for module in faults]


def test_imports_follow_order_and_restrictions():
    assert [fault for path in source_files() for fault in import_faults(path)] == []


def source_of(module: str) -> Path | None:
    """The file of ours that a dotted name is, or is in."""
    parts = module.split(".")
    if parts[0] != PACKAGE.name:
        return None
    for end in (len(parts), len(parts) - 1):
        path = ROOT.joinpath(*parts[:end]).with_suffix(".py")
        if path.is_file():
            return path
    return None


def language_chain(path: Path, imports=imported_modules) -> list[str]:
    """How a file reaches something of language models: names, each imported by the one
    before it; none, if it does not."""
    seen, chains = {path}, [(path, [])]
    while chains:
        at, chain = chains.pop()
        for module in imports(at):
            found = source_of(module)
            if found is None or found in seen:
                continue
            if found.relative_to(PACKAGE).parts[0] in LANGUAGE:
                return [*chain, module]
            seen.add(found)
            chains.append((found, [*chain, module]))
    return []


def test_collaboration_of_experts_knows_nothing_of_language_models():
    files = [
        path
        for path in source_files()
        if path.relative_to(ROOT).as_posix().startswith(COLLABORATION)
    ]
    assert len(files) > 30 and set(LANGUAGE) <= set(ORDER)
    chains = {str(path.relative_to(ROOT)): language_chain(path) for path in files}
    assert {path: chain for path, chain in chains.items() if chain} == {}


def test_language_chain_is_found_through_other_files():
    """As it was until `Blocks` in offload/real_carrier.py."""
    mover, store = (PACKAGE / f"offload/{n}.py" for n in ("real_carrier", "store"))
    through = {mover: ["moe_edge.offload.store.HostStore"]}
    chain = language_chain(
        PACKAGE / "papers/coserve/coe" / "executor.py",
        lambda path: [*imported_modules(path), *through.get(path, [])],
    )
    assert chain[-2:] == [*through[mover], imported_of(store, "checkpoint")]
    assert language_chain(PACKAGE / "papers/coserve/coe" / "executor.py") == []


def imported_of(path: Path, folder: str) -> str:
    """The first import of a file from a folder."""
    own = f"{PACKAGE.name}.{folder}."
    return next(name for name in imported_modules(path) if name.startswith(own))


def test_order_names_every_folder():
    folders = {p.name for p in PACKAGE.iterdir() if (p / "__init__.py").exists()}
    assert folders <= set(ORDER), "name the new folder in ORDER and the docs"


def drawn() -> dict[str, tuple[int, int]]:
    """Folder -> line and column in the drawing of docs/architecture.md."""
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    lines = page.partition("```\n")[2].partition("```")[0].splitlines()
    found = [
        (match[1], (line, match.start()))
        for line, text in enumerate(lines)
        for match in re.finditer(r"(?<![\w/])(\w+)/ ", f"{text} ")
    ]
    assert len(found) == len(dict(found)), "a folder is drawn twice"
    return dict(found)


def test_drawing_matches_the_code():
    """Every folder is drawn, and imports only what is below it or to its right."""
    place = drawn()
    folders = {p.name for p in PACKAGE.iterdir() if (p / "__init__.py").exists()}
    assert place.keys() == folders
    wrong = set()
    for path in source_files():
        room = path.relative_to(ROOT).parts[1]
        if path.is_relative_to(PACKAGE) and path.parent != PACKAGE:
            named = (f"{module}.".split(".")[:2] for module in imported_modules(path))
            used = {name for package, name in named if package == PACKAGE.name}
            wrong |= {(room, n) for n in used & folders if place[n] < place[room]}
    assert wrong == set()
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    line = next(text for text in page.splitlines() if text.startswith(" papers/"))
    assert {*line.split()[1:]} == {p.parent.name for p in PACKAGE.glob("papers/*/*.md")}


def test_order_violations_forward_import_is_found():
    assert order_violations("model", ["moe_edge.engine.resident"]) != []
    assert order_violations("engine", ["moe_edge.model.router.Router"]) == []


def test_cluster_order_names_every_folder_and_file():
    parts = {p.stem for p in (PACKAGE / "cluster").iterdir() if p.stem[:2] != "__"}
    assert parts == {name for line in CLUSTER_ORDER for name in line}


def test_cluster_violations_forward_and_sideways_imports_are_found():
    table = "moe_edge.cluster.prism.table_keeper.TableKeeper"
    for part in ("transport", "options", "node", "scheduler"):
        assert cluster_violations(part, [table]) == [table]
    for part in ("prism", "process"):
        assert cluster_violations(part, [table]) == []
    assert cluster_violations("spec", ["moe_edge.cluster.options.ClusterOptions"]) == []
    assert cluster_violations("network", ["moe_edge.cluster.transport.base"]) != []
