"""Whether decode steps say what prompts say: greedy answers to word problems, scored again inside prompts.

    python -m tools.decode_agreement MODEL --questions 40 [--transformers]

On trained weights, whose likely tokens follow from those before, a cache that is off by one shows. Prints
the tokens, the largest difference of a log-probability, and how many the other computation would not choose.
`--transformers` compares with its float32 model too, for checkpoints that it reads.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

import torch

from tools.command_line import parser_for
from turnout import LLM, SamplingParams
from turnout.checkpoint.locate import locate
from turnout.evals import wordmath

Scored = list[
    tuple[int, float]
]  # of each token of an answer: the best token there, log-probability of its own


def agreement(answers: Iterable[tuple[list[int], list[float]]], scored: Iterable[Scored]) -> dict[str, float]:
    """answers: token ids and log-probabilities as decoded; scored: the same tokens by another computation."""
    pairs = [
        (token, logprob, *other)
        for (tokens, logprobs), others in zip(answers, scored, strict=True)
        for token, logprob, other in zip(tokens, logprobs, others, strict=True)
    ]
    return {
        "tokens": len(pairs),
        "largest_difference": max(abs(mine - theirs) for _, mine, _, theirs in pairs),
        "other_choices": sum(token != best for token, _, best, _ in pairs),
    }


def in_transformers(folder: str, prompts: list[list[int]], answers: list[list[int]]) -> list[Scored]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(dim=-1)
        own = logprobs.gather(1, torch.tensor(answer)[:, None])[:, 0]
        found.append(list(zip(logprobs.argmax(dim=-1).tolist(), own.tolist(), strict=True)))
    return found


def compare(
    model: str, questions: int, seed: int, *, transformers: bool = False
) -> dict[str, dict[str, float]]:
    """By what decode steps are compared with: `prompts` of the same model, `transformers` where asked for."""
    asked = [[{"role": "user", "content": p.question}] for p in wordmath.heldout(questions, seed)]
    with LLM(model, device="cpu", disable_prefix_cache=True) as llm:
        said = llm.chat(asked, SamplingParams(max_tokens=256, logprobs=0))
        prompts = [list(one.prompt_token_ids) for one in said]
        answers = [list(one.token_ids) for one in said]
        whole = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        again = llm.generate(whole, SamplingParams(max_tokens=1, prompt_logprobs=1))
    decoded = [(a, [token.logprob for token in one.logprobs]) for a, one in zip(answers, said, strict=True)]
    scored = [
        [(token.top[0][0], token.logprob) for token in one.prompt_logprobs[len(prompt) :]]
        for prompt, one in zip(prompts, again, strict=True)
    ]
    found = {"prompts": agreement(decoded, scored)}
    if transformers:
        found["transformers"] = agreement(decoded, in_transformers(str(locate(model)), prompts, answers))
    return found


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("model", help="a folder, or `demo`")
    parser.add_argument("--questions", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--transformers", action="store_true")
    args = parser.parse_args()
    print(json.dumps(compare(args.model, args.questions, args.seed, transformers=args.transformers)))


if __name__ == "__main__":
    main()
