"""Safetensors files as Turnout writes them, against the library's own."""

from __future__ import annotations

import json

import torch
from safetensors.torch import load_file, save_file

from turnout.checkpoint.writer import Entry, ShardWriter


def test_every_tensor_is_aligned_in_its_file(tmp_path):
    """As the safetensors library lays them out; it cannot view unaligned data where that lies mapped."""
    tensors = {
        "a": torch.arange(3, dtype=torch.uint8),
        "b": torch.arange(2.0),
        "c": torch.arange(5.0).bfloat16(),
        "d": torch.tensor(7.0),
    }
    writer = ShardWriter(tmp_path, [[Entry(n, t.dtype, tuple(t.shape)) for n, t in tensors.items()]], 1000)
    for name, tensor in tensors.items():
        writer.write(name, tensor)
    writer.finish()
    ours = (tmp_path / "model.safetensors").read_bytes()
    save_file(tensors, tmp_path / "theirs.safetensors", {"format": "pt"})
    headers = []
    for data in (ours, (tmp_path / "theirs.safetensors").read_bytes()):
        start = 8 + int.from_bytes(data[:8], "little")
        assert start % 8 == 0
        headers.append(json.loads(data[8:start]))
    for name, tensor in tensors.items():
        assert headers[0][name]["data_offsets"][0] % tensor.element_size() == 0
    assert headers[0]["__metadata__"] == headers[1]["__metadata__"]
    assert all(torch.equal(read, tensors[n]) for n, read in load_file(tmp_path / "model.safetensors").items())
