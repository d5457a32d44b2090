"""Run by test_delta_rule.py with TRITON_INTERPRET=1: steps and prompts of Gated DeltaNet; prints JSON."""

from __future__ import annotations

import json

from tests.kernels import interpreter
from tests.kernels.attention.delta_rule_cases import advanced, close

interpreter.prepare()
results = {
    "one": close(1),
    "several": close(5),
    "none": close(0),
    "four-value-heads": close(3, heads=(1, 4)),
    "odd-sizes": close(3, sizes=(24, 40), width=3),
    "shortest-window": close(2, width=2),
    "columns": close(1, columns=True, sizes=(16, 64)),
    "columns-parts": close(4, columns=True, parts=4, sizes=(16, 64), heads=(2, 4)),
    "columns-odd-sizes": close(3, columns=True, sizes=(24, 40), width=3, heads=(1, 3)),
    "prompt": advanced(150),
    "prompt-of-one": advanced(1),
    "prompt-of-two": advanced(2),
    "prompt-of-two-spans": advanced(1100, heads=(1, 1)),
    "prompt-odd-sizes": advanced(65, heads=(1, 3), sizes=(24, 40), width=3),
    "prompt-shortest-window": advanced(64, width=2),
    "prompt-alike": advanced(200, alike=True),
}
print(json.dumps(results))
