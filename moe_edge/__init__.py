"""Mixture-of-Experts language models on machines too small for them.

    import moe_edge as me

    model = me.load("default")
    engine = model.offload("25%", eviction="lru", predictor="stale_gate")
    out = engine.generate("Once upon a time", max_new_tokens=48)
    print(out.text, out.stats)

The names in `__all__` are the public face; everything else may move. A name is imported
when it is first used, so that `import moe_edge` alone loads neither JAX nor NumPy.
"""

import importlib

# Name -> module, and what it is called there.
_PUBLIC = {
    "load": ("public.model", "load"),
    "Model": ("public.model", "Model"),
    "Engine": ("public.engine", "Engine"),
    "Output": ("public.output", "Output"),
    "compare": ("public.compare", "compare"),
    "plot": ("public.compare", "plot"),
    "run_inline": ("public.model", "run_inline"),
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


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module 'moe_edge' has no attribute {name!r}")
    module, attribute = _PUBLIC[name]
    found = getattr(importlib.import_module(f"moe_edge.{module}"), attribute)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
