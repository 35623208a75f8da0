"""mpirun, torchrun, torch.distributed.launch, by hand: the same losses. Two "nodes" joined by a cable, and its end."""

import ctypes
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch.distributed as dist
from colossal_vit.checkpoint import storage
from colossal_vit.errors import UserError
from colossal_vit.launch import agreement
from colossal_vit.launch.flags import get_parser
from colossal_vit.launch.launchers import Rendezvous
from colossal_vit.launch.rendezvous import join_store
from colossal_vit.results import read_metrics
from colossalai.context import Config

import fork_ranks
import launchers
import training
import warm
from launchers import ip

RECORD = 1 + 3 * 32 * 32  # bytes of an image of CIFAR-10, with its label
PIPELINE = ["train_hybrid.py", "--config", training.CONFIG]


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """Losses of 2 and of 4 processes started as forks."""
    return {size: launchers.reference(tmp_path_factory.mktemp("reference") / "run", size) for size in (2, 4)}


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """The variables of a shell whose `python` and `torchrun` start at once."""
    with warm.Warm(tmp_path_factory.mktemp("warm")) as started:
        path = f"{started.bin}:{launchers.environment()['PATH']}"
        yield dict(started.environment, PATH=path, PYTHONPATH=str(fork_ranks.ROOT))


@pytest.mark.parametrize(("size", "host"), [(2, []), (4, ["--host", "127.0.0.1"])])
def test_run_under_mpirun_has_the_losses_of_one_process(size, host, references, programs, tmp_path):
    launchers.need(["openmpi-bin"], "mpirun")
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(size)]
    command = [
        *mpirun,
        "python",
        *PIPELINE,
        *launchers.small(tmp_path / "run"),
        "--port",
        str(fork_ranks.free_port()),
        *host,
    ]
    code, said = launchers.run(command, **programs)  # test_pages.py types mpirun as users do
    assert code == 0, said
    assert f"{size - 1} of {size} on " in said
    assert "started by mpirun, rendezvous at" in said
    assert launchers.losses(tmp_path / "run") == references[size]


@pytest.mark.parametrize(
    ("launcher", "flags"),
    [
        ("torchrun --standalone --nproc_per_node 2", ["--port", "29500"]),
        ("torchrun --nnodes 1 --nproc_per_node 2 --rdzv_backend c10d --rdzv_endpoint localhost:{port}", []),
        ("python -m torch.distributed.launch --nproc_per_node 2 --master_addr localhost --master_port {port}", []),
    ],
)
def test_run_under_each_launcher_of_torch_has_the_same_losses(launcher, flags, references, programs, tmp_path):
    command = [*launcher.format(port=fork_ranks.free_port()).split(), *PIPELINE, *launchers.small(tmp_path / "run")]
    code, said = launchers.run([*command, *flags], **programs)
    assert code == 0, said
    assert "started by torchrun, rendezvous at" in said
    assert ("--port ignored: torchrun says where the ranks meet" in said) == bool(flags)
    assert launchers.losses(tmp_path / "run") == references[2]


def test_own_torchrun_ends_with_the_line_and_the_exit_code_of_its_ranks(programs, tmp_path):
    flags = ["--config", training.CONFIG, "--output", str(tmp_path / "run"), "--set", "DEPHT=2"]
    launcher = "python -m colossal_vit.launch.torchrun --standalone --nproc_per_node 2"
    code, said = launchers.run([*launcher.split(), "train_hybrid.py", *flags], **programs)
    assert code == 2, said
    assert re.fullmatch(r"train_hybrid\.py: error: .*unknown key DEPHT; did you mean DEPTH\?.*", said.splitlines()[-1])
    assert "Traceback" not in said


# What the published tutorials type, in each folder. Other pages than these have the rest, and test_pages.py types it.
LAUNCH = "python -m torch.distributed.launch --nproc_per_node 2"
PUBLISHED = [
    (training.IMAGENET, f"{LAUNCH} train.py --config ./config.py --host localhost --port 29500", "torchrun"),
    (training.IMAGENET, "python train.py --config ./config.py {by_hand} --host localhost --port {port}", "hand"),
    (training.IMAGENET, "mpirun -n 2 python train.py --config ./config.py --host localhost --port {port}", "mpirun"),
    (
        training.DATA_PARALLEL,
        "python -m torch.distributed.run --standalone --nproc_per_node 2 train_dp.py --config "
        "./configs/config_data_parallel.py",
        "torchrun",
    ),
    (
        training.DATA_PARALLEL,
        f"{LAUNCH} --master_addr localhost --master_port {{port}} train_dp.py --config "
        "./configs/config_data_parallel.py",
        "torchrun",
    ),
    (training.CALTECH101, f"{LAUNCH} train.py --config ./config/config_AMP_torch.py --port 29500", "torchrun"),
    (training.CALTECH101, "mpirun -n 2 python train.py --config ./config/config_AMP_naive.py", "mpirun"),
]


@pytest.mark.parametrize(
    ("script", "typed", "by"), PUBLISHED, ids=[f"{script}: {typed}" for script, typed, _ in PUBLISHED]
)
def test_a_published_command_trains(script, typed, by, programs, tmp_path):
    if by == "mpirun":
        launchers.need(["openmpi-bin"], "mpirun")
        programs = {**programs, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        programs["OMPI_MCA_rmaps_base_oversubscribe"] = "1"
    values = {key: value for key, value in training.SMALL[script].items() if key != "fp16"}
    flags = ["--output", str(tmp_path / "run"), "--max-steps", "1", *training.set_flags({**values, "SYNTHETIC": True})]
    port, folder = fork_ranks.free_port(), (fork_ranks.ROOT / script).parent
    hands = [f"--rank {rank} --world_size 2" for rank in range(2)] if by == "hand" else [""]
    commands = [[*typed.format(port=port, by_hand=hand).split(), *flags] for hand in hands]
    answers = at_once([partial(launchers.run, command, folder, **programs) for command in commands])
    said = "".join(text for _, text in answers)
    assert {code for code, _ in answers} == {0}, said
    assert f"ranks 0 to 1 of 2 on {socket.gethostname()} (cpu, gloo), started by {by}, rendezvous at" in said
    assert (" ignored: torchrun says where the ranks meet" in said) == (by == "torchrun" and "--port " in typed)
    assert len(launchers.losses(tmp_path / "run")) == 1


@pytest.mark.parametrize(
    "launcher",
    ["torchrun --standalone --nproc_per_node 2", "mpirun --allow-run-as-root --oversubscribe -n 2 python"],
    ids=["torchrun", "mpirun"],
)
def test_ranks_end_with_their_launcher(launcher, tmp_path):
    """Killed so that it can tell nobody: with a checkpoint, and the same command does not find them in its way."""
    if "mpirun" in launcher:
        launchers.need(["openmpi-bin"], "mpirun")
    output = tmp_path / "run"
    flags = [*launchers.small(output, steps=20_000, NUM_EPOCHS=1000), "--timeout", "120"]
    port = ["--port", str(fork_ranks.free_port())] if "mpirun" in launcher else []
    command = [*launcher.split(), *PIPELINE, *flags, *port]
    with open(tmp_path / "log", "w") as log:
        job = subprocess.Popen(command, cwd=launchers.FOLDER, env=launchers.environment(), stdout=log, stderr=log)
    launchers.wait_until(lambda: launchers.steps_on_record(output) > 5, (tmp_path / "log").read_text)
    job.kill()
    job.wait()
    ranks = ["pgrep", "-f", str(output)]
    launchers.wait_until(
        lambda: subprocess.run(ranks, stdout=subprocess.DEVNULL).returncode, (tmp_path / "log").read_text
    )
    last = read_metrics(output)[0][-1]["step"]
    assert storage.step_of(storage.newest(output / storage.FOLDER)[0].path) == last


def test_a_restarted_group_goes_on(tmp_path):
    """torchrun --max-restarts: one rank is killed; all start again, from the newest checkpoint."""
    torchrun = ["torchrun", "--standalone", "--nproc_per_node", "2", "--max-restarts", "1", "--monitor-interval", "1"]
    flags = ["--config", training.CONFIG, "--output", str(tmp_path / "run"), "--max-steps", "60"]
    values = {**training.MODEL, "BATCH_SIZE": 16, "parallel.pipeline": 2, "NUM_EPOCHS": 1000}
    values |= {"checkpoint.every_steps": 2}
    command = [*torchrun, "train_hybrid.py", *flags, *training.set_flags(values)]
    with open(tmp_path / "log", "w") as log:
        job = subprocess.Popen(command, cwd=launchers.FOLDER, env=launchers.environment(), stdout=log, stderr=log)
    launchers.wait_until(lambda: launchers.steps_on_record(tmp_path / "run") > 5, (tmp_path / "log").read_text)
    children = subprocess.run(["pgrep", "-P", str(job.pid)], capture_output=True, text=True).stdout.split()
    os.kill(int(children[-1]), 9)
    assert job.wait(timeout=fork_ranks.PATIENCE) == 0, (tmp_path / "log").read_text()
    assert re.search(r"resuming from \S+step-\d+: step \d+", (tmp_path / "log").read_text())
    assert [record["step"] for record in read_metrics(tmp_path / "run")[0]] == list(range(1, 61))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "run"], "nothing was set aside"


# ---------------------------------------------------------------------------------------------------------------------
# Meeting
# ---------------------------------------------------------------------------------------------------------------------


def at_once(functions):
    """What each of these functions returns, called in threads."""
    with ThreadPoolExecutor(len(functions)) as pool:
        return list(pool.map(lambda function: function(), functions))


def by_hand(output, world_sizes, ranks, host, port, *more, **values):
    """The command lines of processes started by hand."""
    common = [
        "--config",
        training.CONFIG,
        "--host",
        host,
        "--port",
        str(port),
        *launchers.small(output, **values),
    ]
    return [
        [*common, "--rank", str(rank), "--world_size", str(size), *more]
        for rank, size in zip(ranks, world_sizes, strict=True)
    ]


@pytest.mark.parametrize(
    ("sizes", "ranks", "words"),
    [
        (
            [2],
            [0],
            r"rank 1 of 2 did not come within 4 s \(--timeout\)",
        ),
        ([2], [1], r"rank 1 of 2 cannot reach the others at localhost:\d+: nothing listens there \(--timeout 4\)"),
        (
            [2, 3],
            [0, 1],
            r"rank 1 does not fit rank 0: --world_size is 3 there and 2 on rank 0; give all ranks of a run",
        ),
        ([3, 3, 3], [0, 1, 1], r"rank 1 is there twice: give each process a --rank of its own"),
    ],
    ids=["missing", "nobody", "sizes", "twice"],
)
def test_ranks_that_do_not_fit_end_in_time(sizes, ranks, words, tmp_path):
    argv = by_hand(tmp_path, sizes, ranks, "localhost", fork_ranks.free_port(), "--timeout", "4", stages=1)
    result = fork_ranks.start(training.HYBRID, argv, [{}] * len(argv)).wait()
    assert set(result.codes) == {2}, str(result)
    assert re.search(words, "".join(result.stderr)), str(result)
    assert sum("error: " in line for text in result.stderr for line in text.splitlines()) == 1, str(result)
    assert not re.search("Traceback|frame #", "".join(result.stderr)), str(result)


def places(launcher, port):
    """The environment and flags of two ranks, as a launcher gives them."""
    by_hand = [["--rank", str(rank), "--world_size", "2", "--host", "localhost"] for rank in range(2)]
    flags = [[*(by_hand[rank] if launcher == "none" else []), "--port", port] for rank in range(2)]
    slurm = dict(JOB_ID=7, STEP_ID=0, NTASKS=2, NODELIST="localhost")
    environments = {
        "none": [{}, {}],
        "torch": fork_ranks.by_torchrun(2),
        "openmpi": [
            {f"OMPI_COMM_WORLD_{key}": str(value) for key, value in place.items()}
            for place in (dict(RANK=rank, LOCAL_RANK=rank, SIZE=2, LOCAL_SIZE=2) for rank in range(2))
        ],
        "slurm": [
            {f"SLURM_{key}": str(value) for key, value in {**slurm, "PROCID": rank, "LOCALID": rank}.items()}
            for rank in range(2)
        ],
    }
    return flags, environments[launcher]


@pytest.mark.parametrize(
    ("launcher", "more", "words"),
    [
        (
            "none",
            ["--set", "LEARNING_RATE=5e-3"],
            "rank 1 does not fit rank 0: LEARNING_RATE is 0.005 there and 0.003 ",
        ),
        (
            "openmpi",
            ["--set", "fp16.mode=naive"],
            "rank 1 does not fit rank 0: fp16 is {'mode': 'AMP_TYPE.NAIVE'} there",
        ),
        ("slurm", ["--max-steps", "2"], "rank 1 does not fit rank 0: --max-steps is 2 there and 3 on rank 0"),
        ("torch", ["--set", "DATA={other}"], "rank 0 and rank 1 read different data (content): DATA must be the same"),
        ("none", ["--set", "DATA={fewer}"], "read different data (content, test images 90 → 80)"),
        ("none", ["--set", "DATA={copy}", "--timeout", "599"], None),
    ],
)
def test_ranks_of_one_run_have_one_config_and_the_same_data(launcher, more, words, small_sample, tmp_path):
    """Wherever the data are."""
    port = str(fork_ranks.free_port())
    for name in ("copy", "other", "fewer"):
        shutil.copytree(small_sample, tmp_path / name)
    for name, cut in (("other", 0), ("fewer", 10 * RECORD)):
        file = tmp_path / name / "cifar-10-batches-bin/test_batch.bin"
        content = file.read_bytes()
        file.write_bytes(bytes([content[0], 255 - content[1]]) + content[2 : len(content) - cut])
    common = ["--config", training.CONFIG, *launchers.small(tmp_path / "run"), "--set", f"DATA={small_sample}"]
    flags, environments = places(launcher, port)
    paths = {name: tmp_path / name for name in ("copy", "other", "fewer")}
    argv = [[*common, *flags[0]], [*common, *flags[1], *(word.format(**paths) for word in more)]]
    result = fork_ranks.start(training.HYBRID, argv, environments).wait()
    assert result.codes == [2 if words else 0] * 2, str(result)
    lines = "".join(result.stderr).splitlines()
    assert len(lines) == bool(words), str(result)
    assert not words or words in lines[0]
    assert (tmp_path / "run/metrics.jsonl").exists() == (not words)


class Meeting:
    """Ranks that meet, each in a thread of this process, at a port of their own."""

    def __init__(self):
        self.port, self.stores, self.threads = fork_ranks.free_port(), {}, []

    def start(self, name, rank, run="", world_size=2, timeout=fork_ranks.PATIENCE, launcher="none", **common):
        place = Rendezvous(launcher, rank, rank, world_size, "localhost", self.port, run=run)

        def join():
            try:
                self.stores[name] = join_store(place, timeout, common)
            except UserError as error:
                self.stores[name] = error

        self.threads.append(threading.Thread(target=join))
        self.threads[-1].start()

    def end(self):
        """By name, what each has got: a store, or an error."""
        for thread in self.threads:
            thread.join()
        return self.stores


CONFIG = {"LEARNING_RATE": 1e-3, "fp16": {"mode": "naive", "dtype": "bf16"}}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(LEARNING_RATE=5e-3), "LEARNING_RATE is 0.005 there and 0.001 on rank 0"),
        (dict(fp16={"mode": "naive", "dtype": "fp16"}), "fp16.dtype is 'fp16' there and 'bf16' on rank 0"),
        (dict(fp16=None), "fp16 is None there and {'mode': 'naive', 'dtype': 'bf16'} on rank 0"),
        (dict(EPSILON=1e-6), "EPSILON is 1e-06 there and None on rank 0"),
        (dict(world_size=4, fp16=None), "--world_size is 4 there and 3 on rank 0"),
    ],
)
def test_a_rank_that_differs_is_refused_on_all(changes, words):
    meeting = Meeting()
    for rank in range(3):
        meeting.start(rank, rank, **{"world_size": 3, **CONFIG, **(changes if rank == 2 else {})})
    errors = meeting.end()
    assert {str(error).partition(";")[0] for error in errors.values()} == {f"rank 2 does not fit rank 0: {words}"}
    assert all(error.own is False for error in errors.values()), "rank 0 says it, and no other"


def test_a_rank_that_differs_is_refused_before_all_have_come():
    meeting = Meeting()
    meeting.start(0, 0, world_size=3, **CONFIG)
    meeting.start(1, 1, world_size=3, **{**CONFIG, "SEED": 2})
    assert all("SEED is 2 there" in str(error) for error in meeting.end().values())


RUNS = ["SLURM job 7, step 0", "SLURM job 7, step 1", "mpirun 231997441", "mpirun 231932929", "started by hand"]


@pytest.mark.parametrize(("own", "other"), [(0, 1), (1, 0), (2, 3), (0, 2), (4, 0), (0, 4)])
def test_a_rank_of_another_run_ends_alone(own, other):
    """It comes first; then the others, of whom nobody notices anything."""
    named = [RUNS[run] for run in (own, other)]
    run, stranger = ["" if name == "started by hand" else name for name in named]
    meeting = Meeting()
    meeting.start(0, 0, run)
    meeting.start("stranger", 1, stranger)
    launchers.wait_until(lambda: "stranger" in meeting.stores, "it stays")
    meeting.start(1, 1, run)
    found = meeting.end()
    line = f"rank 1 of this run ({named[1]}) has met another run ({named[0]}) at localhost:{meeting.port}: give each a"
    assert line in str(found["stranger"])
    assert found["stranger"].own
    found[0].set("key", "value")
    assert found[1].get("key") == b"value"


def test_rank_that_comes_too_late_ends_alone():
    meeting = Meeting()
    for rank in range(2):
        meeting.start(rank, rank, **CONFIG)
    meeting.end()
    meeting.start("same rank", 1, **CONFIG)
    meeting.start("rank 0", 0, **CONFIG)
    meeting.start("other world", 2, world_size=3, **CONFIG)
    found = meeting.end()
    found[0].set("key", "value")
    assert found[1].get("key") == b"value"
    assert str(found["same rank"]) == "rank 1 is there twice; the run has started without this process"
    assert "the port is already in use; choose another --port" in str(found["rank 0"])
    assert "--world_size is 3 there and 2 on rank 0" in str(found["other world"])
    assert all(found[name].own for name in ("same rank", "rank 0", "other world"))


def test_runs_that_share_the_store_of_torchruns_agents_do_not_meet(monkeypatch):
    """As with two --rdzv_id at one --rdzv_endpoint."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    meeting = Meeting()
    agents = dist.TCPStore("localhost", meeting.port, is_master=True, wait_for_workers=False)
    for run in "ab":
        for rank in range(2):
            meeting.start((run, rank), rank, run, launcher="torch", SEED=run)
    found = meeting.end()
    for run in "ab":
        found[run, 0].set("key", run)
    assert [found[run, 1].get("key").decode() for run in "ab"] == ["a", "b"]
    del agents


def test_every_flag_counts_or_is_of_one_rank():
    """What a rank alone may have is listed: its place and its paths. A new flag counts until somebody lists it."""
    args = get_parser().parse_args([])
    settled = {"config", "set", "compile", "backend", "world_size"}  # compared as what follows from them
    alone = {"rank", "local_rank", "host", "port", "launcher", "timeout", "output", "wandb", "exits"}
    assert vars(args).keys() & agreement.OF_A_RANK == settled | alone


def test_paths_may_differ_from_node_to_node(monkeypatch):
    monkeypatch.delenv("DATA", raising=False)

    def of(*flags, **values):
        args = get_parser().parse_args(["--output", "a", *flags])
        return agreement.common(args, Config({"SEED": 1, **values}), "gloo")

    one = of("--resume", "/a/step-00000002", DATA="/a")
    assert one == of("--output", "b", "--resume", "/b/step-00000002", DATA="/b")
    assert agreement.first_difference(one, of("--resume", "never", DATA="/a")) == ("--resume", "a path", "never")
    assert agreement.first_difference(one, of("--resume", "/a")) == ("DATA", "set", "not set")


def test_the_code_that_counts_is_the_librarys_the_scripts_and_what_it_imports_beside_it(tmp_path, monkeypatch):
    library, folder = tmp_path / "colossal_vit", tmp_path / "example"
    for path in (library / "launch", folder / "configs"):
        path.mkdir(parents=True)
    monkeypatch.setattr(agreement.colossal_vit, "__file__", str(library / "__init__.py"))
    monkeypatch.setattr(sys, "argv", [str(folder / "train.py")])
    names = ["train", "vit"]
    for name in names:
        (folder / f"{name}.py").write_text("")
        module = types.ModuleType(name)
        module.__file__ = str(folder / f"{name}.py")
        monkeypatch.setitem(sys.modules, f"{name} of a test", module)
    digests = [agreement._code(None)]
    for path, counts in (
        (library / "launch/new.py", True),
        (folder / "vit.py", True),
        (folder / "train.py", True),
        (library / "launch/notes.txt", False),
        (folder / "not_imported.py", False),
        (folder / "configs/config.py", False),
    ):
        path.write_text("pass")
        digests.append(agreement._code(None))
        assert (digests[-1] != digests[-2]) == counts, path


def test_only_the_address_in_use_is_listened_on(tmp_path):
    """Of this machine's addresses, rank 0's port is open at the one that the others were given."""
    port = fork_ranks.free_port()
    argv = by_hand(tmp_path, [2], [0], "127.0.0.1", port, *fork_ranks.FOREVER)
    rank = fork_ranks.start(training.HYBRID, argv, [{}])

    def connects(address):
        try:
            socket.create_connection((address, port), timeout=1).close()
        except OSError:
            return False
        return True

    try:
        launchers.wait_until(lambda: connects("127.0.0.1"), lambda: rank.output(0, "err"))
        assert not connects("127.0.0.2")
        assert not connects("::1")
    finally:
        os.kill(rank.pids[0], 9)
        rank.wait()


# ---------------------------------------------------------------------------------------------------------------------
# Two nodes: network namespaces joined by a pair of virtual interfaces
# ---------------------------------------------------------------------------------------------------------------------

CLONE_NEWNS, MS_BIND, MS_REC, MS_PRIVATE = 0x20000, 0x1000, 0x4000, 0x40000  # as in <sched.h> and <sys/mount.h>
ADDRESSES = {"IPv4": "10.77.0.1", "IPv6": "fd77::1", "name": "node-a"}


class Nodes:
    """Two network namespaces, `a` and `b`, with a cable between them, another interface each, and one /etc/hosts."""

    def __init__(self):
        self.names = [f"{node}-{os.getpid()}" for node in "ab"]
        self.ends = [f"v{node}{os.getpid()}" for node in "ab"]

    def start(self):
        for name in self.names:
            ip("netns", "add", name)
            os.makedirs(f"/etc/netns/{name}", exist_ok=True)
            with open(f"/etc/netns/{name}/hosts", "w") as hosts:
                hosts.write("127.0.0.1 localhost\n10.77.0.1 node-a\n10.77.0.2 node-b\n")
        ip("link", "add", self.ends[0], "type", "veth", "peer", "name", self.ends[1])
        for number, (name, end) in enumerate(zip(self.names, self.ends, strict=True), start=1):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", end)
            ip("-n", name, "addr", "add", f"fd77::{number}/64", "dev", end, "nodad")
            # the first interface, which leads nowhere
            ip("-n", name, "link", "add", "aa0", "type", "veth", "peer", "name", "aa1")
            ip("-n", name, "addr", "add", f"10.99.0.{number}/24", "dev", "aa0")
            ip("-n", name, "link", "set", "aa0", "up")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", end, "up")

    def cut(self):
        ip("-n", self.names[1], "link", "set", self.ends[1], "down")

    def stop(self):
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            subprocess.run(["rm", "-rf", f"/etc/netns/{name}"], check=True)


@pytest.fixture
def nodes():
    launchers.need(["iproute2"], "ip")
    if (done := subprocess.run(["ip", "netns", "add", "probe"], capture_output=True, text=True)).returncode:
        pytest.skip(f"cannot make network namespaces: {done.stderr.strip()}")
    ip("netns", "del", "probe")
    pair = Nodes()
    try:
        pair.start()
        yield pair
    finally:
        pair.stop()


def move_to(name):
    """Move this process into a network namespace, with the /etc/hosts that belongs to it, as `ip netns exec` does."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as namespace:
        assert libc.setns(namespace.fileno(), 0) == 0
    assert libc.unshare(CLONE_NEWNS) == 0
    assert libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) == 0
    assert libc.mount(f"/etc/netns/{name}/hosts".encode(), b"/etc/hosts", None, MS_BIND, None) == 0


def start_by_hand(pair, argv):
    """Forks of this process, the first half of the ranks on the first node; returns the world."""
    nodes = [pair.names[rank >= len(argv) // 2] for rank in range(len(argv))]
    return fork_ranks.start(training.HYBRID, argv, [{}] * len(argv), enter=lambda rank: move_to(nodes[rank]))


@pytest.mark.parametrize("kind", ADDRESSES)
def test_run_by_hand_on_two_nodes_trains_and_ends_with_its_ranks(nodes, kind, references, tmp_path):
    argv = by_hand(tmp_path / "run", [4] * 4, range(4), ADDRESSES[kind], 29500)
    result = start_by_hand(nodes, argv).wait()
    assert result.codes == [0] * 4, str(result)
    assert f"rendezvous at {ADDRESSES[kind]}:29500" in result.stdout[0]
    assert launchers.losses(tmp_path / "run") == references[4]


def on_both(pair, commands):
    """A command on each node; returns their exit codes and what they said."""
    commands = [["ip", "netns", "exec", name, *command] for name, command in zip(pair.names, commands, strict=True)]
    return at_once([partial(launchers.run, command) for command in commands])


def test_run_under_torchrun_on_two_nodes_trains(nodes, references, tmp_path):
    """By IPv6; started by hand there are IPv4 and a name, too."""
    torchrun = ["torchrun", "--nnodes", "2", "--nproc_per_node", "2", "--master_addr", ADDRESSES["IPv6"]]
    torchrun += ["--master_port", "29500", "--node_rank"]
    answers = on_both(nodes, [[*torchrun, node, *PIPELINE, *launchers.small(tmp_path / "run")] for node in "01"])
    assert [code for code, _ in answers] == [0, 0], "\n".join(said for _, said in answers)
    assert launchers.losses(tmp_path / "run") == references[4]


def test_a_cable_that_is_cut_ends_every_rank_in_time(nodes, tmp_path):
    more = dict(steps=100_000, NUM_EPOCHS=1000)
    argv = by_hand(tmp_path / "run", [4] * 4, range(4), "10.77.0.1", 29500, "--timeout", "8", **more)
    ranks = start_by_hand(nodes, argv)
    launchers.wait_until(lambda: launchers.steps_on_record(tmp_path / "run") > 3, lambda: ranks.output(0, "err"))
    nodes.cut()
    result = ranks.wait()
    assert all(code not in (0, -9) for code in result.codes), str(result)
