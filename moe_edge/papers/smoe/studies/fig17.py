"""SMoE, figure 17: how well predictors name the experts of the coming layers."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from moe_edge.bench.cases import Case, CaseSettings, prepare
from moe_edge.bench.engines import Bench
from moe_edge.bench.offloading import studied
from moe_edge.bench.prompts import check_inputs
from moe_edge.bench.settings import Budget, Margin
from moe_edge.bench.study import Study
from moe_edge.engine.generate import generate
from moe_edge.engine.layered import LayeredEngine
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.metrics.frames import Estimate, Rows, Tables, frame, ranging
from moe_edge.papers.smoe.studies import fig14
from moe_edge.predict.accuracy import PredictionLog
from moe_edge.predict.device_scores import wanted_scores
from moe_edge.profile.run_profile import run_profile

MEASURES = {"recall": "chosen_LA", "precision": "predicted_LA"}  # share of hits in
SMOE, PROBE = "smoe_partial", "probe (ours)"
BASELINES = ("stale_gate", "previous", "frequency", "moe_infinity")
RECALLED = (f"{SMOE}, all chosen", "stale_gate", "n_layer_gate", PROBE)
_wanted = jax.jit(wanted_scores, static_argnames=("moe", "top_a"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictorSettings(CaseSettings):
    """`CaseSettings` names the rest.

    Attributes:
      device_memory: of the experts.
      a: SMoE's margin.
      horizon: most layers that predictors look ahead.
      probe_texts, probe_tokens: what probes are fitted on, in `work_dir`; without
        `data_dir` there are none.
    """

    device_memory: Budget = "25%"
    history: int = 16
    a: Margin = 0.2
    horizon: int = 3
    probe_texts: Sequence[str] = ("text/wikitext-2/train.txt", "text/c4_web.txt")
    probe_tokens: int = 131_072
    work_dir: str = "results/local/predictors"


class TopScoreLog(PredictionLog):
    """Also compares what is predicted one layer ahead with the true top-score set.

    Attributes:
      top: the log of that, whose chosen experts are the top-score ones.
    """

    def __init__(self, num_layers, num_experts, look_ahead, *, moe, top_a, batch):
        super().__init__(num_layers, num_experts, look_ahead)
        self.top = PredictionLog(num_layers, num_experts)
        self._scores = functools.partial(_wanted, moe=moe, top_a=top_a)
        self._batch = batch

    def expect(self, layer, ids_NM):
        super().expect(layer, ids_NM)
        self.top.expect(layer, ids_NM)

    def note(self, layer: int, routing) -> None:
        """`on_routing` of a run; the router's own choice, before any route policy."""
        if routing.ids_TK.shape[0] == self._batch:  # no prefill
            scores_E = np.asarray(self._scores(routing.ids_TK, routing.scores_TE))
            self.top.chosen(layer, np.flatnonzero(scores_E >= 0))


def fit_probes(settings: PredictorSettings) -> str | None:
    """Folder of a profile with probes, or None without texts to fit them on."""
    if settings.data_dir is None:
        return None
    run_profile(
        out_dir=settings.work_dir,
        checkpoint=settings.checkpoint,
        text=",".join(settings.probe_texts),
        tokens=settings.probe_tokens,
        max_tokens_per_expert=1,
        probes=settings.horizon,
        data_dir=settings.data_dir,
        overwrite=True,
    )
    return settings.work_dir


def policies(
    settings: PredictorSettings, profile: str | None = None
) -> dict[str, OffloadOptions]:
    """Every predictor, over LRU; and SMoE's in the complete SMoE.

    Args:
      profile: of `fit_probes`.
    """

    def over_lru(name: str, horizon: int = 1, **options) -> OffloadOptions:
        return studied(predictor=name, predictor_options=options, horizon=horizon)

    ahead = {"look_ahead": settings.horizon}
    probe = {} if profile is None else {PROBE: ahead | {"profile": profile}}
    return {
        SMOE: over_lru(SMOE, top_a=settings.a),
        f"{SMOE}, all chosen": over_lru(SMOE, top_a=None),
        **{name: over_lru(name) for name in BASELINES},
        "n_layer_gate": over_lru("n_layer_gate", settings.horizon, **ahead),
        **{
            name: over_lru("probe", settings.horizon, **options)
            for name, options in probe.items()
        },
        f"{SMOE} in smoe": fig14.smoe_steps(settings.a)["+Pre"],
    }


@dataclasses.dataclass
class Judged:
    """A case's logs, one a round."""

    case: Case
    logs: list[TopScoreLog] = dataclasses.field(default_factory=list)

    def share(self, whole: str, pick, top=False) -> Estimate | None:
        """Hits in `whole`, all rounds, and the range of rounds; None in nothing.

        Args:
          whole: `chosen_LA` or `predicted_LA`.
          pick: of layers and look-ahead.
          top: of top-score experts alone.
        """
        logs = [log.top if top else log for log in self.logs]
        parts = [log.hits_LA[pick].sum() for log in logs]
        wholes = [getattr(log, whole)[pick].sum() for log in logs]
        if not sum(wholes):
            return None
        rounds = [p / w for p, w in zip(parts, wholes, strict=True) if w]
        return ranging(sum(parts) / sum(wholes), rounds)

    def by_layer(self, whole: str) -> list[float]:
        """Hits of every layer, one layer ahead; nan where nothing was predicted."""
        hits_L, whole_L, predicted_L = (
            sum(getattr(log, name)[:, 0] for log in self.logs)
            for name in ("hits_LA", whole, "predicted_LA")
        )
        share_L = hits_L / np.maximum(whole_L, 1)
        return np.where(predicted_L > 0, share_L, np.nan).tolist()


def measure(settings: PredictorSettings, rows: Rows) -> None:
    """Records what predictors say."""
    named = policies(settings, fit_probes(settings))
    cases = [
        Case(policy, settings.device_memory, batch, options)
        for batch in settings.batches
        for policy, options in named.items()
    ]
    is_same = []
    with Bench(settings.checkpoint, settings=settings) as bench:
        ready = prepare(bench, cases, settings)
        judged = [Judged(case) for case in cases]
        for prompts in ready.rounds:
            for one, engine in zip(judged, ready.engines, strict=True):
                texts = prompts[: one.case.batch]
                log, tokens = watch(bench, engine, texts, settings)
                one.logs.append(log)
                if one.case.is_exact:
                    run = generate(bench.resident, texts, settings.new_tokens)
                    is_same.append(run.tokens == tokens)
    for one in judged:
        tell(rows, one, ready.first_layer)
    rows.checks["every lossless case gave the resident engine's tokens"] = all(is_same)
    workload = ready.workload(settings)
    rows.about |= {"model": bench.model, "workload": workload, "kind": ready.kind}
    rows.about["baselines"] = list(BASELINES)


def watch(bench: Bench, engine: LayeredEngine, prompts, settings: PredictorSettings):
    """(log, tokens) of one generation."""
    config, predictions = bench.config, engine.predictor_run
    engine.reset_records()
    predictions.accuracy = log = TopScoreLog(
        config.num_layers, config.moe.num_experts, predictions.horizon,
        moe=config.moe, top_a=settings.a, batch=len(prompts),
    )  # fmt: skip
    run = generate(engine, prompts, settings.new_tokens, on_routing=log.note)
    return log, run.tokens


def tell(rows: Rows, one: Judged, first_layer: int) -> None:
    """Adds a case: shares of the layers that a gate can predict within a token, for all
    predictors; where there was nothing to judge a share is missing."""
    case, logs = one.case, one.logs
    for ahead in range(logs[0].rounds_LA.shape[1]):
        pick = (slice(first_layer + ahead + 1, None), ahead)
        shares = {name: one.share(whole, pick) for name, whole in MEASURES.items()}
        rows("ahead", case.policy, case.batch, ahead + 1, **shares)
    later = slice(first_layer + 1, None)
    rows(
        "top",
        *(case.policy, case.batch),
        predicted_top=one.share("predicted_LA", later, top=True),
        top_predicted=one.share("chosen_LA", later, top=True),
        lookups=sum(int(log.rounds_LA[later, 0].sum()) for log in logs),
    )
    for layer in range(len(logs[0].rounds_LA)):
        by_layer = {
            name: one.by_layer(whole)[layer] for name, whole in MEASURES.items()
        }
        known = {k: round(v, 6) for k, v in by_layer.items() if not np.isnan(v)}
        rows("layers", case.policy, case.batch, layer, **known)


def derive(tables: Tables) -> dict[str, Any]:
    """What SMoE's partial state names at the first batch size, under lossless routing
    and under its own; missing where it predicted nothing."""
    top, ahead, layers = tables["top"], tables["ahead"], tables["layers"]
    batch = top.batch.iloc[0]
    top, ahead, layers = (t[t.batch == batch] for t in (top, ahead, layers))
    one = ahead[ahead["ahead"] == 1].merge(top, on=["policy", "batch"])
    by_policy = one.set_index("policy")
    recalled = one[one.policy.isin(RECALLED) & one.recall.notna()]
    return {
        "batch": batch,
        "top_share": by_policy.predicted_top.get(SMOE),
        "chosen_share": by_policy.precision.get(SMOE),
        "under_smoe": by_policy.predicted_top.get(f"{SMOE} in smoe"),
        "recalled": recalled[["policy", "recall", "lookups"]],
        "one_ahead": one,
        "shown": layers,
    }


FRAMES = {
    "ahead": frame("policy batch ahead", "recall precision"),
    "top": frame("policy batch", "predicted_top top_predicted lookups"),
    "layers": frame("policy batch layer", "recall precision"),
}
STUDY = Study(
    "smoe_fig17", PredictorSettings, measure, FRAMES, derive, check=check_inputs
)
