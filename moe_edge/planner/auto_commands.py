"""Commands whose `--device_memory` may be `auto`: what each tells the short plan."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from moe_edge.convert.open import open_checkpoint
from moe_edge.core.checks import ConfigError
from moe_edge.core.typed import changed
from moe_edge.engine.auto_memory import AUTO, auto_memory
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.planner.auto import chosen_options

Given = Mapping[str, Any]  # arguments of a root
Reader = Callable[[Given], dict[str, Any] | None]
USUAL_TOKENS = 128  # of a prompt, and of an answer, where nobody knows them


def with_auto(name: str, run: Callable[..., dict]) -> Callable[..., dict]:
    """A root that plans where its `device_memory` is `auto`.

    Args:
      name: of READERS.
      run: takes `checkpoint`, `device_memory`, `offload` and `dry_run`, by which it is
        checked before anything is measured.
    """

    @functools.wraps(run)
    def call(**given: Any) -> dict:
        if given.get("device_memory") == AUTO:
            given = given | _planned(run, READERS[name], given)
        return run(**given)

    call.__signature__ = inspect.signature(run)  # type: ignore[attr-defined]
    del call.__wrapped__  # gin would read the signature of that
    return call


def _planned(run: Callable[..., dict], read: Reader, own: Given) -> dict[str, Any]:
    parameters = inspect.signature(run).parameters
    given = {n: p.default for n, p in parameters.items()} | dict(own)
    checkpoint = given["checkpoint"] or "default"
    offload, asked = given["offload"] or OffloadOptions(), read(given)
    stays = offload.memory == "mmap"  # then nothing is copied to the host
    budget = auto_memory(open_checkpoint(checkpoint), has_records=stays)
    options = dataclasses.replace(offload, device_memory=budget)
    found = {"device_memory": None, "offload": options}
    alone = given.get("devices") in (None, 1) and given.get("num_processes") is None
    if asked is not None and alone and not given.get("dry_run"):
        run(**{**own, **found, "dry_run": True})  # refuses what no plan can mend
        fixed = {n: v for n, v in changed(offload).items() if n != "device_memory"}
        if given.get("deterministic"):
            fixed["assist"] = None  # which rounds as a row's company has it
        found["offload"] = chosen_options(checkpoint, budget, fixed, **asked)
    return found


def _of_generate(given: Given) -> dict[str, Any]:
    from moe_edge.engine.run_generate import collect_prompts, row_tokens

    texts = collect_prompts(given["prompt"], given["prompts"])
    new = max(3, given["max_new_tokens"])
    row = given["checkpoint"], texts, new, given["max_context"]
    most = open_checkpoint(given["checkpoint"] or "default").config.max_positions
    tokens = min(row_tokens(*row), most)
    return {
        "batch": min(given["batch_size"], len(texts)),
        "prompt_tokens": max(1, min(USUAL_TOKENS, tokens - new)),
        "new_tokens": new,
        "context": tokens,
        "temperature": given["temperature"],
        "kv_cache": given["kv_cache"],
    }


def _of_serving(given: Given) -> dict[str, Any] | None:
    """Rows that decode together; each has its share of the memory of all caches."""
    from moe_edge.engine.load import open_run
    from moe_edge.serve.loading import cache_room
    from moe_edge.serve.options import ServingOptions

    if given.get("servers") is not None:
        return None  # which have no budget: the root refuses it
    fields = inspect.signature(ServingOptions).parameters
    serving = ServingOptions(**{n: given[n] for n in fields})
    checkpoint, k = given["checkpoint"] or "default", given.get("k")
    config = open_run(checkpoint, k, kv_cache=serving.kv_cache).config
    room, context = cache_room(serving, config), serving.context(config.max_positions)
    prompt = max(1, min(USUAL_TOKENS, context // 2))
    row = -(-room["batch"] * room["capacity"] // serving.max_batch)
    return {
        "batch": serving.max_batch,
        "prompt_tokens": prompt,
        "new_tokens": max(3, min(USUAL_TOKENS, context - prompt)),
        "context": min(row, config.max_positions),
        "kv_cache": serving.kv_cache,
        "joining": True,
    }


def _of_load(given: Given) -> dict[str, Any] | None:
    if given["target"] != "engine":
        raise ConfigError(
            f"--device_memory auto is of --target engine, got {given['target']!r}; "
            "leave it out"
        )
    return _of_serving(given)


def _of_scoring(given: Given) -> None:
    """Whole texts are scored: nearly all experts are used, whatever a policy keeps, so
    the budget is taken and the defaults run."""


READERS: Mapping[str, Reader] = {
    "evaluate": _of_scoring,
    "generate": _of_generate,
    "lm_eval": _of_scoring,
    "load": _of_load,
    "serve": _of_serving,
}
