"""The list of metrics is what a scrape shows; the window over experts; what requests leave in histograms."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import cast

import httpx
import numpy as np
import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

from tests.server.processes import eventually
from turnout.engine.messages import EngineStats
from turnout.server.engine_view import Viewer
from turnout.server.expert_window import CountWindow, balancedness, by_slice, hot_share
from turnout.server.metric_list import METRICS, PREFIX, SECONDS, Kind
from turnout.server.metrics import Histogram
from turnout.server.supervise.engine import EngineSupervisor

GRAFANA = Path(__file__).parents[2] / "docs" / "grafana.json"


def families(http: httpx.Client) -> dict[str, Family]:
    """By name without `_total`, as the parser names them."""
    return {family.name: family for family in text_string_to_metric_families(http.get("/metrics").text)}


def total(http: httpx.Client, name: str) -> float:
    return sum(
        s.value for family in families(http).values() for s in family.samples if s.name == PREFIX + name
    )


def generate(http: httpx.Client, **fields: object) -> None:
    body = {"prompt": [1, 2, 3, 4, 5], "max_tokens": 7, "ignore_eos": True} | fields
    assert http.post("/v1/completions", json=body).status_code == 200


def test_a_scrape_holds_what_the_list_says_and_nothing_else(http: httpx.Client):
    families(http)  # what a later scrape's window begins with
    generate(http)
    assert eventually(lambda: bool(families(http)["turnout:expert_balancedness"].samples))
    found = families(http)
    for metric in METRICS:
        family = found.pop(
            metric.series if metric.kind == Kind.HISTOGRAM else metric.series.removesuffix("_total")
        )
        assert (family.type, family.documentation) == (metric.kind, metric.help)
        assert family.samples, metric.name
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(metric.labels), metric.name
            assert sample.labels["model_name"] == "tiny"
    assert not found


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_names_say_kind_and_unit(metric):
    histogram_of_tokens = metric.name == "iteration_tokens_total"  # vLLM's name
    assert metric.name.endswith("_total") == (metric.kind == Kind.COUNTER or histogram_of_tokens)
    assert metric.help.endswith(".")


def test_every_expression_of_the_grafana_dashboard_finds_its_metric(http: httpx.Client):
    families(http)  # what a later scrape's window begins with
    generate(http)
    assert eventually(lambda: bool(families(http)["turnout:expert_balancedness"].samples))
    scraped = {sample.name for family in families(http).values() for sample in family.samples}
    panels = [panel for panel in json.loads(GRAFANA.read_text())["panels"] if panel["type"] != "row"]
    for panel in panels:
        for target in panel["targets"]:
            named = set(re.findall(r"turnout:\w+", target["expr"]))
            assert named, target
            assert named <= scraped, target
            assert target["expr"].count("(") == target["expr"].count(")")
    assert {panel["description"] for panel in panels} == {metric.help for metric in METRICS}
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in panels]
    assert len(set(places)) == len(places)


def test_histograms_hold_every_finished_sequence(http: httpx.Client):
    names = ("queue_time_seconds", "prefill_time_seconds", "decode_time_seconds", "prompt_tokens")
    names += ("generation_tokens", "params_max_tokens", "time_per_output_token_seconds")
    before = {f"request_{name}{end}": 0.0 for name in names for end in ("_count", "_sum")}
    before |= {"e2e_request_latency_seconds_sum": 0.0, "time_to_first_token_seconds_sum": 0.0}
    before = {name: total(http, name) for name in before}
    generate(http, n=2)
    generate(http, n=1, max_tokens=1)  # no time between tokens
    gained = {name: total(http, name) - value for name, value in before.items()}
    for name in names:
        assert gained[f"request_{name}_count"] == (2 if name.startswith("time_per") else 3)
    assert gained["request_prompt_tokens_sum"] == 15
    assert gained["request_generation_tokens_sum"] == gained["request_params_max_tokens_sum"] == 15
    in_engine = gained["request_queue_time_seconds_sum"] + gained["request_prefill_time_seconds_sum"]
    assert 0 < in_engine < gained["time_to_first_token_seconds_sum"]
    assert 0 < gained["request_decode_time_seconds_sum"] < gained["e2e_request_latency_seconds_sum"]
    assert gained["request_time_per_output_token_seconds_sum"] == pytest.approx(
        gained["request_decode_time_seconds_sum"] / 6
    )


def test_steps_and_their_tokens_add_up(http: httpx.Client):
    names = ("steps_total", "iteration_tokens_total_count", "iteration_tokens_total_sum", "rank_tokens_total")
    names += ("step_seconds_total", "cuda_graph_steps_total")
    before = {name: total(http, name) for name in names}
    generate(http)
    gained = {name: total(http, name) - before[name] for name in names}
    assert gained["steps_total"] == gained["iteration_tokens_total_count"] == 7
    assert gained["iteration_tokens_total_sum"] == gained["rank_tokens_total"] == 5 + 7 - 1
    assert gained["step_seconds_total"] > 0
    assert gained["cuda_graph_steps_total"] == 0  # on a CPU


def test_counters_say_that_a_client_that_hung_up_holds_no_page(http: httpx.Client):
    """The engine itself frees them before its next step: tests/engine/test_overlap_policy.py."""

    def aborted() -> float:
        of_all = families(http)["turnout:request_success"].samples
        return sum(s.value for s in of_all if s.labels["finished_reason"] == "abort")

    before, tokens = aborted(), total(http, "generation_tokens_total")
    longest = http.get("/v1/models").json()["data"][0]["max_model_len"] - 5
    body = {"prompt": [1, 2, 3, 4, 5], "max_tokens": longest, "ignore_eos": True, "n": 64, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        while not next(lines).startswith("data:"):
            pass
        assert total(http, "kv_cache_usage_perc") > 0
    assert eventually(lambda: aborted() == before + 64)
    assert eventually(lambda: total(http, "kv_cache_usage_perc") == total(http, "num_requests_running") == 0)
    assert total(http, "generation_tokens_total") - tokens < 64 * longest


def test_the_start_is_timed_and_printed(http: httpx.Client):
    phases = {s.labels["phase"]: s.value for s in families(http)["turnout:startup_seconds"].samples}
    assert {"imports", "plan", "rendezvous", "weights", "kv_cache"} <= set(phases)
    assert phases["weights"] > 0.001  # imports may take nothing: ranks are forks of what has imported
    assert all(seconds >= 0 for seconds in phases.values())


class Clock:
    time = 0.0

    def __call__(self) -> float:
        return self.time


def test_the_window_counts_what_came_within_a_minute():
    draw, clock = random.Random(1), Clock()
    counts = {rank: np.zeros((3, 8), int) for rank in range(2)}
    window = CountWindow(lambda: {rank: c.tolist() for rank, c in counts.items()}, 60, clock)
    history = []
    for clock.time in range(0, 400, 5):
        for of_rank in counts.values():
            of_rank[draw.randrange(3), draw.randrange(8)] += draw.randrange(100)
        now = counts[0] + counts[1]
        history.append((clock.time, now.copy()))
        old = [seen for time, seen in history[:-1] if time <= clock.time - 60]
        expected = now - (old[-1] if old else history[0][1] if len(history) > 1 else 0)
        assert (window.recent() == expected).all()


def test_ranks_that_start_anew_begin_a_new_window():
    clock, counts = Clock(), {0: [[100, 200]]}
    window = CountWindow(lambda: counts, 60, clock)
    window.recent()
    clock.time, counts[0] = 10.0, [[3, 4]]
    assert window.recent().tolist() == [[3, 4]]
    counts.clear()
    assert window.recent().size == 0


def test_data_parallel_balance_is_that_of_ranks_which_lead():
    """Rank 1 helps rank 0 and has no requests of its own."""
    tokens = [0, 0, 0]

    class Engine:
        expert_tokens: dict[int, list[list[int]]] = {}

        @property
        def stats(self) -> dict[int, EngineStats]:
            return {
                rank: EngineStats(rank=rank, computed_tokens=count, pages_total=0 if rank == 1 else 8)
                for rank, count in enumerate(tokens)
            }

    (metric,) = (metric for metric in METRICS if metric.name == "data_parallel_balancedness")
    viewer = Viewer(cast(EngineSupervisor, Engine()))
    assert metric.read is not None
    assert list(metric.read(viewer.view())) == []
    tokens[:] = [30, 1000, 10]
    assert list(metric.read(viewer.view())) == [((), pytest.approx(20 / 30))]


def test_balance_and_hot_share_by_definition():
    counts = np.array([[4, 4, 4, 4], [0, 0, 0, 0], [16, 0, 0, 0]])
    assert balancedness(counts) == {0: 1.0, 2: 0.25}
    assert hot_share(counts) == 0.5
    assert hot_share(counts * 0) is None
    assert hot_share(np.full((48, 128), 7)) == pytest.approx(0.01, rel=0.02)
    assert by_slice(counts, 2).tolist() == [24, 8]


@given(st.lists(st.tuples(st.floats(-1.0, 400.0) | st.sampled_from(SECONDS), st.integers(1, 5))))
def test_histograms_are_prometheus_own(observed: list[tuple[float, int]]):
    metric = next(metric for metric in METRICS if metric.name == "inter_token_latency_seconds")
    theirs = prometheus_client.Histogram(
        metric.series, metric.help, metric.labels, buckets=metric.buckets, registry=None
    )
    ours = Histogram(metric, "tiny")
    for value, times in observed:
        ours.observe(value, times)
        for _ in range(times):
            theirs.labels("tiny").observe(value)
    theirs.labels("tiny")
    ((own,), (other,)) = ours.collect(), theirs.collect()
    assert (own.name, own.type, own.documentation) == (other.name, other.type, other.documentation)
    samples = [sample for sample in other.samples if not sample.name.endswith("_created")]
    for one, two in zip(own.samples, samples, strict=True):
        assert (one.name, one.labels, one.value) == (two.name, two.labels, pytest.approx(two.value))
