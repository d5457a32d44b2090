"""Which tokens grammars permit in the rows of a step, found while its forward runs.

Legend: S rows sampled, V vocabulary, W words of 32 tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher
from numpy.typing import NDArray
from torch import Tensor

from turnout.engine.scheduler.request import Request
from turnout.parallel.transfers import send

Row = tuple[Request, Sequence[int]]  # a request, and the drafts that follow its tokens: as many rows and one
THREADS_WITH_GPU = 4  # of the forward on a CPU, they would take its cores


class TokenMaskFiller:
    """`begin` before the forward, `finish` after it."""

    def __init__(self, vocab_size: int, device: torch.device):
        self._words = -(-vocab_size // 32)
        self._device = device
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="token-masks")
        self._filling: Future[NDArray[np.int32]] | None = None
        self._executor = LLExecutor(num_threads=1 if device.type == "cpu" else THREADS_WITH_GPU)

    def begin(self, rows: Sequence[Row]) -> None:
        """For these rows of a step, in their order. Their requests must not change before `finish`."""
        if any(request.matcher is not None for request, _ in rows):
            self._filling = self._thread.submit(self._fill, list(rows))

    def finish(self) -> Tensor | None:
        """int32 [S, W] on the device: bit t % 32 of word t // 32 says whether token t may follow. None if
        every token may, in every row."""
        if self._filling is None:
            return None
        allowed_SW, self._filling = torch.from_numpy(self._filling.result()), None
        return send(allowed_SW, self._device)

    def _fill(self, rows: Iterable[Row]) -> NDArray[np.int32]:
        single: list[tuple[LLMatcher, int]] = []
        drafted: list[tuple[LLMatcher, int, list[int]]] = []
        start = 0
        for request, drafts in rows:
            if request.matcher is not None:
                matcher = request.matcher.advance(request.tokens, request.num_prompt)
                if matcher is not None and drafts:
                    drafted.append((matcher, start, list(drafts)))
                elif matcher is not None:
                    single.append((matcher, start))
            start += len(drafts) + 1
        # Rows without a grammar, and those after a draft that ends one, are left as they are.
        allowed_SW = np.full((start, self._words), -1, dtype=np.int32)
        place = allowed_SW.ctypes.data, self._words * 4, start
        if single:
            self._executor.unsafe_compute_mask_ptr(single, *place)
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *place)
        return allowed_SW


def forbid(logits_SV: Tensor, allowed_SW: Tensor) -> None:
    """-inf, in place, for tokens whose bit in `allowed_SW` is 0 (see `TokenMaskFiller.finish`)."""
    if logits_SV.is_cuda:
        from turnout.kernels.common.token_mask import forbid_tokens

        forbid_tokens(logits_SV, allowed_SW)
        return
    bits_SV = np.unpackbits(
        allowed_SW.numpy().view(np.uint8), axis=1, count=logits_SV.shape[1], bitorder="little"
    )
    logits_SV.masked_fill_(torch.from_numpy(bits_SV) == 0, float("-inf"))
