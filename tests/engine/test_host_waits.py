"""A step launches everything on the device without waiting for it, whatever its requests ask for.

The engine runs on the meta device: it takes the branches of a GPU, computes nothing, and its tensors have no
values, so that whatever asks for one raises. A copy to it, as a list or a tensor of the host among indices
makes one, must come from pinned memory, or a GPU would wait for it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import JITFunction

from tests.attention.test_latent import SPEC as LATENT
from tests.attention.test_latent import Chunk, sequence
from tests.attention.test_sparse_latent import FULL as SPARSE
from tests.engine.toy import SHAPE, ToyModel, always_drafting, engine_plan, request
from turnout.attention.capability import Place
from turnout.attention.choose import choose
from turnout.attention.entries import Compressible, Compressor
from turnout.attention.indexing import Index
from turnout.attention.kinds import AttentionSpec, CompressedSpec, DeltaNetSpec, cache_groups
from turnout.attention.paged import paged_attention
from turnout.attention.up_projection import UpProjection
from turnout.config import Config
from turnout.engine.builder import build_engine
from turnout.engine.core import EngineCore
from turnout.engine.engine_plan import EnginePlan
from turnout.parallel.hardware import Hardware

META = torch.device("meta")
BF16 = torch.bfloat16
FULL = AttentionSpec.full(num_heads=4, num_kv_heads=2, head_dim=16)
DELTA = DeltaNetSpec(num_heads=4, num_kv_heads=2, head_dim=16, value_dim=16, scale=0.25, conv_width=4)
LAYERS = {
    "full attention": (FULL, FULL),
    "windows and sinks": (dataclasses.replace(FULL.sliding(8), sinks=True), FULL),
    "recurrent": (DELTA, FULL),
}
VOCABULARY = 2000  # more than sampling sorts


class NoWaits(TorchFunctionMode):
    """Raises where the device would be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned: list[Tensor] = []

    def pin(self, tensor: Tensor) -> Tensor:
        self.pinned.append(tensor)
        return tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty and kwargs.pop("pin_memory", False):
            return self.pin(func(*args, **kwargs))
        if func in (torch.tensor, torch.as_tensor):
            assert kwargs.get("device") in (None, torch.device("cpu")), "values sent from pageable memory"
        elif func in (Tensor.__getitem__, Tensor.__setitem__):
            self._check_index(*args)
        out = func(*args, **kwargs)
        if func is Tensor.to and isinstance(out, Tensor) and out.is_meta and not args[0].is_meta:
            assert kwargs.get("non_blocking"), "a copy to the device that waits"
            assert any(args[0] is tensor for tensor in self.pinned), "a copy from pageable memory"
        elif func is not Tensor.to:
            self._check_together(func, tree_leaves((args, kwargs)))
        return out

    def _check_index(self, into: Tensor, index: Any, *values: Any) -> None:
        parts = index if isinstance(index, tuple) else (index,)
        assert not (into.is_meta and any(isinstance(part, list) for part in parts)), "a list as an index"

    def _check_together(self, func: Any, values: list[Any]) -> None:
        """A tensor of the host would be copied, be it an index or what is copied from."""
        tensors = [value for value in values if isinstance(value, Tensor)]
        if any(tensor.is_meta for tensor in tensors):
            strangers = [tensor for tensor in tensors if not tensor.is_meta]
            assert not strangers, f"{func} takes tensors of the device and of the host"


class UnreadCopy:
    """In the place of HostCopy: tokens that are all 1, and numbers that are no near-ties."""

    def __init__(self, tensor: Tensor) -> None:
        self._size = tensor.shape

    def tolist(self) -> list:
        return torch.ones(self._size).long().tolist()


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> NoWaits:
    waits = NoWaits()
    monkeypatch.setattr(JITFunction, "run", lambda *_, **__: None)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: waits.pin(tensor))
    monkeypatch.setattr("turnout.engine.sampling.sampler.HostCopy", UnreadCopy)
    monkeypatch.setattr("turnout.engine.step.draft_layer.HostCopy", UnreadCopy)
    return waits


class OnMeta(EnginePlan):
    """Attention is that of a GPU."""

    @property
    def attention_place(self) -> Place:
        return dataclasses.replace(super().attention_place, device="cuda", architecture=90)


def make_core(layers: tuple[AttentionSpec, ...], *, drafts: bool = False, **flags: Any) -> EngineCore:
    """drafts: the last layer is a draft layer."""
    shape = dataclasses.replace(SHAPE, attention=layers, vocab_size=VOCABULARY, eos_token_ids=())
    config = Config(page_size=4, max_running_requests=8, overlap_schedule="on", **flags)
    plan = engine_plan(config, shape, num_pages=64, max_context=64)
    plan = OnMeta(**{field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)})
    meta = Hardware(name="meta", device="meta", architecture=90, memory_bytes=2**30)  # type: ignore[arg-type]
    plan = dataclasses.replace(plan, hardware=meta, compute_dtype="bfloat16")
    return always_drafting(build_engine(plan, model=moved(ToyModel(shape=shape, drafts=drafts))))


def moved(value: Any) -> Any:
    """To the device, in bfloat16, with all that it holds."""
    if isinstance(value, Tensor):
        return value.to(BF16).to("meta")
    if isinstance(value, list):
        return [moved(each) for each in value]
    if dataclasses.is_dataclass(value):
        tensors = {name: moved(x) for name, x in vars(value).items() if isinstance(x, Tensor)}
        return dataclasses.replace(value, **tensors)  # type: ignore[type-var]
    if isinstance(value, dict):
        return {name: moved(each) for name, each in value.items()}
    if isinstance(value, ToyModel):
        vars(value).update({name: moved(x) for name, x in vars(value).items() if name != "shape"})
    return value


SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0},
    "top-p": {"temperature": 1.0, "top_p": 0.9},
    "min-p": {"temperature": 1.0, "min_p": 0.1},
    "top-k and top-p": {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.1},
    "log-probabilities": {"logprobs": 3},
    "named log-probabilities": {"logprobs": 0, "logprob_token_ids": (1, 5)},
    "penalties": {"presence_penalty": 0.5, "repetition_penalty": 1.2},
    "bias": {"logit_bias": {4: 3.0}, "min_tokens": 3, "stop_token_ids": (9,)},
    "everything": {
        "temperature": 1.0, "top_k": 1500, "top_p": 0.9, "min_p": 0.1, "seed": 3, "logprobs": 1,
        "frequency_penalty": 0.5, "presence_penalty": 0.5, "repetition_penalty": 1.2,
        "logit_bias": {4: 3.0}, "min_tokens": 3, "stop_token_ids": (9,),
    },
    "everything but top-k": {
        "temperature": 1.0, "top_p": 0.9, "min_p": 0.1, "logprobs": 0, "logprob_token_ids": (1, 5),
        "frequency_penalty": 0.5, "logit_bias": {4: 3.0},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_steps(name: str, device: NoWaits) -> None:
    """Prompts in chunks, mixed with requests that decode, some of which end or are aborted before others."""
    core = make_core(LAYERS[name], chunked_prefill_size=8, max_prefill_tokens=12)
    with device:
        for i, fields in enumerate(SAMPLING.values()):
            core.add(request(str(i), list(range(5 + 2 * i)), max_tokens=4 + i, **fields))
            core.step()
        core.abort(["3"])
        got = 0
        while core.has_work():
            got += sum(len(output.token_ids) for output in core.step())
    assert core.stats().pages_used == 0
    assert got > 30
    assert device.pinned


def test_draft_layers(device: NoWaits) -> None:
    """The host reads what was drawn before a draft layer goes over it, and drafts before the next step."""
    flags = {"speculative_algorithm": "MTP", "speculative_num_steps": 3}
    core = make_core((FULL, FULL), drafts=True, chunked_prefill_size=8, max_prefill_tokens=40, **flags)
    with device:
        for i in range(4):
            core.add(request(str(i), list(range(5 + 2 * i)), max_tokens=12 + i, ignore_eos=True))
            core.step()
        while core.has_work():
            core.step()
    stats = core.stats()
    assert stats.pages_used == 0
    assert stats.spec_accepted_tokens == stats.spec_draft_tokens > 12  # all tokens that are read are 1
    assert device.pinned


def test_a_wait_is_noticed(device: NoWaits) -> None:
    x_NM = torch.empty(4, 8, device=META)
    for wait in (
        lambda: x_NM[[0, 1]],
        lambda: x_NM[torch.tensor([0, 1])],
        lambda: torch.tensor([1, 2], device=META),
        lambda: x_NM[0, 0].item(),
        lambda: x_NM.tolist(),
        lambda: x_NM.nonzero(),
        lambda: x_NM[x_NM > 0],
        lambda: x_NM.cpu(),
        lambda: torch.tensor([1, 2]).pin_memory().to(META),
    ):
        with device, pytest.raises((AssertionError, RuntimeError, NotImplementedError)):
            wait()
    with device:
        x_NM[torch.tensor([1, 2]).pin_memory().to(META, non_blocking=True)] += 1


COMPRESSED = CompressedSpec(
    num_heads=4, num_kv_heads=1, head_dim=16, value_dim=16, rope_dim=8, scale=0.25, recent=8, rate=4,
    overlap=True, index_heads=2, index_dim=8, index_topk=2, output_groups=2,
)  # fmt: skip


def empty(*size: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(size, dtype=dtype, device=META)


def laid_out(spec: AttentionSpec, **states: int) -> Any:
    """Of a step in which two requests decode and two bring prompts, on the backend of a GPU."""
    (group,) = cache_groups([spec])
    place = Place(device="cuda", dtype="bfloat16", page_size=4, architecture=90)
    paged = paged_attention(
        group, num_pages=64, page_size=4, max_running=4, max_context=64, device=META, dtype=BF16,
        chosen=choose(spec, place), **states,
    )  # fmt: skip
    decoding, chunks = (
        [Chunk(sequence(row, 16 * row, 15), start, end) for row, start, end in part]
        for part in ([(0, 40, 41), (1, 3, 4)], [(2, 0, 9), (3, 20, 45)])
    )
    for row, chunk in enumerate((*decoding, *chunks)):
        chunk.request.state_slots = [row]
    return paged.laid_out(decoding, chunks)


def test_latent_attention(device: NoWaits) -> None:
    up = UpProjection(empty(4, 16 + 12, 32), 16)
    for spec, index in (
        (LATENT, None),
        (SPARSE, Index(empty(36, 2, 8), empty(36, 8), empty(36, 2, dtype=torch.float32))),
    ):
        with device:
            out = laid_out(spec).latent(0, empty(36, 4, 24), empty(36, 40), up, index)
        assert out.shape == (36, 4, 12)


def test_compressed_attention(device: NoWaits) -> None:
    def compressor(size: int) -> Compressor:
        return Compressor(spec=COMPRESSED, bias_RX=empty(4, size), norm=lambda x: x, turn=lambda x, at: x)

    rest = Compressible(
        raw_NX=empty(36, 4 * 16 + 4 * 8),
        entries=compressor(32),
        index_entries=compressor(16),
        index_queries=empty(36, 2, 8),
        index_weights=empty(36, 2, dtype=torch.float32),
    )
    with device:
        step = laid_out(COMPRESSED, drafts=0, snapshots=0)
        out = step.compressed(0, empty(36, 4, 16), empty(36, 16), empty(4, dtype=torch.float32), rest)
    assert out.shape == (36, 4, 16)
