"""The shadow's process: runs a token ahead of the main node and names its experts.

Departure `late` (the paper's): a step that is to be aligned begins when the main node
begins it. `speculative` (ours): the shadow goes on with its own token as soon as the
main node has begun the step before; keys and values are patched when they come, and
only if the tokens differ does it start the step over. A state has no position to patch:
where one is due it waits, as `late` does, and it copies states before a step that may
have to start over.
"""

import time

import jax
import numpy as np

from moe_edge.cluster.node.node import Node, Order
from moe_edge.cluster.roles import FIRST_WORKER, MAIN
from moe_edge.cluster.transport.base import PeerLost, Refused
from moe_edge.cluster.transport.messages.transport import Transport
from moe_edge.engine.generate import shape_of
from moe_edge.papers.od_moe.cluster.groups import Groups
from moe_edge.papers.od_moe.shadow.engine import ShadowEngine, widen_kv
from moe_edge.papers.od_moe.shadow.follower import Follower
from moe_edge.papers.od_moe.shadow.predictor import Shadow


class ShadowNode(Node):
    """The process of the shadow.

    Args:
      shadow: the model at lower precision; None names random experts.
      periods: when tokens, keys and values are aligned.
      speculative: the departure.
      seed: of random experts.
    """

    def __init__(
        self,
        number: int,
        transport: Transport,
        groups: Groups,
        moe_layers,
        num_experts: int,
        top_k: int,
        shadow: ShadowEngine | None,
        periods: Shadow,
        *,
        speculative: bool,
        seed: int = 0,
    ):
        super().__init__(number, transport)
        self._groups, self._layers = groups, list(moe_layers)
        self._experts, self._top_k = num_experts, top_k
        self._shadow, self._periods = shadow, periods
        self._speculative = speculative
        self._has_states = shadow is not None and shadow.config.has_states
        self._rng = np.random.default_rng(seed)
        self._follower: Follower | None = None
        self._active_B = jax.device_put(np.ones(1, bool))
        self._steps_before = self._done = 0  # steps of other texts, and of this one
        self._used: int | None = None  # the token of the last step
        self.step_s: list[float] = []
        self.restarts = self._compiled = 0

    def peer_lost(self, peer: int) -> None:
        # One that only this node does not reach stays: the main node calls it still.
        if peer >= FIRST_WORKER:
            self._groups.lose(peer - FIRST_WORKER)

    def make_orders(self) -> dict[str, Order]:
        return super().make_orders() | {
            "prepare": Order(later=self._prepare),
            "begin": Order(later=self._begin, of_others=True),
            "token": Order(later=self._token, of_others=True),
            "rows": Order(later=self._rows, of_others=True),
            "notes": Order(self._notes),
        }

    def compile(self, fields, arrays) -> None:
        """What texts of these sizes need."""
        if self._shadow is None:
            return
        sizes = arrays["sizes"].tolist()
        shapes = {shape_of([range(n)], new): (n, new) for n, new in sizes}
        for length, new in shapes.values():
            follower = Follower(self._shadow, 1, length + new)
            if self._periods.needs_prompt:
                follower.prefill([[0] * length])
            else:
                follower.begin([length])
            if self._periods.kv_period:
                for count in {follower.session.capacity, self._periods.kv_period}:
                    kv = self._shadow.programs.read_kv(
                        follower.session.caches, _at(0), count=count
                    )
                    follower.align_kv(jax.device_get(kv), _at(0))
            if self._has_states:
                follower.keep_states()
            for token in (None, 0) if self._periods.needs_prompt else (0, None):
                given = None if token is None else _at(token)
                choices = follower.step(self._active_B, given)
                for ids_BK in choices:
                    np.asarray(ids_BK) if ids_BK is not None else None

    def _prepare(self, fields, arrays) -> None:
        self._follower = None
        self.step_s.clear()
        self.restarts = 0
        self._compiled = self._num_compiled()
        self.tell("ready", {"number": fields["number"]})

    def _num_compiled(self) -> int:
        return 0 if self._shadow is None else self._shadow.num_compiled()

    def finish(self, fields, arrays) -> None:
        try:
            self.transport.control(MAIN, "said")
        except (PeerLost, Refused):
            pass  # the scheduler will notice
        super().finish(fields, arrays)

    def _begin(self, fields, arrays) -> None:
        """A prompt is about to run at the main node."""
        self._steps_before, self._done, self._used = fields["steps_before"], 0, None
        if self._shadow is None:
            return
        prompt = arrays["prompt"].tolist()
        follower = self._follower = Follower(self._shadow, 1, fields["capacity"])
        if self._periods.needs_prompt:
            follower.prefill([prompt])
        else:
            follower.begin([len(prompt)])

    def _token(self, fields, arrays) -> None:
        """The main node begins a decode step."""
        index = fields["index"]
        if self._shadow is None:  # has nothing to wait for, either
            if index == 1:
                self._name_random(index)
            self._name_random(index + 1)
            return
        token = fields["token"] if self._periods.aligns_token(index) else None
        if self._done < index:
            self._step(index, token, awaited=True)
        elif token is not None and token != self._used:
            self._follower.go_back()
            self.restarts += 1
            self._step(index, token, awaited=True)
        self._go_on(index + 1)

    def _rows(self, fields, arrays) -> None:
        """Keys and values of steps that the main node is through with."""
        if self._follower is None:
            return
        start = fields["start"]
        kv = [arrays[f"kv{i}"] for i in range(len(arrays))]
        session = self._follower.session
        if start == 0:  # a prompt's: one shape for all
            kv = widen_kv(session.caches, kv, session.capacity)
        self._follower.align_kv(tuple(kv), _at(start))

    def _go_on(self, index: int) -> None:
        """Runs ahead of the main node by a step, where nothing need be waited for."""
        periods, session = self._periods, self._follower.session
        token_due, kv_due = periods.aligns_token(index), periods.aligns_kv(index)
        due = token_due or kv_due
        if self._speculative:
            due = kv_due and self._has_states
        if due or max(session.lengths) >= session.capacity:
            return
        if token_due and self._has_states:
            self._follower.keep_states()
        self._step(index, None, awaited=False)

    def _step(self, index: int, token: int | None, awaited: bool) -> None:
        """Runs a step and names its experts.

        Args:
          awaited: the main node has begun it: each layer is named as soon as it is
            known, else all together, in fewer messages.
        """
        started_s, follower = time.perf_counter(), self._follower
        if token is None:
            token = int(np.asarray(follower.own_tokens())[0])
        choices = follower.step(self._active_B, _at(token))
        self._done, self._used = index, token
        size = 1 if awaited else len(self._layers)
        for first in range(0, len(self._layers), size):
            layers = self._layers[first : first + size]
            chosen = [np.asarray(choices[layer])[0].tolist() for layer in layers]
            self._name(index, first, chosen)
        self.step_s.append(time.perf_counter() - started_s)

    def _name_random(self, index: int) -> None:
        size = self._top_k
        some = [
            self._rng.choice(self._experts, size, replace=False) for _ in self._layers
        ]
        self._name(index, 0, [experts.tolist() for experts in some])

    def _name(self, index: int, place: int, chosen: list[list[int]]) -> None:
        """Names the experts of layers from a place on, to main node and workers."""
        first = (self._steps_before + index - 1) * len(self._layers) + place
        shares: dict[int, list] = {}
        for i, experts in enumerate(chosen):
            for worker, share in self._groups.share(first + i, experts).items():
                if share:
                    load = first + i, self._layers[place + i], share
                    shares.setdefault(worker, []).append(load)
        fields = {"first": first, "experts": chosen}
        self.transport.post(MAIN, "predicted", fields)
        for worker, layers in shares.items():
            self.transport.post(FIRST_WORKER + worker, "load", {"layers": layers})

    def _notes(self, fields, arrays):
        """What this node has counted."""
        facts = {
            "t_shadow_s": float(np.mean(self.step_s)) if self.step_s else None,
            "restarts": self.restarts,
            "compiled": self._num_compiled() - self._compiled,
            "weight_bytes": 0,
            "expert_bytes": 0,
        }
        if self._shadow is not None:
            weights = self._shadow.weights
            experts = jax.tree.leaves([e for e in weights.experts if e is not None])
            facts["expert_bytes"] = sum(array.nbytes for array in experts)
            facts["weight_bytes"] = weights.num_bytes
        return facts, {}


def _at(value: int) -> jax.Array:
    """int32 `[1]`"""
    return jax.device_put(np.array([value], np.int32))
