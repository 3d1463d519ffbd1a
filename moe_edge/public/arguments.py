"""Arguments of the public face, checked: what was given, what is expected, what to do.

Nothing here needs JAX.
"""

import difflib
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from moe_edge.core.checks import (
    ConfigError,
    RequestError,
    check_count,
    check_options,
)
from moe_edge.engine.prompts import check_text
from moe_edge.model.sampling import Sampling

# What other libraries call things -> what to write here.
GENERATE_HINTS = {
    "do_sample": "temperature above 0 samples, 0 (the default) is greedy",
    "max_tokens": "write max_new_tokens",
    "max_length": "write max_new_tokens, which does not count the prompt",
    "sampling_params": "give temperature, top_k, top_p, seed and stop themselves",
    "generation_config": "give temperature, top_k, top_p, seed and stop themselves",
    "stop_strings": "write stop",
    "stop_sequences": "write stop",
    "eos_token_id": "the model's own ends a row, unless ignore_eos=True",
    "n": "give the prompt as often as you want it continued",
    "num_return_sequences": "give the prompt as often as you want it continued",
    "num_beams": "there is no beam search",
    "streamer": "call engine.stream",
    "stream": "call engine.stream",
    "prompt": "give the prompts as the first argument",
    "input_ids": "give the token ids as the first argument",
}
OFFLOAD_HINTS = {
    "policy": "write eviction, predictor or route",
    "cache_policy": "write eviction",
    "eviction_policy": "write eviction",
    "prefetch": "write predictor",
    "prefetcher": "write predictor",
    "budget": "write device_memory",
    "max_memory": "write device_memory",
    "gpu_memory_utilization": "write device_memory='auto', or a share of the experts",
    "batch_size": "write max_batch",
    "max_model_len": "write max_context",
    "max_seq_len": "write max_context",
    "k": "give k to generate",
    "trace": "write record=('trace',)",
    "events": "write record=('events',)",
}
LOAD_HINTS = {
    "device_memory": "give it to model.offload",
    "offload": "call model.offload",
    "device_map": "call model.offload, or model.resident",
    "torch_dtype": "weights run as stored; launch/convert.py --dtype changes them",
    "dtype": "weights run as stored; launch/convert.py --dtype changes them",
    "k": "give k to generate",
}
RECORDS = ("trace", "events")


def refuse_unknown(
    what: str,
    unknown: Iterable[str],
    known: Sequence[str],
    hints: Mapping[str, str],
) -> None:
    """Raises ConfigError for keywords that a function does not have.

    Args:
      what: the function, for the message.
      hints: what to write instead of names that other libraries use.
    """
    for name in unknown:
        hint = hints.get(name)
        if hint is None and (close := difflib.get_close_matches(name, known, 1)):
            hint = f"did you mean {close[0]}?"
        raise ConfigError(
            f"{what} has no argument {name!r}{': ' + hint if hint else ''}; its "
            f"arguments are {', '.join(known)}"
        )


def read_sampling(**given) -> Sampling:
    """How tokens are drawn; ConfigError for a value of another type or range."""
    check_options("generate", Sampling, given)
    return Sampling(**given)


def read_stop(stop: Any) -> tuple[str, ...]:
    """Texts that end a row: one or several; ConfigError for others."""
    stops = (stop,) if isinstance(stop, str) else stop
    is_list = isinstance(stops, (list, tuple))
    if not is_list or any(not isinstance(x, str) or not x for x in stops):
        raise ConfigError(f"stop is {stop!r:.60}, expected a text or a list of texts")
    return tuple(stops)


def read_record(record: Any) -> tuple[str, ...]:
    """What an engine keeps of its run: of RECORDS; ConfigError for others."""
    names = (record,) if isinstance(record, str) else record
    wanted = isinstance(names, (list, tuple, set, frozenset))
    if not wanted or any(name not in RECORDS for name in names):
        raise ConfigError(
            f"record is {record!r:.60}, expected names of {', '.join(RECORDS)}"
        )
    return tuple(names)


def check_limits(max_batch: Any, max_context: Any) -> None:
    """Raises ConfigError unless both are whole numbers above 0; None: no limit."""
    check_count("max_batch", max_batch)
    if max_context is not None:
        check_count("max_context", max_context)


def read_prompts(given: Any, encode) -> tuple[list[Sequence[int]], bool]:
    """Token ids of each prompt, and whether there is one, not given as a list.

    Args:
      given: a text, token ids, or a list of them.
      encode: makes token ids of a text.
    Raises:
      RequestError: nothing, or something else. Ids are not compared with a vocabulary.
    """
    if isinstance(given, np.ndarray):
        given = [*given] if given.ndim > 1 else given.tolist()
    if isinstance(given, str):
        return [_ids(0, given, encode)], True
    if not isinstance(given, (list, tuple, range)):
        raise RequestError(
            f"prompt is {given!r:.60}, expected a text, a list of token ids, or a list "
            "of prompts"
        )
    if len(given) == 0:
        raise RequestError("prompt is empty; expected at least one token or text")
    if any(isinstance(item, numbers.Number) for item in given):
        return [list(given)], True
    return [_ids(row, item, encode) for row, item in enumerate(given)], False


def _ids(row: int, prompt: Any, encode) -> Sequence[int]:
    if not isinstance(prompt, str):
        return prompt
    check_text(f"prompt {row}", prompt)
    if not prompt:
        raise RequestError(f"prompt {row} is empty; expected some text")
    return encode(prompt)
