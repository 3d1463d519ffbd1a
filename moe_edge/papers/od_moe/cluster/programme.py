"""What the scheduler does in a run of OD-MoE: two passes over the same requests.

First with all blocks at the workers and without the shadow ("resident": the same
processes and messages, nothing is loaded), then as OD-MoE does. The first pass also
says how long a load may last without a stall (`groups.longest_load_s`).
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moe_edge.cluster.node.membership import Reception
from moe_edge.cluster.roles import FIRST, MAIN, SHADOW
from moe_edge.cluster.scheduler.programme import Programme, served_rows
from moe_edge.cluster.scheduler.requests import Failure, NobodyLeft
from moe_edge.cluster.scheduler.scheduler import NOTES_S, Scheduler
from moe_edge.cluster.scheduler.serving import Serving
from moe_edge.cluster.transport.messages.transport import Transport
from moe_edge.core.checks import ConfigError
from moe_edge.core.files import write_json
from moe_edge.engine.session import plan_chunks
from moe_edge.engine.sizes import capacity_for
from moe_edge.papers.od_moe.cluster.groups import longest_load_s, slots_of
from moe_edge.papers.od_moe.cluster.passes import Helpers, Pass
from moe_edge.papers.od_moe.cluster.timing import Timing
from moe_edge.papers.od_moe.options import BALANCED, OdMoeOptions
from moe_edge.papers.od_moe.shadow.recall import count_correct, recall, recall_by_index
from moe_edge.workload.cluster_run import method_file, write_requests

READY_S = 300.0


class OdProgramme(Programme):
    """One run of OD-MoE.

    Attributes:
      scheduler: talks to main, shadow and workers.
    """

    options: OdMoeOptions

    def __init__(
        self,
        options: OdMoeOptions,
        transport: Transport,
        reception: Reception,
        folder: Path,
    ):
        super().__init__(options, folder)
        where = transport, reception, options.processes - 1
        self.scheduler = Scheduler(*where, hung_s=options.hung_s)

    @property
    def _slots(self) -> int:
        """Of each worker, for its share of a layer."""
        options = self.options
        return slots_of(self.config.moe.top_k, options.workers, options.groups)

    @property
    def _workers(self) -> list[int]:
        """Their numbers among the scheduler's servers."""
        return list(range(2, 2 + self.options.workers))

    def run(self, members: dict[int, dict]) -> None:
        """Both passes, and all files."""
        self._warm_up()
        resident = self._serve(resident=True)
        _show("resident", resident)
        times = self._times(resident)
        rate = self._rate(times)
        done = self._serve(resident=False, bytes_per_s=rate)
        _show("od_moe", done)
        row = self._row(resident, done, times, rate)
        _show_recall(row)
        self._write(resident, done, row)

    def _warm_up(self) -> None:
        sizes, buckets = set(), set()
        for one in self.wanted.asked:
            length, new = len(one.prompt), one.max_new_tokens
            sizes.add((length, new))
            capacity = capacity_for(length + new)
            buckets |= {size for _, size in plan_chunks(length, capacity)}
        self.warm_up(sizes=sizes, buckets=buckets)

    def _times(self, resident: Pass) -> dict:
        """t_main, t_worker, t_maxload; seconds. None where nothing was decoded."""
        names = "t_main_s", "t_message_s", "t_worker_s", "t_maxload_s"
        main_s = resident.facts(MAIN - 1).get("t_main_s")
        worker_s = _mean([resident.facts(w).get("t_worker_s") for w in self._workers])
        if main_s is None or worker_s is None:
            return dict.fromkeys(names)
        # Messages are the main node's: what it waits and no worker computes.
        message_s = max(resident.facts(MAIN - 1)["t_wait_s"] - worker_s, 0.0)
        most_s = longest_load_s(main_s + message_s, worker_s, self.options.groups)
        return dict(zip(names, (main_s, message_s, worker_s, most_s), strict=True))

    def _rate(self, times: dict) -> float | None:
        """Bytes a second of each worker's link."""
        given = self.options.load_bytes_per_s
        if given != BALANCED:
            return float(given)
        if times["t_maxload_s"] is None:
            raise ConfigError(
                f"--load_bytes_per_s {BALANCED} goes by the time of decode steps, but "
                "no request had any; ask for 2 or more --max_new_tokens, or give a "
                "number"
            )
        return self._slots * self.block_bytes / times["t_maxload_s"]

    def _serve(self, resident: bool, bytes_per_s: float | None = None) -> Pass:
        """All requests, one after another at the main node."""
        scheduler, options = self.scheduler, self.options
        fields = {
            "resident": resident,
            "shadow": not resident and options.shadow != "none",
            "bytes_per_s": bytes_per_s,
            "number": (number := scheduler.new_number()),
        }
        scheduler.tell_all("prepare", fields)
        scheduler.wait_for_all("ready", READY_S, number=number)
        drill = None if resident else options.drill_plan
        serving = Serving(scheduler, Helpers(scheduler), self.fresh(), drill)
        serving.run()
        scheduler.tell_all("finish")
        scheduler.wait_for_all("finished", READY_S)
        if not resident:  # no pass follows that would begin with them
            lost = scheduler.lost_between
            serving.failures += [Failure(*each, serving.now_s) for each in lost]
        notes, missing = scheduler.notes()
        for who, some in ("main node", [MAIN - FIRST]), ("worker", self._workers):
            if notes.keys().isdisjoint(some):
                name = "resident" if resident else "od_moe"
                raise NobodyLeft(
                    f"no {who} gave notes of the {name} pass, expected within "
                    f"{NOTES_S:g} s: nothing can be counted; see the logs"
                )
        came = serving.asked, serving.failures, serving.begun_s
        return Pass(*came, notes, missing)

    def _row(self, resident: Pass, done: Pass, times: dict, rate) -> dict:
        actual, predicted, index = self._predictions(done)[1:]
        workers = [done.facts(w) for w in self._workers]
        loads = [w["block_load_s"] for w in workers if w.get("block_load_s")]
        shadow, main = done.facts(SHADOW - 1), done.facts(MAIN - 1)
        slot_bytes = sum(w.get("slot_bytes", 0) for w in workers)
        held = slot_bytes + shadow.get("expert_bytes", 0)
        config = self.config
        whole = len(config.moe_layers) * config.moe.num_experts * self.block_bytes
        device_bytes = {
            "main": main.get("weight_bytes"),
            "shadow": shadow.get("weight_bytes"),
            **{f"worker{i}": w.get("slot_bytes") for i, w in enumerate(workers)},
        }
        by_index = recall_by_index(index, actual, predicted)
        return {
            "recall": _finite(recall(actual, predicted)),
            "recall_by_index": [_finite(round(value, 4)) for value in by_index],
            "decode_tokens_per_s": done.decode_tokens_per_s,
            "resident_tokens_per_s": resident.decode_tokens_per_s,
            "ttft_s": done.ttft_s,
            "resident_ttft_s": resident.ttft_s,
            "reloads": sum(w.get("reloads", 0) for w in workers),
            "stall_s": self._stall_s(done),
            "restarts": shadow.get("restarts", 0),
            **times,
            "t_shadow_s": shadow.get("t_shadow_s"),
            "t_load_s": float(np.mean(loads)) * self._slots if loads else None,
            "load_bytes_per_s": rate,
            "device_bytes": device_bytes,
            "expert_bytes_share": held / whole,
            "loading": {
                "t_main_s": main.get("t_main_s"),
                "t_wait_s": main.get("t_wait_s"),
                "t_worker_s": _mean([w.get("t_worker_s") for w in workers]),
            },
            "modelled_tokens_per_s": self._modelled(
                times, shadow.get("t_shadow_s"), loads, actual, predicted
            ),
            "compiled_after_warmup": sum(
                facts.get("compiled", 0) for facts in (main, shadow, *workers)
            ),
        }

    def _modelled(self, times, shadow_s, loads, actual, predicted) -> float | None:
        """What the timing model says of the same times, without lost processes."""
        options, config = self.options, self.config
        if times["t_main_s"] is None or not loads or not len(actual):
            return None
        steps = len(actual) / sum(one.max_new_tokens > 1 for one in self.wanted.asked)
        missed_NL = count_correct(actual, predicted) < config.moe.top_k
        named = options.shadow != "none"
        timing = Timing(
            layers=len(config.moe_layers),
            main_s=times["t_main_s"] + times["t_message_s"],
            worker_s=times["t_worker_s"],
            load_s=float(np.mean(loads)) * self._slots,
            shadow_s=(shadow_s or 0.0) if named else None,
            groups=options.groups,
            worker_layers=options.worker_layers,
            departure=options.departure,
            token_period=options.token_period,
            kv_period=options.kv_period,
            missed_ratio=float(missed_NL.mean()) if named else 0.0,
            reload_s=float(np.mean(loads)),
        )
        return 1 / timing.token_s(max(round(steps), 1))

    def _stall_s(self, done: Pass) -> float:
        """How long decode steps waited for blocks: a layer for its last worker."""
        longest_s: dict[float, float] = {}
        for worker in self._workers:
            if worker in done.notes:
                for count, wait_s in done.notes[worker][1]["waits"].tolist():
                    longest_s[count] = max(longest_s.get(count, 0.0), wait_s)
        return sum(longest_s.values())

    def _predictions(self, done: Pass):
        """request [N], actual, predicted [N, L, K], index [N]; a row a decode step."""
        config = self.config
        place = {layer: i for i, layer in enumerate(config.moe_layers)}
        K, rows = config.moe.top_k, {}
        _, arrays = done.notes[MAIN - FIRST]
        for request, index, layer, *experts in arrays["decoded"].tolist():
            step_LX = rows.setdefault(
                (request, index), np.full((len(place), 2 * K), -1)
            )
            step_LX[place[layer]] = experts
        keys = sorted(rows)
        rows_NLX = np.array([rows[key] for key in keys], np.int32)
        rows_NLX = rows_NLX.reshape(len(keys), len(place), 2 * K)
        request_N, index_N = np.array(keys, np.int32).reshape(-1, 2).T
        return request_N, rows_NLX[..., :K], rows_NLX[..., K:], index_N

    def _write(self, resident: Pass, done: Pass, row: dict) -> None:
        folder, options = self.folder, self.options
        request_N, actual, predicted, index = self._predictions(done)
        np.savez_compressed(
            folder / "predictions.npz",
            request=request_N,
            index=index,
            actual_NLK=actual,
            predicted_NLK=predicted,
        )
        rows = served_rows(done.asked)
        write_requests(folder / method_file("requests", "od_moe"), rows)
        self.write_texts(done.asked)
        failures = [
            {"pass": name} | dataclasses.asdict(failure)
            for name, one in (("resident", resident), ("od_moe", done))
            for failure in one.failures
        ]
        both = zip(resident.asked, done.asked, strict=True)
        write_json(
            folder / "cluster.json",
            {
                "mode": options.mode,
                "options": dataclasses.asdict(options),
                "row": row
                | {
                    "failures": failures,
                    "bad_pairs": self.scheduler.accusations.found_bad,
                    "lost_requests": sum(not one.done for one in done.asked),
                    "same_tokens": all(a.tokens == b.tokens for a, b in both),
                },
            },
        )


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def _show(name: str, one: Pass) -> None:
    """A line of a pass."""
    rate = one.decode_tokens_per_s
    print(f"{name}: " + ("nothing decoded" if rate is None else f"{rate:.1f} tokens/s"))


def _show_recall(row: Mapping[str, Any]) -> None:
    """How many experts were predicted, in a line; all of it is in predictions.npz."""
    by_index = [value for value in row["recall_by_index"] if value is not None]
    if row["recall"] is not None and by_index:
        print(
            f"the shadow named {100 * row['recall']:.1f} % of the experts that were "
            f"used: {100 * by_index[0]:.1f} % in the first decode step, "
            f"{100 * by_index[-1]:.1f} % in the last of {len(by_index)}"
        )


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
