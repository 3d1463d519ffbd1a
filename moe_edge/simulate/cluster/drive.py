"""The hot loop of the simulator: four kinds of events, written out in one function.

A run has millions of them, and a call in Python costs as much as the arithmetic of an
event. So the queues of `links.Links` appear here once more, inlined: a job starts when
it is ready and its GPU or link is free, in the order of events. All other kinds of
events go to the handler that the loop has for them.
"""

from heapq import heappop, heappush

from moe_edge.core.checks import ConfigError
from moe_edge.simulate.cluster.links import CALL

LAYER, ROUTE, CALLED, COMPUTED, END, ARRIVE, ADMIT, AGAIN, *PARTS = range(12)
PERIOD, LANDED, SENDING, LOADED = PARTS  # of `migration` and `offload`


def drive(loop) -> None:
    """Runs a `loop.ClusterLoop` until no event is left.

    LAYER: the dense part of a layer is ready. ROUTE: it is computed, calls begin (a
    handler's where they are not planned ahead). CALLED: the message of call `item` of
    server `where` is at its GPU. COMPUTED: its blocks are computed, the results go
    back. END: the step is over.

    Raises:
      ConfigError: time ran backwards (a cost was negative or no number).
    """
    heap, links, spans = loop.heap, loop.links, loop.spans
    entries, came, servers = heap.entries, heap.came, loop.servers
    gpu_free, gpu_busy = links.gpu_free, links.gpu_busy
    link_free, link_busy, link_of = links.link_free, links.link_busy, links.link_of
    byte_s, late_s, sent = links.byte_s, links.late_s, links.sent[CALL]
    server_of, first_gpu = loop.server_of, loop.first_gpu
    N, L = len(servers), loop.pools.num_layers
    until_s, planned, handlers = spans.until_s, loop.planned, loop.handlers
    events, now_s = 0, heap.now_s
    while entries:
        time_s, _, kind, where, item = heappop(entries)
        if not time_s >= now_s:
            raise ConfigError(f"time ran backwards, from {now_s} s to {time_s} s")
        now_s = time_s
        events += 1
        if kind == CALLED or kind == LAYER:
            state = servers[where]
            if kind == LAYER:
                gpu, seconds, then = first_gpu[where], state.dense_s, ROUTE
            else:
                calls = state.calls
                gpu, seconds, then = calls.gpu[item], calls.seconds[item], COMPUTED
            free_s = gpu_free[gpu]
            start_s = time_s if time_s > free_s else free_s
            gpu_free[gpu] = end_s = start_s + seconds
            gpu_busy[gpu] += seconds
            if start_s < until_s:
                name = "dense" if kind == LAYER else "called"
                spans.add("gpu", gpu, name, start_s, seconds)
            heappush(entries, (end_s, next(came), then, where, item))
        elif kind == COMPUTED:
            state = servers[where]
            calls = state.calls
            pair = server_of[calls.gpu[item]] * N + where
            num_bytes = calls.back[item]
            seconds = num_bytes * byte_s[pair]
            link = link_of[pair]
            free_s = link_free[link]
            start_s = time_s if time_s > free_s else free_s
            link_free[link] = end_s = start_s + seconds
            link_busy[link] += seconds
            sent[pair] += num_bytes
            if start_s < until_s:
                spans.add("link", pair, CALL, start_s, seconds)
            end_s += late_s[pair]
            if end_s > state.end_s:
                state.end_s = end_s
            state.pending -= 1
            if not state.pending:
                state.layer = layer = state.layer + 1
                then = LAYER if layer < L else END
                heappush(entries, (state.end_s, next(came), then, where, 0))
        elif kind == ROUTE and planned:
            state = servers[where]
            calls, layer = state.calls, state.layer
            done_s, pending = time_s, 0
            for i in range(calls.offset[layer], calls.offset[layer + 1]):
                gpu = calls.gpu[i]
                other = server_of[gpu]
                if other == where:
                    seconds = calls.seconds[i]
                    free_s = gpu_free[gpu]
                    start_s = time_s if time_s > free_s else free_s
                    gpu_free[gpu] = end_s = start_s + seconds
                    gpu_busy[gpu] += seconds
                    if start_s < until_s:
                        spans.add("gpu", gpu, "experts", start_s, seconds)
                    if end_s > done_s:
                        done_s = end_s
                    continue
                pair = where * N + other
                num_bytes = calls.there[i]
                seconds = num_bytes * byte_s[pair]
                link = link_of[pair]
                free_s = link_free[link]
                start_s = time_s if time_s > free_s else free_s
                link_free[link] = end_s = start_s + seconds
                link_busy[link] += seconds
                sent[pair] += num_bytes
                if start_s < until_s:
                    spans.add("link", pair, CALL, start_s, seconds)
                end_s += late_s[pair]
                heappush(entries, (end_s, next(came), CALLED, where, i))
                pending += 1
            state.end_s, state.pending = done_s, pending
            if not pending:
                state.layer = layer = layer + 1
                then = LAYER if layer < L else END
                heappush(entries, (done_s, next(came), then, where, 0))
        else:
            heap.now_s = now_s
            handlers[kind](now_s, where, item)
    heap.now_s = now_s
    loop.events += events
