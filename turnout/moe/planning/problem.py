"""The question that planning answers for one layer: what it is, where it runs and what the user asked for."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

from turnout.formats.spec import ITEMSIZE, token_bytes
from turnout.moe import budget as sizes
from turnout.moe.budget import Budget
from turnout.moe.capabilities.capability import DispatcherCapability, RunnerCapability
from turnout.moe.capabilities.rank_share import Share
from turnout.moe.spec import MoESpec, RankShape
from turnout.parallel.hardware import Hardware
from turnout.parallel.topology import Topology
from turnout.vocabulary import Bf16Units, ComputeDtype, Exchange, Format, Phase, WeightStorage

PHASES = tuple(Phase)
DECODE_ONCE_BYTES = 2 * 2**30
DECODE_ONCE_PART = 1 / 8
SPARSE = 0.25


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What the user asked for, by the names of the flags; "auto" may be anything that is allowed."""

    moe_runner_backend: str = "auto"  # a runner, or an alias of one
    moe_a2a_backend: str = "auto"  # a dispatcher, or a family of them
    deepep_mode: str = "auto"  # which of a family
    moe_dispatch_dtype: str = "auto"  # auto, bf16, fp8, nvfp4
    moe_combine_dtype: str = "auto"  # auto, bf16, fp8
    moe_activation_dtype: str = "auto"  # auto, bf16 (weight-only), fp8 (W8A8, W4A8), nvfp4 (W4A4)
    moe_weight_storage: str = "auto"  # auto, packed, decoded
    deterministic: bool = False  # a token's bits must not depend on what else is in the batch
    disable_shared_expert_overlap: bool = False
    enable_two_batch_overlap: bool = False  # large steps as two micro-batches

    @classmethod
    def of(cls, config: object) -> PlanRequest:
        """The fields of `config` that have the same names."""
        return cls(**{field.name: getattr(config, field.name) for field in fields(cls)})


@dataclass(frozen=True, kw_only=True)
class PlanningProblem:
    """The question put to every candidate."""

    spec: MoESpec
    topology: Topology
    budget: Budget
    hardware: Hardware
    request: PlanRequest
    compute_dtype: ComputeDtype
    stored_itemsize: int  # of unquantised weights in the checkpoint
    num_layers: int

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.compute_dtype]

    @property
    def num_local_experts(self) -> int:
        return self.spec.num_experts // self.topology.ep_size

    @cached_property
    def shape(self) -> RankShape:
        """This rank's part of the layer."""
        return RankShape.of(
            self.spec, num_local_experts=self.num_local_experts, expert_tp=self.topology.expert_tp
        )

    @property
    def bf16_units(self) -> Bf16Units:
        """What multiplies bfloat16 on this CPU; nothing does where results are to be float32's."""
        return self.hardware.bf16_units if self.compute_dtype == "bfloat16" else Bf16Units.NONE

    @property
    def native_fp4(self) -> bool:
        """Whether W4A4 is what the checkpoint was made for and the device multiplies."""
        return self.spec.quantized_activations and self.hardware.has_fp4_units

    def weight_bytes(self, storage: WeightStorage, runner: RunnerCapability | None = None) -> int:
        """One layer's experts on this rank, as most runners or `runner` keeps them."""
        in_bf16 = runner is not None and self.spec.format in runner.decoded_as_bf16
        decoded = ITEMSIZE["bfloat16"] if in_bf16 else self.itemsize
        return sizes.expert_bytes(
            self.spec,
            self.shape,
            decoded=storage == WeightStorage.DECODED,
            itemsize=decoded if storage == WeightStorage.DECODED else self.stored_itemsize,
        )

    def rows(self, dispatcher: DispatcherCapability, phase: Phase) -> int:
        """The most tokens a runner sees behind `dispatcher`."""
        return dispatcher.rows(phase, self.budget, self.topology)

    def moves(self, dispatcher: DispatcherCapability) -> bool:
        """Whether tokens leave their rank through `dispatcher`."""
        return sizes.moves(dispatcher.exchange, dp_size=self.topology.dp_size)

    @property
    def reach(self) -> float:
        """The share of the expert-parallel ranks that hold an expert of a token, routed evenly."""
        return sizes.reach(self.spec.top_k, self.topology.ep_size)

    def crowds(self, dispatcher: DispatcherCapability) -> bool:
        """Whether `dispatcher` brings most ranks far more tokens than choose their experts (plan.py)."""
        return dispatcher.exchange == Exchange.GATHER and self.moves(dispatcher) and self.reach < SPARSE

    def in_chunks(self, dispatcher: DispatcherCapability) -> int:
        """In how many chunks the largest step of prefill passes `dispatcher`."""
        return -(-self.budget.local // self.budget.capacity) if dispatcher.in_chunks else 1

    def large_prefill_us(self, dispatcher: DispatcherCapability, storage: WeightStorage, wire: Format) -> int:
        """Where buffers hold less than the largest step of prefill, what that takes there and back, weights
        that are read again included; 0 where all fits, nothing moves or nothing was measured."""
        if self.budget.capacity >= self.budget.local or dispatcher.cost is None or not self.moves(dispatcher):
            return 0
        H, gathers = self.spec.hidden_size, dispatcher.exchange == Exchange.GATHER
        row = token_bytes(wire, H, itemsize=self.itemsize) + 8 * self.spec.top_k
        row += token_bytes(self.combine_format, H, itemsize=self.itemsize)
        peers = self.topology.dp_size - 1 if gathers else self.reach * (self.topology.tp_size - 1)
        tokens = self.budget.local / (1 if gathers else self.topology.attention_tp)
        chunks, weights = self.in_chunks(dispatcher), self.weight_bytes(storage)
        return round(dispatcher.cost.us(tokens * peers * row, chunks=chunks, weight_bytes=weights))

    @property
    def combine_format(self) -> Format:
        """The format of results on their way back: the compute dtype, unless asked for."""
        return (
            Format.BF16
            if self.request.moe_combine_dtype == "auto"
            else Format(self.request.moe_combine_dtype)
        )

    def share(
        self, dispatcher: DispatcherCapability, phase: Phase, storage: WeightStorage, activations: Format
    ) -> Share:
        """What a runner makes room for behind `dispatcher`."""
        return Share(
            shape=self.shape,
            activation=self.spec.activation.kind,
            rows=self.rows(dispatcher, phase),
            layout=dispatcher.layout,
            decoded=storage == WeightStorage.DECODED,
            # GEMM libraries for CPUs are fast in float32, and runners compute in it there.
            itemsize=4 if self.hardware.device == "cpu" else self.itemsize,
            activations=activations,
        )

    def decode_once(self) -> bool:
        """The rule of weight_storage "auto" (its reasons: plan.py)."""
        decoded = self.weight_bytes(WeightStorage.DECODED)
        if decoded <= self.weight_bytes(WeightStorage.PACKED):
            return True
        room = min(DECODE_ONCE_BYTES, DECODE_ONCE_PART * self.hardware.memory_bytes)
        return self.hardware.device == "cpu" and decoded * self.num_layers <= room
