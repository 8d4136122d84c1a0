"""How deep the values in a pickle nest, and how many there are: counted in its instructions, before any is carried out.

Python calls itself in C to hash a tuple, and overflows the stack for one within a million others. And a list that holds
another twice, forty times over, is a few hundred bytes and has more entries than any memory.
"""

from __future__ import annotations

import pickle
import pickletools
from typing import Any

__all__ = ["check_nesting"]

_DEEPEST = 100
_SHARED = 100  # times as many values, with each counted wherever it is found, as there are instructions
_TAKEN = {
    "TUPLE1": 1,
    "TUPLE2": 2,
    "TUPLE3": 3,
    "NEWOBJ": 2,
    "REDUCE": 2,
    "BINPERSID": 1,
}  # from the stack, for one new
_ADDED = {"APPEND": 1, "SETITEM": 2, "BUILD": 1}  # to what is below them on the stack

_Node = list  # of the nodes that a value is made of


def check_nesting(data: bytes) -> None:
    """Look at a pickle as torch's restricted unpickler would read it, which knows few instructions.

    Raises:
        pickle.UnpicklingError: It nests too deep, or holds itself or one value in too many places; or it is no pickle.
    """
    try:
        nodes = _nodes(data)
    except (AttributeError, IndexError, KeyError, ValueError) as error:  # of a stack or a memo that lacks something
        raise pickle.UnpicklingError(f"no pickle of torch's ({type(error).__name__})") from error
    sizes: dict[int, tuple[int, int]] = {}  # by id: levels, and values with each counted wherever it is found
    most = _SHARED * (len(nodes) + 1000)
    for first in nodes:
        open_nodes, entered = [first], set()
        while open_nodes:
            node = open_nodes[-1]
            if id(node) in sizes:
                open_nodes.pop()
            elif id(node) not in entered:
                entered.add(id(node))
                waiting = [each for each in node if id(each) not in sizes]
                if any(id(each) in entered for each in waiting):
                    raise pickle.UnpicklingError("value that holds itself")
                open_nodes += waiting
            else:
                inside = [sizes[id(each)] for each in node]
                levels, values = 1 + max((one for one, _ in inside), default=0), 1 + sum(other for _, other in inside)
                if levels > _DEEPEST:
                    raise pickle.UnpicklingError(f"values nested deeper than {_DEEPEST} levels")
                if values > most:
                    raise pickle.UnpicklingError("values that hold others in too many places")
                sizes[id(node)] = levels, values
                open_nodes.pop()


def _nodes(data: bytes) -> list[_Node]:
    """A node for each value that the pickle makes."""
    nodes: list[_Node] = []
    stack: list[_Node] = []
    below: list[list[_Node]] = []  # stacks, one for each mark
    memo: dict[int, _Node] = {}
    argument: Any
    for instruction, argument, _ in pickletools.genops(data):
        name = instruction.name
        if name in ("PROTO", "STOP"):
            continue
        if name == "MARK":
            below.append(stack)
            stack = []
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name in ("APPENDS", "SETITEMS"):
            items, stack = stack, below.pop()
            stack[-1] += items
        elif name in _ADDED:
            items = [stack.pop() for _ in range(_ADDED[name])]
            stack[-1] += items
        elif name == "TUPLE":
            items, stack = stack, below.pop()
            stack.append(items)
            nodes.append(items)
        elif instruction.stack_before and name not in _TAKEN:
            raise pickle.UnpicklingError(f"pickle instruction {name}, which torch does not write")
        else:
            node = [stack.pop() for _ in range(_TAKEN.get(name, 0))]
            stack.append(node)
            nodes.append(node)
    return nodes
