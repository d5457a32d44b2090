"""Name -> entry. Duplicates are rejected; an unknown name lists the known ones."""

from collections.abc import Iterator
from importlib import import_module
from typing import Any, Generic, TypeVar

from turnout.errors import UserError

T = TypeVar("T")


def load(target: str) -> Any:
    """What "package.module:attribute" names."""
    module, _, attribute = target.partition(":")
    return getattr(import_module(module), attribute)


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

    def target(self, name: str) -> str:
        """Where the entry called `name` is: `"package.module:attribute"`."""
        return self._targets[name]

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
            self._loaded[name] = load(self._targets[name])
        return self._loaded[name]


# The tables. Adding a line is all that this file sees of a new backend or model family.

# Each backend's folder, in the order in which plans try runners and dispatchers that are equally good. What
# it has, and by which names, is in its declaration (turnout/moe/capabilities/declared.py reads them).
BACKENDS: Registry[Any] = Registry(
    "MoE backend",
    {
        "torch": "turnout.moe.backends.torch.declaration:BACKEND",
        "cpu": "turnout.moe.backends.cpu.declaration:BACKEND",
        "hopper": "turnout.moe.backends.hopper.declaration:BACKEND",
        "local": "turnout.moe.backends.local.declaration:BACKEND",
        "collective": "turnout.moe.backends.collective.declaration:BACKEND",
        "nvlink": "turnout.moe.backends.nvlink.declaration:BACKEND",
        "flashinfer": "turnout.moe.backends.flashinfer.declaration:BACKEND",
        "deepep": "turnout.moe.backends.deepep.declaration:BACKEND",
    },
)

# The same of attention, in the order in which layers are offered to them.
ATTENTION_BACKENDS: Registry[Any] = Registry(
    "attention backend",
    {
        "triton": "turnout.attention.backends.triton.declaration:BACKEND",
        "cpu": "turnout.attention.backends.cpu.declaration:BACKEND",
        "torch": "turnout.attention.backends.torch.declaration:BACKEND",
        "flash-attn-4": "turnout.attention.backends.flash_attn_4.declaration:BACKEND",
        "fla-core": "turnout.attention.backends.fla_core.declaration:BACKEND",
    },
)

ARCHITECTURES: Registry[Any] = Registry(
    "model architecture",
    {
        "DeepseekV3ForCausalLM": "turnout.models.deepseek_v3:read_spec",
        "DeepseekV4ForCausalLM": "turnout.models.deepseek_v4:read_spec",
        "DeepseekV32ForCausalLM": "turnout.models.deepseek_v32:read_spec",
        "Glm4MoeForCausalLM": "turnout.models.glm4_moe:read_spec",
        "Glm4MoeLiteForCausalLM": "turnout.models.glm4_moe_lite:read_spec",
        "GlmMoeDsaForCausalLM": "turnout.models.glm_moe_dsa:read_spec",
        "GptOssForCausalLM": "turnout.models.gpt_oss:read_spec",
        "HYV3ForCausalLM": "turnout.models.hy_v3:read_spec",
        "KimiK25ForConditionalGeneration": "turnout.models.kimi_k25:read_spec",
        "KimiK2ForCausalLM": "turnout.models.deepseek_v3:read_kimi_k2",
        "Llama4ForCausalLM": "turnout.models.llama4:read_text_spec",
        "Llama4ForConditionalGeneration": "turnout.models.llama4:read_spec",
        "MiniMaxM2ForCausalLM": "turnout.models.minimax_m2:read_spec",
        "MixtralForCausalLM": "turnout.models.mixtral:read_spec",
        "Qwen2MoeForCausalLM": "turnout.models.qwen2_moe:read_spec",
        "Qwen3MoeForCausalLM": "turnout.models.qwen3_moe:read_spec",
        "Qwen3NextForCausalLM": "turnout.models.qwen3_next:read_spec",
        "Qwen3VLMoeForConditionalGeneration": "turnout.models.qwen3_vl_moe:read_spec",
        "Qwen3_5MoeForCausalLM": "turnout.models.qwen3_5_moe:read_text_spec",
        "Qwen3_5MoeForConditionalGeneration": "turnout.models.qwen3_5_moe:read_spec",
    },
)
