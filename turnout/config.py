"""Configuration: one frozen value, resolved once, from flags, environment and a file (config_sources.py).

Every field of `Config` is a flag of `serve`, `plan`, `verify`, `generate` and `eval` (those of
`ServerConfig` of `serve` only), reads the environment variable TURNOUT_<FIELD>, and can stand in the
YAML file given to `--config`. Precedence: flag, environment, file, default. Flag names follow SGLang;
vLLM's spelling is an alias where it means the same. Torch-free.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from turnout.config_sources import find_field, read_variables, read_yaml, spellings
from turnout.errors import UserError
from turnout.flags import check_field, flag

C = TypeVar("C", bound="Config")

# Flags by what they are about, as help shows them; in a panel those come first that are used most.
PANELS = ("Model", "Attention", "Experts", "Parallelism", "Memory and scheduling", "Server")
(model_flag, attention_flag, expert_flag, parallel_flag, memory_flag, server_flag) = (
    functools.partial(flag, panel=panel) for panel in PANELS
)

MOST_RANKS = 4096  # more are a slip of the finger, which a plan would arrange in all ways for minutes
DRAFT_LAYER = ("MTP", "NEXTN", "EAGLE")  # names of speculative decoding by a checkpoint's own draft layer


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that decides what runs: model, placement, MoE backends, memory, batching."""

    model: str = flag("demo", "a local folder, a hub id already on this machine, or `demo`")

    device: str = model_flag("auto", "where to run", choices=("auto", "cpu", "cuda"))
    dtype: str = model_flag(
        "auto",
        "compute type; auto: bfloat16 on CUDA, float32 on CPU",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    cpu_bf16_units: str = model_flag(
        "auto",
        "what a CPU multiplies bfloat16 with under --dtype bfloat16; auto: the fastest units it has; none: "
        "the float32 units, for comparison",
        choices=("auto", "amx_bf16", "avx512_bf16", "none"),
    )
    context_length: int = model_flag(
        0, "longest prompt + output; 0: the model's", "--max-model-len", minimum=0
    )
    quantization: str = model_flag(
        "auto",
        "what the checkpoint must be; auto: whatever it says",
        choices=("auto", "bf16", "fp8", "modelopt_fp4", "mxfp4", "int4"),
    )
    random_seed: int = model_flag(0, "seed of requests that bring none")
    deterministic: bool = model_flag(
        False,
        "a request's tokens and log-probabilities are the same bits in every run and in every batch; slower",
        "--enable-deterministic-inference",
    )
    trust_remote_code: bool = model_flag(False, "let the tokenizer run code shipped with the model")
    num_threads: int = model_flag(
        0,
        "CPU threads; 0: the physical cores this process may use, less one for what torch computes",
        minimum=0,
    )
    load_progress: bool = model_flag(True, "progress bars while loading")

    attention_backend: str = attention_flag("auto", "what computes attention; see `turnout plan`")

    moe_runner_backend: str = expert_flag("auto", "runner of the expert GEMMs; see `turnout plan`")
    moe_a2a_backend: str = expert_flag("auto", "dispatcher between ranks; see `turnout plan`")
    moe_activation_dtype: str = expert_flag(
        "auto",
        "what the expert GEMMs multiply with; nvfp4: W4A4, fp8: W8A8 or W4A8 numerics; auto: the runner's "
        "fastest that keeps the checkpoint's accuracy",
        choices=("auto", "bf16", "fp8", "nvfp4"),
    )
    moe_weight_storage: str = expert_flag(
        "auto",
        "packed: experts as in the checkpoint, decoded at every use; decoded: once, at load",
        choices=("auto", "packed", "decoded"),
    )
    moe_dispatch_dtype: str = expert_flag(
        "auto", "wire format of dispatched tokens", choices=("auto", "bf16", "fp8", "nvfp4")
    )
    moe_combine_dtype: str = expert_flag(
        "auto",
        "format of results on their way back; auto: the compute type; fp8: half the bytes, results off by 2 "
        "to 3 % (docs/parallelism.md)",
        choices=("auto", "bf16", "fp8"),
    )
    enable_two_batch_overlap: bool = expert_flag(
        False,
        "large steps as two micro-batches, one of which computes while the other's tokens are sent between "
        "ranks",
    )
    disable_shared_expert_overlap: bool = expert_flag(
        False, "CUDA: compute a shared expert after the routed ones, not during their dispatch and combine"
    )
    deepep_mode: str = expert_flag(
        "auto",
        "which of DeepEP's kernels: normal, low_latency; auto: normal in prefill, low_latency in decode",
        choices=("auto", "normal", "low_latency"),
    )
    max_dispatch_tokens_per_rank: int = expert_flag(
        0, "all-to-all capacity per rank; 0: the budget's", minimum=0
    )

    tp_size: int = parallel_flag(
        1, "ranks in all", "--tp", "--tensor-parallel-size", minimum=1, maximum=MOST_RANKS
    )
    dp_size: int = parallel_flag(
        1, "data-parallel attention groups", "--dp", "--data-parallel-size", minimum=1, maximum=MOST_RANKS
    )
    ep_size: int = parallel_flag(
        1, "expert-parallel ranks", "--ep", "--expert-parallel-size", minimum=1, maximum=MOST_RANKS
    )
    enable_dp_attention: bool | None = parallel_flag(
        None,
        "attention data-parallel, experts across all ranks; by default for models with compressed attention, "
        "over --tp-size groups and slices where --dp-size and --ep-size do not say otherwise",
    )
    moe_dense_tp_size: int = parallel_flag(
        0, "ranks that divide the MLPs of dense layers: 1 or, 0, as many as attention", minimum=0
    )
    enable_dp_lm_head: bool = parallel_flag(
        False, "the head divided over the ranks that share requests only, as it always is"
    )
    nnodes: int = parallel_flag(1, "hosts", minimum=1, maximum=MOST_RANKS)
    node_rank: int = parallel_flag(0, "which host this is", minimum=0)
    dist_init_addr: str = parallel_flag("", "HOST:PORT where ranks dial in to the first host")

    max_running_requests: int = memory_flag(
        0, "requests decoded together; 0: 64 on a CPU, on a GPU up to 512", "--max-num-seqs", minimum=0
    )
    mem_fraction_static: float = memory_flag(
        0.85,
        "share of device memory for weights and KV",
        "--gpu-memory-utilization",
        minimum=0.01,
        maximum=1,
    )
    max_total_tokens: int = memory_flag(
        0, "KV cache size in tokens; 0: from --mem-fraction-static", minimum=0
    )
    kv_cache_dtype: str = memory_flag(
        "auto", "type of what is kept of tokens; auto: the compute type, and no other is implemented"
    )
    chunked_prefill_size: int = memory_flag(
        0, "prompt tokens of one request per step; 0: 512 on a CPU, --max-prefill-tokens on a GPU", minimum=0
    )
    index_cache_dtype: str = memory_flag(
        "auto",
        "type of the index keys of sparse latent attention; auto: the compute type; fp8: e4m3 with a scale "
        "for each key, half the bytes of bfloat16",
        choices=("auto", "fp8"),
    )
    max_prefill_tokens: int = memory_flag(
        0, "prompt tokens of all requests per step; 0: 2048 on a CPU, on a GPU up to 8192", minimum=0
    )
    target_tpot: float = memory_flag(
        0.0,
        "milliseconds that a step may take while requests decode: prompts get what that leaves of it; "
        "0: as --max-prefill-tokens says",
        minimum=0,
    )
    prefill_delayer: str = memory_flag(
        "auto",
        "on: hold prompts back for a few steps until other data-parallel ranks have some too, since those of "
        "one rank make the step of all one with prompts; auto: on where decode steps are CUDA graphs",
        choices=("auto", "on", "off"),
    )
    prefill_delayer_max_delay_steps: int = memory_flag(
        8, "the most steps that a prompt is held back for", "--prefill-delayer-max-delay-passes", minimum=1
    )
    prefill_delayer_max_delay_ms: float = memory_flag(
        100.0, "milliseconds after which a prompt is held back for no further step", minimum=0
    )
    speculative_algorithm: str = memory_flag(
        "none",
        "draft tokens from; ngram: what followed the request's last words before; MTP (or NEXTN, EAGLE): the "
        "checkpoint's own draft layer",
        choices=("none", "ngram", *DRAFT_LAYER),
    )
    speculative_num_draft_tokens: int = memory_flag(
        4, "ngram: tokens verified per request and step: the newest one and the drafts after it", minimum=2
    )
    speculative_num_steps: int = memory_flag(
        1, "MTP: drafts per request and step, each a pass through the draft layer", minimum=1
    )
    cuda_graph_max_bs: int = memory_flag(
        0, "most requests of a decode step that is a CUDA graph; 0: --max-running-requests", minimum=0
    )
    disable_cuda_graph: bool = memory_flag(False, "run decode eagerly", "--enforce-eager")
    disable_prefill_graph: bool | None = memory_flag(
        None,
        "run steps with prompt tokens eagerly; otherwise, on CUDA, all of them but attention and recurrent "
        "states is replayed as CUDA graphs",
    )
    overlap_schedule: str = memory_flag(
        "auto",
        "launch a step before the host has read the tokens of the one before; auto: on GPUs",
        choices=("auto", "on", "off"),
    )
    disable_overlap_schedule: bool = memory_flag(False, "as --overlap-schedule off")
    disable_prefix_cache: bool = memory_flag(
        False,
        "never reuse KV pages between requests",
        "--disable-radix-cache",
        "--no-enable-prefix-caching/--enable-prefix-caching",
    )
    state_snapshot_interval: int = memory_flag(
        0,
        "keep states of recurrent layers and of compressed attention every so many tokens, so that prefixes "
        "are reused; 0: reuse none",
        minimum=0,
    )
    scheduling_policy: str = memory_flag(
        "fcfs",
        "which waiting request is next; fcfs: the first that came, priority: that with the lowest `priority`",
        "--schedule-policy",
        choices=("fcfs", "priority"),
    )
    page_size: int = memory_flag(16, "tokens per KV page", "--block-size", minimum=1, maximum=1024)

    @property
    def speculative(self) -> bool:
        """Whether steps verify draft tokens, of either algorithm."""
        return self.speculative_algorithm != "none"

    @property
    def drafts_by_layer(self) -> bool:
        """Whether draft tokens come from the checkpoint's draft layer."""
        return self.speculative_algorithm in DRAFT_LAYER

    @property
    def verified_tokens(self) -> int:
        """Per request and step, the newest one and its drafts; 0 without speculative decoding."""
        if not self.speculative:
            return 0
        return 1 + self.speculative_num_steps if self.drafts_by_layer else self.speculative_num_draft_tokens

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            check_field(f, getattr(self, f.name))
        if self.disable_overlap_schedule and self.overlap_schedule == "on":
            raise UserError(
                "--overlap-schedule on and --disable-overlap-schedule contradict each other: leave one out"
            )

    def describe(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True, kw_only=True)
class ServerConfig(Config):
    """What `serve` adds: where to listen, whom to let in, how to stop."""

    distributed_executor_backend: str = parallel_flag(
        "mp",
        "who starts the ranks; mp: this host its own, those of further hosts dial in; external: all dial in "
        "(`turnout rank`), from as many hosts as they come; ray: a Ray cluster all",
        choices=("mp", "external", "ray"),
    )
    secret_file: str = parallel_flag("", "file with the secret of ranks that dial in, the same on all hosts")

    host: str = server_flag("127.0.0.1", "address to bind")
    port: int = server_flag(30000, "port to bind; 0: any free one", minimum=0, maximum=65535)
    api_key: str | None = server_flag(None, "require `Authorization: Bearer KEY`")
    api_server_count: int = server_flag(
        0,
        "processes that serve HTTP, next to the one that commands the ranks if more than one; 0: one, and "
        "with data parallelism on GPUs one more than that",
        "--tokenizer-worker-num",
        minimum=0,
        maximum=64,
    )
    served_model_name: str = server_flag("", "model id shown to clients; default: the model's name")
    tool_call_parser: str = server_flag(
        "auto",
        "how the model writes calls of tools; auto: by its chat template; none; or a name of SGLang or vLLM "
        "(docs/operations.md)",
    )
    reasoning_parser: str = server_flag(
        "auto", "how the model writes reasoning, which answers then hold apart; auto, none, or a name"
    )
    max_queued_requests: int = server_flag(4096, "requests waiting before new ones get 503", minimum=1)
    stream_interval: int = server_flag(
        1,
        "tokens after the first that leave together, of requests that do not say: with hundreds of streams "
        "more of them take the server's process less time",
        minimum=1,
    )
    max_request_bytes: int = server_flag(4 * 2**20, "largest request body", minimum=1024)
    max_request_restarts: int = server_flag(
        2,
        "restarts of the ranks in a row that a request may see without progress; then it is tried apart "
        "from others, and ends with an error if the ranks die again; 0: requests end when ranks die",
        minimum=0,
    )
    log_level: str = server_flag("info", "log level", choices=("debug", "info", "warning", "error"))
    enable_expert_metrics: bool = server_flag(
        False, "tokens of every expert in /metrics: a series for each layer and expert"
    )
    log_requests: str = server_flag(
        "off",
        "a line of JSON for each request that has ended; full: with prompt and answer",
        choices=("off", "meta", "full"),
    )
    otlp_traces_endpoint: str = server_flag(
        "", "address of an OpenTelemetry collector (OTLP over HTTP) to send a span of each request to"
    )
    verify: str = server_flag(
        "off",
        "before serving, check the loaded experts against the reference; quick: the first and last MoE "
        "layer, in seconds; full: all",
        choices=("off", "quick", "full"),
    )
    enable_weight_keeper: bool = server_flag(
        False,
        "on GPUs, keep prepared weights in a process of their own, so that ranks that restart do not read "
        "them again, and have a process wait to become the next rank; takes 1 GB of each GPU",
    )
    startup_timeout: float = server_flag(600.0, "seconds for the engine to load before giving up", minimum=1)
    shutdown_timeout: float = server_flag(
        30.0, "seconds for running requests to finish after SIGTERM", minimum=0
    )
    watchdog_timeout: float = server_flag(
        0.0,
        "seconds until ranks with work count as stalled and restart; 0: 3 without a heartbeat, or, where "
        "all processes run, 5 times the longest pause so far without progress and at least 30",
        minimum=0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.api_key is not None:
            _check_key(self.api_key)

    @property
    def has_remote_ranks(self) -> bool:
        """Whether there are ranks that this process does not start."""
        return self.nnodes > 1 or self.distributed_executor_backend != "mp"

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"api_key": "***" if self.api_key else ""}


def load(cls: type[C], flags: Mapping[str, Any], *, config_file: str | None = None) -> C:
    """Merge flags (None: not given), TURNOUT_* variables and a YAML file into a checked `cls`.

    Each may be spelt as the field or as an alias of its flag. Variables and keys that only `serve` reads are
    passed over by other commands, so that one file does for all. Raises UserError.
    """
    every = spellings(ServerConfig)
    values = read_yaml(Path(config_file), every) if config_file else {}
    values |= read_variables(every)
    known = {f.name for f in dataclasses.fields(cls)}
    values = {name: value for name, value in values.items() if name in known}
    for name, value in flags.items():
        if value is not None:
            values[find_field(name, spellings(cls), repr(name)).name] = value
    return cls(**values)


@dataclass(frozen=True, kw_only=True)
class Launched:
    """This process as one of several ranks that a launcher started.

    init_method: where they meet, see `parallel.groups.connect`
    folder:      of the launcher's files, for a rank to remove if the launcher dies; none under torchrun
    lifeline:    a descriptor that ends when the launcher dies; -1 under torchrun
    """

    rank: int
    size: int
    ranks_per_node: int
    init_method: str = "env://"
    folder: str = ""
    lifeline: int = -1


LAUNCHER_VARIABLE = "TURNOUT_LAUNCHER"  # what our launcher says beyond torchrun's variables, in JSON


def launched() -> Launched | None:
    """What torchrun, or `engine.ranks.launch` in its way, says of this process; None for a single one."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return None
    ours = json.loads(os.environ.get(LAUNCHER_VARIABLE, "{}"))
    size = int(os.environ["WORLD_SIZE"])
    local = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    return Launched(rank=int(os.environ["RANK"]), size=size, ranks_per_node=local, **ours)


def lifeline() -> int:
    """A descriptor that ends when whoever launched this server does; -1 if it was started by hand."""
    return int(json.loads(os.environ.get(LAUNCHER_VARIABLE, "{}")).get("lifeline", -1))


def _check_key(key: str) -> None:
    """Raise UserError, without showing the key, if it would admit everyone or no one."""
    if not key:
        raise UserError(
            "--api-key is given, but empty, so that nothing would be required; give a key, or drop --api-key "
            "(and TURNOUT_API_KEY) to serve without one"
        )
    wrong = next((char for char in key if not "!" <= char <= "~"), None)
    if wrong is not None:
        raise UserError(
            f"--api-key: holds U+{ord(wrong):04X}, but clients can send only printable ASCII without spaces "
            "in the Authorization header; take such a key, e.g. from `openssl rand -hex 32`"
        )
