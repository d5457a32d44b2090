"""The tokenizer against transformers on the same files, and what is wrong with files said clearly."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import unicodedata
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer

from tests.tiny import write_tokenizer
from turnout.engine.tokenizer import Tokenizer
from turnout.errors import UserError

TEXTS = ["", "hello world", "  two  spaces\n", "é€😀", "<|end|> inside", "\x00\xad"]
MESSAGES = [
    {"role": "system", "content": "Be <b>brief</b>."},
    {"role": "user", "content": "2 + 2 = ?"},
]
TEMPLATES = [
    "{{ bos_token | default('') }}{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}"
    "{{ eos_token }}",
    "{% for m in messages %}\n    {% if loop.first %}\n{{ m.content }}\n    {% continue %}{% endif %}\n"
    "- {{ m | tojson }}\n{% endfor %}",
    "{% generation %}{{ messages[0]['content'] }}{% endgeneration %}"
    "{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
    "{{ ns.n }}{{ add_generation_prompt }}{{ extra }}",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    return tmp_path


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_texts_equal_transformers(folder: Path, text: str) -> None:
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    ids = ours.encode(text)
    assert ids == theirs(text)["input_ids"]
    for skip in (True, False):
        expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert ours.decode(ids, skip_special_tokens=skip) == expected


@pytest.mark.parametrize("template", TEMPLATES)
def test_chat_templates_equal_transformers(folder: Path, template: str) -> None:
    (folder / "chat_template.jinja").write_text(template)
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    options = {"tools": [{"type": "function", "function": {"name": "f"}}], "extra": "<&>"}
    expected = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True, **options)
    assert ours.render_chat(MESSAGES, **options) == expected
    assert ours.encode_chat(MESSAGES, **options) == theirs(expected, add_special_tokens=False)["input_ids"]


CONTINUED = [
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>\n{% endfor %}",
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</{{ m.role }}>\n{% endfor %}",
    "{% for m in messages %}{{ m.content }}{% if not loop.last %}|{% endif %}{% endfor %}",
]


@pytest.mark.parametrize("template", CONTINUED)
@pytest.mark.parametrize("final", ["Sure:", "Sure: ", "  a\n", "", "CONTINUE_FINAL_MESSAGE_TAG x"])
def test_a_continued_message_ends_where_transformers_ends_it(folder: Path, template: str, final: str) -> None:
    (folder / "chat_template.jinja").write_text(template)
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    messages = [*MESSAGES, {"role": "assistant", "content": final}]
    expected = theirs.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    assert ours.render_chat(messages, continue_final_message=True) == expected
    assert messages[-1]["content"] == final


def test_variables_may_have_the_names_of_our_own_parameters(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ self_ }}{{ text }}{{ skip_special_tokens }}")
    assert Tokenizer.load(folder).encode_chat(MESSAGES, self=0, text="1", skip_special_tokens="2") == [16, 17]


def test_a_message_that_the_template_drops_cannot_be_continued(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    messages = [*MESSAGES, {"role": "assistant", "content": "I"}]
    with pytest.raises(ValueError):
        theirs.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    with pytest.raises(UserError, match="continue_final_message: the model's chat template drops"):
        ours.render_chat(messages, continue_final_message=True)
    with pytest.raises(UserError, match="exclude each other"):
        ours.render_chat(messages, continue_final_message=True, add_generation_prompt=True)


@pytest.mark.parametrize("shape", ["text", "list"])
def test_a_template_may_stand_in_the_tokenizer_config(folder: Path, shape: str) -> None:
    (folder / "chat_template.jinja").unlink()
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    named = [{"name": "other", "template": "no"}, {"name": "default", "template": "yes"}]
    path.write_text(json.dumps(settings | {"chat_template": "yes" if shape == "text" else named}))
    assert Tokenizer.load(folder).render_chat(MESSAGES) == "yes"


def test_special_tokens_may_be_objects(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<|end|>", "lstrip": False}})
    )
    (folder / "chat_template.jinja").write_text("{{ eos_token }}")
    assert Tokenizer.load(folder).encode_chat(MESSAGES) == [257]


def test_every_token_is_its_bytes(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    text = "aé€😀\n\x00"
    assert b"".join(tokenizer.token_bytes(i) for i in tokenizer.encode(text)) == text.encode()
    assert sorted(tokenizer.token_bytes(i) for i in range(256)) == [bytes([b]) for b in range(256)]
    assert tokenizer.token_bytes(257) == b"<|end|>"
    assert tokenizer.token_bytes(99_999) == b""


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[7].content + 1 }}", "refuses these messages"),
        ("{{ messages.__class__.__mro__ }}", "refuses these messages"),
        ("{{ messages.append(1) }}", "refuses these messages"),
    ],
)
def test_a_template_that_fails_is_the_users_error(folder: Path, template: str, says: str) -> None:
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(UserError, match=says):
        Tokenizer.load(folder).render_chat(MESSAGES)


def test_broken_files_are_named(folder: Path, tmp_path: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(UserError, match="chat template, line 1"):
        Tokenizer.load(folder)
    (folder / "chat_template.jinja").unlink()
    tokenizer = Tokenizer.load(folder)
    assert not tokenizer.has_chat_template
    with pytest.raises(UserError, match="no chat template"):
        tokenizer.render_chat(MESSAGES)
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(UserError, match=r"tokenizer_config\.json: must be a JSON object"):
        Tokenizer.load(folder)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match=r"tokenizer_config\.json: cannot be read"):
        Tokenizer.load(folder)
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer\.json: not a tokenizer"):
        Tokenizer.load(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"has no tokenizer\.json"):
        Tokenizer.load(folder)


def test_truncation_and_padding_settings_do_not_apply(folder: Path) -> None:
    path = folder / "tokenizer.json"
    core = json.loads(path.read_text())
    core["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(core))
    assert len(Tokenizer.load(folder).encode("more than four")) == 14


def test_torch_is_not_imported(folder: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from turnout.engine.tokenizer import Tokenizer; "
        "from turnout.engine.sampling.detokenizer import TextStream; "
        f"Tokenizer.load(Path({str(folder)!r})).encode('x'); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def merging(
    *,
    normalizer: normalizers.Normalizer | None = None,
    before: pre_tokenizers.PreTokenizer | None = None,
    added: AddedToken | None = None,
    alphabet: int = 256,
) -> Tokenizer:
    """Of bytes, with a token for two, four and eight spaces."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())[:alphabet]
    spaces = ["Ġ" * 2**k for k in range(1, 4)]
    vocab = {symbol: i for i, symbol in enumerate([*dict.fromkeys([*symbols, "Ġ"]), *spaces])}
    core = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("Ġ" * 2**k,) * 2 for k in range(3)]))
    core.pre_tokenizer = pre_tokenizers.Sequence([before, BYTES]) if before else BYTES
    core.normalizer = normalizer
    core.add_special_tokens([added or "<|eleven|>"])
    return Tokenizer(core, template=None, special={}, folder=Path())


DIGITS = pre_tokenizers.Split(tokenizers.Regex(r"\d"), behavior="isolated")
NFC = normalizers.NFC()


@pytest.mark.parametrize(
    ("ours", "longest"),
    [
        (merging(), 10),
        (merging(before=DIGITS), 10),
        (merging(added=AddedToken("<é>")), 8),  # 4 bytes
        (merging(normalizer=NFC), 40),
        (merging(normalizer=normalizers.Sequence([NFC, normalizers.Replace("~", "~~")])), 40),
    ],
)
@given(text=st.text(st.sampled_from(" aé\u0390\u1fbe\u0308\u0301\u212a<|eleven|>~7"), max_size=200))
def test_no_text_takes_fewer_tokens_than_it_must(ours: Tokenizer, longest: int, text: str) -> None:
    assert ours.longest_token == longest
    assert len(ours.encode(text)) >= ours.least_tokens(text) >= len(text.encode()) / longest
    assert ours.least_tokens(text + " " * longest) == ours.least_tokens(text) + 1


@pytest.mark.parametrize(
    "ours",
    [
        merging(added=AddedToken("<mask>", lstrip=True)),
        merging(before=pre_tokenizers.Split(" ", behavior="removed")),
        merging(before=pre_tokenizers.WhitespaceSplit()),
        merging(normalizer=normalizers.Strip()),
        merging(normalizer=normalizers.Sequence([NFC, normalizers.Replace("  ", " ")])),
        merging(alphabet=255),
    ],
)
def test_where_text_may_vanish_there_is_no_bound(ours: Tokenizer) -> None:
    assert ours.longest_token is None
    assert ours.least_tokens("a" * 1000) == 0


def test_normal_forms_shorten_text_by_no_more_than_the_bound_allows() -> None:
    """Each character written as long as Unicode allows: every part of its decomposition by the longest
    character that decomposes to that part alone."""
    characters = [chr(i) for i in range(sys.maxunicode + 1) if not 0xD800 <= i <= 0xDFFF]
    longest: dict[str, int] = {}
    for c in characters:
        part = unicodedata.normalize("NFD", c)
        longest[part] = max(longest.get(part, 0), len(c.encode()))
    for c in characters:
        written = sum(longest[part] for part in unicodedata.normalize("NFD", c))
        assert max(written, len(c.encode())) <= 4 * len(unicodedata.normalize("NFC", c).encode())


def test_other_threads_run_while_a_text_is_tokenised(folder: Path) -> None:
    """Pauses are what this thread computes between two looks of another one: a busy machine keeps both."""
    ours = Tokenizer.load(folder)
    pauses, stop = [0.0], threading.Event()
    own = time.pthread_getcpuclockid(threading.get_ident())

    def watch() -> None:
        last = time.clock_gettime(own)
        while not stop.wait(0.001):
            now = time.clock_gettime(own)
            pauses.append(now - last)
            last = now

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.clock_gettime(own)
    assert len(ours.encode("the quick brown fox " * 100_000)) == 2_000_000
    took = time.clock_gettime(own) - start
    stop.set()
    watcher.join()
    assert max(pauses) < took / 4, f"a pause of {max(pauses):.2f} s in {took:.2f} s"
