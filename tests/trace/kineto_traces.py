"""Small Kineto traces written by hand, field by field as kineto's output_json.cpp writes them."""

import gzip
import io
import json
import tarfile
import zipfile
from pathlib import Path
from typing import Any

NCCL = "ncclDevKernel_{}(ncclDevKernelArgsStorage<4096ul>)"


class KinetoFile:
    """Events in microseconds; `kernel` adds the launch too unless told not to."""

    def __init__(self, **top: Any) -> None:
        self.top = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": "NVIDIA H100", "numSms": 132}],
            "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 1, "nccl_version": "2.27.5"},
            "displayTimeUnit": "ms",
            "baseTimeNanoseconds": 1_700_000_000_000_000_000,
        } | top
        self.events: list[dict[str, Any]] = []
        self._correlation = 100

    def add(self, **event: Any) -> None:
        self.events.append(event)

    def kernel(
        self,
        name: str,
        start: float,
        length: float,
        *,
        stream: int = 7,
        launch: float | None = -1.0,
        cat: str = "kernel",
        tid: int = 1,
        **args: Any,
    ) -> int:
        """A GPU event, launched 5 us before it starts; `launch=None` leaves the launch out."""
        self._correlation += 1
        if launch is not None:
            self.add(
                ph="X",
                cat="cuda_runtime",
                name="cudaLaunchKernel",
                pid=10,
                tid=tid,
                ts=start - 5 if launch < 0 else launch,
                dur=2,
                args={"correlation": self._correlation, "cbid": 211},
            )
        held = {"device": 0, "stream": stream, "correlation": self._correlation, "External id": self._correlation}
        if cat == "kernel":
            held |= {"grid": [8, 1, 1], "block": [256, 1, 1]}
        self.add(ph="X", cat=cat, name=name, pid=0, tid=stream, ts=start, dur=length, args=held | args)
        return self._correlation

    def nccl(
        self, what: str, start: float, length: float, *, op: str, nelems: int, stream: int = 20, **args: Any
    ) -> None:
        """An NCCL kernel with the fields of torch 2.4 and later; bf16, 8 ranks, 16 channels unless said otherwise."""
        gathers = op in ("_allgather_base", "all_gather")
        scatters = op in ("_reduce_scatter_base",)
        fields = {
            "Collective name": op,
            "In msg nelems": nelems // 8 if gathers else nelems,
            "Out msg nelems": nelems // 8 if scatters else nelems,
            "Group size": 8,
            "dtype": "BFloat16",
            "Process Group Name": "1",
            "Process Group Description": "fsdp",
            "Process Group Ranks": "[0, 1, 2, 3, 4, 5, 6, 7]",
            "grid": [16, 1, 1],
            "block": [544, 1, 1],
        }
        launch = args.pop("launch", -1.0)
        self.kernel(NCCL.format(what), start, length, stream=stream, launch=launch, **(fields | args))

    def step(self, number: int, start: float, length: float) -> None:
        self.add(
            ph="X", cat="user_annotation", name=f"ProfilerStep#{number}", pid=10, tid=1, ts=start, dur=length, args={}
        )

    def to_json(self, **kwargs: Any) -> bytes:
        return json.dumps(self.top | {"traceEvents": self.events}, **kwargs).encode()

    def write(self, path: Path) -> Path:
        data = self.to_json()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
        return path


def tar_gz(members: dict[str, bytes]) -> bytes:
    """A .tar.gz of the given files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def zipped(members: dict[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    """A zip archive of files by name."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return buffer.getvalue()
