"""Which failures are worth another start of the ranks."""

from __future__ import annotations

import msgspec
import pytest

from turnout.config import ServerConfig
from turnout.engine.fork_server import ForkServer
from turnout.engine.messages import AddRequest, Ready
from turnout.engine.sampling_params import SamplingParams
from turnout.engine.worker import Start
from turnout.server.supervise.engine import MAX_FAILED_STARTS, EngineSupervisor
from turnout.server.supervise.ledger import EngineFailed
from turnout.server.supervise.local_ranks import LocalRanks

KILLED = EngineFailed("rank 1 was killed by SIGKILL")
RAISED = EngineFailed("rank 1: KeyError", spoken=True)
REFUSED = EngineFailed("rank 1: no such file", user_error=True, spoken=True)


@pytest.mark.parametrize(
    ("failure", "served", "failed_starts", "before", "final"),
    [
        (KILLED, True, 0, True, False),
        (RAISED, True, 0, True, False),
        (KILLED, False, 1, False, False),  # perhaps by mistake
        (RAISED, False, 1, False, True),  # it never worked
        (RAISED, False, 1, True, False),  # it worked before
        (REFUSED, False, 1, True, True),  # a file was taken away
        (KILLED, False, MAX_FAILED_STARTS - 1, True, False),
        (KILLED, False, MAX_FAILED_STARTS, True, True),
    ],
)
def test_what_ends_the_engine(
    failure: EngineFailed, served: bool, failed_starts: int, before: bool, final: bool
):
    engine = EngineSupervisor(ServerConfig())
    engine.ready = Ready(info={}, max_context=1, vocab_size=1) if before else None
    assert engine._is_final(failure, served, failed_starts) is final


def test_nothing_is_started_for_a_server_that_leaves():
    engine = EngineSupervisor(ServerConfig())
    engine.leave()
    assert engine._is_final(KILLED, True, 0)


def test_ranks_are_told_how_many_requests_wait_for_them():
    engine = EngineSupervisor(ServerConfig())
    for id in "abc":
        engine.ledger.add(AddRequest(id=id, prompt_ids=[1], sampling=SamplingParams()), lambda output: None)
    local = LocalRanks(engine.config, range(1), ForkServer())
    orders = local._orders(engine._rendezvous(2, local.folder), 0)
    local.remove_folder()
    assert msgspec.json.decode(orders, type=Start).waiting == 3


def test_before_the_first_start_nobody_is_served():
    engine = EngineSupervisor(ServerConfig(tp_size=2, dp_size=2, enable_dp_attention=True))
    assert not engine.serving
    assert [rank["state"] for rank in engine.describe_ranks()] == ["loading"] * 2
    assert [rank["dp_rank"] for rank in engine.describe_ranks()] == [0, 1]
