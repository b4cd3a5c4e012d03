"""Commands and job files that start a plan: torchrun on one server or on several, Slurm, Kubernetes."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from superscaler.cluster.cluster import Cluster
from superscaler.cluster.links import LOCAL
from superscaler.errors import InputError, printable

_PORT = "29500"
# The path at which the containers of a pod mount their claim.
_MOUNT = "/shared"
# option -> the pattern that a scheduler takes, a description and an example
_FORMS = {
    "time": (r"\d+(:\d\d?){0,2}|\d+-\d\d?(:\d\d?){0,2}|infinite|UNLIMITED", "limit of a job", "1-12:00:00"),
    "partition": (r"\w[\w.+-]*(,\w[\w.+-]*)*", "list of partitions", "long or long,short"),
    "image": (r"\w[\w.:/@-]*", "image of a container", "registry/superscaler:1"),
    "claim": (r"[a-z0-9]([a-z0-9.-]{,251}[a-z0-9])?", "name of a PersistentVolumeClaim", "my-disk"),
}


@dataclass(frozen=True, kw_only=True)
class Start:
    """The program to start, its options, cluster and name, and the number of restarts of all ranks after a failure."""

    cluster: Cluster
    program: Path
    options: Sequence[str] = ()
    restarts: int = 0
    name: str = "superscaler"

    @property
    def sizes(self) -> list[str]:
        """The options of torchrun for the number of ranks on this server, and of restarts."""
        restarts = ["--max-restarts", str(self.restarts)] if self.restarts else []
        return ["--nproc-per-node", str(self.cluster.devices_per_server), *restarts]

    @property
    def about(self) -> str:
        servers, devices = self.cluster.servers, self.cluster.devices_per_server
        # Printable, because a comment ends with its line.
        return f"{printable(str(self.program.parent))} on {servers} x {devices} devices ({self.cluster.name})"


def torchrun(start: Start) -> str:
    """Return a command. Several servers all run the same one, with the name of one of them for HOST.

    >>> torchrun(Start(cluster=Cluster.preset("v100", 2, 8), program=Path("run.py"), options=["--steps", "9"]))
    'torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 run.py --steps 9'
    """
    servers = start.cluster.servers
    several = ["--nnodes", str(servers)] if servers > 1 else []
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"HOST:{_PORT}"] if servers > 1 else []
    return shlex.join(["torchrun", *several, *start.sizes, *meeting, str(start.program), *start.options])


def how_to_start(cluster: Cluster, program: Path) -> str:
    """Return half a sentence with the command.

    >>> how_to_start(Cluster.local(4), Path("plan/run.py"))
    'start it with: torchrun --nproc-per-node 4 plan/run.py'
    """
    several = f" on each of {cluster.servers} servers, one of which is HOST," if cluster.servers > 1 else ""
    return f"start it{several} with: {torchrun(Start(cluster=cluster, program=program))}"


def slurm(start: Start, time: str | None = None, partition: str | None = None) -> str:
    """Return a script for sbatch. Raises InputError for an invalid time or partition."""
    _check(time=time, partition=partition)
    gpus = None if start.cluster.kind == LOCAL else start.cluster.devices_per_server
    settings = {
        "job-name": start.name, "nodes": start.cluster.servers, "ntasks-per-node": 1, "gpus-per-node": gpus,
        "time": time, "partition": partition, "signal": "TERM@90", "output": "%x-%j.out",
    }  # fmt: skip
    return _SLURM.format(
        about=start.about,
        settings="\n".join(f"#SBATCH --{key}={value}" for key, value in settings.items() if value is not None),
        sizes=shlex.join(["--nnodes", str(start.cluster.servers), *start.sizes]),
        program=shlex.join([str(start.program.resolve()), *start.options]),
    )


_SLURM = """#!/bin/bash
# Trains {about}. Written by superscaler launch slurm; start it with sbatch.
{settings}
#SBATCH --exclusive

set -euo pipefail

# The first server keeps the store by which all ranks find each other, on a port of this job.
read -r head < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
port=$((20000 + SLURM_JOB_ID % 10000))

srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_ON_NODE" \\
  bash -c 'exec torchrun --node-rank "$SLURM_NODEID" "$@"' - --master-addr "$head" --master-port "$port" \\
  {sizes} \\
  {program}
"""


def kubernetes(start: Start, image: str, claim: str) -> str:
    """Return an Indexed Job with a pod a server, and the headless Service by which pods find each other, as YAML.

    The claim is mounted in all pods, and has the plan's folder at its top. Raises InputError for an invalid image or
    claim.
    """
    _check(image=image, claim=claim)
    import yaml

    name, cluster = start.name, start.cluster
    program = f"{_MOUNT}/{start.program.resolve().parent.name}/{start.program.name}"
    # Kubernetes puts the value of a variable in the place of $(NAME).
    texts = [text.replace("$(", "$$(") for text in (program, *start.options)]
    meeting = ["--node-rank", "$(JOB_COMPLETION_INDEX)", "--master-addr", f"{name}-0.{name}", "--master-port", _PORT]
    container: dict[str, Any] = {
        "name": "train",
        "image": image,
        "workingDir": _MOUNT,
        "command": ["torchrun", "--nnodes", str(cluster.servers), *start.sizes, *meeting, *texts],
        "volumeMounts": [{"name": "shared", "mountPath": _MOUNT}, {"name": "memory", "mountPath": "/dev/shm"}],
    }
    if cluster.kind != LOCAL:
        container["resources"] = {"limits": {"nvidia.com/gpu": cluster.devices_per_server}}
    volumes = [
        {"name": "shared", "persistentVolumeClaim": {"claimName": claim}},
        {"name": "memory", "emptyDir": {"medium": "Memory"}},
    ]
    pod = {
        "subdomain": name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 90,
        "containers": [container],
        "volumes": volumes,
    }
    job = {
        "completionMode": "Indexed",
        "completions": cluster.servers,
        "parallelism": cluster.servers,
        "backoffLimit": start.restarts * cluster.servers,
        "template": {"spec": pod},
    }
    service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"job-name": name}}
    found: list[Any] = [
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": service},
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": job},
    ]
    head = f"# Trains {start.about}. Written by superscaler launch kubernetes; start it with kubectl apply -f.\n"
    return head + str(yaml.safe_dump_all(found, sort_keys=False))


def _check(**options: str | None) -> None:
    for name, value in options.items():
        form, kind, example = _FORMS[name]
        if value is not None and not re.fullmatch(form, value, re.ASCII):
            raise InputError(f"--{name} {value[:80]!r} is no {kind}; write it as {example}.")


def job_name(directory: Path) -> str:
    """Return a valid name of Kubernetes for a folder: letters, digits and '-', a letter first, at most 40.

    >>> job_name(Path("plans/GPT_2.tiny"))
    'gpt-2-tiny'
    """
    name = re.sub("[^a-z0-9]+", "-", directory.resolve().name.lower()).lstrip("-0123456789")
    return name[:40].rstrip("-") or "superscaler"
