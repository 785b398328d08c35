"""A program that starts its processes itself, as PyTorch's older tutorials do."""

import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def work(rank, port, words):
    assert sys.argv[1:] == words
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    ones = torch.ones(5_000)
    dist.all_reduce(ones)
    print(f"{int(ones.sum())}\n", end="", flush=True)  # in one write: both processes share the pipe
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.start_processes(work, (sys.argv[1], sys.argv[1:]), nprocs=2, start_method=sys.argv[2])
    print("joined")
