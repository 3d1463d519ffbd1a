"""Mixture-of-Experts language models on machines too small for them.

    import moe_edge as me

    model = me.load("default")
    engine = model.offload("25%", eviction="lru", predictor="stale_gate")
    out = engine.generate("Once upon a time", max_new_tokens=48)
    print(out.text, out.stats)

Policies of one's own are classes:

    >>> import numpy
    >>> import moe_edge as me
    >>> class KeepNewest(me.Eviction):
    ...     '''Gives up the expert that was used last.'''
    ...     def value(self, state):  # what each slot is worth [S]; the least leaves
    ...         return -state["last_B"][state["key_S"]].astype("float32")
    >>> class SameAgain(me.Predictor):
    ...     '''The experts that the next layer chose for the last token, once more.'''
    ...     def init(self, spec):
    ...         return {}
    ...     def observe(self, state, layer, hidden_TD, ids_TK, scores_TE):
    ...         chosen = ids_TK[-1][ids_TK[-1] < 64]  # E, here 64, is padding
    ...         return {**state, layer: chosen[None]}
    ...     def predict(self, state, layer, horizon):  # two arrays [horizon, M]
    ...         ids = state.get(layer + 1, numpy.zeros((1, 0), numpy.int32))
    ...         return ids, numpy.ones(ids.shape, numpy.float32)
    >>> class HalfOfThem(me.Route):
    ...     '''Computes the better half of a token's experts, each twice as strong.'''
    ...     lossless = False
    ...     def route(self, layer, scores_TE, resident_E, params, ids_TK, weights_TK):
    ...         K = ids_TK.shape[1]
    ...         is_kept_K = numpy.arange(K) < K // 2
    ...         ids = numpy.where(is_kept_K, ids_TK, params.num_experts)
    ...         return ids, numpy.where(is_kept_K, 2 * weights_TK, 0 * weights_TK)
    >>> given = {"eviction": KeepNewest, "predictor": SameAgain, "route": HalfOfThem}
    >>> with me.load("default").offload("25%", **given) as engine:
    ...     engine.lossless, len(engine.generate("Once upon a time", 4).tokens)
    (False, 4)

The names in `__all__` are the public face; everything else may move. A name is imported
when it is first used, so that `import moe_edge` alone loads neither JAX nor NumPy.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the names below, for type checkers and editors
    from moe_edge.core.checks import CapacityError as CapacityError
    from moe_edge.core.checks import CheckpointError as CheckpointError
    from moe_edge.core.checks import ConfigError as ConfigError
    from moe_edge.core.checks import MoeEdgeError as MoeEdgeError
    from moe_edge.core.checks import OutputError as OutputError
    from moe_edge.core.checks import RequestError as RequestError
    from moe_edge.core.plug_in import register as register
    from moe_edge.offload.assist_base import Assist as Assist
    from moe_edge.offload.evict_base import Eviction as Eviction
    from moe_edge.place.placer import Placer as Placer
    from moe_edge.predict.base import Predictor as Predictor
    from moe_edge.public.compare import compare as compare
    from moe_edge.public.engine import Engine as Engine
    from moe_edge.public.inline import run_inline as run_inline
    from moe_edge.public.model import Model as Model
    from moe_edge.public.model import load as load
    from moe_edge.public.output import Output as Output
    from moe_edge.public.plan import plan as plan
    from moe_edge.public.plot import plot as plot
    from moe_edge.public.replay import replay as replay
    from moe_edge.route.base import Route as Route
    from moe_edge.schedule.policy import Scheduler as Scheduler

# Name -> module, and what it is called there.
_PUBLIC = {
    "load": ("public.model", "load"),
    "Model": ("public.model", "Model"),
    "Engine": ("public.engine", "Engine"),
    "Output": ("public.output", "Output"),
    "compare": ("public.compare", "compare"),
    "plan": ("public.plan", "plan"),
    "plot": ("public.plot", "plot"),
    "replay": ("public.replay", "replay"),
    "run_inline": ("public.inline", "run_inline"),
    "Eviction": ("offload.evict_base", "Eviction"),
    "Predictor": ("predict.base", "Predictor"),
    "Route": ("route.base", "Route"),
    "Assist": ("offload.assist_base", "Assist"),
    "Placer": ("place.placer", "Placer"),
    "Scheduler": ("schedule.policy", "Scheduler"),
    "register": ("core.plug_in", "register"),
    "MoeEdgeError": ("core.checks", "MoeEdgeError"),
    "ConfigError": ("core.checks", "ConfigError"),
    "CheckpointError": ("core.checks", "CheckpointError"),
    "CapacityError": ("core.checks", "CapacityError"),
    "RequestError": ("core.checks", "RequestError"),
    "OutputError": ("core.checks", "OutputError"),
}
__all__ = list(_PUBLIC)


if not TYPE_CHECKING:  # they would take any name for one of ours

    def __getattr__(name: str):
        if name not in _PUBLIC:
            raise AttributeError(f"module 'moe_edge' has no attribute {name!r}")
        module, attribute = _PUBLIC[name]
        found = getattr(importlib.import_module(f"moe_edge.{module}"), attribute)
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
