"""Words shared by every folder: axis letters.

Axis letters (suffix of array names, in docstrings and einsum strings):
  B requests, S positions in the call, T = B * S tokens, M cached positions,
  V vocabulary, L layers, D model width, H query heads, G key/value heads,
  P width per head, E experts, U sub-experts per expert, F neurons of an expert,
  K chosen experts, R elements of one expert record, N servers.
"""
