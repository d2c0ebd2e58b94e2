"""Reads tensors from safetensors files, or from a GGUF file, mapped into memory.

Format (https://huggingface.co/docs/safetensors): the header's length in 8 bytes, little endian; the
header, a JSON object of name → {dtype, shape, data_offsets}; then the tensors' bytes, one after the
other without gaps. A checkpoint of several files has an index, model.safetensors.index.json. Files
are not trusted: every length, offset, type and shape is checked before anything is read.
"""

import dataclasses
import json
import math
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np

from servicekit.gguf.header import GgufError, read_header
from servicekit.logs import get_logger
from servicekit.progress_log import ProgressLog
from verifier.checkpoint.fused_experts import split_experts
from verifier.checkpoint.gguf_names import stored_as
from verifier.checkpoint.group_formats import FORMATS, Bytes, GroupedRows, take_apart, values_of
from verifier.checkpoint.quantization_config import read_quantization
from verifier.checkpoint.quantized_rows import quantized_rows
from verifier.checkpoint.quantized_tensors import QuantizedTensor, joined
from verifier.checkpoint.refusals import CheckpointError, NotServedError
from verifier.checkpoint.stored_tensor import WEIGHT_TYPES, StoredTensor
from verifier.checkpoint.text_part import is_text_part, text_tensors
from verifier.checkpoint.weight_types import LANES, BitsArray, WeightType

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_LARGEST_HEADER = 100 << 20
# How the text begins that stands for a file which was not fetched.
_GIT_LFS_POINTER = b"version https://git-lfs"
# Limits of a tensor that a model has; so products of the numbers are cheap.
_MAX_DIMENSIONS = 8
_LARGEST_NUMBER = 1 << 48
_ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
_FLOAT_TYPES = ("F64", *WEIGHT_TYPES)
_PAGE = mmap.PAGESIZE
_PIECE_BYTES = 8 << 20

logger = get_logger(__name__)

_Rows = TypeVar("_Rows")


class TensorFiles:
    """The tensors of a checkpoint folder by name; a context, which closes the files.

    Attributes:
        quantization: how weights are quantised: "gguf", the method that config.json tells, "none".
        is_text_part: whether the checkpoint holds more than the text model, whose these are.
    """

    def __init__(self, folder: Path, progress: ProgressLog | None = None) -> None:
        """Reads all headers.

        Args:
            progress: is shown how much has been read for good.

        Raises:
            CheckpointError: a file is not what the format says; its message names file and tensor.
                Or weights are quantised in a way that is not served.
            NotServedError: there is neither model.safetensors nor its index.
        """
        self.tensors: dict[str, StoredTensor] = {}
        self.quantization = "none"
        self.is_text_part = False
        self._maps: dict[Path, mmap.mmap] = {}
        self._progress = progress
        self._num_read_bytes = 0
        try:
            if (folder / _SINGLE).exists():
                self.tensors = self._open(folder / _SINGLE)
            elif (folder / _INDEX).exists():
                self._open_sharded(folder)
            elif files := sorted(folder.glob("*.gguf")):
                self.tensors = self._open_gguf(files)
                self.quantization = "gguf"
            else:
                raise NotServedError(f"{folder} holds neither {_SINGLE} nor {_INDEX}")
            self.is_text_part = is_text_part(self.tensors)
            if self.is_text_part:
                self.tensors = text_tensors(self.tensors)
            self.tensors = split_experts(self.tensors)
            if quantization := read_quantization(folder):
                self.tensors = joined(self.tensors, quantization, self._array)
                self.quantization = quantization.method
        except BaseException:
            self.close()
            raise
        self._num_bytes = sum(each.end - each.start for each in self.tensors.values())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for mapped in self._maps.values():
            mapped.close()
        self._maps.clear()

    def log_rounding(self, dtype: WeightType) -> None:
        """Says once where values are stored that `dtype` does not hold."""
        # float32 holds every value of the others.
        exact = [
            name
            for name, weight_type in WEIGHT_TYPES.items()
            if dtype in (WeightType.FLOAT32, weight_type)
        ]
        stored = {tensor.dtype for tensor in self.tensors.values()}
        if rounded := sorted(stored.intersection(_FLOAT_TYPES).difference(exact)):
            logger.info("weights_rounded", stored=", ".join(rounded), dtype=dtype.name.lower())

    def rows(self, tensor: StoredTensor, first: int, count: int) -> BitsArray:
        """The values of rows [first, first + count) of a tensor [rows, columns].

        A view of the file where that is possible: it must not outlive the files, whose `close`
        would fail. Read-only.
        """
        if tensor.dtype in FORMATS:
            return values_of(tensor.dtype, self.grouped_rows(tensor, first, count))
        stored = self._stored_rows(tensor, first, count)
        # Files may be laid out at any byte.
        values: BitsArray = np.require(stored.view(tensor.type.value), requirements="A")
        if tensor.is_negative_exponential:
            # numpy's logarithms differ between processors.
            logs = [
                math.log(-value) if value < 0 else math.nan for value in values.ravel().tolist()
            ]
            return np.array(logs, dtype=np.float32).reshape(values.shape)
        return values - np.float32(tensor.offset) if tensor.offset else values

    def grouped_rows(self, tensor: StoredTensor, first: int, count: int) -> GroupedRows:
        """As `rows`, of a tensor in groups."""
        if isinstance(tensor, QuantizedTensor):
            return quantized_rows(tensor, first, count, self._array)
        return take_apart(tensor.dtype, self._stored_rows(tensor, first, count))

    def _stored_rows(self, tensor: StoredTensor, first: int, count: int) -> Bytes:
        """As `rows`, as bytes [count, bytes of a row]."""
        stored = np.frombuffer(self._bytes(tensor), dtype=np.uint8)
        num_stored = tensor.shape[0] * tensor.row_step
        if tensor.is_by_columns:
            columns = stored.view(f"V{len(stored) // (num_stored * tensor.shape[1])}")
            columns = columns.reshape(-1, num_stored)[:, tensor.first_row :: tensor.row_step]
            by_rows: Bytes = columns[:, first : first + count].T.copy().view(np.uint8)
            return by_rows
        rows: Bytes = stored.reshape(num_stored, -1)[tensor.first_row :: tensor.row_step]
        if not tensor.num_paired_heads:
            return rows[first : first + count]
        half = tensor.shape[0] // tensor.num_paired_heads // 2
        head, place = np.divmod(np.arange(first, first + count), 2 * half)
        second, index = np.divmod(place, half)
        unpaired: Bytes = rows[2 * (head * half + index) + second]
        return unpaired

    def forget(self, tensor: StoredTensor, first: int, count: int) -> None:
        """Lets these rows' pages leave this process's memory: they were read once, for good."""
        row = (tensor.end - tensor.start) // max(1, tensor.shape[0])
        self._num_read_bytes += count * row
        if self._progress is not None:
            # Some tensors may be read twice.
            percent = min(100, 100 * self._num_read_bytes // max(1, self._num_bytes))
            self._progress.show(percent=percent)
        if tensor.is_by_columns:
            # Every page has a part of every row.
            if first + count < tensor.shape[0]:
                return
            first, count = 0, tensor.shape[0]
        start = -(-(tensor.start + first * row) // _PAGE) * _PAGE
        end = (tensor.start + (first + count) * row) // _PAGE * _PAGE
        if start < end:
            self._maps[tensor.file].madvise(mmap.MADV_DONTNEED, start, end - start)

    def _open_sharded(self, folder: Path) -> None:
        index = folder / _INDEX
        try:
            text = index.read_bytes()
        except OSError as error:
            raise CheckpointError(f"{index}: {error}") from error
        content = _json_object(text, str(index))
        placed = content.get("weight_map")
        if not isinstance(placed, dict):
            raise CheckpointError(f"{index}: has no weight_map")
        opened: dict[str, dict[str, StoredTensor]] = {}
        for name, file in placed.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise CheckpointError(f"{index}: {name}: {file!r} is no file beside the index")
            if file not in opened:
                opened[file] = self._open(folder / file)
            if name not in opened[file]:
                raise CheckpointError(
                    f"{index}: {name}: {file} does not hold it: the index is not of these files: "
                    "fetch or save both again, or take the entry out if the model has no such "
                    "tensor"
                )
            self.tensors[name] = opened[file][name]
        for held in opened.values():
            for copy in held.values():
                self._check_copy(copy, self.tensors.get(copy.name), index)

    def _check_copy(self, copy: StoredTensor, tensor: StoredTensor | None, index: Path) -> None:
        """Refuses a shard that holds another shard's tensor with other values: libraries differ in
        which of the two they take.
        """
        if tensor is None or copy is tensor:
            return
        same_kind = (copy.dtype, copy.shape) == (tensor.dtype, tensor.shape)
        if not (same_kind and self._bytes(copy) == self._bytes(tensor)):
            raise CheckpointError(
                f"{copy.file}: {copy.name}: has other values than in {tensor.file.name}, where "
                f"{index.name} says it is: take the wrong one out, or save the model again"
            )

    def _open_gguf(self, files: list[Path]) -> dict[str, StoredTensor]:
        """Args: files: one, or all parts of a split one, of which the first has all metadata."""
        for path in files:
            self._map(path)
        try:
            headers = [read_header(path) for path in files]
            return {
                name: tensor
                for header in headers
                for name, tensor in stored_as(
                    dataclasses.replace(header, metadata=headers[0].metadata)
                ).items()
            }
        except GgufError as error:
            raise CheckpointError(str(error)) from error

    def _array(self, tensor: StoredTensor) -> BitsArray:
        """A tensor as a view of its file, which may lie at any byte."""
        if tensor.dtype in WEIGHT_TYPES:
            dtype = np.dtype(tensor.type.value)
        else:
            dtype = np.dtype(f"i{_ITEM_BYTES[tensor.dtype]}")
        return np.frombuffer(self._bytes(tensor), dtype=dtype).reshape(tensor.shape)

    def _bytes(self, tensor: StoredTensor) -> memoryview:
        return memoryview(self._maps[tensor.file])[tensor.start : tensor.end]

    def _map(self, path: Path) -> mmap.mmap:
        try:
            with path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{path}: is not there, but {_INDEX} names it: fetch it, or the index of the files "
                "that are there"
            ) from error
        except (OSError, ValueError) as error:
            # ValueError: an empty file.
            raise CheckpointError(f"{path}: {error}") from error
        self._maps[path] = mapped
        return mapped

    def _open(self, path: Path) -> dict[str, StoredTensor]:
        mapped = self._map(path)
        if len(mapped) < 8:
            raise CheckpointError(f"{path}: is too short for a header")
        if mapped[: len(_GIT_LFS_POINTER)] == _GIT_LFS_POINTER:
            raise CheckpointError(
                f"{path}: is a pointer of Git LFS, not the file itself: fetch the files, for "
                "example with git lfs pull"
            )
        length = int.from_bytes(mapped[:8], "little")
        if length > min(_LARGEST_HEADER, len(mapped) - 8):
            raise CheckpointError(f"{path}: has a header of {length} bytes, more than the file has")
        header = _json_object(mapped[8 : 8 + length], str(path))
        header.pop("__metadata__", None)
        data_start = 8 + length
        tensors = {
            name: _stored(name, entry, path, data_start=data_start)
            for name, entry in header.items()
        }
        end = data_start
        for tensor in sorted(tensors.values(), key=lambda each: (each.start, each.end)):
            if tensor.start != end:
                raise CheckpointError(
                    f"{path}: {tensor.name}: starts at byte {tensor.start}, where the tensor "
                    f"before it ends at {end}"
                )
            end = tensor.end
        if end != len(mapped):
            raise CheckpointError(
                f"{path}: has {len(mapped)} bytes where its header describes {end}"
            )
        return tensors


def _json_object(content: bytes, where: str) -> dict[str, Any]:
    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise ValueError("a name occurs twice")
        return result

    try:
        value = json.loads(content, object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: no JSON can be read ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: holds no JSON object")
    return value


def _stored(name: str, entry: Any, path: Path, *, data_start: int) -> StoredTensor:
    """Checks one entry of a header."""
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [start, end]}:
            pass
        case _:
            raise CheckpointError(f"{path}: {name}: lacks dtype, shape or data_offsets")
    # type(): a JSON true is an int to isinstance.
    if not all(type(n) is int and n >= 0 for n in (*shape, start, end)):
        raise CheckpointError(f"{path}: {name}: shape {shape} or offsets {start}, {end} are odd")
    # Before they are multiplied.
    if len(shape) > _MAX_DIMENSIONS or max(*shape, end, 0) > _LARGEST_NUMBER:
        raise CheckpointError(f"{path}: {name}: has {len(shape)} dimensions, or numbers too large")
    if dtype not in _ITEM_BYTES:
        raise NotServedError(f"{name} is stored as {dtype}")
    if end - start != math.prod(shape) * _ITEM_BYTES[dtype]:
        raise CheckpointError(
            f"{path}: {name}: has {end - start} bytes where {dtype} of shape {shape} takes "
            f"{math.prod(shape) * _ITEM_BYTES[dtype]}"
        )
    return StoredTensor(
        name=name,
        dtype=dtype,
        shape=tuple(shape),
        start=data_start + start,
        end=data_start + end,
        file=path,
    )


def pieces(
    files: TensorFiles, tensor: StoredTensor, first_row: int, num_rows: int
) -> Iterator[tuple[int, BitsArray]]:
    """Rows of a tensor [N, K] in pieces, each with its offset, a multiple of 16."""
    return _read_in_pieces(files, tensor, first_row, num_rows, files.rows)


def grouped_pieces(
    files: TensorFiles, tensor: StoredTensor, first_row: int, num_rows: int
) -> Iterator[tuple[int, GroupedRows]]:
    """As `pieces`, of a tensor in groups."""
    return _read_in_pieces(files, tensor, first_row, num_rows, files.grouped_rows)


def _read_in_pieces(
    files: TensorFiles,
    tensor: StoredTensor,
    first_row: int,
    num_rows: int,
    read: Callable[[StoredTensor, int, int], _Rows],
) -> Iterator[tuple[int, _Rows]]:
    row_bytes = max(1, (tensor.end - tensor.start) // max(1, tensor.shape[0]))
    step = max(1, _PIECE_BYTES // row_bytes // LANES) * LANES
    for start in range(0, num_rows, step):
        count = min(step, num_rows - start)
        yield start, read(tensor, first_row + start, count)
        files.forget(tensor, first_row + start, count)
