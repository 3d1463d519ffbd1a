"""A model that runs: generation, streaming, logits, and what they took."""

import gc
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from moe_edge.core.checks import (
    ConfigError,
    check_count,
)
from moe_edge.core.events import Event, Recorder
from moe_edge.core.interrupts import held_interrupts
from moe_edge.engine.base import Engine as Core
from moe_edge.engine.generate import even_batches
from moe_edge.engine.inline import is_inline
from moe_edge.engine.session import cache_bytes
from moe_edge.evaluate.perplexity import default_window, measure_perplexity
from moe_edge.evaluate.stepwise import Stepwise
from moe_edge.public.arguments import (
    GENERATE_HINTS,
    read_sampling,
    read_stop,
    refuse_unknown,
)
from moe_edge.public.call import Call, RowText, Traffic, closed_at_exit
from moe_edge.public.chat import chat_ids
from moe_edge.public.output import Measured, Output
from moe_edge.public.prompts import PromptReader
from moe_edge.workload.traces import Trace

_ARGUMENTS = (
    *("max_new_tokens", "temperature", "top_k", "top_p", "stop", "k", "seed"),
    "ignore_eos",
)


class Engine:
    """Runs a model, resident or offloaded; made by `Model.resident` or `Model.offload`.

    Use it from one thread at a time. Experts that came to the device stay there between
    calls. It is a context manager: `close` ends what runs in the background.

    Attributes:
      name: of the checkpoint.
      max_batch: prompts that run together; more of them run one batch after another.
      max_context: most tokens of a prompt and its continuation; None: the model's.
    """

    def __init__(
        self,
        core: Core,
        model,
        *,
        max_batch: int,
        max_context: int | None = None,
        recorder: Recorder | None = None,
    ):
        self.name, self.max_batch, self.max_context = model.name, max_batch, max_context
        self._core, self._model, self._recorder = core, model, recorder
        self._reader = PromptReader(model, max_context)
        self._is_closed, self._cache_bytes, self._total = False, 0, Measured()
        self._traffic = Traffic()

    def __enter__(self) -> "Engine":
        self._open()
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def __repr__(self) -> str:
        mode = "closed" if self._is_closed else self._core.expert_state().mode
        return f"<moe_edge.Engine of {self.name}, {mode}>"

    def close(self) -> None:
        """Ends what runs in the background, and frees the slots; may be called twice.

        Other engines of the model go on.
        """
        if not self._is_closed:
            self._traffic.give()
            self._core.close()
            self._is_closed, self._core = True, None
            gc.collect()  # programs of an engine hold it, and it holds them

    def _open(self) -> Core:
        if self._is_closed:
            raise ConfigError(
                f"the engine of {self.name} is closed; make another one with "
                "model.offload() or model.resident()"
            )
        return self._core

    @property
    def core(self) -> Core:
        """The engine below this one, for researchers: its interface may change."""
        return self._open()

    @property
    def link(self) -> str:
        """How experts come to the device: "real", or the rate of an emulated link."""
        found = self._open().report().get("link", {"emulated": False})
        if not found["emulated"]:
            return "real"
        rate, latency = found["bytes_per_s"] / 1e9, found["latency_s"] * 1e6
        return f"emulated, {rate:.3g} GB/s, {latency:.3g} us"

    def ids(self, prompt: str | Sequence[int]) -> list[int]:
        """Checked token ids of one prompt."""
        self._open()
        return [*self._reader.one(prompt)]

    @property
    def lossless(self) -> bool:
        """Whether its tokens are those of the resident engine."""
        return self._open().lossless

    def generate(
        self,
        prompts: str | Sequence[Any],
        max_new_tokens: int = 64,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        stop: str | Sequence[str] = (),
        k: int | None = None,
        seed: int = 0,
        ignore_eos: bool = False,
        **unknown,
    ) -> Output | list[Output]:
        """Continues a prompt, or each of a list.

        >>> out = engine.generate("Once upon a time", max_new_tokens=4)
        >>> len(out.tokens), out.finish_reason
        (4, 'length')

        Args:
          prompts: a text, token ids, or a list of them.
          max_new_tokens: most tokens of each continuation.
          temperature: 0 is greedy, the lowest id wins ties.
          top_k: draw from the k likeliest tokens; 0: from all.
          top_p: draw from the likeliest tokens up to this probability, above 0 to 1.
          stop: texts that end a continuation, of which they are no part.
          k: experts a token computes, in a refactored model sub-experts; None: the
            model's own number.
          seed: of the draws. Prompt i draws from (seed, i), whatever runs beside it.
          ignore_eos: whether to go on after an end-of-text token.
        Returns:
          an `Output`; a list of them, in order, for a list of prompts. `stats` are of
          the whole call.
        Raises:
          RequestError: no prompt, an empty one, or what is no token of the model.
          CapacityError: prompt and new tokens exceed `max_context`, the model's
            context, or the KV cache that a budget in bytes reserves.
          ConfigError: a value out of range or of another type; an unknown argument; a
            closed engine.
        """
        asked = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        asked |= {"seed": seed, "stop": stop, "k": k, "ignore_eos": ignore_eos}
        rows, is_one, told = self._begin(prompts, max_new_tokens, asked, unknown)
        texts = ["" for _ in rows]
        tokens: list[list[int]] = [[] for _ in rows]
        for row, token, text in self._run(rows, max_new_tokens, told):
            tokens[row].append(token)
            texts[row] += text
        stats = told.measured.stats(self._device_bytes())
        has_text = self._model.has_tokenizer
        outputs = [
            Output(text if has_text else None, ids, reason, dict(stats))
            for text, ids, reason in zip(texts, tokens, told.reasons, strict=True)
        ]
        return outputs[0] if is_one else outputs

    def chat(
        self, messages: Sequence[dict[str, str]], max_new_tokens: int = 64, **asked
    ) -> Output:
        """The next message of a conversation, by the checkpoint's chat template.

        >>> message = {"role": "user", "content": "Hello"}
        >>> engine.chat([message], max_new_tokens=4).finish_reason
        'length'

        Args:
          messages: each {"role": ..., "content": ...}, the oldest first.
          **asked: as `generate`.
        Raises:
          RequestError: other messages, or such as the template refuses; else as
            `generate`.
        """
        self._open()
        ids = chat_ids(self._model.tokenizer, messages)
        return self.generate(ids, max_new_tokens, **asked)

    def stream(
        self,
        prompts: str | Sequence[Any],
        max_new_tokens: int = 64,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        stop: str | Sequence[str] = (),
        k: int | None = None,
        seed: int = 0,
        ignore_eos: bool = False,
        **unknown,
    ) -> Iterator[tuple[int, int, str]]:
        """As `generate`, token by token.

        Arguments are checked by the call, before the first token. Who stops reading
        gives up the rest: its cache is freed with the iterator.

        >>> "".join(text for _, _, text in engine.stream("Once", 4)) != ""
        True

        Yields:
          (prompt's place in the list, token id, text that is certain by now). The
          texts of a prompt, joined, are the text of its `Output`.
        """
        asked = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        asked |= {"seed": seed, "stop": stop, "k": k, "ignore_eos": ignore_eos}
        rows, _, told = self._begin(prompts, max_new_tokens, asked, unknown)
        return closed_at_exit(self._run(rows, max_new_tokens, told))

    def _begin(self, prompts, max_new_tokens, asked, unknown) -> tuple:
        """The rows of a call, whether there is one, and how it runs; all checked."""
        core = self._open()
        refuse_unknown("generate", unknown, _ARGUMENTS, GENERATE_HINTS)
        check_count("max_new_tokens", max_new_tokens)
        stop, k, ignore_eos = (asked.pop(name) for name in ("stop", "k", "ignore_eos"))
        stop, sampling = read_stop(stop), read_sampling(**asked)
        if not isinstance(ignore_eos, bool):
            raise ConfigError(f"ignore_eos is {ignore_eos!r}, expected True or False")
        if k is not None:
            check_count("k", k)
            core = core.at_k(k)
        rows, is_one = self._reader.rows(prompts, max_new_tokens)
        tokenizer = None
        if stop or self._model.has_tokenizer:
            tokenizer = self._model.tokenizer
        eos_ids = () if ignore_eos else core.config.eos_ids
        ends = [RowText(tokenizer, ids, stop, eos_ids, max_new_tokens) for ids in rows]
        return rows, is_one, Call(core, sampling, ends, self._traffic)

    def _run(self, rows, max_new_tokens: int, call: Call):
        """Tokens of all rows, batch by batch, with the text that each makes certain."""
        self._open()  # a generator begins with its first token, maybe after `close`
        batches, total = even_batches(len(rows), self.max_batch), self._total
        for batch in batches:
            longest = max(len(rows[i]) for i in batch) + max_new_tokens
            cache = cache_bytes(call.core.config, len(batch), longest)
            self._cache_bytes = max(self._cache_bytes, cache)
        try:
            for found in call.run(rows, batches, max_new_tokens):
                yield found
                self._open()
        finally:
            total.add(call.measured)

    def logits(self, prompt: str | Sequence[int]) -> np.ndarray:
        """Logits after each token of a prompt, float32 `[T, V]`: row i predicts token
        i + 1. Of an engine that is not lossless by decode steps, where its route acts.

        >>> engine.logits([1, 2, 3]).shape[0]
        3

        Args:
          prompt: a text or token ids.
        Raises: as `generate`.
        """
        scorer, ids = self._scorer(), self.ids(prompt)
        with held_interrupts():
            parts = [np.asarray(logits)[0] for _, logits in scorer.score([ids])]
        return np.concatenate(parts)[: len(ids)]

    def perplexity(
        self,
        text: str | Sequence[int],
        *,
        window: int | None = None,
        stride: int | None = None,
    ) -> float:
        """Perplexity of a text or of token ids, by sliding windows.

        >>> engine.perplexity("Once upon a time there was a fox.") > 1
        True

        Args:
          window: tokens that are read together; None: 512, or `max_context` or the
            model's context where that is less.
          stride: tokens between windows; None: half a window.
        Raises:
          CapacityError: a window longer than the model's context.
          ConfigError, RequestError: a bad window, or fewer than two tokens.
        """
        for name, value in {"window": window, "stride": stride}.items():
            if value is not None:
                check_count(name, value)
        scorer, ids = self._scorer(), self._reader.text(text)
        if window is None:
            limit = self._model.config.max_positions
            window = default_window(min(self.max_context or limit, limit))
        sizes = {"window": window, "stride": stride, "batch_size": self.max_batch}
        return measure_perplexity(scorer, ids, **sizes).value

    def _scorer(self):
        core = self._open()
        self._traffic.give()  # what scoring moves is no open stream's
        return core if core.lossless else Stepwise(core)

    def reset(self) -> None:
        """Empties the slots, and forgets what was counted and recorded so far.

        A stream under way goes on, and is in no statistics.
        """
        core = self._open()
        self._traffic.give()
        core.restart()
        self._total = Measured()

    def stats(self) -> dict[str, Any]:
        """As `Output.stats`, of all calls since the engine was made or `reset`.

        And `inline`: whether programs of this process run in the thread that calls them
        (`moe_edge.run_inline`).
        """
        self._open()
        inline = {"inline": is_inline()}
        return self._total.stats(self._device_bytes()) | inline

    def _device_bytes(self) -> int:
        return self._core.device_bytes() + self._cache_bytes

    @property
    def trace(self) -> Trace:
        """Every lookup since `reset`, of an engine made with record=("trace",)."""
        recorder = getattr(self._open(), "trace", None)
        if recorder is None:
            raise ConfigError(
                "this engine keeps no trace; make it with record=('trace',)"
            )
        return recorder.trace()

    @property
    def events(self) -> list[Event]:
        """Transfers and waits since `reset`, of one made with record=("events",)."""
        self._open()
        if self._recorder is None or not self._recorder.enabled:
            raise ConfigError(
                "this engine keeps no events; make it with record=('events',)"
            )
        return self._recorder.events()
