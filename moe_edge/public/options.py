"""What `Model.offload` is given, as checked options of an engine."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from moe_edge.core.checks import ConfigError
from moe_edge.core.plug_in import Registry
from moe_edge.core.typed import check_options
from moe_edge.engine.load import check_weights
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.offload.assist_base import ASSISTS
from moe_edge.offload.evict_base import EVICTIONS
from moe_edge.predict.base import PREDICTORS
from moe_edge.public.arguments import OFFLOAD_HINTS, refuse_unknown
from moe_edge.route.base import ROUTES

# What `compare` tells its cases by.
PLUG_INS: dict[str, Registry] = {
    "eviction": EVICTIONS,
    "predictor": PREDICTORS,
    "route": ROUTES,
}
# All that a registry checks.
_PLUG_INS: dict[str, Registry] = {**PLUG_INS, "assist": ASSISTS}
OPTIONS = tuple(
    field.name
    for field in dataclasses.fields(OffloadOptions)
    if field.name != "device_memory"
)


class OptionsReader:
    """Checks the options of engines of a model, without opening the device.

    Two classes of one name are refused.

    Args:
      reader: of the checkpoint.
      weights: as given to `load`, checked.
    """

    def __init__(self, reader: Any, weights: str = "copied"):
        self._reader, self._weights = reader, weights
        self._classes: dict[tuple[str, str], type] = {}  # by kind and name

    def read(
        self, device_memory: str | float, options: Mapping[str, Any]
    ) -> OffloadOptions:
        """The options of an engine.

        Raises:
          ConfigError: an unknown argument or name, a value of another type, what is no
            policy, options that exclude each other or do not fit the model, or mapped
            weights, which are of resident engines.
          CapacityError: a share of too few slots; a size is judged by the engine.
        """
        unknown = [name for name in options if name not in OPTIONS]
        known = ("device_memory", "max_batch", "max_context", "record", *OPTIONS)
        refuse_unknown("offload", unknown, known, OFFLOAD_HINTS)
        plain = {k: v for k, v in options.items() if k not in _PLUG_INS}
        check_options("offload", OffloadOptions, plain)
        given = OffloadOptions(device_memory=device_memory, **options)
        for name, registry in _PLUG_INS.items():
            if getattr(given, name) is not None:
                self._note_class(registry, getattr(given, name))
        check_weights(self._weights, self._reader, given, None)
        from moe_edge.engine.offloaded import check_fits_model  # loads JAX

        check_fits_model(self._reader, given)
        return given

    def _note_class(self, registry: Registry, given: Any) -> None:
        """Refuses two classes of one name; a class defined again replaces the old."""
        found: Any = registry.class_of(given)
        before: Any = self._classes.get((registry.kind, found.name), found)
        where = found.__module__, found.__qualname__
        if (before.__module__, before.__qualname__) != where:
            raise ConfigError(
                f"two classes of {registry.kind} have the name {found.name!r}, "
                f"{before.__qualname__} and {found.__qualname__}; give each its own"
            )
        self._classes[registry.kind, found.name] = found
