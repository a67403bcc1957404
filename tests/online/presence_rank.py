"""One rank of the processes of `presence_job`: it does as lines on its stdin say, and answers each with a line."""

import os
import signal
import sys
import time
from datetime import timedelta

from torch import distributed as dist

from lagom_overlap.online.ranks.presence import Presence


def main() -> None:
    rank, num_ranks, port = (int(word) for word in sys.argv[1:4])
    host, serves = sys.argv[4], rank == 0 and sys.argv[5] == "serves"
    store = dist.TCPStore(
        host, port, is_master=serves, wait_for_workers=False, timeout=timedelta(seconds=120), multi_tenant=True
    )
    counts = {"dp": 0}
    presence = Presence(dist.PrefixStore("lagom/0", store), rank=rank, num_ranks=num_ranks, counts=lambda: counts)
    presence.start()
    for line in sys.stdin:
        match line.split():
            case ["meet", number]:
                links = presence._links
                assert links is not None
                while sum(link.is_up for link in links._links) < int(number):
                    time.sleep(0.01)
            case ["issue", number]:
                counts["dp"] = int(number)
            case ["wait", boundary]:
                presence.wait_at(int(boundary), dict(counts))
            case ["heard", boundary]:
                while int(boundary) not in presence._waits:
                    time.sleep(0.01)
            case ["trouble"]:
                while not presence.trouble():
                    time.sleep(0.01)
            case ["fork"]:
                child = os.fork()
                if child == 0:
                    presence.wait_at(9, {"dp": 99})
                    presence.close()
                    signal.pause()
                sys.stdout.write(f"{child}\n")
                sys.stdout.flush()
                continue
            case ["end"]:
                return
        sys.stdout.write(f"{presence.trouble()}\n")
        sys.stdout.flush()


main()
