"""The import law: arrows point down, backends do not know each other, and what needs no torch loads none.

    cli -> commands -> server, evals, bench -> engine -> models -> attention, moe, checkpoint
        -> parallel -> formats, kernels

Every import statement counts, at the top of a file, inside a function or under TYPE_CHECKING.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "turnout").rglob("*.py"))

# "" is turnout itself: its version, and lazy names.
LEAVES = {
    "errors",
    "lazy",
    "flags",
    "config_sources",
    "config",
    "cache",
    "malloc",
    "registry",
    "packages",
    "vocabulary",
    "",
}
BOTTOM = {"parallel", "formats", "kernels"}
BELOW_ENGINE = {"models", "attention", "moe", "checkpoint", *BOTTOM}
MAY_IMPORT = {
    "errors": set(),
    "lazy": set(),
    "flags": {"errors"},
    "config_sources": {"errors", "flags"},
    "config": {"errors", "flags", "config_sources"},
    "cache": {"errors"},
    "registry": {"errors"},
    "vocabulary": set(),
    "packages": set(),
    "malloc": set(),
    "kernels": set(),
    "formats": set(),
    "parallel": {"formats", "kernels"},
    "moe": BOTTOM,
    "attention": BOTTOM,
    "checkpoint": BOTTOM,
    "models": {"attention", "moe", "checkpoint", *BOTTOM},
    "engine": BELOW_ENGINE,
    "server": {"engine", *BELOW_ENGINE},
    "evals": {"server.launch", "engine", *BELOW_ENGINE},
    "bench": {"server.launch", "evals", "engine", *BELOW_ENGINE},
    "integrations": {"server.launch", *BELOW_ENGINE},
    "commands": {"server", "evals", "bench", "engine", *BELOW_ENGINE},
    "__main__": {"cli"},
    "cli": {"commands", "server", "evals", "bench", "engine", *BELOW_ENGINE},
    "": {"engine", "lazy"},
}
# What imports against the order today. Each line goes when what it imports moves down; none is added.
EXCEPTIONS: set[tuple[str, str]] = set()
# The order inside a package, lowest first: a file or folder imports only what stands before it.
ORDER = {
    "attention": [
        "kinds",
        "capability",
        "choose",
        "workspace",
        "indexing",
        "entries",
        "delta_rule",
        "up_projection",
        "interface",
        "paged",
        "states",
        "rows",
        "torch",
        "latent",
        "sparse_latent",
        "compressed",
        # Nothing imports a backend by name: paged.py finds them through turnout/registry.py.
        "backends",
        "caches",
    ],
    "engine": [
        "threads",
        "progress_bars",
        "tokenizer",
        "grammar",
        "sampling_params",
        "grammar_matcher",
        "messages",
        "stream_intervals",
        "speculative",
        "cuda_graph_policy",
        "state_limits",
        "memory_plan",
        "memory_fit",
        "parallel_config",
        "chosen_sizes",
        "contradictions",
        "engine_plan",
        "parallel_layouts",
        "overlap_policy",
        "scheduler",
        "sampling",
        "ranks",
        "step",
        "layer_inputs",
        "selfcheck",
        "startup",
        "warmup",
        "core",
        "builder",
        "calibration",
        "tune",
        "verify",
        "llm",
        "profiling",
        "worker",
        "fork_server",
    ],
    # Nothing imports a backend by name: capabilities/declared.py finds them through turnout/registry.py.
    "moe": [
        "spec",
        "batch",
        "budget",
        "arena",
        "accuracy",
        "reference",
        "routing",
        "capabilities",
        "planning",
        "plan",
        "interface",
        "wire_format",
        "backends",
        "autotune",
        "runner_by_batch_size",
        "in_flight",
        "layer",
        "verify",
        "tune",
    ],
    "server": [
        "supervise",
        "expert_window",
        "engine_view",
        "metric_list",
        "metrics",
        "open_files",
        "request_log",
        "tracing",
        "api",
        "http_server",
        "http_workers",
        "dashboard",
        "run",
        "launch",
    ],
}
OPTIONAL = {
    "triton",
    "triton_kernels",
    "flashinfer",
    "deep_ep",
    "fla",
    "flash_attn",
    "opentelemetry",
    "ray",
}


def module_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(file) for file in FILES}


def imports(tree: ast.AST, module: str, *, package: bool = False) -> Iterator[tuple[int, str]]:
    """(line, module) of each import; for `from a import b` that is a.b where it is a module, else a."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                above = module.split(".")[: len(module.split(".")) - node.level + package]
                source = ".".join([*above, *([source] if source else [])])
            for alias in node.names:
                inner = f"{source}.{alias.name}"
                yield node.lineno, inner if inner in MODULES or source == "turnout" else source


@cache
def imported(source: str, module: str, *, package: bool = False) -> tuple[tuple[int, str], ...]:
    """`imports` of a text; several laws ask, and parsing takes longest."""
    return tuple(imports(ast.parse(source), module, package=package))


def part_of(module: str) -> str:
    """The part of the house a module belongs to: turnout.moe.plan -> moe."""
    name = [*module.split("."), ""][1]
    return {"LLM": "engine", "SamplingParams": "engine", "__version__": ""}.get(name, name)


def violations(module: str, source: str, *, package: bool = False) -> list[str]:
    """What `source`, as the text of `module`, imports against the law."""
    found = []
    mine = part_of(module)
    for line, target in imported(source, module, package=package):
        if target.split(".")[0] != "turnout" or (module, target) in EXCEPTIONS:
            continue
        theirs = part_of(target)
        allowed = MAY_IMPORT[mine]
        listed = theirs in allowed or any(
            target.startswith(f"turnout.{name}") for name in allowed if "." in name
        )
        if not (theirs == mine or listed or (theirs in LEAVES and mine not in LEAVES)):
            found.append(f"{module}:{line} imports {target}")
        if _siblings(module, target):
            found.append(f"{module}:{line} imports {target}: backends do not know each other")
    return found


def out_of_order(module: str, source: str, *, package: bool = False) -> list[str]:
    """What `source`, as the text of `module`, imports of its own package against ORDER."""
    part = part_of(module)
    order, mine = ORDER[part], _node(module)
    if mine is None:
        return []
    if mine not in order:
        return [f"{module}: a new file or folder of {part}/ needs a place in ORDER"]
    allowed = order[: order.index(mine) + 1]
    return [
        f"{module}:{line} imports {target}: {node} does not stand before {mine} in ORDER"
        for line, target in imported(source, module, package=package)
        if part_of(target) == part and (node := _node(target)) is not None and node not in allowed
    ]


def _node(module: str) -> str | None:
    """The file or folder directly inside a package that `module` is, or belongs to; None: the package."""
    return next(iter(module.split(".")[2:]), None)


def _siblings(module: str, target: str) -> bool:
    """Whether a file in one backend's folder imports from another's."""
    mine, theirs = (
        re.match(r"turnout\.(?:attention|moe)\.backends\.(\w+)\.", name) for name in (module, target)
    )
    return bool(mine and theirs and mine[1] != theirs[1])


def broken(law: Callable[..., list[str]], files: Iterable[Path]) -> list[str]:
    """What all these files do against `law`."""
    return [
        found
        for file in files
        for found in law(module_of(file), file.read_text(), package=file.name == "__init__.py")
    ]


def test_imports_point_down():
    new = {part_of(module) for module in MODULES} - MAY_IMPORT.keys()
    assert not new, "a new part of the house needs a line in MAY_IMPORT"
    assert broken(violations, FILES) == []


def test_imports_inside_a_package_point_down():
    assert broken(out_of_order, (f for f in FILES if part_of(module_of(f)) in ORDER)) == []


@pytest.mark.parametrize("part", ORDER)
def test_the_order_names_what_is_there(part):
    there = {_node(m) for m in MODULES if m.startswith(f"turnout.{part}.")}
    assert sorted(ORDER[part]) == sorted(there)


@pytest.mark.parametrize(
    ("module", "source", "found"),
    [
        ("turnout.engine.scheduler.request", "from turnout.engine.step import forward", 1),
        ("turnout.engine.scheduler.request", "def f():\n    from turnout.engine import core", 1),
        ("turnout.engine.scheduler.request", "if TYPE_CHECKING:\n    from ..step.forward import Forward", 1),
        ("turnout.engine.scheduler.request", "from turnout.engine.scheduler.scheduler import Chunk", 0),
        ("turnout.engine.step.forward", "from turnout.engine.scheduler.request import Request", 0),
        ("turnout.engine.surprise", "", 1),
        ("turnout.server.supervise.hosts", "from turnout.server.api.errors import ApiError", 1),
        ("turnout.attention.interface", "import turnout.attention.torch", 1),
        ("turnout.moe.capabilities.capability", "from turnout.moe.planning.problem import PHASES", 1),
        ("turnout.moe.planning.measured", "from turnout.moe.backends.hopper import tile_config", 1),
        ("turnout.moe.planning.problem", "from turnout.moe.capabilities.limits import Limits", 0),
    ],
)
def test_the_order_is_enforced(module, source, found):
    assert len(out_of_order(module, source)) == found


def test_every_exception_is_still_one():
    made = {
        (module_of(f), target)
        for f in FILES
        for _, target in imported(f.read_text(), module_of(f), package=f.name == "__init__.py")
    }
    assert made >= EXCEPTIONS


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("turnout.moe.layer", "import turnout.checkpoint"),
        ("turnout.moe.layer", "from turnout.engine.core import EngineCore"),
        ("turnout.checkpoint.files", "def f():\n    from turnout.moe import spec"),
        ("turnout.checkpoint.files", "from ..moe.spec import MoESpec"),
        ("turnout.checkpoint.files", "if TYPE_CHECKING:\n    from turnout import moe"),
        ("turnout.evals.run", "from turnout.server.api.app import create_app"),
        ("turnout.errors", "from turnout.config import Config"),
        ("turnout.formats.fp8", "from turnout.kernels.common import panels"),
        ("turnout.moe.backends.hopper.runner", "from turnout.moe.backends.torch.runner import TorchRunner"),
        (
            "turnout.moe.backends.hopper.runner",
            "from turnout.moe.backends.local.dispatcher import NoDispatch",
        ),
        ("turnout.models.qwen3_moe", "import turnout.cli"),
        ("turnout.models.qwen3_moe", "from turnout import LLM"),
    ],
)
def test_the_law_is_enforced(module, source):
    assert len(violations(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("turnout.evals.run", "from turnout.server.launch import launch"),
        ("turnout.moe.layer", "from turnout.registry import BACKENDS"),
        ("turnout.moe.planning.problem", "from turnout.moe.capabilities.capability import RunnerCapability"),
        ("turnout.moe.backends.hopper.runner", "from turnout.moe.batch import Hidden"),
        ("turnout.engine.core", "from turnout import __version__"),
        ("turnout.formats.fp8", "from turnout.errors import UserError"),
    ],
)
def test_the_law_allows_what_it_should(module, source):
    assert violations(module, source) == []


@cache
def at_import(file: Path) -> set[str]:
    """The modules, and the first names of packages, that importing this file imports."""
    top = ast.Module(body=_top_level(ast.parse(file.read_text())), type_ignores=[])
    targets = {target for _, target in imports(top, module_of(file), package=file.name == "__init__.py")}
    return {target if target.startswith("turnout") else target.split(".")[0] for target in targets}


def _top_level(tree: ast.Module) -> list[ast.stmt]:
    """Import statements that run when the module is imported."""
    found: list[ast.stmt] = []
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.append(node)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and not _typing_only(
            node
        ):
            pending += ast.iter_child_nodes(node)
    return found


def _typing_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


# Kernels are written in these packages; whoever launches one imports its file where it does so.
KERNELS = {m for f in FILES if part_of(m := module_of(f)) == "kernels" and at_import(f) & OPTIONAL}


def test_optional_packages_are_imported_where_they_are_used():
    found = {module_of(file): at_import(file) & (OPTIONAL | KERNELS) for file in FILES}
    assert {module: names for module, names in found.items() if names and module not in KERNELS} == {}


def test_nothing_below_the_engine_reads_the_environment():
    names = {"environ", "getenv", "environb"}
    found = []
    for file in FILES:
        text = file.read_text()
        if part_of(module_of(file)) not in BELOW_ENGINE or not any(name in text for name in names):
            continue
        for node in ast.walk(ast.parse(text)):
            read = isinstance(node, ast.Attribute) and node.attr in names
            imported_name = (
                isinstance(node, ast.ImportFrom)
                and node.module == "os"
                and any(alias.name in names for alias in node.names)
            )
            if read or imported_name:
                found.append(f"{module_of(file)}:{node.lineno}")
    assert found == []


def test_one_file_patches_triton():
    """And says which versions it knows (kernels/common/compilation.py)."""
    patching = {
        module_of(file)
        for file in FILES
        for _, target in imported(file.read_text(), module_of(file), package=file.name == "__init__.py")
        if target.startswith(("unittest.mock", "triton.runtime", "triton.compiler", "triton.backends"))
        or target == "triton.knobs"
    }
    assert patching == {"turnout.kernels.common.compilation"}


TORCH_FREE = [
    "turnout",
    "turnout.__main__",
    "turnout.cli",
    "turnout.config",
    "turnout.errors",
    "turnout.registry",
    "turnout.vocabulary",
    "turnout.formats.spec",
    "turnout.checkpoint",
    "turnout.checkpoint.headers",
    "turnout.models",
    "turnout.moe",
    "turnout.moe.plan",
    "turnout.parallel.hardware",
    "turnout.parallel.topology",
    "turnout.engine.engine_plan",
    "turnout.commands.plan",
    "turnout.commands.generate",
    "turnout.commands.serve",
    "turnout.commands.bench",
    "turnout.engine.messages",
    "turnout.engine.sampling.detokenizer",
    "turnout.engine.scheduler.block_pool",
    "turnout.engine.sampling_params",
    "turnout.engine.scheduler.scheduler",
    "turnout.engine.tokenizer",
    "turnout.engine.worker",
    "turnout.engine.fork_server",
    "turnout.evals.wordmath",
    *sorted(m for m in MODULES if part_of(m) == "server"),
]


def test_what_needs_no_torch_does_not_load_it():
    """Imports each in turn in one fresh process and names the first that brings torch in."""
    code = (
        "import sys, importlib\n"
        f"for name in {TORCH_FREE!r}:\n"
        "    importlib.import_module(name)\n"
        "    for heavy in ('torch', 'transformers'):\n"
        "        assert heavy not in sys.modules, f'{name} imports {heavy}'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr.splitlines()[-1]
