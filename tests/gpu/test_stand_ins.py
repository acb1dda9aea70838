"""Compare real CUDA graphs with the fake graphs that tests without a GPU use."""

from __future__ import annotations

import torch

from trueroll.engine.running.graphs import Capture, CudaCapture


def check_capture(capture: Capture, device: torch.device) -> None:
    """Check that outputs keep their memory, and that only `replay` fills them, from the current inputs."""
    given = torch.arange(4, device=device)
    [doubled, negative], replay = capture(lambda: [given * 2, -given])
    replay()  # CUDA computes nothing while it captures
    assert doubled.tolist() == [0, 2, 4, 6] and negative.tolist() == [0, -1, -2, -3]
    places = doubled.data_ptr(), negative.data_ptr()
    given.copy_(torch.tensor([5, 6, 7, 8]))
    assert doubled.tolist() == [0, 2, 4, 6], "nothing is computed before the replay"
    replay()
    assert doubled.tolist() == [10, 12, 14, 16] and negative.tolist() == [-5, -6, -7, -8]
    assert (doubled.data_ptr(), negative.data_ptr()) == places


def test_a_cuda_graph_replays_what_was_captured(gpu: torch.device) -> None:
    check_capture(CudaCapture(), gpu)
