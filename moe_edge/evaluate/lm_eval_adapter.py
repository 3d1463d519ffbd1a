"""Any engine as a model of EleutherAI's lm-evaluation-harness (extra `eval`).

Texts are cut and encoded as the harness does for causal models, so that its numbers
compare with published ones. lm-eval is imported here and by `run_lm_eval` when it runs.
"""

from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from moe_edge.convert.tokenizer import Tokenizer
from moe_edge.core.checks import ConfigError
from moe_edge.evaluate.likelihood import score_rows
from moe_edge.evaluate.lm_eval_requests import (
    fit_target,
    generate_texts,
    parse_ending,
)


class EngineLM(TemplateLM):
    """Likelihoods and greedy generation of an engine, in any mode.

    Args:
      engine: resident, layered or fused.
      tokenizer: of the model.
      batch_size: rows run together.
      scorer: offers `score` in place of the engine: `Stepwise` for a lossy one.
    Raises:
      ConfigError: a model that names neither a begin nor an end token.
    """

    def __init__(
        self, engine, tokenizer: Tokenizer, *, batch_size: int = 8, scorer=None
    ):
        super().__init__()
        self._engine, self._tokenizer = engine, tokenizer
        self._scorer = scorer or engine
        self.batch_size = batch_size
        config = engine.config
        if not config.eos_ids and config.bos_id is None:
            raise ConfigError(
                "the model names neither a begin nor an end token, which texts without "
                "context are scored after; add one to its config.json"
            )
        self.max_length = config.max_positions

    @property
    def eot_token_id(self) -> int:
        config = self._engine.config
        return config.eos_ids[0] if config.eos_ids else config.bos_id

    @property
    def prefix_token_id(self) -> int:
        """The token that a text without context is scored after."""
        bos_id = self._engine.config.bos_id
        return self.eot_token_id if bos_id is None else bos_id

    @property
    def tokenizer_name(self) -> str:
        return "moe_edge"

    def tok_encode(self, string, add_special_tokens=None, **kwargs) -> list[int]:
        # All that the harness encodes goes on: it gets no end token.
        begin = add_special_tokens is not False
        return self._tokenizer.encode(string, begin=begin, end=False)

    def _loglikelihood_tokens(self, requests, disable_tqdm=False, **kwargs):
        rows = [
            fit_target(context, wanted, self.max_length)
            for _, context, wanted in requests
        ]
        found = score_rows(self._scorer, rows, self.batch_size)
        for (texts, _, _), result in zip(requests, found, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, result)
        return found

    def loglikelihood_rolling(self, requests, disable_tqdm=False) -> list[float]:
        rows, owners = [], []
        for owner, request in enumerate(requests):
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            windows = get_rolling_token_windows(
                ids, self.prefix_token_id, self.max_length, context_len=1
            )
            for window in windows:
                rows.append((None, *make_disjoint_window(window)))
                owners.append(owner)
        sums = [0.0] * len(requests)
        scores = self._loglikelihood_tokens(rows)
        for owner, (log_prob, _) in zip(owners, scores, strict=True):
            sums[owner] += log_prob
        for request, value in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, value)
        return sums

    def generate_until(self, requests, disable_tqdm=False) -> list[str]:
        texts: list[str | None] = [None] * len(requests)
        groups: dict = {}  # requests that end alike run together
        for i, request in enumerate(requests):
            ending = parse_ending(request.args[1], self.max_length)
            groups.setdefault(ending, []).append(i)
        for ending, members in groups.items():
            prompts = [
                self.tok_encode(requests[i].args[0]) or [self.prefix_token_id]
                for i in members
            ]
            found = generate_texts(
                self._engine, self._tokenizer, prompts, ending, self.batch_size
            )
            for i, text in zip(members, found, strict=True):
                texts[i] = text
                self.cache_hook.add_partial("generate_until", requests[i].args, text)
        return texts
