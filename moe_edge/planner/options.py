"""What a plan is asked: the flags of `moe-edge plan`, checked."""

import ast
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_edge.core.checks import (
    ConfigError,
    check_count,
    check_from_zero,
    check_known,
    check_positive,
)
from moe_edge.core.typed import changed, check_options
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.model.attention_config import CACHE_TYPES
from moe_edge.offload.budget import check_budget, parse_budget

OBJECTIVES = ("tpot", "ttft", "memory", "quality")
AUTO = "auto"
BUDGETS = ("100%", "75%", "50%", "35%", "25%", "15%", "10%")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Budget, targets, and where numbers come from.

    Attributes:
      checkpoint: folder (Hugging Face's or ours), GGUF file, or `default`.
      config_json: a config.json instead of a checkpoint: plans without weights, for
        the machine of `machine`.
      device_memory: a share of the experts' bytes (`25%`), a size (`2GiB`) that also
        holds the dense weights, the KV cache and staging, or `auto`: such a size, nine
        tenths of what the device has free.
      host_memory: most bytes of expert records on the host (`8GiB`); empty: not
        limited.
      batch: rows that decode together.
      prompt_tokens: of a prompt.
      new_tokens: of its continuation.
      context: tokens of a row for whose KV cache a size reserves room; None: the sum
        of both.
      kv_cache: how keys and values are kept, as of `moe-edge generate`; what lossy ones
        cost in fidelity is not counted.
      joining: rows join and leave while others decode, as in `moe-edge serve`: policies
        that follow one sequence are left out.
      tpot_ms: most milliseconds of a decode step.
      ttft_ms: most milliseconds to the first token.
      max_ppl_ratio: most perplexity, as a multiple of the unmodified model's; 1.0:
        lossless configurations only.
      min_agreement: least share of tokens that the unmodified model finds likeliest,
        too.
      objective: what is made least where all targets are met: `tpot`, `ttft`,
        `memory` (device bytes) or `quality` (perplexity ratio).
      machine: a machine.json (of `moe-edge profile_machine`, or of an earlier plan,
        whose calibration is taken), or a GPU preset such as `rtx_4090`; empty: this
        machine is measured.
      link_bytes_per_s: of an emulated link; empty: the machine's own.
      link_latency_s: of an emulated link.
      servers: of a cluster that serves together: how many machines of `machine`, or the
        GPU presets of each, separated by commas (`rtx_4090,rtx_3090+rtx_3090`); empty:
        one machine.
      network: with servers: megabits a second that each may send.
      trace: a route trace of decoding (`moe-edge generate --trace --trace_scores`) to
        replay; empty: recorded here.
      card: cards.json of `moe-edge fidelity`, repeatable: which routes, formats and K
        are allowed at what perplexity ratio.
      temperature: at which the user will draw tokens.
      prompts: JSON-lines file `{"id", "prompt"}` to calibrate and verify with; empty:
        texts of our generators.
      fixed: an option of the engine that stays as it is, `NAME=VALUE`, repeatable:
        `eviction=lru`.
      margin: configurations within this of the best count as equal; the one that
        changes least is taken.
      calibrate_s: seconds of calibration after which no further predictor is begun.
      search_s: seconds of replaying candidates.
      verify: run the chosen configuration and the next ones on other prompts.
      verify_top: how many next ones.
      seed: of prompts and tokens.
    """

    checkpoint: str | None = None
    config_json: str | None = None
    device_memory: str | None = None
    host_memory: str | None = None
    batch: int = 1
    prompt_tokens: int = 128
    new_tokens: int = 128
    context: int | None = None
    kv_cache: str = "float32"
    joining: bool = False
    tpot_ms: float | None = None
    ttft_ms: float | None = None
    max_ppl_ratio: float = 1.0
    min_agreement: float | None = None
    objective: str = "tpot"
    machine: str | None = None
    link_bytes_per_s: float | None = None
    link_latency_s: float = 0.0
    servers: str | None = None
    network: float | None = None
    trace: str | None = None
    card: Sequence[str] = ()
    temperature: float = 1.0
    prompts: str | None = None
    fixed: Sequence[str] = ()
    margin: str = "5%"
    calibrate_s: float = 90.0
    search_s: float = 60.0
    verify: bool = False
    verify_top: int = 3
    seed: int = 0

    def __post_init__(self):
        """Refuses what no model could be planned with.

        Raises:
          ConfigError: a value out of range, or settings that exclude each other.
        """
        if self.checkpoint is not None and self.config_json is not None:
            raise ConfigError(
                f"--checkpoint is {self.checkpoint!r} and --config_json "
                f"{self.config_json!r}; give one of them"
            )
        for name in ("batch", "prompt_tokens", "new_tokens", "verify_top"):
            check_count(name, getattr(self, name))
        for name in ("tpot_ms", "ttft_ms", "calibrate_s", "search_s"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        check_from_zero("temperature", self.temperature)
        check_known("objective", self.objective, OBJECTIVES)
        check_known("kv_cache", self.kv_cache, CACHE_TYPES)
        if self.new_tokens < 3:
            raise ConfigError(
                f"new_tokens is {self.new_tokens}, expected at least 3: a decode step "
                "is timed from one routing to the next"
            )
        self._check_quality()
        tokens = self.prompt_tokens + self.new_tokens
        if self.context is not None and self.context < tokens:
            raise ConfigError(
                f"context is {self.context} tokens, and a prompt of "
                f"{self.prompt_tokens} with {self.new_tokens} new ones has {tokens}; "
                "raise it or shorten them"
            )
        if self.host_memory is not None:
            check_budget("host_memory", self.host_memory, "bytes", "size such as 8GiB")
        check_budget("margin", self.margin, "share", "share such as 5%")
        self._check_servers()
        if self.config_json is not None:
            self._check_without_weights()

    def _check_servers(self) -> None:
        if self.servers is None:
            if self.network is not None:
                raise ConfigError(
                    f"--network {self.network:g} is between servers; give --servers"
                )
            return
        if self.network is None:
            raise ConfigError(
                "--servers share experts over a network; say how many megabits a "
                "second each may send (--network 1000)"
            )
        check_positive("network", self.network)
        given = ("verify", "host_memory", "link_bytes_per_s", "fixed", "joining")
        for name in given:
            if getattr(self, name):
                raise ConfigError(
                    f"--{name} is of an engine of one machine, and --servers hold what "
                    "a placement says; leave one of them out"
                )

    def _check_quality(self) -> None:
        if not 1 <= self.max_ppl_ratio < math.inf:
            raise ConfigError(
                f"max_ppl_ratio is {self.max_ppl_ratio}, expected a number from 1: 1.0 "
                "allows lossless configurations only"
            )
        if self.min_agreement is not None and not 0 <= self.min_agreement <= 1:
            raise ConfigError(
                f"min_agreement is {self.min_agreement}, expected a share from 0 to 1"
            )
        if self.max_ppl_ratio == 1 and self.objective == "quality":
            raise ConfigError(
                "objective quality and max_ppl_ratio 1.0, at which all are lossless; "
                "raise max_ppl_ratio or take another objective"
            )

    def _check_without_weights(self) -> None:
        if self.machine is None and self.servers is None:
            raise ConfigError(
                f"--config_json {self.config_json!r} is planned without weights, so "
                "nothing can be measured; name the machine (--machine rtx_4090, or a "
                "machine.json)"
            )
        for name in ("verify", "prompts", "card"):
            if getattr(self, name):
                raise ConfigError(
                    f"--{name} needs weights, and --config_json has none; give "
                    "--checkpoint"
                )
        if self.device_memory == AUTO:
            raise ConfigError(
                "--device_memory auto asks this machine, and --config_json is planned "
                "for another one; give a size (6GiB) or a share (25%)"
            )

    @property
    def tokens(self) -> int:
        """Of a row, for whose KV cache a size reserves room."""
        return self.context or self.prompt_tokens + self.new_tokens

    @property
    def model_path(self) -> str:
        """Where the weights are, or will be."""
        if self.config_json is None:
            return self.checkpoint or "default"
        given = Path(self.config_json)
        return str(given if given.is_dir() else given.parent)

    @property
    def margin_share(self) -> float:
        return parse_budget(self.margin).share or 0.0

    def budgets(self, base: OffloadOptions, fixed: frozenset) -> Sequence[str | float]:
        """Budgets to try, the largest first; none: what the device has free decides."""
        if "device_memory" in fixed or self.device_memory not in (None, AUTO):
            return (base.device_memory,)
        tries = self.objective == "memory" and self.device_memory is None
        return BUDGETS if tries else ()

    def base(self, offload: OffloadOptions | None) -> tuple[OffloadOptions, frozenset]:
        """The user's options of the engine, and the names of those that are fixed.

        Args:
          offload: of a gin file; what differs there from a default is fixed, too.
        Raises:
          ConfigError: an unknown option, one of another type, or two that exclude each
            other.
        """
        given = {} if offload is None else changed(offload)
        for text in self.fixed:
            name, value = _assignment(text)
            check_options("--fixed", OffloadOptions, {name: value})
            if name in given and given[name] != value:
                raise ConfigError(
                    f"--fixed {text} and offload.{name} = {given[name]!r} in a gin "
                    "file; give one of them"
                )
            given[name] = value
        fixed = frozenset(given)
        for name in ("link_bytes_per_s", "link_latency_s", "device_memory"):
            value = getattr(self, name)
            if value in (None, 0.0) or value == AUTO:
                continue
            if name in given and given[name] != value:
                raise ConfigError(
                    f"--{name} is {value!r} and the fixed offload.{name} "
                    f"{given[name]!r}; give one of them"
                )
            given[name] = value
        options = OffloadOptions(**given)
        if not options.lossless and self.max_ppl_ratio == 1:
            late = options.assist_deferred
            what = "assist_deferred" if late else f"route {options.route}"
            raise ConfigError(
                f"{what} is fixed, which is lossy, and max_ppl_ratio is 1.0, which "
                "allows lossless configurations only; raise it or leave that out"
            )
        return options, fixed


def _assignment(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigError(
            f"--fixed is {text!r}, expected NAME=VALUE, such as eviction=lru"
        )
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value
