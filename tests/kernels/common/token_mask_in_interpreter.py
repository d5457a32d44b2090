"""Run by test_token_mask.py with TRITON_INTERPRET=1: tokens forbidden by bits against a loop; prints JSON."""

from __future__ import annotations

import json
import random

import torch

from turnout.kernels.common.token_mask import forbid_tokens


def forbids(rows: int, vocabulary: int, words: int) -> bool:
    draw = random.Random(rows + vocabulary)
    allowed = [{t for t in range(vocabulary) if draw.random() < share} for share in [0.0, 1.0, 0.5][:rows]]
    packed = [[sum(1 << t % 32 for t in of if t // 32 == w) for w in range(words)] for of in allowed]
    signed = torch.tensor(packed, dtype=torch.int64).reshape(rows, words)
    logits = torch.randn(rows, vocabulary + 3)
    kept = logits.clone()
    forbid_tokens(
        logits[:, :vocabulary], (signed - (signed >= 2**31).long() * 2**32).to(torch.int32).contiguous()
    )
    wanted = [
        [kept[r, t].item() if t in of else float("-inf") for t in range(vocabulary)]
        for r, of in enumerate(allowed)
    ]
    return logits[:, :vocabulary].tolist() == wanted and torch.equal(
        logits[:, vocabulary:], kept[:, vocabulary:]
    )


print(
    json.dumps(
        {
            "even": forbids(3, 64, 2),
            "odd": forbids(3, 77, 3),
            "wide": forbids(2, 5000, 160),
            "none": forbids(0, 40, 2),
        }
    )
)
