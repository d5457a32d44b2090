"""/start_profile and /stop_profile: what all ranks do in some steps, as one Chrome trace."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Literal

from pydantic import Field

from turnout.engine.messages import StartProfile
from turnout.server.api.body import Body

MAX_STEPS = 1000  # traces are held in memory; a step of a large model takes about a megabyte


class ProfileBody(Body):
    """num_steps: with a forward; recording ends after them, or with /stop_profile if that comes first."""

    num_steps: Annotated[int, Field(ge=1, le=MAX_STEPS)] = 20
    record_shapes: bool | None = None
    with_stack: bool | None = None
    activities: Annotated[list[Literal["CPU", "GPU"]], Field(min_length=2, max_length=2)] | None = None

    def command(self, began: float) -> StartProfile:
        """began: time.time(), from which times in the trace count."""
        return StartProfile(
            steps=self.num_steps,
            began=began,
            record_shapes=bool(self.record_shapes),
            with_stack=bool(self.with_stack),
        )


async def merged(traces: Sequence[bytes]) -> AsyncIterator[bytes]:
    """The JSON text of one trace, of each rank's compressed events."""
    yield b'{"displayTimeUnit": "ms", "traceEvents": [\n'
    between = b""
    for trace in filter(None, traces):
        events = await asyncio.to_thread(zlib.decompress, trace)
        yield between + events
        between = b",\n"
    yield b"\n]}\n"
