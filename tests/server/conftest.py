"""Clients of the shared server, and the same model as transformers runs it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from tests.server.processes import eventually


@pytest.fixture(scope="session")
def reference(tiny_folder: Path) -> PreTrainedModel:
    """The same model as transformers runs it."""
    return AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def tokenizer(tiny_folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_folder)


@pytest.fixture(scope="session")
def root(base_url: str) -> str:
    return base_url.removesuffix("/v1")


@pytest.fixture(scope="session")
def client(base_url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=base_url, api_key="unused", max_retries=0, timeout=60)


@pytest.fixture
def http(root: str) -> Iterator[httpx.Client]:
    """Of the shared server, on which nothing of an earlier test runs any more."""
    with httpx.Client(base_url=root, timeout=60) as http:
        assert eventually(lambda: is_idle(http))
        yield http


def is_idle(http: httpx.Client) -> bool:
    info = http.get("/server_info").json()
    left = [
        info["requests"]["active"],
        *(rank["num_running"] + rank["num_waiting"] for rank in info["ranks"]),
    ]
    return not any(left)
