"""The thread that brings blocks, and what it forgets."""

import threading

import numpy as np

from moe_edge.cluster.prism.bringer import Bringer

WAIT_S = 20.0


class Records:
    """Holdings that note what is put; reading waits for `read`."""

    record_size, dtype = 4, np.float32

    def __init__(self):
        self.blocks, self.put_cells = self, []
        self.reading, self.may_read = threading.Event(), threading.Event()

    def read(self, layer, block):
        self.reading.set()
        assert self.may_read.wait(WAIT_S)
        return np.zeros(4, np.float32)

    def put(self, layer, block, record_R):
        self.put_cells.append((layer, block))


def test_forgotten_orders_put_nothing_and_are_not_told():
    records, told, failed = Records(), [], []
    bringer = Bringer(records, None, lambda *done: told.append(done), failed.append)
    bringer.start()
    bringer.bring(1, np.array([(0, 1, -1), (0, 2, -1)]))  # under way
    assert records.reading.wait(WAIT_S)
    bringer.bring(2, np.array([(0, 3, -1)]))  # waits
    bringer.forget()
    bringer.bring(3, np.array([(0, 4, -1)]))
    records.may_read.set()
    bringer.stop()
    bringer.join(WAIT_S)
    assert records.put_cells == [(0, 4)] and not failed
    assert told == [(3, [[0, 4]])]
