"""Tensors and the trees they hang in, to bytes and back. Nothing read from a file is executed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors

from drawbar.errors import DataError

Tensors = dict[str, torch.Tensor]

_PIECE_BYTES = 1 << 20
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def to_tree(value: Any, name: str, tensors: Tensors) -> Any:
    """As JSON can hold it; its tensors go to `tensors` under `name`, followed by where they hang."""
    if isinstance(value, torch.Tensor):
        tensors[name] = value.detach()
        return {"$tensor": name}
    if isinstance(value, dict):
        # Optimizers number parameters: keys need not be strings.
        return {"$dict": [[key, to_tree(item, f"{name}/{key}", tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        kind = "$list" if isinstance(value, list) else "$tuple"
        return {kind: [to_tree(item, f"{name}/{i}", tensors) for i, item in enumerate(value)]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{name} is a {type(value).__name__}, which a checkpoint cannot hold")


def from_tree(tree: Any, tensors: Tensors) -> Any:
    """Raises DataError for what `to_tree` did not make."""
    if not isinstance(tree, dict):
        return tree
    try:
        ((kind, content),) = tree.items()
        match kind:
            case "$tensor":
                return tensors[content]
            case "$dict":
                return {key: from_tree(item, tensors) for key, item in content}
            case "$list":
                return [from_tree(item, tensors) for item in content]
            case "$tuple":
                return tuple(from_tree(item, tensors) for item in content)
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"checkpoint is damaged: its state cannot be put together: {error}") from None
    raise DataError(f"checkpoint is damaged: its state holds {kind!r}")


class HostCopy:
    """Copies of tensors in host memory, which is kept for the next time. One user at a time."""

    def __init__(self) -> None:
        self._buffers: Tensors = {}

    def take(self, tensors: Tensors) -> Tensors:
        """Returns once the copies are whole. They keep the tensors' layout, so that nothing is rearranged meanwhile."""
        copies: Tensors = {}
        for name, tensor in tensors.items():
            buffer = self._buffers.get(name)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                buffer = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            copies[name] = buffer.copy_(tensor, non_blocking=True)
        self._buffers = copies
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()
        return copies


def safetensors_pieces(tensors: Tensors) -> Iterator[bytes]:
    """A safetensors file, piece by piece: the library's own writer would need a second copy of everything.

    Format: https://huggingface.co/docs/safetensors (8 bytes of header size, JSON header, tensors in C order).
    """
    # The widest types first, so that each lies aligned, as the library has it.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {}
    end = 0
    for name in names:
        tensor = tensors[name]
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        flat = tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy()
        for start in range(0, len(flat), _PIECE_BYTES):
            yield flat[start : start + _PIECE_BYTES].tobytes()


def parse_safetensors(data: bytes, where: str) -> Tensors:
    """Raises DataError for what is no safetensors file."""
    try:
        return load_safetensors(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise DataError(f"{where} is no safetensors file: {error}") from None
