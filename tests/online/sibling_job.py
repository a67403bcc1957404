"""A rank of a job whose collectives are spread over siblings; gloo stands for NCCL.

python sibling_job.py RANK WORLD PORT
"""

import json
import os
import sys

import numpy as np
import torch
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lagom_overlap.collective import CollectiveKind, CommConfig, ConfigTable
from lagom_overlap.collective.sites import cycles_of
from lagom_overlap.errors import LagomError
from lagom_overlap.online.routes.sibling import SiblingRoute
from lagom_overlap.online.routes.sibling_adapters import attach, attach_all_to_all

RANK, WORLD, PORT = map(int, sys.argv[1:])
WIDTH = 512  # a layer has 2 MiB: what is smaller is left alone
UNIT = 1 << 15


class Unmeasured:
    def mark_end(self):
        pass

    def begin(self):
        pass

    def end(self):
        return 1.0, None


def open_sibling(group, limits):
    opened.append(limits)
    return dist.new_group(dist.get_process_group_ranks(group), group_desc=f"sibling_{limits}")


def model_of(kind):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH))
    if kind == "ddp":
        return DistributedDataParallel(model)
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def train(kind, num_steps, route=None, tables=(), *, group=None):
    """The losses; from step i on by the i-th table. DDP is given another group in step 4, if there is one."""
    model = model_of(kind)
    taken = attach(model, route) if route else 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses, shapes = [], []
    tables = list(tables)
    for step in range(num_steps):
        if route:
            if step and tables:
                route.prepare(tables.pop(0)(shapes[-1]), step)
                route.commit(step)
            route.begin_step(is_measured=True)
        if group is not None and step == 4:
            model._update_process_group(group)
        loss = model(torch.ones(4, WIDTH) * (1 + step + RANK)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if route:
            shapes.append([call.key for call in route.end_step().calls])
    return losses, taken, shapes


def few(keys):
    return ConfigTable({key: CommConfig(num_channels=2) for key in keys}, cycles=cycles_of(keys))


def mixed(keys):
    rows = {key: CommConfig(num_channels=(2, 4)[i % 2]) for i, key in enumerate(keys)}
    return ConfigTable(rows, cycles=cycles_of(keys))


opened = []
os.environ |= {"RANK": str(RANK), "WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(PORT)}
torch.set_num_threads(1)
dist.init_process_group("gloo")
found = {}
for kind in ("fsdp", "ddp"):
    plain, _, _ = train(kind, 6)
    opened.clear()
    route = SiblingRoute("gloo", Unmeasured(), open_sibling)
    routed, taken, shapes = train(kind, 6, route, [few, mixed])
    used = {base.group.group_desc: sorted(base.siblings) for base in route._groups.values()}
    route.close()
    found[kind] = {
        "equal": plain == routed,
        "taken": taken,
        "calls": [[f"{key.kind}:{key.occurrence}" for key in shape] for shape in shapes],
        "opened": opened.copy(),
        "siblings": list(used.values()),
    }
alone = [dist.new_group([rank]) for rank in range(WORLD)][RANK]
route = SiblingRoute("gloo", Unmeasured(), open_sibling)
found["another group"] = train("ddp", 6, group=alone)[0] == train("ddp", 6, route, [few, mixed], group=alone)[0]
route.close()
route = SiblingRoute("gloo", Unmeasured(), open_sibling)
original = dist.all_to_all_single
attach_all_to_all(route)
source, target = torch.arange(8.0 * UNIT) + 10 * RANK, torch.empty(8 * UNIT)
keys, results = [], []
for step in range(2):
    route.begin_step(is_measured=True)
    dist.all_to_all_single(target, source)
    results.append(target.clone())
    keys = [call.key for call in route.end_step().calls]
    if step == 0:
        route.prepare(few(keys), 1)
        route.commit(1)
route.prepare(ConfigTable({}), 2)
route.commit(2)
route.take_back(2)
route.begin_step(is_measured=False)
found["taken_back"] = route.group_for(CollectiveKind.ALL_TO_ALL, 32 * UNIT, None).group_desc
route.end_step()
# Rank 0 sends as many bytes as the exchange of which the table speaks, rank 1 another number.
splits = [[3 * UNIT, 5 * UNIT], [4 * UNIT, 2 * UNIT]]
sent, received = splits[RANK], [peer[RANK] for peer in splits]
route.begin_step(is_measured=False)
uneven = torch.empty(sum(received))
# As numbers of numpy, which PyTorch takes too and whose truth is ambiguous.
dist.all_to_all_single(uneven, torch.arange(float(sum(sent))) + 10 * RANK, np.array(received), np.array(sent))
sources = [torch.arange(float(sum(each))) + 10 * rank for rank, each in enumerate(splits)]
expected = torch.cat([whole.split(each)[RANK] for whole, each in zip(sources, splits, strict=True)])
found["uneven"] = torch.equal(uneven, expected)
route.end_step()
route.begin_step(is_measured=False)
chosen = route.group_for(CollectiveKind.ALL_TO_ALL, 32 * UNIT, None)
found["all_to_all"] = {"same": torch.equal(*results), "group": chosen.group_desc}
try:
    route.prepare(ConfigTable({keys[0]: CommConfig(chunk_bytes=1 << 20)}), 3)
    found["refused"] = ""
except LagomError as error:
    found["refused"] = str(error)
route.close()
left = route.group_for(CollectiveKind.ALL_TO_ALL, 32 * UNIT, None)
found["undone"] = dist.all_to_all_single is original and left is dist.group.WORLD
sys.stdout.write(json.dumps(found) + "\n")
sys.stdout.flush()
os._exit(0)  # gloo's threads drop the last call's tensors and need Python for it (PyTorch issue 190489)
