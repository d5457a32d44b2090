"""What the routes need that tell of a server, or change it, as a whole."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from turnout import __version__
from turnout.server.api.errors import ApiError, unavailable
from turnout.server.api.profiling import ProfileBody, merged
from turnout.server.api.service import Service
from turnout.server.metrics import EngineCollector
from turnout.server.supervise.engine import EngineSupervisor
from turnout.server.supervise.ledger import EngineFailed


class Control:
    """Lives in the event loop's thread, next to the engine."""

    def __init__(self, service: Service, engine: EngineSupervisor, elsewhere: Callable[[], int] = int):
        """elsewhere: counts requests that other processes answer (http_workers)."""
        self.service, self.engine, self._elsewhere = service, engine, elsewhere
        self._created = int(time.time())
        service.metrics.registry.register(EngineCollector(engine, service.model_name))

    @property
    def num_active(self) -> int:
        """Requests that are being answered."""
        return self.service.num_active + self._elsewhere()

    @property
    def state(self) -> str:
        if self.engine.failure:
            return "failed"
        if self.service.draining:
            return "draining"
        if self.service.tokenizer is None:
            return "loading"
        return "ready" if self.engine.serving else "restarting"

    def check_ready(self) -> None:
        """Raises ApiError 503 unless a request could be served now."""
        self.service.check_open()
        if not self.engine.serving:
            raise self.service.restarting()

    def reset_prefix_cache(self) -> None:
        """Compute all prompts again from now on. Raises ApiError 503 unless ready."""
        self.check_ready()
        self.engine.reset_prefix_cache()

    def load(self) -> dict[str, int]:
        """/load: vLLM's count of requests that are being served, and of their sequences where they are."""
        stats = self.engine.stats.values()
        return {
            "server_load": self.num_active,
            "running": sum(rank.num_running for rank in stats),
            "waiting": sum(rank.num_waiting for rank in stats),
        }

    def model_info(self) -> dict[str, Any]:
        """/model_info: SGLang's, by which routers tell what a worker serves."""
        ready = self.engine.ready
        shape = ready.info["description"]["shape"] if ready else {}
        return {
            "model_path": self.service.config.model,
            "tokenizer_path": self.service.config.model,
            "served_model_name": self.service.model_name,
            "is_generation": True,
            "architectures": [shape["architecture"]] if shape else [],
            "vocab_size": self.service.limits.vocab_size or None,
            "max_context_length": self.service.limits.max_context or None,
            "max_req_input_len": self.service.limits.max_context or None,
            "eos_token_ids": list(shape.get("eos_token_ids", ())),
            "weight_version": "default",
            "preferred_sampling_params": None,
        }

    def model_card(self) -> dict[str, Any]:
        """OpenAI's model object, with the context length as other engines add it."""
        return {
            "id": self.service.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "turnout",
            "max_model_len": self.service.limits.max_context or None,
        }

    def describe(self) -> dict[str, Any]:
        """/server_info: how the server was configured, what the engine decided, and how each rank fares."""
        ready = self.engine.ready
        return {
            "version": __version__,
            "model": self.service.model_name,
            "pid": os.getpid(),
            "state": self.state,
            "requests": {"active": self.num_active, "sequences": self.engine.num_requests},
            "config": self.service.config.describe(),
            "plan": ready.info.get("plan") if ready else None,
            "engine": ready.info if ready else None,
            "restarts": self.engine.restarts,
            "last_failure": str(self.engine.last_failure) if self.engine.last_failure else None,
            "ranks": self.engine.describe_ranks(),
            "seconds_since_report": round(time.monotonic() - self.engine.heard, 3),
        }

    def restart(self) -> None:
        """Restart the ranks without losing a request. Raises ApiError 403 and 503."""
        self.check_key_is_set("/restart")
        self.check_ready()
        self.engine.restart()

    def check_key_is_set(self, path: str) -> None:
        """Raises ApiError 403 for what only those may do who hold a key, if there is none."""
        if self.service.config.api_key is None:
            raise ApiError(403, f"POST {path} needs a server that was started with --api-key")

    def start_profile(self, body: ProfileBody) -> None:
        """Let all ranks record their next steps. Raises ApiError 409 and 503."""
        self.check_ready()
        if self.engine.profiling:
            raise ApiError(409, "a profile is being recorded: get it with POST /stop_profile first")
        self.engine.start_profile(body.command(time.time()))

    async def stop_profile(self) -> AsyncIterator[bytes]:
        """One Chrome trace of what all ranks recorded, in parts. Raises ApiError 409 and 503."""
        self.check_ready()
        if not self.engine.profiling:
            raise ApiError(409, "no profile is being recorded: begin with POST /start_profile")
        try:
            traces = await self.engine.stop_profile()
        except EngineFailed as failure:
            raise unavailable(f"the profile is lost: {failure}", "restarting") from None
        return merged(traces)
