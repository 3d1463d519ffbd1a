"""What table 2 measures: texts on live OD-MoE and on engines of this process."""

import functools
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from moe_edge.bench.cases import (
    count_history,
    linked,
    past_sequences,
    workload_of,
)
from moe_edge.bench.engines import Bench
from moe_edge.bench.live import kept_compiled
from moe_edge.bench.prompts import PromptPool, forced_pool
from moe_edge.bench.rounds import measure_rounds
from moe_edge.core.checks import RequestError
from moe_edge.engine.base import Engine
from moe_edge.engine.generate import generate, warm_up
from moe_edge.engine.layered import LayeredEngine
from moe_edge.evaluate.agreement import compare
from moe_edge.evaluate.stepwise import Forced, score_batches
from moe_edge.metrics.frames import Rows, counted, interval
from moe_edge.offload.link import EmulatedLink
from moe_edge.offload.slot_plan import static_hit_curves
from moe_edge.papers.od_moe.options import BALANCED
from moe_edge.papers.od_moe.studies.live import run_od_moe
from moe_edge.papers.od_moe.studies.table2 import (
    RESIDENT,
    SAME_PROCESSES,
    STAND_INS,
    Table2Settings,
    name_of,
    peers,
    pools_of,
)
from moe_edge.papers.od_moe.studies.table2_rows import (
    At,
    Text,
    by_role,
    roles,
    tell_bytes,
    tell_texts,
)

Round = Mapping[int, list[int]]  # prompt of each length


class Table2:
    """One study: prompts, engines and live runs over the same texts.

    Attributes:
      rounds: the prompts.
      expected: round's prompt -> what the resident engine says after it.
      bytes_per_s: of every link, once a live run has told it.
    """

    def __init__(self, bench: Bench, settings: Table2Settings):
        self.bench, self.settings = bench, settings
        self.bytes_per_s: float | None = None
        self.expected: dict[tuple[int, ...], list[int]] = {}
        pools = pools_of(settings, bench.tokenizer)
        chosen = {length: self._choose(pool) for length, pool in pools.items()}
        self.rounds: list[Round] = [
            {length: rows[number] for length, rows in chosen.items()}
            for number in range(settings.rounds)
        ]
        self.pool = next(iter(pools.values()))

    def _choose(self, pool: PromptPool) -> list[list[int]]:
        """Prompts that go on as long as is asked, and whose text has their tokens.

        Raises:
          RequestError: there are fewer than rounds.
        """
        bench, most = self.bench, max(self.settings.output_lengths)
        found: list[list[int]] = []
        for row in pool.rows[self.settings.history :]:
            if len(found) == self.settings.rounds:
                break
            if bench.tokenizer.encode(bench.tokenizer.decode(row)) != row:
                continue
            tokens = generate(bench.resident, [row], most).tokens[0]
            if not {*tokens[:-1]} & {*bench.config.eos_ids}:
                self.expected[tuple(row)] = tokens
                found.append(row)
        if len(found) < self.settings.rounds:
            raise RequestError(
                f"{len(found)} prompts of {len(pool.rows[0])} tokens go on for "
                f"{most} tokens, expected {self.settings.rounds}; ask for fewer "
                "rounds or tokens, or give other sources"
            )
        return found

    def live(self, departure: str, at: At, prompts: Round) -> dict:
        """The row of an OD-MoE run over one text."""
        settings, (length, new) = self.settings, at
        rate = BALANCED if self.bytes_per_s is None else str(self.bytes_per_s)
        return run_od_moe(
            [self.bench.tokenizer.decode(prompts[length])],
            checkpoint=settings.checkpoint,
            max_new_tokens=new,
            workers=settings.workers,
            groups=settings.groups,
            shadow=settings.shadow,
            departure=departure,
            load_bytes_per_s=rate,
        )

    def first_runs(self) -> dict[str, dict]:
        """A row of each departure: the first measures the rate of every link."""
        rows = {}
        for departure in self.settings.departures:
            rows[departure] = self.live(departure, self.settings.at[0], self.rounds[0])
            if self.bytes_per_s is None:
                self.bytes_per_s = rows[departure]["load_bytes_per_s"]
        return rows

    def live_texts(self, departure: str, at: At, prompts: Round) -> tuple[Text, Text]:
        """OD-MoE's text, and that of the same processes with all experts."""
        row = self.live(departure, at, prompts)
        told(name_of(departure), at, row["decode_tokens_per_s"])
        return tuple(
            Text(row[f"{kind}ttft_s"], 1 / row[f"{kind}{rate}"], row["same_tokens"])
            for kind, rate in (
                ("", "decode_tokens_per_s"),
                ("resident_", "tokens_per_s"),
            )
        )

    def text(self, name: str, engine: Engine, at: At, prompts: Round) -> Text:
        """A text of an engine of this process."""
        length, new = at
        done = generate(engine, [prompts[length]], new)
        told(name, at, done.steps / done.decode_s)
        same = done.tokens[0] == self.expected[tuple(prompts[length])][:new]
        return Text(done.ttft_s, done.decode_s / done.steps, same)

    def warm(self, engines: Mapping[str, Engine]) -> None:
        """Compiles all that the rounds run here."""
        for engine in engines.values():
            for length, new in self.settings.at:
                warm_up(engine, [self.rounds[0][length]], new)

    def engines(self, total_bytes: int) -> dict[str, LayeredEngine]:
        """The peers, each with so many bytes for dense weights and slots."""
        bench, settings = self.bench, self.settings
        config = bench.config
        history = past_sequences(bench, settings)
        counts_LE = count_history(history, config.num_layers, config.moe.num_experts)
        curves = static_hit_curves(counts_LE[list(config.moe_layers)])
        slots = (total_bytes - bench.weights.num_bytes) / self.experts_bytes
        budget = f"{min(max(100 * slots, 0.0), 100.0):.4f}%"
        link = EmulatedLink(self.bytes_per_s)
        options = peers(curves, config.moe.top_k, settings.drop_threshold)
        found = {}
        for name, one in options.items():
            found[name] = bench.engine(linked(one, budget, link))
            found[name].predictor_run.learn(history)
        return found

    @property
    def experts_bytes(self) -> int:
        """Of all routed experts."""
        config, store = self.bench.config, self.bench.store
        blocks = len(config.moe_layers) * config.moe.num_experts
        return blocks * store.block_bytes

    def fidelity(self, engines: Mapping[str, LayeredEngine], rows: Rows) -> None:
        """Adds what lossy engines say of a text, and the perplexity of all others.

        Lossless engines give the resident engine's tokens, which every text checks.
        """
        settings, bench = self.settings, self.bench
        pool = forced_pool(settings, bench.tokenizer, settings.fidelity_rows)
        texts = [Forced(ids, settings.prompt_tokens) for ids in pool.rows]
        own = score_batches(bench.resident, texts, 1)
        for name, engine in engines.items():
            if engine.lossless:
                continue
            engine.reset_records()
            one = compare(score_batches(engine, texts, 1), own)
            report, n = engine.report(), one.tokens
            dropped = report["rerouted"] / report["choices"]
            rows(
                "fidelity",
                name,
                perplexity=counted(one.perplexity, n),
                dropped=counted(dropped, n),
                ratio=interval(one.perplexity_ratio, one.ratio_interval95, n),
                agreement=interval(one.agreement, one.agreement_interval95, n),
            )
        lossless = [name for name, engine in engines.items() if engine.lossless]
        own_names = map(name_of, settings.departures)
        for name in (RESIDENT, *own_names, SAME_PROCESSES, *lossless):
            rows("fidelity", name, perplexity=compare(own, own).perplexity)


def told(name: str, at: At, tokens_per_s: float) -> None:
    """A line a text, so that a run shows how far it is."""
    print(f"{at[0]} in, {at[1]} out, {name}: {tokens_per_s:.1f} tokens/s", flush=True)


def measure(settings: Table2Settings, rows: Rows) -> None:
    """All systems in every round."""
    with (
        tempfile.TemporaryDirectory() as folder,
        kept_compiled(Path(folder)),
        Bench(settings.checkpoint) as bench,
    ):
        table = Table2(bench, settings)
        first = table.first_runs()
        held = {
            name_of(departure): by_role(row["device_bytes"])
            for departure, row in first.items()
        }
        engines = table.engines(max(sum(one.values()) for one in held.values()))
        here = {RESIDENT: bench.resident, **engines}
        table.warm(here)
        measured = measure_texts(table, here)
        tell_texts(rows, texts_by_system(measured, settings.departures))
        dense_bytes, block_bytes = bench.weights.num_bytes, bench.store.block_bytes
        held |= {RESIDENT: roles(dense_bytes, 0, table.experts_bytes)}
        for name, engine in engines.items():
            slots_bytes = engine.cache.spec.num_slots * block_bytes
            held[name] = roles(dense_bytes, 0, slots_bytes)
        shares = {
            name_of(departure): row["expert_bytes_share"]
            for departure, row in first.items()
        }
        tell_bytes(rows, held, shares)
        table.fidelity(engines, rows)
        rows.checks |= measured.checks()
        link = EmulatedLink(table.bytes_per_s).describe()
        workload = workload_of(settings, table.pool) | {"link": link}
    rows.about |= {"model": bench.model, "workload": workload, "kind": "emulated"}
    rows.about["baselines"] = [RESIDENT, *STAND_INS]


def measure_texts(table: Table2, here: Mapping[str, Engine]):
    """The rounds: every system in every setting."""
    cases = {}
    for at in table.settings.at:
        for name, engine in here.items():
            cases[name, at] = functools.partial(table.text, name, engine, at)
        for departure in table.settings.departures:
            live = functools.partial(table.live_texts, departure, at)
            cases[name_of(departure), at] = live
    return measure_rounds(cases, table.rounds, num_compiled=table.bench.num_compiled)


def texts_by_system(measured, departures: Sequence[str]) -> dict:
    """Texts by system and setting: live runs give two systems, each behind the last."""
    texts: dict[tuple[str, At], list[Text]] = {}
    first = name_of(departures[0])
    for (system, at), found in measured.figures.items():
        if not isinstance(found[0], tuple):
            texts[system, at] = found
            continue
        own, resident = zip(*found, strict=True)
        texts[system, at] = list(own)
        if system == first:
            texts[SAME_PROCESSES, at] = list(resident)
    order = [RESIDENT, *map(name_of, departures), SAME_PROCESSES, *STAND_INS]
    return dict(sorted(texts.items(), key=lambda item: order.index(item[0][0])))
