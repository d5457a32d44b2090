"""Answer many prompts with replicas of a model on a Ray cluster.

usage: python ray_data.py MODEL REPLICAS PROMPTS.jsonl FOLDER

PROMPTS.jsonl has lines {"prompt": ...}; FOLDER gets files of the same lines with "answer". The cluster needs
a CPU more than replicas take, to read and write.
"""

import sys

import ray

from turnout import LLM, SamplingParams


class Answer:
    """One replica, which lives as long as there are prompts."""

    def __init__(self, model: str):
        self.llm = LLM(model, load_progress=False)

    def __call__(self, batch: dict) -> dict:
        greedy = SamplingParams(temperature=0, max_tokens=32)
        batch["answer"] = [one.text for one in self.llm.generate(list(batch["prompt"]), greedy)]
        return batch


if __name__ == "__main__":
    model, replicas, prompts, folder = sys.argv[1:]
    ray.data.read_json(prompts).map_batches(
        Answer,
        fn_constructor_args=(model,),
        compute=ray.data.ActorPoolStrategy(size=int(replicas)),
        batch_size=64,
        num_cpus=1,  # on GPUs: num_gpus=1
    ).write_json(folder)
