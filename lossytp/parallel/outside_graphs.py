"""Keep lossy layers out of the graphs that PyTorch's compilers make.

A layer draws losses and counts packets at every call. A graph would record one call's losses and repeat them.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._compile import _disable_dynamo


def outside_graphs(method: Callable) -> Callable:
    """Return `method`, changed so that `torch.compile` breaks its graph there, and compiles only the code around it.

    Outside a compiler the method runs as it is.

    Raises:
        ValueError: within `torch.export` or `torch.jit.trace`, whose graphs cannot be broken.
    """
    called_from_graph = _disable_dynamo(method)

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            if torch.compiler.is_exporting():
                raise ValueError(_refusal("torch.export"))
            return called_from_graph(*args, **kwargs)
        if torch._C._get_tracing_state() is not None:
            raise ValueError(_refusal("torch.jit.trace"))
        return method(*args, **kwargs)

    return run


def _refusal(compiler: str) -> str:
    return f"{compiler} would repeat one call's packet losses: use torch.compile, or gather(model) first"
