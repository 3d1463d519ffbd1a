"""The next tokens of rows that differ in rule, seed and step."""

from collections.abc import Callable, Sequence

import jax
import numpy as np

from moe_edge.engine.base import Engine
from moe_edge.engine.slot_programs import SlotPrograms
from moe_edge.engine.slot_rows import SlotRow
from moe_edge.model.new_token import NewToken, Score
from moe_edge.model.row_sampling import Rules, make_rules
from moe_edge.model.sampling import Sampling

Rows = Sequence[SlotRow | None]  # by place; None: nobody asks

_IDLE = Sampling(), 0


def rules_of(rows: Rows, engine: Engine) -> Rules | None:
    """How rows draw next, on the device; None if all are greedy: no draw is paid."""
    pairs = [_IDLE if row is None else (row.sampling, row.emitted) for row in rows]
    if all(sampling.temperature == 0 for sampling, _ in pairs):
        return None
    return engine.put(make_rules(pairs))


def next_tokens(
    programs: SlotPrograms,
    engine: Engine,
    logits_BV: jax.Array,
    rows: Rows,
    rules: Rules | None,
    meanwhile: Callable[[jax.Array], None] = lambda tokens_B: None,
) -> tuple[list[NewToken], jax.Array, Rules | None]:
    """Gives every row its next token, a forced or a drawn one; waits for the device.

    What a row's guide allows after its token is asked at the end, while the device
    computes what `meanwhile` gave it.

    Args:
      meanwhile: gives the device more to do before this waits for the tokens.
    Returns:
      (tokens of the rows, the same as int32 [B] on the device, rules of the next step).
    """
    may_come_BV = logits_BV
    guided = [row and row.guide and row.emitted >= 0 for row in rows]
    if any(guided):
        bits_BW = np.full((len(rows), -(-logits_BV.shape[1] // 32)), ~np.uint32(0))
        for place, row in enumerate(rows):
            if guided[place]:
                bits_BW[place] = _allowed(row, bits_BW.shape[1])
        may_come_BV = programs.allow(logits_BV, engine.put(bits_BW))
    if rules is None:
        tokens_B = programs.greedy(may_come_BV)
    else:
        tokens_B, rules = programs.draw(may_come_BV, rules)
    forced = {
        place: row.next_forced
        for place, row in enumerate(rows)
        if row is not None and row.emitted < 0
    }
    if forced:
        given_B = np.array(tokens_B)
        given_B[[*forced]] = [*forced.values()]
        tokens_B = engine.put(given_B)
    asked = any(row and row.top_logprobs is not None for row in rows)
    found = programs.log_probs(logits_BV, tokens_B) if asked else ()
    meanwhile(tokens_B)
    tokens, found = np.asarray(tokens_B).tolist(), jax.device_get(found)
    new = []
    for place, row in enumerate(rows):
        if row is not None:
            row.tokens.append(tokens[place])
            score = None
            if row.top_logprobs is not None:
                (score,) = scores_of(row, [each[place : place + 1] for each in found])
            new.append(NewToken(row.id, tokens[place], score, place in forced))
            if guided[place]:
                row.guide.accept(tokens[place])
                row.allowed_W = None
                _allowed(row, bits_BW.shape[1])
    return new, tokens_B, rules


def _allowed(row: SlotRow, words: int) -> np.ndarray:
    """Bits of the tokens that may come next, uint32 `[words]`, asked once a token."""
    if row.allowed_W is None:
        row.allowed_W = np.empty(words, np.uint32)
        row.guide.fill(row.allowed_W)
    return row.allowed_W


def scores_of(row: SlotRow, found) -> list[Score]:
    """Scores from NumPy arrays of `row_sampling.log_probs`, as many as a row asks."""
    scores = []
    for own, values_N, ids_N in zip(*(each.tolist() for each in found), strict=True):
        top = tuple(zip(ids_N, values_N, strict=True))[: row.top_logprobs]
        scores.append(Score(own, top))
    return scores
