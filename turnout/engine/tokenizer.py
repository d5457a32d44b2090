"""Text <-> token ids, and chat messages -> prompt. Never imports torch, and runs no model's code unasked.

Reads `tokenizer.json` with the `tokenizers` library and renders the chat template itself; only a
folder without that file (older checkpoints) goes through transformers.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import tokenizers

from turnout.checkpoint.locate import require_folder
from turnout.errors import UserError

_SURROGATE = re.compile("[\ud800-\udfff]")
_BYTE_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")


class Tokenizer:
    """One model's tokenizer. Safe to share between threads."""

    def __init__(
        self, core: tokenizers.Tokenizer, *, template: str | None, special: Mapping[str, str], folder: Path
    ):
        """`special`: variables of the chat template such as bos_token and eos_token."""
        core.no_truncation()
        core.no_padding()
        self._core, self._special, self._folder = core, dict(special), folder
        self.vocab_size = core.get_vocab_size(with_added_tokens=True)
        self.special_ids = frozenset(i for i, t in core.get_added_tokens_decoder().items() if t.special)
        declared = json.loads(core.to_str())
        self.byte_level = (declared["decoder"] or {}).get("type") == "ByteLevel"
        self.longest_token = longest_token(declared)
        self.chat_template = template
        self._template = None if template is None else _compile(template, folder)
        self._bytes: dict[int, bytes] = {}  # of tokens that were asked for

    @classmethod
    def load(cls, folder: Path, *, trust_remote_code: bool = False) -> Tokenizer:
        """The tokenizer of a model's folder. Raises UserError naming the file that is missing or broken."""
        require_folder(folder)
        settings = _read_json(folder / "tokenizer_config.json")
        special = _special_tokens(_read_json(folder / "special_tokens_map.json") | settings)
        return cls(
            _read_core(folder, trust_remote_code),
            template=_read_template(folder, settings),
            special=special,
            folder=folder,
        )

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def takes_tools(self) -> bool:
        """Whether the chat template shows tools to the model."""
        return "tools" in (self.chat_template or "")

    def added_in(self, texts: Iterable[str]) -> dict[str, int]:
        """The added tokens, special or not, that stand in any of `texts`, by their own."""
        texts = list(texts)
        added = {token.content: i for i, token in self._core.get_added_tokens_decoder().items()}
        return {content: i for content, i in added.items() if any(content in text for text in texts)}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Other threads run meanwhile. Raises UserError for a lone surrogate."""
        # Of the library's calls only this one releases the GIL; it also skips offsets, half of the work.
        try:
            return self._core.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except TypeError:
            if isinstance(text, str) and (lone := _SURROGATE.search(text)):
                raise UserError(
                    f"the text has {lone[0]!r} at character {lone.start()}: half of a surrogate pair, "
                    "which is no character"
                ) from None
            raise

    def least_tokens(self, text: str) -> int:
        """A lower bound on `len(encode(text))` that costs no tokenising; 0 if there is none."""
        return -(-len(text.encode()) // self.longest_token) if self.longest_token else 0

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD, unknown ids nothing."""
        return self._core.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for, exactly, even where it is part of a character. b"" if unknown."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._find_bytes(token_id)
            if known:
                self._bytes[token_id] = known
        return known

    def _find_bytes(self, token_id: int) -> bytes:
        token = self._core.id_to_token(token_id)
        if token is None:
            return b""
        if self.byte_level:
            return _from_byte_level(token)
        byte = _BYTE_FALLBACK.fullmatch(token)
        if byte:
            return bytes([int(byte[1], 16)])
        return token.replace("▁", " ").encode()

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt for `messages`, by the model's chat template.

        add_generation_prompt:   end with what opens the assistant's answer; default: unless the final message
                                 is continued
        continue_final_message:  end within the final message, for the model to go on with it
        variables:               whatever else the template reads, e.g. `enable_thinking`

        Raises UserError if there is no template, or it refuses the messages or drops the one to continue.
        """
        _check_messages(messages)
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        elif add_generation_prompt and continue_final_message:
            raise UserError("continue_final_message and add_generation_prompt exclude each other")
        if continue_final_message:
            *before, final = messages
            marked = [*before, {**final, "content": final["content"] + _END_MARK}]
            text = self.render_chat(
                marked, tools=tools, documents=documents, add_generation_prompt=False, **variables
            )
            return _until_mark(text, final["content"])
        if self._template is None:
            raise UserError(
                f"{self._folder}: the tokenizer has no chat template; use plain completions, or add "
                "chat_template.jinja to the model's folder"
            )
        values = {
            **self._special,
            "messages": messages,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
            **variables,
        }
        try:
            return self._template.render(values)
        except Exception as error:  # the template is the model's, its input the user's: either may be wrong
            if not any(message.get("tool_calls") for message in messages):
                raise _refused(error) from error
            first = error
        try:  # most templates take arguments as objects; some, like DeepSeek-V3's, as the text of one
            return self._template.render(values | {"messages": _with_arguments_as_text(messages)})
        except Exception:
            raise _refused(first) from first

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], /, *, add_special_tokens: bool = False, **options: Any
    ) -> list[int]:
        """Token ids of `render_chat`. Templates write special tokens themselves; `add_special_tokens` adds
        those that begin and end plain texts, too."""
        return self.encode(self.render_chat(messages, **options), add_special_tokens=add_special_tokens)


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise UserError(
            f"messages={messages!r}: must be a list of messages such as "
            '{"role": "user", "content": "Hello"}; a plain text goes to generate'
        )
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise UserError(
                f"messages[{i}]={message!r}: must be a dictionary with a role and a content, such as "
                '{"role": "user", "content": "Hello"}'
            )


_END_MARK = "CONTINUE_FINAL_MESSAGE_TAG "  # ends in a space, to show whether the template strips messages


def _until_mark(text: str, content: str) -> str:
    """A rendered conversation up to the mark at the end of its final message, as transformers cuts it."""
    word = _END_MARK.strip()
    if content.strip() not in text or word not in text:
        raise UserError(
            "continue_final_message: the model's chat template drops or changes the final message"
        )
    at = text.rindex(word)
    return text[:at] if text.startswith(_END_MARK, at) else text[:at].rstrip()


def _read_core(folder: Path, trust_remote_code: bool) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if path.is_file():
        try:
            return tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"{path}: not a tokenizer that can be read ({error})") from None
    if not (folder / "tokenizer_config.json").is_file():
        raise UserError(f"{folder}: has no tokenizer.json; copy the model's tokenizer files there")
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
        return loaded.backend_tokenizer
    except (AttributeError, ImportError, OSError, ValueError) as error:
        raise UserError(
            f"{folder}: has no tokenizer.json, and transformers cannot make one ({error}); save it with "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        ) from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
    if not isinstance(loaded, dict):
        raise UserError(f"{path}: must be a JSON object")
    return loaded


def _read_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """The default chat template: a file of its own, or a field that is one text or a list of named ones."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Every `..._token` that is a text, or an object holding one as its content."""
    found = {}
    for name, value in settings.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what training learns from; here its content is plain text."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(template: str, folder: Path) -> jinja2.Template:
    """Sandboxed: a template comes with the model and must not reach beyond its variables."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    try:
        return environment.from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"{folder}: chat template, line {error.lineno}: {error.message}") from None


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which models were not trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refused(error: Exception) -> UserError:
    return UserError(f"the model's chat template refuses these messages: {error}")


def _with_arguments_as_text(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    def as_text(call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        return {**call, "function": {**function, "arguments": _to_json(function["arguments"])}}

    return [
        {**message, "tool_calls": [as_text(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else dict(message)
        for message in messages
    ]


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def longest_token(declared: Mapping[str, Any]) -> int | None:
    """How many bytes of text, in UTF-8, one token stands for at most; None if that has no bound.

    declared: tokenizer.json

    There is a bound if nothing drops text: every byte has a token, and no normalizer, pre-tokenizer or added
    token swallows characters beyond its own. What is not known to keep them counts as dropping them.
    """
    shrink = _shrinkage(declared.get("normalizer"))
    byte_level = _keeps_text(declared.get("pre_tokenizer"))
    model, added = declared["model"], declared.get("added_tokens") or []
    if shrink is None or byte_level is None or model.get("type") != "BPE":
        return None
    if any(token["lstrip"] or token["rstrip"] for token in added):
        return None
    vocab: Mapping[str, int] = model["vocab"]
    every_byte = _ALPHABET if byte_level else [f"<0x{byte:02X}>" for byte in range(256)]
    if not ((byte_level or model.get("byte_fallback")) and all(symbol in vocab for symbol in every_byte)):
        return None
    longest = max(len(_from_byte_level(token) if byte_level else token.encode()) for token in vocab)
    return shrink * max([longest, *(len(token["content"].encode()) for token in added)])


def _shrinkage(normalizer: Mapping[str, Any] | None) -> int | None:
    """By what factor a normalizer may shorten text, in bytes of UTF-8; None if without bound."""
    match normalizer:
        case None | {"type": "Prepend"}:
            return 1
        case {"type": "NFC" | "NFD"}:
            return 4  # at most 3.5: iota, diaeresis and accent, in 7 bytes, are the 2 bytes of U+0390
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return 1 if len(new.encode()) >= len(old.encode()) else None
        case {"type": "Sequence", "normalizers": parts}:
            factors = [_shrinkage(part) for part in parts]
            return None if None in factors else math.prod(factor for factor in factors if factor)
    return None


def _keeps_text(pre_tokenizer: Mapping[str, Any] | None) -> bool | None:
    """Whether a pre-tokenizer turns text into a byte-level alphabet; None if it may drop some of it."""
    match pre_tokenizer:
        case {"type": "ByteLevel"}:
            return True
        case None | {"type": "Digits" | "Metaspace"}:
            return False
        case {"type": "Split" | "Punctuation", "behavior": behavior}:
            return None if behavior == "Removed" else False
        case {"type": "Sequence", "pretokenizers": parts}:
            found = [_keeps_text(part) for part in parts]
            return None if None in found else any(found)
    return None


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-in of every byte in byte-level vocabularies (GPT-2's `bytes_to_unicode`)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _from_byte_level(token: str) -> bytes:
    """An added token may hold characters outside the alphabet; it then stands for itself."""
    try:
        return bytes([_ALPHABET[char] for char in token])
    except KeyError:
        return token.encode()
