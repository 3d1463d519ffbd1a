"""Arguments of the public face, checked: what was given, what is expected, what to do.

Nothing here needs JAX.
"""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

from moe_edge.core.checks import ConfigError, check_count
from moe_edge.core.typed import check_options
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
    "torch_dtype": "weights run as stored; moe-edge convert --dtype changes them",
    "dtype": "weights run as stored; moe-edge convert --dtype changes them",
    "k": "give k to generate",
}
REPLAY_HINTS = {
    "policies": "write evictions",
    "eviction": "write evictions, a list",
    "predictor": "write predictors, a list",
    "budget": "write budgets, a list",
    "device_memory": "write budgets, a list",
    "routes": "a trace holds what the router chose, so no other route can be replayed",
    "model": "a trace needs no model; compare runs one",
}
COMPARE_HINTS = {
    "policies": "write evictions, predictors or routes",
    "policy": "write evictions, predictors or routes, each a list",
    "cache_policy": "write evictions, a list",
    "eviction_policy": "write evictions, a list",
    "eviction": "write evictions, a list",
    "prefetch": "write predictors, a list",
    "prefetcher": "write predictors, a list",
    "predictor": "write predictors, a list",
    "route": "write routes, a list",
    "budget": "write budgets, a list",
    "device_memory": "write budgets, a list",
    "max_memory": "write budgets, a list",
    "gpu_memory_utilization": "write budgets: 'auto', or shares of the experts",
    "prompt": "write prompts, a list",
    "max_tokens": "write max_new_tokens",
    "max_length": "write max_new_tokens, which does not count the prompt",
    "k": "every case computes the model's own number of experts",
    "batch_size": "prompts run one after another",
    "max_batch": "prompts run one after another",
    "max_context": "give prompts and max_new_tokens, which decide it",
    "record": "call model.offload, whose engines keep records",
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


class GenerateOptions(TypedDict, total=False):
    """Keywords of `Engine.generate`, `stream` and `chat`, for type checkers."""

    temperature: float
    top_k: int
    top_p: float
    stop: str | Sequence[str]
    k: int | None
    seed: int
    ignore_eos: bool


@dataclasses.dataclass(frozen=True)
class GenerateArguments:
    """How `Engine.generate` is to go on, checked.

    Attributes:
      stop: texts that end a row; k: experts a token computes, None: the model's own.
      ignore_eos: whether a row goes on after an end-of-text token.
    """

    max_new_tokens: int
    sampling: Sampling
    stop: tuple[str, ...]
    k: int | None
    ignore_eos: bool


_SAMPLING = ("temperature", "top_k", "top_p", "seed")
_GENERATE = ("max_new_tokens", *_SAMPLING, "stop", "k", "ignore_eos")


def read_generate(
    given: Mapping[str, Any], unknown: Iterable[str]
) -> GenerateArguments:
    """The arguments of `Engine.generate`.

    Args:
      given: all of them, by name.
      unknown: names of others that were given.
    Raises:
      ConfigError: a value of another type or range, or an unknown argument.
    """
    refuse_unknown("generate", unknown, _GENERATE, GENERATE_HINTS)
    max_new_tokens, k = given["max_new_tokens"], given["k"]
    check_count("max_new_tokens", max_new_tokens)
    stop = read_stop(given["stop"])
    sampling = {name: given[name] for name in _SAMPLING}
    check_options("generate", Sampling, sampling)
    drawn = Sampling(**sampling)
    ignore_eos = given["ignore_eos"]
    if not isinstance(ignore_eos, bool):
        raise ConfigError(f"ignore_eos is {ignore_eos!r}, expected True or False")
    if k is not None:
        check_count("k", k)
    return GenerateArguments(max_new_tokens, drawn, stop, k, ignore_eos)


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
