"""PyTorch's functional all-gather into a given tensor, over process groups that are written in Python.

PyTorch's own kernel calls a C++ method that Python cannot override, so over the backend `lossy` its message would lose
nothing. This kernel calls the method of the group, whatever the group is.
"""

import torch
import torch.distributed._functional_collectives  # defines the operations
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, _register_work, _resolve_process_group
from torch.distributed import ProcessGroup

_library = torch.library.Library("_c10d_functional", "IMPL")  # the kernels exist as long as this object


def all_gather_into_tensor_out(
    input: Tensor, group_size: int, group_name: str | ProcessGroup, *, out: Tensor
) -> Tensor:
    """Gather the ranks' `input` into `out`; return `out`, which `wait_tensor` completes."""
    group = group_name if isinstance(group_name, ProcessGroup) else _resolve_process_group(group_name)  # type: ignore[arg-type]
    options = AllgatherOptions()
    options.asyncOp = True
    _register_work(out, group.all_gather_single(out, input, options))
    return out


for _device in ("CPU", "CUDA"):
    _library.impl("all_gather_into_tensor_out", all_gather_into_tensor_out, _device)
