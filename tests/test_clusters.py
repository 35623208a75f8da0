"""The files in scripts/clusters: started where this machine can, and held against published schemas where it cannot."""

import shlex
import signal
import subprocess
import sys

import psutil
import pytest
import yaml
from colossal_vit.main import read_config
from colossal_vit.parallel.layout import Layout
from colossal_vit.results import read_metrics
from kubeflow_trainer_api import models

import fork_ranks
import launchers
import schemas
import training

FOLDER = fork_ranks.ROOT / "scripts/clusters"
SCHEMAS = {
    "Service": models.IoK8sApiCoreV1ServiceSpec,
    "Job": models.IoK8sApiBatchV1JobSpec,
    "TrainJob": models.TrainerV1alpha1TrainJobSpec,
}
KUBERNETES, KUBEFLOW, SKYPILOT = "kubernetes_job.yaml", "kubeflow_trainjob.yaml", "skypilot.yaml"


def documents(name):
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


@pytest.mark.parametrize("name", [KUBERNETES, KUBEFLOW])
def test_a_kubernetes_file_has_only_what_its_schema_has(name):
    """Kubeflow's package has that of Kubernetes, too. It drops what it does not know."""
    for document in documents(name):
        assert SCHEMAS[document["kind"]].from_dict(document["spec"]).to_dict() == document["spec"]


def test_the_pods_of_a_job_are_the_ranks_that_its_command_names():
    service, job = documents(KUBERNETES)
    name, spec = job["metadata"]["name"], job["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    assert f"--world_size {spec['completions']} --host {name}-0.{service['metadata']['name']} " in container["args"][0]
    assert spec["parallelism"] == spec["completions"]
    assert spec["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name}
    rules = {rule["action"]: rule["onExitCodes"]["values"] for rule in spec["podFailurePolicy"]["rules"][:2]}
    assert rules == {"FailJob": [2], "Ignore": [75]}


@pytest.mark.parametrize(("name", "gpus", "batch"), [(KUBERNETES, 2, 256), (KUBEFLOW, 16, 32768), (SKYPILOT, 8, 32768)])
def test_the_command_in_a_file_fits_its_gpus(name, gpus, batch):
    """And has the global batch of the recipe."""
    document = documents(name)[-1]
    if name == KUBERNETES:
        (container,) = document["spec"]["template"]["spec"]["containers"]
        folder, said = container["workingDir"], container["args"][0]
    else:
        said = document["run"] if name == SKYPILOT else document["spec"]["trainer"]["args"][0]
        folder = said.split("cd ")[1].split()[0]
    words = shlex.split(said.replace("$JOB_COMPLETION_INDEX", "0").replace("\\\n", " "))
    (start,) = (number for number, word in enumerate(words) if word.startswith("train"))
    path, argv = fork_ranks.ROOT / folder.split("/")[-1] / words[start], words[start + 1 :]
    config = argv.index("--config") + 1
    argv[config] = str(path.parent / argv[config])
    script = schemas.script(str(path.relative_to(fork_ranks.ROOT)))
    resolved, _ = read_config(script.parse(argv))
    assert Layout.of(resolved, gpus).global_batch(resolved) == batch


def script(output, steps, **values):
    """A train script and its flags."""
    return ["train_hybrid.py", "--config", training.CONFIG, *launchers.small(output, 1, steps, **values)]


def test_submitit_stops_a_run_and_resumes_it(tmp_path):
    """Told so by the signal that SLURM sends before the time limit; as many steps as an undisturbed run, each once."""
    output, steps = tmp_path / "run", 60
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [sys.executable, str(FOLDER / "submitit_job.py"), "--cluster", "local", "--gpus", "0"]
    command += ["--folder", str(tmp_path / "logs"), *launcher, *script(output, steps, NUM_EPOCHS=100)]
    with subprocess.Popen(command, cwd=launchers.FOLDER, env=launchers.environment()) as job:
        launchers.wait_until(lambda: launchers.steps_on_record(output) >= 2, "no step was made")
        (controller,) = psutil.Process(job.pid).children()
        (task,) = controller.children()
        task.send_signal(signal.SIGUSR2)
        assert job.wait(fork_ranks.PATIENCE) == 0
    assert [record["step"] for record in read_metrics(output)[0]] == list(range(1, steps + 1))
    said = "".join(path.read_text() for path in (tmp_path / "logs").glob("*.err"))
    assert "stopped by SIGTERM after step" in said
    assert "resuming from" in "".join(path.read_text() for path in (tmp_path / "logs").glob("*.out"))


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="Ray has no package for this Python")
def test_ray_starts_torchrun_and_hands_on_its_exit_code(tmp_path):
    command = [sys.executable, str(FOLDER / "ray_job.py"), "--gpus", "0"]
    for flags, expected in (([], 0), (["--set", "DEPTH=0"], 2)):
        code, said = launchers.run([*command, *script(tmp_path / "run", 3), *flags], RAY_USAGE_STATS_ENABLED="0")
        assert code == expected, said
    assert "DEPTH = 0" in said
    assert len(read_metrics(tmp_path / "run")[0]) == 3
