"""Plug-ins: how they register themselves, and those of other packages."""

import dataclasses
import doctest
import sys
import textwrap

import numpy
import pytest

import moe_edge as me
from moe_edge.commands.policy_tables import KINDS
from moe_edge.core import entry_points
from moe_edge.core.checks import ConfigError
from moe_edge.core.plug_in import is_ours
from moe_edge.core.plug_in_options import needed
from moe_edge.offload.evict_base import EVICTIONS, get_eviction
from moe_edge.offload.evict_lru import Lru
from moe_edge.place.placer import PLACERS
from moe_edge.predict.base import PREDICTORS, Predictor
from moe_edge.schedule.policy import SCHEDULERS, Scheduler, get_scheduler
from tests.support.public import tiny_model


@pytest.fixture(autouse=True)
def registries(monkeypatch):
    """What a test registers is gone after it."""
    for registry in KINDS.values():
        assert len(registry), "ours have registered themselves"
        monkeypatch.setattr(registry, "_classes", dict(registry._classes))
    entry_points.load.cache_clear()
    entry_points.warn.cache_clear()


def installed(folder, monkeypatch, package="mine", code="", **points):
    """An installed package of one module, with these entry points (name=class)."""
    (folder / f"{package}.py").write_text(textwrap.dedent(code))
    facts = folder / f"{package}-1.0.dist-info"
    facts.mkdir(exist_ok=True)
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\n")
    lines = [f"{name} = {package}:{found}" for name, found in points.items()]
    text = "\n".join(["[moe_edge.policies]", *lines])
    (facts / "entry_points.txt").write_text(text + "\n")
    monkeypatch.delitem(sys.modules, package, raising=False)
    monkeypatch.syspath_prepend(str(folder))
    entry_points._entry_points.cache_clear()


MINE = """
    import moe_edge as me

    class Mine(me.Eviction):
        name = "mine"

    class Other(me.Scheduler):
        name = "other"
        def pick(self, lane, now_s):
            return ()
"""


# Those of this package.


@pytest.mark.parametrize("kind", KINDS)
def test_every_policy_of_ours_is_complete(kind):
    registry = KINDS[kind]
    assert len(registry) >= 3 and [*registry] == sorted(registry)
    for name, found in registry.items():
        assert name in registry and registry.class_of(name) is found, name
        assert found.name == name and is_ours(found) and found.SOURCE, name
        assert dataclasses.is_dataclass(found) and found.__doc__, name


def test_public_bases_are_those_of_the_registries():
    bases = me.Eviction, me.Predictor, me.Route, me.Assist, me.Placer, me.Scheduler
    assert tuple(registry.base for registry in KINDS.values()) == bases


def test_needed_are_the_options_without_a_default():
    assert needed(PREDICTORS["probe"]) == ["config", "profile"]
    assert needed(EVICTIONS["lru"]) == []


# The decorator.


def test_registered_class_is_known_by_its_name_and_its_options():
    @me.register
    @dataclasses.dataclass(frozen=True)
    class Mine(me.Eviction):
        margin: float = 0.5
        name = "mine"

    assert EVICTIONS["mine"] is Mine and "mine" in [*EVICTIONS]
    assert "mine" not in PREDICTORS and "mine" not in SCHEDULERS
    assert get_eviction("mine", margin=0.25) == Mine(0.25) != get_eviction(Mine)
    assert not is_ours(Mine) and is_ours(Lru())
    with pytest.raises(ConfigError, match="mine has no option 'edge'; known: margin"):
        get_eviction("mine", edge=1)


def test_class_defined_again_takes_its_own_place():
    def define():
        class Mine(me.Eviction):
            name = "mine"

        return me.register(Mine)

    first, second = define(), define()
    assert EVICTIONS["mine"] is second is not first


def test_two_classes_of_one_name_are_refused():
    class Taken(me.Eviction):
        name = "lru"

    with pytest.raises(
        ConfigError, match="'lru', moe_edge.offload.evict_lru.Lru and tests.*Taken; giv"
    ):
        me.register(Taken)

    @me.register
    class Mine(me.Eviction):
        name = "mine"

    class Same(me.Eviction):
        name = "mine"

    with pytest.raises(ConfigError, match="'mine' of another class, which is tests.*M"):
        get_eviction(Same)
    with pytest.raises(ConfigError, match="'lru' of another class, which ships with m"):
        get_eviction(Taken())


@pytest.mark.parametrize("wrong", [int, "lru", Lru()])
def test_what_is_no_plug_in_cannot_be_registered(wrong):
    with pytest.raises(ConfigError, match="is no plug-in, expected a subclass of Evic"):
        me.register(wrong)


def test_base_itself_and_others_are_refused_with_what_is_expected():
    with pytest.raises(
        ConfigError, match=r"expected a name \(continuous,.*subclass of Scheduler"
    ):
        get_scheduler(3)
    with pytest.raises(ConfigError, match="Scheduler'>, expected a name"):
        get_scheduler(Scheduler)
    assert PREDICTORS.class_of(Predictor) is Predictor  # `none`

    class Idle(Scheduler):
        pass

    with pytest.raises(
        ConfigError, match=r"Idle lacks pick; help\(.*policy.Scheduler\)"
    ):
        get_scheduler(Idle)


# Other packages.


def test_installed_policy_is_known_by_name_and_imported_when_asked_for(
    tmp_path, monkeypatch
):
    points = {"mine": "Mine", "other": "Other"}
    installed(tmp_path, monkeypatch, code=MINE, **points)
    assert get_eviction("lru") == Lru() and "mine" not in sys.modules, "lazily"
    assert type(get_eviction("mine")).__module__ == "mine"
    assert get_scheduler("other", max_batch=3).name == "other"
    assert "mine" in [*EVICTIONS] and "mine" not in [*SCHEDULERS]
    assert "other" not in EVICTIONS, "its base says its kind"
    with pytest.raises(ConfigError, match="unknown eviction policy 'mime'.* lru, mine"):
        get_eviction("mime")


@pytest.mark.parametrize(
    "code, found, said",
    [
        ("import nowhere", "Mine", "ModuleNotFoundError: No module named 'nowhere'"),
        ("1 +", "Mine", "SyntaxError: invalid syntax"),
        (MINE, "Gone", "AttributeError: module 'mine' has no attribute 'Gone'"),
        ("Mine = 3", "Mine", "3 is no plug-in, expected a subclass of Eviction, Pred"),
        ("class Mine: name = 'mine'", "Mine", "is no plug-in, expected a subclass of"),
    ],
)
def test_broken_package_is_refused_by_name_and_left_out_of_lists(
    code, found, said, tmp_path, monkeypatch, capsys
):
    installed(tmp_path, monkeypatch, code=code, mine=found)
    where = rf"policy 'mine' of package mine \(mine:{found}\): .*{said}"
    for _ in range(2):
        with pytest.raises(ConfigError, match=f"{where}.*; repair or uninstall that p"):
            get_eviction("mine")
    assert get_eviction("lru") == Lru()
    assert "mine" not in [*EVICTIONS] and "lru" in [*EVICTIONS]
    told = capsys.readouterr().err
    assert told.count("warning: policy 'mine' of package mine") == 1, told


def test_name_that_is_not_the_entry_points_is_refused(tmp_path, monkeypatch):
    installed(tmp_path, monkeypatch, code=MINE, **{"yours": "Mine"})
    with pytest.raises(
        ConfigError, match="'yours' of package mine.* has the name 'mine', expected th"
    ):
        get_eviction("yours")


def test_packages_that_share_a_name_are_refused(tmp_path, monkeypatch):
    installed(tmp_path, monkeypatch, "first", MINE, mine="Mine")
    installed(tmp_path, monkeypatch, "second", MINE, mine="Mine")
    with pytest.raises(
        ConfigError, match=r"of package \w+ .*'mine', (first|second).Mine and (fi|sec)"
    ):
        get_eviction("mine")


def test_package_with_a_name_of_ours_is_refused(tmp_path, monkeypatch):
    code = MINE.replace('"mine"', '"lru"')
    installed(tmp_path, monkeypatch, "third", code, lru="Mine")
    with pytest.raises(
        ConfigError, match="package third .*'lru', moe_edge.offload.evict_lru.Lru and"
    ):
        get_eviction("lru")
    assert "optimal" in [*PLACERS], "others are untouched"


def test_package_that_registers_itself_with_a_decorator_is_the_same(
    tmp_path, monkeypatch
):
    code = MINE.replace("class Mine", "@me.register\n    class Mine")
    installed(tmp_path, monkeypatch, "fourth", code, mine="Mine")
    assert type(get_eviction("mine")).__module__ == "fourth"


@pytest.mark.parametrize("name", ["Assist", "Placer", "Scheduler", "register"])
def test_examples_of_docstrings_run(name):
    given = {"me": me, "numpy": numpy, "model": tiny_model()}
    finder = doctest.DocTestFinder(exclude_empty=True, recurse=False)
    runner, said = doctest.DocTestRunner(), []
    for test in finder.find(getattr(me, name), name, globs=given):
        runner.run(test, out=said.append)
    assert runner.tries >= 2 and not runner.failures, "".join(said)
