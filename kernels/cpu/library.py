"""The shared library of the native kernels: found beside this file and loaded once, with the types of its functions.

Its C interface is described in native/api.cpp.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import TYPE_CHECKING

from trueroll.errors import ConfigError

ISA_VARIABLE = "TRUEROLL_CPU_ISA"

_TYPES = {"p": ctypes.c_void_p, "l": ctypes.c_long, "i": ctypes.c_int, "f": ctypes.c_float}
# The number that trueroll_interface returns: raised there and here whenever an argument changes.
_INTERFACE = 14
# The arguments of each function: pointer, long, int or float.
_SIGNATURES = {
    "pack": "ippll",
    "unpack": "ippll",
    "merge": "ipllpplfp",
    "merge_into": "ipllpplfpp",
    "embedding": "liplpllp",
    "rmsnorm": "lipllpfip",
    "linear": "lipllplppp",
    "gate_mul": "lipplip",
    "gate_up": "lipllpplip",
    "qkv": "lipllppppppplp",
    "write_kv": "ippplpplll",
    "attention": "lippplllllppplflfpp",
    "layers": "lipllpppplpllppppppppppppp",
    "rotation": "lplplfpp",
    "convolve": "lipllplplpppp",
    "delta_rule": "lipppppllllplpppp",
    "route": "lipllliipp",
    "experts": "lipllpppplllipppp",
    "logits": "lipllplp",
    "head": "liplpllppppppppplppp",
    "log_probs": "lpllpp",
    "token_statistics": "lpllplpppp",
    "filter": "lpllppp",
    "sample": "lpllppp",
}


class Library:
    """The library at a path; each function of its C interface is an attribute, without the prefix `trueroll_`.

    Raise OSError if it cannot be loaded, or lacks a function.
    """

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        try:
            if self._library.trueroll_interface() != _INTERFACE:
                raise AttributeError("its functions take other arguments")
            functions = {name: self._library[f"trueroll_{name}"] for name in _SIGNATURES}
        except AttributeError as error:
            raise OSError(f"{path.name} is of another version: {error}") from None
        for name, function in functions.items():
            function.argtypes = [_TYPES[letter] for letter in _SIGNATURES[name]]
            function.restype = None
            setattr(self, name, function)
        self._library.trueroll_available.restype = ctypes.c_char_p
        self._library.trueroll_chosen.restype = ctypes.c_char_p

    def instruction_sets(self) -> list[str]:
        """Those this machine has, best first."""
        names: list[str] = []
        while name := self._library.trueroll_available(ctypes.c_long(len(names))):
            names.append(name.decode())
        return names

    def instruction_set(self) -> str:
        """The one in use."""
        return self._library.trueroll_chosen().decode()

    def choose(self, name: str) -> None:
        """Use an instruction set from now on. Raise ConfigError if this machine does not have it."""
        if not self._library.trueroll_choose(name.encode()):
            available = ", ".join(self.instruction_sets())
            raise ConfigError(f"{ISA_VARIABLE}: expected one of {available}, which this machine has, found {name!r}")

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., None]: ...


@cache
def load_library() -> Library:
    """The library, with the instruction set that TRUEROLL_CPU_ISA names, or the best.

    Raise OSError if it was not built or cannot be loaded, ConfigError for an instruction set that is not there.
    """
    path = Path(__file__).with_name(f"_native{EXTENSION_SUFFIXES[0]}")
    if not path.exists():
        raise OSError(
            f"{path.name} was not built, as TRUEROLL_NATIVE=0 asked for when trueroll was installed; building it needs "
            "a C++ compiler that knows AMX (GCC 11, Clang 12 or newer)"
        )
    library = Library(path)
    if wanted := os.environ.get(ISA_VARIABLE):
        library.choose(wanted)
    return library


def library_obstacle() -> str:
    """Why the library cannot be used, or an empty string. Raise ConfigError like `load_library`."""
    try:
        load_library()
    except OSError as error:
        return f"native CPU kernels cannot be loaded: {error}; install trueroll again without TRUEROLL_NATIVE=0"
    return ""
