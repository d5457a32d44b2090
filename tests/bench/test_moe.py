"""The layer benchmark end to end on a layer small enough to take no time."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest
import torch

from turnout.bench import moe, moe_peers, moe_triton_kernels
from turnout.bench.contender import Contender
from turnout.errors import UserError

TINY = moe.Shape(hidden=64, intermediate=32, experts=8, top_k=2)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(moe.timing, "SECONDS", 0.0)
    monkeypatch.setattr(
        moe.timing, "measure_ceilings", lambda device: {"copy_GBps": 10.0, "fp32_TFLOPs": 0.1}
    )
    monkeypatch.setitem(moe.SHAPES, "tiny", TINY)
    monkeypatch.setitem(moe.SHAPES, "tiny-ep4", moe.Shape(**{**vars(TINY), "ep": 4}))


def test_rows_of_ours_and_of_every_peer(tmp_path):
    path = tmp_path / "moe.json"
    content = moe.run(shapes=["tiny"], formats=["bf16", "nvfp4"], tokens=[1, 40], device="cpu", output=path)
    assert json.loads(path.read_text()) == content
    assert content["benchmark"] == "moe"
    ours = [row for row in content["rows"] if not row["peer"]]
    assert {(r["format"], r["tokens"], r["compute_dtype"]) for r in ours} == {
        (f, t, d) for f in ("bf16", "nvfp4") for t in (1, 40) for d in ("float32", "bfloat16")
    }
    for row in content["rows"]:
        assert row["time_us"] > 0
        assert row["efficiency"] == row["floor_us"] / row["time_us"]
        assert row["error"] < (1e-5 if row["compute_dtype"] == "float32" else 2e-2)
    peers = {row["runner"] for row in content["rows"] if row["peer"]}
    assert peers == {"torch grouped_mm"} | {f"transformers {name}" for name in moe_peers.TRANSFORMERS}


def test_biases_and_a_clamped_activation_against_grouped_mm(monkeypatch, tmp_path):
    monkeypatch.setitem(moe.SHAPES, "tiny-swiglu", moe.Shape(**{**vars(TINY), "swiglu": True, "ep": 2}))
    plot = tmp_path / "moe.svg"
    content = moe.run(shapes=["tiny-swiglu"], formats=["bf16"], tokens=[1, 40], device="cpu", plot=plot)
    assert {row["runner"] for row in content["rows"]} == {"numba", "torch grouped_mm"}
    for row in content["rows"]:
        assert row["error"] < (1e-5 if row["compute_dtype"] == "float32" else 2e-2)
    drawn = ElementTree.parse(plot).getroot()
    lines = drawn.findall("{http://www.w3.org/2000/svg}polyline")
    assert [len(line.get("points").split()) for line in lines] == [2, 2]  # bfloat16 and float32


def test_all_are_the_shapes_of_published_models(monkeypatch):
    asked = []
    monkeypatch.setattr(moe, "LayerBench", lambda shape, *_: asked.append(shape) or Nothing())
    moe.run(shapes=["all"], formats=["bf16"], tokens=[1], device="cpu")
    assert asked == [shape for name, shape in moe.SHAPES.items() if name != "cpu-small"]


class Nothing:
    """A layer with nothing to measure."""

    def contenders(self, *_) -> list:
        return []

    def measure(self, *_) -> list:
        return []


def test_expert_parallel_slice_with_skewed_routes():
    content = moe.run(
        shapes=["tiny-ep4"], formats=["mxfp4"], tokens=[16], routing="zipf", device="cpu", peers=True
    )
    assert [row["peer"] for row in content["rows"]] == [False, False, True, True]
    assert all(row["error"] < 2e-2 for row in content["rows"])


def test_w4a8_is_mxfp4_with_fp8_activations():
    content = moe.run(shapes=["tiny"], formats=["mxfp4", "w4a8"], tokens=[40], device="cpu", peers=False)
    errors = {(row["format"], row["compute_dtype"]): row["error"] for row in content["rows"]}
    assert errors["mxfp4", "float32"] < 1e-5
    assert 1e-2 < errors["w4a8", "float32"] < 6e-2


def test_zipf_routes_are_skewed_and_uniform_ones_are_not():
    def busiest(routing: str) -> float:
        _, ids_TK, _ = moe.draw_inputs(TINY, 256, 0, routing, "cpu")
        return torch.bincount(ids_TK.flatten()).max() / 64

    assert busiest("uniform") < 1.4
    assert busiest("zipf") > 2.4
    assert busiest("zipf-2") > 1.1 * busiest("zipf")


def test_a_failed_point_is_a_row(monkeypatch):
    def fail(*_):
        raise RuntimeError("out of registers")

    def peers(layer: moe_peers.Layer) -> list[Contender]:
        return [
            Contender(runner="broken", dtype=layer.dtype, forwards=(fail,), peer=True),
            Contender(runner="choosy", dtype=layer.dtype, forwards=(), peer=True, refusal="three experts"),
        ]

    def unbuildable(layer: moe_peers.Layer) -> list[Contender]:
        raise ImportError("of another version")

    monkeypatch.setattr(moe, "PEERS", (peers, unbuildable))
    content = moe.run(shapes=["tiny"], formats=["bf16"], tokens=[1], device="cpu")
    failed = [row for row in content["rows"] if "error_message" in row]
    assert [row["error_message"] for row in failed] == [
        "RuntimeError: out of registers",
        "not run: three experts",
        "not run: ImportError: of another version",
    ] * 2
    assert len(content["rows"]) == 8


@pytest.mark.parametrize(
    "wrong", [{"shapes": ["huge"]}, {"formats": ["fp3"]}, {"routing": "round"}, {"routing": "zipf-steep"}]
)
def test_unknown_names_list_the_known_ones(wrong):
    with pytest.raises(UserError, match=r"unknown \w+ '[\w-]+'; known: "):
        moe.run(device="cpu", **wrong)


def test_logits_whose_largest_are_the_routes():
    """What triton_kernels is handed in a call's place: its top-k in a softmax."""
    _, ids_TK, weights_TK = moe.draw_inputs(TINY, 40, 0, "zipf", "cpu")
    logits_TE, _ = moe_triton_kernels.routes(ids_TK, weights_TK, num_experts=TINY.experts)
    found_TK, chosen_TK = logits_TE.topk(TINY.top_k)
    order_TK = chosen_TK.argsort(), ids_TK.argsort()
    assert torch.equal(chosen_TK.gather(1, order_TK[0]).int(), ids_TK.gather(1, order_TK[1]))
    wanted_TK = weights_TK.gather(1, order_TK[1])
    assert torch.allclose(found_TK.softmax(1).gather(1, order_TK[0]), wanted_TK, atol=1e-6)
