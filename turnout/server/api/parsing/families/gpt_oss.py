"""GPT-OSS: messages in channels (harmony)."""

from turnout.server.api.parsing.family import Family

FAMILY = Family(
    names=("gpt_oss", "openai"),
    reasoning_names=("gpt_oss", "openai_gptoss"),
    signs=("<|channel|>", "<|message|>"),
    model_types=("gpt_oss",),
    harmony=True,
)
