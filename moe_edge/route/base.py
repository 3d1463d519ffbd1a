"""The interface of route policies, and the gate scores they compare."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from moe_edge.core.arrays import module_of
from moe_edge.core.checks import ConfigError, check_shape
from moe_edge.core.plug_in import PlugIn, Registry, is_ours, register
from moe_edge.core.plug_in_result import kind_of, wrong_result
from moe_edge.model.config import MoeConfig


class Route(PlugIn):
    """Chooses the experts of a layer. Subclasses are frozen dataclasses.

    It sees a layer's scores, the model's own choice and a mask of what is resident, and
    returns the choice that is computed; it touches no cache, transfer or model code.

    Offloading engines call `route` in decoding only, whatever it says of itself: mode
    layered once for each MoE layer and step with NumPy arrays, mode fused once for each
    MoE layer while it makes its program of a step, with jax.numpy's. Prompts are
    computed as the model's router chooses. `TopK` itself is not called. Replay and the
    simulators take the choices of a trace, and no route. A route of another package is
    traced when an engine of mode fused is made.

    Attributes:
      host_only: NumPy only, not inside jit: mode fused refuses it, auto takes layered.
      acts_on_absent_only: it changes nothing where all chosen experts are resident, so
        mode layered and clusters do not ask it there.
      strength: the option that says how much may change, which fidelity cards vary;
        none: cards have one of it only where a run names it.
      rules: the other options that cards compare at each strength.
    """

    required: ClassVar[tuple[str, ...]] = ("lossless", "route")
    host_only: ClassVar[bool] = False
    acts_on_absent_only: ClassVar[bool] = False
    strength: ClassVar[str] = ""
    rules: ClassVar[Sequence[Mapping[str, Any]]] = ({},)

    @property
    def lossless(self) -> bool:
        """True if it always returns the model's own choice, bit for bit.

        Engines take its word for it: their results are then called lossless.
        """
        raise NotImplementedError

    def route(
        self, layer, scores_TE, resident_E, params: MoeConfig, ids_TK, weights_TK
    ):
        """The choice to compute.

        Args:
          layer: the model's layer index.
          scores_TE: float32, as the model's router reports them (Routing.scores_TE).
          resident_E: bool, experts that cost no transfer.
          params: the router's rule.
          ids_TK, weights_TK: the model's own choice, best first; id E is padding.
        Returns:
          (ids_TK int32, weights_TK float32), of the same shapes; id E with weight 0
          means no expert. Ids are from 0 to E, a token's experts differ (E may stand
          several times), and weights are finite: what breaks this is refused by name,
          in mode fused at the end of the step.
        """
        raise NotImplementedError


ROUTES = Registry("route policy", Route, "route_options", "moe_edge.route")


def get_route(route: str | type | Route, **options) -> Route:
    """The route policy of a name, a class, or an object.

    Raises:
      ConfigError: unknown name or option (the known ones are listed), or a bad value.
    """
    return ROUTES.make(route, options)


def check_choice(route: Route, found, shape_TK, num_experts: int) -> None:
    """Raises ConfigError for a choice that no engine can compute.

    Args:
      found: what `route` gave, on the host or on the device.
      shape_TK: of the model's own choice.
    """
    check_kinds(route, found)
    for name, array in zip(("ids_TK", "weights_TK"), found, strict=True):
        check_shape(f"{name} of route {route.name}", array, shape_TK)
    ids_TK, weights_TK = map(np.asarray, found)
    wrong = ids_TK[(ids_TK < 0) | (ids_TK > num_experts)]
    if wrong.size or not np.isfinite(weights_TK.astype(np.float32)).all():
        raise ConfigError(
            f"route {route.name} gave ids {sorted({*wrong.tolist()})[:4]} or weights "
            f"that are not finite; expected ids from 0 to {num_experts}, which is none"
        )
    again_T = repeats(ids_TK, num_experts).any(axis=1)
    if again_T.any():
        raise ConfigError(
            f"route {route.name} gave one token the ids {ids_TK[again_T][0].tolist()}; "
            f"expected each expert once, {num_experts} where there is none"
        )


def check_kinds(route: Route, found) -> None:
    """Raises ConfigError unless a route gave whole numbers and floats, in two arrays.

    Args:
      found: arrays, or what tells their shapes and types.
    """
    kinds = None
    if isinstance(found, (tuple, list)) and len(found) == 2:
        kinds = kind_of(found[0]), kind_of(found[1])
    if kinds is None or kinds[0] not in ("i", "u") or kinds[1] != "f":
        got = found
        if kinds is not None and None not in kinds:
            got = tuple(np.dtype(array.dtype).name for array in found)
        raise wrong_result(
            f"route policy {route.name}", "route", got, "(ids int32, weights float32)"
        )


def may_act(route: Route, ids_TK: np.ndarray, resident_E: np.ndarray) -> bool:
    """Whether a route could change what a step chose, on the host."""
    if not route.acts_on_absent_only:
        return True
    return not resident_E[ids_TK[ids_TK < len(resident_E)]].all()


def host_choice(
    route: Route,
    layer: int,
    scores_TE,
    resident_E,
    params: MoeConfig,
    own_TK,
    weights_TK,
) -> tuple[np.ndarray, np.ndarray]:
    """(ids_TK, weights_TK) of a step on the host: the route's, checked where the route
    is another author's, or the very arrays given where it could change nothing."""
    if not may_act(route, own_TK, resident_E):
        return own_TK, weights_TK
    found = route.route(layer, scores_TE, resident_E, params, own_TK, weights_TK)
    if not is_ours(route):
        check_choice(route, found, own_TK.shape, params.num_experts)
    # A policy may compute with jax.numpy; here both are the host's.
    return np.asarray(found[0], np.int32), np.asarray(found[1], np.float32)


def repeats(ids_TK, num_experts: int):
    """bool [T, K]: whether a token's expert stands at an earlier place of it, too."""
    xp = module_of(ids_TK)
    rank_K = np.arange(ids_TK.shape[1])
    is_same_TKK = ids_TK[:, :, None] == ids_TK[:, None, :]
    is_same_TKK = is_same_TKK & xp.asarray(rank_K[None, :] < rank_K[:, None])[None]
    return xp.any(is_same_TKK, axis=2) & (ids_TK < num_experts)


def sound_choice(found, own, num_experts: int):
    """The tokens' choices, the model's own where a route's cannot be computed; in jit.

    Args:
      found: (ids_TK, weights_TK) of a route; own: the same of the model.
    Returns:
      (ids_TK, weights_TK, int32: of how many tokens the model's own were taken).
    """
    (ids_TK, weights_TK), (own_TK, own_weights_TK) = found, own
    xp = module_of(own_TK)
    ids_TK = xp.asarray(ids_TK).astype(np.int32)
    weights_TK = xp.asarray(weights_TK).astype(np.float32)
    bad_TK = (ids_TK < 0) | (ids_TK > num_experts) | ~xp.isfinite(weights_TK)
    bad_TK = bad_TK | repeats(ids_TK, num_experts)
    bad_T1 = xp.any(bad_TK, axis=1, keepdims=True)
    ids_TK = xp.where(bad_T1, own_TK, ids_TK)
    weights_TK = xp.where(bad_T1, own_weights_TK, weights_TK)
    return ids_TK, weights_TK, xp.sum(bad_T1, dtype=np.int32)


@register
@dataclasses.dataclass(frozen=True)
class TopK(Route):
    """Hands back what the model's router chose: lossless by construction."""

    name = "topk"
    SOURCE = "the model's router (moe_edge.model.router.choose)"
    lossless = True

    def route(
        self, layer, scores_TE, resident_E, params: MoeConfig, ids_TK, weights_TK
    ):
        return ids_TK, weights_TK


def gate_scores(scores_TE, params: MoeConfig):
    """Scores as shares or gates >= 0: a `softmax_topk` router reports logits.

    Weights are these scores times one factor a token, see `MoeConfig.weighs_by_scores`.
    """
    if params.scoring != "softmax_topk":
        return scores_TE
    xp = module_of(scores_TE)
    raised_TE = xp.exp(scores_TE - xp.max(scores_TE, axis=1, keepdims=True))
    return raised_TE / xp.sum(raised_TE, axis=1, keepdims=True)


def rescale(weights_TK, total_T1, changed_T1):
    """Weights of the changed tokens scaled to the given sums; others bit-equal."""
    xp = module_of(weights_TK)
    now_T1 = weights_TK.sum(axis=1, keepdims=True)
    factor_T1 = total_T1 / xp.where(changed_T1, now_T1, 1)
    return xp.where(changed_T1, weights_TK * factor_T1, weights_TK)
