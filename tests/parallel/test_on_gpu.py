"""Sums of tensors on a GPU, compared with the same sums on the CPU."""

import pytest
import torch

import lossytp as ltp
from lossytp.network.lossy_network import CommConfig
from lossytp.parallel.collectives import LossyCollective
from lossytp.parallel.group import RankGroup

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, which holds the tensors")
REPAIRS = ["zero", "rescale", "rescale_counted", "stale", "local", "hadamard(8)", "fec(3, 2)", "retransmit(1)"]
REPAIRS += [f"protect(0.2){others}" for others in ("", " + hadamard(8)", " + rescale")]


def lossy_sum(rows_RN: torch.Tensor, *, device: str, loss_rate: float, repair: str, algorithm: str) -> torch.Tensor:
    """Return the second of two sums, since `stale` needs a first one; 7 elements a packet, the last packet short."""
    network = ltp.LossyNetwork(ltp.Bernoulli(loss_rate=loss_rate), wire=ltp.Wire(elements=7), seed=1)
    comm = CommConfig.named(algorithm=algorithm, repair=repair, reliable_gather=False)
    collective = LossyCollective(network, RankGroup(len(rows_RN)), comm)
    collective.sum_(rows_RN.to(device, copy=True))
    return collective.sum_(rows_RN.to(device, copy=True)).cpu()


@pytest.mark.parametrize("algorithm", ["direct", "ring", "switch"])
@pytest.mark.parametrize("repair", REPAIRS)
def test_a_sum_on_a_gpu_lacks_what_it_lacks_on_the_cpu(repair, algorithm):
    rows_RN = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0))
    settings = {"repair": repair, "algorithm": algorithm}
    on_gpu, on_cpu = (lossy_sum(rows_RN, device=device, loss_rate=0.3, **settings) for device in ("cuda", "cpu"))
    complete = lossy_sum(rows_RN, device="cpu", loss_rate=0.0, **settings)
    torch.testing.assert_close(on_gpu, on_cpu)
    assert not torch.allclose(on_cpu, complete)
