"""PyTorch's DistributedDataParallel, as in its tutorials."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group()  # PyTorch chooses the backend
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 10)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
generator = torch.Generator().manual_seed(dist.get_rank())
for _ in range(10):
    images = torch.randn(16, 32, generator=generator)
    labels = torch.randint(0, 10, (16,), generator=generator)
    loss = nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(loss.item().hex(), dist.get_backend())
dist.destroy_process_group()
