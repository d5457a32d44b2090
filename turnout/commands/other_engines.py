"""Flags that users of SGLang and vLLM type from habit, and that are not flags here: what to do instead.

Those that mean the same as a flag of ours are its aliases (config.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from turnout.config import Config, ServerConfig
from turnout.errors import UserError
from turnout.flags import flag_name

_ALWAYS = "leave it out: it is always so"
_NO_ADAPTERS = "LoRA adapters are not supported: merge them into the checkpoint"
_FOLDER = "leave it out: the tokenizer is read from the model's folder"
_DOWNLOAD = "nothing is downloaded: `hf download ID` first, then give its folder or id as MODEL"
_QUIET = "leave it out: requests are logged only with `--log-requests meta`"
_DRAFTS = (
    "there are no draft models: see `--speculative-algorithm` for ngram and the checkpoint's draft layer"
)
_PROXY = "put a proxy in front of the server for this"
_ELASTIC = "experts are spread evenly and stay there"

# In the order of the documentation; a row is for all flags of its key.
_INSTEAD: dict[tuple[str, ...], str] = {
    ("--model", "--model-path"): "the model is the first argument, without a flag: `turnout serve MODEL`",
    ("-tp",): "`--tp`",
    ("-dp",): "`--dp`",
    ("-ep",): "`--ep`",
    (
        "--enable-expert-parallel",
        "--enable-ep-moe",
    ): "`--ep-size N` with the N of `--tp-size`",
    ("--pipeline-parallel-size", "--pp-size", "--pp", "-pp"): (
        "layers are not divided over ranks: add the factor to `--tp-size`"
    ),
    (
        "--data-parallel-backend",
        "--data-parallel-address",
    ): "`--distributed-executor-backend`, `--dist-init-addr`",
    ("--master-addr", "--nccl-init-addr"): "`--dist-init-addr HOST:PORT`",
    ("--base-gpu-id", "--device-id"): "choose GPUs with CUDA_VISIBLE_DEVICES",
    ("--all2all-backend", "--enable-deepep-moe"): "`--moe-a2a-backend`",
    ("--moe-backend",): "`--moe-runner-backend`",
    ("--enable-eplb", "--ep-num-redundant-experts"): _ELASTIC,
    ("--enable-dbo",): "`--enable-two-batch-overlap`",
    ("--max-num-batched-tokens",): "`--max-prefill-tokens`, which counts prompt tokens only",
    ("--enable-chunked-prefill",): f"{_ALWAYS}; `--chunked-prefill-size` is the size of a chunk",
    ("--enable-mixed-chunk",): _ALWAYS,
    ("--num-gpu-blocks-override", "--kv-cache-memory-bytes"): "`--max-total-tokens`, the KV cache's tokens",
    ("--swap-space", "--cpu-offload-gb", "--enable-hierarchical-cache"): (
        "leave it out: weights and KV cache stay in the device's memory; what fits says `turnout plan MODEL`"
    ),
    ("--cuda-graph-bs", "--cuda-graph-sizes", "--max-seq-len-to-capture", "--max-capture-size"): (
        "`--cuda-graph-max-bs`, the largest decode batch captured as a graph"
    ),
    ("--compilation-config", "--enable-torch-compile"): (
        "leave it out: nothing is compiled by torch; `--disable-cuda-graph` is eager decoding"
    ),
    ("--async-scheduling",): "`--overlap-schedule on`",
    ("--schedule-conservativeness",): "`--max-running-requests` bounds how many requests run together",
    ("--seed",): "`--random-seed`",
    ("--tokenizer", "--tokenizer-path"): _FOLDER,
    ("--chat-template",): "put it into the model's folder as `chat_template.jinja`",
    ("--generation-config", "--override-generation-config", "--sampling-defaults"): (
        "leave it out: defaults are OpenAI's, and requests say what else they want"
    ),
    ("--tokenizer-mode", "--load-format"): "leave it out: tokenizer.json and safetensors are what is read",
    ("--revision", "--tokenizer-revision", "--download-dir"): _DOWNLOAD,
    ("--hf-overrides", "--json-model-override-args"): "edit the model's config.json, or a copy of it",
    ("--enable-lora", "--lora-modules", "--lora-paths"): _NO_ADAPTERS,
    ("--speculative-config", "--speculative-model", "--speculative-draft-model-path"): _DRAFTS,
    ("--speculative-eagle-topk",): f"leave it out: drafts are a chain, as with 1; {_DRAFTS}",
    ("--enable-auto-tool-choice",): f"{_ALWAYS}; `--tool-call-parser` says how calls are written",
    ("--enable-reasoning",): f"{_ALWAYS}; `--reasoning-parser` says how reasoning is written",
    ("--guided-decoding-backend", "--grammar-backend"): "leave it out: llguidance is the only one",
    ("--limit-mm-per-prompt", "--enable-multimodal"): "leave it out: only text is served",
    ("--disaggregation-mode", "--kv-transfer-config"): "prefill and decoding run in the same ranks",
    ("--enable-metrics",): f"{_ALWAYS}: `GET /metrics`",
    ("--disable-log-requests", "--no-enable-log-requests", "--disable-log-stats"): _QUIET,
    ("--enable-log-requests",): "`--log-requests meta`, or `full` with texts",
    ("--uvicorn-log-level", "--log-level-http"): "`--log-level`, which is debug for a line per HTTP request",
    ("--allowed-origins", "--root-path", "--ssl-keyfile", "--ssl-certfile"): _PROXY,
}
ROWS = tuple(_INSTEAD.items())
INSTEAD = {flag: remedy for flags, remedy in ROWS for flag in flags}
_OF_SERVE = {flag_name(f.name) for f in dataclasses.fields(ServerConfig)} - {
    flag_name(f.name) for f in dataclasses.fields(Config)
}


def refuse(words: Sequence[str], own: Collection[str]) -> None:
    """Raise UserError for the first of a command's `words` that is a flag of another engine, or of `serve`
    only; those in `own` are the command's."""
    for word in words:
        flag = word.partition("=")[0]
        if flag == "--":
            return
        if flag in own:
            continue
        if flag in INSTEAD:
            remedy = INSTEAD[flag]
            raise UserError(f"there is no flag {flag}: {'use ' if remedy.startswith('`--') else ''}{remedy}")
        if flag in _OF_SERVE:
            raise UserError(f"{flag} is a flag of `turnout serve` only: leave it out")
