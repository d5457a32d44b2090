"""Facts about formats have one owner, and values that are one of a few words are compared as members."""

import ast
import json
import re
from pathlib import Path

import pytest

from turnout.formats.spec import FORMATS
from turnout.vocabulary import Format, Layout, Phase

ROOT = Path(__file__).parents[1]
OWNERS = {"turnout/vocabulary.py", "turnout/formats/spec.py"}
# Compilers want literals in kernels: what they spell is compared with the table below.
FILES = [
    file
    for file in sorted((ROOT / "turnout").rglob("*.py"))
    if str(file.relative_to(ROOT)) not in OWNERS and not file.is_relative_to(ROOT / "turnout/kernels")
]
WORDS = {*Format, *Phase, *Layout}
OTHERS = ("TILE_", "MOST_", "_MOST", "INT4_")
GROUP_NAME = re.compile(r"(^|_)(GROUP|GROUPS|GROUP_SIZE)$")


def literals(node: ast.AST) -> list[int]:
    return [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and type(n.value) is int]


def group_constants(tree: ast.Module) -> list[str]:
    """Constants of a module that are called a group and given a number.

    OTHERS are not groups of a format in the table: tiles, bounds of a search, and INT4, which checkpoints
    may have in several.
    """
    found = []
    for node in tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or not (node.value and literals(node.value)):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]
        found += [n for n in names if GROUP_NAME.search(n) and not n.startswith(OTHERS)]
    return found


def spelled_compares(tree: ast.Module) -> list[str]:
    """Comparisons with a format, phase or layout that is spelled out, alone or in a tuple, list or set; and
    whether one is in something."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Compare):
            continue
        equal = isinstance(node.ops[0], ast.Eq | ast.NotEq)
        for side in (node.left, *node.comparators):
            alone = [side] if equal or side is node.left else []
            inside = side.elts if isinstance(side, ast.Tuple | ast.List | ast.Set) else alone
            if any(isinstance(value, ast.Constant) and value.value in WORDS for value in inside):
                found.append(ast.unparse(node))
    return found


def test_groups_come_from_the_table_and_words_are_members():
    groups, compares = {}, {}
    for file in FILES:
        tree, name = ast.parse(file.read_text()), str(file.relative_to(ROOT))
        groups[name] = group_constants(tree)
        # How a checkpoint was made ("mxfp4") is its writer's word, not a format of ours.
        compares[name] = [
            c for c in spelled_compares(tree) if ".method ==" not in c and not c.startswith("record.get(")
        ]
    assert {name: found for name, found in groups.items() if found} == {}
    assert {name: found for name, found in compares.items() if found} == {}


@pytest.mark.parametrize("source", ["GROUP: int = 16", 'GROUPS = {"fp8": 128}', "ROWS, FP8_GROUP = 64, 128"])
def test_a_second_owner_of_a_group_is_found(source: str):
    assert len(group_constants(ast.parse(source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        'x.format == "fp8"',
        '"decode" != phase',
        'a.layout == "tokens"',
        '(a.format, b) == ("fp8", 1)',
        'a.format in ("fp8", "int4")',
        'phase not in {"decode"}',
        '"tokens" not in runner.layouts',
    ],
)
def test_a_spelled_out_word_is_found(source: str):
    assert len(spelled_compares(ast.parse(source))) == 1


def test_groups_that_kernels_spell_are_those_of_the_table():
    def assigned(file: str, name: str) -> ast.expr:
        tree = ast.parse((ROOT / "turnout/kernels" / file).read_text())
        found = [n for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == name]
        return found[0].value

    groups = ast.literal_eval(assigned("nvlink/links.py", "GROUPS"))
    assert groups == {f: FORMATS[Format(f)].group for f in ("fp8", "nvfp4")}
    assert literals(assigned("nvlink/combine_fp8.py", "GROUP")) == [FORMATS[Format.FP8].group]


def test_members_print_and_serialise_as_plain_words():
    member = Format.NVFP4
    assert (f"{member}", repr(member), json.dumps({"f": member})) == ("nvfp4", "'nvfp4'", '{"f": "nvfp4"}')
    assert type(str(member)) is str
    assert {Phase.DECODE: 1}["decode"] == 1
