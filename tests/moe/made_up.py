"""Backends that exist only in tests, so that the planner is seen to join them by what they declare."""

from dataclasses import replace

from turnout.moe.backends.torch.workspace import workspace_bytes
from turnout.moe.budget import Budget
from turnout.moe.capabilities.capability import DispatcherCapability, RunnerCapability
from turnout.moe.plan import plan
from turnout.moe.spec import MoESpec
from turnout.parallel.hardware import GB, Hardware
from turnout.parallel.topology import Topology

TOKENS, EXPERTS = frozenset({"tokens"}), frozenset({"batched_experts"})
ALL_FORMATS = frozenset({"bf16", "fp8", "nvfp4", "mxfp4", "int4"})

CPU = Hardware(name="cpu", device="cpu", architecture=0, memory_bytes=32 * GB)
HOPPER = Hardware(name="h200", device="cuda", architecture=90, memory_bytes=141 * GB)
BLACKWELL = Hardware(name="b200", device="cuda", architecture=100, memory_bytes=192 * GB)

SPEC = MoESpec(hidden_size=1024, intermediate_size=512, num_experts=64, top_k=8)
NVFP4 = MoESpec(
    hidden_size=1024,
    intermediate_size=512,
    num_experts=64,
    top_k=8,
    format="nvfp4",
    quantized_activations=True,
)
BUDGET = Budget.from_limits(chunked_prefill_size=512, max_prefill_tokens=2048, max_running_requests=64)


def budget(topology, of=BUDGET):
    """The bounds `of` a rank among the data-parallel groups of `topology`."""
    return replace(of, dp_size=topology.dp_size)


def runner(name="oak", **fields):
    """A runner that does everything, in the tokens layout, but for what `fields` say."""
    defaults = {
        "summary": "",
        "layouts": TOKENS,
        "weight_formats": ALL_FORMATS,
        "activation_formats": frozenset({"bf16", "nvfp4"}),
        "workspace": workspace_bytes,
    }
    return RunnerCapability(name=name, **(defaults | fields))


def dispatcher(name="ash", **fields):
    """A dispatcher that gathers, in the tokens layout, but for what `fields` say."""
    return DispatcherCapability(name=name, **({"summary": "", "layout": "tokens"} | fields))


def make(spec=SPEC, *, runners=None, dispatchers=None, **given):
    """The plan for one rank on a CPU, by one runner and one dispatcher, but for what is given."""
    topology = given.get("topology", Topology())
    defaults = {
        "topology": topology,
        "budget": budget(topology),
        "hardware": CPU,
        "compute_dtype": "float32",
    }
    return plan(
        spec,
        runners=[runner()] if runners is None else runners,
        dispatchers=[dispatcher()] if dispatchers is None else dispatchers,
        **(defaults | given),
    )
