"""Reading `config.json` strictly: every value checked, every field accounted for.

An architecture reads the fields that matter to it; whatever it has not read when it is done must be
known to be harmless, or be switched off. So a field that would change the result and is not
implemented is refused by name instead of being ignored.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from turnout.errors import UserError

# Fields that say nothing about the forward pass: where the file came from, training, token ids that
# the tokenizer owns, and the weights' dtype and format, which their files state themselves.
HARMLESS = frozenset(
    {
        "architectures",
        "attention_dropout",
        "auto_map",
        "bos_token_id",
        "dtype",
        "id2label",
        "initializer_range",
        "label2id",
        "max_window_layers",  # matters only with use_sliding_window, which is checked
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "problem_type",
        "quantization_config",
        "return_dict",
        "router_aux_loss_coef",
        "tokenizer_class",
        "torch_dtype",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
    }
)

# What arithmetic in float32 can carry; every real configuration lies far inside.
MIN_NUMBER, MAX_NUMBER = 1e-12, 1e12
MAX_INTEGER = 2**40

_REQUIRED: Any = object()


class ConfigFields:
    """The fields of a `config.json` (or of an object in it), read with checks and remembered.

    Every method raises UserError naming the field. A field that is absent gives `default`; a null one
    too, since that is how configurations say "not set". Without a default both are errors.
    """

    def __init__(self, values: Mapping[str, Any], where: str = "config.json"):
        self.where = where
        self._values = values
        self._read: set[str] = set()
        self._nested: list[ConfigFields] = []

    def raw(self, name: str) -> Any:
        """The value as it stands, None when absent."""
        self._read.add(name)
        return self._values.get(name)

    def unused(self, *names: str) -> None:
        """Fields that say nothing about this forward pass, whatever their values."""
        self._read.update(names)

    def nested(self, name: str) -> ConfigFields:
        """The fields of the object called `name`, which `refuse_unread` then looks at too."""
        value = self._value(name, _REQUIRED)
        if not isinstance(value, dict):
            raise self.wrong(name, "must be an object")
        self._nested.append(ConfigFields(value, f"{self.where}: {name}"))
        return self._nested[-1]

    def integer(self, name: str, default: Any = _REQUIRED, *, minimum: int = 1) -> int:
        """From `minimum` to MAX_INTEGER."""
        value = self._value(name, default)
        if type(value) is not int or not minimum <= value <= MAX_INTEGER:
            raise self.wrong(name, f"must be an integer of at least {minimum}" + _at_most(value, MAX_INTEGER))
        return value

    def number(self, name: str, default: Any = _REQUIRED, *, minimum: float = MIN_NUMBER) -> float:
        """From `minimum` to MAX_NUMBER."""
        value = self._value(name, default)
        if not _is_number(value, minimum):
            raise self.wrong(name, f"must be a number of at least {minimum:g}" + _at_most(value, MAX_NUMBER))
        return float(value)

    def flag(self, name: str, default: Any = _REQUIRED) -> bool:
        value = self._value(name, default)
        if type(value) is not bool:
            raise self.wrong(name, "must be true or false")
        return value

    def integers(self, name: str, default: Any = _REQUIRED) -> tuple[int, ...]:
        """A list of integers of at least 0; a single integer counts as a list of one."""
        value = self._value(name, default)
        items = [value] if type(value) is int else value
        if not isinstance(items, list | tuple) or not all(type(i) is int and i >= 0 for i in items):
            raise self.wrong(name, "must be a list of integers of at least 0")
        return tuple(items)

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """A list of exactly `count` positive numbers."""
        items = self._value(name, _REQUIRED)
        if not isinstance(items, list | tuple) or len(items) != count or not all(map(_is_number, items)):
            raise self.wrong(name, f"must be a list of {count} positive numbers")
        return tuple(float(i) for i in items)

    def choice(self, name: str, allowed: Collection[Any], *, default: Any) -> Any:
        """One of the values that are implemented."""
        value = self._value(name, default)
        if not any(value == a and type(value) is type(a) for a in allowed):
            raise self.wrong(name, f"is not implemented; only {' or '.join(map(repr, allowed))} is")
        return value

    def refuse_unread(self, harmless: Collection[str] = HARMLESS) -> None:
        """Refuse, all at once, fields that were not read and that are neither harmless nor switched off."""
        unknown = [
            f"{name} = {_short(value)}"
            for name, value in self._values.items()
            if name not in self._read and name not in harmless and not name.startswith("_") and value
        ]
        if unknown:
            raise UserError(
                f"{self.where}: not implemented, and could change the result: {'; '.join(unknown)}. "
                "If the model does not need them, remove these fields from the file"
            )
        for fields in self._nested:
            fields.refuse_unread(harmless)

    def wrong(self, name: str, rule: str) -> UserError:
        """The error for a field whose value breaks `rule`."""
        return UserError(f"{self.where}: {name} = {_short(self._values.get(name))}: {rule}")

    def _value(self, name: str, default: Any) -> Any:
        value = self.raw(name)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise UserError(f"{self.where}: {name} is missing")
        return default


def _is_number(value: Any, minimum: float = MIN_NUMBER) -> bool:
    return type(value) in (int, float) and minimum <= value <= MAX_NUMBER  # NaN compares false


def _at_most(value: Any, maximum: float) -> str:
    """Mentioned only where it is what was broken."""
    return f" and at most {maximum:g}" if type(value) in (int, float) and value > maximum else ""


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
