"""Grammars at work: compiled for a model's vocabulary, and following what is generated. Torch-free."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer

from turnout.engine.grammar import LIMITS
from turnout.errors import UserError

KEPT = 64  # compiled grammars, since many requests bring the same


class GrammarCompiler:
    """Compiles in a thread, so that steps go on meanwhile. Loads the tokenizer there when it is made."""

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Sequence[int]):
        """folder: of the tokenizer. vocab_size: of the model's logits. eos_token_ids: allowed where an output
        may end; if there are none, the tokenizer's."""
        self._vocab_size, self._eos = vocab_size, list(eos_token_ids) or None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._tokenizer = self._thread.submit(self._load, folder)

    def compile(self, grammar: str) -> GrammarMatcher:
        """At once; what comes of it waits."""
        compiled = self._compiled.pop(grammar, None) or self._thread.submit(self._compile, grammar)
        self._compiled[grammar] = compiled
        if len(self._compiled) > KEPT:
            self._compiled.popitem(last=False)
        return GrammarMatcher(compiled)

    def _load(self, folder: Path) -> LLTokenizer:
        path = folder / "tokenizer.json"
        try:
            return LLTokenizer(str(path), n_vocab=self._vocab_size, eos_token=self._eos)
        except Exception as error:  # the library raises several kinds
            raise UserError(f"{path}: outputs cannot follow grammars with this tokenizer ({error})") from None

    def _compile(self, grammar: str) -> LLMatcher:
        return LLMatcher(self._tokenizer.result(), grammar, log_level=0, limits=LIMITS)


class GrammarMatcher:
    """How far one request's output has come in its grammar. `advance` first; the rest is about that place."""

    def __init__(self, compiled: Future[LLMatcher]):
        self._compiled = compiled
        self._matcher: LLMatcher | None = None
        self._consumed = 0  # tokens
        self.error = ""  # why the output cannot go on

    def advance(self, tokens: Sequence[int], start: int) -> LLMatcher | None:
        """Take in the output tokens[start:], which begin with those taken before; None after an `error`."""
        if self._matcher is None and not self.error:
            try:
                self._matcher = self._compiled.result().deep_copy()
            except UserError as error:
                self.error = str(error)
        if self._matcher is None:
            return None
        new = tokens[start + self._consumed :]
        self._consumed += len(new)
        if new:
            self._matcher.consume_tokens(list(new))
        if self._matcher.is_error():
            self.error = "the output cannot follow its grammar: " + self._matcher.get_error().split("\n")[0]
            self._matcher = None
        return self._matcher

    @property
    def ended(self) -> bool:
        """Whether nothing may follow."""
        return self._matcher is not None and self._matcher.is_stopped()

    def allowed(self, drafts: Sequence[int]) -> int:
        """How many of `drafts` may follow, from the first on."""
        return self._matcher.validate_tokens(list(drafts)) if self._matcher is not None else 0
