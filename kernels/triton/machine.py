"""Properties of a GPU, for the cost model that chooses tiles.

`REASONS` gives the source of each number. "Fitted" numbers were tuned so that the model chooses good tiles. For
products of Qwen2.5-7B with 16 to 8,192 tokens on an H100, the chosen tiles take on average 1.3% longer than the fastest
timed tiles. `tests/kernels/triton/h100_tiles.json` holds the measured times; `examples/benchmarks/gpu_report.py tiles`
measures another GPU. No bit of a result depends on the numbers in this module.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """The properties of a GPU. Rates are per second and for the whole GPU. Numbers per clock are for one multiprocessor
    (SM).
    """

    sms: int
    memory: float
    l2: float
    arithmetic: float
    multiply_adds: int
    shared_memory: int
    shared_bytes: int
    latency: float
    launch: float

    @property
    def clock(self) -> float:
        """Clocks per second."""
        return self.arithmetic / (2 * self.sms * self.multiply_adds)


H100 = Machine(
    sms=132,
    memory=3.0e12,
    l2=9.0e12,
    arithmetic=880e12,
    multiply_adds=2048,
    shared_memory=227 * 1024,
    shared_bytes=128,
    latency=1e-6,
    launch=2e-6,
)
REASONS = {
    "sms": "SMs of an H100 and of an H200, as torch reports them",
    "memory": "bytes that products of few tokens read, as measured on an H100; the data sheet says 3.35e12",
    "l2": "bytes from L2 to the SMs; fitted",
    "arithmetic": "for dense bfloat16; fitted. The data sheet says 990e12 at the highest clock; a product of 8192 "
    "x 8192 x 8192 reaches 775e12 at the clock that the GPU's power limit allows",
    "multiply_adds": "dense bfloat16 multiply-adds per clock, from the data sheet",
    "shared_memory": "bytes that all programs on an SM can have together, from the data sheet",
    "shared_bytes": "bytes that shared memory reads or writes per clock: 32 banks of 4",
    "latency": "seconds from a load to its data while memory is busy",
    "launch": "seconds from the end of a kernel in a CUDA graph until the next kernel's first loads have arrived",
}
