"""The thread that brings blocks, and what it forgets."""

import threading

import numpy as np

from moe_edge.cluster.prism.block_loader import BlockLoader

WAIT_S = 300.0  # for what a loaded machine may take


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
    loader = BlockLoader(records, None, lambda *done: told.append(done), failed.append)
    loader.start()
    loader.bring(1, np.array([(0, 1, -1), (0, 2, -1)]))  # under way
    assert records.reading.wait(WAIT_S)
    loader.bring(2, np.array([(0, 3, -1)]))  # waits
    loader.forget()
    loader.bring(3, np.array([(0, 4, -1)]))
    records.may_read.set()
    loader.stop()
    loader.join(WAIT_S)
    assert records.put_cells == [(0, 4)] and not failed
    assert told == [(3, [[0, 4]])]
