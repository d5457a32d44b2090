"""Run by test_nvlink.py with TRITON_INTERPRET=1: dispatch and combine between processes; prints JSON.

Ranks are forked and meet over gloo; their symmetric memory is shared memory. Each step compares every row of
the batch with what all ranks would have to send, and the combined result with the sum in the order of ranks,
to the bit.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait

import torch
from torch import Tensor

from tests.kernels import interpreter
from turnout.formats import fp8, nvfp4
from turnout.kernels.nvlink import combine, combine_fp8, links, waiting
from turnout.kernels.nvlink import dispatch as sending
from turnout.moe.backends.nvlink import buffers
from turnout.moe.backends.nvlink.batched_experts import NvlinkExpertsDispatch
from turnout.moe.backends.nvlink.dispatcher import NvlinkDispatch
from turnout.moe.batch import Hidden, TokensBatch
from turnout.moe.interface import DispatchSetup
from turnout.moe.plan import MoEPlan, PhasePlan
from turnout.moe.spec import MoESpec
from turnout.moe.wire_format import Wire
from turnout.parallel.groups import connect, disconnect
from turnout.parallel.symmetric import PeerError
from turnout.parallel.topology import Topology

late = waiting.late


def patient(*args):
    """Between two polls the other ranks may have the core."""
    time.sleep(1e-3)
    return late(*args)


CAPACITY, FEW = 3, 1
SCALE = torch.tensor(6 / nvfp4.GLOBAL_MAX)


@dataclass(frozen=True)
class Case:
    name: str
    ranks: int
    format: str = "bf16"
    back: str = "bf16"
    dtype: str = "bfloat16"
    hidden: int = 1152  # two flags a row, the second for a part
    top_k: int = 3
    experts: int = 8
    dp: int = 0  # 0: as many as ranks
    ep: int = 0
    steps: tuple[int, ...] = (0, 2)  # one token in words, more by flags

    @property
    def topology(self) -> Topology:
        dp, ep = self.dp or self.ranks, self.ep or self.ranks
        return Topology(tp_size=self.ranks, dp_size=dp, ep_size=ep, enable_dp_attention=dp > 1)


CASES = (
    Case("bf16", 2, steps=(0, 1, 2, 3, 4)),
    Case("fp8", 2, format="fp8"),
    Case("nvfp4", 2, format="nvfp4"),
    Case("back in fp8", 2, back="fp8", steps=(0, 5, 2)),
    Case("three ranks", 3, dtype="float32", hidden=64, experts=9, top_k=1, steps=(2, 3)),
    Case("three ranks, back in fp8", 3, dtype="float32", hidden=128, experts=9, back="fp8", steps=(1, 3)),
    Case("shared", 4, hidden=64, dp=2, ep=2, steps=(3,)),
    Case("in turns", 2, hidden=64, steps=(0, 3, 2)),
    Case("batched", 2, hidden=64),
    Case("deserted", 2, hidden=64),
    Case("overfull", 2, hidden=64),
)


def make_plan(case: Case, topology: Topology, dispatcher: str = "nvlink") -> tuple[MoESpec, MoEPlan]:
    spec = MoESpec(
        hidden_size=case.hidden, intermediate_size=32, num_experts=case.experts, top_k=case.top_k,
        format="nvfp4" if case.format == "nvfp4" else "bf16",
        quantized_activations=case.format == "nvfp4",
    )  # fmt: skip
    phases = {
        name: PhasePlan(
            phase=name, runner="torch", dispatcher=dispatcher, layout="tokens", wire_format=case.format,
            reduce="none", max_tokens=case.ranks * CAPACITY, combine_format=case.back,
        )
        for name in ("prefill", "decode")
    }  # fmt: skip
    span = topology.expert_range(case.experts)
    plan = MoEPlan(
        **phases, activation_format="bf16", weight_storage="decoded", compute_dtype=case.dtype,
        first_expert=span.start, num_local_experts=len(span), weight_bytes=0, workspace_bytes=0,
        dispatch_bytes=0, two_batches=case.name == "in turns",
    )  # fmt: skip
    return spec, plan


def tokens_of(case: Case, step: int, dp_rank: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(100 * step + dp_rank)
    x_TH = torch.randn(count, case.hidden, generator=draw).to(getattr(torch, case.dtype))
    x_TH[::2, 4:36] = 0  # words of zeros
    ids_TK = (
        torch.stack([torch.randperm(case.experts, generator=draw)[: case.top_k] for _ in range(count)])
        if count
        else torch.zeros(0, case.top_k)
    )
    if step == 2:  # all to the last experts
        ids_TK = torch.arange(case.experts - case.top_k, case.experts).repeat(count, 1)
    if step == 3:
        ids_TK[1::3] = -1
    return x_TH, ids_TK.int(), torch.rand(count, case.top_k, generator=draw)


def experts(hidden_NH: Tensor, ids_NK: Tensor, weights_NK: Tensor, held: range, shard: int) -> Tensor:
    """Something that differs by expert and shard; rows without an expert of `held` are NaN."""
    mine_NK = (ids_NK >= held.start) & (ids_NK < held.stop)
    factor_N = (weights_NK * (ids_NK + 1 + shard) * mine_NK).sum(1, keepdim=True)
    out_NH = hidden_NH.float() * factor_N
    return torch.where(mine_NK.any(1, keepdim=True), out_NH, torch.nan)


def run_case(case: Case, rank: int, folder: str) -> bool:
    topology = replace(case.topology, rank=rank)
    groups = connect(topology, init_method=f"file://{folder}/{case.name}", device=torch.device("cpu"))
    spec, plan = make_plan(case, topology)
    setup = DispatchSetup(
        spec=spec, plan=plan, phase="decode", groups=groups, device=torch.device("cpu"), input_scale=SCALE
    )
    dispatcher, wire = NvlinkDispatch(setup), Wire(setup)
    atp, D, dtype = topology.attention_tp, topology.dp_size, getattr(torch, case.dtype)
    good = True
    most = CAPACITY * atp
    steps = [
        [1] * D,
        [0] * D,
        [most] * D,
        [1 + 2 * (d % 2) for d in range(D)],
        [most] + [0] * (D - 1),
        [1] * D,
    ]
    for step in case.steps:
        # In turns, the step before is combined while this one's tokens are under way.
        turns = [step] if case.name != "in turns" else [step, (step + 1) % len(steps)]
        sent = []
        for turn in turns:
            counts = steps[turn]
            everyone = [tokens_of(case, turn, d, counts[d]) for d in range(D)]
            own = everyone[topology.dp_rank]
            batch, state = dispatcher.dispatch(*own, counts)
            held = topology.expert_range(case.experts)
            good &= same_batch(case, batch, everyone, held, wire, atp)
            y = experts(
                batch.hidden.decode(), batch.topk_ids, batch.topk_weights, held, topology.expert_tp_rank
            )
            sent.append((own, y.to(dtype), state))
        if rank % 2:  # arrives late
            time.sleep(0.01)
        for (x_TH, ids_TK, weights_TK), y, state in sent:
            got_TH = dispatcher.combine(y, state)
            hidden_TH = wire.encode(x_TH).decode()
            total_TH = torch.zeros(len(x_TH), case.hidden)
            for r in range(case.ranks):
                span = replace(topology, rank=r).expert_range(case.experts)
                part_TH = experts(hidden_TH, ids_TK, weights_TK, span, r % topology.expert_tp)
                part_TH = part_TH.to(dtype).nan_to_num().float()
                total_TH += fp8.fake_quantize(part_TH) if case.back == "fp8" and r != rank else part_TH
            good &= torch.equal(got_TH, total_TH.to(dtype))
        if not good:
            print(case, "rank", rank, "step", step, file=sys.stderr)
            break
    disconnect()
    return good


def batched(case: Case, rank: int, folder: str) -> bool:
    """As rows by expert, and back: weighted there, and summed within a rounding of each rank's part."""
    topology = replace(case.topology, rank=rank)
    groups = connect(topology, init_method=f"file://{folder}/{case.name}", device=torch.device("cpu"))
    spec, plan = make_plan(case, topology, "nvlink-experts")
    setup = DispatchSetup(spec=spec, plan=plan, phase="decode", groups=groups, device=torch.device("cpu"))
    dispatcher = NvlinkExpertsDispatch(setup)
    x_TH, ids_TK, weights_TK = tokens_of(case, 0, rank, 2)
    batch, state = dispatcher.dispatch(x_TH, ids_TK, weights_TK, [2, 2])
    both = [tokens_of(case, 0, r, 2) for r in range(2)]
    good = True
    for e, expert in enumerate(topology.expert_range(case.experts)):
        mine = [x[t] for t in range(2) for x, ids, _ in both if expert in ids[t]]  # rows: t R + s
        good &= batch.counts[e].item() == len(mine)
        good &= all(torch.equal(batch.hidden.data[e, i], mine[i]) for i in range(len(mine)))
    scaled = torch.tensor([e + 1.0 for e in topology.expert_range(case.experts)]).bfloat16()
    got_TH = dispatcher.combine(batch.hidden.data * scaled[:, None, None], state)
    factor_T = (weights_TK * (ids_TK + 1)).sum(1, keepdim=True)
    good &= torch.allclose(got_TH.float(), factor_T * x_TH.float(), rtol=2e-2, atol=1e-2)
    disconnect()
    return bool(good)


def deserted(case: Case, rank: int, folder: str) -> bool:
    """Rank 1 makes a call fewer than rank 0, which says so, at its next call."""
    topology = replace(case.topology, rank=rank)
    groups = connect(topology, init_method=f"file://{folder}/{case.name}", device=torch.device("cpu"))
    spec, plan = make_plan(case, topology)
    dispatcher = NvlinkDispatch(
        DispatchSetup(spec=spec, plan=plan, phase="decode", groups=groups, device=torch.device("cpu"))
    )
    for step in range(2 - rank):
        batch, state = dispatcher.dispatch(*tokens_of(case, step, rank, 2), [2, 2])
        dispatcher.combine(batch.hidden.data, state)
        links.POLLS = 100
    good = True
    if rank == 0:
        good &= (batch.topk_ids[1::2] == -1).all().item()  # nothing came from rank 1
        try:
            dispatcher.dispatch(*tokens_of(case, 2, rank, 2), [2, 2])
            good = False
        except PeerError as error:
            good &= "rank 0 gave up waiting for rank 1 in dispatch of epoch 2" in str(error)
    groups.world.all_gather(torch.zeros(1), [1, 1])
    disconnect()
    return good


def overfull(case: Case, rank: int, folder: str) -> bool:
    """Rank 1 believes that rank 0 brings less than it does, and says so at its next call."""
    topology = replace(case.topology, rank=rank)
    groups = connect(topology, init_method=f"file://{folder}/{case.name}", device=torch.device("cpu"))
    spec, plan = make_plan(case, topology)
    dispatcher = NvlinkDispatch(
        DispatchSetup(spec=spec, plan=plan, phase="decode", groups=groups, device=torch.device("cpu"))
    )
    counts = [1, 1] if rank == 1 else [3, 1]
    dispatcher.dispatch(*tokens_of(case, 0, rank, counts[rank]), counts)
    said = ""
    try:
        dispatcher.exchange.check()
    except PeerError as error:
        said = str(error)
    good = "rank 1: rank 0 brought 3 tokens" in said if rank == 1 else said == ""
    groups.world.all_gather(torch.zeros(1), [1, 1])
    disconnect()
    return good


def same_batch(case, batch: TokensBatch, everyone, held: range, wire: Wire, atp: int) -> bool:
    """Every row: token t of rank s in row t R + s, if it chose an expert of `held`, else padding."""
    R = case.ranks
    room = len(batch.topk_ids) // R
    sent = [wire.encode(x_TH) for x_TH, _, _ in everyone]
    for row in range(room * R):
        t, s = divmod(row, R)
        _, ids_TK, weights_TK = everyone[s // atp]
        bounds = [-(-len(ids_TK) * i // atp) for i in range(atp + 1)]
        t += bounds[s % atp]
        mine_K = (
            (ids_TK[t] >= held.start) & (ids_TK[t] < held.stop)
            if t < bounds[s % atp + 1]
            else torch.zeros(case.top_k, dtype=torch.bool)
        )
        wanted = torch.where(mine_K, ids_TK[t], -1) if mine_K.any() else torch.full((case.top_k,), -1).int()
        if not torch.equal(batch.topk_ids[row], wanted):
            return False
        if mine_K.any():
            hidden = sent[s // atp]
            if not torch.equal(batch.topk_weights[row], torch.where(mine_K, weights_TK[t], 0)):
                return False
            if not torch.equal(at(batch.hidden, row).decode(), at(hidden, t).decode()):
                return False
    return True


def at(hidden: Hidden, row: int) -> Hidden:
    scale = None if hidden.scale is None else hidden.scale[row]
    return replace(hidden, data=hidden.data[row], scale=scale)


def rank_main(case: Case, rank: int, folder: str, pipe: Connection) -> None:
    run = {"deserted": deserted, "overfull": overfull, "batched": batched}.get(case.name, run_case)
    pipe.send(run(case, rank, folder))


def main(folder: str) -> dict[str, bool]:
    context = multiprocessing.get_context("fork")
    results = {}
    for case in CASES:
        pipes, ranks = [], []
        for rank in range(case.ranks):
            mine, theirs = context.Pipe(False)
            process = context.Process(target=rank_main, args=(case, rank, folder, theirs))
            process.start()
            theirs.close()
            pipes.append(mine)
            ranks.append(process)
        wait(pipes)
        results[case.name] = all(pipe.poll(60) and pipe.recv() for pipe in pipes)
        for process in ranks:
            process.kill()
            process.join()
    return results


if __name__ == "__main__":
    torch.set_num_threads(1)
    interpreter.prepare()
    sending.late = combine.late = combine_fp8.late = patient
    buffers.FEW_TOKENS = FEW
    links.POLLS = 20_000  # of a millisecond or more
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(main(folder)))
