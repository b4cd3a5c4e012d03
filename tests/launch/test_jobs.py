"""How a plan is started: the files are valid, and what they run is right."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from superscaler.cluster import Cluster
from superscaler.errors import InputError
from superscaler.launch.jobs import Start, job_name, kubernetes, slurm, torchrun
from superscaler.train.options import check_words

OPTIONS = ["--steps", "9", "--save", "a folder's own"]
# What a job on two servers would run, with the number of the server.
STUBS = {
    "scontrol": 'test "$*" = "show hostnames n[1-2]" && printf "n1\\nn2\\n"',
    "srun": 'while [[ "$1" == -* ]]; do shift; done\nfor n in 0 1; do SLURM_NODEID=$n "$@"; done',
    "torchrun": r'printf "%s\1" "$@"; printf "\2"',
}
JOB = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "12345", "SLURM_CPUS_ON_NODE": "8"}


def start(cluster: str, restarts: int = 0) -> Start:
    program = Path("plans/My_Plan/run.py")
    name = job_name(program.parent)
    return Start(cluster=Cluster.parse(cluster), program=program, options=OPTIONS, restarts=restarts, name=name)


def test_one_server_needs_no_rendezvous() -> None:
    assert torchrun(start("local:2", restarts=3)) == (
        "torchrun --nproc-per-node 2 --max-restarts 3 plans/My_Plan/run.py --steps 9 --save 'a folder'\"'\"'s own'"
    )


@pytest.mark.parametrize(("cluster", "gpus"), [("v100:2x8", ["#SBATCH --gpus-per-node=8"]), ("local:8", [])])
def test_a_slurm_job_asks_for_the_servers_of_the_plan(cluster: str, gpus: list[str]) -> None:
    text = slurm(start(cluster), time="1-00:00:00", partition="long")
    asked = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    servers = Cluster.parse(cluster).servers
    wanted = ["--job-name=my-plan", f"--nodes={servers}", "--time=1-00:00:00", "--partition=long", "--exclusive"]
    assert {*gpus, *(f"#SBATCH {option}" for option in wanted)} <= set(asked)
    assert [line for line in asked if "gpus" in line] == gpus


def run_job(script: str, folder: Path) -> list[list[str]]:
    """Run a script as Slurm would; return the arguments of torchrun on each server."""
    for name, code in STUBS.items():
        (folder / name).write_text(f"#!/bin/bash\n{code}\n")
        (folder / name).chmod(0o755)
    (folder / "job.sh").write_text(script)
    subprocess.run(["bash", "-n", folder / "job.sh"], check=True)
    environment = {**JOB, "PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", folder / "job.sh"], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    return [server.split("\1")[:-1] for server in done.stdout.split("\2")[:-1]]


def test_a_slurm_script_starts_torchrun_on_every_server(tmp_path: Path) -> None:
    meeting = ["--master-addr", "n1", "--master-port", "22345"]
    program = [str(Path("plans/My_Plan/run.py").resolve()), *OPTIONS]
    sizes = ["--nnodes", "2", "--nproc-per-node", "8", "--max-restarts", "1"]
    assert run_job(slurm(start("v100:2x8", restarts=1)), tmp_path) == [
        ["--node-rank", str(number), *meeting, *sizes, *program] for number in range(2)
    ]


# A folder and options that a shell, sbatch, YAML or Kubernetes would read as more than text.
HOSTILE = Path("plans") / "p\ntouch injected\n#SBATCH --hold\n---\nkind: Pod $(touch injected)\u2028x"
TEXTS = ["$(touch injected)", "`touch injected`", "a\ntouch injected\n#SBATCH", "'; touch injected; '", "$(HOME)"]


def test_no_text_is_more_than_text_in_a_job(tmp_path: Path) -> None:
    found = dataclasses.replace(start("v100:2x8"), program=HOSTILE / "run.py", options=TEXTS)
    script = slurm(found)
    head = script.partition("set -euo")[0]
    assert [line for line in head.splitlines() if not line.startswith("#")] == [""]
    assert "--hold" not in [line.split()[1] for line in head.splitlines() if line.startswith("#SBATCH")]
    assert [server[-len(TEXTS) - 1 :] for server in run_job(script, tmp_path)] == [
        [str(HOSTILE.resolve() / "run.py"), *TEXTS]
    ] * 2
    (tmp_path / "command").write_text(torchrun(found).replace("torchrun", "printf '%s\\0'", 1))
    done = subprocess.run(["bash", tmp_path / "command"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split("\0")[-len(TEXTS) - 2 :] == [str(HOSTILE / "run.py"), *TEXTS, ""]
    service, job = yaml.safe_load_all(kubernetes(found, "image:1", "disk"))
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    # Kubernetes puts variables in the place of $(NAME), and $( in that of $$(.
    assert [text.replace("$$(", "$(") for text in container["command"][-len(TEXTS) :]] == TEXTS
    assert container["command"][-1] == "$$(HOME)"
    assert not list(tmp_path.glob("injected*"))


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (slurm, {"partition": "long\n#SBATCH --hold"}),
        (slurm, {"time": "1:00; touch injected"}),
        (kubernetes, {"image": "image:1\nkind: Pod", "claim": "disk"}),
        (kubernetes, {"image": "image:1", "claim": "../disk"}),
    ],
)
def test_what_a_scheduler_cannot_read_is_refused(kind: Any, values: dict[str, str]) -> None:
    with pytest.raises(InputError, match=r"^--\w+ '.*' is no") as caught:
        kind(start("v100:2x8"), **values)
    assert len(str(caught.value).splitlines()) == 1


def test_a_kubernetes_job_has_a_pod_a_server_and_a_name_for_the_first(tmp_path: Path) -> None:
    service, job = yaml.safe_load_all(kubernetes(start("v100:2x8", restarts=1), "image:1", "disk"))
    kinds = [(found["kind"], found["apiVersion"]) for found in (service, job)]
    assert kinds == [("Service", "v1"), ("Job", "batch/v1")]
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
    _, job = yaml.safe_load_all(kubernetes(start("local:2"), "image", "disk"))
    assert "resources" not in job["spec"]["template"]["spec"]["containers"][0]


@pytest.mark.parametrize(
    ("folder", "name"), [("/a/b/4 Big Plan_2/", "big-plan-2"), ("/", "superscaler"), ("é", "superscaler")]
)
def test_the_name_of_a_job_is_one_that_kubernetes_takes(folder: str, name: str) -> None:
    assert job_name(Path(folder)) == name


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--stepz", "9"], "options of run.py, after --: unknown option '--stepz'; did you mean '--steps'"),
        (["--steps", "many"], "options of run.py, after --: argument --steps: invalid int value: 'many'"),
        (
            ["--on-failed-save", "wait"],
            "after --: argument --on-failed-save: invalid choice: 'wait'",
        ),
        (["another/plan"], "options of run.py, after --: unknown option 'another/plan'"),
        (["--steps", "0"], "0 steps cannot be trained"),
        (["--profile", "3"], "--profile N records N steps into the folder of --run DIR"),
    ],
)
def test_options_that_run_py_would_refuse_are_in_no_job_file(words: list[str], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        check_words(words)
    check_words(OPTIONS)
