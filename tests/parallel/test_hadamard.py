"""The signs of Hadamard's blocks."""

import numpy as np
import torch

from lossytp.network.losses import Stream
from lossytp.parallel import collectives as hadamard

ON_CPU = torch.float32, torch.device("cpu")


def test_shorter_messages_have_the_first_of_the_same_signs() -> None:
    longest = hadamard.signs_of(7, 1000, *ON_CPU)
    drawn = Stream((7, "hadamard")).uniforms(1000)
    assert longest.tolist() == np.where(drawn < 0.5, -1.0, 1.0).tolist()
    for count in (1, 2, 64, 65, 999):
        assert torch.equal(hadamard.signs_of(7, count, *ON_CPU), longest[:count])
