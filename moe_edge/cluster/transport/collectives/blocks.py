"""Blocks of the transport `jax`: one process offers an array, the other pulls it.

A pull of what was never offered would hang, so an offer is always made first, by a
control message. A pull ends by no time of its own: each has a thread, which is left
behind if the peer is stopped.
"""

import concurrent.futures
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

import jax
import numpy as np
from jax.experimental import transfer
from jax.sharding import SingleDeviceSharding

from moe_edge.cluster.transport.base import PeerLost, Refused
from moe_edge.core.checks import ConfigError

SLICE_S = 0.02  # how often who waits for a pull looks whether the peer is lost


class Pulls:
    """Offers and pulls records.

    Args:
      host: where to listen; a free port.
      device: whose memory records pass through.
    """

    def __init__(self, host: str, device: jax.Device):
        self._device = device
        own = f"{host}:0"
        self._server = transfer.start_transfer_server(device.client, own, [own])
        self._sources: dict[str, transfer.TransferConnection] = {}
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)

    def offer(self, record: np.ndarray) -> dict:
        """Makes a record ready: the fields that another process pulls it by."""
        record_R = record.reshape(-1).view(np.uint8)
        number = next(self._numbers)
        self._server.await_pull(number, [jax.device_put(record_R, self._device)])
        address = self._server.address()
        return {"number": number, "bytes": record.nbytes, "address": address}

    def pull(
        self,
        peer: int,
        offer: dict,
        out: np.ndarray,
        until_s: float,
        check: Callable[[], None],
    ) -> None:
        """Copies an offered record into `out`.

        Args:
          until_s: by `time.monotonic`.
          check: raises PeerLost once the peer is lost.
        Raises:
          PeerLost, Refused.
        """
        if not out.flags.c_contiguous:
            raise ConfigError(
                f"out is {out.dtype}{list(out.shape)} with gaps, expected C-contiguous"
            )
        if offer["bytes"] != out.nbytes:
            raise Refused(
                peer,
                f"its record has {offer['bytes']} bytes, expected {out.nbytes}; give "
                "all the same checkpoint",
            )
        future: Future = Future()

        def run():
            try:
                future.set_result(self._pull(offer))
            except Exception as error:
                future.set_exception(error)

        threading.Thread(target=run, name="moe_edge-pull", daemon=True).start()
        while not concurrent.futures.wait([future], SLICE_S).done:
            check()
            if time.monotonic() > until_s:
                raise PeerLost(peer, "overdue")
        if (error := future.exception()) is not None:
            check()
            raise PeerLost(peer, "dead", f"broke off a block: {first_line(error)}")
        out.reshape(-1).view(np.uint8)[:] = future.result()

    def _pull(self, offer: dict) -> np.ndarray:
        address = offer["address"]
        with self._lock:
            source = self._sources.get(address)
            if source is None:
                source = self._sources[address] = self._server.connect(address)
        where = SingleDeviceSharding(self._device)
        wanted = jax.ShapeDtypeStruct((offer["bytes"],), np.uint8, sharding=where)
        return np.asarray(source.pull(offer["number"], [wanted])[0])


def first_line(error: BaseException) -> str:
    """An error of JAX in one line."""
    return (str(error).splitlines() or [type(error).__name__])[0]
