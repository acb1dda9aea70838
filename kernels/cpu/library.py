"""The shared library of the native kernels. The library is a file next to this module, and is loaded once.

native/api.h declares the library's C interface. The argument types of the functions are read from native/api.h. A
library that was compiled from a different native/api.h is refused.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trueroll.errors import ConfigError

ISA_VARIABLE = "TRUEROLL_CPU_ISA"

_TYPES = {"void": None, "long": ctypes.c_long, "int": ctypes.c_int, "float": ctypes.c_float}


def declarations() -> str:
    """Return the text of INTERFACE in native/api.h as the preprocessor gives it: without comments, on one line."""
    text = re.sub("//.*", "", Path(__file__).with_name("native").joinpath("api.h").read_text())
    declared = re.search(r"^INTERFACE\((.*)^\)", text, re.MULTILINE | re.DOTALL)
    assert declared is not None
    return " ".join(declared[1].split())


def _type(declaration: str) -> Any:
    """Return the ctypes type of a declaration such as `const void* name`."""
    if "*" in declaration:
        return ctypes.c_char_p if "char" in declaration else ctypes.c_void_p
    return _TYPES[declaration.split()[0]]


class _Functions(ctypes.CDLL):
    """A library with functions that refuse surplus arguments. The functions of ctypes' plain CDLL accept surplus
    arguments.
    """

    _func_flags_ = 0


class Library:
    """The library at a path. Each function of the C interface is an attribute, without the prefix `trueroll_`.

    Raise OSError if the library cannot be loaded, or was compiled from a different native/api.h.
    """

    def __init__(self, path: Path) -> None:
        library, declared = _Functions(str(path)), declarations()
        try:
            library.trueroll_declarations.restype = ctypes.c_char_p
            if library.trueroll_declarations().decode() != declared:
                raise AttributeError("the library's functions take other arguments than this version expects")
            for result, name, arguments in re.findall(r"([\w ]+\*?) trueroll_(\w+)\((.*?)\);", declared):
                function = library[f"trueroll_{name}"]
                function.restype = _type(result)
                function.argtypes = [_type(each) for each in arguments.split(",") if each]
                setattr(self, name, function)
        except AttributeError as error:
            raise OSError(f"{path.name} is from a different version: {error}") from None

    def instruction_sets(self) -> list[str]:
        """Return the instruction sets that this machine has, best first."""
        names: list[str] = []
        while name := self.isa_at(len(names)):
            names.append(name.decode())
        return names

    def instruction_set(self) -> str:
        """Return the instruction set in use."""
        return self.isa().decode()

    def choose(self, name: str) -> None:
        """Switch the process to an instruction set. Raise ConfigError if this machine does not have the instruction
        set.
        """
        if not self.set_isa(name.encode()):
            available = ", ".join(self.instruction_sets())
            raise ConfigError(
                f"{ISA_VARIABLE} must be one of this machine's instruction sets: {available} (got {name!r})"
            )

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., Any]: ...


@cache
def load_library() -> Library:
    """Return the library. The library uses the instruction set that TRUEROLL_CPU_ISA names, or the best instruction set
    if the variable is unset.

    Raise OSError if the library was not built or cannot be loaded, and ConfigError for an instruction set that this
    machine lacks.
    """
    path = Path(__file__).with_name("_native.so")
    if not path.exists():
        raise OSError(
            f"{path.name} was not built, because trueroll was installed with TRUEROLL_NATIVE=0; reinstall it without "
            "TRUEROLL_NATIVE=0, with a C++ compiler that supports AMX (GCC 11, Clang 12 or newer)"
        )
    library = Library(path)
    if wanted := os.environ.get(ISA_VARIABLE):
        library.choose(wanted)
    return library


def library_obstacle() -> str:
    """Return why the library cannot be used, or an empty string if it can be used. Raise ConfigError in the same cases
    as `load_library`.
    """
    try:
        load_library()
    except OSError as error:
        return f"native CPU kernels cannot be loaded: {error}; install trueroll again without TRUEROLL_NATIVE=0"
    return ""
