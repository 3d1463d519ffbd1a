"""Peers at like budgets: transformers, accelerate's offload, llama.cpp; and ours.

All run one random checkpoint of OLMoE-1B-7B's shape with few layers, in bfloat16, at
batch 1, on the same tokens (llama.cpp: its own). All dense weights are on the device,
and all, 50 or 25 % of the experts' bytes: ours holds a share of each layer's experts, a
peer those of whole layers. accelerate moves the others' at each step, llama.cpp
computes them on the host.
"""

import functools
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import common
import jax
import numpy as np

from moe_edge.convert.open import open_checkpoint
from moe_edge.engine.weights import load_weights
from moe_edge.studies.speed.llama_cpp import LlamaCpp, write_gguf
from moe_edge.studies.speed.models import olmoe_config, write_random
from moe_edge.studies.speed.peers import installed
from moe_edge.studies.speed.runs import decode_run

ON_GPU = jax.default_backend() == "gpu"
WIDTH, HEADS, EXPERTS = (2048, 16, 64) if ON_GPU else (64, 4, 8)
PROMPT = 16
STEPS, UNTIMED = (24, 8) if ON_GPU else (4, 1)  # of them the first are not timed
SHARES = {"50%": 0.5, "25%": 0.25}
OURS = ("fused zero copy", "fused") if ON_GPU else ("fused",)
WAYS = ("eager", "grouped_mm")  # how transformers computes experts
ABSENT = "cpu" if ON_GPU else "disk"  # where accelerate keeps what the device does not
DEVICE = "cuda:0" if ON_GPU else "cpu"


def main() -> None:
    given = common.flags(__doc__, layers=4).parse_args()
    report = common.Report("peers", given.out_dir)
    report.add("layers", given.layers)
    config = olmoe_config(given.layers, "bfloat16", EXPERTS, WIDTH, HEADS)
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_random(Path(temporary) / "model", config)
        report.say("checkpoint written")
        prompts = np.random.default_rng(0).integers(
            0, config["vocab_size"], (1, PROMPT)
        )
        cases: dict[str, Callable[[], float]] = {}
        want = None
        with report.attempt("ours"):
            want = _ours(report, folder, prompts, cases)
        for load in (_transformers, _llama_cpp):
            with report.attempt(load.__name__.strip("_")):
                load(report, folder, prompts, cases, want)
        report.add("ms a token", common.in_turn(cases, given.rounds))


def _ours(report, folder: Path, prompts, cases: dict) -> np.ndarray:
    """Adds the resident engine and the offloaded ones; logits after the prompt."""
    reader = open_checkpoint(folder)
    dense = load_weights(reader, with_experts=False)
    model = common.Model(reader, dense, reader.config.vocab_size)
    engines = {"ours, resident": model.resident()}
    for share in SHARES:
        engines |= {f"ours, {way} {share}": model.offloaded(way, share) for way in OURS}
    record_bytes = model.plain_store.block_bytes
    ready = {
        name: functools.partial(_ours_ms, engine, prompts)
        for name, engine in engines.items()
    }
    common.at_once([*ready.values()])
    cases |= ready  # what fails is not timed
    for name, engine in engines.items():
        if name != "ours, resident":
            held_bytes = engine.report()["slots"] * record_bytes
            report.add(f"{name}, experts' bytes", held_bytes)
    resident = engines["ours, resident"]
    logits = resident.prefill(resident.new_session(*prompts.shape), prompts)
    report.say("ours compiled")
    return np.asarray(logits)


def _ours_ms(engine, prompts) -> float:
    run = decode_run(engine, prompts, STEPS, forced=True)
    return common.MS * float(np.median(run.step_s[UNTIMED:]))


def _transformers(report, folder: Path, prompts, cases: dict, want) -> None:
    """Adds transformers, all on the device, and with accelerate's offload."""
    if not installed("torch", "transformers"):
        report.add("transformers", "not installed")
        return
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    report.add("transformers", f"{transformers.__version__}, torch {torch.__version__}")
    layers = open_checkpoint(folder).config.num_layers
    models = {"transformers, resident": {"": DEVICE}}
    if installed("accelerate"):
        import accelerate

        report.add("accelerate", accelerate.__version__)
        for share, part in SHARES.items():
            models[f"accelerate {share}"] = expert_places(layers, part)
    else:
        report.add("accelerate", "not installed")
    for name, places in models.items():
        with report.attempt(name):
            _one_of_theirs(report, folder, name, places, prompts, cases, want)
    report.say("transformers ran")


def _one_of_theirs(
    report, folder: Path, name: str, places: dict, prompts, cases: dict, want
) -> None:
    """Adds a model of transformers, its parts where `device_map` places them."""
    import torch
    import transformers

    offloaded = folder.with_name(name)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, device_map=places, offload_folder=offloaded
    ).eval()
    experts = [p for n, p in model.named_parameters() if ".experts." in n]
    held = [p for p in experts if p.device == torch.device(DEVICE)]
    report.add(f"{name}, experts' bytes", sum(map(_bytes_of, held)))
    with torch.inference_mode():
        given = torch.as_tensor(prompts, device=DEVICE)
        logits = model(given, logits_to_keep=1).logits[:, -1].float()
    if want is not None:
        apart = common.apart([logits.cpu().numpy()], [want])
        report.add(f"{name}, from ours in deviations", apart)
    for way in WAYS:
        case = functools.partial(_theirs_ms, model, way, prompts)
        case()
        cases[f"{name}, {way}"] = case


def expert_places(layers: int, share: float) -> dict[str, str]:
    """`device_map` that keeps at least this share of the layers' experts, and all other
    weights, on the device."""
    kept = math.ceil(layers * share)
    top = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
    places = dict.fromkeys(top, DEVICE)
    inside = ("self_attn", "input_layernorm", "post_attention_layernorm", "mlp.gate")
    for layer in range(layers):
        name = f"model.layers.{layer}"
        if layer < kept:
            places[name] = DEVICE
        else:
            places |= {f"{name}.{part}": DEVICE for part in inside}
            places[f"{name}.mlp.experts"] = ABSENT
    return places


def _bytes_of(parameter) -> int:
    return parameter.numel() * parameter.element_size()


def _theirs_ms(model, way: str, prompts) -> float:
    """Median milliseconds of a step up to its likeliest token, as of ours."""
    import torch

    model.set_experts_implementation(way)
    took_s, vocabulary = [], model.config.vocab_size
    fed_N = np.random.default_rng(1).integers(0, vocabulary, STEPS)  # as ours
    with torch.inference_mode():
        out = model(torch.as_tensor(prompts, device=DEVICE), use_cache=True)
        for token in torch.as_tensor(fed_N[:, None, None], device=DEVICE):
            begun_s, cache = time.perf_counter(), out.past_key_values
            out = model(token, past_key_values=cache, use_cache=True)
            out.logits[:, -1].argmax(-1).tolist()
            took_s.append(time.perf_counter() - begun_s)
    return common.MS * float(np.median(took_s[UNTIMED:]))


def _llama_cpp(report, folder: Path, prompts, cases: dict, want) -> None:
    """Adds llama.cpp, absent layers' experts computed by the host; greedy tokens."""
    if not installed("llama_cpp", "gguf"):
        report.add("llama.cpp", "not installed")
        return
    layers = open_checkpoint(folder).config.num_layers
    file = write_gguf(folder, folder.with_name("gguf"), "BF16")
    for name, share in {"resident": 1.0, **SHARES}.items():
        absent = range(math.ceil(layers * share), layers)
        given = file, "BF16", 1, PROMPT + STEPS
        peer = LlamaCpp(*given, on_device=ON_GPU, absent=absent)
        logits = peer.logits(prompts[0])
        if want is not None:
            named = f"llama.cpp {name}, from ours in deviations"
            report.add(named, common.apart([logits[None]], [want]))
        case = functools.partial(_llama_ms, peer, prompts)
        case()
        cases[f"llama.cpp {name}"] = case
    report.add("llama.cpp", peer.build)


def _llama_ms(peer: LlamaCpp, prompts) -> float:
    return common.MS / peer.rate("", prompts, STEPS)


if __name__ == "__main__":
    main()
