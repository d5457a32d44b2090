"""`turnout generate`: prompts in, text or JSON lines out, offline."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import IO, TYPE_CHECKING

from turnout.config import Config, Launched, launched
from turnout.engine.ranks.launch import blameless, follow, launch
from turnout.engine.sampling_params import SamplingParams
from turnout.errors import UserError

if TYPE_CHECKING:  # a rank must follow its launcher before torch is imported, which takes seconds
    from turnout.engine.llm import Completion

FAILED = 1  # exit code, of a prompt that could not be answered
SHOWN = 5  # numbers of failed prompts in a message


def run(
    config: Config,
    prompt: str | None,
    sampling: SamplingParams,
    *,
    chat: bool | None,
    output: Path | None,
    arguments: Sequence[str],
) -> int:
    """`generate`, on as many ranks as `config` has: the first process starts them all with `arguments`."""
    place = launched()
    follow(place)
    if place is None and config.tp_size > 1:
        return launch(config, arguments)
    return generate(config, prompt, sampling, chat=chat, output=output, launched=place)


def generate(
    config: Config,
    prompt: str | None,
    sampling: SamplingParams,
    *,
    chat: bool | None,
    output: Path | None,
    launched: Launched | None = None,
) -> int:
    """Answer `prompt` (a text, a .jsonl file, or None: standard input); the exit code. Raises UserError.

    A single prompt prints its text; a file, or `output`, gives one JSON object per prompt. Prompts that could
    not be answered are reported on standard error, and the exit code is 1. Of several ranks (`launched`:
    which this is) the first reads, writes and fails.

    chat: apply the model's chat template. None: to a text, where the model has a template; the prompts of a
    file go in as they are.
    """
    from turnout.engine.llm import LLM

    first = launched is None or launched.rank == 0
    asked = _read(prompt) if first else None
    with (
        blameless(launched),
        _open(output if first else None) as out,
        LLM.from_config(config, launched) as llm,
    ):
        prompts, many = llm.from_first(asked)
        if chat is None:
            chat = not many and llm.tokenizer.has_chat_template
        if chat:
            completions = llm.chat([[{"role": "user", "content": p}] for p in prompts], sampling)
        else:
            completions = llm.generate(prompts, sampling)
        if not first:
            return 0
        _write(out, prompts, completions, as_json=many or output is not None)
    return _report_failures(completions)


def _write(out: IO[str], prompts: list[str], completions: list[Completion], *, as_json: bool) -> None:
    for text, completion in zip(prompts, completions, strict=True):
        if as_json:
            record = {
                "prompt": text,
                "text": completion.text,
                "finish_reason": completion.finish_reason,
                "tokens": len(completion.token_ids),
            }
            if completion.error is not None:
                record["error"] = completion.error
            out.write(json.dumps(record, ensure_ascii=False) + "\n")
        else:
            out.write(completion.text + "\n")


def _report_failures(completions: list[Completion]) -> int:
    """A line on standard error for each reason, with the numbers of its prompts; the exit code."""
    failed: dict[str, list[int]] = {}
    for number, completion in enumerate(completions, 1):
        if completion.finish_reason == "error":
            failed.setdefault(completion.error or "no reason given", []).append(number)
    for reason, numbers in failed.items():
        shown = ", ".join(map(str, numbers[:SHOWN]))
        more = f" and {len(numbers) - SHOWN} more" if len(numbers) > SHOWN else ""
        where = f"prompt {shown}{more} of {len(completions)}: " if len(completions) > 1 else ""
        sys.stderr.write(f"error: {where}{reason}\n")
    return FAILED if failed else 0


def _open(output: Path | None) -> IO[str] | nullcontext[IO[str]]:
    if output is None:
        return nullcontext(sys.stdout)
    try:
        return output.open("w", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--output {output}: cannot be written ({error.strerror})") from None


def _read(prompt: str | None) -> tuple[list[str], bool]:
    if prompt is None:
        text = sys.stdin.read()
        if not text.strip():
            raise UserError("generate: no PROMPT given and standard input is empty")
        return [_utf8(text, "standard input")], False
    if not prompt.endswith(".jsonl"):
        return [_utf8(prompt, "PROMPT")], False
    try:
        lines = Path(prompt).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"{prompt}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{prompt}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    return [_parse(line, f"{prompt}:{i}") for i, line in enumerate(lines, 1) if line.strip()], True


def _utf8(text: str, where: str) -> str:
    """`text`, unless it has bytes that were not UTF-8, which Python keeps as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: not UTF-8 text (at character {error.start})") from None
    return text


def _parse(line: str, where: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not valid JSON ({error.msg})") from None
    if isinstance(record, dict) and isinstance(record.get("prompt"), str):
        return record["prompt"]
    raise UserError(f'{where}: must be an object with the string "prompt"')
