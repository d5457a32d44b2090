"""Decode steps of how few rows take kernels that do what several launches do elsewhere; 0: none do.

Off until they have been timed on a GPU next to the launches that they replace
(`python -m tools.decode_steps MODEL --fewer-launches`), each by its own rows:

* ATTENTION_ROWS: norms and rotates heads, stores keys and values, attends and joins spans in one launch
  (kernels/attention/decode_whole.py), in place of two or, where contexts are cut, three.
* ROUTING_ROWS, 0 or 1: the product that norms its row and gives a router's logits also chooses experts
  (kernels/common/routed_row.py), in place of two.
* COUNTED_TOKENS: a launch that chooses experts counts their places (kernels/common/route_by_counting.py), as
  that of ROUTING_ROWS does: not fewer launches, but a shorter one.
"""

from __future__ import annotations

MOST_ROWS = 256  # that ATTENTION_ROWS may be
ATTENTION_ROWS = 0
ROUTING_ROWS = 0
COUNTED_TOKENS = 0
