"""Text as it streams: whole characters only, stop strings wherever tokens split them."""

from __future__ import annotations

from itertools import pairwise

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from tests.tiny import write_tokenizer
from turnout.engine.messages import RequestOutput, TokenLogprobs
from turnout.engine.sampling.detokenizer import StopStrings, TextDelta, TextStream
from turnout.engine.sampling_params import SamplingParams
from turnout.engine.tokenizer import Tokenizer

END = 257


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One token per byte: every character beyond ASCII spans several."""
    folder = tmp_path_factory.mktemp("bytes")
    write_tokenizer(folder)
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A sentencepiece-like vocabulary: words with their space, and byte pieces."""
    vocab = ["<unk>", "▁the", "▁cat", "s", "!", "▁", *(f"<0x{byte:02X}>" for byte in range(256))]
    core = tokenizers.Tokenizer(models.BPE({t: i for i, t in enumerate(vocab)}, [], unk_token="<unk>"))
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.add_special_tokens(["<s>"])
    folder = tmp_path_factory.mktemp("pieces")
    core.save(str(folder / "tokenizer.json"))
    return Tokenizer.load(folder)


def stream(tokenizer: Tokenizer, groups: list[list[int]], **fields: object) -> list[TextDelta]:
    """The deltas of tokens that arrive in `groups`; the last group also brings the end."""
    text = TextStream(tokenizer, SamplingParams(max_tokens=1000, **fields))  # type: ignore[arg-type]
    deltas = []
    for i, ids in enumerate(groups):
        last = i == len(groups) - 1
        deltas.append(
            text.push(RequestOutput(id="a", token_ids=ids, finish_reason="length" if last else None))
        )
    return deltas


def texts(deltas: list[TextDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def one_by_one(ids: list[int]) -> list[list[int]]:
    return [[token] for token in ids]


def test_characters_come_whole(tokenizer: Tokenizer) -> None:
    deltas = stream(tokenizer, one_by_one(tokenizer.encode("aé€😀b")))
    assert [delta.text for delta in deltas] == ["a", "", "é", "", "", "€", "", "", "", "😀", "b"]


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, 255), max_size=30), cuts=st.lists(st.integers(0, 30), max_size=5))
def test_any_bytes_in_any_groups_add_up_to_the_whole_text(
    tokenizer: Tokenizer, ids: list[int], cuts: list[int]
) -> None:
    edges = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    groups = [ids[a:b] for a, b in pairwise(edges)]
    assert texts(stream(tokenizer, groups)) == tokenizer.decode(ids)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), byte_level=st.booleans(), skip=st.booleans())
def test_special_tokens_are_text_if_asked(
    tokenizer: Tokenizer, pieces: Tokenizer, data: st.DataObject, byte_level: bool, skip: bool
) -> None:
    """One token at a time equals the library's decoding of the whole, with special tokens and without."""
    which = tokenizer if byte_level else pieces
    special = st.sampled_from(sorted(which.special_ids))
    # Of byte pieces only ASCII: the library decodes runs of others by rules of its own.
    plain = st.integers(0, 127) if byte_level else st.integers(1, 6 + 127)
    ids = data.draw(st.lists(st.one_of(plain, special), max_size=20))
    got = texts(stream(which, one_by_one(ids) or [[]], skip_special_tokens=skip))
    assert got == which.decode(ids, skip_special_tokens=skip)


def test_a_character_that_never_completes_comes_at_the_end(tokenizer: Tokenizer) -> None:
    deltas = stream(tokenizer, one_by_one(tokenizer.encode("a€")[:-1]))
    assert [delta.text for delta in deltas] == ["a", "", "�"]


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(alphabet="ab€", max_size=25),
    stops=st.lists(st.text(alphabet="ab€", min_size=1, max_size=4), min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 4), min_size=1),
    keep=st.booleans(),
)
def test_stop_strings_cut_where_they_first_appear(
    tokenizer: Tokenizer, text: str, stops: list[str], sizes: list[int], keep: bool
) -> None:
    """Wherever tokens split them, what is shown ends before the one that is complete first."""
    ids = tokenizer.encode(text)
    groups = []
    while ids:
        size = sizes[len(groups) % len(sizes)]
        groups.append(ids[:size])
        ids = ids[size:]
    groups = groups or [[]]
    deltas = stream(tokenizer, groups, stop=tuple(stops), include_stop_str_in_output=keep)
    if not any(stop in text for stop in stops):
        assert texts(deltas) == text
        assert deltas[-1].finish_reason == "length"
        return
    stopped = next(delta for delta in deltas if delta.stopped)
    assert stopped.finish_reason == "stop"
    assert stopped.stop_reason in stops
    shown = texts(deltas)
    cut = shown if not keep else shown[: -len(str(stopped.stop_reason))]
    assert text.startswith(cut + str(stopped.stop_reason))
    assert not any(stop in cut for stop in stops)
    assert all(delta == TextDelta() for delta in deltas[deltas.index(stopped) + 1 :])


def test_text_is_held_back_only_while_it_may_become_a_stop_string(tokenizer: Tokenizer) -> None:
    deltas = stream(tokenizer, one_by_one(tokenizer.encode("x###y##")), stop=("####",))
    assert [delta.text for delta in deltas] == ["x", "", "", "", "###y", "", "##"]


def test_tokens_after_a_stop_string_are_dropped(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("abSTOPcd")
    scores = [TokenLogprobs(token_id=i, logprob=-1.0, rank=1, top=[]) for i in ids]
    text = TextStream(tokenizer, SamplingParams(stop=("STOP",), logprobs=0))
    delta = text.push(RequestOutput(id="a", token_ids=ids, logprobs=scores))
    assert (delta.text, delta.finish_reason, delta.stop_reason, delta.stopped) == ("ab", "stop", "STOP", True)
    assert delta.token_ids == ids[:6]
    assert [entry.token_id for entry in delta.logprobs] == ids[:6]
    assert text.push(RequestOutput(id="a", finish_reason="abort")) == TextDelta()


def test_a_stop_string_waits_for_min_tokens(tokenizer: Tokenizer) -> None:
    deltas = stream(tokenizer, one_by_one(tokenizer.encode("abaab")), stop=("ab",), min_tokens=3)
    assert texts(deltas) == "aba"
    assert deltas[-1].stopped
    assert texts(stream(tokenizer, one_by_one(tokenizer.encode("aba")), stop=("ba",), min_tokens=3)) == "aba"


@pytest.mark.parametrize("keep", [False, True])
def test_the_token_that_ended_it_is_counted_but_not_shown(tokenizer: Tokenizer, keep: bool) -> None:
    sampling = SamplingParams(stop_token_ids=(10,), include_stop_str_in_output=keep)
    ids = tokenizer.encode("ab")
    output = RequestOutput(id="a", token_ids=[*ids, 10], finish_reason="stop", stop_token=10)
    delta = TextStream(tokenizer, sampling).push(output)
    assert delta.token_ids == [*ids, 10]
    assert (delta.text, delta.stop_reason, delta.stopped) == ("ab+" if keep else "ab", 10, False)


def test_special_tokens_have_no_text(tokenizer: Tokenizer) -> None:
    assert texts(stream(tokenizer, one_by_one([64, END, 65]))) == tokenizer.decode([64, 65])


def test_a_stop_string_inside_the_last_incomplete_text(tokenizer: Tokenizer) -> None:
    """What the end sets free is searched too: here a broken character that the stop string names."""
    deltas = stream(tokenizer, one_by_one([*tokenizer.encode("a"), 224]), stop=("�",))
    assert texts(deltas) == "a"
    assert deltas[-1].finish_reason == "stop"


def test_errors_and_scores_pass_through(tokenizer: Tokenizer) -> None:
    output = RequestOutput(
        id="a", prompt_logprobs=[None], cached_tokens=3, finish_reason="error", error="not finite"
    )
    delta = TextStream(tokenizer, SamplingParams()).push(output)
    assert (delta.prompt_logprobs, delta.cached_tokens, delta.error) == ([None], 3, "not finite")


def test_pieces_keep_their_spaces_and_bytes(pieces: Tokenizer) -> None:
    euro = [6 + byte for byte in "€".encode()]
    ids = [1, 2, 3, *euro, 4, 5, 1]
    deltas = stream(pieces, one_by_one(ids))
    assert texts(deltas) == pieces.decode(ids) == "the cats€!  the"
    assert [delta.text for delta in deltas][:7] == ["the", " cat", "s", "", "", "€", "!"]


@settings(max_examples=100, deadline=None)
@given(words=st.lists(st.sampled_from(["▁the", "▁cat", "s", "!", "é", "€", "😀"]), max_size=12))
def test_pieces_add_up(pieces: Tokenizer, words: list[str]) -> None:
    ids: list[int] = []
    for word in words:
        known = pieces._core.token_to_id(word)
        ids += [known] if known is not None else [6 + byte for byte in word.encode()]
    assert texts(stream(pieces, one_by_one(ids) or [[]])) == pieces.decode(ids)


def test_endless_broken_bytes_are_not_held_forever(pieces: Tokenizer) -> None:
    deltas = stream(pieces, one_by_one([6 + 0xFF] * 40))
    assert sum(bool(delta.text) for delta in deltas) > 5


def test_stop_strings_prefer_the_longer_of_two_at_one_place() -> None:
    stops = StopStrings(["ab", "abc"])
    assert stops.push("xabc") == "x"
    assert stops.found == "abc"
