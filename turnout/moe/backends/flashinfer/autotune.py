"""FlashInfer's tactics: timed once before serving, on rank 0 for all ranks, and kept on disk.

Its kernels come in many cuts ("tactics"), of which its autotuner takes the fastest for each of the batch
sizes that it rounds to, up to the plan's bound. That needs a device to itself and a batch, but no dispatcher:
the runner is given tokens made up here, spread evenly over all experts. So nothing is exchanged while rank 0
times, and its choice is everyone's: ranks whose tactics differ would wait for the slowest.

What was chosen is kept in one file for each library version, device, layer and parallel layout;
FlashInfer itself refuses a file from another environment. Delete the file to tune again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from turnout.errors import UserError
from turnout.moe.backends.flashinfer.declaration import BACKEND
from turnout.moe.batch import Hidden, TokensBatch
from turnout.moe.interface import Experts
from turnout.moe.plan import PHASES, MoEPlan
from turnout.moe.spec import MoESpec
from turnout.parallel.group_exchange import gather_values
from turnout.parallel.groups import Group
from turnout.vocabulary import Layout

LIBRARY = "flashinfer-python"
OURS = frozenset(declared.name for declared in BACKEND.runners)
log = logging.getLogger("turnout.moe")

Progress = Callable[[str, int, int], None]


def tune(
    runner: Experts,
    spec: MoESpec,
    plan: MoEPlan,
    *,
    device: torch.device,
    device_name: str,
    world: Group,
    folder: Path,
    progress: Progress | None = None,
) -> None:
    """Choose tactics for batches of tokens up to the plan's bound, if it has any; collective. `runner` holds
    weights of one layer.

    world: all ranks; the first of them times. folder: for the kept file. Raises UserError where a rank cannot
    take over what the first one chose.
    """
    if Layout.TOKENS not in {plan.phase(phase).layout for phase in PHASES}:
        return
    chosen = ""
    if world.rank == 0:
        chosen = _on_first(
            runner, spec, plan, device, path(folder, spec, plan, device_name, world.size), progress
        )
    if world.size == 1:
        return
    chosen = gather_values(world, chosen)[0]
    if world.rank and not _load(chosen):
        raise UserError(
            f"rank {world.rank} cannot use the FlashInfer tactics that rank 0 chose: their versions of "
            "FlashInfer or CUDA, or their GPUs, differ; install the same on every host"
        )


def path(folder: Path, spec: MoESpec, plan: MoEPlan, device_name: str, ranks: int) -> Path:
    """The file of one layer on one device in one parallel layout."""
    layer: dict[str, Any] = {
        "library": version(LIBRARY),
        "device": device_name,
        "spec": repr(spec),
        "runner": next(name for name in plan.runners if name in OURS),
        "activations": plan.activation_format,
        "experts": plan.num_local_experts,
        "ranks": ranks,
        "tokens": _most(plan),
    }
    digest = hashlib.sha256(json.dumps(layer, sort_keys=True).encode()).hexdigest()
    return folder / "flashinfer" / f"{digest[:32]}.json"


def made_up(spec: MoESpec, tokens: int, device: torch.device) -> TokensBatch:
    """Normal hidden states in bf16, each token going to the next top_k experts in turn."""
    draw = torch.Generator(device).manual_seed(0)
    x_TH = torch.randn(tokens, spec.hidden_size, generator=draw, device=device).bfloat16()
    pairs = torch.arange(tokens * spec.top_k, device=device, dtype=torch.int32)
    ids_TK = (pairs % spec.num_experts).view(tokens, spec.top_k)
    weights_TK = torch.full((tokens, spec.top_k), 1 / spec.top_k, device=device)
    return TokensBatch(hidden=Hidden(data=x_TH), topk_ids=ids_TK, topk_weights=weights_TK)


def _on_first(
    runner: Experts, spec: MoESpec, plan: MoEPlan, device: torch.device, file: Path, progress: Progress | None
) -> str:
    """What the file holds, made now if need be. Without a folder to write to, every start tunes."""
    from flashinfer.autotuner import AutoTuner, autotune

    if file.is_file() and AutoTuner.get().load_configs(str(file)):
        return file.read_text()
    if progress is not None:
        progress("tuning FlashInfer kernels", 0, 1)
    with torch.inference_mode(False), torch.no_grad():  # buffers made here are written to by captured graphs
        batch = made_up(spec, _most(plan), device)
        with autotune(True):
            runner(batch)
    if progress is not None:
        progress("tuning FlashInfer kernels", 1, 1)
    with tempfile.TemporaryDirectory() as draft:
        fresh = Path(draft) / "tactics.json"
        AutoTuner.get().save_configs(str(fresh))
        chosen = fresh.read_text()
    if not AutoTuner.get().profiling_cache:  # it goes on without a word
        log.warning(
            "FlashInfer's autotuner could time no kernel, so its defaults run, which may be several times "
            "slower; FLASHINFER_LOGGING_LEVEL=debug says why (a module that it compiles may lack nvcc)"
        )
        return chosen
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(chosen)
    except OSError as error:
        log.warning("%s: cannot be kept (%s); the next start tunes again", file, error.strerror)
    return chosen


def _load(chosen: str) -> bool:
    from flashinfer.autotuner import AutoTuner

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tactics.json"
        file.write_text(chosen)
        return bool(AutoTuner.get().load_configs(str(file)))


def _most(plan: MoEPlan) -> int:
    """Tokens of the largest batch that a runner with tactics gets."""
    most = max(plan.phase(phase).max_tokens for phase in PHASES if plan.phase(phase).layout == Layout.TOKENS)
    tuned = [bound for bound, name in plan.runner_by_batch_size if name in OURS]
    return min(most, tuned[-1]) if tuned else most
