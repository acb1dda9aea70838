"""The GPU that tiles are chosen for, as far as a model of a kernel's time needs to know it.

The numbers are assumptions, each with its reason. No bit depends on them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """Rates are of the whole GPU and per second; what a clock does is of one multiprocessor (SM)."""

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


H200 = Machine(
    sms=132,
    memory=4.3e12,
    l2=7.0e12,
    arithmetic=790e12,
    multiply_adds=2048,
    shared_memory=227 * 1024,
    shared_bytes=128,
    latency=1e-6,
    launch=2e-6,
)
REASONS = {
    "sms": "SMs of an H200, as torch reports them",
    "memory": "bytes read and written by a copy, as measured on an H200; the data sheet says 4.8e12",
    "l2": "bytes from L2 to the SMs: what public kernels take that reach 600 TFLOP/s with tiles of 128 x 256, and no "
    "more than 36 bytes a clock and SM; plain copies on an H100 with fewer SMs reach about 5.5e12",
    "arithmetic": "of a product of 8192 x 8192 x 8192 random bfloat16, as measured on an H200; power lowers the clock",
    "multiply_adds": "dense bfloat16 multiplications with additions in a clock, by the data sheet",
    "shared_memory": "bytes that the programs of an SM can have together, by the data sheet",
    "shared_bytes": "bytes that shared memory reads or writes in a clock: 32 banks of 4",
    "latency": "seconds from a load to its data while memory is busy",
    "launch": "seconds from the end of a kernel in a CUDA graph until the next one's first loads are there",
}
