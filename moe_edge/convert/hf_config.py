"""Reading a Hugging Face `config.json` field by field, strictly.

Every field must be asked for by the family that reads it, or stand in the list of
fields that never change the arithmetic of inference; anything else is refused by
name, because a field we do not know may change what the model computes.
"""

import functools
import json
import math
from typing import Any

from moe_edge.convert.family import Family
from moe_edge.convert.neutral_fields import is_dropout, same
from moe_edge.core.checks import ConfigError
from moe_edge.model.config import ModelConfig

REQUIRED = object()
# A config that claims more is damaged or hostile; published models stay far below.
_MAX_INT = 1 << 31
_MAX_LAYERS = 4096

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}

RANDOM_SEED = "random_weights_seed"  # of weights that nothing has trained
FINE_TUNED = "fine_tuned"  # in words: from what, on what, how long

# Fields that describe files, training, modules that predict later tokens or output
# bookkeeping, never the forward pass.
HARMLESS = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _attn_implementation_internal
    _commit_hash _experts_implementation _experts_implementation_internal
    _from_model_config _name_or_path architectures attn_implementation
    auto_map aux_loss_alpha chunk_size_feed_forward dtype ep_size
    experts_implementation finetuning_task id2label initializer_range
    keys_to_ignore_at_inference label2id max_tokenizer_truncation model_type
    mtp_loss_scaling_factor mtp_num_hidden_layers mtp_transformer_layers
    mtp_use_dedicated_embeddings name_or_path num_labels num_mtp_layers num_mtp_modules
    num_nextn_predict_layers num_return_sequences output_attentions output_hidden_states
    output_router_logits pad_token_id prefix pretraining_tp problem_type pruned_heads
    return_dict return_dict_in_generate router_aux_loss_coef
    router_jitter_noise sep_token_id seq_aux task_specific_params tf_legacy_loss
    tie_encoder_decoder tie_last_hidden_states tokenizer_class torch_dtype torchscript
    transformers_version unsloth_fixed unsloth_version use_bfloat16 use_cache use_mtp
    """.split()
) | {RANDOM_SEED, FINE_TUNED}
# Generation settings that older transformers wrote into config.json.
GENERATION = frozenset(
    """
    bad_words_ids begin_suppress_tokens cache_implementation decoder_start_token_id
    diversity_penalty
    do_sample early_stopping encoder_no_repeat_ngram_size
    exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id
    length_penalty max_length max_new_tokens min_length no_repeat_ngram_size
    num_beam_groups num_beams output_scores remove_invalid_values repetition_penalty
    suppress_tokens temperature top_k top_p typical_p
    """.split()
)


def random_seed(config: ModelConfig) -> int | None:
    """The seed of weights that nothing has trained; None: they are no such ones."""
    return config.hf_config.get(RANDOM_SEED)


class Fields:
    """A config dict that remembers which of its fields were used.

    Attributes:
      family: name for messages (`model_type`).
      raw: the parsed config.json.
      experts: what the family calls the sizes of its experts.
      layers, positions, norm_eps, activation: what every family states alike.
    """

    def __init__(self, raw: dict[str, Any], name: str, family: Family):
        self.raw = raw
        self.family = name
        self.experts = family.experts
        self._silent = family  # what stands where the file is silent
        self._used: set[str] = set()

    @functools.cached_property
    def layers(self) -> int:
        layers = self.int("num_hidden_layers")
        if layers > _MAX_LAYERS:
            raise ConfigError(
                f"num_hidden_layers is {layers}, expected at most {_MAX_LAYERS}"
            )
        return layers

    @functools.cached_property
    def positions(self) -> int:
        return self.int("max_position_embeddings", self._silent.max_positions)

    @functools.cached_property
    def norm_eps(self) -> float:
        return self.float("rms_norm_eps", self._silent.norm_eps)

    @functools.cached_property
    def activation(self) -> str:
        return self.choice("hidden_act", "silu", ACTIVATIONS)

    def get(self, name: str, default: Any = None, aliases: tuple[str, ...] = ()) -> Any:
        """The raw value of `name` or of its alias; two that differ are refused."""
        names = [n for n in (name, *aliases) if n in self.raw]
        self._used.update(names)
        if not names:
            if default is REQUIRED:
                raise ConfigError(
                    f"config.json of {self.family} lacks field {name!r}; add it"
                )
            return default
        for other in names[1:]:
            if self.raw[other] != self.raw[names[0]]:
                raise ConfigError(
                    f"config.json has {names[0]}={self.raw[names[0]]!r} but {other}="
                    f"{self.raw[other]!r}; they mean the same, so make them equal"
                )
        return self.raw[names[0]]

    def float_or_none(self, name: str) -> float | None:
        """A positive number; None where the file has none."""
        value = self.get(name)
        return None if value is None else self.number(name, value)

    def int(self, name, default=REQUIRED, *, low=1, null=None, aliases=()) -> int:
        """An integer >= `low`; a JSON null stands for `null` where that is given."""
        value = self.get(name, default, aliases)
        if value is None and null is not None:
            value = null
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._bad(name, value, f"an integer >= {low}")
        if not low <= value <= _MAX_INT:
            raise self._bad(name, value, f"an integer in {low}..{_MAX_INT}")
        return value

    def float(self, name, default=REQUIRED, *, positive=True, null=None) -> float:
        """A finite number, positive unless told otherwise; a JSON null stands for
        `null` where that is given."""
        value = self.get(name, default)
        value = null if value is None and null is not None else value
        return self.number(name, value, positive=positive)

    def bool(self, name, default=REQUIRED) -> bool:
        value = self.get(name, default)
        if value is None:
            value = default
        if not isinstance(value, bool):
            raise self._bad(name, value, "true or false")
        return value

    def choice(self, name: str, default, known: dict) -> Any:
        """`known[value]`; any other value changes the maths and is refused."""
        value = self.get(name, default)
        if not isinstance(value, str) or value not in known:
            raise self._bad(name, value, f"one of {', '.join(sorted(known))}")
        return known[value]

    def one_of_layers(self, name: str) -> None:
        """From now on a list of one value a layer counts as that value.

        Raises:
          ConfigError: layers that differ.
        """
        value = self.raw.get(name)
        if isinstance(value, list):
            if not value or any(not same(entry, value[0]) for entry in value):
                raise self._bad(name, value, "one value, the same in every layer")
            self.raw = self.raw | {name: value[0]}

    def only(self, name: str, allowed: tuple, reason: str) -> None:
        """Refuses `name` unless it is absent or one of `allowed`."""
        value = self.get(name, allowed[0])
        if not any(same(value, v) for v in allowed):
            expected = " or ".join(dict.fromkeys(map(json.dumps, allowed)))
            raise self._bad(name, value, f"{expected} ({reason})")

    def number(self, name: str, value: Any, *, positive: bool = True) -> float:
        """Checks a number that was already taken out of the dict."""
        good = isinstance(value, (int, float)) and not isinstance(value, bool)
        # An int beyond float range would overflow in float().
        if not good or abs(value) > 1e30 or not math.isfinite(value):
            raise self._bad(name, value, "a finite number")
        if positive and value <= 0:
            raise self._bad(name, value, "a positive number")
        return float(value)

    def finish(self, neutral: dict[str, tuple]) -> None:
        """Refuses every field that nobody asked for, unless it changes nothing.

        Args:
          neutral: field -> values with which it changes nothing; null is one always.
        Raises:
          ConfigError: names a field with another value, or each unknown field.
        """
        for name, allowed in neutral.items():
            if name in self.raw and name not in self._used:
                reason = "other values are not implemented here"
                self.only(name, (*allowed, None), reason)
        known = self._used | HARMLESS | GENERATION | neutral.keys()
        # A null means "not used"; newer writers add such fields freely.
        unknown = {
            name: value
            for name, value in self.raw.items()
            if not (name in known or value is None or is_dropout(name))
        }
        if unknown:
            listed = ", ".join(
                f"{name}={json.dumps(value)[:60]}"
                for name, value in sorted(unknown.items())
            )
            raise ConfigError(
                f"config.json of {self.family} has fields that may change what the "
                f"model computes and are not implemented: {listed}; "
                "remove them if they do not"
            )

    def _bad(self, name: str, value: Any, expected: str) -> ConfigError:
        shown = json.dumps(value, default=repr)[:80]
        return ConfigError(
            f"config.json of {self.family}: {name} is {shown}, expected {expected}"
        )
