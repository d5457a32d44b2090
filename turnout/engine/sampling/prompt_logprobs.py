"""Log-probabilities of the tokens of a prompt, for requests that ask for them.

Legend: N tokens of a step, S rows scored at once, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from turnout.engine.sampling.sampler import Scores
from turnout.engine.scheduler.scheduler import Chunk, with_rows
from turnout.parallel.transfers import on_device

# Prompt tokens scored at once: bounds the float32 logits of a long chunk with a large vocabulary.
SCORED_ROWS = 128


def score_prompts(
    chunks: Sequence[Chunk], hidden_NH: Tensor, make_logits: Callable[[Tensor], Tensor]
) -> None:
    """Extend `prompt_logprobs` of requests that lack some, by the tokens that this step's rows predict.

    hidden_NH: final hidden states of the chunks' tokens. make_logits: [S, H] -> float32 [S, V].
    """
    for chunk, first_row in with_rows(chunks):
        request = chunk.request
        if not request.scores_missing:
            continue
        assert request.prompt_logprobs is not None
        # The row of token p predicts token p + 1; rows scored before a preemption are not scored again.
        start = max(chunk.start, len(request.prompt_logprobs) - 1)
        end = min(chunk.end, request.num_prompt - 1)
        for at in range(start, end, SCORED_ROWS):
            until = min(at + SCORED_ROWS, end)
            rows_SH = hidden_NH[first_row + at - chunk.start : first_row + until - chunk.start]
            scores_SV = torch.log_softmax(make_logits(rows_SH), dim=-1)
            ids_S = on_device(request.tokens[at + 1 : until + 1], torch.int64, scores_SV.device)
            counts = [request.sampling.prompt_logprobs or 0] * (until - at)
            request.prompt_logprobs += Scores(range(until - at), scores_SV, ids_S, counts).read()
