"""Builds the pages of the Python API from its docstrings: `make docs`, or `python docs/api.py FOLDER`."""

import sys
from importlib import import_module
from pathlib import Path

import pdoc

MODULES = ("trueroll.rollout", "trueroll.kernels.training", "trueroll.kernels.importance")


def build(folder: Path) -> None:
    for name in MODULES:
        module = import_module(name)
        # pdoc looks into the module's __dict__, where names that load on first use are not.
        vars(module).update({public: getattr(module, public) for public in module.__all__})
    pdoc.render.configure(show_source=False)
    pdoc.pdoc(*MODULES, output_directory=folder)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
    print(f"{Path(sys.argv[1]).absolute() / 'index.html'}")
