"""Suite `serving`: what choosing, stepping, batching and HTTP cost a server of tokens.

The model is one refactored into four sub-experts an expert, beside the original; floors
are shares of the model's own K, the same ones for both.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

from moe_edge.bench.registry import later
from moe_edge.bench.settings import Steps, known
from moe_edge.bench.speed import Models, Rows, SuiteSettings, speed_study
from moe_edge.convert.open import DEFAULT_MODEL

# Part -> what measures it; later, as it loads JAX.
PARTS: Mapping[str, Callable[..., Rows]] = {
    "pick": later("studies.speed.serving_steps.pick_rows"),
    "steps": later("studies.speed.serving_steps.step_rows"),
    "sampling": later("studies.speed.serving_steps.sampling_rows"),
    "guided": later("studies.speed.serving_guided.guided_rows"),
    "policies": later("studies.speed.serving_loop.policy_rows"),
    "goodput": later("studies.speed.serving_loop.goodput_rows"),
    "loop": later("studies.speed.serving_loop.loop_rows"),
    "prefix": later("studies.speed.serving_loop.prefix_rows"),
    "http": later("studies.speed.serving_http.http_rows"),
    "ready": later("studies.speed.serving_http.ready_rows"),
    "memory": later("studies.speed.serving_http.memory_rows"),
}
FLOOR_SHARES = (1 / 4, 1 / 2, 3 / 4, 1)  # of a model's own K; K 8, 16, 24, 32 of 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingSettings(SuiteSettings):
    """How much suite `serving` does; `SuiteSettings` names the rest.

    Attributes:
      parts: what is measured: pick, steps, sampling, guided, policies, goodput, loop,
        prefix, http, ready, memory.
      checkpoint: the original, path or `default`.
      refactored: made from it by moe-edge refactor; None: one is made in `work_dir`.
      max_batch, max_context: of the server.
      requests: that come at once, of mixed floors.
      loop_requests, prompt_tokens, new_tokens: of the runs that are held against
        `generate` and HTTP.
      prefix_tokens: of a prompt that comes again.
      goodput_requests: that come at a rate, in computed time.
      memory_requests: whose memory is watched, after a tenth of them.
    """

    parts: Sequence[Annotated[str, known("part", PARTS)]] = tuple(PARTS)
    repeats: int = 3
    checkpoint: str = "default"
    refactored: str | None = None
    max_batch: int = 8
    max_context: int = 1024
    requests: int = 200
    loop_requests: int = 64
    prompt_tokens: int = 32
    new_tokens: Steps = 64
    prefix_tokens: int = 512
    goodput_requests: int = 2000
    memory_requests: int = 10_000


def serving_models(settings: ServingSettings, work_dir: Path) -> Models:
    """Name and path of the original and the refactored model."""
    original = (
        DEFAULT_MODEL if settings.checkpoint == "default" else settings.checkpoint
    )
    return [("default", Path(original)), ("refactored", refactored(settings, work_dir))]


def refactored(settings: ServingSettings, work_dir: Path) -> Path:
    """The refactored model; its quality is no matter here, so the profile is short."""
    if settings.refactored is not None:
        return Path(settings.refactored)
    from moe_edge.papers.moe_prism.refactor.run import run_refactor
    from moe_edge.papers.moe_prism.refactor.texts import PACKAGED
    from moe_edge.profile.run_profile import run_profile

    profile, model = work_dir / "profile", work_dir / "refactored"
    parent = settings.checkpoint
    if not profile.exists():
        options = {"checkpoint": parent, "text": str(PACKAGED), "tokens": 8192}
        run_profile(out_dir=str(profile), **options)
    if not model.exists():
        run_refactor(
            out_dir=str(model), checkpoint=parent, profile=str(profile), ppl_k=""
        )
    return model


def serving_rows(settings: ServingSettings, work_dir: Path) -> Rows:
    """All rows."""
    models = serving_models(settings, work_dir)
    rows = []
    for part in settings.parts:
        print(f"part {part}", flush=True)
        rows += PARTS[part](settings, work_dir, models)
    return rows


STUDY = speed_study(
    "serving",
    "What do choosing, stepping, batching and HTTP cost a server of tokens?",
    serving_rows,
    serving_models,
    settings=ServingSettings,
    limit="Client and server share the cores of one machine. Goodput is computed from "
    "measured steps.",
)
