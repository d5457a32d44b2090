"""One real server on a tiny random model for the whole session, started as a user starts it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from tests.tiny import write_model
from turnout.config import ServerConfig
from turnout.server.launch import ServerProcess

CONTEXT = 512


def tiny_config(folder: Path, **fields: Any) -> ServerConfig:
    defaults: dict[str, Any] = {
        "model": str(folder),
        "device": "cpu",
        "port": 0,
        "num_threads": 1,
        "max_total_tokens": 8192,
        "served_model_name": "tiny",
    }
    return ServerConfig(**(defaults | fields))


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_model(folder)
    return folder


@pytest.fixture(scope="session")
def reference(tiny_folder: Path) -> PreTrainedModel:
    """The same model as transformers runs it."""
    return AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def tokenizer(tiny_folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_folder)


@pytest.fixture(scope="session")
def base_url(tiny_folder: Path) -> Iterator[str]:
    """The address of the shared server, ending in /v1."""
    server = ServerProcess(tiny_config(tiny_folder), show=False)
    try:
        yield server.wait_ready()
    finally:
        assert server.stop() == 0, server.last_lines()


@pytest.fixture(scope="session")
def root(base_url: str) -> str:
    return base_url.removesuffix("/v1")


@pytest.fixture(scope="session")
def client(base_url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=base_url, api_key="unused", max_retries=0, timeout=60)


@pytest.fixture
def http(root: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=root, timeout=60) as http:
        yield http
