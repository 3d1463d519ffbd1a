"""The root of `moe-edge lm_eval`: tasks of the lm-evaluation-harness on any engine."""

import contextlib
from pathlib import Path
from typing import Any

from moe_edge.core.checks import (
    ConfigError,
    MoeEdgeError,
    RequestError,
    check_count,
)
from moe_edge.core.files import write_json
from moe_edge.core.run_folder import RunFolder, root
from moe_edge.engine.devices import check_devices
from moe_edge.engine.load import check_checkpoint, load_engine
from moe_edge.engine.offload_options import OffloadOptions, resolve_offload

# Of a request, for which an absolute budget leaves room: requests are made only with a
# tokenizer. Those of most tasks are shorter.
MOST_TOKENS = 4096


@root
def run_lm_eval(
    run: RunFolder,
    *,
    tasks: str,
    include_path: str | None = None,
    checkpoint: str = "default",
    num_fewshot: int | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    k: int | None = None,
    device_memory: str | None = None,
    offload: OffloadOptions | None = None,
    devices: int | str | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Runs tasks and writes their metrics.

    Args:
      run: folder of the results: evaluation.json, config.gin.
      tasks: names, separated by commas.
      include_path: folder of task files (YAML); data files that they name by relative
        paths are looked up in it. None: the harness's own tasks, whose data come from
        the hub or its cache.
      checkpoint: folder (Hugging Face's or ours), GGUF file, or `default`, the model in
        the package.
      num_fewshot: examples before each question (None: as the task says).
      limit: at most so many rows of a task.
      batch_size: texts run together.
      k: experts a token computes, in a refactored model sub-experts (None: its own).
      device_memory: a share of the experts' bytes (`25%`), or a size (`2GiB`) that also
        holds the dense weights, the KV cache (of `batch_size` requests of 4096 tokens,
        or of the context if that is less) and staging; `auto`: nine tenths of what the
        device has free; None: as `offload` says, or all resident.
      offload: policies of experts that do not fit. With a lossy route likelihoods are
        scored token by token, for it acts while decoding.
      devices: devices that share the experts: a number, or `all` of this machine;
        offloaded ones have homes there, and `device_memory` is that of each. None: one,
        or all where one cannot hold the weights.
      seed: of the few-shot examples.
    Returns:
      tasks (name -> metric -> value), n (name -> rows), num_fewshot, k, checkpoint.
    Raises:
      ConfigError: lm-eval is not installed, or there is no such task.
      RequestError: a task whose data cannot be read, or that cannot be run, such as
        with more few-shot examples than it has.
    """
    for name, value in (("limit", limit), ("batch_size", batch_size)):
        if value is not None:
            check_count(name, value)
    if num_fewshot is not None and num_fewshot < 0:
        raise ConfigError(f"num_fewshot must be 0 or more, got {num_fewshot}")
    offload, devices = resolve_offload(device_memory, offload), check_devices(devices)
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    loaded_tasks = _load_tasks(names, include_path)
    room = {"batch": batch_size, "capacity": MOST_TOKENS}
    if run.dry_run:
        check_checkpoint(checkpoint, offload=offload, k=k, devices=devices, **room)
        return {"tasks": names}
    room = {} if offload is None else room
    loaded = load_engine(checkpoint, offload=offload, k=k, devices=devices, **room)
    lossy = offload is not None and not offload.lossless
    from lm_eval.evaluator import simple_evaluate

    from moe_edge.evaluate.lm_eval_adapter import EngineLM
    from moe_edge.evaluate.stepwise import Stepwise

    with contextlib.closing(loaded.engine) as engine, _request_errors(names, "run"):
        scorer = Stepwise(engine) if lossy else None
        found = simple_evaluate(
            EngineLM(engine, loaded.tokenizer, batch_size=batch_size, scorer=scorer),
            tasks=loaded_tasks,
            num_fewshot=num_fewshot,
            limit=limit,
            log_samples=False,
            random_seed=seed,
            numpy_random_seed=seed,
            fewshot_random_seed=seed,
        )
        movement = engine.movement() if lossy else {}
    summary = {
        # Keys such as "acc,none": the metric and the harness's filter.
        "tasks": {name: _metrics(row) for name, row in found["results"].items()},
        "n": {name: row["effective"] for name, row in found["n-samples"].items()},
        "num_fewshot": found["n-shot"],
        "checkpoint": loaded.name,
        "checkpoint_hf": loaded.hf_source,
        "k": loaded.engine.config.moe.top_k,
    }
    if lossy:
        summary |= {"lossless": False, **movement}
    stored = summary | {"versions": found["versions"], "seed": seed}
    run.write(lambda at: write_json(at / "evaluation.json", stored, default=str))
    return summary


@contextlib.contextmanager
def _request_errors(names: list[str], verb: str):
    """Names the tasks in what lm-eval, datasets, yaml or jinja raise."""
    try:
        yield
    except MoeEdgeError:
        raise
    except Exception as error:
        raise RequestError(
            f"tasks {', '.join(names)} cannot be {verb}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _metrics(row: dict[str, Any]) -> dict[str, float]:
    """What of a task's row is a number under "metric,filter"."""
    return {k: v for k, v in row.items() if "," in k and isinstance(v, (int, float))}


def _load_tasks(names: list[str], include_path: str | None) -> list:
    """The harness's task objects; data files are read here."""
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ConfigError(
            f"lm-eval is not installed ({error}); pip install -e '.[eval]'"
        ) from error
    if include_path is not None:
        if not Path(include_path).is_dir():
            raise ConfigError(f"include_path {include_path} is not a folder; check it")
        include_path = str(Path(include_path).resolve())  # outlives the chdir below
    manager = TaskManager(
        include_path=include_path, include_defaults=include_path is None
    )
    known = [*manager.all_tasks]
    for name in names:
        if name not in known:
            some = ", ".join(known[:12]) + (" ..." if len(known) > 12 else "")
            raise ConfigError(f"unknown task {name!r}; known: {some or 'none'}")
    if not names:
        raise ConfigError("no task named; give --tasks NAME[,NAME]")
    with contextlib.chdir(include_path or "."), _request_errors(names, "loaded"):
        return list(manager.load(names)["tasks"].values())
