"""Damaged folders: each is a CheckpointError that names the file, and the tensor where there is one."""

from __future__ import annotations

import contextlib
import json
import math
import pickle
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from turnout.checkpoint import CheckpointError
from turnout.checkpoint.files import TensorFiles
from turnout.checkpoint.headers import _parse_entry, _well_formed
from turnout.checkpoint.names import header_bytes, read_header

INDEX = "model.safetensors.index.json"


@pytest.fixture
def tensors():
    torch.manual_seed(0)
    return {
        "a": torch.randn(4, 6),
        "b": torch.randint(0, 255, (5,), dtype=torch.uint8),
        "c": torch.randn(3, 2, 4).bfloat16(),
        "d": torch.randn(8, 4).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
    }


@pytest.fixture
def single(tmp_path, tensors):
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def sharded(tmp_path, tensors):
    """a and b in the first of two files, the rest in the second."""
    first = {name: tensors[name] for name in ("a", "b")}
    second = {name: value for name, value in tensors.items() if name not in first}
    weight_map = {}
    for i, part in enumerate((first, second), 1):
        file = f"model-0000{i}-of-00002.safetensors"
        save_file(part, tmp_path / file)
        weight_map |= dict.fromkeys(part, file)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def refused(folder, *words):
    with pytest.raises(CheckpointError) as caught:
        TensorFiles(folder)
    for word in words:
        assert word in str(caught.value), caught.value
    return str(caught.value)


@pytest.mark.parametrize("kind", ["single", "sharded"])
def test_every_tensor_reads_back(kind, request, tensors):
    files = TensorFiles(request.getfixturevalue(kind))
    assert set(files) == set(tensors)
    for name, expected in tensors.items():
        value = files.read(name)
        assert (value.dtype, value.shape) == (expected.dtype, expected.shape)
        assert torch.equal(value.float(), expected.float())
    assert files.nbytes == sum(t.nbytes for t in tensors.values())
    assert files.unread() == []


def test_part_of_the_leading_dimension(single, tensors):
    files = TensorFiles(single)
    assert torch.equal(files.read("c", first=1, count=2), tensors["c"][1:3])
    with pytest.raises(ValueError, match="leaves"):
        files.read("c", first=2, count=2)


@pytest.mark.parametrize("chunk", [1, 8, 1 << 20])
def test_strided_or_converted_targets_are_filled_in_chunks(single, tensors, chunk, monkeypatch):
    monkeypatch.setattr("turnout.checkpoint.files._CHUNK_BYTES", chunk)
    files = TensorFiles(single)
    reads, read_bytes = [], files._read_bytes
    monkeypatch.setattr(files, "_read_bytes", lambda *args: reads.append(args[2].nbytes) or read_bytes(*args))
    strided = torch.zeros(6, 4).T
    files.read_into("a", strided)
    assert torch.equal(strided, tensors["a"])
    assert max(reads) <= max(chunk, tensors["a"][0].nbytes)
    wide = torch.zeros(3, 2, 4)
    files.read_into("c", wide)
    assert torch.equal(wide, tensors["c"].float())
    number = torch.zeros((), dtype=torch.float64)
    files.read_into("scalar", number)
    assert number == 2.5


def test_progress_counts_every_tensor_once(single, tensors):
    heard = []
    files = TensorFiles(single, lambda *report: heard.append(report))
    files.read("a")
    files.read("a")
    files.set_aside(["a", "b", "c"])
    total = files.nbytes
    done = [tensors["a"].nbytes]
    done += [done[-1] + tensors["b"].nbytes]
    done += [done[-1] + tensors["c"].nbytes]
    assert heard == [("a", done[0], total), ("b", done[1], total), ("c", done[2], total)]
    assert files.unread() == ["d", "empty", "scalar"]


def test_names_by_prefix(tmp_path):
    names = ["x.1", "x.1.a", "x.1.b", "x.10.a", "x.2.a", "y"]
    save_file({name: torch.zeros(1) for name in names}, tmp_path / "model.safetensors")
    assert TensorFiles(tmp_path).under("x.1.") == ["x.1.a", "x.1.b"]
    assert TensorFiles(tmp_path).under("z") == []


def test_missing_shard(sharded):
    (sharded / "model-00002-of-00002.safetensors").unlink()
    refused(sharded, "model-00002-of-00002.safetensors", "is missing", "Download")


def test_missing_shard_without_an_index(sharded):
    (sharded / INDEX).unlink()
    (sharded / "model-00001-of-00002.safetensors").unlink()
    refused(sharded, "model-00001-of-00002.safetensors", "shard 1 of 2 is missing")


def test_shards_without_an_index_are_read(sharded, tensors):
    (sharded / INDEX).unlink()
    assert set(TensorFiles(sharded)) == set(tensors)


def test_the_same_tensor_twice(sharded):
    (sharded / INDEX).unlink()
    shutil.copy(sharded / "model-00001-of-00002.safetensors", sharded / "model-00002-of-00002.safetensors")
    refused(sharded, "tensor a", "is also in model-00001-of-00002.safetensors")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(min_value=0, max_value=10_000))
def test_a_file_cut_anywhere_is_refused(single, cut, tmp_path_factory):
    whole = (single / "model.safetensors").read_bytes()
    folder = tmp_path_factory.mktemp("cut")
    (folder / "model.safetensors").write_bytes(whole[: cut % len(whole)])
    refused(folder, "model.safetensors")


def test_truncated_data_names_the_tensor_and_both_sizes(single):
    path = single / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    refused(single, "model.safetensors", "tensor ", "is truncated", "expected", "found a file of")


def test_a_pointer_of_git_lfs_is_named_as_such(single):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4665a5\nsize 11534336\n"
    (single / "model.safetensors").write_text(pointer)
    refused(single, "model.safetensors", "is a pointer of Git LFS", "git lfs pull")


def test_a_file_that_shrinks_after_it_was_opened(single, tensors):
    files = TensorFiles(single)
    path = single / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-200])
    last = max(tensors, key=lambda name: (files.meta(name).offset, files.meta(name).nbytes))
    with pytest.raises(CheckpointError, match="is truncated"):
        files.read(last)


def test_bytes_after_the_last_tensor(single):
    path = single / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"more")
    refused(single, "bytes after its last tensor")


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 600), value=st.integers(0, 255))
def test_no_header_damage_escapes_as_another_error(single, position, value, tmp_path_factory):
    data = bytearray((single / "model.safetensors").read_bytes())
    end = 8 + int.from_bytes(data[:8], "little")
    data[position % end] = value
    folder = tmp_path_factory.mktemp("flip")
    (folder / "model.safetensors").write_bytes(data)
    with contextlib.suppress(CheckpointError):
        files = TensorFiles(folder)
        for name in files:
            files.read(name)


DTYPE = st.sampled_from(["F32", "BF16", "U8", "F4", "", 3, None])
NATURAL = st.one_of(st.integers(-1, 4), st.sampled_from([1.0, True, "2", 1 << 70]))
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "dtype": DTYPE,
        "shape": st.one_of(st.lists(NATURAL, max_size=2), NATURAL),
        "data_offsets": st.one_of(st.lists(st.integers(-1, 16), min_size=2, max_size=2), NATURAL),
        "more": st.none(),
    },
)
SHAPE = st.lists(st.integers(0, 2), max_size=2)
FITS = SHAPE.map(
    lambda shape: {"dtype": "BF16", "shape": shape, "data_offsets": [2, 2 + 2 * math.prod(shape)]}
)
NAMES = st.sampled_from(["a", "b", "__metadata__"])


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(NAMES, st.one_of(FITS, FIELDS, NATURAL)), st.integers(0, 20))
def test_headers_are_read_as_by_the_json_library(header: dict, size: int):
    """Where `_well_formed` takes a header, so does what tells the errors of others, and finds the same."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        header_file(Path(folder), header, bytes(size))
        content, start = header_bytes(path)
        found = _well_formed(path, content, start)
        entries, begin = read_header(path)
        assert begin == start
        event(f"taken: {found is not None}")
        if found is not None:
            assert found == {name: _parse_entry(path, name, entry, start) for name, entry in entries.items()}


def header_file(folder, header, data=b""):
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize(
    ("entry", "word"),
    [
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "expected 8 bytes, found 4"),
        ({"dtype": "F4", "shape": [2], "data_offsets": [0, 8]}, "found F4"),
        ({"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}, "malformed"),
        ({"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}, "malformed"),
        ({"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}, "malformed"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}, "malformed"),
        ({"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}, "malformed"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}, "expected offset"),
        ({"dtype": "F32", "shape": [1 << 62], "data_offsets": [0, 8]}, "wrong size"),
        ("F32", "malformed"),
        (None, "malformed"),
    ],
)
def test_malformed_entries(tmp_path, entry, word):
    header_file(tmp_path, {"x": entry}, bytes(8))
    refused(tmp_path, "model.safetensors", "tensor x", word)


@pytest.mark.parametrize("header", [[], "x", 3])
def test_a_header_that_is_no_object(tmp_path, header):
    header_file(tmp_path, header)
    refused(tmp_path, "not a JSON object")


def test_overlapping_tensors(tmp_path):
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    header_file(tmp_path, {"x": entry, "y": entry}, bytes(8))
    refused(tmp_path, "tensor y", "overlaps")


@pytest.mark.parametrize(
    ("index", "word"),
    [
        ("{", "is not valid JSON"),
        ("[]", "expected a JSON object"),
        ("{}", "weight_map"),
        ('{"weight_map": {"a": 3}}', "weight_map"),
        ('{"weight_map": {"a": "../other/model.safetensors"}}', "not a safetensors file of this folder"),
        ('{"weight_map": {"a": "model.bin"}}', "not a safetensors file of this folder"),
        ('{"weight_map": {"zz": "model-00001-of-00002.safetensors"}}', "tensor zz"),
    ],
)
def test_bad_index(sharded, index, word):
    (sharded / INDEX).write_text(index)
    refused(sharded, word)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_pickled_weights_are_refused_unopened(tmp_path, name):
    (tmp_path / name).write_bytes(pickle.dumps({"a": 1}))
    refused(tmp_path, name, "pickled", "safetensors")


def test_a_folder_without_weights(tmp_path):
    refused(tmp_path, "holds no *.safetensors file")
    refused(tmp_path / "nowhere", "is not a folder")


def test_unreadable_bytes_in_place_of_a_header(tmp_path):
    (tmp_path / "model.safetensors").write_bytes((5).to_bytes(8, "little") + b"\xff\xfe\x00{}")
    refused(tmp_path, "model.safetensors", "not valid JSON")


# Numbers that are none


def every_code(dtype):
    """All bit patterns of a dtype of one or two bytes; of wider ones a sample in which all kinds occur."""
    if dtype.itemsize == 1:
        return torch.arange(256, dtype=torch.uint8).view(dtype)
    if dtype.itemsize == 2:
        return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    largest = torch.finfo(dtype).max
    values = [0.0, -0.0, 1.0, largest, -largest, 1e-45, torch.inf, -torch.inf, torch.nan, -torch.nan]
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        torch.float16,
        torch.float32,
        torch.float64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    ],
    ids=str,
)
def test_exactly_the_codes_that_are_not_finite_are_refused(dtype, tmp_path):
    codes = every_code(dtype)
    finite = torch.isfinite(codes.double())
    bits = codes.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    save_file({"sound": bits[finite].view(dtype), "all": codes}, tmp_path / "model.safetensors")
    files = TensorFiles(tmp_path)
    assert torch.equal(files.read("sound").double(), codes.double()[finite])
    for i in (~finite).nonzero().flatten().tolist()[:: max(1, len(codes) // 64)]:
        with pytest.raises(CheckpointError, match=rf"tensor all: is damaged.* at \[{i}\] of"):
            files.read("all", first=i, count=1)


@pytest.mark.parametrize("place", [(0, 0), (899, 1), (437, 510), (899, 512)])
@pytest.mark.parametrize(
    "read",
    [
        lambda files, row: files.read("w"),
        lambda files, row: files.read_into("w", torch.empty(900, 513)),
        lambda files, row: files.read("w", first=row, count=1),
    ],
    ids=["whole", "converted", "part"],
)
def test_a_nan_is_found_wherever_it_lies(read, place, tmp_path):
    """In any of the pieces that a large tensor is read in, and its place is named."""
    weight = torch.randn(900, 513, generator=torch.Generator().manual_seed(0)).half()
    save_file({"other": torch.ones(3), "w": weight}, tmp_path / "model.safetensors")
    TensorFiles(tmp_path).read("w")
    weight[place] = torch.nan
    save_file({"other": torch.ones(3), "w": weight}, tmp_path / "model.safetensors")
    files = TensorFiles(tmp_path)
    where = rf"model\.safetensors: tensor w: is damaged: .*at \[{place[0]}, {place[1]}\] of \[900, 513\]"
    with pytest.raises(CheckpointError, match=where):
        read(files, place[0])
    files.read("other")


def test_integers_have_no_nan(tmp_path):
    """Four-bit codes fill their bytes with every pattern."""
    tensors = {
        "u8": torch.full((64,), 255, dtype=torch.uint8),
        "i32": torch.full((64,), -1, dtype=torch.int32),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    files = TensorFiles(tmp_path)
    assert all(torch.equal(files.read(name), tensor) for name, tensor in tensors.items())


@pytest.fixture(params=[0, 2048], ids=["each", "stack"])
def shared_by_threads(request, monkeypatch):
    """Four threads, however small the tensors and the machine, that share each tensor or a stack of them."""
    monkeypatch.setattr("turnout.checkpoint.files._THREADS", 16)
    monkeypatch.setattr("turnout.checkpoint.files._SHARED_BYTES", request.param)
    monkeypatch.setattr("turnout.checkpoint.files._PIECE_BYTES", 64)
    monkeypatch.setattr("turnout.checkpoint.files._CHECKED_BYTES", 16)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(4)))


@pytest.mark.usefixtures("shared_by_threads")
def test_threads_read_the_same_bytes(tmp_path, request):
    draw = torch.Generator().manual_seed(0)
    tensors = {f"t{i:02}": torch.randn(8, 37, generator=draw) for i in range(40)}
    save_file(tensors, tmp_path / "model.safetensors")
    heard: list[tuple[str, int, int]] = []
    files = TensorFiles(tmp_path, lambda *report: heard.append(report))
    out = torch.zeros(40, 8, 37)
    held: list[float] = []
    alone: list[float] = []
    files.read_stacked(
        list(tensors),
        out,
        holds=lambda few: held.extend(few.tolist()) or True,
        check=lambda name, value: alone.extend(value.flatten().tolist()),
    )
    assert torch.equal(out, torch.stack(list(tensors.values())))
    assert sorted(held + alone) == sorted(out.flatten().tolist())
    assert bool(held) == (request.node.callspec.params["shared_by_threads"] > 0)
    assert sorted(name for name, *_ in heard) == sorted(tensors)
    assert heard[-1][1] == files.nbytes
    assert files.unread() == []


@pytest.mark.usefixtures("shared_by_threads")
def test_the_first_of_several_damaged_tensors_is_named(tmp_path):
    tensors = {f"t{i:02}": torch.ones(8, 37) for i in range(40)}
    for i in (7, 21):
        tensors[f"t{i:02}"][3, 5] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors")
    files = TensorFiles(tmp_path)
    with pytest.raises(CheckpointError, match=r"t07.*\[3, 5\]"):
        files.read_stacked(list(tensors), torch.zeros(40, 8, 37))


def no_negatives(name: str, value: torch.Tensor) -> None:
    if float(value.min()) < 0:
        raise ValueError(name)


def error_of(read) -> str:
    with pytest.raises((CheckpointError, ValueError)) as caught:
        read()
    return str(caught.value)


@pytest.mark.parametrize("piece", [64, 1 << 22], ids=["threads", "at once"])
@pytest.mark.parametrize("trouble", ["nan", "negative", "truncated", "gone", "other-type", "other-size"])
def test_tensors_of_a_stack_are_refused_as_one_by_one(trouble, piece, tmp_path, monkeypatch):
    """By the same words, and for the first of them, also where a later one is damaged in another way."""
    monkeypatch.setattr("turnout.checkpoint.files._PIECE_BYTES", piece)
    monkeypatch.setattr("turnout.checkpoint.files._SHARED_BYTES", 4 * 64)
    path, names = tmp_path / "model.safetensors", [f"t{i}" for i in range(9)]
    tensors = {name: torch.full((3, 5), i + 1.0) for i, name in enumerate(names)}
    damage = {
        "nan": {"t4": torch.full((3, 5), torch.nan), "t5": -tensors["t5"]},
        "negative": {"t4": -tensors["t4"], "t5": torch.full((3, 5), torch.inf)},
        "other-type": {"t4": -tensors["t4"].bfloat16()},
        "other-size": {"t4": torch.ones(2, 5)},
    }.get(trouble, {})
    save_file(tensors | damage, path)
    one, many = TensorFiles(tmp_path), TensorFiles(tmp_path)
    if trouble == "truncated":
        path.write_bytes(path.read_bytes()[: one.meta("t4").offset + 8])
    elif trouble == "gone":
        path.unlink()
    out = torch.zeros(9, 3, 5)

    def one_by_one() -> None:
        for name, value in zip(names, out, strict=True):
            one.read_into(name, value)
            no_negatives(name, value)

    wanted = error_of(one_by_one)
    assert ("t0" if trouble == "gone" else "t4") in wanted
    holds = lambda few: float(few.min()) >= 0  # noqa: E731
    assert error_of(lambda: many.read_stacked(names, out, holds=holds, check=no_negatives)) == wanted


def test_a_stack_of_another_type_is_converted(tmp_path):
    tensors = {
        f"t{i}": torch.full((3, 5), i + 1.0, dtype=(torch.bfloat16, torch.half)[i % 2]) for i in range(9)
    }
    save_file(tensors, tmp_path / "model.safetensors")
    files, out = TensorFiles(tmp_path), torch.zeros(9, 3, 5)
    files.read_stacked(list(tensors), out)
    assert torch.equal(out, torch.stack([value.float() for value in tensors.values()]))
    assert files.unread() == []


def test_scalars_are_read_together(tmp_path):
    """Whatever has to be told of them is left to those who read them one by one."""
    heard = []
    tensors = {f"s{i}": torch.tensor(i + 0.5) for i in range(6)} | {"s6": torch.tensor([6.5])}
    others = {"half": torch.tensor(1.0).half(), "int": torch.tensor(3), "two": torch.ones(2)}
    save_file(tensors | others, tmp_path / "model.safetensors")
    files = TensorFiles(tmp_path, lambda *report: heard.append(report))
    floats = (torch.float16, torch.float32)
    for names in (["s0", "half"], ["int"], ["s0", "two"], ["two"], ["s0", "none"], ["none"]):
        assert files.read_scalars(names, floats) is None
    assert not heard
    found = files.read_scalars(list(tensors), floats)
    assert found is not None
    assert found.tolist() == [i + 0.5 for i in range(7)]
    assert [name for name, *_ in heard] == list(tensors)
    half = files.read_scalars(["half"], floats)
    assert half is not None
    assert (half.dtype, half.tolist()) == (torch.float16, [1.0])
    files.close()
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[: files.meta("s6").offset + 2])
    assert files.read_scalars(list(tensors), floats) is None
    files.close()
    path.unlink()
    assert files.read_scalars(list(tensors), floats) is None


@pytest.mark.parametrize(
    "size", [1, 6 * 20, 6 * 20 + 7, 1 << 16], ids=["less than a row", "6", "uneven", "all"]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "columns"), [((0, 9), (0, 10)), ((2, 7), (0, 10)), ((1, 6), (3, 4))])
def test_rows_come_through_other_memory(rows, columns, dtype, size, tmp_path):
    """Of a tensor whose rows are 20 bytes; what is stored elsewhere in `out` stays."""
    tensors = {"other": torch.ones(3), "w": torch.randn(9, 10).half()}
    save_file(tensors, tmp_path / "model.safetensors")
    files = TensorFiles(tmp_path)
    (first, n), (first_column, k) = rows, columns
    around = torch.full((n + 2, k + 2), 7.0, dtype=dtype)
    wanted = around.clone()
    wanted[1:-1, 1:-1] = tensors["w"][first : first + n, first_column : first_column + k]
    staging = torch.zeros(size, dtype=torch.uint8)
    files.read_staged("w", around[1:-1, 1:-1], staging, first=first, first_column=first_column)
    assert torch.equal(around, wanted)
    assert files.unread() == ["other"]
    for out, place in ((torch.zeros(9, 10), {"first": 1}), (torch.zeros(9, 10), {"first_column": 1})):
        with pytest.raises(ValueError, match="reading"):
            files.read_staged("w", out, staging, **place)


@pytest.mark.parametrize("trouble", ["nan", "truncated"])
def test_rows_through_other_memory_are_refused_as_at_once(trouble, tmp_path):
    weight = torch.randn(9, 10).half()
    if trouble == "nan":
        weight[7, 2] = torch.nan
    path = tmp_path / "model.safetensors"
    save_file({"w": weight}, path)
    files = TensorFiles(tmp_path)
    if trouble == "truncated":
        path.write_bytes(path.read_bytes()[:-30])
    out = torch.zeros(8, 10, dtype=torch.float16)
    wanted = error_of(lambda: files.read_into("w", out, first=1))
    staging = torch.zeros(60, dtype=torch.uint8)
    assert error_of(lambda: files.read_staged("w", out, staging, first=1)) == wanted
