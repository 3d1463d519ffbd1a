"""The root of `moe-edge evaluate`: perplexity, multiple choice, or logits."""

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_edge.convert.open import open_checkpoint
from moe_edge.convert.tokenizer import load_tokenizer
from moe_edge.core.checks import (
    CheckpointError,
    ConfigError,
    check_positive,
)
from moe_edge.core.files import write_json
from moe_edge.core.run_folder import RunFolder, root
from moe_edge.engine.devices import check_devices
from moe_edge.engine.load import check_checkpoint, load_engine
from moe_edge.engine.offload_options import OffloadOptions, resolve_offload
from moe_edge.evaluate.run_logits import run_logits
from moe_edge.evaluate.texts import (
    find_file,
    find_path,
    read_dataset,
    read_text,
    sha256_of,
)
from moe_edge.hosts.run import across_hosts


def _one_of(**given) -> str:
    """Name of the one value that is set.

    Raises:
      ConfigError: none or several.
    """
    named = [name for name, value in given.items() if value]
    if len(named) != 1:
        flags = ", ".join(f"--{name}" for name in given)
        got = " and ".join(f"--{name}" for name in named) or "none"
        raise ConfigError(f"give exactly one of {flags}; got {got}")
    return named[0]


def _source(*paths: str) -> list[dict[str, str]]:
    """Name and hash of every file that was read."""
    return [
        {"path": path, "sha256": sha256_of(path)}
        for path in paths
        if Path(path).is_file()
    ]


@across_hosts("logits")
@root
def run_evaluate(
    run: RunFolder,
    *,
    checkpoint: str = "default",
    text: str | None = None,
    dataset: str | None = None,
    mcq: str | None = None,
    tokens: str | None = None,
    logits: str | None = None,
    window: int | None = None,
    stride: int | None = None,
    split: str = "test",
    column: str = "text",
    dataset_config: str | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    k: int | None = None,
    kv_cache: str = "float32",
    weights: str = "copied",
    device_memory: str | None = None,
    offload: OffloadOptions | None = None,
    devices: int | str | None = None,
    data_dir: str | None = None,
) -> dict[str, Any]:
    """Measures a model in one of four ways.

    Args:
      run: folder of the results.
      checkpoint: folder (Hugging Face's or ours), GGUF file, or `default`, the model in
        the package.
      text: text file whose perplexity is measured.
      dataset: data set whose perplexity is measured: folder, local file or hub name.
      mcq: multiple-choice files, separated by commas.
      tokens: .npy file of token ids `[B, S]`; needs `logits`.
      logits: .npz file to write, float32 `logits` `[B, S, V]`.
      window: tokens that are scored together (default: 512, or the context if that is
        less).
      stride: tokens between the beginnings of two windows (default: half a window).
      split: which split of the data set.
      column: which column of the data set holds the text.
      dataset_config: the data set's configuration name on the hub.
      limit: most rows of the data set, or most questions of each file.
      batch_size: windows or texts that run together.
      k: experts that a token computes (sub-experts in a refactored model); None: as
        many as the model was made for.
      kv_cache: how keys and values are kept: float32, exact; or bfloat16 or q8_0, in a
        half or about a quarter of the bytes: longer contexts fit, and lossy.
      weights: copied into memory; or mapped: experts of a checkpoint of ours stay in
        its files on a CPU, and the system may take their memory back.
      device_memory: a share of the experts' bytes (`25%`), or a size (`2GiB`) that also
        holds the dense weights, the KV cache and staging; `auto`: nine tenths of what
        the device has free; None: as the gin file's `offload` says, or all experts on
        the device.
      offload: policies of experts that do not fit. A lossy route acts while decoding,
        so texts (of multiple choice: the choices) are then scored token by token.
      devices: devices that share the experts: a number, or `all` of this machine;
        offloaded ones have homes there, and `device_memory` is that of each. None: one,
        or all where one cannot hold the weights. Of several processes: of each; None:
        all.
      data_dir: folder in which relative paths are looked up, too.
    Raises:
      MoeEdgeError: bad input.
      OSError: a file that cannot be read.
    """
    mode = _one_of(text=text, dataset=dataset, mcq=mcq, tokens=tokens)
    if (mode == "tokens") != (logits is not None):
        raise ConfigError("--tokens FILE.npy and --logits OUT.npz belong together")
    check_positive("batch_size", batch_size)
    if limit is not None:
        check_positive("limit", limit)
    offload, devices = resolve_offload(device_memory, offload), check_devices(devices)
    if mode == "tokens":
        tokens = find_file(tokens, data_dir, "--tokens")
        given = {"offload": offload, "k": k, "devices": devices, "kv_cache": kv_cache}
        given["weights"] = weights
        summary = run_logits(run, checkpoint, tokens, logits, **given)
        if not run.dry_run:
            _write(run, summary | {"mode": mode}, [tokens])
        return summary
    # Only now: these load JAX, and a refused value should not wait for that.
    from moe_edge.evaluate.multiple_choice import (
        answer_questions,
        read_questions,
        score_continuations,
        token_counts,
    )
    from moe_edge.evaluate.perplexity import DEFAULT_WINDOW
    from moe_edge.evaluate.stepwise import Stepwise, step_continuations

    # Input is read before the model: a bad file shows at once.
    if mode == "mcq":
        paths = [find_file(path, data_dir, "--mcq") for path in mcq.split(",")]
        questions = read_questions(paths, limit)
    else:
        if mode == "text":
            paths = [find_file(text, data_dir, "--text")]
            content = read_text(paths[0])
        else:
            paths = [find_path(dataset, data_dir)]
            content = read_dataset(
                paths[0],
                split=split,
                column=column,
                config=dataset_config,
                limit=limit,
            )
    lossy = offload is not None and not offload.lossless
    room: dict[str, Any] = {"kv_cache": kv_cache, "weights": weights}
    if offload is not None:
        reader = open_checkpoint(checkpoint)
        lengths = [window or DEFAULT_WINDOW]
        if mode == "mcq":
            lengths = token_counts(load_tokenizer(reader), questions)
        fixed = lossy and mode == "mcq"
        room |= _cache_room(reader.config, lengths, batch_size, fixed)
    if run.dry_run:
        check_checkpoint(checkpoint, offload=offload, k=k, devices=devices, **room)
        return {"mode": mode}
    loaded = load_engine(checkpoint, offload=offload, k=k, devices=devices, **room)
    lines: list[dict[str, Any]] = []
    if mode == "mcq":
        summary, lines = answer_questions(
            loaded.engine,
            loaded.tokenizer,
            questions,
            batch_size,
            step_continuations if lossy else score_continuations,
        )
        if summary["truncated"]:
            print(
                f"{summary['truncated']} of {summary['n']} questions lost their left "
                "end: longer than the model's context",
                file=sys.stderr,
            )
    else:
        engine = Stepwise(loaded.engine) if lossy else loaded.engine
        ids = loaded.tokenizer.encode(content, end=False)
        summary = _run_text(engine, ids, content, window, stride, batch_size)
    if lossy:
        summary |= {"lossless": False, **loaded.engine.movement()}
    print(_told(summary))
    summary |= {"checkpoint": loaded.name, "checkpoint_hf": loaded.hf_source}
    summary |= {"k": loaded.engine.config.moe.top_k, "kv_cache": kv_cache}
    _write(run, summary | {"mode": mode}, paths, lines)
    return summary


def _cache_room(config, lengths: list[int], batch_size: int, fixed: bool) -> dict:
    """The most rows and tokens that are in a KV cache at once.

    Args:
      lengths: tokens of each text.
      fixed: all batches have `batch_size` rows of the longest text; else those that
        `length_batches` makes.
    """
    from moe_edge.engine.session import cache_bytes
    from moe_edge.evaluate.likelihood import length_batches

    lengths = [min(length, config.max_positions) for length in lengths]
    rooms = [(batch_size, max(lengths))]
    if not fixed:
        batches = length_batches(config, lengths, batch_size)
        rooms = [(size, lengths[rows[0]]) for rows, size in batches]
    batch, capacity = max(rooms, key=lambda room: cache_bytes(config, *room))
    return {"batch": batch, "capacity": capacity}


def _write(
    run: RunFolder,
    summary: dict[str, Any],
    paths: list[str],
    lines: list[dict[str, Any]] = (),
) -> None:
    """Writes the results folder."""
    stored = summary | {"source": _source(*paths)}

    def save(folder: Path) -> None:
        write_json(folder / "evaluation.json", stored)
        if lines:
            with (folder / "questions.jsonl").open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)

    run.write(save)


def _told(summary: Mapping[str, Any]) -> str:
    """The result for people."""
    if "accuracy" in summary:
        low, high = (100 * share for share in summary["interval95"])
        return (
            f"{100 * summary['accuracy']:.1f} % of {summary['n']} questions right, "
            f"95 % interval {low:.1f} to {high:.1f}; by guessing "
            f"{100 * summary['chance']:.1f} %"
        )
    value = summary["perplexity"]
    return (
        f"perplexity {'infinite' if value is None else format(value, '.4g')} over "
        f"{summary['tokens']} tokens, in windows of {summary['window']} that begin "
        f"every {summary['stride']}; {summary['nats_per_byte']:.4g} nats a byte"
    )


def _run_text(engine, ids, content: str, window, stride, batch_size) -> dict:
    from moe_edge.evaluate.perplexity import measure_perplexity

    result = measure_perplexity(
        engine, ids, window=window, stride=stride, batch_size=batch_size
    )
    if not math.isfinite(result.nll):
        raise CheckpointError(
            f"the log-likelihood of {result.tokens} tokens is {-result.nll}: the "
            "model's logits are not finite; check its weights"
        )
    return {
        # JSON has no infinity: a perplexity beyond float64 is null.
        "perplexity": result.value if math.isfinite(result.value) else None,
        "tokens": result.tokens,
        "window": result.window,
        "stride": result.stride,
        # Comparable between tokenizers, which perplexity is not.
        "nats_per_byte": result.nll / len(content.encode("utf-8")),
    }
