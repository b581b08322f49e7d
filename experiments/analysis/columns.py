"""The rows of a .jsonl file as NumPy columns, without a Python object for each number.

Rows of one run are alike: without its numbers a line is the same text as many others, its
skeleton. So a block of lines is taken apart. Of each skeleton JSON reads one line; the numbers are
read all at once, by SciPy's reader of Matrix Market files, which is a list of numbers and six times
as fast as any other reader here. A block that can't be read like that is read by JSON line by line,
which also tells which line is damaged. (Of what JSON refuses, this lets pass zeros that lead, and a
number that has moved out of its place and left that empty.)
"""

from __future__ import annotations

import io
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import io as scipy_io

from experiments.metrics import by_head
from experiments.runs.folder import RunFolderError

Columns = dict[str, NDArray[Any]]

WHOLE = ("step", "seed")  # columns of whole numbers; others are float64, or objects where text
_BLOCK = 2**22  # bytes that are read at once: the reader of numbers takes its time to begin
_PIECE = 2**19  # bytes that are taken apart at once: what is made of them stays in the cache
_OTHER_COLUMNS = "damaged, other columns than the rows before it"
_OF_NUMBERS = b"0123456789+-.e"
_BESIDE_NUMBERS = bytes(set(range(256)) - set(_OF_NUMBERS + b",\n"))
_COMMA_ENDS = bytes.maketrans(b",", b"\n")
_LARGEST_WHOLE = 2.0**53  # that float64 tells from its neighbours
_LONGEST_ROW = 2**24  # bytes
_MOST_SKELETONS = 1000  # remembered at once
_NO_ROW = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)


def read_columns(path: Path) -> Columns:
    """The rows of a .jsonl file, column by column; a half-written last line is left out.

    A statistic of every head becomes a column of each: `entropy_layer0_head1`, and so on. Numbers
    that are null become NaN.

    Raises:
      RunFolderError: the file can't be read, or has a line that is no row, or none like those
        before it; names the line.
    """
    columns: Columns = {}
    known: dict[bytes, Shape] = {}
    done = room = 0
    if path.exists() and not path.is_file():
        raise RunFolderError(f"{path} can't be read: it is not a file")
    try:
        for block, left in _blocks(path):
            part = _alike(block, known)
            if part is None:
                part = _one_by_one(block, path, done)
            if columns and part.keys() != columns.keys():
                raise RunFolderError(f"{path}, line {done + 1}: {_OTHER_COLUMNS}")
            rows = len(part["step"])
            if done + rows > room:  # what is never written to takes no memory
                room = done + rows + int(1.1 * rows * max(left, 0) / len(block))
                columns = {n: _resized(columns.get(n, v)[:done], room) for n, v in part.items()}
            for name, values in part.items():
                columns[name][done : done + rows] = values
            done += rows
    except OSError as error:
        raise RunFolderError(f"{path} can't be read: {error.strerror or error}") from None
    return {name: column[:done] for name, column in columns.items()} or {"step": np.zeros(0, int)}


def _resized(values: NDArray[Any], size: int) -> NDArray[Any]:
    larger = np.empty(size, values.dtype)
    larger[: len(values)] = values
    return larger


def _blocks(path: Path) -> Iterator[tuple[bytes, int]]:
    """The whole lines of a file, many at a time, and how many bytes come after them."""
    half = b""
    with path.open("rb") as file:
        left = os.fstat(file.fileno()).st_size
        while read := file.read(_BLOCK):
            left -= len(read)
            end = read.rfind(b"\n") + 1
            if end:
                yield half + read[:end], left
                half = b""
            half += read[end:]
            if len(half) > _LONGEST_ROW:
                raise RunFolderError(f"{path}: damaged, a line of more than {_LONGEST_ROW} bytes")


class Shape(NamedTuple):
    """What a line is without its numbers."""

    columns: tuple[tuple[str, bool], ...]  # name, and whether it is text, in order
    texts: tuple[str, ...]  # the values of those that are


def _alike(block: bytes, known: dict[bytes, Shape]) -> Columns | None:
    """The columns of lines that are alike; None if they aren't, or one is damaged.

    Args:
      block: whole lines.
      known: the shape of each skeleton that was seen so far; new ones are added.
    """
    pieces = [_take_apart(piece) for piece in _pieces(block)]
    if not all(_are_numbers(numbers) for _, numbers in pieces):
        return None
    skeletons = list(itertools.chain.from_iterable(lines for lines, _ in pieces))
    numbers = b"".join(numbers for _, numbers in pieces)
    try:
        if len(known) > _MOST_SKELETONS:
            known.clear()
        if new := set(skeletons) - known.keys():
            line = dict(zip(skeletons, block.split(b"\n"), strict=False))
            known |= {skeleton: _shape(flat(json.loads(line[skeleton]))) for skeleton in new}
        shapes = {skeleton: known[skeleton] for skeleton in set(skeletons)}
        layout = known[skeletons[0]].columns
        if any(shape.columns != layout for shape in shapes.values()):
            return None
        names = [name for name, is_text in layout if not is_text]
        columns = dict(zip(names, _parse(numbers, len(names), len(skeletons)), strict=True))
        columns |= {name: _whole(columns[name]) for name in WHOLE if name in columns}
    except _NO_ROW:
        return None
    for i, name in enumerate(name for name, is_text in layout if is_text):
        text = {skeleton: shape.texts[i] for skeleton, shape in shapes.items()}
        columns[name] = np.array([text[skeleton] for skeleton in skeletons], object)
    return {name: columns[name] for name, _ in layout}


def _shape(row: dict[str, float | str]) -> Shape:
    texts = tuple(value for value in row.values() if isinstance(value, str))
    return Shape(tuple((name, isinstance(value, str)) for name, value in row.items()), texts)


def flat(row: dict[str, Any]) -> dict[str, float | str]:
    """A row with a value for each column.

    Raises:
      ValueError, TypeError, AttributeError: it is no row.
    """
    values: dict[str, Any] = {}
    for name, value in row.items():
        if name.endswith(by_head("")):
            for layer, heads in enumerate(value):
                for head, of_head in enumerate(heads):
                    values[f"{name.removesuffix(by_head(''))}_layer{layer}_head{head}"] = of_head
        else:
            values[name] = value
    if any(type(values[name]) is not int for name in WHOLE if name in row) or "step" not in row:
        raise ValueError("a step is a whole number")
    return {name: _value(value) for name, value in values.items()}


def _value(value: Any) -> float | str:
    if isinstance(value, str):
        return value
    if value is not None and type(value) not in (int, float):
        raise ValueError("neither text nor a number")
    return np.nan if value is None else float(value)


def _pieces(block: bytes) -> Iterator[bytes]:
    """The lines of a block, some at a time."""
    start = 0
    while start < len(block):
        end = block.rfind(b"\n", start, start + _PIECE) + 1 or block.index(b"\n", start) + 1
        yield block[start:end]
        start = end


def _take_apart(block: bytes) -> tuple[list[bytes], bytes]:
    """Each line without its numbers, and all the numbers, a line each; some lines are blank."""
    text = np.frombuffer(block, np.uint8)
    # Characters of strings get the highest bit, so that no character of a number is among them.
    mark = _inside_strings(text)
    mark <<= 7
    marked = (text | mark).tobytes()
    if b"u" in marked:  # outside strings it is that of null
        marked = marked.replace(b"null", b"1e999")  # which is infinite
    skeletons = marked.translate(None, delete=_OF_NUMBERS)
    return skeletons.split(b"\n")[:-1], marked.translate(_COMMA_ENDS, delete=_BESIDE_NUMBERS)


def _inside_strings(text_B: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[B]: 1 where a character is within quotes: the parity of the quotes up to it.

    Parities of 64 characters at a time, as bits of a word (Langdale & Lemire 2019, simdjson,
    arxiv.org/abs/1902.08318).
    """
    quotes = np.packbits(text_B == ord('"'), bitorder="little")
    words = np.zeros(-(-quotes.size // 8), "<u8")
    words.view(np.uint8)[: quotes.size] = quotes
    for shift in (1, 2, 4, 8, 16, 32):
        words ^= words << np.uint64(shift)
    odd = np.bitwise_xor.accumulate(words >> np.uint64(63))
    words[1:] ^= -odd[:-1]  # all ones where an odd number came before
    return np.unpackbits(words.view(np.uint8), count=text_B.size, bitorder="little")


def _table(apart: dict[str, str], beside: dict[str, str]) -> NDArray[np.bool_]:
    allowed = np.zeros((2, 256, 256), np.bool_)
    for table, pairs in zip(allowed, (apart, beside), strict=True):
        for before, after in pairs.items():
            table[ord(before), list(after.encode())] = True
    return allowed.ravel()


# What may come after a line's beginning, a minus, a point, an e and its sign ("+" stands for both):
# with digits between the two, and beside each other.
_ALLOWED = _table(
    {"\n": "\n.e", "-": "\n.e", ".": "\ne", "e": "\n", "+": "\n"}, {"\n": "\n-", "e": "+"}
)
_NO_DIGIT = bytes(chr(c) not in "0123456789" for c in range(256))


def _are_numbers(lines: bytes) -> bool:
    """Whether each line is blank or a number; the reader would not mind what comes after one."""
    lines = b"\n" + lines
    marks = np.flatnonzero(np.frombuffer(lines.translate(_NO_DIGIT), np.bool_))
    kind = np.frombuffer(lines, np.uint8)[marks].astype(np.int32)
    kind[1:][(kind[:-1] == ord("e")) & (kind[1:] == ord("-"))] = ord("+")
    beside = np.diff(marks) == 1
    return bool(_ALLOWED.take((beside * 256 + kind[:-1]) * 256 + kind[1:]).all())


def _parse(lines: bytes, columns: int, rows: int) -> NDArray[np.float64]:
    """[columns, rows] of the numbers, row by row in the text; what is too large is NaN."""
    head = f"%%MatrixMarket matrix array real general\n{columns} {rows}\n"
    values = np.asarray(scipy_io.mmread(io.BytesIO(head.encode() + lines)))
    values[np.isinf(values)] = np.nan
    return values


def _whole(values: NDArray[np.float64]) -> NDArray[np.int_]:
    if not np.all((values == np.floor(values)) & (np.abs(values) < _LARGEST_WHOLE)):
        raise ValueError("not whole numbers")
    return values.astype(int)


def _one_by_one(block: bytes, path: Path, done: int) -> Columns:
    """The columns of lines of whatever form, of which `done` came before."""
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(block.split(b"\n")[:-1], start=done + 1):
        try:
            rows.append(flat(json.loads(line)))
        except _NO_ROW:
            raise RunFolderError(f"{path}, line {number}: damaged, not a row of JSON") from None
        if rows[-1].keys() != rows[0].keys():
            raise RunFolderError(f"{path}, line {number}: {_OTHER_COLUMNS}")
    kinds = {name: object if isinstance(value, str) else float for name, value in rows[0].items()}
    kinds |= {name: int for name in WHOLE if name in kinds}
    return {name: np.array([row[name] for row in rows], kind) for name, kind in kinds.items()}
