"""Waiting where requests come at random: for links, and before a server is free."""

import numpy as np

VARIATION = 1.5  # E[S^2] / E[S]^2 of a request's seconds: lengths differ
FULL = 0.9  # utilisation above which waits are continued as a straight line


def link_delays(
    sent_NM: np.ndarray,
    rate_N: np.ndarray,
    served_N: np.ndarray,
    send_NM: np.ndarray,
    one_link: bool,
) -> np.ndarray:
    """float64 [N, M]: by how much calls from N to M last longer, as a share.

    While a request of server k is served (a share rate x served of the time), it takes
    a share b of a link, and everyone else's calls over that link last 1 / (1 - b) as
    long. Delays by several servers add up.

    Args:
      sent_NM: tokens that a request of N sends to M.
      rate_N: requests a second.
      served_N: seconds that a request is served, by itself.
      send_NM: seconds that a token occupies the link from N to M.
      one_link: whether all that a server sends leaves over one link.
    """

    def delay(link_s):
        """By server [N, ...], from the seconds that its request takes of a link."""
        share = link_s / np.maximum(served_N, 1e-9).reshape(
            -1, *[1] * (link_s.ndim - 1)
        )
        rate = rate_N.reshape(share.shape[:1] + (1,) * (share.ndim - 1))
        busy = np.minimum(rate * link_s, 1.0)
        return busy / (1 - np.minimum(share, FULL))

    there_NM = sent_NM * send_NM
    back_NM = delay(sent_NM * send_NM.T)  # of answers, on the link of M
    if one_link:
        answers_N = back_NM.sum(axis=0)
        others_NM = (
            answers_N[:, None] + delay(there_NM.sum(axis=1)) + answers_N - back_NM
        )
    else:
        others_NM = back_NM.T + delay(there_NM).T
    np.fill_diagonal(others_NM, 0.0)
    return others_NM


def sojourn(served_N: np.ndarray, rate_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of a request with the wait for those before it (M/G/1), and the slope.

    Args:
      served_N: seconds of service.
      rate_N: requests a second.
    """

    def total(seconds_N):
        free_N = 1 - np.minimum(rate_N * seconds_N, FULL)
        beyond_N = np.maximum(rate_N * seconds_N - FULL, 0.0)
        wait_N = rate_N * VARIATION * seconds_N**2 / 2 / free_N
        return seconds_N + wait_N * (1 + beyond_N / free_N)

    step_N = 1e-4 * np.maximum(served_N, 1e-9)
    return total(served_N), (total(served_N + step_N) - total(served_N)) / step_N
