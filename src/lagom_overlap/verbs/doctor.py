"""`lagom doctor`: what this machine can do, what is missing, what would work."""

import ctypes
import importlib.util
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from lagom_overlap.engines.torch_versions import release_of, releases_tested
from lagom_overlap.errors import MissingDependencyError
from lagom_overlap.hardware import preset_names
from lagom_overlap.jobfile.conflicts import conflicts, with_conf_files
from lagom_overlap.nccl_plugin.box import this_box
from lagom_overlap.nccl_plugin.capability import BoxMaps, CapabilityMap
from lagom_overlap.nccl_plugin.library import installed_library
from lagom_overlap.nccl_plugin.loaded import installed_nccl
from lagom_overlap.nccl_plugin.support import NCCL_OF_TORCH, Knob, Settable, best_route, support_of, tuner_version
from lagom_overlap.record import describe_machine, package_versions
from lagom_overlap.registry import BACKENDS, TUNERS, entry_point_names
from lagom_overlap.results.doctor import DoctorCheck, DoctorResult, KnobSupport, SupportRow
from lagom_overlap.workload.models import model_names
from lagom_overlap.workload.step.rules import release_changes

_OTHER_RELEASES: Final = ((2, 21, 5), (2, 23, 4), (2, 27, 7), (2, 31, 2), (2, 32, 6))
"""Releases besides those of PyTorch's wheels, one per change of what can be set."""


def _torch() -> DoctorCheck:
    if importlib.util.find_spec("torch") is None:
        return DoctorCheck(name="torch", ok=False, found="not installed", remedy="pip install torch")
    import torch  # noqa: PLC0415  torch is an extra: imported only where it was found
    import torch.distributed as dist  # noqa: PLC0415

    gloo = dist.is_available() and dist.is_gloo_available()
    return DoctorCheck(
        name="torch",
        ok=gloo,
        found=f"{torch.__version__}, gloo {'available' if gloo else 'missing'}",
        remedy="" if gloo else "install a torch build with torch.distributed and gloo",
    )


def _tested_torch() -> DoctorCheck:
    """Whether this package's own tests ran with the PyTorch found here."""
    name, rows = "PyTorch tested", releases_tested()
    version = package_versions().get("torch")
    if version is None or not rows:
        return DoctorCheck(name=name, ok=False, found="needs torch", remedy="pip install torch")
    tested = [row for row in rows if row.release == release_of(version)]
    if tested:
        row = tested[-1]
        failed = f", {len(row.failed)} failed" if row.failed else ""
        words = f"{row.num_passed} tests passed{failed} under {row.torch} on {row.with_ranks.date}"
        return DoctorCheck(name=name, ok=not row.failed, found=words, remedy="; ".join(row.failed[:1]))
    releases = sorted({row.release for row in rows})
    oldest, newest = (".".join(map(str, release)) for release in (releases[0], releases[-1]))
    where = "newer than" if release_of(version) > releases[-1] else "none of"
    return DoctorCheck(
        name=name,
        ok=False,
        found=f"{version} is {where} what was tested, {oldest} to {newest}",
        remedy="compare losses with and without LAGOM_DISABLE=1 first; lagom docs support has what was tested",
    )


def _engines_waits(environment: Mapping[str, str]) -> list[DoctorCheck]:
    """What the PyTorch found here does otherwise than releases before, where its build has NCCL."""
    version = package_versions().get("torch")
    if version is None or not installed_nccl():
        return []
    return [
        DoctorCheck(name="overlap", ok=False, found=f"{version}: {change.what}", remedy=change.avoided_by)
        for change in release_changes()
        if change.software == "PyTorch" and change.is_in(version) and not change.is_avoided(environment)
    ]


def _cuda() -> DoctorCheck:
    summary, version = "no NVIDIA driver", ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        if driver.cuInit(0) == 0 and driver.cuDriverGetVersion(ctypes.byref(version)) == 0:
            summary = f"driver for CUDA {version.value // 1000}.{version.value % 1000 // 10}"
    except OSError:
        pass
    ok = version.value > 0
    return DoctorCheck(
        name="GPU", ok=ok, found=summary, remedy="" if ok else "not needed for --backend gloo or simulated"
    )


def _carve_out() -> DoctorCheck:
    if importlib.util.find_spec("torch") is None:
        return DoctorCheck(name="SM carve-out", ok=False, found="needs torch", remedy="pip install torch")
    from lagom_overlap.engines.carve_out import carve_out_support  # noqa: PLC0415  torch is an extra

    support = carve_out_support()
    green = f"green contexts: {support.green_contexts}"
    if support.why_not:
        remedy = "simulated with [tune.space] sm_carveout; a running job needs an NVIDIA GPU"
        return DoctorCheck(name="SM carve-out", ok=False, found=f"{support.why_not}; {green}", remedy=remedy)
    caveat = f", but {support.caveat}" if support.caveat else ""
    return DoctorCheck(
        name="SM carve-out", ok=True, found=f"can be set, 0 to {(support.num_sms or 1) - 1} SMs{caveat}; {green}"
    )


def _nccl() -> DoctorCheck:
    version = installed_nccl()
    if version is None:
        return DoctorCheck(
            name="NCCL", ok=False, found="not found", remedy="not needed for --backend gloo or simulated"
        )
    abi = tuner_version(version)
    name = ".".join(map(str, version))
    if abi is None:
        return DoctorCheck(
            name="NCCL", ok=False, found=f"{name}: takes no tuner plug-in", remedy="NCCL 2.21 or newer does"
        )
    return DoctorCheck(name="NCCL", ok=True, found=f"{name}: takes our tuner plug-in, interface v{abi}")


def _capability_map() -> DoctorCheck:
    name, box, version = "capability map", this_box(), installed_nccl()
    if box is None or version is None:
        lacks = "NVIDIA GPU" if box is None else "NCCL"
        return DoctorCheck(name=name, ok=False, found=f"none: there is no {lacks} here to have one of")
    maps = BoxMaps(version, box).every()
    if not maps:
        release = ".".join(map(str, version))
        return DoctorCheck(
            name=name, ok=False, found=f"none of NCCL {release} on this box", remedy="lagom selftest --nccl"
        )
    return DoctorCheck(name=name, ok=True, found="; ".join(map(_map_words, maps)))


def _map_words(found: CapabilityMap) -> str:
    key = found.key
    shared = "" if key.ranks_per_gpu == 1 else f" with {key.ranks_per_gpu} ranks each"
    most = "" if found.max_channels is None else f", {found.max_channels} channels"
    gpus = f"{key.num_gpus} x {key.gpu}{shared}"
    return f"NCCL {'.'.join(map(str, key.nccl))} on {gpus}, {len(found.rows)} settings of {found.measured_on}{most}"


def _plugin() -> DoctorCheck:
    try:
        path = installed_library()
        exported = [v for v in range(2, 8) if hasattr(ctypes.CDLL(str(path)), f"ncclTunerPlugin_v{v}")]
    except MissingDependencyError as error:
        return DoctorCheck(name="tuner plug-in", ok=False, found=str(error), remedy="install from a wheel")
    except OSError as error:
        return DoctorCheck(name="tuner plug-in", ok=False, found=str(error), remedy="reinstall lagom-overlap")
    return DoctorCheck(
        name="tuner plug-in", ok=bool(exported), found=f"{path.name}, interface v{exported[0]} to v{exported[-1]}"
    )


def _environment() -> DoctorCheck:
    conflicting = conflicts(with_conf_files(os.environ))
    names = ", ".join(f"{conflict.variable}={conflict.value}" for conflict in conflicting)
    return DoctorCheck(
        name="NCCL variables",
        ok=not conflicting,
        found=f"{names} would take knobs away from tuning" if conflicting else "none that would take a knob away",
        remedy="; ".join(conflict.why for conflict in conflicting),
    )


def support_matrix() -> list[SupportRow]:
    """A row per NCCL that a PyTorch wheel brings, newer ones, and the NCCL found here."""
    here = installed_nccl()
    releases: dict[tuple[int, int, int], list[str]] = {}
    for torch_release, version in NCCL_OF_TORCH.items():
        releases.setdefault(version, []).append(torch_release)
    for version in (*_OTHER_RELEASES, *([here] if here else [])):
        releases.setdefault(version, [])
    return [
        SupportRow(
            nccl=".".join(map(str, version)),
            torch=tuple(torch_releases),
            is_here=version == here,
            knobs={
                knob: KnobSupport(
                    route=route,
                    reach=support_of(version)[route][knob].reach,
                    note=support_of(version)[route][knob].note,
                )
                if (route := best_route(version, knob)) is not None
                else KnobSupport(route=None, reach=Settable.NO, note="")
                for knob in Knob
            },
        )
        for version, torch_releases in sorted(releases.items())
    ]


def _link_emulation() -> DoctorCheck:
    if importlib.util.find_spec("torch") is None:
        return DoctorCheck(name="link emulation", ok=False, found="needs torch", remedy="pip install torch")
    from lagom_overlap.backends.gloo import probe_link_emulation  # noqa: PLC0415  torch is an extra

    why = probe_link_emulation()
    return DoctorCheck(
        name="link emulation",
        ok=why is None,
        found="unprivileged network namespaces work" if why is None else why,
        remedy="" if why is None else 'use link = "loopback"',
    )


def _cores() -> DoctorCheck:
    cores, memory = len(os.sched_getaffinity(0)), shutil.disk_usage(Path.cwd()).free
    return DoctorCheck(
        name="cores",
        ok=cores >= 2,
        found=f"{cores} cores, {memory / 1e9:.0f} GB free disk here",
        remedy="" if cores >= 2 else "with one core, rank processes share it: ratios say little",
    )


def run_doctor() -> DoctorResult:
    """Every check, none of which changes anything."""
    return DoctorResult(
        machine=describe_machine(),
        versions=package_versions(),
        tuners=tuple(entry_point_names(TUNERS)),
        backends=tuple(entry_point_names(BACKENDS)),
        presets=tuple(preset_names()),
        models=tuple(model_names()),
        checks=(
            _cores(),
            _torch(),
            _tested_torch(),
            *_engines_waits(os.environ),
            _link_emulation(),
            _plugin(),
            _nccl(),
            _capability_map(),
            _environment(),
            _cuda(),
            _carve_out(),
        ),
        support=tuple(support_matrix()),
    )
