"""The requests of a server: one token a step, each in a session of its own.

Greedy, with the programs, shapes and cache capacity of `generate` at batch size 1, so
tokens are its tokens. A request that another server had begun brings its known tokens:
they are fed one by one, and the next one has the bits it would have had there.
"""

import time
import traceback
from collections.abc import Callable

import jax
import numpy as np

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

    def __init__(self, number: int, prompt, max_new_tokens: int, known=()):
        super().__init__(
            number,
            arrival_s=time.perf_counter(),
            prompt=tuple(prompt),
            new_tokens=max_new_tokens,
        )
        self.known, self.tokens = list(known), []
        self.session: Session | None = None


class Requests:
    """Queue and steps of one server.

    Args:
      engine: runs the steps.
      begin: is told (request, whether it decodes) before a step.
      on_token: is told (request, token, whether it was the last, when it was known).
      on_error: is told (request, line) when one ends by its own error.
      max_batch: requests that take turns, a token each.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        begin: Callable[[int, bool], None],
        on_token: Callable[[int, int, bool, float], None],
        on_error: Callable[[int, str], None],
        max_batch: int = 1,
    ):
        self.engine, self._loop = engine, RequestLoop(Continuous(max_batch))
        self._begin, self._on_token, self._on_error = begin, on_token, on_error
        self._stop_ids = set(engine.config.eos_ids)
        self._keys_B = jax.random.split(jax.random.key(0), 1)
        self._active_B = jax.device_put(np.ones(1, bool))  # once: it takes 60 us

    @property
    def idle(self) -> bool:
        return self._loop.lanes[0].idle

    def add(self, request: ServedRequest) -> None:
        """A request has come."""
        now_s = time.perf_counter()
        self._loop.admit(request, self._loop.arrive(request, now_s), now_s)

    def step(self) -> None:
        """One token of every running request."""
        running = self._loop.begin_step(0, time.perf_counter())
        if not running:
            return
        ended = []
        for request in running:
            try:
                done = self._token(request)
            except MoeEdgeError as error:
                self._on_error(request.id, _line(error))
                done = True
            except Exception as error:
                traceback.print_exc()  # a fault of ours: this process's log keeps it
                self._on_error(request.id, f"{type(error).__name__}: {_line(error)}")
                done = True
            if done:
                ended.append(request)
        self._loop.end_step(0, time.perf_counter(), ended)

    def _token(self, request: ServedRequest) -> bool:
        """The next token of a request; whether it was the last."""
        engine, index = self.engine, len(request.tokens)
        if request.session is None:
            tokens = len(request.prompt) + request.new_tokens
            session = engine.new_session(1, tokens)
            self._begin(request.id, False)
            logits = engine.prefill(session, [[*request.prompt]])
            request.session = session
        else:
            self._begin(request.id, True)
            last_B = jax.device_put(np.array(request.tokens[-1:], np.int32))
            logits = engine.decode(request.session, last_B, self._active_B)
        # As `generate`, which warmed it up, passes the step.
        chosen_B = next_token(logits, self._keys_B, np.int32(index), GREEDY)
        token = int(np.asarray(chosen_B)[0])  # all programs of the step have run
        known = index < len(request.known)
        if known:
            token = request.known[index]
        request.tokens.append(token)
        done = len(request.tokens) == request.new_tokens or token in self._stop_ids
        if not known:
            self._on_token(request.id, token, done, time.perf_counter())
        if done:
            request.session = None
        return done


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
