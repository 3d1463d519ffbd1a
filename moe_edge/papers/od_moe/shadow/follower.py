"""A shadow behind a running session: it steps, and is aligned with the model.

Stepping and aligning are apart, so that a shadow may run in another process and get
tokens, keys and values by messages. `LocalShadow` does both beside an engine that holds
the model, in its process.
"""

import weakref
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from moe_edge.engine.companion import Choices
from moe_edge.engine.session import Session
from moe_edge.model.sampling import likeliest
from moe_edge.papers.od_moe.shadow.engine import ShadowEngine
from moe_edge.papers.od_moe.shadow.predictor import Shadow


class Follower:
    """The shadow's side of one session: rows, capacity and cache layout are equal.

    Either `prefill` or `begin` comes first.
    """

    def __init__(self, shadow: ShadowEngine, batch: int, capacity: int):
        self.shadow, self.session = shadow, shadow.new_session(batch, capacity)
        self._tokens_B = self._hidden = None  # its own next token, or what it comes of
        self._kept: list | None = None  # states before a step that may be taken back

    def prefill(self, prompts: Sequence[Sequence[int]]) -> None:
        """The shadow runs the prompts itself."""
        logits_BV = self.shadow.prefill(self.session, prompts)
        self._tokens_B = likeliest(logits_BV)

    def begin(self, lengths: Sequence[int]) -> None:
        """Prompts of these lengths, whose keys and values come by alignment."""
        self.session.grow(lengths)
        self.session.positions_B = jax.device_put(np.asarray(lengths, np.int32))

    def step(self, active_B, tokens_B=None) -> Choices:
        """Runs the coming token.

        Args:
          active_B: bool device array; rows that ended choose nothing (id E).
          tokens_B: the model's int32 tokens; None: the shadow's own.
        """
        if tokens_B is None:
            tokens_B = self.own_tokens()
        self._tokens_B = None
        self._hidden, choices = self.shadow.choose(self.session, tokens_B, active_B)
        return choices

    def keep_states(self) -> None:
        """Copies states, before a step that may be taken back."""
        self._kept = self.shadow.programs.copy_states(self.session.caches)

    def go_back(self) -> None:
        """Takes the last step back; where layers have states, those kept before it.

        The next step overwrites the keys and values that it wrote.
        """
        session, kept = self.session, self._kept
        session.positions_B = session.positions_B - 1
        session.lengths = [length - 1 for length in session.lengths]
        if kept is not None:
            pairs = zip(session.caches, kept, strict=True)
            session.caches = [cache | states for cache, states in pairs]
            self._kept = None

    def own_tokens(self) -> jax.Array:
        """The shadow's own next tokens, int32 `[B]`: the likeliest."""
        if self._tokens_B is None:
            top = self.shadow.weights.top
            self._tokens_B = self.shadow.programs.next_tokens(top, self._hidden)
        return self._tokens_B

    def align_kv(self, kv, start_B) -> None:
        """Overwrites keys and values of the positions from start_B[b] on.

        Args:
          kv: of all layers, as `read_kv` gives it.
        """
        write, session = self.shadow.programs.write_kv, self.session
        session.caches = write(session.caches, kv, start_B)

    def copy_kv(self, caches, start_B, count: int) -> None:
        """The same from a session's caches on this device, which stay as they are."""
        copy, session = self.shadow.programs.copy_kv, self.session
        session.caches = copy(session.caches, caches, start_B, count=count)

    def copy_all_kv(self, caches) -> None:
        """The same, of all positions: garbage beyond a row's length is hidden."""
        start_B = jnp.zeros_like(self.session.positions_B)
        self.copy_kv(caches, start_B, self.session.capacity)


def read_choices(choices: Choices, batch: int, top_k: int) -> np.ndarray:
    """int32 `[L, B, K]` on the host, -1 in dense layers."""
    ids_LBK = np.full((len(choices), batch, top_k), -1, np.int32)
    for layer, ids_BK in enumerate(choices):
        if ids_BK is not None:
            ids_LBK[layer] = ids_BK
    return ids_LBK


class Course:
    """A follower on its course: aligned when due, then a step, token by token."""

    def __init__(self, follower: Follower, periods: Shadow):
        self.follower, self.periods, self.steps = follower, periods, 0

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        """Before the first step."""
        if self.periods.needs_prompt:
            self.follower.prefill(prompts)
        else:
            self.follower.begin([len(prompt) for prompt in prompts])

    def step(self, caches, tokens_B, active_B) -> Choices:
        """What the shadow chooses for the tokens that the model is about to run.

        Args:
          caches: the model's, of all tokens before; a longer run's do as well.
          tokens_B: the model's.
        """
        follower, periods = self.follower, self.periods
        self.steps += 1
        if periods.aligns_kv(self.steps):
            if self.steps == 1:
                follower.copy_all_kv(caches)
            # At step 1 once more: nothing is left to compile for later steps.
            start_B = follower.session.positions_B - periods.kv_period
            follower.copy_kv(caches, start_B, periods.kv_period)
        tokens_B = tokens_B if periods.aligns_token(self.steps) else None
        choices = follower.step(active_B, tokens_B)
        if not periods.aligns_token(self.steps + 1):
            follower.own_tokens()
        return choices


class LocalShadow:
    """The shadow of an engine in the same process: a course for each session.

    Args:
      shadow: of the engine's model.
      periods: when it is aligned.
    """

    def __init__(self, shadow: ShadowEngine, periods: Shadow):
        self.shadow, self.periods = shadow, periods
        self._prompts: weakref.WeakKeyDictionary[Session, Sequence] = (
            weakref.WeakKeyDictionary()
        )
        self._courses: weakref.WeakKeyDictionary[Session, Course] = (
            weakref.WeakKeyDictionary()
        )

    @property
    def num_bytes(self) -> int:
        """Of the shadow's weights."""
        return self.shadow.weights.num_bytes

    def num_compiled(self) -> int:
        """Programs compiled so far."""
        return self.shadow.num_compiled()

    def at_k(self, k: int) -> "LocalShadow":
        """The same courses at another operating point."""
        point = LocalShadow(self.shadow.at_k(k), self.periods)
        point._prompts, point._courses = self._prompts, self._courses
        return point

    def note_prompts(self, session: Session, prompts) -> None:
        """A session begins; what is to be run of it is run with its first token."""
        self._prompts[session] = [list(prompt) for prompt in prompts]

    def step(self, session: Session, tokens_B, active_B) -> Choices:
        """Choices for the tokens that are about to be decoded in a session."""
        course = self._courses.get(session)
        if course is None:
            batch = len(session.lengths)
            follower = Follower(self.shadow, batch, session.capacity)
            course = self._courses[session] = Course(follower, self.periods)
            course.begin(self._prompts.pop(session, [[]] * batch))
        course.follower.shadow = self.shadow
        return course.step(session.caches, tokens_B, active_B)
