"""What a model needs from whoever runs it, and what it offers: two small protocols.

Legend: N tokens of a step (all sequences concatenated), H hidden, Hq/Hkv query/KV heads, D head size,
S rows for which logits are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from turnout.attention.interface import Attention
from turnout.attention.kinds import AttentionSpec
from turnout.moe.spec import MoESpec
from turnout.vocabulary import Phase

if TYPE_CHECKING:  # describing a model must not cost the import of torch
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Step:
    """One forward. `phase` is "prefill" if any sequence of any rank brings more than its decode tokens.

    tokens: how many each data-parallel rank brings; None if there is one.
    real: which rows are tokens, the others being padding; None: all.
    other: a second micro-batch of the same step, which overlaps with this one; its tokens come after this
    one's, and may attend to them.
    """

    input_ids: Tensor  # int64 [N]
    positions: Tensor  # int64 [N]
    attention: Attention
    phase: Phase = Phase.PREFILL
    tokens: tuple[int, ...] | None = None
    real: Tensor | None = None  # bool [N]
    other: Step | None = None


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What the engine must know to size and address the KV cache and the sampler."""

    architecture: str
    attention: tuple[AttentionSpec, ...]  # of each layer
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    residual_streams: int = 1  # hidden states of a token between layers

    @property
    def num_layers(self) -> int:
        return len(self.attention)


@dataclass(frozen=True, kw_only=True)
class DenseParameters:
    """How many parameters of all layers are not routed experts', by how ranks share them."""

    vocabulary: int = 0  # embedding and head; tied ones count once
    queries: int = 0  # projections of queries and outputs
    keys_values: int = 0
    mlps: int = 0  # of the layers that are not MoE layers
    shared_experts: int = 0  # their gated MLPs
    replicated: int = 0  # what every rank holds: norms, routers, gates
    in_float32: int = 0  # how many of `replicated` are float32 whatever the compute type

    @property
    def total(self) -> int:
        return (
            self.vocabulary
            + self.queries
            + self.keys_values
            + self.mlps
            + self.shared_experts
            + self.replicated
        )


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """A model as `config.json` describes it: enough to plan without reading weights."""

    shape: ModelShape
    moe: MoESpec  # of every MoE layer; they are all alike, but for `draft_moe`
    moe_layers: tuple[int, ...]  # which of the `shape.num_layers` layers are MoE layers
    dense: DenseParameters
    dense_in_fp8: DenseParameters = DenseParameters()  # those of them that stay so on a GPU that decodes it
    experts_prefix: str = "model.layers.{}.mlp.experts"  # of a layer's experts in its checkpoints
    draft_moe: MoESpec | None = None  # of the last MoE layer, a draft layer with experts in another format


class Model(Protocol):
    """A loaded model of this rank."""

    shape: ModelShape  # its attention with the heads of this rank
    layers_begun: int  # in all forwards; a watchdog tells by it a long forward from one that waits

    def forward(self, step: Step) -> Tensor:
        """Final hidden states [N, H] (after the last norm), of both micro-batches if there are two."""
        ...

    def logits(self, hidden_SH: Tensor) -> Tensor:
        """float32 logits [S, V] for chosen rows of `forward`'s result."""
        ...

    def best(self, hidden_SH: Tensor, logits_SV: Tensor) -> Tensor:
        """int64 [2, S]: the token of each row's largest logit, and whether that is finite. logits: float32,
        contiguous, gets what `logits` gives. In CUDA graphs, hence by kernels in Triton."""
        ...

    def shortened(self) -> AbstractContextManager[None]:
        """While it lasts, a forward computes one layer of each kind: all kernels that it has, in less time,
        and of no meaning."""
        ...

    def expert_counts(self) -> list[list[int]]:
        """[MoE layer][expert]: how often the router chose each expert since loading, or the last reset."""
        ...

    def reset_counts(self) -> None:
        """Forget how often experts were chosen."""
        ...


class DraftingModel(Model, Protocol):
    """A model that was loaded with its draft layer."""

    def draft(self, step: Step, hidden_NH: Tensor) -> Tensor:
        """The draft layer's final hidden states [N, H], from which `logits` foretells the token after next.

        step: of the positions of `hidden_NH`, final hidden states of the model or of this; its `input_ids`
        are the tokens that follow each.
        """
        ...


ProgressFn = Callable[[str, int, int], None]  # (what, done, total)
