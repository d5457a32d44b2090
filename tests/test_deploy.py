"""The files of docs/deploy: their flags are Turnout's, and Kubernetes and Slurm would take them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.test_cli_flags import commands
from turnout.config import ServerConfig

FOLDER = Path(__file__).parents[1] / "docs" / "deploy"


def an_object(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    """A schema of an object with these fields and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


# What kubernetes-sigs/lws defines beyond the pods (config/crd/bases, v1), which `test_pods` checks.
POD_TEMPLATE = an_object(("spec",), metadata={"type": "object"}, spec={"type": "object"})
LEADER_WORKER_SET = an_object(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "leaderworkerset.x-k8s.io/v1"},
    kind={"const": "LeaderWorkerSet"},
    metadata={"type": "object", "required": ["name"]},
    spec=an_object(
        ("leaderWorkerTemplate",),
        replicas={"type": "integer", "minimum": 0},
        startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
        leaderWorkerTemplate=an_object(
            ("workerTemplate",),
            size={"type": "integer", "minimum": 1},
            restartPolicy={"enum": ["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
            leaderTemplate=POD_TEMPLATE,
            workerTemplate=POD_TEMPLATE,
        ),
    ),
)


@pytest.fixture(scope="module")
def leader_worker_set() -> dict[str, Any]:
    return yaml.safe_load((FOLDER / "leaderworkerset.yaml").read_text())


def pods(leader_worker_set: dict[str, Any]) -> dict[str, dict[str, Any]]:
    template = leader_worker_set["spec"]["leaderWorkerTemplate"]
    return {role: template[f"{role}Template"]["spec"] for role in ("leader", "worker")}


def flags(container: dict[str, Any]) -> dict[str, str]:
    return dict(argument.partition("=")[::2] for argument in container["args"])


def test_the_set(leader_worker_set: dict[str, Any]):
    jsonschema.validate(leader_worker_set, LEADER_WORKER_SET)


@pytest.mark.more
def test_pods(leader_worker_set: dict[str, Any]):
    from kubernetes_validate import ValidationError, validate

    for role, spec in pods(leader_worker_set).items():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": role}, "spec": spec}
        validate(pod, "1.33", strict=True)
        with pytest.raises(ValidationError):
            validate(pod | {"spec": spec | {"gracePeriod": 1}}, "1.33", strict=True)


def test_the_set_says_what_turnout_takes(leader_worker_set: dict[str, Any]):
    known = commands()
    serve = known["serve"] | known["shared by serve, plan, generate and eval"]
    (head,), (ranks,) = (pod["containers"] for pod in pods(leader_worker_set).values())
    assert flags(head).keys() <= serve
    assert flags(ranks).keys() <= known["rank"]
    gpus = [container["resources"]["limits"]["nvidia.com/gpu"] for container in (head, ranks)]
    assert gpus == [int(flags(ranks)["--count"])] * 2
    size = leader_worker_set["spec"]["leaderWorkerTemplate"]["size"]
    assert int(flags(head)["--nnodes"]) == size
    assert int(flags(head)["--tp"]) == sum(gpus) * size // 2
    assert flags(head)["--dist-init-addr"] == flags(ranks)["--head"]


def test_probes_and_grace_periods(leader_worker_set: dict[str, Any]):
    head, ranks = pods(leader_worker_set).values()
    (container,) = head["containers"]
    probes = {
        kind: container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")
    }
    assert probes == {"startup": "/health", "readiness": "/ready", "liveness": "/health"}
    (port,) = container["ports"]
    assert port["containerPort"] == int(flags(container)["--port"])
    drains = float(flags(container).get("--shutdown-timeout", ServerConfig.shutdown_timeout))
    assert min(head["terminationGracePeriodSeconds"], ranks["terminationGracePeriodSeconds"]) >= drains + 10


def test_the_script_for_slurm():
    script = FOLDER / "slurm.sh"
    subprocess.run(["bash", "-n", script], check=True)
    known, lines = commands(), script.read_text().replace("\\\n", " ").splitlines()
    for command in ("serve", "rank"):
        (line,) = (line for line in lines if f"turnout {command} " in line and not line.startswith("#"))
        words = line.partition(f"turnout {command} ")[2].split()
        taken = known[command] | known["shared by serve, plan, generate and eval"]
        assert {word for word in words if word.startswith("--")} <= taken


@pytest.mark.more
def test_the_example_of_ray_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two replicas answer as one model does here. Reading and writing take a CPU, too."""
    from ray.cluster_utils import Cluster

    from turnout import LLM, SamplingParams

    prompts = [f"Ann has {count} pears." for count in range(20)]
    lines = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
    (tmp_path / "prompts.jsonl").write_text(lines)
    words = ["demo", "2", str(tmp_path / "prompts.jsonl"), str(tmp_path / "answers")]
    monkeypatch.setenv("RAY_worker_niceness", "0")  # else 15: replicas wait for whatever else runs here
    monkeypatch.setenv("RAY_prestart_worker_first_driver", "0")  # else a process for each CPU, unused
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4})
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    try:
        subprocess.run([sys.executable, FOLDER / "ray_data.py", *words], check=True, timeout=200)
    finally:
        cluster.shutdown()
    files = (tmp_path / "answers").iterdir()
    found = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    with LLM("demo", load_progress=False) as llm:
        expected = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=32), progress=False)
    assert {one["prompt"]: one["answer"] for one in found} == {
        prompt: answer.text for prompt, answer in zip(prompts, expected, strict=True)
    }
    assert len(found) == len(prompts)
