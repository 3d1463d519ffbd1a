"""The root of `moe-edge generate`: prompts in, `generations.jsonl` out."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_edge.convert.open import open_checkpoint
from moe_edge.convert.text_stream import TextStream, decode_after
from moe_edge.convert.tokenizer import load_tokenizer
from moe_edge.core.checks import ConfigError, RequestError, check_count
from moe_edge.core.events import Recorder
from moe_edge.core.files import check_out_file, check_there, write_json
from moe_edge.core.progress import said
from moe_edge.core.run_folder import RunFolder, root, unpacked
from moe_edge.engine.devices import DeviceOptions
from moe_edge.engine.load import check_checkpoint, load_engine
from moe_edge.engine.offload_options import OffloadOptions, resolve_offload
from moe_edge.engine.prompts import Prompt, check_text, encode_prompts, read_prompts
from moe_edge.engine.sizes import check_context, reserved_tokens
from moe_edge.hosts.run import across_hosts
from moe_edge.model.sampling import Sampling
from moe_edge.offload.budget import parse_budget
from moe_edge.workload.trace_writer import write_trace


def row_tokens(
    checkpoint: str,
    texts: Sequence[Prompt],
    max_new_tokens: int,
    max_context: int | None,
) -> int:
    """Tokens of each row for whose KV cache a size reserves room, see `max_context`.

    Raises:
      ConfigError, CapacityError: a max_context that is no number of tokens, beyond the
        model's context, or less than a prompt and its continuation.
    """
    reader = open_checkpoint(checkpoint)
    tokenizer = load_tokenizer(reader)
    longest = max_new_tokens + max(len(tokenizer.encode(text.text)) for text in texts)
    tokens = reserved_tokens(max_context, longest)
    if max_context is not None:
        check_context(max_context, reader.config)
    return tokens


def collect_prompts(prompt: Sequence[str], prompts: str | None) -> list[Prompt]:
    """Prompts given one by one or as a file.

    Raises:
      ConfigError: both or neither.
      RequestError: an empty prompt or a bad line.
    """
    if bool(prompt) == bool(prompts):
        got = "both" if prompt else "neither"
        raise ConfigError(f"give either --prompt or --prompts, got {got}")
    if prompts:
        check_there(prompts, "--prompts")
        return read_prompts(prompts)
    for number, text in enumerate(prompt):
        if not text:
            raise RequestError(f"--prompt number {number} is empty; expected some text")
        check_text(f"--prompt number {number}", text)
    return [Prompt(f"prompt/{number}", text) for number, text in enumerate(prompt)]


@across_hosts()
@root
@unpacked(shared=DeviceOptions)
def run_generate(
    run: RunFolder,
    *,
    checkpoint: str = "default",
    prompt: Sequence[str] = (),
    prompts: str | None = None,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    batch_size: int = 8,
    max_context: int | None = None,
    k: int | None = None,
    activations: str = "float32",
    kv_cache: str = "float32",
    weights: str = "copied",
    device_memory: str | None = None,
    offload: OffloadOptions | None = None,
    shared: DeviceOptions,
    trace: str | None = None,
    trace_scores: bool = False,
    events: str | None = None,
    timeline: str | None = None,
) -> dict:
    """Continues prompts and writes `generations.jsonl`.

    Args:
      run: folder of the results.
      checkpoint: folder (Hugging Face's or ours), GGUF file, or `default`, the model in
        the package.
      prompt: text to continue; may be given several times. A single one is streamed to
        the terminal.
      prompts: JSON-lines file `{"id", "prompt"}`, instead of `prompt`.
      max_new_tokens: most new tokens of each prompt.
      temperature: of sampling; 0 always takes the likeliest token.
      top_k: sample from the k likeliest tokens only; 0: from all.
      top_p: sample from the likeliest tokens only whose probabilities add up to this.
      seed: of sampling.
      batch_size: prompts that are decoded together.
      max_context: most tokens of a prompt and its continuation. A size in
        `device_memory` reserves the KV cache of the prompts that decode together, this
        long each; None: 1024, or what the longest of these prompts needs.
      k: experts that a token computes (sub-experts in a refactored model); None: as
        many as the model was made for.
      activations: what few tokens are when they meet interleaved blocks of a quantised
        checkpoint: float32, exact; or int8, rounded: faster on a CPU, and lossy.
      kv_cache: how keys and values are kept: float32, exact; or bfloat16 or q8_0, in a
        half or about a quarter of the bytes: longer contexts fit, and lossy.
      weights: copied into memory; or mapped: experts of a checkpoint of ours stay in
        its files on a CPU, and the system may take their memory back.
      device_memory: a share of the experts' bytes (`25%`), or a size (`2GiB`) that also
        holds the dense weights, the KV cache and staging; `auto`: nine tenths of what
        the device has free, on a CPU with options of a short plan (moe-edge plan);
        None: as the gin file's `offload` says, or all experts on the device.
      offload: policies of experts that do not fit.
      shared: devices of several.
      trace: file for the routing of every token (`.csv.gz`).
      trace_scores: also keep all experts' scores, in `scores.npz` next to it.
      events: file for transfers and waits (JSON lines).
      timeline: file for them as a Chrome trace (JSON), for ui.perfetto.dev.
    Returns:
      `tokens_per_s` counts decoded tokens of all rows, without each row's first;
      `ttft_s` runs from the token ids to the first new token (prefill and
      sampling; no tokenisation, loading or compilation), mean over batches.
    Raises:
      MoeEdgeError: bad input.
    """
    texts = collect_prompts(prompt, prompts)
    check_count("max_new_tokens", max_new_tokens)
    check_count("batch_size", batch_size)
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    offload = resolve_offload(device_memory, offload)
    recorded = [path for path in (trace, events, timeline) if path]
    if offload is None and recorded:
        raise ConfigError(
            "--trace, --events and --timeline record an offloaded run; give "
            "--device_memory too"
        )
    if offload is not None and offload.mode == "fused" and recorded:
        raise ConfigError("mode fused writes no traces and no events; use mode layered")
    if trace_scores and not trace:
        raise ConfigError("--trace_scores are kept next to a --trace; give it too")
    for path in recorded:
        check_out_file(path, run.path)
    how = {"k": k, "activations": activations, "kv_cache": kv_cache, "devices": shared}
    how["weights"] = weights
    room = {"batch": min(batch_size, len(texts))}
    has_size = offload is not None and parse_budget(offload.device_memory).bytes
    if has_size or max_context is not None:
        row = checkpoint, texts, max_new_tokens, max_context
        room["capacity"] = row_tokens(*row)
    if run.dry_run:
        check_checkpoint(checkpoint, offload=offload, **how, **room)
        return {"prompts": len(texts)}
    recorder, options = Recorder(enabled=bool(events or timeline)), {}
    if offload is not None:
        options = {
            "recorder": recorder,
            "with_trace": trace is not None,
            "trace_scores": trace_scores,
            **room,
        }
    loaded = load_engine(checkpoint, offload=offload, **how, **options)
    from moe_edge.engine.generate import generate_rows  # loads JAX, as the engine did

    engine, tokenizer = loaded.engine, loaded.tokenizer
    limit = engine.config.max_positions, engine.config.positions_end
    rows = encode_prompts(tokenizer, texts, max_new_tokens, *limit)
    on_token = stream = None
    if len(texts) == 1:
        stream, before = TextStream(tokenizer, rows[0]), texts[0].text

        def on_token(row: int, token: int) -> None:
            nonlocal before  # the prompt, once programs are compiled
            print(before + stream.push(token), end="", flush=True)
            before = ""
            said()

    with engine:
        tokens, speed = generate_rows(
            engine,
            rows,
            max_new_tokens,
            sampling,
            batch_size=batch_size,
            on_token=on_token,
        )
    # As streamed: decoded after its prompt, a completion keeps its first space.
    completions = [
        decode_after(tokenizer, prompt, row)
        for prompt, row in zip(rows, tokens, strict=True)
    ]

    def save(folder: Path) -> None:
        write_generations(folder / "generations.jsonl", texts, completions, tokens)
        if offload is not None:
            write_json(folder / "offload.json", engine.report())

    for remark in engine.remarks():
        print(remark, file=sys.stderr)
    writers = {
        trace: lambda at: write_trace(at, engine.trace.trace(), trace_scores),
        events: recorder.write_jsonl,
        timeline: recorder.write_timeline,
    }
    run.write(save, {path: write for path, write in writers.items() if path})
    if stream is not None:
        print(stream.finish())
    elif prompt:
        for text, completion in zip(texts, completions, strict=True):
            print(f"--- {text.id}\n{text.text}{completion}")
    if offload is not None and not offload.lossless:
        print(lossy_line(engine.report()))
    movement = engine.movement()
    print(speed_line(speed, movement), file=sys.stderr)
    return {
        "tokens_per_s": speed["tokens_per_s"],
        "ttft_s": speed["ttft_s"],
        **movement,
    }


def speed_line(speed: dict[str, Any], movement: dict[str, Any]) -> str:
    """How fast a run was and how many experts were there, in one sentence."""
    told = f"first token after {1e3 * speed['ttft_s']:.1f} ms"
    if speed["tokens_per_s"]:
        told += f", then {speed['tokens_per_s']:.4g} tokens/s"
    if movement.get("hit_ratio") is not None:
        told += (
            f"; {100 * movement['hit_ratio']:.0f} % of the experts used were on the "
            f"device, {movement['bytes_moved'] / 1e6:.1f} MB moved"
        )
    return f"{told}; before that {speed['warm_up_s']:.1f} s of compilation, not counted"


def lossy_line(report: dict[str, Any]) -> str:
    """What a lossy option did in a run, in one sentence."""
    if "rerouted" not in report and report.get("assist_deferred"):
        return "lossy option assist_deferred (moe-edge evaluate: what it costs)"
    done = f"lossy route {report['route']}"
    if "rerouted" in report:
        done += f": {report['rerouted']} of {report['choices']} expert choices changed"
    return f"{done} (moe-edge fidelity: how far from the model's own text)"


def write_generations(path: Path, prompts, texts, tokens) -> None:
    """One line a prompt: id, text and tokens of the completion."""
    with path.open("w", encoding="utf-8") as file:
        for prompt, text, row in zip(prompts, texts, tokens, strict=True):
            line = {"id": prompt.id, "text": text, "tokens": row}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
