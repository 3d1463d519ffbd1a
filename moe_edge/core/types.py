"""Words shared by every folder: axis letters and the key of an expert block.

Axis letters (suffix of array names, in docstrings and einsum strings):
  B requests, S positions in the call, T = B * S tokens, M cached positions,
  V vocabulary, L layers, D model width, H query heads, G key/value heads,
  P width per head, E experts, U sub-experts per expert, F neurons of an expert,
  K chosen experts, R elements of one expert record, N servers.
"""

from typing import NamedTuple


class ExpertKey(NamedTuple):
    """Names one expert block: the unit of storage, transfer, slots and placement."""

    layer: int
    expert: int
    sub: int = 0
