"""What hosts must have in common, and where they meet."""

from __future__ import annotations

import dataclasses

import pytest

from turnout.config import ServerConfig
from turnout.errors import UserError
from turnout.server.supervise import node_protocol

HEAD = ServerConfig(model="/models/demo", tp_size=2, nnodes=2, dist_init_addr="127.0.0.1:5000")
OTHER = dataclasses.replace(HEAD, node_rank=1)


def test_a_host_started_with_the_same_flags_is_welcome():
    own = {"model": "/elsewhere/demo", "num_threads": 3, "dist_init_addr": "localhost:5000", "port": 1}
    said = node_protocol.hello(dataclasses.replace(OTHER, **own))
    over_the_wire = node_protocol.to_head.decode(node_protocol.encoder.encode(said))
    assert over_the_wire == said
    assert node_protocol.objection(HEAD, said) is None


def test_every_difference_is_named():
    said = node_protocol.hello(dataclasses.replace(OTHER, ep_size=2, verify="quick"))
    reason = node_protocol.objection(HEAD, said)
    assert reason is not None
    assert "--ep-size is 1 at the head, 2 on node 1" in reason
    assert "--verify is 'off' at the head, 'quick' on node 1" in reason


def test_another_version_or_place():
    said = node_protocol.hello(OTHER)
    assert "node 1 0.0" in str(node_protocol.objection(HEAD, node_protocol.Hello("0.0", 1, said.config)))
    for node in (0, 2):
        assert "have 1 to 1" in str(
            node_protocol.objection(HEAD, node_protocol.Hello(said.version, node, said.config))
        )


@pytest.mark.parametrize("address", ["", "5000", "host:", ":5000", "host:port", "127.0.0.1:65533"])
def test_addresses_that_cannot_be(address: str):
    with pytest.raises(UserError, match="--dist-init-addr"):
        node_protocol.head_address(dataclasses.replace(HEAD, dist_init_addr=address))


def test_where_the_head_is():
    assert node_protocol.head_address(HEAD) == ("127.0.0.1", 5000)
    with pytest.raises(UserError, match="--dist-init-addr nowhere"):
        node_protocol.head_address(dataclasses.replace(HEAD, dist_init_addr="nowhere.invalid:5000"))
