"""Draw docs/images/mismatch.png from two runs of examples/grpo.py: `python docs/pictures.py ALIGNED UNALIGNED`.

The runs are `python examples/grpo.py --out ALIGNED --seed 1` and `python examples/grpo.py --out UNALIGNED --seed 1
--unaligned`.
"""

import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

LABELS = ("aligned trainer: 0.0 at every step", "ordinary forward pass of the same model")


def main(*folders: str) -> None:
    figure = Figure(figsize=(8, 3), layout="constrained")
    axes = figure.subplots()
    for folder, label, style in zip(folders, LABELS, ("o-", "s--"), strict=True):
        rows = np.genfromtxt(Path(folder, "metrics.csv"), delimiter=",", names=True)
        axes.plot(rows["step"], rows["mismatch"], style, label=label, markersize=4)
    axes.set_title("largest |rollout log-prob - trainer log-prob| of each step (SmolLM2-135M, bfloat16, GRPO)")
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend()
    figure.savefig(Path(__file__).parent / "images" / "mismatch.png")


if __name__ == "__main__":
    main(*sys.argv[1:])
