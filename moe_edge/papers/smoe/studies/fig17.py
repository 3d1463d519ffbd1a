"""SMoE, figure 17: how well predictors name the experts of the coming layers."""

import dataclasses
import functools
import json
from collections.abc import Sequence

import jax
import numpy as np

from moe_edge.bench.cases import (
    AHEAD_LIMIT,
    LIMITS,
    Case,
    CaseSettings,
    Ready,
    prepare,
)
from moe_edge.bench.engines import Bench
from moe_edge.bench.offloading import studied
from moe_edge.bench.prompts import check_inputs
from moe_edge.bench.study import SPREAD, Claim, Findings, Study
from moe_edge.engine.generate import generate
from moe_edge.engine.layered import LayeredEngine
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.metrics.plots_panels import Panel, draw_panels
from moe_edge.metrics.results import metric
from moe_edge.papers.smoe.studies import fig14
from moe_edge.predict.accuracy import PredictionLog
from moe_edge.predict.device_scores import wanted_scores
from moe_edge.profile.run_profile import run_profile

TOP, CHOSEN = "predicted that are top-score", "predicted that are chosen"
UNDER_SMOE = "predicted that are top-score, under SMoE's routing"
FOUND = "top-score that were predicted"
PAPER = {TOP: 0.82, CHOSEN: 0.95}
MEASURES = {"recall": "chosen_LA", "precision": "predicted_LA"}  # share of hits in
SMOE, PROBE = "smoe_partial", "probe (ours)"
BASELINES = ("stale_gate", "previous", "frequency", "moe_infinity")
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

    device_memory: str = "25%"
    history: int = 16
    a: float = 0.2
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

    def share(self, whole: str, pick, top=False) -> tuple[float, float] | None:
        """Hits in `whole`, all rounds, and half the range of rounds; None in nothing.

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
        return float(sum(parts) / sum(wholes)), float(np.ptp(rounds)) / 2

    def by_layer(self, whole: str) -> list[float]:
        """Hits of every layer, one layer ahead; nan where nothing was predicted."""
        hits_L, whole_L, predicted_L = (
            sum(getattr(log, name)[:, 0] for log in self.logs)
            for name in ("hits_LA", whole, "predicted_LA")
        )
        share_L = hits_L / np.maximum(whole_L, 1)
        return np.where(predicted_L > 0, share_L, np.nan).tolist()


def run(settings: PredictorSettings) -> Findings:
    """Records what predictors say."""
    named = policies(settings, fit_probes(settings))
    cases = [
        Case(policy, settings.device_memory, batch, options)
        for batch in settings.batches
        for policy, options in named.items()
    ]
    is_same = []
    with Bench(settings.checkpoint) as bench:
        ready = prepare(bench, cases, settings)
        judged = [Judged(case) for case in cases]
        for prompts in ready.rounds:
            for one, engine in zip(judged, ready.engines, strict=True):
                rows = prompts[: one.case.batch]
                log, tokens = watch(bench, engine, rows, settings)
                one.logs.append(log)
                if one.case.is_exact:
                    run = generate(bench.resident, rows, settings.new_tokens)
                    is_same.append(run.tokens == tokens)
    return findings(bench.model, judged, ready, all(is_same), settings)


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


def shares_of(one: Judged, first_layer: int) -> dict[str, tuple[float, float]]:
    """By measure: share and half range of rounds, where there was anything to judge."""
    shares = {}
    for ahead in range(one.logs[0].rounds_LA.shape[1]):
        # Layers that a gate can predict within a token, for all predictors.
        pick = (slice(first_layer + ahead + 1, None), ahead)
        at = f"{ahead + 1} layers ahead" if ahead else "one layer ahead"
        shares[f"recall, {at}"] = one.share("chosen_LA", pick)
        shares[f"precision, {at}"] = one.share("predicted_LA", pick)
    later = slice(first_layer + 1, None)
    for name, whole in ((TOP, "predicted_LA"), (FOUND, "chosen_LA")):
        shares[name] = one.share(whole, later, top=True)
    return {name: pair for name, pair in shares.items() if pair is not None}


def findings(
    model: dict,
    judged: list[Judged],
    ready: Ready,
    is_same: bool,
    settings: PredictorSettings,
) -> Findings:
    """The entry from the logs."""
    rows, found, stored, lookups = [], {}, {}, {}
    for one in judged:
        policy, at = one.case.policy, f"batch {one.case.batch}"
        for name, (share, width) in shares_of(one, ready.first_layer).items():
            n, spread = len(one.logs), (SPREAD, width)
            rows.append(metric(policy, f"{name}, {at}", share, "1", n, spread))
            found[policy, one.case.batch, name] = share
        later = slice(ready.first_layer + 1, None)
        judged_in = sum(int(log.rounds_LA[later, 0].sum()) for log in one.logs)
        lookups[policy, one.case.batch] = judged_in
        rows.append(metric(policy, f"lookups judged, {at}", judged_in, "1"))
        stored[f"{policy}, {at}"] = {
            f"{measure}_by_layer": _plain(one.by_layer(whole))
            for measure, whole in MEASURES.items()
        }
    first = settings.batches[0]
    ours = {
        TOP: found.get((SMOE, first, TOP)),
        CHOSEN: found.get((SMOE, first, "precision, one layer ahead")),
        UNDER_SMOE: found.get((f"{SMOE} in smoe", first, TOP)),
    }
    top, chosen, under = map(_say, ours.values())
    recall = [
        f"{policy} {_say(found.get((policy, first, 'recall, one layer ahead')))} of "
        f"{lookups[policy, first]} lookups"
        for policy in (f"{SMOE}, all chosen", "stale_gate", "n_layer_gate", PROBE)
        if (policy, first, "recall, one layer ahead") in found
    ]
    return Findings(
        answer=f"At batch {first}, {under} of what SMoE's partial state predicts under "
        f"SMoE's own routing is top-score (paper: 82 %); under lossless routing {top}, "
        f"and {chosen} is chosen (paper: 95 %).",
        details=[f"Recall of all chosen, one layer ahead: {', '.join(recall)}."],
        model=model,
        workload=ready.workload(settings),
        metrics=rows,
        limits=[
            *LIMITS,
            "Shares are over the layers that routers can predict within a token: none "
            "predicts the next token's first layers.",
            AHEAD_LIMIT,
        ],
        kind="emulated",
        baselines=BASELINES,
        checks={"every lossless case gave the resident engine's tokens": is_same},
        ours=ours,
        plot=lambda path: plot(path, judged, first),
        summary={"smoe_partial": ours},
        files={"by_layer.json": json.dumps(stored, indent=1) + "\n"},
    )


def _say(share: float | None) -> str:
    return "nothing" if share is None else f"{100 * share:.0f} %"


def _plain(values: list[float]) -> list[float | None]:
    return [None if np.isnan(value) else round(value, 6) for value in values]


def plot(path, judged: list[Judged], batch: int) -> None:
    """Recall and precision by layer, one layer ahead."""
    shown, panels = [one for one in judged if one.case.batch == batch], []
    for measure, whole in MEASURES.items():
        series = {one.case.policy: one.by_layer(whole) for one in shown}
        layers = list(range(len(shown[0].logs[0].rounds_LA)))
        label = f"{measure}, one layer ahead"
        panels.append(Panel(measure, label, layers, series, x_label="layer"))
    draw_panels(path, panels, title=f"Predictions of coming experts, batch {batch}")


STUDY = Study(
    name="smoe_fig17",
    question="How well do predictors name the experts of the coming layers (SMoE "
    "fig. 17)?",
    settings=PredictorSettings,
    measure=run,
    check=check_inputs,
    claim=Claim(
        source="SMoE, section VI-C and fig. 17: accuracy of prefetching",
        paper=PAPER,
        why="The paper's 82 % and 95 % are of three large models, under SMoE's own "
        "routing. A partial state is the better the more of a layer is resident, and "
        "the default model has only six layers, whose states differ more than those of "
        "deep models.",
    ),
)
