"""Whose record a fused engine's policy goes on with."""

import weakref
from collections.abc import Callable

import jax.numpy as jnp

from moe_edge.engine.fused_cache import Cache, DeviceCache
from moe_edge.engine.session import Session


class SessionRecords:
    """Records of a policy that keeps one sequence's: one of them is in the cache's
    state, those of other sessions wait here.

    Args:
      device: whose policy it is.
    """

    def __init__(self, device: DeviceCache):
        self._device = device
        self._running: Callable[[], Session | None] = lambda: None
        self._records = weakref.WeakKeyDictionary()

    def turn_to(self, session: Session, state: Cache) -> Cache:
        """The state with a session's record, or as it is where that is in it."""
        own = self._device.policy
        if not own.per_sequence or self._running() is session:
            return state
        if (before := self._running()) is not None:
            self._records[before] = state.policy, state.step
        policy, step = self._records.pop(session, (None, None))
        if policy is None:
            policy = own.init(self._device.spec, xp=jnp)
            step = jnp.int32(-1)
        policy = own.resume({**policy, "key_S": state.policy["key_S"]})
        self._running = weakref.ref(session)
        return state._replace(policy=policy, step=step)
