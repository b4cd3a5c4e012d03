"""How a plan is started: the files are valid, and what they run is right."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from superscaler.cluster import Cluster
from superscaler.cluster.start import Start, how_to_start, job_name, kubernetes, slurm, torchrun

OPTIONS = ["--steps", "9", "--save", "a folder's own"]
# What a job on two servers would run, with the number of the server.
STUBS = {
    "scontrol": 'test "$*" = "show hostnames n[1-2]" && printf "n1\\nn2\\n"',
    "srun": 'while [[ "$1" == -* ]]; do shift; done\nfor n in 0 1; do SLURM_NODEID=$n "$@"; done',
    "torchrun": 'printf "%s\\n" "$@" ""',
}
JOB = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "12345", "SLURM_CPUS_ON_NODE": "8"}


def start(cluster: str, restarts: int = 0) -> Start:
    program = Path("plans/My_Plan/run.py")
    return Start(
        cluster=Cluster.parse(cluster),
        program=program,
        options=OPTIONS,
        restarts=restarts,
        name=job_name(program.parent),
    )


def test_one_server_needs_no_rendezvous() -> None:
    assert torchrun(start("local:2", restarts=3)) == (
        "torchrun --nproc-per-node 2 --max-restarts 3 plans/My_Plan/run.py --steps 9 --save 'a folder'\"'\"'s own'"
    )


def test_several_servers_run_the_same_command() -> None:
    assert how_to_start(Cluster.parse("v100:4x8"), Path("run.py")) == (
        "start it on each of 4 servers, one of which is HOST, with: "
        "torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 run.py"
    )


@pytest.mark.parametrize(("cluster", "gpus"), [("v100:2x8", ["#SBATCH --gpus-per-node=8"]), ("local:8", [])])
def test_a_slurm_job_asks_for_the_servers_of_the_plan(cluster: str, gpus: list[str]) -> None:
    text = slurm(start(cluster), time="1-00:00:00", partition="long")
    asked = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    servers = Cluster.parse(cluster).servers
    wanted = ["--job-name=my-plan", f"--nodes={servers}", "--time=1-00:00:00", "--partition=long", "--exclusive"]
    assert {*gpus, *(f"#SBATCH {option}" for option in wanted)} <= set(asked)
    assert [line for line in asked if "gpus" in line] == gpus


def test_a_slurm_script_starts_torchrun_on_every_server(tmp_path: Path) -> None:
    for name, code in STUBS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{code}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "job.sh").write_text(slurm(start("v100:2x8", restarts=1)))
    subprocess.run(["bash", "-n", tmp_path / "job.sh"], check=True)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", tmp_path / "job.sh"], env={**JOB, "PATH": path}, capture_output=True, text=True, check=True
    )
    meeting = ["--master-addr", "n1", "--master-port", "22345"]
    program = [str(Path("plans/My_Plan/run.py").resolve()), *OPTIONS]
    sizes = ["--nnodes", "2", "--nproc-per-node", "8", "--max-restarts", "1"]
    assert [server.split("\n") for server in done.stdout.removesuffix("\n\n").split("\n\n")] == [
        ["--node-rank", str(number), *meeting, *sizes, *program] for number in range(2)
    ]


def test_a_kubernetes_job_has_a_pod_a_server_and_a_name_for_the_first(tmp_path: Path) -> None:
    service, job = yaml.safe_load_all(kubernetes(start("v100:2x8", restarts=1), "image:1", "disk"))
    assert (service["kind"], service["apiVersion"], job["kind"], job["apiVersion"]) == (
        "Service",
        "v1",
        "Job",
        "batch/v1",
    )
    assert service["spec"] == {
        "clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"job-name": job["metadata"]["name"]},
    }  # fmt: skip
    spec: Any = job["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    pod = spec["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"] == "my-plan"
    (container,) = pod["containers"]
    command = " ".join(container["command"])
    assert "--nnodes 2 --nproc-per-node 8 --max-restarts 1 --node-rank $(JOB_COMPLETION_INDEX) " in command
    assert "--master-addr my-plan-0.my-plan --master-port 29500 /shared/My_Plan/run.py --steps 9" in command
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "disk"}


def test_a_job_without_gpus_asks_for_none() -> None:
    _, job = yaml.safe_load_all(kubernetes(start("local:2"), "image", "disk"))
    assert "resources" not in job["spec"]["template"]["spec"]["containers"][0]


@pytest.mark.parametrize(
    ("folder", "name"), [("/a/b/4 Big Plan_2/", "big-plan-2"), ("/", "superscaler"), ("é", "superscaler")]
)
def test_the_name_of_a_job_is_one_that_kubernetes_takes(folder: str, name: str) -> None:
    assert job_name(Path(folder)) == name
