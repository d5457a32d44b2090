"""tools.decode_agreement: the bundled model's decode steps agree with its prompts and with transformers."""

from pathlib import Path

import pytest

from tools.decode_agreement import agreement, compare
from tools.demo.export import decoded
from turnout.checkpoint.locate import locate


def test_decode_steps_of_the_bundled_model_agree_with_prompts_and_with_transformers(tmp_path: Path) -> None:
    decoded(locate("demo"), tmp_path / "bf16")
    found = compare(str(tmp_path / "bf16"), 4, 0, transformers=True)
    assert found.keys() == {"prompts", "transformers"}
    for other in found.values():
        assert other["tokens"] > 200
        assert other["largest_difference"] < 1e-4
        assert other["other_choices"] == 0


def test_a_token_that_another_computation_would_not_choose_is_counted() -> None:
    answers = [([5, 7], [-0.1, -0.2]), ([9], [-0.3])]
    found = agreement(answers, [[(5, -0.1), (8, -2.2)], [(9, -0.4)]])
    assert found == {"tokens": 3, "largest_difference": pytest.approx(2.0), "other_choices": 1}
