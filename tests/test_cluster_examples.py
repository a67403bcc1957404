"""What `examples/clusters` starts is what `lagom run` and the launcher take. No cluster is here: see the guide."""

import ast
import os
import subprocess
from pathlib import Path

import pytest

import lagom_overlap
from lagom_overlap.cli.main import full_parser

ROOT = Path(__file__).parents[1]
CLUSTERS = ROOT / "examples" / "clusters"


def _run_and_job(command: list[str]) -> tuple[object, list[str]]:
    """The arguments of `lagom run`, and the command behind them."""
    at = command.index("lagom")
    parsed, unknown = full_parser("run")[0].parse_known_args(command[at + 1 :])
    assert unknown == []
    return parsed, command[command.index("--", at) + 1 :]


def test_the_slurm_script_starts_one_torchrun_per_node_below_one_folder(tmp_path: Path) -> None:
    """With stand-ins for Slurm's two commands, of which srun says what it was to start."""
    for name, body in (("srun", 'printf "%s\\n" "$@"'), ("scontrol", 'printf "node7\\nnode8\\n"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o700)
    given = {"SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_NNODES": "2", "SCRATCH": "/scratch"}
    done = subprocess.run(
        ["bash", str(CLUSTERS / "slurm.sh"), "my train.py", "--steps", "9"],
        env={**os.environ, **given, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    parsed, job = _run_and_job(done.stdout.splitlines())
    assert str(vars(parsed)["out"]) == "/scratch/lagom-42"  # the same on all nodes, and its parent is there
    assert job[:5] == ["torchrun", "--nnodes", "2", "--nproc-per-node", "8"]
    assert job[-5:] == ["--rdzv-endpoint", "node7:29500", "my train.py", "--steps", "9"]


def test_the_pytorchjob_has_what_its_operator_asks_for_and_what_our_command_takes() -> None:
    """When it was written it was valid by the operator's schema (v1.9.0, 600 kB, unknown keys refused)."""
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load((CLUSTERS / "pytorchjob.yaml").read_text(encoding="utf-8"))
    assert (job["apiVersion"], job["kind"], set(job)) == (
        "kubeflow.org/v1",
        "PyTorchJob",
        {"apiVersion", "kind", "metadata", "spec"},
    )
    assert isinstance(job["spec"]["nprocPerNode"], str)
    assert set(job["spec"]["pytorchReplicaSpecs"]) == {"Master", "Worker"}
    for replicas in job["spec"]["pytorchReplicaSpecs"].values():
        pod = replicas["template"]["spec"]
        (container,) = pod["containers"]
        assert container["name"] == "pytorch"
        assert container["resources"]["limits"]["nvidia.com/gpu"] == int(job["spec"]["nprocPerNode"])
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
        assert all(isinstance(word, str) for word in container["command"])
        parsed, command = _run_and_job(container["command"])
        assert str(vars(parsed)["out"]).startswith(mounts["lagom"])
        assert command[0] == "torchrun"  # its numbers are in the environment
        assert all(isinstance(variable["value"], str) for variable in container["env"])


def test_the_ray_example_takes_public_names_alone() -> None:
    """It ran on two gloo workers; Ray is not among what tests install."""
    tree = ast.parse((CLUSTERS / "ray_train.py").read_text(encoding="utf-8"))
    taken = {
        (node.module, alias.name) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    ours = {name for module, name in taken if module and module.startswith("lagom_overlap")}
    assert ours == {"OnlineTuner", "installed_library"}
    assert ours <= set(lagom_overlap.__all__)
