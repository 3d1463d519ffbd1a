"""The peer llama.cpp: the same weights as a GGUF file, through its C interface.

Optional (extra `peers`; llama-cpp-python compiles for about 12 minutes). Of the two
families that the suites measure, which have GGUF architectures.
"""

import ctypes
import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from moe_edge.convert.hf_reader import HfReader
from moe_edge.convert.tensor_source import TensorSource
from moe_edge.core.checks import ConfigError
from moe_edge.core.out_folder import atomic_folder
from moe_edge.core.process import cpu_cores

ARCHITECTURES = {"olmoe": "olmoe", "qwen2_moe": "qwen2moe"}
FILE = "model.gguf"
TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER = {  # Hugging Face's name within a layer -> GGUF's; experts are stacked
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_proj.bias": "attn_q.bias",
    "self_attn.k_proj.bias": "attn_k.bias",
    "self_attn.v_proj.bias": "attn_v.bias",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
    "mlp.shared_expert.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_expert.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_expert.down_proj.weight": "ffn_down_shexp.weight",
}
KEPT = ("norm.weight", "mlp.gate.weight", "shared_expert_gate.weight", "bias")


def write_gguf(
    hf_folder: Path, folder: Path, kind: str, dense: str | None = None
) -> Path:
    """A checkpoint's weights as a GGUF file, unless it is there.

    Norms, biases and the router stay float32, as llama.cpp's own converter has it. The
    file has no vocabulary.

    Args:
      folder: for the file.
      kind: F32, BF16, Q8_0, Q4_0, MXFP4: what matrices become.
      dense: the same of those that are no experts'; None: of them, too.
    Raises:
      ConfigError: of no family of ARCHITECTURES.
    """
    import gguf

    if folder.exists():
        return folder / FILE
    reader = HfReader(hf_folder)
    config, given = reader.config, reader.config.hf_config
    if config.model_type not in ARCHITECTURES:
        raise ConfigError(
            f"llama.cpp is a peer for {sorted(ARCHITECTURES)}, got {config.model_type}"
        )
    source = TensorSource(hf_folder, config, np.dtype(np.float32))
    arch, moe, attention = (
        ARCHITECTURES[config.model_type],
        config.moe,
        config.attention,
    )
    with atomic_folder(folder) as partial:
        out = gguf.GGUFWriter(partial / FILE, arch)
        out.add_block_count(config.num_layers)
        out.add_context_length(config.max_positions)
        out.add_embedding_length(config.d_model)
        out.add_feed_forward_length(given["intermediate_size"])
        out.add_head_count(attention.num_heads)
        out.add_head_count_kv(attention.num_kv_heads)
        out.add_layer_norm_rms_eps(config.norm_eps)
        out.add_rope_freq_base(given["rope_parameters"]["rope_theta"])
        out.add_vocab_size(config.vocab_size)
        out.add_expert_count(moe.num_experts)
        out.add_expert_used_count(moe.top_k)
        out.add_tokenizer_model("none")
        if config.model_type == "qwen2_moe":
            out.add_expert_feed_forward_length(moe.expert_dim)
            shared = given["shared_expert_intermediate_size"]
            out.add_expert_shared_feed_forward_length(shared)

        def add(name: str, array: np.ndarray, is_kept: bool = False) -> None:
            array = np.ascontiguousarray(array, np.float32)
            if name.endswith("shexp.weight") and array.shape[0] == 1:
                array = array[0]  # the shared expert's gate is a vector there
            if is_kept:
                out.add_tensor(name, array)
            else:
                is_expert = name.endswith("_exps.weight")
                which = kind if is_expert or dense is None else dense
                stored = getattr(gguf.GGMLQuantizationType, which)
                data = gguf.quants.quantize(array, stored)
                out.add_tensor(name, data, raw_dtype=stored)

        for name, new in TOP.items():
            if name in source.shapes:
                add(new, source.read(name), name.endswith(KEPT))
        for layer in range(config.num_layers):
            for name, new in LAYER.items():
                full = f"model.layers.{layer}.{name}"
                if full in source.shapes:
                    add(f"blk.{layer}.{new}", source.read(full), name.endswith(KEPT))
            for part in ("gate", "up", "down"):
                names = [
                    f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
                    for expert in range(moe.num_experts)
                ]
                stacked = np.stack([source.read(name) for name in names])
                add(f"blk.{layer}.ffn_{part}_exps.weight", stacked)
        out.write_header_to_file()
        out.write_kv_data_to_file()
        out.write_tensors_to_file()
        out.close()
    return folder / FILE


class _Place(ctypes.Structure):
    """llama.cpp's `llama_model_tensor_buft_override`: which tensors lie where."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


def _host_experts(package: Path, layers: Sequence[int]) -> ctypes.Array:
    """Places that keep the experts of these layers in host memory."""
    base = ctypes.CDLL(str(package / "lib" / "libggml-base.so"))
    base.ggml_backend_cpu_buffer_type.restype = ctypes.c_void_p
    names = "|".join(map(str, layers))
    pattern = rf"blk\.({names})\.ffn_(gate|up|down)_exps".encode()
    host = _Place(pattern, base.ggml_backend_cpu_buffer_type())
    return (_Place * 2)(host, _Place(None, None))  # the last ends the list


class LlamaCpp:
    """A model in llama.cpp, as many threads as cores.

    Args:
      most_rows, most_tokens: of all that `rate` is asked for.
      on_device: whether its layers are on a GPU, for which it must have been built.
      absent: layers whose experts stay on the host all the same, which computes them.

    Attributes:
      vocabulary: number of tokens.
    """

    ways = ("cpu",)

    def __init__(
        self,
        gguf_file: Path,
        kind: str,
        most_rows: int,
        most_tokens: int,
        on_device: bool = False,
        absent: Sequence[int] = (),
    ):
        import llama_cpp

        self._lib, self.name = llama_cpp, f"llama.cpp {kind}"
        # With the instructions that it was compiled for.
        features = llama_cpp.llama_print_system_info().decode().strip(" |")
        self.build = f"llama-cpp-python {llama_cpp.__version__}: {features}"
        # Else it tells all it does, on stderr.
        self._quiet = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        options = llama_cpp.llama_model_default_params()
        options.n_gpu_layers = -1 if on_device else 0  # all, or none
        if on_device and not llama_cpp.llama_supports_gpu_offload():
            raise ConfigError(
                "llama-cpp-python was built without a GPU; build it with GGML_CUDA=ON"
            )
        if absent:
            places = _host_experts(Path(llama_cpp.__file__).parent, absent)
            options.tensor_buft_overrides = ctypes.cast(places, ctypes.c_void_p)
        model = llama_cpp.llama_model_load_from_file(os.fsencode(gguf_file), options)
        if not model:
            raise ConfigError(f"llama.cpp does not load {gguf_file}")
        vocab = llama_cpp.llama_model_get_vocab(model)
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(vocab)
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = most_rows * most_tokens
        options.n_batch = options.n_ubatch = 512
        options.n_seq_max, options.kv_unified = most_rows, True
        options.n_threads = options.n_threads_batch = cpu_cores()
        self._context = llama_cpp.llama_init_from_model(model, options)
        self._batch = llama_cpp.llama_batch_init(512, 0, most_rows)
        self._model = model

    def rate(self, way: str, prompts, steps: int = 0) -> float:
        """As of `peers.Transformers`; there is one way."""
        del way
        lib, prompts = self._lib, np.asarray(prompts)
        lib.llama_memory_clear(lib.llama_get_memory(self._context), True)
        started = time.perf_counter()
        last = [self._run(row, tokens) for row, tokens in enumerate(prompts)]
        if not steps:
            return prompts.size / (time.perf_counter() - started)
        started = time.perf_counter()
        for step in range(steps):
            last = self._step(last, prompts.shape[1] + step)
        return steps * len(prompts) / (time.perf_counter() - started)

    def _run(self, row: int, tokens) -> int:
        """The token after a row's prompt, which passes in pieces of 512."""
        for first in range(0, len(tokens), 512):
            part = tokens[first : first + 512]
            is_last = first + len(part) == len(tokens)
            entries = [
                (token, first + i, row, is_last and i == len(part) - 1)
                for i, token in enumerate(part.tolist())
            ]
            self._decode(entries)
        return self._best(len(part) - 1)

    def _step(self, last: list[int], position: int) -> list[int]:
        entries = [(token, position, row, True) for row, token in enumerate(last)]
        self._decode(entries)
        return [self._best(place) for place in range(len(last))]

    def _decode(self, entries) -> None:
        batch = self._batch
        batch.n_tokens = len(entries)
        for place, (token, position, row, wants_logits) in enumerate(entries):
            batch.token[place], batch.pos[place] = token, position
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, row
            batch.logits[place] = wants_logits
        if failed := self._lib.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode returned {failed}")

    def logits(self, tokens) -> np.ndarray:
        """float32 `[V]` after a prompt."""
        memory = self._lib.llama_get_memory(self._context)
        self._lib.llama_memory_clear(memory, True)
        tokens = np.asarray(tokens)
        self._run(0, tokens)
        return self._logits_at((len(tokens) - 1) % 512).copy()

    def _logits_at(self, place: int) -> np.ndarray:
        found = self._lib.llama_get_logits_ith(self._context, place)
        return np.ctypeslib.as_array(found, shape=(self.vocabulary,))

    def _best(self, place: int) -> int:
        return int(self._logits_at(place).argmax())
