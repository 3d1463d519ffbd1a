"""Rope fields of both config dialects -> RopeConfig.

Newer files write `rope_parameters: {rope_theta, rope_type, factor, ...}`, older ones
`rope_theta` and `rope_scaling: {type, factor, ...}`. Precedence and defaults are
those of `transformers` 5 (modeling_rope_utils.py: convert_rope_params_to_dict,
standardize_rope_params, _compute_*_parameters).
"""

import math

from moe_edge.convert.hf_config import Fields
from moe_edge.core.checks import ConfigError, check_known
from moe_edge.model.attention_config import RopeConfig

_ALWAYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_ORIGINAL = "original_max_position_embeddings"
_KEYS = {
    "default": set(),
    "linear": {"factor"},
    # Differs from default only beyond the context, which we refuse anyway.
    "dynamic": {"factor"},
    "llama3": {"factor", _ORIGINAL, "low_freq_factor", "high_freq_factor"},
    "yarn": {"factor", _ORIGINAL, "attention_factor", "beta_fast", "beta_slow"}
    | {"mscale", "mscale_all_dim", "truncate"},
    "longrope": {"factor", _ORIGINAL, "attention_factor"}
    | {"short_factor", "long_factor"},
}


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's magnitude correction, 1 for factor <= 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def rope_dict(
    fields: Fields, default_theta: float, default: dict | None = None
) -> dict:
    """One dict with `rope_type` and `rope_theta`, whatever the dialect.

    Args:
      fields: the config.
      default_theta: the family's theta where the file has none.
      default: the family's rope parameters where the file has none (gpt-oss).
    """
    # As in transformers, a non-empty `rope_scaling` wins over `rope_parameters`.
    scaling = fields.get("rope_scaling")
    parameters = scaling or fields.get("rope_parameters") or default or {}
    if not isinstance(parameters, dict):
        raise ConfigError(f"rope parameters must be an object, got {parameters!r}")
    parameters = dict(parameters)
    theta = fields.get("rope_theta", default_theta)
    parameters.setdefault("rope_theta", theta)
    parameters.setdefault("rope_type", parameters.get("type") or "default")
    outer = fields.get(_ORIGINAL)
    if outer is not None and parameters["rope_type"] in ("yarn", "llama3", "longrope"):
        parameters[_ORIGINAL] = outer
    return parameters


def rope_of_type(fields: Fields, layer_type: str, default: dict) -> dict:
    """Rope parameters of layers of a type, where `rope_parameters` has some of each.

    Args:
      default: where the file has no `rope_parameters`.
    Raises:
      ConfigError: none of that type.
    """
    given = fields.get("rope_parameters") or {layer_type: default}
    own = given.get(layer_type) if isinstance(given, dict) else None
    if not isinstance(own, dict):
        raise ConfigError(
            f"config.json of {fields.family}: rope_parameters are {given!r:.80}, "
            f"expected an object with those of {layer_type}"
        )
    return {"rope_type": "default", **own}


def rotated_width(
    fields: Fields, parameters: dict, head_dim: int, default: float
) -> int:
    """How many of a head's dimensions are rotated, the first ones.

    Args:
      parameters: of `rope_dict`; its factor, which wins, is taken out.
      default: the share of a head where the file is silent; null means all of it.
    Raises:
      ConfigError: a share that leaves no pair, an odd number, or more than the head.
    """
    name = "partial_rotary_factor"
    outer = fields.get(name, default)
    factor = parameters.pop(name, 1.0 if outer is None else outer)
    width = int(head_dim * fields.number(name, factor))
    if width % 2 or not 2 <= width <= head_dim:
        raise ConfigError(
            f"config.json of {fields.family}: {name} (or rotary_dim / head_dim) is "
            f"{factor}, which rotates {width} of the {head_dim} dimensions of a head; "
            f"expected an even number in 2..{head_dim}"
        )
    return width


def stretch_theta(fields: Fields, parameters: dict, head_dim: int) -> None:
    """Takes a fixed `alpha` out of a dynamic rope, which it makes a plain one.

    The frequencies are those of theta x alpha^(d / (d - 2)), at every length.
    """
    if parameters["rope_type"] == "dynamic" and parameters.get("alpha"):
        alpha = fields.number("rope alpha", parameters.pop("alpha"))
        theta = fields.number("rope rope_theta", parameters["rope_theta"])
        if head_dim <= 2:
            raise ConfigError(
                f"config.json of {fields.family}: rope alpha needs a head_dim above 2, "
                f"got {head_dim}"
            )
        parameters["rope_theta"] = theta * alpha ** (head_dim / (head_dim - 2))


def proportional_rope(fields: Fields, parameters: dict, dim: int) -> RopeConfig:
    """A rope over whole heads of which the first pairs turn, the others stay (Gemma 4).

    Raises:
      ConfigError: an unknown key, or a share of the pairs that is none of them.
    """
    foreign = parameters.keys() - _ALWAYS - {"factor"}
    if foreign:
        raise ConfigError(
            f"rope parameters of kind 'proportional' have unknown fields "
            f"{sorted(foreign)}; known: {', '.join(sorted(_ALWAYS | {'factor'}))}"
        )

    def number(name, default=None):
        value = parameters.get(name)
        return fields.number(f"rope {name}", default if value is None else value)

    share = number("partial_rotary_factor", 1.0)
    turning = int(share * dim // 2)
    if not 1 <= turning <= dim // 2:
        raise ConfigError(
            f"config.json of {fields.family}: rope partial_rotary_factor {share} turns "
            f"{turning} of the {dim // 2} pairs of a head, expected 1..{dim // 2}"
        )
    return RopeConfig(
        dim=dim,
        theta=number("rope_theta"),
        kind="proportional",
        turning=turning,
        factor=number("factor", 1.0),
    )


def rope_config(
    fields: Fields, parameters: dict, dim: int, interleaved: bool
) -> RopeConfig:
    """Checks rope parameters and computes what the model needs of them.

    Raises:
      ConfigError: unknown kind, unknown or missing key, a value out of range.
    """
    kind = parameters["rope_type"]
    check_known("rope_type", str(kind), _KEYS)
    # Keys of another kind are left behind by some writers and are not read.
    unread = _ALWAYS.union(*_KEYS.values())
    foreign = {
        name: value
        for name, value in parameters.items()
        if name not in unread and value is not None
    }
    if foreign:
        raise ConfigError(
            f"rope parameters of kind {kind!r} have unknown fields {foreign}; "
            f"known: {', '.join(sorted(_ALWAYS | _KEYS[kind]))}"
        )
    if parameters.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise ConfigError(
            "rope parameter partial_rotary_factor is "
            f"{parameters['partial_rotary_factor']!r}, expected 1: {fields.family} "
            "rotates whole heads"
        )

    def number(name, default=None):
        value = parameters.get(name)
        if value is None:
            value = default
        return fields.number(f"rope {name}", value)

    common = {"dim": dim, "theta": number("rope_theta"), "interleaved": interleaved}
    if kind in ("default", "dynamic"):
        return RopeConfig(**common)
    common["kind"] = kind
    if kind == "linear":
        return RopeConfig(**common, factor=number("factor"))
    original = number(_ORIGINAL, fields.positions)
    if original < 1:
        raise ConfigError(f"rope {_ORIGINAL} is {original}, expected 1 or more")
    if common["theta"] <= 1:
        raise ConfigError(
            f"rope_theta is {common['theta']}, expected more than 1 for {kind}"
        )
    if kind == "llama3":
        low, high = number("low_freq_factor"), number("high_freq_factor")
        if high <= low:
            raise ConfigError(
                f"rope high_freq_factor {high} must exceed low_freq_factor {low}"
            )
        return RopeConfig(
            **common,
            factor=number("factor"),
            original_positions=int(original),
            low_freq_factor=low,
            high_freq_factor=high,
        )
    factor = number("factor", fields.positions / original)
    if kind == "longrope":
        return RopeConfig(
            **common,
            factors=_short_factors(fields, parameters, dim),
            original_positions=int(original),
            attention_factor=number(
                "attention_factor", _longrope_magnitude(factor, original)
            ),
        )
    mscale, all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if parameters.get("attention_factor") is not None:
        attention_factor = number("attention_factor")
    elif mscale and all_dim:
        attention_factor = yarn_mscale(factor, number("mscale")) / yarn_mscale(
            factor, number("mscale_all_dim")
        )
    else:
        attention_factor = yarn_mscale(factor)
    truncate = parameters.get("truncate", True)
    if not isinstance(truncate, bool):
        raise ConfigError(f"rope truncate is {truncate!r}, expected true or false")
    return RopeConfig(
        **common,
        factor=factor,
        original_positions=int(original),
        attention_factor=attention_factor,
        # Zero and null both mean the default, as in transformers.
        beta_fast=number("beta_fast", 32.0) if parameters.get("beta_fast") else 32.0,
        beta_slow=number("beta_slow", 1.0) if parameters.get("beta_slow") else 1.0,
        truncate=truncate,
    )


def _short_factors(fields: Fields, parameters: dict, dim: int) -> tuple[float, ...]:
    """What divides the frequencies up to the original context; beyond it
    `long_factor` would, at all positions, so contexts end there."""
    for name in ("short_factor", "long_factor"):
        values = parameters.get(name)
        if not isinstance(values, list) or len(values) != dim // 2:
            found = len(values) if isinstance(values, list) else repr(values)[:60]
            raise ConfigError(
                f"config.json of {fields.family}: rope {name} has {found} numbers, "
                f"expected a list of {dim // 2}, one for two rotated dimensions"
            )
    short = parameters["short_factor"]
    return tuple(fields.number("rope short_factor", value) for value in short)


def _longrope_magnitude(factor: float, original: float) -> float:
    """LongRoPE's attention factor where the file has none."""
    if factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(factor) / math.log(original))


def mla_softmax_scale(fields: Fields, parameters: dict, head_dim: int) -> float | None:
    """DeepSeek's softmax scale: head_dim^-0.5 x mscale^2, None where it is plain."""
    all_dim = parameters.get("mscale_all_dim")
    if parameters["rope_type"] == "default" or not all_dim:
        return None
    all_dim = fields.number("rope mscale_all_dim", all_dim)
    factor = fields.number("rope factor", parameters.get("factor"))
    return head_dim**-0.5 * yarn_mscale(factor, all_dim) ** 2
