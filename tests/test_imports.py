"""The house rules of who may import what, read from the source with `ast`."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "moe_edge"

# A folder imports only folders before it (docs/architecture.md).
ORDER = (
    "core kernels model hardware checkpoint convert workload route predict offload "
    "schedule engine evaluate training profile refactor place cluster coe serve "
    "simulate load planner metrics studies"
).split()

# The same within cluster/, of folders and of the files beside them. Those of one line
# never import each other, but for its files.
CLUSTER_ORDER = (
    ("transport", "network"),
    ("drills", "roles", "options", "slots", "model_checks", "spec"),
    ("node",),
    ("scheduler",),
    ("prism", "od_moe"),
    ("supervisor", "process", "run"),
)
CLUSTER_FILES = CLUSTER_ORDER[1] + CLUSTER_ORDER[-1]

# Tables of names, which import what is asked for only.
LAZY = ("moe_edge/configurables.py", "moe_edge/studies/registry.py")

# Module -> files (relative to the root) that may import it.
RESTRICTED = {
    "gin": ("moe_edge/configurables.py", "launch/"),
    "absl": ("launch/",),
    "matplotlib": (
        "moe_edge/core/figures.py",
        "moe_edge/metrics/plots",
    ),
    "torch": ("moe_edge/studies/speed/peers.py",),
    "transformers": ("moe_edge/studies/speed/peers.py",),
    "zmq": (
        "moe_edge/cluster/transport/messages/",
        "moe_edge/cluster/transport/keys.py",
    ),
    **dict.fromkeys(
        ("starlette", "uvicorn", "prometheus_client", "jinja2"), ("moe_edge/serve/",)
    ),
    "pickle": (),
}


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
        # configurables.py imports everything: importing it would undo the order.
        upwards = ("launch", "importlib", "moe_edge.configurables")
        if relative in LAZY:
            upwards = ("launch", "moe_edge.configurables")
        faults += [module for module in modules if module.startswith(upwards)]
    for module in modules:
        allowed = RESTRICTED.get(module.split(".")[0])
        if allowed is not None and not relative.startswith(allowed):
            faults.append(module)
    return [f"{relative} imports {module}" for module in faults]


def test_imports_follow_order_and_restrictions():
    assert [fault for path in source_files() for fault in import_faults(path)] == []


def test_order_names_every_folder():
    folders = {p.name for p in PACKAGE.iterdir() if (p / "__init__.py").exists()}
    assert folders <= set(ORDER), "name the new folder in ORDER and the docs"


def test_order_violations_forward_import_is_found():
    assert order_violations("model", ["moe_edge.engine.resident"]) != []
    assert order_violations("engine", ["moe_edge.model.router.Router"]) == []


def test_cluster_order_names_every_folder_and_file():
    parts = {p.stem for p in (PACKAGE / "cluster").iterdir() if p.stem[:2] != "__"}
    assert parts == {name for line in CLUSTER_ORDER for name in line}


def test_cluster_violations_forward_and_sideways_imports_are_found():
    table = "moe_edge.cluster.prism.table_keeper.TableKeeper"
    for part in ("transport", "options", "node", "scheduler", "od_moe"):
        assert cluster_violations(part, [table]) == [table]
    for part in ("prism", "process"):
        assert cluster_violations(part, [table]) == []
    assert cluster_violations("spec", ["moe_edge.cluster.options.ClusterOptions"]) == []
    assert cluster_violations("network", ["moe_edge.cluster.transport.base"]) != []
