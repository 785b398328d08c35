"""Test that tensors written in pieces are read in others, and that the index cannot run code."""

import os
import pickle

import pytest
import torch

from lossytp.training.checkpoint import INDEX, Piece, read_, shapes, whole, write
from lossytp.training.config import TrainConfig

NETWORK = TrainConfig().network()
NUMBERS = torch.arange(48.0).view(6, 8)


def columns(tensor, *, at):
    """Return a tensor as two pieces, cut at a column."""
    return [Piece(tensor.shape, (0, 0), tensor[:, :at]), Piece(tensor.shape, (0, at), tensor[:, at:])]


def test_pieces_are_read_as_other_pieces(tmp_path):
    names = write(tmp_path, {"x": columns(NUMBERS, at=3), "bytes": whole(torch.arange(5, dtype=torch.uint8))}, NETWORK)
    assert names == sorted(path.name for path in tmp_path.iterdir())
    assert shapes(tmp_path) == {"x": (6, 8), "bytes": (5,)}
    read, rows = torch.zeros(6, 8), torch.zeros(2, 8)
    read_(tmp_path, {"x": columns(read, at=5)})
    assert torch.equal(read, NUMBERS)
    read_(tmp_path, {"x": [Piece((6, 8), (3, 0), rows)]})
    assert torch.equal(rows, NUMBERS[3:5])


def test_a_transpose_is_written_and_read(tmp_path):
    write(tmp_path, {"x": [Piece((8, 6), (0, 0), NUMBERS.t())]}, NETWORK)
    read = torch.zeros(6, 8)
    read_(tmp_path, {"x": [Piece((8, 6), (0, 0), read.t())]})
    assert torch.equal(read, NUMBERS)


def write_x(folder):
    """Write this process's column of a tensor, over the lossy backend."""
    import lossytp as ltp

    network = ltp.LossyNetwork(ltp.Bernoulli(loss_rate=0.5))
    ltp.init_process_group(network)
    rank = torch.distributed.get_rank()
    mine = NUMBERS[:, rank * 4 : (rank + 1) * 4]
    return write(folder, {"x": [Piece(NUMBERS.shape, (0, rank * 4), mine)], "both": whole(NUMBERS)}, network)


def test_each_process_writes_its_pieces_and_one_writes_what_all_have(processes, tmp_path):
    assert processes(2, write_x, tmp_path) == [[INDEX, "__0_0.distcp"], ["__1_0.distcp"]]
    read, both = torch.zeros(6, 8), torch.zeros(6, 8)
    read_(tmp_path, {"x": whole(read), "both": whole(both)})
    assert torch.equal(read, NUMBERS)
    assert torch.equal(both, NUMBERS)


def test_what_is_missing_or_of_another_shape_is_named(tmp_path):
    write(tmp_path, {"x": whole(NUMBERS)}, NETWORK)
    with pytest.raises(ValueError, match=r"^y is missing$"):
        read_(tmp_path, {"y": whole(NUMBERS)})
    with pytest.raises(ValueError, match=r"^x has shape \(6, 8\), not \(8, 6\)$"):
        read_(tmp_path, {"x": whole(NUMBERS.t())})


class Harmful:
    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.mkdir, (self.file,)


def test_an_index_that_would_run_code_is_refused(tmp_path):
    write(tmp_path, {"x": whole(NUMBERS)}, NETWORK)
    (tmp_path / INDEX).write_bytes(pickle.dumps(Harmful(str(tmp_path / "harmed"))))
    with pytest.raises(ValueError, match=r"\.metadata names posix\.mkdir, which no index of a checkpoint needs"):
        read_(tmp_path, {"x": whole(NUMBERS)})
    assert not (tmp_path / "harmed").exists()
