"""A pickle's instructions, read before anything is built from them.

Values may share others, so a few hundred bytes can describe a tuple that it takes for ever to hash, or one nested so
deeply that hashing it overruns the stack; either happens inside the interpreter, where it can't be interrupted. Tuples
can't change once they are made, so their expanded sizes follow from the instructions. Lists and dictionaries are never
hashed; what would walk through them while unpickling is refused.
"""

from __future__ import annotations

import pickletools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any

from gpen_core.errors import CheckpointError

LARGEST, DEEPEST = 1_000_000, 100
"""Values in a tuple with all that its tuples hold, each counted wherever it is, and levels of tuples in tuples."""
# It is walked through whenever it is made, compared or hashed.
NESTED_TYPE = "refused, because it holds a numpy type made of others"
_PLAIN = (
    *("NONE", "NEWTRUE", "NEWFALSE", "INT", "LONG", "LONG1", "LONG4", "BININT", "BININT1", "BININT2"),
    *("FLOAT", "BINFLOAT", "STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE"),
    *("BINBYTES", "SHORT_BINBYTES"),
)
_CONTAINERS = ("EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET")
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


@dataclass(frozen=True)
class _Value:
    """What the instructions so far put together.

    kind: plain, container, tuple, class (a class or a function), dtype, or object. size, depth: of a tuple, expanded.
    direct, parts: kinds in a tuple itself, and in it and all of its tuples. name: of a class or function.
    """

    kind: str
    size: int = 1
    depth: int = 0
    direct: frozenset[str] = frozenset()
    parts: frozenset[str] = frozenset()
    name: str = ""

    @property
    def kinds(self) -> frozenset[str]:
        return self.parts | {self.kind}


def check_pickle(file: IO[bytes]) -> None:
    """Read one pickle from an open file, up to and with its end.

    Raises CheckpointError for one that would not be unpickled in bounded time, and other errors for a damaged one.
    """
    machine = _Machine()
    for instruction, argument, _ in pickletools.genops(file):
        machine.step(instruction.name, argument)


class _Machine:
    """The stack and the memo of an unpickler, with what is known of each value in the place of the value."""

    def __init__(self) -> None:
        self.stack: list[_Value] = []
        self.below: list[list[_Value]] = []
        self.memo: dict[int, _Value] = {}

    def step(self, name: str, argument: Any) -> None:
        if name in _PLAIN:
            self.stack.append(_Value("plain"))
        elif name in _CONTAINERS:
            self.stack.append(_Value("container"))
        elif name in _TUPLES:
            self.stack.append(_tuple(self._pop(_TUPLES[name])))
        elif name == "TUPLE":
            values = self._pop_mark()
            self.stack.append(_tuple(values))
        elif name in ("LIST", "DICT"):
            self._check_keys(self._pop_mark()[::2] if name == "DICT" else [])
            self.stack.append(_Value("container"))
        elif name == "MARK":
            self.below.append(self.stack)
            self.stack = []
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            self.memo[argument] = self.stack[-1]
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = self.stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            self.stack.append(self.memo[argument])
        elif name == "GLOBAL":
            self.stack.append(_Value("class", name=argument.replace(" ", ".")))
        else:
            self._use(name)

    def _use(self, name: str) -> None:
        """An instruction that takes values from the stack."""
        if name in ("REDUCE", "NEWOBJ"):
            called, arguments = self._pop(2)
            self.stack.append(_made(called, arguments))
        elif name == "STACK_GLOBAL":
            self._pop(2)
            self.stack.append(_Value("class"))
        elif name == "BUILD":
            (state,) = self._pop(1)
            # What a date is made of has a dictionary deeper inside.
            if self.stack[-1].kind == "dtype" and ("dtype" in state.kinds or "container" in state.direct):
                raise CheckpointError(NESTED_TYPE)
        elif name == "SETITEM":
            self._check_keys(self._pop(2)[:1])
        elif name in ("SETITEMS", "ADDITEMS"):
            items = self._pop_mark()
            self._check_keys(items[::2] if name == "SETITEMS" else items)
        elif name in ("APPEND", "POP"):
            self._pop(1)
        elif name in ("APPENDS", "POP_MARK"):
            self._pop_mark()
        elif name == "BINPERSID":
            self._pop(1)
            self.stack.append(_Value("object"))
        elif name not in ("PROTO", "FRAME", "STOP"):
            raise CheckpointError(f"refused, because its pickle has the instruction {name}, which no checkpoint needs")

    def _pop(self, count: int) -> list[_Value]:
        if count > len(self.stack):
            raise ValueError("the stack is empty")
        values = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return values

    def _pop_mark(self) -> list[_Value]:
        values, self.stack = self.stack, self.below.pop()
        return values

    def _check_keys(self, keys: Sequence[_Value]) -> None:
        if any("container" in key.kinds for key in keys):
            raise CheckpointError("damaged: it uses a list or a dictionary as a key")


def _tuple(values: Sequence[_Value]) -> _Value:
    size = 1 + sum(value.size for value in values)
    depth = 1 + max((value.depth for value in values), default=0)
    if size > LARGEST or depth > DEEPEST:
        raise CheckpointError("refused, because it holds tuples in tuples that expand to too many")
    direct = frozenset(value.kind for value in values)
    return _Value("tuple", size, depth, direct, direct.union(*(value.parts for value in values)))


def _made(called: _Value, arguments: _Value) -> _Value:
    if called.kind != "class":
        raise CheckpointError("refused, because it calls what is no function or class")
    if called.name != "numpy.dtype":
        return _Value("object")
    if "dtype" in arguments.kinds or "container" in arguments.kinds:
        raise CheckpointError(NESTED_TYPE)
    return _Value("dtype")
