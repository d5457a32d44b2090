"""What all request bodies share: which fields are known elsewhere, and what becomes of them here.

Clients and routers fill in every field they know, most of them with the value that asks for nothing. Hence
three kinds of fields in addition to those that a body declares:

  * IGNORED ones cannot change the answer (`user`, `metadata`, ...) and are accepted.
  * UNSUPPORTED ones would change it. They are refused, unless their value asks for nothing.
  * Any other name is a mistake, and refused.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator


def _no_number(value: Any) -> Any:
    """0 equals False in Python and not in JSON."""
    if value == 0 and value is not False:
        raise ValueError("must be false")
    return value


Off = Annotated[Literal[False], BeforeValidator(_no_number)]  # of what cannot be switched on
MAX_SALT = 1024  # characters
IGNORED = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "session_id",
    "custom_labels",
    "client_metadata",
    "cache_control",  # marks for the cache of Anthropic's service; ours needs none
    # What other services put into messages, which agents send back as they got it.
    "reasoning_details",
    "thinking_blocks",
    "provider_specific_fields",
    "extra_content",
)

_OPENAI: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "tool_calls": ([],),
    "tool_call_id": (),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),  # of completions, which have no chat template
    "verbosity": ("medium",),
    "web_search_options": (),
    "moderation": (),
    "refusal": (),
    "annotations": ([],),
}
_VLLM: dict[str, tuple[Any, ...]] = {
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "prompt_logprobs": (),
    "logprob_token_ids": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "thinking_token_budget": (),
    "watermarking": (False,),
    "repetition_detection": (),
    "logits_processors": ([],),
    "guided_decoding_backend": ("auto", "guidance"),  # what there is
    "include_reasoning": (True,),
    "echo": (False,),  # of chat
    "documents": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),  # of completions
    "prompt_embeds": (),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "truncation_side": ("left",),
    "continuous_usage_stats": (False,),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "return_token_offsets": (False,),
    "return_token_strs": (False,),
    "return_prompt_text": (False,),
    "return_mm_kwargs": (True,),
    "routed_experts_prompt_start": (0,),
    "kv_transfer_params": (),
    "ec_transfer_params": (),
    "vllm_xargs": ({},),
}
_SGLANG: dict[str, tuple[Any, ...]] = {
    "stop_regex": ("", []),
    "separate_reasoning": (True, False),  # answers are one text either way: there is no reasoning parser
    "stream_reasoning": (True, False),
    "reasoning": (),
    "task": (),
    "input_ids": (),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "routed_experts_start_len": (0,),
    "return_cached_tokens_details": (False,),
    "return_prompt_token_ids": (False,),
    "return_meta_info": (False,),
    "lora_path": (),
    "session_params": (),
    "custom_logit_processor": (),
    "custom_params": (),
    "extra_key": (),
    "ngram_corpus_id": (),
    "images_config": (),
    "max_dynamic_patch": (),
    "min_dynamic_patch": (),
    "use_audio_in_video": (False,),
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
    "routed_dp_rank": (),
    "disagg_prefill_dp_rank": (),
    "data_parallel_rank": (),
}
UNSUPPORTED = _OPENAI | _VLLM | _SGLANG  # field -> values that ask for nothing; null does so always


def describe_others(schema: dict[str, Any]) -> None:
    """Add to a body's JSON schema what it takes apart from its own fields; those of one kind together."""
    own = schema["properties"]
    kinds: dict[str, list[str]] = {json.dumps({}): [name for name in IGNORED if name not in own]}
    for name, neutral in UNSUPPORTED.items():
        if name not in own:
            kinds.setdefault(json.dumps({"enum": [None, *neutral]}), []).append(name)
    schema["patternProperties"] = {
        f"^({'|'.join(names)})$": json.loads(kind) for kind, names in kinds.items()
    }


class Body(BaseModel):
    """Base of all request bodies."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, json_schema_extra=describe_others
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        known = cls.model_fields.keys()
        return {
            name: value for name, value in data.items() if name in known or not _asks_nothing(name, value)
        }


class QueueFields(Body):
    """Of every protocol: the place in the queue, and who may share the prefix."""

    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT)] | None = None


def _asks_nothing(name: str, value: Any) -> bool:
    if name in IGNORED or (name in UNSUPPORTED and value is None):
        return True
    # 0 equals False in Python, but not in JSON.
    return any(
        value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
        for neutral in UNSUPPORTED.get(name, ())
    )
