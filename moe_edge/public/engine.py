"""A model that runs: generation, streaming, chat, and scores of texts."""

import contextlib
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Unpack, overload

import numpy as np

from moe_edge.public.arguments import GenerateOptions, read_generate
from moe_edge.public.call import Call, closed_at_exit
from moe_edge.public.chat import chat_ids
from moe_edge.public.output import Output
from moe_edge.public.prompts import Rows
from moe_edge.public.row_text import RowText
from moe_edge.public.running import Running
from moe_edge.public.scoring import score_logits, score_perplexity


class Engine(Running):
    """Runs a model, resident or offloaded; made by `Model.resident` or `Model.offload`.

    Use it from one thread at a time. Experts that came to the device stay there between
    calls. It is a context manager: `close` ends what runs in the background.

    >>> with model.offload("25%") as engine:
    ...     engine
    <moe_edge.Engine of default, layered>
    >>> engine
    <moe_edge.Engine of default, closed>

    Attributes:
      name: of the checkpoint.
      max_batch: prompts that run together; more of them run one batch after another.
      max_context: most tokens of a prompt and its continuation; None: the model's.
    """

    def ids(self, prompt: str | Sequence[int]) -> list[int]:
        """Checked token ids of one prompt.

        >>> engine.ids("Once upon a time")
        [1009, 1241, 260, 903]

        Args:
          prompt: a text or token ids.
        Raises: as `generate`.
        """
        self._open()
        return [*self._reader.one(prompt)]

    @overload
    def generate(  # type: ignore[overload-overlap]  # a text is a sequence of texts
        self,
        prompts: str | Sequence[int],
        max_new_tokens: int = ...,
        **asked: Unpack[GenerateOptions],
    ) -> Output: ...

    @overload
    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        max_new_tokens: int = ...,
        **asked: Unpack[GenerateOptions],
    ) -> list[Output]: ...

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
        **unknown: Any,
    ) -> Output | list[Output]:
        """Continues a prompt, or each of a list.

        >>> engine.generate("Once upon a time", max_new_tokens=4).text
        ', and the first'
        >>> outs = engine.generate(["One", "Two"], 4, temperature=0.8, seed=1)
        >>> [len(out.tokens) for out in outs]
        [4, 4]

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
        given: dict[str, Any] = {"max_new_tokens": max_new_tokens}
        given |= {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        given |= {"seed": seed, "stop": stop, "k": k, "ignore_eos": ignore_eos}
        rows, is_one, told = self._begin(prompts, given, unknown)
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
        self,
        messages: Sequence[dict[str, str]],
        max_new_tokens: int = 64,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **asked: Unpack[GenerateOptions],
    ) -> Output:
        """The next message of a conversation, by the checkpoint's chat template.

        >>> message = {"role": "user", "content": "Hello"}
        >>> engine.chat([message], max_new_tokens=4).finish_reason
        'length'

        Args:
          messages: each {"role": ..., "content": ...}, the oldest first.
          chat_template_kwargs: variables of the template, such as
            {"enable_thinking": False}.
          max_new_tokens, **asked: as of `generate`.
        Raises:
          RequestError: other messages or variables, or such as the template refuses;
            else as `generate`.
        """
        self._open()
        ids = chat_ids(self._model.tokenizer, messages, chat_template_kwargs)
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
        **unknown: Any,
    ) -> Iterator[tuple[int, int, str]]:
        """As `generate`, token by token.

        Arguments are checked by the call, before the first token. Who stops reading
        gives up the rest: its cache is freed with the iterator.

        >>> "".join(text for _, _, text in engine.stream("Once upon a time", 4))
        ', and the first'

        Args: as `generate`.
        Yields:
          (prompt's place in the list, token id, text that is certain by now). The
          texts of a prompt, joined, are the text of its `Output`.
        Raises: as `generate`.
        """
        given: dict[str, Any] = {"max_new_tokens": max_new_tokens}
        given |= {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        given |= {"seed": seed, "stop": stop, "k": k, "ignore_eos": ignore_eos}
        rows, _, told = self._begin(prompts, given, unknown)
        return closed_at_exit(self._run(rows, max_new_tokens, told))

    def _begin(
        self, prompts: Any, given: Mapping[str, Any], unknown: Iterable[str]
    ) -> tuple[Rows, bool, Call]:
        """The rows of a call, whether there is one, and how it runs; all checked."""
        core, asked = self._open(), read_generate(given, unknown)
        if asked.k is not None:
            core = core.at_k(asked.k)
        rows, is_one = self._reader.rows(prompts, asked.max_new_tokens)
        tokenizer = None
        if asked.stop or self._model.has_tokenizer:
            tokenizer = self._model.tokenizer
        eos_ids = () if asked.ignore_eos else core.config.eos_ids
        ends = [
            RowText(tokenizer, ids, asked.stop, eos_ids, asked.max_new_tokens)
            for ids in rows
        ]
        return rows, is_one, Call(core, asked.sampling, ends, self._traffic)

    def _run(
        self, rows: Rows, max_new_tokens: int, call: Call
    ) -> Generator[tuple[int, int, str]]:
        """Tokens of all rows, batch by batch, with the text that each makes certain."""
        self._open()  # a generator begins with its first token, maybe after `close`
        total = self._total
        steps = call.run(rows, max_new_tokens, self.max_batch)
        try:
            with contextlib.closing(steps):  # so that an abandoned one is counted
                for found in steps:
                    yield found
                    self._open()
        finally:
            total.add(call.measured)
            self._cache_bytes = max(self._cache_bytes, call.cache_bytes)

    def logits(self, prompt: str | Sequence[int]) -> np.ndarray:
        """Logits after each token of a prompt, float32 `[T, V]`: row i predicts token
        i + 1. Of an engine that is not lossless by decode steps, where its route acts.

        >>> logits_TV = engine.logits("Once upon a time")
        >>> logits_TV.shape, int(logits_TV[-1].argmax())
        ((4, 4096), 12)

        Args:
          prompt: a text or token ids.
        Raises: as `generate`.
        """
        ids = self.ids(prompt)
        return score_logits(self._quiet(), ids)

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
          text: of any length, or token ids.
          window: tokens that are read together; None: 512, or `max_context` or the
            model's context where that is less.
          stride: tokens between windows; None: half a window.
        Raises:
          CapacityError: a window longer than the model's context.
          ConfigError, RequestError: a bad window, or fewer than two tokens.
        """
        self._open()
        limit, ids = self._model.config.max_positions, self._reader.text(text)
        sizes = window, stride, min(self.max_context or limit, limit), self.max_batch
        return score_perplexity(self._quiet(), ids, *sizes)
