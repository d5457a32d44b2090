"""Every kernel of the exchange that any numbers of tokens need is compiled before ranks serve: Triton's own
binder says which those are. Nothing is launched, so one process stands for each rank."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.bound import bound
from turnout.kernels.common import compilation
from turnout.kernels.nvlink.links import Links
from turnout.moe.backends.nvlink import buffers
from turnout.moe.backends.nvlink.all_to_all import NvlinkAllToAll, Region, Regions
from turnout.moe.backends.nvlink.warmup import compile_exchange, exchange
from turnout.vocabulary import Format

FEW, CAPACITY = buffers.FEW_TOKENS, 512
BF16 = torch.bfloat16
CPU = torch.device("cpu")


class Share:
    """Ranks that share requests."""

    def __init__(self, size: int, rank: int):
        self.size, self.rank = size, rank

    def all_gather(self, x: Tensor, shares: Sequence[int]) -> Tensor:
        return x


def all_to_all(ranks: int, sharing: int, hidden: int, top_k: int, wire: Format, back: Format) -> Any:
    """That of the last rank of `ranks`, over memory that no other rank has."""
    sizes = buffers.region_parts(
        hidden=hidden, top_k=top_k, ranks=ranks, capacity=CAPACITY, wire_formats=[wire],
        combine_format=back, itemsize=2,
    )  # fmt: skip
    starts = {name: sum(list(sizes.values())[:i]) for i, name in enumerate(sizes)}
    word, addresses = torch.zeros(2, dtype=torch.int64), torch.zeros(ranks, dtype=torch.int64)
    own_B = torch.empty(sum(sizes.values()), dtype=torch.uint8)
    memory = SimpleNamespace(size=ranks, own_B=own_B, check=lambda: None)
    region = Region(memory=memory, capacity=CAPACITY, starts=starts, epochs=word)
    links = Links(
        rank=ranks - 1, addresses=addresses, failed=word, told=word, epochs=word, starts=starts,
        rows=region.rows, few=region.few, hidden=hidden, top_k=top_k, experts_per_slice=16,
        expert_tp=1, limit_seconds=10.0,
    )  # fmt: skip
    made = NvlinkAllToAll.__new__(NvlinkAllToAll)
    made._format, made._combine_format, made._device, made._dtype = wire, back, CPU, BF16
    made._input_scale = torch.ones(3)[1] if wire == Format.NVFP4 else None  # of a stack of layers
    made._spec = SimpleNamespace(hidden_size=hidden, top_k=top_k)
    made._groups = SimpleNamespace(attention_tp=Share(sharing, sharing - 1))
    made._regions, made._links = Regions((region,)), [links]
    return made


@pytest.mark.parametrize(
    ("ranks", "sharing", "hidden", "top_k", "wire", "back"),
    [
        (2, 1, 2048, 8, Format.BF16, Format.BF16),
        (2, 2, 2048, 6, Format.NVFP4, Format.BF16),
        (4, 2, 5120, 6, Format.FP8, Format.FP8),
        (6, 1, 3072, 2, Format.BF16, Format.FP8),
    ],
)
def test_ranks_that_bring_different_numbers_of_tokens_need_nothing_new(
    ranks: int,
    sharing: int,
    hidden: int,
    top_k: int,
    wire: Format,
    back: Format,
    monkeypatch: pytest.MonkeyPatch,
):
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(compilation, "compiling", lambda threads: nullcontext())
    served = all_to_all(ranks, sharing, hidden, top_k, wire, back)
    links = served._links[0]
    with bound() as warmed:
        batches = compile_exchange(links, CAPACITY, BF16, wire, back, 1)
    assert len(batches) < 20
    with bound() as alike:  # what first prompts, as long on all ranks, launch
        for most in (1, 8, 32, 64, FEW, FEW + 1, CAPACITY):
            exchange(links, most, most, BF16, wire, back)
    assert warmed - alike
    needed = set()
    for most in (*range(1, sharing * FEW + 3), *range(sharing * FEW + 3, sharing * CAPACITY, 61)):
        for tokens in {0, 1, most // 2, FEW, FEW + 1, sharing * FEW + 1, most - 1, most}:
            if tokens <= most:
                with bound() as keys:
                    x_TH, ids_TK = torch.empty(tokens, hidden, dtype=BF16), torch.empty(tokens, top_k).int()
                    batch, sent = served.send(x_TH, ids_TK, torch.empty(tokens, top_k), (tokens, most))
                    served._regions.away.clear()
                    served.bring_back(torch.empty(len(batch.topk_ids), hidden, dtype=BF16), sent)
                assert keys <= warmed, f"{tokens} of {most} tokens need {[name for name, _ in keys - warmed]}"
                needed |= keys
    assert needed == warmed
