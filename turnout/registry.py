"""Name -> entry. Duplicates are rejected; an unknown name lists the known ones."""

from collections.abc import Iterator
from importlib import import_module
from typing import Any, Generic, TypeVar

from turnout.errors import UserError

T = TypeVar("T")


class Registry(Generic[T]):
    """Entries by name, each given as `"package.module:attribute"` and imported on first use."""

    def __init__(self, kind: str, entries: dict[str, str] | None = None):
        self.kind = kind
        self._targets: dict[str, str] = {}
        self._loaded: dict[str, T] = {}
        for name, target in (entries or {}).items():
            self.register(name, target)

    def register(self, name: str, target: str) -> None:
        """Add `name` for `"package.module:attribute"`; raises ValueError if the name is taken."""
        if name in self._targets:
            raise ValueError(f"{self.kind} {name!r} is registered twice")
        self._targets[name] = target

    def names(self) -> list[str]:
        return list(self._targets)

    def __contains__(self, name: str) -> bool:
        return name in self._targets

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def get(self, name: str) -> T:
        """The entry called `name`; raises UserError naming the known ones."""
        if name not in self._targets:
            raise UserError(f"unknown {self.kind} {name!r}; known: {', '.join(self._targets)}")
        if name not in self._loaded:
            module, _, attribute = self._targets[name].partition(":")
            entry: Any = getattr(import_module(module), attribute)
            self._loaded[name] = entry
        return self._loaded[name]


# The tables. A new backend is one file and one line here.

RUNNERS: Registry[Any] = Registry(
    "MoE runner",
    {
        "torch": "turnout.moe.backends.torch.runner:TorchRunner",
        "numba": "turnout.moe.backends.cpu.runner:NumbaRunner",
        "triton": "turnout.moe.backends.hopper.runner:TritonRunner",
        "flashinfer_cutedsl": "turnout.moe.backends.flashinfer.cutedsl:CuteDslRunner",
        "flashinfer_trtllm": "turnout.moe.backends.flashinfer.trtllm:TrtllmRunner",
        "flashinfer_mxfp4": "turnout.moe.backends.flashinfer.mxfp4:FlashinferMxfp4Runner",
        "flashinfer_cutlass": "turnout.moe.backends.flashinfer.cutlass:FlashinferCutlassRunner",
    },
)

DISPATCHERS: Registry[Any] = Registry(
    "MoE dispatcher",
    {
        "none": "turnout.moe.backends.local.dispatcher:NoDispatch",
        "collective": "turnout.moe.backends.collective.dispatcher:CollectiveDispatch",
        "collective-experts": "turnout.moe.backends.collective.batched_experts:CollectiveExpertsDispatch",
        "nvlink": "turnout.moe.backends.nvlink.dispatcher:NvlinkDispatch",
        "nvlink-experts": "turnout.moe.backends.nvlink.batched_experts:NvlinkExpertsDispatch",
        "flashinfer": "turnout.moe.backends.flashinfer.dispatcher:FlashInferDispatch",
        "deepep-normal": "turnout.moe.backends.deepep.dispatcher:NormalDispatch",
        "deepep-low-latency": "turnout.moe.backends.deepep.dispatcher:LowLatencyDispatch",
    },
)

ARCHITECTURES: Registry[Any] = Registry(
    "model architecture",
    {
        "Qwen2MoeForCausalLM": "turnout.models.qwen2_moe:read_spec",
        "Qwen3MoeForCausalLM": "turnout.models.qwen3_moe:read_spec",
    },
)
