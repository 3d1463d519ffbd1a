"""Where templates of others run: what Hugging Face gives them, within limits.

Operators, filters, methods of texts, what a macro or a block collected, and what is
shown are counted before they are computed; they, calls and every turn of a loop look at
the time (`template_limits.py`).
"""

import datetime
import functools
import json
from collections.abc import Callable, Iterator, Sized
from typing import Any

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils

from moe_edge.serve.template_limits import (
    FILTERS,
    ITEM,
    METHODS,
    MOST_INDENT,
    SHAPERS,
    TooMuch,
    check_time,
    count_turns,
    percent_size,
    spend,
    text_size,
    timed,
)

# What jinja2 gives a call inside of a loop or block, for functions that want it.
_VARIABLES = {"_loop_vars", "_block_vars"}


class Refusal(jinja2.TemplateError):
    """The template itself refuses the messages, by `raise_exception`."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks for training what the model wrote; nothing here."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class _Generator(jinja2.compiler.CodeGenerator):
    """`~`, slices and loops go through the sandbox, as other operators do."""

    def visit_For(self, node, frame):
        timed = jinja2.nodes.EnvironmentAttribute("timed")
        values = jinja2.nodes.Call(timed, [node.iter], [], None, None)
        values.set_lineno(node.lineno)
        node.iter = values
        super().visit_For(node, frame)

    def visit_Getitem(self, node, frame):
        if not isinstance(node.arg, jinja2.nodes.Slice):
            return super().visit_Getitem(node, frame)
        self.write("environment.sliced(")
        self.visit(node.node, frame)
        self.write(")[")
        self.visit(node.arg, frame)
        self.write("]")

    def visit_Concat(self, node, frame):
        self.write("environment.concatenated((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _Namespace(jinja2.utils.Namespace):
    def __repr__(self):
        return "<Namespace>"  # not all that it holds


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """What templates of Hugging Face expect, and limits of what they may compute."""

    code_generator_class = _Generator
    intercepted_binops = frozenset(("*", "**", "%", "+"))

    def __init__(self):
        super().__init__(
            optimized=False,  # constants are computed in rendering, where they count
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=(_Generation, jinja2.ext.loopcontrols),
            finalize=_shown,
        )
        for name, function in self.filters.items():
            self.filters[name] = _timed_filter(function)
        for table, size, weight in ((FILTERS, text_size, 1), (SHAPERS, _count, ITEM)):
            for name, more in table.items():
                function = self.filters[name]
                self.filters[name] = _limited(function, size, more, weight)
        self.filters["tojson"] = _to_json
        self.globals |= {
            "raise_exception": _raise,
            "strftime_now": _strftime_now,
            "range": _range,
            "namespace": _Namespace,
        }
        del self.globals["lipsum"]

    timed = staticmethod(timed)

    @staticmethod
    def concat(pieces) -> str:
        """What a macro or a block wrote."""
        pieces = list(pieces)
        spend(sum(map(len, pieces)))
        return "".join(pieces)

    def concatenated(self, values) -> str:
        """The operator `~`."""
        spend(text_size(values))
        return "".join(map(str, values))

    def call_binop(self, context, operator, left, right):
        if operator == "%" and isinstance(left, str | bytes):
            spend(len(left) + percent_size(left, right))
        elif operator == "+" and _is_sequence(left) and _is_sequence(right):
            spend(len(left) + len(right), _weight(left))
        elif operator in ("*", "**"):
            for one, times in ((left, right), (right, left)):
                if _is_sequence(one) and isinstance(times, int):
                    spend(len(one) * times, _weight(one))
            for value in (left, right):
                if isinstance(value, int | float) and abs(value) > 1 << 32:
                    raise TooMuch(f"{operator} of numbers beyond {1 << 32}")
            if operator == "**" and isinstance(right, int | float) and abs(right) > 32:
                raise TooMuch(f"a power of {right}")
        return super().call_binop(context, operator, left, right)

    def sliced(self, value):
        """What a part is taken of, `value[1:]`."""
        if _is_sequence(value):
            spend(len(value), _weight(value))
        return value

    def call(__self, __context, __obj, *args, **kwargs):  # noqa: B902, N805
        method = getattr(__obj, "__wrapped__", __obj)  # jinja2 wraps `format`
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, str | bytes):
            args = tuple(list(a) if isinstance(a, Iterator) else a for a in args)
            named = {k: kwargs[k] for k in kwargs.keys() - _VARIABLES}
            more = METHODS.get(name, lambda *_, **__: 0)
            added = more(owner, *args, **named)
            spend(text_size(owner, args, named) + max(added, 0))
        elif isinstance(owner, int) and name == "to_bytes":
            spend(sum(n for n in (*args, *kwargs.values()) if isinstance(n, int)))
        else:
            check_time()
        if isinstance(__obj, jinja2.runtime.LoopContext):
            args = tuple(map(timed, args))  # of a recursive loop
        return super().call(__context, __obj, *args, **kwargs)


def _timed_filter(function: Callable) -> Callable:
    @functools.wraps(function)
    def call(*args, **kwargs):
        check_time()
        return function(*args, **kwargs)

    return call


def _limited(
    function: Callable, size: Callable, more: Callable | None, weight: int
) -> Callable:
    """A filter that is counted.

    Args:
      size: of its arguments; more: of what it adds to them; weight: of each.
    """
    first = int(getattr(function, "jinja_pass_arg", None) is not None)

    @functools.wraps(function)
    def call(*args, **kwargs):
        args = [list(each) if isinstance(each, Iterator) else each for each in args]
        given = args[first:]
        added = more(*given, **kwargs) if more else 0
        spend(size(*given, kwargs) + max(added, 0), weight)
        return function(*args, **kwargs)

    return call


def _count(*values: Any) -> int:
    """Items of values, whatever these hold."""
    return sum(len(value) for value in values if isinstance(value, Sized))


def _is_sequence(value: Any) -> bool:
    return isinstance(value, str | bytes | list | tuple)


def _weight(value: Any) -> int:
    return 1 if isinstance(value, str | bytes) else ITEM


@jinja2.pass_context  # unused, but jinja2 then leaves constants to the rendering
def _shown(context, value: Any) -> Any:
    spend(text_size(value))
    return value


def _range(*given) -> range:
    turns = range(*given)
    count_turns(len(turns))
    return turns


def _raise(message: str):
    raise Refusal(message)


def _strftime_now(format: str) -> str:
    spend(256 * len(format))  # what Python makes of it at most
    return datetime.datetime.now().strftime(format)


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """JSON without the escapes of HTML that jinja2's own filter writes."""
    spend(text_size(value))
    size = len(indent) if isinstance(indent, str) else indent or 0
    if size > MOST_INDENT:
        raise TooMuch(f"an indent of {size}, more than {MOST_INDENT}")
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
    if indent is None and separators is None:
        return encoder.encode(value)
    pieces = []
    for piece in encoder.iterencode(value):
        spend(len(piece))
        pieces.append(piece)
    return Sandbox.concat(pieces)
