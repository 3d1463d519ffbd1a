"""What templates compute equals what jinja2 computes, up to the limits."""

import time

import jinja2.sandbox
import pytest

from moe_edge.serve import template_limits
from moe_edge.serve.template_limits import TooMuch, limits, text_size
from moe_edge.serve.template_sandbox import Sandbox

GIVEN = {"text": "some <words>\n\tof 12\n", "items": ["b", "a", 3], "map": {"k": "v"}}


def render(source, **given):
    with limits():
        return "".join(Sandbox().from_string(source).generate(**GIVEN | given))


@pytest.mark.parametrize(
    "source",
    [
        "{{ '-' * 5 }}{{ 3 * '=' }}{{ [1] * 3 }}{{ 2 * 3.5 }}{{ 2 ** 5 }}{{ 'x' * 0 }}",
        "{{ '%5.1f|%-4s|%(k)s' % map if false else '%5.1f|%-4s|%%' % (2.5, text) }}",
        "{{ '%(k)s %(k)3s' % map }}{{ 7 % 4 }}{{ '%s-%05d'|format('a', 42) }}",
        "{{ '{0}{0}{k:>5}{{}}'.format(text, k=3) }}{{ '{k}'.format_map(map) }}",
        "{{ text ~ 5 ~ none ~ items }}{{ text + 'x' }}{{ items + [1] }}{{ 1 + 2 }}",
        "{{ text|center(30) }}{{ text|indent(2, true) }}{{ text|indent('> ') }}",
        "{{ text|replace('o', '00') }}{{ text.replace('o', '00', 1) }}{{ 'a'|upper }}",
        "{{ items|join(', ') }}{{ ' '.join(['a', 'b']) }}{{ items|map('upper')|join }}",
        "{{ ' '.join(items|map('string')) }}{{ items|reverse|list }}{{ text|reverse }}",
        "{{ items|batch(2, 'x')|list }}{{ items|slice(2)|list }}{{ [1, 2]|sum }}",
        "{{ [[1], [2]]|sum(start=[]) }}{{ [{'k': 2}]|sum('k') }}{{ []|sum }}",
        "{{ 2.345|round(2) }}{{ 25|round(-1, 'floor') }}{{ text|wordwrap(5, 1, '|') }}",
        "{{ text|truncate(5, true, '..') }}{{ 'http://a.b c'|urlize }}{{ text|title }}",
        "{{ text|escape ~ '<' }}{{ text|e }}{{ map|xmlattr }}{{ text|urlencode }}",
        "{{ map|pprint }}{{ text|striptags }}{{ text|trim|title }}{{ text[::-1] }}",
        "{{ text.ljust(30) }}{{ '7'.zfill(width) }}{{ text.expandtabs(4) }}",
        "{{ text[2:] }}{{ items[:1] }}{{ items[1:][0] }}{{ text[0] }}{{ items[-1] }}",
        "{{ 'ab'.translate({97: 'xy'}) }}{{ (5).to_bytes(2, 'big') }}{{ b'x'.hex() }}",
        "{% set ns = namespace(n=1) %}{% for i in range(3) %}{% set ns.n = ns.n + i %}"
        "{{ loop.index }}{% endfor %}{{ ns.n }}",
        "{% macro f(x) %}<{{ x }}>{{ caller() if caller }}{% endmacro %}{{ f(text) }}"
        "{% call f(1) %}in{% endcall %}{% set y %}{{ text }}!{% endset %}{{ y }}",
        "{% filter indent(3) %}a\nb{% endfilter %}{{ text|selectattr('x')|list }}",
        "{{ [items, map, items]|string }}{{ nothing }}{{ none }}{{ true }}{{ 1.5 }}",
        "{% for i in items recursive %}{{ loop.depth }}{{ i }}{{ loop.length }}"
        "{{ loop.last }}{{ loop.previtem }}{{ loop.nextitem }}{{ loop.revindex }}"
        "{{ loop(['c']) if loop.depth < 3 }}{% endfor %}",
        "{% for i in items %}{% set w = 5 %}{{ 'x'.ljust(w) }}"
        "{{ text.replace('o', '00') }}"
        "{{ '-'.join(['a', 'b']) }}{{ '{0}{k}'.format(1, k=2) }}{{ text.split(' ') }}"
        "{{ 'a\tb'.expandtabs(tabsize=w) }}{{ '%d'|format(w) }}{% endfor %}",
        "{% block a %}{% set y = 3 %}{{ text.replace('o', '0') ~ 'x'.zfill(y) }}"
        "{% endblock %}",
        "{% for k, v in map.items() %}{{ k }}{{ v }}{% else %}none{% endfor %}"
        "{% for i in items if i is string %}{{ loop.index }}{{ i }}{% endfor %}"
        "{% for i in nothing %}{% else %}none{% endfor %}",
        "{{ cycler('a', 'b').next() }}{{ joiner(',')() }}{{ dict(a=1) }}",
    ],
)
def test_results_are_those_of_jinja2(source):
    source = source.replace("b'x'.hex()", "'x'.encode().hex()")
    stock = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True
    )
    given = GIVEN | {"width": 3}
    assert render(source, width=3) == stock.from_string(source).render(given)


MANY = 5_000_000  # characters, more than a text may have
DOUBLED = (
    "{{% set ns = namespace(x={0}) %}}{{% for i in range(23) %}}{{% set ns.x = {1} %}}"
    "{{% endfor %}}{{{{ ns.x|length }}}}"
)
BIG = "('x' * 3000000)"


@pytest.mark.parametrize(
    "source",
    [
        f"{{{{ ('x' * {MANY})|length }}}}",
        f"{{{{ ({MANY} * [0])|length }}}}",
        f"{{{{ ('%{MANY}d' % 5)|length }}}}",
        f"{{{{ ('%.{MANY}f' % 5)|length }}}}",
        f"{{{{ ('%*d' % ({MANY}, 5))|length }}}}",
        "{{ ('%(k)s%(k)s' % {'k': " + BIG + "})|length }}",
        f"{{{{ ('%{MANY}d'|format(5))|length }}}}",
        f"{{{{ '{{:{MANY}}}'.format(5)|length }}}}",
        f"{{{{ '{{:{{}}}}'.format(5, {MANY})|length }}}}",
        "{{ '{0}{0}'.format(" + BIG + ")|length }}",
        "{{ '{k[0]}{k[1]}'.format_map({'k': [" + f"{BIG}, {BIG}" + "]})|length }}",
        f"{{{{ ('x'|center({MANY}))|length }}}}",
        f"{{{{ ['x']|map('center', {MANY})|map('length')|list }}}}",
        f"{{{{ ('a\nb'|indent({MANY}))|length }}}}",
        "{{ (text|indent(" + BIG + "))|length }}",
        "{{ ('aa'|replace('a', " + BIG + "))|length }}",
        "{{ ('aa'.replace('', " + BIG + "))|length }}",
        "{{ ([1, 2, 3]|join(" + BIG + "))|length }}",
        "{{ (items|map('string')|join(" + BIG + "))|length }}",
        "{{ " + BIG + ".join(['a', 'b', 'c'])|length }}",
        "{{ " + BIG + ".join(items|map('string'))|length }}",
        f"{{{{ 'x'.ljust({MANY})|length }}}}",
        f"{{{{ 'x'.zfill({MANY})|length }}}}",
        f"{{{{ '\t'.expandtabs({MANY})|length }}}}",
        "{{ 'aa'.translate({97: " + BIG + "})|length }}",
        f"{{{{ (5).to_bytes({MANY}, 'big')|length }}}}",
        f"{{{{ ([1]|batch({MANY}, 0)|list)[0]|length }}}}",
        f"{{{{ [1]|slice({MANY})|list|length }}}}",
        "{{ ('a b c'|wordwrap(1, true, " + BIG + "))|length }}",
        "{{ ('aaa'|truncate(2, true, end=" + f"{BIG} ~ {BIG}" + "))|length }}",
        "{{ 1.5|round(200) }}",
        "{{ {'a': 1}|tojson(indent=101) }}",
        "{{ ([0] * 3)|tojson(separators=(" + f"{BIG}, ':'))|length" + "}}",
        DOUBLED.format("'x'", "ns.x ~ ns.x"),
        DOUBLED.format("'x'", "ns.x + ns.x"),
        DOUBLED.format("'x'", "[ns.x, ns.x]|join"),
        DOUBLED.format("[0]", "ns.x + ns.x"),
        DOUBLED.format("'x'", "'%s%s' % (ns.x, ns.x)"),
        "{% set ns = namespace(x='x') %}{% for i in range(23) %}"
        "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}"
        "{{ ns.x|length }}",
        "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}{{ f(" + BIG + ")|length }}",
        "{% set ns = namespace(x=['x']) %}{% for i in range(23) %}"
        "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ (ns.x|string)|length }}",
    ],
)
def test_text_that_is_too_long_is_refused_before_it_is_made(source):
    with pytest.raises(TooMuch):
        render(source)


@pytest.mark.parametrize(
    "step",
    [
        "{% set ns.p = ns.p ~ '<s>' ~ m.role ~ m.text ~ '</s>' %}",
        "{% set ns.p = ns.p + '<s>' + m.role + '\n' + m.text + '</s>' + '\n' %}",
        "{% set p %}{{ ns.p }}<s>{{ m.role ~ m.text }}{% endset %}{% set ns.p = p %}",
    ],
)
def test_long_conversation_may_be_collected_in_a_namespace(step):
    messages = [{"role": "user", "text": 1000 * "x"}] * 1000
    source = "{% set ns = namespace(p='') %}{% for m in messages %}" + step
    start = time.thread_time()
    text = render(source + "{% endfor %}{{ ns.p }}", messages=messages)
    assert text.count("<s>user") == 1000 and text.count("x") == 1_000_000
    assert time.thread_time() - start < 2


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99) %}{% set x = 'x' * 4000000 %}{% endfor %}",
        "{% set ns = namespace(x=[]) %}{% set big = 'x' * 4000000 %}"
        "{% for i in range(99) %}{% set ns.x = ns.x + [big[1:]] %}{% endfor %}",
    ],
)
def test_work_of_all_steps_is_bounded(monkeypatch, source):
    monkeypatch.setattr(template_limits, "MOST_WORK", 8_000_000)
    with pytest.raises(TooMuch, match="more than 8000000 characters in all steps"):
        render(source)


LETTERS = "{% set s = 'x' * 100000 %}{% for a in s %}"


@pytest.mark.parametrize(
    "source",
    [
        LETTERS + "{% for b in s %}{% endfor %}{% endfor %}",
        LETTERS + "{% for b in s if false %}{% endfor %}{% endfor %}",
        LETTERS + "{% for b in s|map('e') %}{{ loop.last }}{% endfor %}{% endfor %}",
        "{% set t = 'x' * 4000000 %}"
        + LETTERS
        + "{% if 'y' in t %}{% endif %}{% endfor %}",
        LETTERS + "{% if s|sort == s|reject('string')|list %}{% endif %}{% endfor %}",
        "{% for a in 'x' * 100000 recursive %}{% if loop.depth < 9 %}"
        "{{ loop('x' * 100000) }}{% endif %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}"
        "{% endmacro %}{% set x = f(99) %}",
        "{% set x = text * 999 %}" + 99 * "{% set x = x|sort %}",
    ],
)
def test_time_of_a_rendering_is_bounded(monkeypatch, source):
    monkeypatch.setattr(template_limits, "MOST_SECONDS", 0.05)
    start = time.thread_time()
    with pytest.raises(TooMuch, match=r"more than 0\.05 s of computing"):
        render(source)
    assert time.thread_time() - start < 3


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ ('ab' * 2000000)|wordwrap(1) }}", "a word of 4000000 char.* by 1$"),
        ("{{ ('ab' * 2000000)|wordwrap }}", "a word of 4000000 char.* by 79$"),
        ("{{ ([[0] * 9] * 9999)|sum(start=[]) }}", "a text of more than 4194304"),
        ("{{ ([{'k': [0]}] * 9)|sum('k', []) }}", "a sum of attributes that are no"),
    ],
)
def test_filter_that_copies_again_and_again_is_refused(source, message):
    with pytest.raises(TooMuch, match=message):
        render(source)


@pytest.mark.parametrize(
    "constant",
    ["'x'|center(4000000)", "'x' * 4000000", "('x' * 2000000) ~ ('x' * 2000000)"],
)
def test_constants_are_made_in_rendering_not_by_the_compiler(constant):
    source = "{% if " + constant + " %}{% endif %}{{ " + constant + " }}"
    assert len(Sandbox().compile(9 * source, raw=True)) < 10_000
    template = Sandbox().from_string(9 * source)
    with limits(), pytest.raises(TooMuch):
        template.render()
    assert len(render("{{ " + constant + " }}")) == 4_000_000


@pytest.mark.parametrize(
    "step", ["big[1:]", "big + [1]", "[0] * 4000000", "big|reverse|list"]
)
def test_lists_of_all_steps_are_bounded_by_their_memory(step):
    with pytest.raises(TooMuch, match="in all steps together"):
        render(
            "{% set ns = namespace() %}{% set big = [0] * 4000000 %}"
            "{% for i in range(40) %}{% set ns.x = " + step + " %}{% endfor %}"
        )


def test_renderings_do_not_share_their_limits():
    template = Sandbox().from_string("{% for i in range(60000) %}{% endfor %}")
    for _ in range(3):
        with limits():
            template.render()


def test_text_size_of_shared_and_deep_values():
    value = ["x"]
    for _ in range(100):
        value = [value, value]
    assert text_size(value) > 4 << 20  # and it ends
    assert text_size("abc", {"k": ["vw"]}, 12345, None) < 100
