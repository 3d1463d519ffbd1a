"""What every placer gets and gives: the problem, checked once, and the interface."""

from collections import ChainMap
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, cast

import numpy as np

from moe_edge.core.checks import (
    ConfigError,
    MoeEdgeError,
    check_shape,
    chosen,
)
from moe_edge.core.plug_in import PlugIn, Registry
from moe_edge.core.plug_in_options import needed
from moe_edge.core.plug_in_result import wrong_result
from moe_edge.hardware.cost_model import CostModel
from moe_edge.place.pack import pack, served_load
from moe_edge.place.plan import Placement
from moe_edge.place.problem import Problem


class Placer(PlugIn):
    """Says which server holds which block. Subclasses are frozen dataclasses.

    moe-edge place_experts, the cluster simulator, and the scheduler of a cluster (with
    the name of an installed placer) call `unfit` to leave it out of `all`, and `solve`;
    migration calls `solve` again in every period, with new statistics and `current`. A
    placer writes `choose` (what each server holds) or `assign` (which GPU holds it),
    and `unfit` where it cannot solve every problem. It sees frequencies, slots and
    costs, no weights. What it returns is checked: every block is on some server, and no
    GPU holds more than its slots.

    Attributes:
      needs: fields of a `Problem` that must not be None.
      follows_statistics: whether other statistics give another placement; those of
        others are never asked again.

    >>> class Everything(me.Placer):
    ...     '''Every server holds every block.'''
    ...     def choose(self, problem):
    ...         return numpy.ones(problem.frequency_NLE.shape, bool)
    >>> calls_NLE = numpy.ones((2, 1, 4))  # of two servers, a layer of four blocks
    >>> Everything().place(calls_NLE, [numpy.array([4]), numpy.array([4])]).coverage
    1.0
    """

    needs: ClassVar[tuple[str, ...]] = ()
    follows_statistics: ClassVar[bool] = True

    def place(
        self,
        frequency_NLE: np.ndarray,
        slots: Sequence[np.ndarray],
        cost_model: CostModel | None = None,
        **context: Any,
    ) -> Placement:
        """`solve`, given the fields of a `Problem`."""
        return self.solve(Problem(frequency_NLE, slots, cost_model, **context))

    def solve(self, problem: Problem) -> Placement:
        """A placement that covers every block within the memory of every GPU.

        Raises:
          ConfigError: the placer is unfit for the problem, or broke its contract.
        """
        if reason := self.unfit(problem):
            raise ConfigError(reason)
        placement, what = self.assign(problem), f"placement of placer {self.name}"
        if not isinstance(placement, Placement):
            raise wrong_result(
                f"placer {self.name}", "assign", placement, "a moe_edge Placement"
            )
        check_shape(what, placement.gpu_NLE, problem.frequency_NLE.shape)
        try:
            placement.check(problem.slots)
        except MoeEdgeError as error:
            raise ConfigError(f"{what}: {error}") from error
        return placement

    def unfit(self, problem: Problem) -> str | None:
        """Why the placer cannot solve a problem that has a solution; None if it can."""
        for field in self.needs:
            if getattr(problem, field) is None:
                return (
                    f"placer {self.name} needs a {field.replace('_', ' ')}; name a "
                    "cluster, or use optimal"
                )
        return None

    def assign(self, problem: Problem) -> Placement:
        """The choice of `choose`, packed on the GPUs of each server."""
        on_NLE = np.asarray(self.choose(problem), bool)
        what = f"choice of placer {self.name}"
        check_shape(what, on_NLE, problem.frequency_NLE.shape)
        held_N = on_NLE.sum(axis=(1, 2))
        for server in np.flatnonzero(held_N > problem.capacity_N):
            raise ConfigError(
                f"{what} puts {held_N[server]} blocks on server {server}, which has "
                f"room for {problem.capacity_N[server]}"
            )
        load_NLE = served_load(problem.frequency_NLE, on_NLE)
        return Placement(pack(on_NLE, problem.slots, load_NLE, problem.speeds))

    def choose(self, problem: Problem) -> np.ndarray:
        """bool [N, L, E]: what each server holds."""
        raise ConfigError(
            f"placer {self.name} writes neither choose nor assign; "
            "help(moe_edge.Placer) says what they give"
        )


PLACERS = Registry("placer", Placer, "placer_options", "moe_edge.place")
PlacerOptions = Mapping[str, Mapping[str, Any]]  # by the name of a placer

# Servers that load what they lack from their own memory and ask nobody: name -> whether
# busy ones pass requests on to idle ones (Prism, table I).
ALONE = {"moe_infinity": False, "moe_infinity_lb": True}
# The keys of both, looked up when they are asked for.
METHODS: Mapping[str, Any] = ChainMap(cast(Any, PLACERS), ALONE)


def get_placer(placer: str | type | Placer, **options) -> Placer:
    """The placer of a name, a class, or an object.

    Raises:
      ConfigError: unknown name or option (the known ones are listed), or a bad value.
    """
    return PLACERS.make(placer, options)


def listed_placers(
    given: str | Sequence[Any],
    options: PlacerOptions | None = None,
    alone: Collection[str] = (),
) -> dict[str, Placer | None] | None:
    """What a comparison runs, by name, in order; None for `all`.

    Args:
      given: names separated by commas, or a list of names, classes and objects.
      options: of placers by name.
      alone: names of methods that are no placers, whose value is None.
    Raises:
      ConfigError: an unknown name or option, two of one name, or options of none.
    """
    wanted: Sequence[Any] | None = None if isinstance(given, str) else given
    if isinstance(given, str):
        known: Mapping[str, Any] = ChainMap(cast(Any, PLACERS), dict.fromkeys(alone))
        wanted = chosen("method" if alone else "placer", given, known)
    if wanted is None:
        return None
    found: dict[str, Placer | None] = {}
    left = dict(options or {})
    for one in wanted:
        is_alone = isinstance(one, str) and one in alone
        name = one if is_alone else PLACERS.class_of(one).name
        if name in found:
            raise ConfigError(
                f"placer {name} is given twice, and results are called by its name; "
                "give one of them a name of its own"
            )
        found[name] = None if is_alone else get_placer(one, **left.pop(name, {}))
    if left:
        raise ConfigError(
            f"placer_options are of {', '.join(left)}, and the placers are "
            f"{', '.join(found)}; name them alike"
        )
    return found


def fit_placers(
    problem: Problem, options: PlacerOptions | None = None
) -> tuple[dict[str, Placer], dict[str, str]]:
    """All placers that fit a problem, by name, and why the others do not.

    Raises:
      ConfigError: options of a placer that does not exist.
    """
    options = options or {}
    for name in options:
        PLACERS.class_of(name)
    found, left_out = {}, {}
    for name, kind in PLACERS.items():
        own = options.get(name, {})
        if missing := [n for n in needed(kind) if n not in own]:
            left_out[name] = (
                f"placer {name} got no {', '.join(missing)}; give it in placer_options"
            )
            continue
        placer = get_placer(name, **own)
        if reason := placer.unfit(problem):
            left_out[name] = reason
        else:
            found[name] = placer
    return found, left_out
