"""What two checkouts answer to the same random questions: python -m tools.compare_plans OLD [NEW]

Layers, ranks, token bounds, hardware and requests are drawn from a seed; each checkout answers them in a
process of its own, with a plan or with refusals. Prints the first answers that differ and exits with 1 if any
does. NEW is by default the checkout that holds this file. Names and phrases that changed on purpose are in
RENAMED, and are replaced in the old answers before they are compared.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import inspect
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SHOWN = 5
HARDWARE = ("cpu", "cpu", "a100", "h100", "h200", "h200", "b200", "gb300", "NVIDIA H200")
LIMIT_SECONDS = 3600

# Patterns in the old answers -> what stands there in the new ones.
RENAMED = (
    (r"\btriton\b(?!>=)", "hopper"),  # the runner; triton>=3.6 is the package
    (r'"layout": "experts"', '"layout": "batched_experts"'),
    (r"layout 'experts'", "layout 'batched_experts'"),
    (r"(takes|layout) experts\b", r"\1 batched_experts"),
    (r'"buckets"', '"runner_by_batch_size"'),
    (r"tokens travel in", "tokens are dispatched in"),
    (r"results travel in", "results are combined in"),
    (r"the same bits in any company", "batch-invariant"),
    (r"nothing has to travel", "nothing has to be dispatched"),
    (r"no token travels, for every", "no token is dispatched: every"),
    (r"no result travels", "no result is sent"),
    (r"mend num_experts", "correct num_experts"),
    (r"shared_expert_beside", "overlap_shared_expert"),
)


def questions(count: int, seed: int) -> list[dict[str, Any]]:
    """Plain values, the same in every checkout."""
    draw = random.Random(seed)
    return [_question(draw) for _ in range(count)]


def _question(draw: random.Random) -> dict[str, Any]:
    def seldom(usual: Any, *others: Any) -> Any:
        return draw.choice(others) if draw.random() < 0.05 else usual

    tp_size = draw.choice([1, 1, 1, 2, 4, 8, 8, 16, 64, 6])
    divisors = [size for size in range(1, tp_size + 1) if tp_size % size == 0]
    dp_size = draw.choice([1, tp_size, draw.choice(divisors)])
    weights = draw.choice(["bf16", "fp8", "nvfp4", "nvfp4", "mxfp4"])
    return {
        "spec": {
            "hidden_size": draw.choice([256, 960, 2048, 2880, 4096, 7168, 7168, 8192]),
            "intermediate_size": draw.choice([128, 704, 768, 1536, 2048, 2880]),
            "num_experts": draw.choice([8, 60, 128, 128, 256]),
            "top_k": draw.choice([1, 2, 4, 8, 8, 12]),
            "expert_bias": seldom(False, True),
            "format": weights,
            "quantized_activations": weights == "nvfp4" and draw.random() < 0.7,
        },
        "activation": seldom("silu", "swiglu", "relu2"),
        "topology": {
            "tp_size": tp_size,
            "dp_size": seldom(dp_size, 3),
            "ep_size": seldom(draw.choice([tp_size, tp_size, draw.choice(divisors)]), 5),
            "enable_dp_attention": seldom(dp_size > 1, False),
            "nnodes": seldom(1, 2),
        },
        "limits": {
            "chunked_prefill_size": draw.choice([0, 512, 8192]),
            "max_prefill_tokens": draw.choice([128, 2048, 8192, 32768]),
            "max_running_requests": draw.choice([1, 64, 512]),
            "max_dispatch_tokens_per_rank": seldom(0, 64, 1024, 1 << 20),
        },
        "hardware": draw.choice(HARDWARE),
        "peer_access": seldom(True, False),
        "request": {
            "runner": seldom("auto", "torch", "numba", "triton", "flashinfer_cutedsl", "none such"),
            "dispatcher": seldom("auto", "none", "collective", "collective-experts", "nvlink",
                                 "nvlink-experts", "flashinfer", "deepep", "nvlimk"),
            "dispatcher_mode": seldom("auto", "normal", "low_latency"),
            "dispatch_format": seldom("auto", "bf16", "fp8", "nvfp4"),
            "combine_format": seldom("auto", "bf16", "fp8"),
            "activation_format": seldom("auto", "bf16", "fp8", "nvfp4"),
            "weight_storage": seldom("auto", "packed", "decoded"),
            "deterministic": seldom(False, True),
            "overlap_shared_expert": seldom(True, False),
            "two_batches": seldom(False, True),
        },
        "compute_dtype": draw.choice(["float32", "bfloat16", "bfloat16", "bfloat16", "float16"]),
        "num_layers": draw.choice([1, 24, 48, 61]),
        "measured": [[draw.uniform(50, 500) for _ in range(3)] for _ in range(7 * (draw.random() < 0.3))],
    }  # fmt: skip


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """What the `turnout` that is imported here says to it."""
    from turnout.errors import PlanRefused
    from turnout.moe.budget import Budget
    from turnout.moe.plan import Wishes, plan
    from turnout.moe.spec import Activation, MoESpec
    from turnout.parallel.hardware import GB, PRESETS, Hardware
    from turnout.parallel.topology import Topology

    name, peer_access = question["hardware"], question["peer_access"]
    if name == "cpu":
        hardware = Hardware(name="cpu", device="cpu", architecture=0, memory_bytes=64 * GB, present=True)
    elif name in PRESETS:
        hardware = PRESETS[name]
    else:  # present, so that installed packages and kept tables count
        hardware = Hardware(name=name, device="cuda", architecture=90, memory_bytes=141 * GB, present=True)
    topology = Topology(**question["topology"])
    # The name of this keyword and the registry's home changed; both answer to the same questions.
    keyword = "request" if "request" in inspect.signature(plan).parameters else "wishes"
    times = dict(zip(_runner_names(), question["measured"], strict=False))
    try:
        made = plan(
            MoESpec(**question["spec"], activation=Activation(kind=question["activation"])),
            topology=topology,
            budget=Budget.from_limits(**question["limits"], dp_size=topology.dp_size),
            hardware=dataclasses.replace(hardware, peer_access=peer_access),
            compute_dtype=question["compute_dtype"],
            num_layers=question["num_layers"],
            measured={name: dict(zip((1, 16, 256), us, strict=True)) for name, us in times.items()},
            **{keyword: Wishes(**question["request"])},
        )
    except PlanRefused as error:
        return {"headline": error.headline, "refusals": [str(refusal) for refusal in error.refusals]}
    fields = {f.name: getattr(made, f.name) for f in dataclasses.fields(made)}
    fields["tiles"] = [tokens for tokens, _ in made.tiles]  # what they are is the runner's own business
    fields["refused"] = [str(refusal) for refusal in made.refused]
    fields |= {phase: dataclasses.asdict(fields[phase]) for phase in ("prefill", "decode")}
    return fields


def _runner_names() -> list[str]:
    try:
        from turnout.moe.capabilities.declared import RUNNERS
    except ImportError:
        from turnout.registry import RUNNERS
    return list(RUNNERS)


def answers(checkout: Path, count: int, seed: int) -> list[dict[str, Any]]:
    """Of a checkout, in a process of its own."""
    drawn = ["--count", str(count), "--seed", str(seed)]
    done = subprocess.run(
        [sys.executable, str(Path(__file__)), str(checkout), "--answer", *drawn],
        env=os.environ | {"PYTHONPATH": str(checkout)},
        cwd=checkout,
        stdout=subprocess.PIPE,
        check=True,
        timeout=LIMIT_SECONDS,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def renamed(answer: dict[str, Any]) -> dict[str, Any]:
    text = json.dumps(answer)
    for old, new in RENAMED:
        text = re.sub(old, new, text)
    found: dict[str, Any] = json.loads(text)
    return found


def _in_order(answer: dict[str, Any]) -> str:
    return json.dumps(answer, indent=1, sort_keys=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path, nargs="?", default=ROOT)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kept", type=Path, help="keeps the answers of OLD from call to call")
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.answer:
        for question in questions(args.count, args.seed):
            sys.stdout.write(json.dumps(answer(question)) + "\n")
        return 0
    if args.kept and args.kept.is_file():
        before = json.loads(args.kept.read_text())[: args.count]
    else:
        before = answers(args.old.resolve(), args.count, args.seed)
        if args.kept:
            args.kept.write_text(json.dumps(before))
    after = answers(args.new.resolve(), args.count, args.seed)
    pairs = [(_in_order(renamed(a)), _in_order(b)) for a, b in zip(before, after, strict=True)]
    different = [place for place, (a, b) in enumerate(pairs) if a != b]
    for place in different[:SHOWN]:
        lines = difflib.unified_diff(
            *(text.splitlines() for text in pairs[place]), "old", "new", lineterm="", n=1
        )
        sys.stdout.write("\n".join([f"question {place}", *lines, ""]))
    plans = sum("headline" not in answer for answer in after)
    sys.stdout.write(f"{len(after)} answers, of which {plans} plans: {len(different)} differ\n")
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
