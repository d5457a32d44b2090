"""The other hosts as the head sees them: who has come, and the ranks there.

Each runs an agent (node_agent.py), which connects to the head, starts its ranks when told to and says what
becomes of them. A connection that ends takes the agent's ranks with it, on both sides.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from turnout.config import ServerConfig
from turnout.errors import UserError
from turnout.parallel.health import Reading
from turnout.server.supervise import node_protocol
from turnout.server.supervise.local_ranks import GONE_SECONDS, OnExit, Rendezvous

HELLO_SECONDS = 10.0
FAREWELL_SECONDS = 1.0

log = logging.getLogger("turnout.server")


class AgentConnection:
    """One agent's connection, for as long as it lasts."""

    def __init__(self, node: int, where: str, writer: asyncio.StreamWriter):
        self.node = node
        self.where = where
        self.ranks: RemoteRanks | None = None  # of the present life
        self.lost: str | None = None  # why it is no more
        self._writer = writer

    def send(self, message: node_protocol.ToAgent) -> None:
        node_protocol.send(self._writer, message)

    def hear(self, message: node_protocol.ToHead) -> None:
        if isinstance(message, node_protocol.Leaving):
            self.lose("was told to stop")
        elif self.ranks and not isinstance(message, node_protocol.Hello):
            self.ranks.hear(message)

    def lose(self, why: str) -> None:
        """Its ranks are gone, or will be as soon as the agent notices."""
        if self.lost is None:
            self.lost = why
            if self.ranks:
                self.ranks.lose(f"is lost: the agent of node {self.node} ({self.where}) {why}")


class Hosts:
    """Waits for the agents of all other hosts at --dist-init-addr. With one host there are none."""

    def __init__(self, config: ServerConfig):
        self._config = config
        self._agents: dict[int, AgentConnection] = {}
        self._changed = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._refused = ""

    async def open(self) -> None:
        """Let agents come. Raises UserError if the address cannot be had."""
        if self._config.nnodes == 1:
            return
        host, port = node_protocol.head_address(self._config)
        try:
            self._server = await asyncio.start_server(self._accept, host, port)
        except OSError as error:
            raise UserError(
                f"--dist-init-addr {self._config.dist_init_addr}: cannot listen there: {error.strerror}; "
                "give an address of node 0, and a port that is free with the "
                f"{node_protocol.PORTS - 1} after it"
            ) from None

    async def all_here(self) -> list[AgentConnection]:
        """The agents of the other hosts, in their order, once all have come. Raises UserError in the end."""
        seconds = self._config.startup_timeout
        try:
            async with asyncio.timeout(seconds):
                while absent := self._absent():
                    log.info("waiting for the agents of nodes %s", absent)
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            why = f" (refused: {self._refused})" if self._refused else ""
            raise UserError(
                f"nodes {self._absent()} did not come within --startup-timeout {seconds:g} s{why}; start "
                "`turnout serve` there with the same flags and their --node-rank"
            ) from None
        return [self._agents[node] for node in range(1, self._config.nnodes)]

    async def close(self, reason: str | None) -> None:
        """Send all agents home."""
        for agent in self._agents.values():
            agent.send(node_protocol.Leave(reason))
        if self._server:
            self._server.close()
        if self._connections:  # they end as the agents hang up
            _, left = await asyncio.wait(self._connections, timeout=FAREWELL_SECONDS)
            for connection in left:
                connection.cancel()

    def _absent(self) -> list[int]:
        return [node for node in range(1, self._config.nnodes) if node not in self._agents]

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.current_task()
        assert connection is not None
        self._connections.add(connection)
        agent = None
        why = "closed its connection"
        try:
            node_protocol.keep_alive(writer)
            agent = await asyncio.wait_for(self._greet(reader, writer), HELLO_SECONDS)
            while agent and (line := await reader.readline()):
                agent.hear(node_protocol.to_head.decode(line))
        except (OSError, TimeoutError) as error:
            why = f"cannot be reached any more ({error.strerror or error})"
        except (msgspec.MsgspecError, ValueError):
            log.warning("something that is no agent connected to --dist-init-addr")
        finally:
            self._connections.discard(connection)
            writer.close()
            if agent:
                self._agents.pop(agent.node, None)
                agent.lose(why)
                self._changed.set()

    async def _greet(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> AgentConnection | None:
        said = node_protocol.to_head.decode(await reader.readline())
        if not isinstance(said, node_protocol.Hello):
            return None
        where = writer.get_extra_info("peername")[0]
        if reason := node_protocol.objection(self._config, said):
            log.error("refused the agent at %s: %s", where, reason)
            self._refused = reason
            node_protocol.send(writer, node_protocol.Refused(reason))
            return None
        if said.node_rank in self._agents:
            node_protocol.send(writer, node_protocol.Later(f"node {said.node_rank} has an agent already"))
            return None
        log.info("node %d (%s) has come", said.node_rank, where)
        agent = self._agents[said.node_rank] = AgentConnection(said.node_rank, where, writer)
        agent.send(node_protocol.Welcome())
        self._changed.set()
        return agent


class RemoteRanks:
    """A `ranks.Host`: that of an agent."""

    def __init__(self, config: ServerConfig, agent: AgentConnection):
        per_node = config.tp_size // config.nnodes
        self.ranks = range(agent.node * per_node, (agent.node + 1) * per_node)
        self.where = f"{agent.where} (node {agent.node})"
        self._agent = agent
        self._number = 0
        self._pids: dict[int, int] = {}
        self._readings: dict[int, Reading] = {}
        self._gone = asyncio.Event()
        self._on_exit: OnExit = _ignore

    async def start(self, rendezvous: Rendezvous, on_exit: OnExit) -> None:
        self._number, self._on_exit = rendezvous.number, on_exit
        self._agent.ranks = self
        if self._agent.lost:  # since it came
            self.lose(f"is lost: the agent of node {self._agent.node} {self._agent.lost}")
        self._agent.send(node_protocol.Start(rendezvous))

    def kill(self) -> None:
        self._agent.send(node_protocol.Stop(self._number))

    async def gone(self) -> None:
        if not self._number:  # never started
            return
        try:
            async with asyncio.timeout(GONE_SECONDS):
                await self._gone.wait()
        except TimeoutError:
            log.error("node %d does not say that its ranks have ended", self._agent.node)
        self._agent.ranks = None

    def readings(self) -> dict[int, Reading]:
        return self._readings

    def pid(self, rank: int) -> int | None:
        return self._pids.get(rank)

    def hear(
        self,
        message: node_protocol.Started | node_protocol.Exited | node_protocol.Gone | node_protocol.Readings,
    ) -> None:
        if message.number != self._number:  # of an earlier life
            return
        if isinstance(message, node_protocol.Started):
            self._pids = message.pids
        elif isinstance(message, node_protocol.Readings):
            self._readings = message.readings
        elif isinstance(message, node_protocol.Exited):
            self._on_exit(message.rank, message.how, message.by_signal)
        else:
            self._gone.set()

    def lose(self, how: str) -> None:
        for rank in self.ranks:
            self._on_exit(rank, how, True)
        self._gone.set()


def _ignore(rank: int, how: str, by_signal: bool) -> None:
    pass
