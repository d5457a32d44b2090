"""Draft layers against transformers' own, and what they change: the number of steps, never an answer."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers.modeling_layers import MtpModel

from tests.checkpoint.writers import FORMATS, Written, edit_config, load_weights, save
from tests.checkpoint.writers import load as load_tensors
from tests.engine.cluster import Cluster
from tests.engine.step.rerun import with_prefill_graphs
from tests.engine.toy import always_drafting
from tests.models.families import FAMILIES, Built, build, noise, one_by_one
from tests.models.running import PlainAttention
from tests.ranks import Pools
from turnout.checkpoint import open_checkpoint
from turnout.config import Config
from turnout.engine.builder import build_engine
from turnout.engine.core import EngineCore
from turnout.engine.engine_plan import resolve
from turnout.engine.messages import AddRequest
from turnout.engine.sampling_params import SamplingParams
from turnout.errors import PlanRefused, UserError
from turnout.models import describe, load_model
from turnout.models.interface import Step
from turnout.parallel.groups import SINGLE_RANK

LAYERS = 3
VOCABULARY = 6  # so small that a random layer foretells some tokens
NAMES = {"layers.0.": f"model.layers.{LAYERS}.", "post_norm.": "shared_head.norm.", "mtp_block.": ""}
# Of Qwen3-Next and Qwen3.5, whose draft layer has names of its own.
APART = {
    "layers.0.": "mtp.",
    "enorm.": "pre_fc_norm_embedding.",
    "hnorm.": "pre_fc_norm_hidden.",
    "eh_proj.": "fc.",
    "post_norm.": "norm.",
    "mtp_block.": "layers.0.",
}
HYBRIDS = ["qwen3_next", "qwen3_5_moe"]


def published(folder: Path, family: str = "glm4_moe") -> tuple[Built, MtpModel]:
    """A random model with a random draft layer, and transformers' model of that."""
    built = build(folder, FAMILIES[family], seed=1, vocab_size=VOCABULARY, eos_token_id=VOCABULARY - 1)
    config, names = built.model.config.get_text_config(), APART if family in HYBRIDS else NAMES
    if family == "glm4_moe_lite":
        config.num_mtp_layers, config.mtp_mlp_layer_types = 1, ["sparse"]
    if family in HYBRIDS:
        config.num_mtp_layers, config.mtp_layer_types = 1, ["full_attention"]
    drafts = MtpModel(built.model, 1).eval().float()
    tensors = {}
    for name, tensor in drafts.state_dict().items():
        if name.startswith("layers.0."):
            tensor.copy_(noise(name, tensor, around_one=built.family.norms_around_one))
            for theirs, ours in names.items():
                name = name.replace(theirs, ours)
            tensors[name] = tensor.detach().clone()
    given = () if family in HYBRIDS else (f"model.layers.{LAYERS}.",)
    kept = {n: t for n, t in load_tensors(folder).items() if not n.startswith(given)}
    save(folder, kept | (tensors if family == "qwen3_5_moe" else one_by_one(tensors)))
    return built, drafts


@pytest.fixture(scope="module")
def glm(tmp_path_factory) -> tuple[Built, MtpModel]:
    return published(tmp_path_factory.mktemp("glm") / "model")


@pytest.fixture(scope="module", params=["deepseek_v3", "glm4_moe_lite"])
def latent(request, tmp_path_factory) -> tuple[Built, MtpModel]:
    return published(tmp_path_factory.mktemp(request.param) / "model", request.param)


@pytest.fixture(scope="module", params=HYBRIDS)
def hybrid(request, tmp_path_factory) -> tuple[Built, MtpModel]:
    """Three recurrent layers, then one of attention; the draft layer has attention."""
    return published(tmp_path_factory.mktemp(request.param) / "model", request.param)


@pytest.fixture(scope="module", params=["not listed", pytest.param("listed", marks=pytest.mark.more)])
def left_out(request, tmp_path_factory) -> tuple[Built, MtpModel]:
    """NVFP4 as ModelOpt releases Qwen3.5: the draft layer as it was, and not always listed as left out."""
    folder = tmp_path_factory.mktemp("left_out") / "model"
    built, drafts = published(folder, "qwen3_5_moe")
    tensors = load_tensors(folder)
    of_draft = {name: tensors.pop(name).bfloat16() for name in list(tensors) if name.startswith("mtp.")}
    tensors = one_by_one(tensors)
    written = Written(folder, built.model, dict(tensors))
    FORMATS["modelopt"](written, tensors, False)
    save(folder, tensors | of_draft)
    load_weights(built.model, written.weights)
    for name, tensor in drafts.state_dict().items():
        if name.startswith("layers.0."):
            tensor.copy_(tensor.bfloat16())
    if request.param == "listed":
        with edit_config(folder, "hf_quant_config.json") as config:
            config["quantization"]["exclude_modules"].append("mtp*")
    return built, drafts


def core(folder: Path, **flags) -> EngineCore:
    values = {"device": "cpu", "page_size": 4, "max_running_requests": 4, "num_threads": 1}
    values |= {"chunked_prefill_size": 16, "max_prefill_tokens": 64, "max_total_tokens": 512}
    return always_drafting(build_engine(resolve(Config(model=str(folder), **(values | flags)))))


def run(engine: EngineCore, prompts: list[list[int]], **sampling) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for i, prompt in enumerate(prompts):
        found[str(i)] = []
        params = SamplingParams(**({"max_tokens": 20, "ignore_eos": True} | sampling))
        engine.add(AddRequest(id=str(i), prompt_ids=prompt, sampling=params))
    while engine.has_work():
        for output in engine.step():
            assert not output.error, output.error
            found[output.id] += output.token_ids
    return found


def prompts(count: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, 40, (count,), generator=draw).tolist()
    return [torch.randint(0, VOCABULARY - 1, (n,), generator=draw).tolist() for n in lengths]


def test_the_layer_computes_what_transformers_computes(glm):
    compare_layer(*glm)


def test_the_layer_of_a_hybrid_computes_what_transformers_computes(hybrid):
    compare_layer(*hybrid)


def test_a_layer_left_out_of_quantisation_computes_what_transformers_computes(left_out):
    compare_layer(*left_out)


def compare_layer(built: Built, theirs: MtpModel) -> None:
    checkpoint = open_checkpoint(built.folder)
    plan = resolve(Config(model=str(built.folder), device="cpu", speculative_algorithm="MTP")).plan
    ours = load_model(checkpoint, plan, groups=SINGLE_RANK, device="cpu", dtype=torch.float32, drafts=True)
    ids = torch.randint(0, VOCABULARY, (1, 24), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(23)[None]
    with torch.inference_mode():
        hidden = built.model.model(ids).last_hidden_state[:, :-1]
        expected = theirs.forward_layer(0, hidden, positions, None, input_ids=ids[:, 1:])[0]
        attention = PlainAttention(ours)
        attention._chunks = [("a", 23)]
        step = Step(input_ids=ids[0, 1:], positions=positions[0], attention=attention)
        mine = ours.draft(step, hidden[0])
    torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4)
    assert (mine - hidden[0]).abs().max() > 0.1


@torch.inference_mode()
def proposals(glm: tuple[Built, MtpModel], tokens: list[int], count: int) -> list[int]:
    """What transformers' layer drafts after `tokens`, all of it computed again for every draft."""
    main, layer = glm[0].model, glm[1]
    hidden = main.model(torch.tensor([tokens])).last_hidden_state[:, :-1]
    ids = list(tokens)
    while len(ids) < len(tokens) + count:
        after = torch.tensor([ids[1:]])
        out = layer.forward_layer(0, hidden, torch.arange(len(ids) - 1)[None], None, input_ids=after)
        ids.append(int(main.lm_head(out[:, -1]).argmax()))
        hidden = torch.cat((hidden, out[:, -1:]), dim=1)
    return ids[len(tokens) :]


def simulated(glm, prompt: list[int], answer: list[int], num_steps: int) -> tuple[int, int]:
    """(tokens drafted, tokens accepted) by a loop over the answer."""
    drafted = accepted = 0
    done = 1  # the prompt's step gives one token
    while done < len(answer):
        count = min(num_steps, len(answer) - done - 1)
        drafts = proposals(glm, prompt + answer[:done], count) if count and len(prompt) + done > 1 else []
        drafted += len(drafts)
        for draft in (*drafts, None):
            done += 1
            if answer[done - 1] != draft:
                break
            accepted += 1
    return drafted, accepted


@pytest.mark.parametrize("graphs", [[], [8, 24, 64]], ids=["eager", "prefill graphs"])
def test_drafts_through_latent_attention_change_no_answer(latent, graphs):
    asked = prompts(4)
    plain = run(core(latent[0].folder), asked)
    engine = core(latent[0].folder, speculative_algorithm="MTP", speculative_num_steps=2)
    replayed = with_prefill_graphs(engine, graphs) if graphs else None
    assert run(engine, asked) == plain
    assert replayed is None or replayed.steps
    stats = engine.stats()
    counts = [simulated(latent, prompt, plain[str(i)], 2) for i, prompt in enumerate(asked)]
    assert (stats.spec_draft_tokens, stats.spec_accepted_tokens) == tuple(map(sum, zip(*counts, strict=True)))


def test_rejected_drafts_leave_no_state_behind(hybrid):
    """Of recurrent layers, also where requests are put back and begin with what others left."""
    asked = [[*prompt, i] for prompt in prompts(3) for i in range(2)]
    plain = run(core(hybrid[0].folder), asked)
    flags = {"speculative_algorithm": "MTP", "speculative_num_steps": 3, "state_snapshot_interval": 8}
    engine = core(hybrid[0].folder, max_total_tokens=96, **flags)
    assert run(engine, asked) == plain
    stats = engine.stats()
    assert min(stats.preemptions, stats.spec_accepted_tokens) > 0
    assert stats.spec_accepted_tokens < stats.spec_draft_tokens
    assert run(engine, asked) == plain
    assert engine.stats().cached_prompt_tokens > stats.cached_prompt_tokens


@pytest.mark.parametrize(
    "hybrid", ["qwen3_next", pytest.param("qwen3_5_moe", marks=pytest.mark.more)], indirect=True
)  # the other as quantised, below
def test_drafts_of_a_hybrid_are_those_of_transformers(hybrid):
    compare_drafts(hybrid)


def test_drafts_of_a_layer_left_out_of_quantisation_are_those_of_transformers(left_out):
    engine = compare_drafts(left_out)
    description, plan = engine.engine_plan.description, engine.engine_plan.plan
    assert (description.moe.format, description.draft_moe.format) == ("nvfp4", "bf16")
    stored = {name: t.nbytes for name, t in load_tensors(left_out[0].folder).items() if "mtp" in name}
    assert plan.draft.weight_bytes == sum(size for name, size in stored.items() if ".experts." in name)
    assert engine.engine_plan.memory.experts == 4 * plan.weight_bytes + plan.draft.weight_bytes


def compare_drafts(hybrid: tuple[Built, MtpModel]) -> EngineCore:
    asked = prompts(2)
    plain = run(core(hybrid[0].folder), asked)
    for i, prompt in enumerate(asked):
        assert plain[str(i)] == greedy(hybrid[0], prompt, 20)
    engine = core(hybrid[0].folder, speculative_algorithm="MTP", speculative_num_steps=2)
    assert run(engine, asked) == plain
    stats = engine.stats()
    counts = [simulated(hybrid, prompt, plain[str(i)], 2) for i, prompt in enumerate(asked)]
    assert (stats.spec_draft_tokens, stats.spec_accepted_tokens) == tuple(map(sum, zip(*counts, strict=True)))
    return engine


@torch.inference_mode()
def greedy(built: Built, prompt: list[int], count: int) -> list[int]:
    """The likeliest tokens after `prompt`, by transformers, which sees all of them again for each."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(built.model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize(("algorithm", "num_steps"), [("MTP", 1), ("NEXTN", 3)])
def test_greedy_answers_stay_and_drafts_are_those_of_transformers(glm, algorithm, num_steps):
    asked = prompts(4)
    plain = run(core(glm[0].folder), asked)
    engine = core(glm[0].folder, speculative_algorithm=algorithm, speculative_num_steps=num_steps)
    assert run(engine, asked) == plain
    stats = engine.stats()
    counts = [simulated(glm, prompt, plain[str(i)], num_steps) for i, prompt in enumerate(asked)]
    assert (stats.spec_draft_tokens, stats.spec_accepted_tokens) == tuple(map(sum, zip(*counts, strict=True)))
    assert stats.spec_accepted_tokens > 5


def test_few_pages_and_a_prefix_cache_change_no_answer(glm):
    """Requests are put back and computed again, and begin with what others left."""
    asked = [[*prompt, i] for prompt in prompts(3) for i in range(3)]
    plain = run(core(glm[0].folder), asked)
    engine = core(glm[0].folder, speculative_algorithm="EAGLE", speculative_num_steps=3, max_total_tokens=96)
    assert run(engine, asked) == plain
    assert engine.stats().preemptions > 0
    assert run(engine, asked) == plain


def test_sampled_tokens_keep_their_distribution(glm):
    """The second token of many requests, each the first that is verified against a draft."""
    prompt, count = prompts(1)[0], 1500
    flags = {"max_running_requests": 64, "max_total_tokens": 8192, "speculative_algorithm": "MTP"}
    engine = core(glm[0].folder, **flags)
    found = run(engine, [prompt] * count, temperature=1.0, max_tokens=3)
    assert engine.stats().spec_accepted_tokens > 50
    with torch.inference_mode():
        first = glm[0].model(torch.tensor([prompt])).logits[0, -1].double().softmax(-1)
        after = torch.tensor([[*prompt, token] for token in range(VOCABULARY)])
        second = glm[0].model(after).logits[:, -1].double().softmax(-1)
    expected = count * first @ second
    seen = Counter(tokens[1] for tokens in found.values())
    observed = torch.tensor([seen[token] for token in range(VOCABULARY)], dtype=torch.float64)
    assert ((observed - expected) ** 2 / expected).sum() < 20.5  # of 5 degrees of freedom: one in a thousand


@pytest.mark.more
def test_ranks_that_share_requests_draft_alike(glm, ranks: Pools, tmp_path: Path):
    """Heads, vocabulary and experts divided over two ranks."""
    asked = prompts(4)
    plain = run(core(glm[0].folder), asked)
    flags = {"speculative_algorithm": "MTP", "speculative_num_steps": 2, "ep_size": 2}
    with Cluster(ranks(2), tmp_path, glm[0].folder, **flags) as cluster:
        for i, prompt in enumerate(asked):
            cluster.add(str(i), prompt, max_tokens=20, ignore_eos=True)
        cluster.wait(map(str, range(len(asked))), 60)
    assert {id: output.token_ids for id, output in cluster.outputs.items()} == plain
    assert sum(rank.spec_accepted_tokens for rank in cluster.stats.values()) > 0


@pytest.mark.parametrize(
    ("size", "flags"),
    [
        (2, {"dp_size": 2, "ep_size": 2}),
        pytest.param(4, {"dp_size": 4, "ep_size": 4}, marks=pytest.mark.more),
        pytest.param(4, {"dp_size": 2, "ep_size": 4}, marks=pytest.mark.more),
    ],
)
def test_ranks_with_requests_of_their_own_draft_together(glm, ranks: Pools, tmp_path: Path, size, flags):
    """First one rank has all requests and the others none, then the first has few and the last many."""
    asked = prompts(5)
    plain = run(core(glm[0].folder), asked)
    flags = flags | {"speculative_algorithm": "MTP", "speculative_num_steps": 3}
    with Cluster(ranks(size), tmp_path, glm[0].folder, **flags) as cluster:
        last = flags["dp_size"] - 1
        for i, prompt in enumerate(asked[:2]):
            cluster.add(str(i), prompt, dp_rank=last, max_tokens=20, ignore_eos=True)
        cluster.wait(map(str, range(2)), 120)
        idle = cluster.stats[0]
        for i, prompt in enumerate(asked[2:], 2):
            cluster.add(str(i), prompt, dp_rank=min(i - 2, last), max_tokens=20, ignore_eos=True)
        cluster.wait(map(str, range(len(asked))), 120)
    assert {id: output.token_ids for id, output in cluster.outputs.items()} == plain
    assert idle.spec_draft_tokens == 0
    counts = [simulated(glm, prompt, plain[str(i)], 3) for i, prompt in enumerate(asked)]
    found = [(rank.spec_draft_tokens, rank.spec_accepted_tokens) for rank in cluster.stats.values()]
    assert [sum(column) for column in zip(*found, strict=True)] == [
        sum(column) for column in zip(*counts, strict=True)
    ]


@pytest.mark.more
@pytest.mark.parametrize(
    ("size", "flags"),
    [(2, {"ep_size": 2}), (2, {"dp_size": 2, "ep_size": 2}), (4, {"dp_size": 2, "ep_size": 4})],
    ids=["tp2", "dp2 ep2", "dp2 tp2 ep4"],
)
def test_drafts_through_latent_attention_on_ranks(latent, ranks: Pools, tmp_path: Path, size, flags):
    """Heads divided, requests divided, and both; one after the other, so that no prompt takes the room of
    drafts, in too few steps for them to rest."""
    asked = prompts(3)
    plain = run(core(latent[0].folder), asked, max_tokens=9)
    flags = flags | {"speculative_algorithm": "MTP", "speculative_num_steps": 2}
    with Cluster(ranks(size), tmp_path, latent[0].folder, **flags) as cluster:
        for i, prompt in enumerate(asked):
            rank = i % flags.get("dp_size", 1)
            cluster.add(str(i), prompt, dp_rank=rank, max_tokens=9, ignore_eos=True)
            cluster.wait([str(i)], 60)
    assert {id: output.token_ids for id, output in cluster.outputs.items()} == plain
    counts = [simulated(latent, prompt, plain[str(i)], 2) for i, prompt in enumerate(asked)]
    found = [(rank.spec_draft_tokens, rank.spec_accepted_tokens) for rank in cluster.stats.values()]
    assert [sum(column) for column in zip(*found, strict=True)] == [
        sum(column) for column in zip(*counts, strict=True)
    ]


@pytest.mark.parametrize(
    ("size", "flags"),
    [
        (2, {"dp_size": 2, "ep_size": 2}),
        pytest.param(2, {}, marks=pytest.mark.more),
        pytest.param(4, {"dp_size": 2, "ep_size": 4}, marks=pytest.mark.more),
    ],
    ids=["dp2 ep2", "tp2", "dp2 tp2 ep4"],
)
def test_states_on_ranks_are_rolled_back(left_out, ranks: Pools, tmp_path: Path, size, flags):
    """Behind drafts that do not hold; then prompts begin where snapshots were kept, on each rank."""
    asked = [[*prompt, i] for prompt in prompts(2) for i in range(2)]
    answers = [greedy(left_out[0], prompt, 22) for prompt in asked]
    flags = flags | {"speculative_algorithm": "MTP", "speculative_num_steps": 2}
    flags |= {"state_snapshot_interval": 8, "max_running_requests": 16}
    with Cluster(ranks(size), tmp_path, left_out[0].folder, **flags) as cluster:
        for begin, end in ((0, 16), (16, 22)):  # the second time behind what the first one left
            names = [f"{begin} {i}" for i in range(len(asked))]
            for i, (name, prompt, answer) in enumerate(zip(names, asked, answers, strict=True)):
                rank = i % flags.get("dp_size", 1)
                prompt = prompt + answer[:begin]
                cluster.add(name, prompt, dp_rank=rank, max_tokens=end - begin, ignore_eos=True)
            cluster.wait(names, 120)
            for name, answer in zip(names, answers, strict=True):
                assert cluster.outputs[name].token_ids == answer[begin:end]
    stride = size // flags.get("dp_size", 1)
    stats = [cluster.stats[rank] for rank in range(0, size, stride)]  # of those that share requests, one
    accepted = sum(rank.spec_accepted_tokens for rank in stats)
    assert 0 < accepted < sum(rank.spec_draft_tokens for rank in stats)
    assert all(rank.cached_prompt_tokens > 0 for rank in stats)


def test_models_without_the_layer_are_refused_for_the_flag_alone(glm, tmp_path):
    folder = glm[0].folder
    config = json.loads((folder / "config.json").read_text())
    tensors = {n: t for n, t in load_tensors(folder).items() if f"layers.{LAYERS}." not in n}
    for name, fields in (("dropped", config), ("never", config | {"num_nextn_predict_layers": 0})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(fields))
        save(tmp_path / name, tensors)
        assert run(core(tmp_path / name), [[1, 2]], max_tokens=2)
    with pytest.raises(UserError, match=r"layers\.3\.eh_proj\.weight is missing: .*without the draft layer"):
        core(tmp_path / "dropped", speculative_algorithm="MTP")
    with pytest.raises(UserError, match=r"Glm4MoeForCausalLM has no draft layer .*ngram"):
        core(tmp_path / "never", speculative_algorithm="MTP")


def test_hybrids_without_the_layer_are_refused_for_the_flag_alone(hybrid, tmp_path):
    config = json.loads((hybrid[0].folder / "config.json").read_text())
    save(tmp_path, hybrid[0].tensors)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert run(core(tmp_path), [[1, 2]], max_tokens=2)
    with pytest.raises(UserError, match=r"mtp\.fc\.weight is missing: .*without the draft layer .*ngram"):
        core(tmp_path, speculative_algorithm="MTP")
    config.get("text_config", config)["mtp_use_dedicated_embeddings"] = True
    describe(config)
    with pytest.raises(UserError, match=r"no draft layer here .*mtp_use_dedicated_embeddings.*ngram"):
        describe(config, drafts=True)


def test_what_the_layer_is_not_computed_with_is_refused(glm):
    with pytest.raises(PlanRefused) as refused:
        resolve(
            Config(model=str(glm[0].folder), device="cpu", speculative_algorithm="MTP", deterministic=True)
        )
    assert any(r.who == "draft layer" and "ngram" in r.remedy for r in refused.value.refusals)


def test_the_layer_is_planned_for(glm):
    """Its weights, its experts and its pages."""
    config = json.loads((glm[0].folder / "config.json").read_text())
    plain, drafting = describe(config), describe(config, drafts=True)
    assert drafting.shape.num_layers == plain.shape.num_layers + 1 == LAYERS + 1
    assert drafting.moe_layers == (*plain.moe_layers, LAYERS)
    prefix = f"model.layers.{LAYERS}."
    parameters = sum(
        t.numel()
        for name, t in load_tensors(glm[0].folder).items()
        if name.startswith(prefix) and ".mlp.experts." not in name
    )
    assert drafting.dense.total - plain.dense.total == parameters
