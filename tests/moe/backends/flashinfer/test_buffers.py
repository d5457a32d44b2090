"""Bytes of FlashInfer's all-to-all workspace, against what the library's own code answers."""

from __future__ import annotations

import pytest

from tests.moe.backends.flashinfer import flashinfer_on_cpu
from turnout.moe.backends.flashinfer.buffers import WorkspaceSizes, buffer_bytes
from turnout.moe.capabilities.rank_share import DispatchShare
from turnout.moe.spec import MoESpec, RankShape

# What `moe_a2a_get_aux_data_size` of FlashInfer 0.7.2, compiled, answers for (ranks, tokens).
BOOKKEEPING = {(2, 1): 640, (4, 64): 11648, (8, 1000): 176512, (33, 17): 3968, (64, 8192): 1442944}


@pytest.mark.parametrize(("ranks_count", "tokens"), BOOKKEEPING)
def test_a_one_sided_workspace_is_as_large_as_the_library_asks(ranks_count, tokens):
    sizes = WorkspaceSizes(ranks=ranks_count, capacity=tokens, sent=2 * 4096 + 64, returned=2 * 4096)
    assert sizes.bookkeeping == BOOKKEEPING[ranks_count, tokens]
    with flashinfer_on_cpu.installed():
        from flashinfer.comm.trtllm_moe_alltoall import moe_a2a_get_workspace_size_per_rank

        wanted = moe_a2a_get_workspace_size_per_rank(ranks_count, tokens, sizes.sent, sizes.returned)
    assert sizes.total_bytes == wanted
    spec = MoESpec(hidden_size=4096, intermediate_size=1024, num_experts=128, top_k=8)
    share = DispatchShare(
        shape=RankShape.of(spec, num_local_experts=8),
        layout="tokens",
        rows=ranks_count * tokens,
        wire_format="bf16",
        ranks=ranks_count,
    )
    assert buffer_bytes(share) == wanted
