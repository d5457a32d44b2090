"""Make the bundled demo model: its tokenizer, its training, its export.

    python -m tools.train_demo tokenizer FOLDER        learn the tokenizer
    python -m tools.train_demo train --out DIR ...     train on a GPU, by the clock
    python -m tools.train_demo export DIR BF16 NVFP4   write DIR's parameters as two checkpoints
    python -m tools.train_demo measure MODEL           ask a checkpoint what it never saw, on this machine
    python -m tools.train_demo decode BF16             write the shipped NVFP4 checkpoint as a bf16 one

`train --architecture glm4_moe_lite`, `qwen3_next` and `deepseek_v4` make small models of other kinds, which
answer word problems alone: one with latent attention and a draft layer, one with layers of Gated DeltaNet,
one with compressed attention, several residual streams and layers that route by token id. On several GPUs
`torchrun --nproc-per-node 4 -m tools.train_demo train ...` divides every batch among as many ranks.

Training has two phases. The first is plain bf16. In the second every layer draws at each step
whether its experts run as NVFP4 (weights and activations), MXFP4 (weights) or bf16, so that the same
weights serve all three. The schedule goes by elapsed time: a run ends when it is told to, on any GPU.
docs/demo-model.md says how the shipped model was made.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from tools.command_line import parser_for
from tools.demo import fakequant, measure
from tools.demo.chat import END, PAD, prompt
from tools.demo.data import IGNORE, LONGEST, ROW, Batch, batches
from tools.demo.dialogues import heldout
from tools.demo.export import (
    ARCHITECTURES,
    TrainingModel,
    decoded,
    load_parameters,
    make_model,
    save_parameters,
    write_folder,
    write_json,
)
from tools.demo.model import DemoModel, Output, Quantization, attention_within
from tools.demo.optimizer import make_optimizers
from tools.demo.ranks import Ranks
from tools.demo.released_v4 import StreamModel, StreamShape
from tools.demo.tokens import load_tokenizer, token_id, train_tokenizer
from turnout import LLM, SamplingParams
from turnout.checkpoint.locate import ASSETS, locate
from turnout.checkpoint.quantize import InputAmax, quantize

BALANCE_WEIGHT = 0.01
DRAFT_WEIGHT = 0.3
WARMUP_STEPS = 200
CLIP = 1.0
SAVE_EVERY_SECONDS = 20  # what a run that is cut off loses at most
# How often a layer runs in each format while training with quantisation.
SHARES = {fakequant.BF16: 0.15, fakequant.NVFP4: 0.55, fakequant.MXFP4: 0.3}

LossStep = Callable[[Batch, Quantization | None], tuple[Tensor, Tensor, Output]]


class Trainer:
    """One run: model, optimisers and the clock. A schedule may be spread over several runs (`--to`)."""

    def __init__(self, args: argparse.Namespace):
        check(args)
        self.args = args
        self.ranks = Ranks.joined(args.device)
        self.device = self.ranks.device
        cuda = self.device.type == "cuda"
        torch.manual_seed(args.seed)
        torch.set_float32_matmul_precision("high")
        given = {name: getattr(args, name) for name in ("layers", "experts") if getattr(args, name)}
        self.model = make_model(args.architecture, torch.bfloat16 if cuda else torch.float32, **given)
        self.amax = torch.zeros(len(self.model.shape.moe_layers), 2, device=self.device)
        self.log: list[dict[str, float]] = []
        self.steps = self.first_step = 0
        self.progress = self.seconds = 0.0
        if args.resume:
            self._resume(args.resume)
        self.model.to(self.device)
        self.optimizers = make_optimizers(self.model, args.weight_decay)
        self.loss: LossStep = self._loss
        if cuda and isinstance(self.model, DemoModel):
            self.loss = torch.compile(self._loss, dynamic=False)
        elif cuda and not isinstance(self.model, DemoModel):
            self.model.compile_layers()

    def _resume(self, folder: Path) -> None:
        """Parameters, amax and the place in the schedule; the optimisers restart and warm up again."""
        load_parameters(self.model, folder)
        record = json.loads((folder / "training.json").read_text(encoding="utf-8"))
        self.amax = torch.tensor(record["amax"], device=self.device)
        self.log, self.progress = record["log"], record["progress"]
        self.steps = self.first_step = record["steps"]
        self.seconds = record["seconds"]

    def run(self) -> None:
        args = self.args
        whole = isinstance(self.model, DemoModel)
        ranks, seed, tokens = self.ranks, f"{args.seed}/{self.steps}", args.tokens // self.ranks.size
        seed += f"/{ranks.rank}" if ranks.rank else ""
        row = tokens if whole else ROW
        data = batches(args.tokenizer, tokens, seed, args.workers, row, problems_only=not whole)
        self._warm_up(next(data))
        ranks.first(0.0)  # the clock starts when the last of them has compiled, and NCCL has connected
        budget = 60 * args.minutes
        begun, seconds = self.progress, self.seconds
        start = saved = time.perf_counter()
        while self.progress < args.to:
            quantized = self.progress >= 1 - args.quantized_share
            batch = next(data).to(self.device)
            self._set_rate(self.progress)
            loss, drafted, balance, norm = self._step(batch, quantized)
            self.steps += 1
            now = time.perf_counter()
            self.seconds = seconds + now - start
            self.progress = min(1.0, begun + ranks.first(now - start) / budget)
            if self.steps % args.log_every == 0:
                self._record(quantized, loss, drafted, balance, norm)
            if now - saved > SAVE_EVERY_SECONDS:
                self.save()
                saved = now
        self.save()
        ranks.leave()

    def save(self) -> dict:
        """Write what a later run resumes from, in bf16, which is also what is shipped; the first rank does.
        Returns the record."""
        given = {k: str(v) if isinstance(v, Path) else v for k, v in vars(self.args).items() if k != "run"}
        record = {
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu",
            "torch": torch.__version__,
            "shape": asdict(self.model.shape),
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "steps": self.steps,
            "ranks": self.ranks.size,
            "tokens": self.steps * self.args.tokens,
            "seconds": round(self.seconds, 1),
            "progress": self.progress,
            "arguments": given,
            "amax": self.amax.tolist(),
            "heldout": {},
            "log": self.log,
        }
        if self.ranks.rank == 0:
            self.args.out.mkdir(parents=True, exist_ok=True)
            save_parameters(self.model, self.args.out, torch.bfloat16)
            write_json(self.args.out / "training.json", record)
        return record

    def _warm_up(self, batch: Batch) -> None:
        """Compile both phases before the clock starts; the gradients are thrown away."""
        batch = batch.to(self.device)
        for quantized in (False, True):
            for _ in range(2):
                loss, drafted, out = self.loss(batch, self._draw_formats() if quantized else None)
                (loss + drafted).backward()
                self.model.zero_grad(set_to_none=True)
                self.amax = out.amax

    def _step(self, batch: Batch, quantized: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        loss, drafted, out = self.loss(batch, self._draw_formats() if quantized else None)
        (loss + DRAFT_WEIGHT * drafted + BALANCE_WEIGHT * out.balance).backward()
        self.ranks.share_gradients(self.model.parameters())
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        for optimizer in self.optimizers:
            optimizer.step()
        self.model.zero_grad(set_to_none=True)
        # The largest magnitudes seen lately; forgotten slowly, as weights move on.
        self.amax = torch.maximum(self.ranks.largest(out.amax), 0.999 * self.amax)
        if out.load is not None and not isinstance(self.model, DemoModel):
            self.model.even_out(self.ranks.mean(out.load))
        return loss.detach(), drafted.detach(), out.balance.detach(), norm

    def _loss(self, batch: Batch, quant: Quantization | None) -> tuple[Tensor, Tensor, Output]:
        """(mean cross-entropy of answer tokens, that of the draft layer or 0, all else)"""
        if isinstance(self.model, DemoModel):
            attend = attention_within(batch.start, batch.starts, LONGEST)
            out = self.model(batch.ids, batch.position, attend, quant)
        else:
            out = self.model(batch, quant)
        loss = self._cross_entropy(out.hidden, batch.target)
        if out.drafted is None:
            return loss, torch.zeros_like(loss), out
        after_next = F.pad(batch.target[1:], (0, 1), value=IGNORE)  # a document's last token has none
        return loss, self._cross_entropy(out.drafted, after_next), out

    def _cross_entropy(self, hidden: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.model.logits(hidden).float(), target, ignore_index=IGNORE)

    def _draw_formats(self) -> Quantization:
        share = torch.tensor(list(SHARES.values()))
        drawn = torch.multinomial(share, len(self.amax), replacement=True)
        mode = torch.tensor(list(SHARES))[drawn]
        return Quantization(mode.to(self.device, non_blocking=True), self.amax)

    def _set_rate(self, progress: float) -> None:
        """Warm up, hold, then fall linearly to zero from `--decay-from` of the time on."""
        start = self.args.decay_from
        rate = self.args.rate * min(1.0, (self.steps - self.first_step + 1) / WARMUP_STEPS)
        rate *= min(1.0, (1 - progress) / (1 - start))
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate

    def _record(self, quantized: bool, loss: Tensor, drafted: Tensor, balance: Tensor, norm: Tensor) -> None:
        if not math.isfinite(loss.item() + drafted.item()):
            raise SystemExit(f"step {self.steps}: the loss is {loss.item()}, of drafts {drafted.item()}")
        row = {
            "step": self.steps,
            "seconds": round(self.seconds, 1),
            "loss": round(loss.item(), 5),
            "draft_loss": round(drafted.item(), 5),
            "balance": round(balance.item(), 4),
            "gradient_norm": round(norm.item(), 4),
            "quantized": float(quantized),
            "tokens_per_second": round(self.steps * self.args.tokens / max(self.seconds, 1e-9)),
        }
        self.log.append(row)
        if self.ranks.rank == 0:
            print(json.dumps(row), flush=True)


def check(args: argparse.Namespace) -> None:
    """Raise SystemExit for sizes that would be cut to others, or that an architecture does not have."""
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    row = 1 if args.architecture == "qwen3_moe" else ROW
    if args.tokens % (row * ranks):
        raise SystemExit(
            f"--tokens {args.tokens}: {args.architecture} learns in rows of {row} tokens, on {ranks} ranks"
        )
    kinds = len(StreamShape.rates)
    if args.architecture == "deepseek_v4" and (args.layers or kinds) > kinds:
        raise SystemExit(f"--layers {args.layers}: deepseek_v4 has kinds of attention for {kinds}")
    if args.quantized_share and args.to < 1 and args.to <= 1 - args.quantized_share:
        print(f"until {args.to:.0%} of the schedule nothing is quantised: --resume goes on", flush=True)


def train(args: argparse.Namespace) -> None:
    trainer = Trainer(args)
    trainer.run()
    if trainer.ranks.rank:
        return
    record = trainer.save()
    model = trainer.model.eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.bfloat16())  # as it will be shipped
    if not isinstance(model, DemoModel):
        print(
            f"{trainer.steps} steps; `turnout eval` of what `export` writes measures its answers", flush=True
        )
        return
    items = heldout(args.eval_questions, args.eval_seed)
    for name in measure.FORMATS if trainer.progress >= 1 else ("bf16",):
        groups = measure.accuracy(model, args.tokenizer, trainer.amax, name, items)
        print(name, {group: result["accuracy"] for group, result in groups.items()}, flush=True)
        record["heldout"][name] = {
            "accuracy": groups["wording"]["accuracy"],
            "questions": args.eval_questions,
            "seed": args.eval_seed,
            "groups": groups,
        }
        (args.out / "training.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def export(args: argparse.Namespace) -> None:
    """Write `args.folder` with the bf16 checkpoint and, next to it, the NVFP4 one made from it."""
    args.folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if args.tokenizer.resolve() != args.folder.resolve():
            shutil.copyfile(args.tokenizer / name, args.folder / name)
    run = json.loads((args.parameters / "training.json").read_text(encoding="utf-8"))
    model = make_model(run["arguments"].get("architecture", "qwen3_moe"), torch.bfloat16, **run["shape"])
    load_parameters(model, args.parameters)
    tokenizer = load_tokenizer(args.folder)
    write_folder(model, args.folder, token_id(tokenizer, END), token_id(tokenizer, PAD))
    write_json(args.folder / "training.json", summarize(run, args.commit, args.date))
    shutil.rmtree(args.nvfp4, ignore_errors=True)
    quantize(args.folder, args.nvfp4, "nvfp4", calibration=calibration(model, run["amax"]))


def decode(args: argparse.Namespace) -> None:
    """Write `args.folder`: the shipped NVFP4 checkpoint with its experts decoded to bf16."""
    decoded(args.nvfp4, args.folder)


def ask(args: argparse.Namespace) -> None:
    """Print which share of a checkpoint's greedy answers is right, by group, through this engine."""
    core = load_tokenizer(locate(args.model))
    items = heldout(args.questions, args.seed, unseen=not args.seen)
    prompts = [core.encode(prompt(i.messages, i.tools, i.thinking)).ids for i in items]
    greedy = SamplingParams(max_tokens=measure.LONGEST_ANSWER, temperature=0)
    with LLM(args.model, moe_activation_dtype=args.activations) as llm:
        completions = llm.generate(prompts, greedy)
    groups: dict[str, list[bool]] = {}
    for item, completion in zip(items, completions, strict=True):
        text = core.decode(completion.token_ids, skip_special_tokens=False).removesuffix(END)
        groups.setdefault(item.group, []).append(item.right(text))
    print(json.dumps({group: round(sum(right) / len(right), 5) for group, right in groups.items()}))


def summarize(run: dict, commit: str, date: str) -> dict:
    """What of a run's record is shipped: all but sample answers and most of the log."""
    heldout = {
        name: {key: result[key] for key in ("accuracy", "questions", "seed")}
        | {"groups": {group: counts["accuracy"] for group, counts in result["groups"].items()}}
        for name, result in run["heldout"].items()
    }
    log = run["log"][:: max(1, len(run["log"]) // 20)]
    return {"commit": commit, "date": date} | run | {"heldout": heldout, "log": log}


def calibration(model: TrainingModel, amax: list[list[float]]) -> dict[str, InputAmax]:
    """Every expert of a layer gets the layer's largest magnitudes, as in training."""
    moe = "layers.{}.ffn" if isinstance(model, StreamModel) else "model.layers.{}.mlp"
    return {
        f"{moe.format(layer)}.experts.{expert}": InputAmax(*largest)
        for layer, largest in zip(model.shape.moe_layers, amax, strict=True)
        for expert in range(model.shape.experts)
    }


def main() -> None:
    parser = parser_for(__doc__)
    verbs = parser.add_subparsers(required=True)
    verb = verbs.add_parser("tokenizer")
    verb.add_argument("folder", type=Path)
    verb.set_defaults(run=lambda args: train_tokenizer(args.folder))
    verb = verbs.add_parser("export")
    verb.add_argument("parameters", type=Path)
    verb.add_argument("folder", type=Path, help="gets the bf16 checkpoint")
    verb.add_argument("nvfp4", type=Path, help="written over where it exists")
    verb.add_argument("--tokenizer", type=Path, default=ASSETS / "demo")
    verb.add_argument("--commit", required=True, help="that the run was started from")
    verb.add_argument("--date", required=True)
    verb.set_defaults(run=export)
    verb = verbs.add_parser("decode")
    verb.add_argument("folder", type=Path, help="is made")
    verb.add_argument("--nvfp4", type=Path, default=ASSETS / "demo")
    verb.set_defaults(run=decode)
    verb = verbs.add_parser("measure")
    verb.add_argument("model", help="a folder, or `demo`")
    verb.add_argument("--questions", type=int, default=300, help="of each group")
    verb.add_argument("--seed", type=int, default=12345)
    verb.add_argument("--seen", action="store_true", help="ask in the phrasings of training")
    verb.add_argument("--activations", default="auto", help="of the experts: nvfp4 for W4A4")
    verb.set_defaults(run=ask)
    verb = verbs.add_parser("train")
    verb.add_argument("--out", type=Path, required=True)
    verb.add_argument("--tokenizer", type=Path, default=ASSETS / "demo")
    verb.add_argument("--resume", type=Path, help="folder of an earlier run to go on from")
    verb.add_argument("--minutes", type=float, default=13.0, help="of the whole schedule")
    verb.add_argument("--to", type=float, default=1.0, help="part of the schedule at which to stop")
    verb.add_argument("--quantized-share", type=float, default=0.4, help="last part of the time, quantised")
    verb.add_argument(
        "--decay-from", type=float, default=0.3, help="part of the time when the rate starts to fall"
    )
    verb.add_argument("--rate", type=float, default=3e-3)
    verb.add_argument("--weight-decay", type=float, default=0.1)
    verb.add_argument("--tokens", type=int, default=65536, help="per step, of all ranks")
    verb.add_argument("--architecture", choices=tuple(ARCHITECTURES), default="qwen3_moe")
    verb.add_argument("--layers", type=int, help="where not as many as the architecture has")
    verb.add_argument("--experts", type=int, help="likewise")
    verb.add_argument("--workers", type=int, default=15)
    verb.add_argument("--seed", type=int, default=0)
    verb.add_argument("--eval-questions", type=int, default=800, help="of each group")
    verb.add_argument("--eval-seed", type=int, default=12345)
    verb.add_argument("--log-every", type=int, default=200)
    verb.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    verb.set_defaults(run=train)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
