"""What docs/many-machines.md asks clusters to do, checked as far as it can be without one."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from halfstep.cli.main import main

TEXT = (Path(__file__).parents[2] / "docs" / "many-machines.md").read_text(encoding="utf-8")
SCRIPTS = re.findall(r"^```sh\n(.*?)^```$", TEXT, re.M | re.S)
(JOB,) = re.findall(r"^```yaml\n(.*?)^```$", TEXT, re.M | re.S)
SPEC = {"runPolicy", "elasticPolicy", "pytorchReplicaSpecs", "nprocPerNode"}
ELASTIC = {"minReplicas", "maxReplicas", "rdzvBackend", "rdzvPort", "rdzvHost", "rdzvId", "rdzvConf", "standalone", "maxRestarts"}
REPLICAS = {"replicas", "template", "restartPolicy"}


@pytest.mark.parametrize("script", SCRIPTS, ids=["torchrun", "restarts", "slurm"])
def test_scripts_are_bash(script: str) -> None:
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def commands() -> list[list[str]]:
    """The words behind each `torchrun`."""
    joined = [line for script in SCRIPTS for line in script.replace("\\\n", " ").splitlines() if "torchrun " in line]
    job = yaml.safe_load(JOB)["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    return [*(shlex.split(line.partition("torchrun ")[2]) for line in joined), job["args"]]


@pytest.mark.parametrize("words", commands(), ids=["torchrun", "restarts", "slurm", "kubernetes"])
def test_torchrun_and_halfstep_know_every_word(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["4" if word == "$SLURM_NNODES" else word for word in words]
    args = get_args_parser().parse_args(words)
    assert (args.module, args.training_script) == (True, "halfstep")
    with pytest.raises(SystemExit) as ended:
        main([*args.training_script_args, "--help"])
    assert ended.value.code == 0
    assert "--run-folder" in capsys.readouterr().out


def test_the_job_has_fields_that_the_operator_knows() -> None:
    job: dict[str, Any] = yaml.safe_load(JOB)
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert job["spec"].keys() <= SPEC
    assert isinstance(job["spec"]["nprocPerNode"], str)
    assert job["spec"]["elasticPolicy"].keys() <= ELASTIC
    (kind, worker), *others = job["spec"]["pytorchReplicaSpecs"].items()
    assert (kind, others) == ("Worker", []), "an elastic job has workers alone"
    assert worker.keys() <= REPLICAS
    assert worker["restartPolicy"] in ("Always", "OnFailure", "Never", "ExitCode")
    pod = worker["template"]["spec"]
    assert [container["name"] for container in pod["containers"]] == ["pytorch"], "the name that the operator looks for"
    mounted = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
