"""Starting and ending: every launcher's command, every mistake one line and exit code 2, one dead rank ends all."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import colossalai.legacy as colossalai
import pytest
import torch
from colossal_vit import main
from colossal_vit.checkpoint import storage
from colossal_vit.errors import UserError
from colossal_vit.hooks.metrics import MetricsHook
from colossal_vit.launch import exits, rendezvous
from colossal_vit.launch.flags import get_parser
from colossal_vit.launch.groups import launch_groups
from colossal_vit.launch.launchers import Rendezvous, find_rendezvous, first_slurm_host, ignored_flags
from colossal_vit.launch.watchdog import Watchdog, time_limit
from colossal_vit.main import start
from colossal_vit.results import read_metrics
from colossalai.context import Config
from colossalai.legacy import get_default_parser
from colossalai.legacy.core import global_context as gpc

import cifar10
import fork_ranks
import launchers
import train_hybrid
import training

FOLDER = fork_ranks.ROOT / "vit_cifar10_hybrid"
SMALL_PIPELINE = training.set_flags({**training.MODEL, "parallel.pipeline": 2})
LONG = [*SMALL_PIPELINE, *training.set_flags({"NUM_EPOCHS": 1000, "BATCH_SIZE": 16})]


# ---- Mistakes --------------------------------------------------------------------------------------------------------


def by_hand(output, *more, rank=0, port=29500, timeout=10 * fork_ranks.PATIENCE, values=SMALL_PIPELINE):
    """The command line of one of two ranks that are started by hand; what `more` has takes the place of its own."""
    own = {"--launcher": "none", "--rank": rank, "--world_size": 2, "--host": "localhost", "--port": port}
    own |= {"--config": FOLDER / training.CONFIG, "--output": output, "--timeout": timeout}
    kept = [str(word) for flag, value in own.items() if flag not in more for word in (flag, value)]
    return [*kept, *values, *more]


def sets(*pairs):
    return [part for pair in pairs for part in ("--set", pair)]


def in_one_process(tmp_path):
    """Mistakes that a rank finds before it meets the others: what is given, and what the line must say."""
    binary, pipe = tmp_path / "binary.py", tmp_path / "pipe"
    binary.write_text("\0")
    os.mkfifo(pipe)
    return [
        (["--config", "no/such/config.py"], ["no/such/config.py", "No such file"]),
        (["--config", str(tmp_path)], [str(tmp_path), "Is a directory"]),
        (["--config", str(binary)], ["binary.py", "not valid Python"]),
        (["--config", str(pipe)], [str(pipe), "no regular file"]),
        (["--config", ""], ["--config ''", "empty"]),
        (sets("BATCH_SIZE.x=3"), ["BATCH_SIZE = {'x': 3}", "whole number"]),
        (sets('parallel={"tensor":{"siz":1}}'), ["parallel.tensor.siz", "mean size?"]),
        (sets("zero=dict()"), ["zero.stage is missing", "one of 1, 2"]),
        (sets("augment.m=3", "augment.erase=0.1"), ["augment.m = 3", "'rand'"]),
        (["--launcher", "kubernetes"], ["--launcher", "kubernetes", "slurm"]),
        (["--launcher", "slurm"], ["SLURM_PROCID"]),
        (["--backend", "mpi"], ["--backend mpi", "gloo"]),
        (["--backend", ""], ["--backend ''", "gloo"]),
        (["--backend", "nccl"], ["--backend nccl", "CUDA"]),
        (["--max-steps", "0"], ["--max-steps 0", "at least 1"]),
        (["--max-steps", "-1"], ["--max-steps -1", "at least 1"]),
        (["--max-steps", str(10**30)], [f"--max-steps {10**30}", "below 2³¹"]),
        (["--port", "http"], ["--port", "http"]),
        (["--port", "70000"], ["--port 70000", "65535"]),
        (["--port", "0"], ["--port 0", "1 to 65535"]),
        (["--port", "-1"], ["--port -1", "1 to 65535"]),
        (["--host", ""], ["--host ''", "empty"]),
        (["--output", ""], ["--output ''", "empty"]),
        (["--timeout", "inf"], ["--timeout inf", "to 1e+08"]),
        (["--timeout", "1e30"], ["--timeout 1e+30", "to 1e+08"]),
        (["--timeout", "nan"], ["--timeout nan", "to 1e+08"]),
        (["--exit-code-stopped", "2"], ["--exit-code-stopped 2: must be from 0 to 255, and not 1, 2 or 130"]),
        (["--exit-code-stopped", "256"], ["--exit-code-stopped 256: must be from 0 to 255"]),
        (["--world_size", str(10**20)], [f"--world_size {10**20}", "1 to 1048576"]),
        (["--rank", "-3"], ["--rank -3", "from 0"]),
        (["--rank"], ["--rank", "expected one argument"]),
        (["--max-steps=3", "--max-steps", "0"], ["--max-steps 0", "at least 1"]),  # of two, the last one counts
        (["--resume=nowhere", "--eval-only", "--resume=never"], ["--eval-only evaluates", "--resume never"]),
        (["--eval-only", "--dry-run"], ["--dry-run: not allowed with argument --eval-only"]),
        (["--resume", ""], ["--resume ''", "empty"]),
    ]


def test_a_mistake_is_refused_in_one_line_before_ranks_meet(tmp_path):
    def refused(argv):
        try:
            return str(start(training.arguments(train_hybrid.main, argv)))
        except UserError as error:
            return f"refused: {error}"

    cases = in_one_process(tmp_path)
    commands = [by_hand(tmp_path / "output", *more, timeout=1) for more, _ in cases]
    (lines,) = fork_ranks.call(lambda: [refused(argv) for argv in commands], launched=False)
    for line, (more, words) in zip(lines, cases, strict=True):
        assert line.startswith("refused: "), more
        assert "\n" not in line, more
        assert all(word in line for word in words), (more, line)
    assert not (tmp_path / "output").exists()


def test_ranks_say_once_where_they_run_and_again_only_where_something_differs(monkeypatch):
    """Four processes on two hosts: rank 0 speaks for all."""
    hosts, said = ["a", "a", "a", "b"], []
    monkeypatch.setattr(main.RankLogger, "info", lambda log, text: log.rank == 0 and said.append(text))

    def function():
        rank = gpc.get_global_rank()
        monkeypatch.setattr(socket, "gethostname", lambda: hosts[rank])
        main._log_places(main.RankLogger(rank), Rendezvous("torch", rank, rank, 4, "a", 1234, "torchrun"), "cuda, nccl")
        return said

    end = "(cuda, nccl), started by torchrun, rendezvous at a:1234"
    lines = [f"ranks 0 to 2 of 4 on a {end}", f"rank 3 of 4 on b {end}"]
    assert fork_ranks.call(function, 4) == [lines, [], [], []]


def test_a_run_and_colossalai_have_one_config(tmp_path):
    """Benchmarks and hooks change it after the launch, and the engine reads it."""

    def is_one():
        run = start(training.arguments(train_hybrid.main, [*training.flags(), "--output", str(tmp_path)]))
        return run.config is gpc.config

    assert fork_ranks.call(is_one, launched=False) == [True]


def test_a_command_without_a_config_is_told_of_it():
    with pytest.raises(UserError, match="--config FILE is missing"):
        start(training.arguments(train_hybrid.main, []))


def test_a_mistake_on_all_ranks_ends_them_with_one_line_and_exit_code_2(tmp_path, monkeypatch):
    """One of each place where it is found: flags, config, layout, model, meeting, run directory, data."""
    monkeypatch.setattr(cifar10, "ARCHIVE", f"http://localhost:{fork_ranks.free_port()}/cifar-10-binary.tar.gz")
    occupant = socket.create_server(("127.0.0.1", 0))
    used, output = occupant.getsockname()[1], tmp_path / "output"
    (tmp_path / "file").touch()
    os.truncate(cifar10.write_images(tmp_path / "cut") / "data_batch_2.bin", 10_000)
    cases = {
        "unknown flag": (["--resum", "auto"], ["--resum"]),
        "unknown key": (sets("BATCHSIZE=3"), ["BATCHSIZE", "BATCH_SIZE"]),
        "world size": (sets("parallel.pipeline=3"), ["world size 2", "3", "start 3"]),
        "heads": (sets("NUM_HEADS=5"), ["HIDDEN_SIZE = 32", "NUM_HEADS = 5", "30 or 35"]),
        "AMP mode against a pipeline": (sets("fp16.mode=AMP_TYPE.TORCH"), ["TORCH", "pipeline", "NAIVE"]),
        "no such host": (["--host", "no-such-host.invalid"], ["--host no-such-host.invalid"]),
        "port in use": (["--host", "127.0.0.1", "--port", str(used)], ["port is", "in use"]),
        "rank out of range": (["--rank", "7"], ["--rank 7", "--world_size 2", "0 to 1"]),
        "output below a file": (["--output", f"{tmp_path}/file/run"], ["--output", "Not a directory"]),
        "output read-only": (["--output", "/proc/run"], ["--output /proc/run", "cannot be written"]),
        "mistyped never": (["--resume", "nevr"], ["--resume nevr", "neither auto nor never", "mean never?"]),
        "no data": (sets(f"DATA={str(tmp_path / 'nothing')!r}"), ["DATA", "cannot be downloaded"]),
        "damaged data": (sets(f"DATA={str(tmp_path / 'cut')!r}"), ["data_batch_2.bin", "10000 bytes", "cut off"]),
        "too few classes": (sets("NUM_CLASSES=5"), ["NUM_CLASSES = 5", "10 classes"]),
        "batch larger than the data": (sets("BATCH_SIZE=2048"), ["2048", "1437"]),
        "accumulation larger than the data": (sets("gradient_accumulation=64"), ["2048", "1437"]),
        "another script's": (["--config", str(FOLDER / training.CONFIG)], ["unknown key", "of another script?"]),
    }
    worlds = {}
    for name, (more, _) in cases.items():
        script = training.DATA_PARALLEL if name == "another script's" else training.HYBRID
        port, ranks = fork_ranks.free_port(), range(1 if "--rank" in more else 2)
        argv = [by_hand(f"{output} of {name}", *more, rank=rank, port=port) for rank in ranks]
        worlds[name] = fork_ranks.start(script, argv, [{}] * len(argv))
    for name, world in worlds.items():
        result = world.wait()
        # Where no name server answers, torch's sockets warn that a client has no name.
        lines = [line for line in "".join(result.stderr).splitlines() if not re.match(r"\[W.*c10d\]", line)]
        assert set(result.codes) == {2}, f"{name}: {result}"
        # Ranks that meet a stranger at their port cannot know of each other: there each says so.
        assert len(lines) == (2 if name == "port in use" else 1), f"{name}: {result}"
        for line in lines:
            assert re.match(r"train_(hybrid|dp)\.py: error: ", line), f"{name}: {result}"
            assert all(word in line for word in cases[name][1]), f"{name}: {result}"
    occupant.close()
    assert not list(tmp_path.glob("output*"))


ON_A_GPU = "Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.88 GiB is free."


@pytest.mark.parametrize(
    ("failing", "said"),
    [
        ("torch.empty(2**60)", "can't allocate memory: you tried to allocate 4611686018427387904 bytes; lower"),
        (f"raise torch.OutOfMemoryError('CUDA out of memory. {ON_A_GPU} Including')", f"{ON_A_GPU[:-1]}; lower"),
    ],
)
def test_too_little_memory_is_one_line(tmp_path, failing, said):
    script = tmp_path / "fails.py"
    script.write_text(
        f"import torch\nfrom colossal_vit.launch.exits import Exits\ndef main():\n    {failing}\nExits().call(main)\n"
    )
    result = fork_ranks.run(script, [])
    assert result.codes == [2], result
    (line,) = "".join(result.stderr).splitlines()
    assert said in line


def test_process_ends_after_another_only_when_its_clean_up_is_done(monkeypatch):
    """The watchdog hears of the other rank's end while this one, with the same mistake, removes its empty directory."""
    done, begun = [], threading.Event()
    monkeypatch.setattr(exits, "end_process", lambda code: done.append("ended"))
    ending = exits.Exits()
    watchdog = threading.Thread(target=lambda: begun.wait() and ending._end_after_another(2, None))

    def clean_up():
        begun.set()
        watchdog.join(0.5)  # as long as it takes if it does not wait
        done.append("cleaned up")

    ending.add_cleanup(clean_up)
    watchdog.start()
    ending.clean_up()
    watchdog.join()
    assert done == ["cleaned up", "ended"]


# ---- Launchers -------------------------------------------------------------------------------------------------------


COLOSSALAIS = {"config", "host", "port", "backend", "world_size", "rank", "local_rank"}
OURS = {"accept-changes", "compile", "debug-nan", "dry-run", "eval-only", "exit-code-stopped", "launcher", "max-steps"}
OURS |= {"on-save-error", "output", "profile", "resume", "set", "timeout", "wandb"}


def test_command_line_has_these_flags_and_no_others():
    """A new knob is a config key beside its owner."""
    found = {flag for action in get_parser()._actions for flag in action.option_strings}
    assert found == {f"--{name}" for name in {*COLOSSALAIS, *OURS, "local-rank", "help"}} | {"-h"}


def test_command_line_takes_every_flag_of_colossalai():
    ours = {flag for action in get_parser()._actions for flag in action.option_strings}
    theirs = {flag for action in get_default_parser()._actions for flag in action.option_strings}
    assert theirs <= ours
    assert get_parser().parse_args(["--local-rank", "3"]).local_rank == 3


def found(monkeypatch, argv=(), **environment):
    for name in (*fork_ranks.LAUNCHER_VARIABLES, "HOST", "SLURM_SUBMIT_HOST"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))
    return find_rendezvous(get_parser().parse_args(argv))


SLURM = dict(SLURM_STEP_ID=0, SLURM_PROCID=5, SLURM_LOCALID=1, SLURM_NTASKS=8, SLURM_JOB_ID=123456)
OPENMPI = {f"OMPI_COMM_WORLD_{name}": n for name, n in dict(RANK=1, LOCAL_RANK=1, SIZE=2, LOCAL_SIZE=2).items()}
TORCH = dict(RANK=3, LOCAL_RANK=1, WORLD_SIZE=4, MASTER_ADDR="localhost", MASTER_PORT=1234)


@pytest.mark.parametrize(
    ("argv", "environment", "expected"),
    [
        ([], TORCH, ("torch", 3, 1, 4, "localhost", 1234)),
        (["--port", "99"], {**SLURM, "HOST": "127.0.0.1"}, ("slurm", 5, 1, 8, "127.0.0.1", 99)),
        # torchrun has made the rendezvous: flags of the script come too late
        (
            ["--host", "no-such-host.invalid", "--port", "99", "--rank", "0"],
            TORCH,
            ("torch", 3, 1, 4, "localhost", 1234),
        ),
        ([], {**SLURM, "SLURM_NODELIST": "localhost"}, ("slurm", 5, 1, 8, "localhost", 20000 + 123456 % 20000)),
        (
            [],  # a step on some of the job's nodes
            {**SLURM, "SLURM_NODELIST": "other,localhost", "SLURM_STEP_NODELIST": "localhost"},
            ("slurm", 5, 1, 8, "localhost", 20000 + 123456 % 20000),
        ),
        (
            [],
            {**SLURM, "SLURM_NODELIST": "localhost", "HOST": "login1.site", "SLURM_SUBMIT_HOST": "login1"},
            ("slurm", 5, 1, 8, "localhost", 20000 + 123456 % 20000),
        ),
        ([], {**SLURM, **TORCH}, ("torch", 3, 1, 4, "localhost", 1234)),
        ([], OPENMPI, ("openmpi", 1, 1, 2, "localhost", 29500)),
        (["--host", "127.0.0.1"], OPENMPI, ("openmpi", 1, 1, 2, "127.0.0.1", 29500)),
        (
            ["--rank", "1", "--world_size", "2", "--host", "::1", "--port", "7", "--local-rank", "1"],
            {},
            ("none", 1, 1, 2, "::1", 7),
        ),
        (["--launcher", "none"], TORCH, ("none", 0, 0, 1, "localhost", None)),
        # mpirun inside a job: what srun started are its daemons
        ([], {**SLURM, **OPENMPI}, ("openmpi", 1, 1, 2, "localhost", 29500)),
        # on several nodes, where rank 0 is on the first one of the job
        (
            [],
            {**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": 1, "SLURM_NODELIST": "localhost,other"},
            ("openmpi", 1, 1, 2, "localhost", 29500),
        ),
        # the shells of salloc and sbatch, of a job with one task; then one process of a larger job, on purpose
        ([], {"SLURM_JOB_ID": 7, "SLURM_NTASKS": 1, "SLURM_PROCID": 0}, ("none", 0, 0, 1, "localhost", None)),
        ([], {"SLURM_JOB_ID": 7, "SLURM_STEP_ID": 4294967290, "SLURM_PROCID": 0}, ("none", 0, 0, 1, "localhost", None)),
        (["--launcher", "none"], {"SLURM_JOB_ID": 7, "SLURM_NTASKS": 4}, ("none", 0, 0, 1, "localhost", None)),
    ],
)
def test_a_rendezvous_is_read_from_flags_and_environment(monkeypatch, argv, environment, expected):
    at = found(monkeypatch, argv, **environment)
    *same, port = (at.launcher, at.rank, at.local_rank, at.world_size, at.host, at.port)
    assert tuple(same) == expected[:-1]
    assert port == (expected[-1] or port)


COMPONENT = {**SLURM, "SLURM_JOB_ID_HET_GROUP_0": 123456}


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (SLURM, {**SLURM, "SLURM_PROCID": 6}, True),
        (SLURM, {**SLURM, "SLURM_STEP_ID": 1}, False),
        (SLURM, {**SLURM, "SLURM_STEP_ID": 20}, False),
        (SLURM, {**SLURM, "SLURM_JOB_ID": 123457}, False),
        # tasks of an array have a number in common, and jobs of their own; components of a job have the first one's
        ({**SLURM, "SLURM_ARRAY_JOB_ID": 9}, {**SLURM, "SLURM_ARRAY_JOB_ID": 9, "SLURM_JOB_ID": 123457}, False),
        (COMPONENT, {**COMPONENT, "SLURM_JOB_ID": 123457}, True),
        ({**OPENMPI, "PMIX_NAMESPACE": "231997441"}, {**OPENMPI, "PMIX_NAMESPACE": "231997441"}, True),
        ({**OPENMPI, "PMIX_NAMESPACE": "231997441"}, {**OPENMPI, "PMIX_NAMESPACE": "231932929"}, False),
        ({**OPENMPI, "PMIX_NAMESPACE": "prterun-a-17@1"}, {**OPENMPI, "PMIX_NAMESPACE": "prterun-a-18@1"}, False),
    ],
)
def test_each_step_and_each_mpirun_is_a_run_with_a_port_of_its_own(monkeypatch, one, other, same):
    runs = [found(monkeypatch, ["--host", "localhost"], **environment) for environment in (one, other)]
    assert (runs[0].run == runs[1].run) == (runs[0].port == runs[1].port) == same


@pytest.mark.parametrize(
    ("environment", "ignored"),
    [
        (TORCH, ["--rank", "--world_size", "--host", "--port"]),
        ({**SLURM, "HOST": "localhost"}, ["--rank", "--world_size"]),
        ({}, []),
    ],
)
def test_flags_that_the_launcher_has_settled_are_named(monkeypatch, environment, ignored):
    argv = ["--rank", "0", "--world_size", "2", "--host", "localhost", "--port", "99"]
    assert ignored_flags(get_parser().parse_args(argv), found(monkeypatch, argv, **environment)) == ignored


@pytest.mark.parametrize(
    ("node_list", "host"),
    [
        ("gpu7", "gpu7"),
        ("gpu[03-05,9],login", "gpu03"),
        ("a,b", "a"),
        ("n[1,3]", "n1"),
        ("r1-n[2-4]x", "r1-n2x"),
        ("rack[1-2]node[01-10]", "rack1node01"),
        ("tux[0-3][1-4],login", "tux01"),
        ("r[2,4]n[7,9]-ib,r5n1-ib", "r2n7-ib"),
    ],
)
def test_the_first_host_of_a_node_list_is_found(node_list, host):
    assert first_slurm_host(node_list) == host


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"SLURM_JOB_ID": 7, "SLURM_NTASKS": 4}, "type `srun bash ./scripts/train_slurm.sh`, or add --launcher none"),
        ({**SLURM, "SLURM_PTY_PORT": 1, "SLURM_NNODES": 2}, "leave the shell and type `srun --nodes 2 --ntasks 8 bash"),
        ({"LOCAL_RANK": 0}, "lacks a number in one of RANK, LOCAL_RANK, WORLD_SIZE, MASTER_PORT"),
        ({**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": 1}, "mpirun on several nodes needs --host, the node of rank 0"),
    ],
)
def test_conflicting_signs_are_refused_with_what_to_type(monkeypatch, environment, words):
    with pytest.raises(UserError, match=re.escape(words)):
        found(monkeypatch, **environment)


def has_ipv6():
    """Whether this machine has ::1: containers often have no IPv6."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("host", "addresses"),
    [("127.0.0.1", ["127.0.0.1"]), ("::1", ["::1"]), ("here", ["127.0.0.1", "127.0.0.2"]), ("router", ["127.0.0.1"])],
)
def test_rank_0_listens_at_the_address_that_others_look_up(monkeypatch, host, addresses):
    """A name that is 127.0.1.1 here is something else to the others; so is a router's address, which is not ours."""
    if host == "::1" and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    known = {"here": "127.0.1.1", "router": "192.0.2.1"}
    original = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda name, *args, **more: original(known.get(name, name), *args, **more)
    )
    with rendezvous.listen(host, 0) as listener:
        port = listener.getsockname()[1]
        open_at = []
        for address in ("127.0.0.1", "127.0.0.2", "::1"):
            try:
                socket.create_connection((address, port), timeout=fork_ranks.PATIENCE).close()
                open_at.append(address)
            except OSError:
                pass
    assert open_at == addresses if host not in known else set(addresses) <= set(open_at)


def test_interface_towards_an_address_is_lo_or_the_routes():
    names = {name for _, name in socket.if_nameindex()}
    assert rendezvous.interface_towards("localhost") == "lo"
    assert rendezvous.interface_towards("192.0.2.7") in names | {None}


def test_ranks_started_by_hand_train(tmp_path):
    port = fork_ranks.free_port()
    argv = [by_hand(tmp_path / "run", "--max-steps", "2", rank=rank, port=port) for rank in range(2)]
    result = fork_ranks.start(training.HYBRID, argv, [{}, {}]).wait()
    assert result.codes == [0, 0], str(result)
    assert len(read_metrics(tmp_path / "run")[0]) == 2


def test_a_new_run_takes_the_next_free_directory(tmp_path):
    for _ in range(3):
        argv = [*training.flags(), "--output", str(tmp_path / "run"), "--max-steps", "1", "--resume", "never"]
        assert fork_ranks.run(training.HYBRID, argv).codes == [0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.1", "run.2"]
    assert all(len(read_metrics(path)[0]) == 1 for path in tmp_path.iterdir())


# ---- When one rank dies ----------------------------------------------------------------------------------------------


def training_world(world_size, tmp_path, *more):
    """Ranks started by hand that train for long, running."""
    more = ["--world_size", str(world_size), *more]
    port = fork_ranks.free_port()
    argv = [by_hand(tmp_path, *more, rank=rank, port=port, values=LONG) for rank in range(world_size)]
    ranks = fork_ranks.start(training.HYBRID, argv, [{}] * world_size)
    said = lambda: [ranks.output(rank, "err") for rank in range(world_size)]  # noqa: E731
    launchers.wait_until(lambda: launchers.steps_on_record(tmp_path) >= 3, said)
    return ranks


@pytest.mark.parametrize(("world_size", "victim"), [(2, 0), (2, 1), (4, 0), (4, 2)])
def test_killed_rank_ends_the_others(world_size, victim, tmp_path):
    ranks = training_world(world_size, tmp_path)
    os.kill(ranks.pids[victim], signal.SIGKILL)
    result = ranks.wait()
    assert result.codes[victim] == -signal.SIGKILL
    assert all(code == 1 for rank, code in enumerate(result.codes) if rank != victim), str(result)
    lines = [
        line for text in result.stderr for line in text.splitlines() if f"rank {victim} " in line and "died" in line
    ]
    assert len(lines) == 1, str(result)
    assert "Traceback" not in "".join(result.stderr), str(result)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR1, 75), (signal.SIGTERM, 143)])
def test_told_to_stop_all_ranks_end_after_the_same_step(number, code, tmp_path, monkeypatch):
    """Also where the rank that keeps the record is late: the others wait until the step is on it."""
    original = MetricsHook.after_train_iter

    def late(hook, *args):
        time.sleep(0.3 if hook.writes else 0)
        original(hook, *args)

    monkeypatch.setattr(MetricsHook, "after_train_iter", late)
    ranks = training_world(2, tmp_path, *(["--exit-code-stopped", str(code)] if code != 75 else []))
    os.kill(ranks.pids[1], number)
    result = ranks.wait()
    assert result.codes == [code, code], str(result)
    (line,) = "".join(result.stderr).splitlines()
    step = read_metrics(tmp_path)[0][-1]["step"]
    saved = tmp_path / "checkpoints" / f"step-{step:08d}"
    said = f"stopped by {number.name} after step {step}, saved as {saved}"
    assert line == f"train_hybrid.py: {said}; exit code {code}: the same command resumes it"
    assert storage.Checkpoint(saved).state["step"] == step


def test_killed_rank_ends_the_job_under_torchrun(tmp_path):
    argv = [os.path.join(os.path.dirname(sys.executable), "torchrun"), "--standalone", "--nproc_per_node=2"]
    argv += ["train_hybrid.py", "--config", training.CONFIG, "--output", str(tmp_path), *LONG, *fork_ranks.FOREVER]
    log = tmp_path / "log"
    with (
        open(log, "w") as out,
        subprocess.Popen(argv, cwd=FOLDER, env=launchers.environment(), stdout=out, stderr=out) as job,
    ):
        launchers.wait_until(lambda: launchers.steps_on_record(tmp_path) >= 3, log.read_text)
        workers = {int(r): int(p) for p, r in processes_of(job.pid)}
        os.kill(workers[1], signal.SIGKILL)
        code = job.wait(timeout=fork_ranks.PATIENCE)
    assert code != 0
    said = r"rank 1 \(.*\) died|rank +: 1 \(local_rank: 1\)\s+exitcode +: -9"  # by rank 0, or by torchrun's summary
    assert re.search(said, log.read_text()), log.read_text()
    assert not any(os.path.exists(f"/proc/{pid}") for pid in workers.values())


def processes_of(parent):
    """(process, RANK) of the children of a process."""
    for pid in open(f"/proc/{parent}/task/{parent}/children").read().split():  # noqa: SIM115
        variables = dict(v.split("=", 1) for v in open(f"/proc/{pid}/environ").read().split("\0") if "=" in v)  # noqa: SIM115
        yield pid, variables["RANK"]


def test_training_goes_on_where_rank_0_cannot_listen():
    """The host may be an address that is not the machine's own, behind a router for example."""

    def function():
        nobodys = "192.0.2.1"  # reserved for documentation
        peers = Watchdog(torch.distributed.get_rank(), 2, nobodys, end=None)
        peers.leave()
        torch.distributed.barrier()  # rank 0 keeps the store that the other still asks
        return peers.connections

    assert fork_ranks.call(function, 2) == [[], []]


def test_a_bug_on_one_rank_ends_the_others(tmp_path, monkeypatch):
    """An exception that only rank 1 meets: its traceback, nobody waits for it, and no empty run directory is left."""
    original = cifar10.read

    def read(root, train):
        if torch.distributed.get_rank() == 1:
            raise RuntimeError("a bug")
        return original(root, train)

    monkeypatch.setattr(cifar10, "read", read)
    output = tmp_path / "run"
    argv = ["--config", training.CONFIG, "--output", str(output), *SMALL_PIPELINE, *fork_ranks.FOREVER]
    result = fork_ranks.run(training.HYBRID, argv, 2)
    assert result.codes == [1, 1], str(result)
    assert "RuntimeError: a bug" in result.stderr[1]
    assert "Traceback" not in result.stderr[0]
    assert not output.exists()


def test_gradient_that_is_not_finite_stops_all_before_the_update(tmp_path):
    values = {**training.MODEL, "parallel.pipeline": 2, "LEARNING_RATE": 1e30, "clip_grad_norm": 0}
    argv = ["--config", training.CONFIG, "--output", str(tmp_path), *training.set_flags(values)]
    result = fork_ranks.run(training.HYBRID, argv, 2)
    lines = "".join(result.stderr).splitlines()
    assert result.codes == [1, 1], str(result)
    assert len(lines) == 1, str(result)
    steps = read_metrics(tmp_path)[0]
    assert f"step {len(steps) + 1}: the gradient is not finite" in lines[0]


def test_a_process_that_goes_away_while_it_is_looked_at_has_ended(monkeypatch):
    """/proc says so in one of two ways."""
    child = subprocess.Popen(["sleep", str(fork_ranks.PATIENCE)])

    def read_text(path):
        with open(path) as file:
            child.kill()
            child.wait()
            return file.read()

    monkeypatch.setattr(Path, "read_text", read_text)
    assert launchers.has_ended(child.pid)
    monkeypatch.undo()
    assert launchers.has_ended(child.pid)


def test_a_rank_does_not_wait_forever_for_process_groups(capfd):
    """gloo's own waits add up to five times --timeout when a rank dies at the wrong moment."""
    pid = os.fork()
    if pid == 0:
        with time_limit(0.1):
            time.sleep(fork_ranks.PATIENCE)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    assert "the process groups do not exist after 0.1 s: a rank died" in capfd.readouterr().err
    pid = os.fork()
    if pid == 0:
        with time_limit(2.0):
            pass
        time.sleep(3.0)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, "the limit outlived its block"


@pytest.mark.parametrize("launcher", ["torch", "slurm", "openmpi", "none"])
def test_groups_of_a_launcher_are_made_by_colossalais_function_for_it(launcher, monkeypatch):
    called = []
    for name in ("launch", "launch_from_torch", "launch_from_slurm", "launch_from_openmpi"):
        monkeypatch.setattr(colossalai, name, lambda name=name, **options: called.append((name, options["seed"])))
    for name in ("SLURM_NTASKS", "SLURM_NPROCS", "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")  # and so as it was, once the test is over
    place = Rendezvous(launcher, 1, 1, 2, "localhost", 29500)
    launch_groups(Config({"SEED": 7}), place, "gloo", None, 60.0, torch.device("cpu"))
    assert called == [("launch" if launcher == "none" else f"launch_from_{launcher}", 7)]
