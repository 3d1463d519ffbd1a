"""A node that serves requests: a server of Prism's, or OD-MoE's main node.

One token a step, each request in a session of its own. Greedy, with the programs,
shapes and cache capacity of `generate` at batch size 1, so tokens are its tokens. A
request that another server had begun brings its known tokens: they are fed one by one,
and the next one has the bits it would have had there.
"""

import time
import traceback

import jax
import numpy as np

from moe_edge.cluster.node.answers import Answers
from moe_edge.cluster.node.engine import PlacedEngine
from moe_edge.cluster.node.ledger import Ledger
from moe_edge.cluster.node.node import Node, Order
from moe_edge.cluster.node.warm_up import warm_up
from moe_edge.cluster.transport.messages.transport import Transport
from moe_edge.core.checks import MoeEdgeError
from moe_edge.engine.base import Engine
from moe_edge.engine.generate import next_token
from moe_edge.engine.session import Session
from moe_edge.model.sampling import Sampling
from moe_edge.schedule.continuous import Continuous
from moe_edge.schedule.loop import RequestLoop
from moe_edge.schedule.request import Request

GREEDY = Sampling()


class ServedRequest(Request):
    """A request that runs on this server.

    Attributes:
      known: tokens that were generated elsewhere.
      tokens: new tokens so far, the known ones among them.
    """

    __slots__ = ("known", "session", "tokens")

    def __init__(self, number: int, prompt, max_new_tokens: int, known):
        super().__init__(
            number,
            arrival_s=time.perf_counter(),
            prompt=tuple(prompt),
            new_tokens=max_new_tokens,
        )
        self.known, self.tokens = list(known), []
        self.session: Session | None = None


class ServingNode(Node):
    """A subclass makes the engine and what goes with it.

    Args:
      max_batch: requests that take turns.
    """

    engine: PlacedEngine
    answers: Answers
    ledger: Ledger

    def __init__(self, number: int, transport: Transport, max_batch: int = 1):
        super().__init__(number, transport)
        self._policy = Continuous(max_batch)
        self._loop = RequestLoop(self._policy)
        self._stepping: Engine | None = None  # runs the requests
        self._compiled = 0
        self._keys_B = jax.random.split(jax.random.key(0), 1)
        self._active_B = jax.device_put(np.ones(1, bool))  # once: it takes 60 us

    def make_orders(self) -> dict[str, Order]:
        return super().make_orders() | {"request": Order(later=self._request)}

    def compile(self, fields, arrays) -> None:
        sizes = arrays["sizes"].tolist()
        warm_up(self.engine, self.answers, sizes)
        self.rehearse(sizes)

    def rehearse(self, sizes: list[tuple[int, int]]) -> None:
        """Compiles what else they need here."""

    def begin_run(self, number: int, engine: Engine | None = None) -> None:
        """A new run: what was noted is forgotten, and the scheduler told.

        Args:
          number: of the order to prepare for it.
          engine: instead of its own.
        """
        self.ledger.clear()
        self.engine.reset_records()
        self.transport.traffic.reset()
        self._stepping, self._loop = engine or self.engine, RequestLoop(self._policy)
        self._compiled = self.num_compiled()
        self.tell("ready", {"number": number})

    def num_compiled(self) -> int:
        return self.engine.num_compiled()

    @property
    def compiled(self) -> int:
        """Programs since the run began."""
        return self.num_compiled() - self._compiled

    # Requests.

    @property
    def idle(self) -> bool:
        return self._loop.lanes[0].idle

    def _request(self, fields, arrays) -> None:
        prompt, known = arrays["prompt"].tolist(), arrays["known"].tolist()
        new = fields["max_new_tokens"]
        request = ServedRequest(fields["id"], prompt, new, known)
        lane = self._loop.arrive(request, request.arrival_s)
        self._loop.admit(request, lane, request.arrival_s)

    def work(self) -> None:
        """One token of every running request."""
        if running := self._loop.begin_step(0, time.perf_counter()):
            ended = [request for request in running if self._step(request)]
            self._loop.end_step(0, time.perf_counter(), ended)

    def _step(self, request: ServedRequest) -> bool:
        """The next token of a request; whether it has ended."""
        try:
            return self._token(request)
        except MoeEdgeError as error:
            text = str(error)
        except Exception as error:
            traceback.print_exc()  # a fault of ours: this process's log keeps it
            text = f"{type(error).__name__}: {error}"
        self.request_failed(request.id, " ".join(text.split()))
        return True

    def _token(self, request: ServedRequest) -> bool:
        engine, index = self._stepping, len(request.tokens)
        self.begin_step(request.id, request.session is not None)
        if request.session is None:
            tokens = len(request.prompt) + request.new_tokens
            session = engine.new_session(1, tokens)
            logits = engine.prefill(session, [[*request.prompt]])
            request.session = session
        else:
            last_B = jax.device_put(np.array(request.tokens[-1:], np.int32))
            logits = engine.decode(request.session, last_B, self._active_B)
        # As `generate`, which warmed it up, passes the step.
        chosen_B = next_token(logits, self._keys_B, np.int32(index), GREEDY)
        token = int(np.asarray(chosen_B)[0])  # all programs of the step have run
        known = index < len(request.known)
        if known:
            token = request.known[index]
        request.tokens.append(token)
        done = len(request.tokens) == request.new_tokens
        done |= token in engine.config.eos_ids
        if not known:
            self.new_token(request.id, token, done, time.perf_counter())
        if done:
            request.session = None
        return done

    def begin_step(self, request: int, is_decode: bool) -> None:
        """A request's step begins."""
        self.ledger.token(request, is_decode)

    def new_token(self, number: int, token: int, done: bool, now_s: float) -> None:
        """A request has a token, which may be its last."""
        self.tell("token", {"id": number, "token": token, "done": done})

    def request_failed(self, number: int, line: str) -> None:
        """A request ended by its own error."""
        self.tell("failed", {"id": number, "error": line})
