"""Tables of policies in the documentation, made from what has registered itself.

    python -m moe_edge.commands.policy_tables

writes them anew, from the root of a clone: on a page `<!-- policies KIND -->` begins a
table or, within a line, a list of names, and `<!-- end -->` ends it. KIND `refusals` is
the table of what does not go together. A test says when a page is old.
"""

import dataclasses
import inspect
import re
from pathlib import Path

from moe_edge.core.checks import ConfigError, check_known
from moe_edge.core.files import write_text
from moe_edge.core.plug_in import Registry, is_ours
from moe_edge.core.plug_in_options import options_of
from moe_edge.engine.refusals import RULES
from moe_edge.offload.assist_base import ASSISTS
from moe_edge.offload.evict_base import EVICTIONS
from moe_edge.place.placer import PLACERS
from moe_edge.predict.base import PREDICTORS
from moe_edge.route.base import ROUTES
from moe_edge.schedule.policy import SCHEDULERS
from moe_edge.serve.options import SERVED

KINDS = {
    "eviction": EVICTIONS,
    "predictor": PREDICTORS,
    "route": ROUTES,
    "assist": ASSISTS,
    "placer": PLACERS,
    "scheduler": SCHEDULERS,
}
PAGES = ("README.md", "docs/use.md", "docs/plug_ins.md", "docs/serving.md")
_PART = re.compile(r"(<!-- policies (\w+) -->)(\n?).*?(<!-- end -->)", re.DOTALL)


def up_to_date(text: str) -> str:
    """A page with its lists and tables as they are now.

    Raises:
      ConfigError: a kind that does not exist.
    """

    def made(part: re.Match) -> str:
        begin, kind, is_table, end = part.groups()
        if kind == "refusals":
            return f"{begin}\n{refusal_table()}\n{end}"
        check_known("kind of policy in the documentation", kind, KINDS)
        if is_table:
            return f"{begin}\n{table(KINDS[kind])}\n{end}"
        return f"{begin}{names(KINDS[kind])}{end}"

    return _PART.sub(made, text)


def names(registry: Registry) -> str:
    """Of those that run in an engine, not in replay alone."""
    found = ours(registry)
    future = [name for name, kind in found if "future" in getattr(kind, "needs", ())]
    return ", ".join(name for name, _ in found if name not in future)


def table(registry: Registry) -> str:
    """A row a policy: name, what it does, options, source."""
    rows = ["| name | what it does | options | source |", "|---|---|---|---|"]
    for name, kind in ours(registry):
        what = " ".join(inspect.getdoc(kind).partition("\n\n")[0].split())
        source = kind.SOURCE.partition(". Differs")[0]
        cells = f"`{name}`", what.rstrip("."), options(kind), source
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def refusal_table() -> str:
    """A row a rule of `engine/refusals.py`."""
    rows = ["| choice | not with | instead |", "|---|---|---|"]
    rows += [f"| {rule.one} | {rule.other} | {rule.remedy} |" for rule in RULES]
    return "\n".join(rows)


def ours(registry: Registry) -> list[tuple[str, type]]:
    """The policies that ship with this package."""
    return [(name, kind) for name, kind in registry.items() if is_ours(kind)]


def options(kind: type) -> str:
    """Fields that a user may set, with their defaults; `?`: one must be given."""
    found = []
    for field in options_of(kind):
        if field.name in {*kind.from_context, *SERVED}:
            continue
        has = field.default is not dataclasses.MISSING
        found.append(
            f"`{field.name}={field.default!r}`" if has else f"`{field.name}=?`"
        )
    return ", ".join(found)


def main() -> None:
    """Writes the pages that are old; says which."""
    if not Path(PAGES[0]).is_file():
        raise ConfigError(f"no {PAGES[0]} here; run this in the root of a clone")
    for page in PAGES:
        text = Path(page).read_text(encoding="utf-8")
        if (new := up_to_date(text)) != text:
            write_text(page, new)
            print(page)


if __name__ == "__main__":
    main()
