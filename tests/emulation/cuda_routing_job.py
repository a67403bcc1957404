"""Experts chosen by top-k with uneven splits, a pipeline without given shapes, objects: run by test_cuda_torch.py."""

import os

import torch
import torch.distributed.nn.functional as exchange
from torch import distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

WIDTH, EXPERTS, CHOSEN, TOKENS = 64, 8, 2, 128
RANK = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(RANK)
dist.init_process_group("nccl")
RANKS = dist.get_world_size()


class Experts(nn.Module):
    """A layer of experts, as many on each rank; keeps how many tokens it sent and got."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.own = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS // RANKS))

    def forward(self, x):
        weights, chosen = torch.softmax(self.gate(x), -1).topk(CHOSEN, -1)
        order = torch.argsort(chosen.flatten(), stable=True)
        self.sent = torch.bincount(chosen.flatten(), minlength=EXPERTS)
        self.got = torch.empty_like(self.sent)
        dist.all_to_all_single(self.got, self.sent)
        out_sizes, in_sizes = (each.view(RANKS, -1).sum(1).tolist() for each in (self.got, self.sent))
        rows = exchange.all_to_all_single(x.new_empty(sum(out_sizes), WIDTH), x[order // CHOSEN], out_sizes, in_sizes)
        experts = torch.arange(EXPERTS // RANKS, device="cuda").repeat(RANKS).repeat_interleave(self.got)
        done = torch.zeros_like(rows)
        for number, expert in enumerate(self.own):
            places = (experts == number).nonzero().flatten()
            done = done.index_add(0, places, expert(rows[places]))
        back = exchange.all_to_all_single(done.new_empty(sum(in_sizes), WIDTH), done, in_sizes, out_sizes)
        return x + torch.zeros_like(x).index_add(0, order // CHOSEN, back * weights.flatten()[order, None])


torch.manual_seed(0)
layer = Experts().cuda()
optimizer = torch.optim.AdamW(layer.parameters())
torch.manual_seed(RANK + 1)
seen = set()
for _ in range(3):
    layer(torch.randn(TOKENS, WIDTH, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert layer.sent.sum().item() == TOKENS * CHOSEN
    said = [None] * RANKS
    dist.all_gather_object(said, (layer.sent.tolist(), layer.got.tolist()))
    own = EXPERTS // RANKS
    for rank, (_, got) in enumerate(said):
        assert got == [count for sent, _ in said for count in sent[rank * own : (rank + 1) * own]], said
    seen.add(str(said))
assert len(seen) == 3  # the routing follows the tokens

stage = PipelineStage(nn.Linear(WIDTH, WIDTH).cuda(), RANK, RANKS, torch.device("cuda", RANK))
schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
x = torch.randn(8, WIDTH, device="cuda")
schedule.step(*([x] if RANK == 0 else []), target=x if RANK == RANKS - 1 else None)
dist.destroy_process_group()
