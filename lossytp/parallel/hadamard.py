"""Take lost coefficients out of messages that were sent in blocks, each transformed by Hadamard's matrix.

A block's elements get random signs first. Coefficient i of block j is number i * (number of blocks) + j on the wire, so
a packet carries at most one coefficient of a block.

Shapes: L ranks of this process, N elements of one message; B blocks of S elements; P packets of C coefficients.
"""

from functools import lru_cache

import numpy as np
import torch
from scipy.linalg import hadamard
from torch import Tensor
from torch.nn.functional import pad

from lossytp.network.repairs import Hadamard
from lossytp.network.streams import Stream


def without_coefficients(sent_LN: Tensor, packets: np.ndarray, repair: Hadamard, capacity: int, seed: int) -> Tensor:
    """Return the rows without the coefficients that some packets carry. Complete blocks do not change.

    Args:
        sent_LN: what crosses a hop, one row for each rank of this process.
        packets: sorted numbers of the missing packets, int64.
        repair: says the size of a block.
        capacity: elements per packet.
        seed: of the signs.
    """
    rows, length = sent_LN.shape
    size = repair.block_for(length, capacity)
    blocks = -(-length // size)
    carried = min(capacity, size * blocks)
    lost_PC = torch.zeros(-(-size * blocks // carried), carried, dtype=torch.bool, device=sent_LN.device)
    lost_PC.index_fill_(0, on_device(packets, sent_LN.device), True)
    lost_BS = lost_PC.view(-1)[: size * blocks].view(size, blocks).t().contiguous()
    affected_B1 = lost_BS.any(1, keepdim=True)
    matrix = _hadamard_matrix(size, sent_LN.dtype, sent_LN.device)
    signs_BS = signs_of(seed, blocks * size, sent_LN.dtype, sent_LN.device).view(blocks, size)
    result_LN = torch.empty_like(sent_LN)
    for row in range(rows):
        values_BS = pad(sent_LN[row], (0, blocks * size - length)).view(blocks, size)
        coefficients_BS = (values_BS * signs_BS) @ matrix
        coefficients_BS.masked_fill_(lost_BS, 0)
        back_BS = (coefficients_BS @ matrix) * signs_BS
        result_LN[row] = torch.where(affected_B1, back_BS, values_BS).view(-1)[:length]
    return result_LN


def on_device(numbers: np.ndarray, device: torch.device) -> Tensor:
    """Return the numbers on the device. From pinned memory, a GPU fetches them while the processor goes on."""
    tensor = torch.from_numpy(numbers)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


@lru_cache(maxsize=16)  # this and the signs stay in the device's memory
def _hadamard_matrix(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return Sylvester's matrix, orthonormal and symmetric: its own inverse."""
    return torch.from_numpy(hadamard(size) / size**0.5).to(device, dtype)


def signs_of(seed: int, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the first `count` signs of the seed's stream."""
    return _more_signs(seed, 1 << (count - 1).bit_length(), dtype, device)[:count]


@lru_cache(maxsize=8)
def _more_signs(seed: int, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    signs = np.where(Stream((seed, "hadamard")).uniforms(count) < 0.5, -1.0, 1.0)
    return torch.from_numpy(signs).to(device, dtype)  # exact in any dtype
