"""Bytes of DeepEP's buffers, against the size hints of its documented interface."""

from __future__ import annotations

import pytest

from tests.moe.backends.deepep import deepep_on_cpu
from turnout.moe.backends.deepep.buffers import low_latency_size_hint, nvl_size_hint


@pytest.mark.parametrize(("tokens", "hidden", "experts"), [(128, 7168, 256), (1, 2048, 8), (1024, 4096, 130)])
def test_deepep_buffers_are_as_large_as_the_library_asks(tokens, hidden, experts):
    kind = deepep_on_cpu.Buffer
    assert low_latency_size_hint(tokens, hidden, experts) == kind.get_low_latency_rdma_size_hint(
        tokens, hidden, 8, experts
    )
    for count in (2, 4, 8):
        hint = kind.get_dispatch_config(count).get_nvl_buffer_size_hint(2 * hidden, count)
        assert nvl_size_hint(2 * hidden, count) == hint
